"""The asynchronous driver whose environments and policy run in workers of Ray, on one or many machines.

Ray (Moritz et al. 2018, https://arxiv.org/abs/1712.05889) starts, watches and ends the workers and carries
what they need and make; it is imported where a driver is made.
"""

from __future__ import annotations

import collections
import functools
import logging
import operator
import os
import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import gin
import jax
import numpy as np

from rl_trainers.acting import load, see
from rl_trainers.drivers.async_off_policy import AsyncDriver, as_host, check_host
from rl_trainers.drivers.driver import Observer, check_algorithm, check_like, check_no_window
from rl_trainers.drivers.metrics import StepMetric
from rl_trainers.drivers.replayers import OneTimeReplayer, make_replayer
from rl_trainers.drivers.unrolls import Unroll
from rl_trainers.envs.host import HostEnv, is_object
from rl_trainers.rollout import Episodes, initial_actor, unroll_host
from rl_trainers.supervised import check_counts
from rl_trainers.types import PyTree, Rollout

_log = logging.getLogger(__name__)

_STOP_SECONDS = 5.0
_SAY_SECONDS = 30.0
_QUIET = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0"}


class Recipe(NamedTuple):
    """What a worker is made of: data and functions, nothing of the trainer.

    Attributes:
        make_env: makes ``B`` environments.
        policy: see :meth:`rl_trainers.acting.Acting.export`.
        policy_state: initial recurrent state ``[B, ..]``, ``()`` if none.
        timestep_to_np: that of the task.
        to_env: maps stored actions to what the environment receives.
        num_envs: ``B``.
        unroll_length: ``T``.
        observation_space, action_space: what the environments must have.
    """

    make_env: Callable[[], Any]
    policy: bytes
    policy_state: PyTree
    timestep_to_np: Callable | None
    to_env: Callable[[Any], Any]
    num_envs: int
    unroll_length: int
    observation_space: Any
    action_space: Any


def seeds_of(seed: int, number: int, generation: int) -> tuple[int, np.ndarray]:
    """What the environments of a worker are reset with, and the key u32 ``[2]`` that it acts with.

    Args:
        seed: of all; the environments of the first generation begin as those of a task with this seed.
        number: of the worker.
        generation: how many workers with this number were there before.
    """
    env_seed = int(np.random.SeedSequence(seed).generate_state(1)[0])
    own_seed, *key = np.random.SeedSequence([seed, number, generation]).generate_state(3)
    return (int(own_seed) if generation else env_seed), np.array(key, np.uint32)


class Worker:
    """Environments and a policy in a process of their own, which acts on the CPU.

    Args:
        recipe: a list with the reference of a :class:`Recipe`; Ray would fetch a bare one before there is
            anything here that could report a failure.
        number: of the worker; its environments have the numbers ``number * B + b``.
        env_seed: of the environments.
        key: u32 ``[2]``, what it acts with.
    """

    def __init__(self, recipe: list, number: int, env_seed: int, key: np.ndarray):
        jax.config.update("jax_platforms", "cpu")
        self._recipe_ref, self._number, self._seeds = recipe, number, (env_seed, key)
        self._env: Any = None
        self._actor: Any = None
        self._published = -1

    def unroll(self, model: list, publish: int) -> tuple[Rollout, Episodes]:
        """Makes the next unroll.

        Args:
            model: leaves of the policy's parameters and statistics.
            publish: number of the publish that they are of.

        Returns:
            Host arrays ``[T, B]``, and the episodes that ended in it.
        """
        if self._env is None:
            self._begin()
        if publish != self._published:
            self._model, self._published = jax.device_put(model), publish
        recipe = self._recipe
        self._actor, rollout, episodes = unroll_host(
            self._env, self._act, self._actor, recipe.unroll_length, recipe.to_env
        )
        return rollout, episodes

    def close(self) -> None:
        """Closes the environments."""
        if self._env is not None:
            self._env.close()

    def _begin(self) -> None:
        self._recipe = recipe = import_ray().get(self._recipe_ref[0])
        self._decide, self._one = load(recipe.policy), jax.device_put(np.float32(1.0))
        self._env = env = recipe.make_env()
        check_host(env)
        check_like(recipe, env)
        if env.num_envs != recipe.num_envs:
            raise ValueError(
                f"env_batch_size: is {recipe.num_envs}, but env_f made {env.num_envs} environments"
            )
        env_seed, key = self._seeds
        observation = env.reset(env_seed, self._number * env.num_envs)
        self._actor = initial_actor(observation, env.num_envs, key, recipe.policy_state)

    def _act(self, observation: PyTree, policy_state: PyTree, needs_reset: Any, key: Any) -> tuple:
        seen = see(self._recipe.timestep_to_np, observation)
        return self._decide(self._model, seen, policy_state, needs_reset, key, self._one)


class _Policy(NamedTuple):
    model: Any  # reference of the leaves
    version: int
    number: int  # publishes before this one


class _Handle:
    """The driver's side of a worker, and the unroll that it was asked for."""

    rollout: Any  # its reference
    policy: _Policy
    turn: int  # unrolls that all workers were asked for before it

    def __init__(self, number: int, actor: Any, n_deaths: int):
        self.number, self.actor, self.n_deaths = number, actor, n_deaths


class RayUnrolls:
    """Workers of Ray, each of which makes one unroll after the other with the parameters published last.

    Args:
        recipe: what workers are made of.
        num_workers: how many to start with.
        learn_queue_cap: ``Q``, unrolls that :meth:`take` returns.
        seed: of environments and actions.
        observe: called with every finished unroll, by the caller of :meth:`take`.
        restart: called with the ids of environments that begin anew, before their next unroll.
        max_policy_lag: as of :class:`rl_trainers.drivers.unrolls.AsyncUnrolls`; by default four times
            ``ceil(N / Q) + 1`` for the present number of workers.
        max_restarts: replacements of a worker, one right after another, that are no failure.
        address: of a Ray cluster; ``None`` for the one that this process is connected to, or a local one.
        worker_options: of Ray, for each worker.

    Attributes:
        learn_queue_cap: as given.
        lags: how many of the unrolls that were taken had a policy lag of so many publishes.
        n_finished: unrolls that were finished, and thus observed.
        n_dropped: unrolls that were too old when their turn came, or were taken just before their worker
            died.
        n_restarts: workers that died and were replaced.
    """

    def __init__(
        self,
        recipe: Recipe,
        num_workers: int,
        learn_queue_cap: int,
        *,
        seed: int,
        observe: Observer,
        restart: Callable[[np.ndarray], Any],
        max_policy_lag: int | None = None,
        max_restarts: int = 3,
        address: str | None = None,
        worker_options: Mapping[str, Any] | None = None,
    ):
        check_counts(1, num_workers=num_workers, learn_queue_cap=learn_queue_cap)
        check_counts(1, unroll_length=recipe.unroll_length)
        check_counts(0, max_policy_lag=max_policy_lag, max_restarts=max_restarts, seed=seed)
        for name in {"max_restarts", "max_task_retries"} & set(worker_options or {}):
            raise ValueError(
                f"worker_options: {name} would start environments anew without a word; leave it out, and use "
                "the driver's max_restarts"
            )
        self._ray = import_ray()
        self._n = num_workers
        self.num_envs, self._seed, self._max_restarts = recipe.num_envs, seed, max_restarts
        self.learn_queue_cap, self._max_policy_lag = learn_queue_cap, max_policy_lag
        self._observe, self._restart = observe, restart
        self._workers: list[_Handle] = []
        self._generations: collections.Counter[int] = collections.Counter()
        self._policy: _Policy | None = None
        self._n_asked = 0
        self._is_started = self._is_closed = self._was_stopped = False
        self._error: BaseException | None = None
        self.lags: collections.Counter[int] = collections.Counter()
        self.n_finished = self.n_dropped = self.n_restarts = 0
        self._connected = _connect(self._ray, address)
        # Workers hardly wait for one another's CPUs on a machine that is all their own.
        options = {"num_cpus": 0 if self._connected == "local" else 1, "scheduling_strategy": "SPREAD"}
        self._options = options | dict(worker_options or {})
        try:
            self._make = self._ray.remote(Worker).options(**self._options).remote
            self._recipe = self._ray.put(recipe)
        except Exception:
            self.disconnect()
            raise

    @property
    def is_stopped(self) -> bool:
        """Whether :meth:`stop` was called last, or a worker or an observer has failed."""
        return self._was_stopped or self._error is not None

    @property
    def num_workers(self) -> int:
        """How many there are, or will be after :meth:`start`."""
        return self._n

    @property
    def max_policy_lag(self) -> int:
        """Publishes that an unroll may be old when its turn comes."""
        if self._max_policy_lag is not None:
            return self._max_policy_lag
        return 4 * (-(-self._n // self.learn_queue_cap) + 1)

    def publish(self, model: list, version: int) -> None:
        """Sets what the workers use from their next unroll on.

        Args:
            model: leaves of the policy's parameters and statistics, host arrays.
            version: optimizer steps taken by them.
        """
        number = 0 if self._policy is None else self._policy.number + 1
        self._policy = _Policy(self._ray.put(model), int(version), number)

    def start(self) -> None:
        """Starts the workers and asks each for its first unroll; after :meth:`stop` they are new ones.

        Raises:
            RuntimeError: nothing was published, the workers run, or the connection is closed.
        """
        if self._policy is None:
            raise RuntimeError("publish a policy before start()")
        if self._error is not None:
            self.stop()
        if self._workers or self._is_closed:
            raise RuntimeError("the driver is closed" if self._is_closed else "start() was called before")
        self._is_started, self._was_stopped, self._error = True, False, None
        self._add_all()

    def set_num_workers(self, n: int) -> None:
        """Starts more workers, or ends those with the highest numbers after their present unroll.

        Those that are started anew under a number have new environments with another seed.

        Raises:
            ValueError: ``n`` is less than 1.
        """
        check_counts(1, num_workers=n)
        self._n = n
        if not self._workers:  # they are not started yet
            return
        ended, self._workers = self._workers[n:], self._workers[:n]
        self._end(ended)
        self._add_all()

    def take(self) -> list[Unroll]:
        """Waits for the next ``learn_queue_cap`` unrolls.

        Returns:
            Them in the order in which they were asked for, as far as they were finished.

        Raises:
            RuntimeError: the workers do not run.
            Exception: what an environment or an observer raised, as itself; or Ray's error where a worker
                died again and again.
        """
        if self._error is not None:
            raise self._error
        if self.is_stopped:
            raise RuntimeError("the workers are stopped")
        if not self._is_started:
            raise RuntimeError("nothing runs yet: call start() first")
        unrolls: list[Unroll] = []
        while len(unrolls) < self.learn_queue_cap:
            worker = self._next_finished()
            try:
                rollout, episodes, policy = self._fetch(worker)
            except self._deaths as error:
                self._replace(worker, error)
                # A batch has no unrolls of before and after, which look as if they followed one another.
                kept = [unroll for unroll in unrolls if unroll.env_index != worker.number]
                self.n_dropped += len(unrolls) - len(kept)
                unrolls = kept
                continue
            self._ask(worker)
            self._see(worker, rollout)
            unrolls += self._if_fresh(worker, rollout, episodes, policy)
        self.lags.update(unroll.policy_lag for unroll in unrolls)
        return unrolls

    def stop(self) -> None:
        """Ends the workers, and lets the observers see what is finished; does nothing the second time.

        Takes as long as an unroll, and 5 s at most.
        """
        self._was_stopped = True
        workers, self._workers = self._workers, []
        self._end(workers)

    def disconnect(self) -> None:
        """Ends a local Ray that was started here, or the connection to another one that was made here."""
        self._is_closed = True
        if self._connected:
            self._connected = ""
            self._ray.shutdown()

    # One worker.

    @property
    def _deaths(self) -> tuple[type[Exception], ...]:
        errors = self._ray.exceptions
        names = "RayActorError WorkerCrashedError NodeDiedError ObjectLostError OutOfMemoryError"
        return tuple(getattr(errors, name) for name in names.split())

    def _env_id(self, number: int) -> np.ndarray:
        return np.arange(number * self.num_envs, (number + 1) * self.num_envs, dtype=np.int32)

    def _add_all(self) -> None:
        """As many workers as there should be."""
        for number in range(len(self._workers), self._n):
            self._add(number)

    def _add(self, number: int, n_deaths: int = 0) -> None:
        if self._generations[number]:
            self._restart(self._env_id(number))
        seeds = seeds_of(self._seed, number, self._generations[number])
        self._generations[number] += 1
        worker = _Handle(number, self._make([self._recipe], number, *seeds), n_deaths)
        self._workers.append(worker)
        self._ask(worker)

    def _ask(self, worker: _Handle) -> None:
        policy: Any = self._policy
        worker.policy, worker.turn = policy, self._n_asked
        worker.rollout = worker.actor.unroll.remote(policy.model, policy.number)
        self._n_asked += 1

    def _next_finished(self) -> _Handle:
        """Of the workers that have finished or died, the one that was asked first."""
        workers = {w.rollout: w for w in sorted(self._workers, key=operator.attrgetter("turn"))}
        while True:
            finished, _ = self._ray.wait(list(workers), num_returns=1, timeout=_SAY_SECONDS)
            if finished:
                return workers[finished[0]]
            _log.warning(
                "no unroll was finished for %g s by %d workers; each was started with %s, and free in the "
                "cluster are %s",
                *(_SAY_SECONDS, len(workers), self._options, self._ray.available_resources()),
            )

    def _fetch(self, worker: _Handle) -> tuple[Rollout, Episodes, _Policy]:
        """What it was asked for and has finished, and with which policy."""
        try:
            rollout, episodes = self._ray.get(worker.rollout)
        except self._ray.exceptions.RayTaskError as error:
            self._error = error.cause if isinstance(error.cause, Exception) else error
            traceback = re.sub(r"\x1b\[\d*m", "", str(error))  # of the worker, without colours
            self._error.add_note(f"raised in the worker {worker.number}\n{traceback}")
            raise self._error from None
        worker.n_deaths = 0
        rollout = rollout._replace(policy_version=np.int32(worker.policy.version))
        return rollout, episodes, worker.policy

    def _see(self, worker: _Handle, rollout: Rollout) -> None:
        self.n_finished += 1
        self._observe(rollout, self._env_id(worker.number))

    def _if_fresh(
        self, worker: _Handle, rollout: Rollout, episodes: Episodes, policy: _Policy
    ) -> list[Unroll]:
        newest: Any = self._policy
        lag = newest.number - policy.number
        if lag <= self.max_policy_lag:
            return [Unroll(worker.number, rollout, self._env_id(worker.number), lag, episodes)]
        self.n_dropped += 1
        log = _log.warning if self.n_dropped == 1 else _log.debug
        log(
            "worker %d: an unroll is %d publishes old and is dropped, as are others older than "
            "max_policy_lag=%d",
            *(worker.number, lag, self.max_policy_lag),
        )
        return []

    def _replace(self, worker: _Handle, error: Exception) -> None:
        if getattr(error, "actor_init_failed", False):
            error.add_note(
                f"the worker {worker.number} could not be made: it needs this package and what makes the "
                "environments, which worker_options={'runtime_env': ..} can bring to other machines"
            )
            self._error = error
            raise error
        if worker.n_deaths == self._max_restarts:
            error.add_note(
                f"the worker {worker.number} was replaced max_restarts={self._max_restarts} times in a row"
            )
            self._error = error
            raise error
        _log.warning("worker %d died and is replaced: %s", worker.number, str(error).splitlines()[0])
        self._workers.remove(worker)
        self.n_restarts += 1
        self._add(worker.number, worker.n_deaths + 1)
        self._workers.sort(key=operator.attrgetter("number"))

    def _end(self, workers: list[_Handle]) -> None:
        """Observes what they have finished, closes their environments, and ends them."""
        ray = self._ray
        if not workers or not ray.is_initialized():
            return
        closed = [worker.actor.close.remote() for worker in workers]
        try:
            ray.wait(closed, num_returns=len(closed), timeout=_STOP_SECONDS)
            rollouts = [worker.rollout for worker in workers]
            finished, _ = ray.wait(rollouts, num_returns=len(rollouts), timeout=0)
            for worker in workers:
                if worker.rollout in finished and self._error is None:
                    self._see(worker, self._fetch(worker)[0])
        except Exception:
            _log.exception("a worker or an observer failed after the last take()")
        finally:
            for worker in workers:
                ray.kill(worker.actor)


@gin.configurable(module="rl_trainers.drivers")
class RayDriver(AsyncDriver):
    """Workers of Ray step environments and act, while the caller trains on what they have done.

    It is used as :class:`rl_trainers.drivers.AsyncOffPolicyDriver` is, and needs an algorithm that learns
    from data of policies a few updates old. Each worker is a process with ``B`` environments and the policy,
    which gets the newest parameters from Ray's object store before each unroll. A worker that dies is
    replaced by one with new environments; its partial unroll is lost, and metrics and replayer are told that
    these environments begin anew. Workers need this package and what makes the environments; the trainer is
    not sent to them. Observers and metrics are called by the caller of :meth:`collect`.

    ::

        driver = RayDriver(algorithm=trainer, num_workers=8, learn_queue_cap=4)
        driver.start()
        try:
            for _ in range(n_iterations):
                rollout, env_id = driver.collect()  # [T, Q * B]
                trainer.train_on(rollout)
        finally:
            driver.close()

    Args:
        env: id or factory of an environment, see :func:`rl_trainers.envs.make_host_env`; by default the
            task's.
        algorithm: a trainer.
        num_workers: ``N``, workers to begin with.
        unroll_length: ``T``, rows that a worker makes at a time.
        learn_queue_cap: ``Q``, unrolls that the learner gets at once.
        observers: called with every finished unroll, before the metrics; those that have a method ``restart``
            are told the ids of environments that begin anew.
        metrics: likewise, after the standard ones.
        exp_replayer: ``'one_time'``, ``'uniform'`` or ``'cycle_one_time'``.
        use_rollout_state: see :class:`rl_trainers.drivers.driver.Driver`.
        env_f: in place of ``env``, a function that makes a batch of ``env_batch_size`` environments.
        env_batch_size: ``B``, environments of a worker; 1 by default for ``env`` and ``env_f``, and the
            task's number for the task.
        max_policy_lag: publishes that an unroll may be old when its turn comes, see :class:`RayUnrolls`.
        max_restarts: replacements of a worker in a row; one more death is an error.
        address: of a Ray cluster, such as ``'auto'`` or ``'ray://host:10001'``. ``None`` takes the one that
            this process is connected to, else starts a local one, which :meth:`close` ends.
        worker_options: options of Ray for each worker, such as ``{'num_cpus': 2}`` or a ``runtime_env`` that
            brings this package to other machines. A worker takes one CPU by default, and none of a local Ray
            that is started here.
        seed: of environments and actions; the environments begin as those of a task with this seed and
            ``N * B`` environments.

    Attributes:
        replayer: holds what was taken, for training.
        unrolls: :class:`RayUnrolls`, with the counts ``lags``, ``n_dropped``, ``n_finished`` and
            ``n_restarts``.

    Raises:
        ImportError: Ray is not installed.
        ValueError: arguments do not fit each other, named in the message.
    """

    def __init__(
        self,
        env: Any = None,
        algorithm: Any = None,
        num_workers: int = 1,
        unroll_length: int = 8,
        learn_queue_cap: int = 1,
        observers: Sequence[Observer] = (),
        metrics: Sequence[StepMetric] = (),
        exp_replayer: str = "one_time",
        use_rollout_state: bool | None = None,
        *,
        env_f: Callable[[], Any] | None = None,
        env_batch_size: int | None = None,
        max_policy_lag: int | None = None,
        max_restarts: int = 3,
        address: str | None = None,
        worker_options: Mapping[str, Any] | None = None,
        seed: int = 0,
    ):
        check_algorithm(algorithm, "async")
        if hasattr(algorithm, "explore"):
            raise ValueError(
                f"algorithm: workers act by the policy alone, and {type(algorithm).__name__} explores by a "
                "schedule; nearest valid value of its driver: 'async'"
            )
        import_ray()
        check_counts(1, num_workers=num_workers, env_batch_size=env_batch_size)
        make_env, size = _source(env, env_f, algorithm.task, env_batch_size)
        total_envs, self._unroll_length = num_workers * size, unroll_length
        super().__init__(algorithm, total_envs, observers, metrics, use_rollout_state)
        self.replayer = make_replayer(
            exp_replayer, total_envs, num_workers, unroll_length, learn_queue_cap, seed
        )
        self.unrolls: RayUnrolls = RayUnrolls(
            _recipe(algorithm, make_env, size, unroll_length),
            num_workers,
            learn_queue_cap,
            seed=seed,
            observe=self.observe,
            restart=self._restart,
            max_policy_lag=max_policy_lag,
            max_restarts=max_restarts,
            address=address,
            worker_options=worker_options,
        )

    @property
    def num_workers(self) -> int:
        """``N``, how many workers there are now."""
        return self.unrolls.num_workers

    def set_num_workers(self, n: int) -> None:
        """Starts more workers, or ends those with the highest numbers after their present unroll.

        Args:
            n: at least 1; and unless the replayer is ``'one_time'``, which alone does not keep rows by
                environment, at most the number of workers that the driver was made with.

        Raises:
            ValueError: ``n`` is none of these.
        """
        most = self.total_envs // self.unrolls.num_envs
        if n > most and not isinstance(self.replayer, OneTimeReplayer):
            raise ValueError(
                f"num_workers: is {n}, but the replayer was made for the environments of {most}; the nearest "
                f"is {most}, or use exp_replayer='one_time'"
            )
        self.unrolls.set_num_workers(n)

    def close(self) -> None:
        """Stops, and ends the local Ray that the driver has started; again does nothing."""
        self.stop()
        self.unrolls.disconnect()

    def _policy(self) -> list:
        state = self.algorithm.state
        return jax.device_get(jax.tree.leaves((state.params, state.model_state)))

    def _start_anew(self) -> None:
        """The workers themselves are new."""


def import_ray() -> Any:
    """Ray, if it is installed.

    Raises:
        ImportError: it is not; the message says how to install it.
    """
    try:
        import ray
    except ImportError as error:
        raise ImportError("RayDriver needs the extra 'ray': pip install 'rl_trainers[ray]'") from error
    return ray


def _connect(ray: Any, address: str | None) -> str:
    """Returns what was done: ``'local'``, the address, or nothing."""
    if address is not None:
        try:
            ray.init(address, log_to_driver=False, logging_level=logging.ERROR)
        except ConnectionError as error:
            raise ValueError(
                f"address={address!r}: {str(error).splitlines()[0]} Without an address Ray starts here."
            ) from error
        return address
    if ray.is_initialized():
        return ""
    for name, value in _QUIET.items():
        os.environ.setdefault(name, value)
    with warnings.catch_warnings():
        # JAX warns of forks, after each of which Ray starts another program at once.
        warnings.filterwarnings("ignore", "os.fork", RuntimeWarning)
        ray.init("local", include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR)
    return "local"


def _source(env: Any, env_f: Any, task: Any, size: int | None) -> tuple[Callable[[], Any], int]:
    """What makes the environments of a worker, and how many they are."""
    if env is not None and env_f is not None:
        raise ValueError("env, env_f: give one of them, or none for the task's")
    if env_f is not None:
        return functools.partial(_call, env_f), size or 1
    if env is None:
        check_host(task.env)
        size = size or task.env.num_envs
        return functools.partial(task.make_more, size), size
    if is_object(env):
        raise ValueError(
            f"env: one object, a {type(env).__name__}, cannot be in every worker; pass an id or a factory"
        )
    return functools.partial(as_host, env, size or 1), size or 1


def _call(env_f: Callable[[], Any]) -> HostEnv:
    return as_host(env_f())


def _recipe(algorithm: Any, make_env: Callable[[], Any], size: int, unroll_length: int) -> Recipe:
    check_no_window(algorithm)
    task, policy_state = algorithm.task, jax.device_get(algorithm.initial_policy_state(size))
    return Recipe(
        make_env=make_env,
        policy=algorithm.acting.export(algorithm.state, size),
        policy_state=policy_state,
        timestep_to_np=task.timestep_to_np,
        to_env=task.distribution.to_env,
        num_envs=size,
        unroll_length=unroll_length,
        observation_space=task.observation_space,
        action_space=task.action_space,
    )
