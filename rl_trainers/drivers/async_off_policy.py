"""The asynchronous driver: threads step environments while the caller learns."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import gin
import jax
import numpy as np

from rl_trainers.drivers.driver import Observer, check_algorithm, check_fits, joined
from rl_trainers.drivers.metrics import StepMetric
from rl_trainers.drivers.off_policy import OffPolicyDriver
from rl_trainers.drivers.replayers import Replayer, make_replayer
from rl_trainers.drivers.unrolls import AsyncUnrolls, Unroll, check_distinct
from rl_trainers.envs.host import HostEnv, is_object, make_host_env
from rl_trainers.supervised import check_counts
from rl_trainers.types import Rollout


class AsyncDriver(OffPolicyDriver):
    """What drivers share whose environments are stepped while the caller learns.

    Attributes:
        unrolls: makes them; has ``publish``, ``start``, ``take`` and ``stop`` as
            :class:`rl_trainers.drivers.unrolls.AsyncUnrolls` has.
        replayer: holds what was taken, for training.
    """

    unrolls: Any
    replayer: Replayer
    _published: int | None = None
    _unroll_length = 0
    _is_started = False

    @property
    def n_dropped(self) -> int:
        """Unrolls that were too old when their turn came."""
        return self.unrolls.n_dropped

    @property
    def is_running(self) -> bool:
        """Whether something steps the environments."""
        return self._is_started and not self.unrolls.is_stopped

    @property
    def shape(self) -> tuple[int, int]:
        """``(T, Q * B)`` of what :meth:`collect` returns."""
        return self._unroll_length, self.unrolls.learn_queue_cap * self.unrolls.num_envs

    def publish(self, anew: bool = False) -> None:
        """Lets the actors use what the algorithm has learned; :meth:`collect` does so too.

        Args:
            anew: even if it has learned nothing since the last time, but acts differently.
        """
        version = int(self.algorithm.state.step)
        if anew or version != self._published:
            self.unrolls.publish(self._policy(), version)
            self._published = version

    def start(self) -> None:
        """Starts what steps the environments, with the present policy.

        After :meth:`stop` it starts anew: episodes that were running are forgotten, replay and metrics go on.

        Raises:
            RuntimeError: it was started already, or is closed.
            Exception: what had stopped it, if nobody was told so far.
        """
        if self.unrolls.is_stopped:
            self._is_started = False
            self._start_anew()
        self.publish()
        self.unrolls.start()
        self._is_started = True

    def collect(self) -> tuple[Rollout, np.ndarray]:
        """Publishes the present policy and waits for ``learn_queue_cap`` unrolls.

        Returns:
            ``(rollout [T, Q * B], env_id i32 [Q * B])``, the unrolls side by side in the order in which they
            were finished; a fast environment may be there more than once. ``policy_version`` is the oldest.

        Raises:
            RuntimeError: the driver was not started, or is stopped.
            Exception: what a thread or a worker raised, as itself.
        """
        self.publish()
        unrolls = self.unrolls.take()
        self.episodes = joined([unroll.episodes for unroll in unrolls])
        self.lags = [unroll.policy_lag for unroll in unrolls]
        rollout, env_id = side_by_side(unrolls)
        if not self.algorithm.use_rollout_state:
            rollout = rollout._replace(steps=rollout.steps._replace(policy_state=()))
        return rollout, env_id

    def run_async(self) -> int:
        """:meth:`collect`, and puts that into the replayer.

        Returns:
            ``Q * T * B``, rows taken, with reset rows.
        """
        rollout, env_id = self.collect()
        self.replayer.observe(rollout, env_id)
        return rollout.steps.mask.size

    def collect_initially(self, initial_collect_steps: int) -> int:
        """See :meth:`OffPolicyDriver.collect_initially`; calls :meth:`run_async` as often as it takes."""
        n_steps = 0
        while n_steps < initial_collect_steps:
            n_steps += self.run_async()
        return n_steps

    def run(self, *arguments: Any, **settings: Any) -> Any:
        """Not for this driver, which steps by itself.

        Raises:
            RuntimeError: always.
        """
        raise RuntimeError(f"{type(self).__name__} steps by itself: call start(), and then run_async()")

    def stop(self) -> None:
        """Ends what :meth:`start` began; observers and metrics see all that is finished; within 5 s.

        May be called at any time and again; that a thread or a worker had failed makes no difference.
        """
        self.unrolls.stop()

    def _policy(self) -> Any:
        """The present policy, as :attr:`unrolls` takes it."""
        raise NotImplementedError

    def _start_anew(self) -> None:
        """Makes :attr:`unrolls` ready for another start."""
        raise NotImplementedError

    def _restart(self, env_id: np.ndarray) -> None:
        """Tells everybody that these environments begin anew."""
        for each in (*self._observers, *self._metrics, self.replayer):
            if hasattr(each, "restart"):
                each.restart(env_id)


@gin.configurable(module="rl_trainers.drivers")
class AsyncOffPolicyDriver(AsyncDriver):
    """Steps ``N`` batched environments in threads, while the caller trains on what they have done.

    The words are those of ALF (https://github.com/HorizonRobotics/alf). The algorithm must be one that learns
    from data of policies a few updates old: with V-trace, or with ratios of the stored behaviour policy.
    Environments run in threads of this process: heavy ones belong into processes of their own
    (``backend='process'`` of the task or of :func:`rl_trainers.envs.make_host_env`).

    ::

        driver = AsyncOffPolicyDriver(algorithm=trainer, num_envs=8, learn_queue_cap=4)
        driver.start()
        try:
            for _ in range(n_iterations):
                rollout, env_id = driver.collect()  # [T, Q * B]
                trainer.train_on(rollout)
        finally:
            driver.close()

    Args:
        envs: ``N`` batched environments, of any kind that :func:`rl_trainers.envs.make_host_env` takes. Those
            that are :class:`rl_trainers.envs.HostEnv` are closed by who made them. A function in their place
            is ``env_f``, an id or an object ``env``. By default ``num_envs`` batches like the task's.
        algorithm: a trainer.
        num_actor_queues: ``A``, actor threads; batch ``i`` asks actor ``i % A``. 1 by default.
        unroll_length: ``T``, rows that an environment makes before it hands them over.
        learn_queue_cap: ``Q``, unrolls that the learner gets at once; an environment that is further ahead
            waits. 1 by default.
        actor_queue_cap: batches of environments that an actor decides for at once; with
            ``num_actor_queues`` at most ``N``, since an actor would wait for ever. 1 by default.
        observers: called from one thread of their own with every finished unroll, before the metrics.
        metrics: likewise, after the standard ones.
        exp_replayer: ``'one_time'``, ``'uniform'`` or ``'cycle_one_time'``.
        use_rollout_state: see :class:`rl_trainers.drivers.driver.Driver`.
        env: in place of ``envs``, what :func:`rl_trainers.envs.make_host_env` takes; ``num_envs`` batches of
            it are made.
        env_f: in place of ``envs``, a function that makes one batch of environments; called ``num_envs``
            times.
        num_envs: ``N``; 1 by default, and the length of ``envs`` where that is given.
        env_batch_size: ``B``, environments in a batch that ``env`` or the task makes; 1 by default for
            ``env``, and the task's number for the task.
        lock_step: act and learn in turns, as a synchronous driver over ``N * B`` environments does, with the
            same rows, if these are seeded one by one, as with ``backend='sync'`` of the task.
        max_policy_lag: publishes that an unroll may be old when its turn comes, see
            :class:`rl_trainers.drivers.unrolls.AsyncUnrolls`.
        seed: of environments and actions; they begin as those of a task with this seed and ``N * B``
            environments.

    Attributes:
        replayer: holds what was taken, for training.
        unrolls: :class:`rl_trainers.drivers.unrolls.AsyncUnrolls`, with the counts ``lags``, ``n_dropped``
            and ``n_finished``.

    Raises:
        ValueError: arguments do not fit each other, named in the message.
    """

    def __init__(
        self,
        envs: Sequence[Any] | None = None,
        algorithm: Any = None,
        num_actor_queues: int | None = None,
        unroll_length: int = 8,
        learn_queue_cap: int | None = None,
        actor_queue_cap: int | None = None,
        observers: Sequence[Observer] = (),
        metrics: Sequence[StepMetric] = (),
        exp_replayer: str = "one_time",
        use_rollout_state: bool | None = None,
        *,
        env: Any = None,
        env_f: Callable[[], Any] | None = None,
        num_envs: int | None = None,
        env_batch_size: int | None = None,
        lock_step: bool = False,
        max_policy_lag: int | None = None,
        seed: int = 0,
    ):
        check_algorithm(algorithm, "lock_step" if lock_step else "async")
        sources = {"envs": envs, "env": env, "env_f": env_f}
        self._envs, self._owned = _make_envs(sources, algorithm.task, num_envs, env_batch_size)
        try:
            size, n = self._envs[0].num_envs, len(self._envs)
            check_fits(algorithm, self._envs[0])
            policy_state = jax.device_get(algorithm.initial_policy_state(size))
            super().__init__(algorithm, n * size, observers, metrics, use_rollout_state)
            self._new_unrolls = functools.partial(
                AsyncUnrolls,
                self._envs,
                policy_state,
                algorithm.task.distribution.to_env,
                unroll_length,
                num_actor_queues,
                actor_queue_cap,
                learn_queue_cap,
                observers=[self.observe],
                lock_step=lock_step,
                max_policy_lag=max_policy_lag,
            )
            self.unrolls = self._new_unrolls(**_randomness(seed))
            learn_cap = self.unrolls.learn_queue_cap
            self.replayer = make_replayer(exp_replayer, n * size, n, unroll_length, learn_cap, seed)
        except Exception:
            self._close_owned()
            raise
        self._seed, self._n_starts, self._unroll_length = seed, 0, unroll_length

    def _policy(self) -> Any:
        return self.algorithm.actor()

    def _start_anew(self) -> None:
        self.unrolls.tell()
        self.unrolls.stop()  # a thread that failed has stopped the others, but nobody has waited for them
        busy = [i for i in range(len(self._envs)) if self.unrolls.is_running(i)]
        if busy:
            raise RuntimeError(f"envs: batches {busy} are still in a step that began before the last stop()")
        self._n_starts += 1
        self.unrolls = self._new_unrolls(**_randomness([self._seed, self._n_starts]))
        self._published = None
        self._restart(np.arange(self.total_envs))

    def close(self) -> None:
        """Stops, and closes the environments that the driver has made; again does nothing."""
        self.stop()
        self._close_owned()

    def _close_owned(self) -> None:
        for i, env in enumerate(self._envs):
            # One that hangs in a step is left alone: closing it meanwhile may crash the process.
            if id(env) in self._owned and not (hasattr(self, "unrolls") and self.unrolls.is_running(i)):
                env.close()


def _randomness(seed: Any) -> dict[str, Any]:
    """What environments and actions begin with, as a task does."""
    env_seed, _, *key = (int(x) for x in np.random.SeedSequence(seed).generate_state(4))
    return {"seed": env_seed, "key": np.array(key, np.uint32)}


def side_by_side(unrolls: list[Unroll]) -> tuple[Rollout, np.ndarray]:
    """Joins unrolls of batches along ``B``."""
    rollouts = [unroll.rollout for unroll in unrolls]
    steps = jax.tree.map(lambda *xs: np.concatenate(xs, axis=1), *[r.steps for r in rollouts])
    last = jax.tree.map(lambda *xs: np.concatenate(xs), *[r.last_observation for r in rollouts])
    version = min(rollout.policy_version for rollout in rollouts)
    return Rollout(steps, last, version), np.concatenate([unroll.env_id for unroll in unrolls])


def _make_envs(
    sources: dict[str, Any], task: Any, num_envs: int | None, size: int | None
) -> tuple[list[HostEnv], set[int]]:
    """The batched environments, and the ids of those that were made here."""
    given = [name for name, source in sources.items() if source is not None]
    if len(given) > 1:
        raise ValueError(f"{given[0]}, {given[1]}: give one of {', '.join(sources)}, or none for the task's")
    check_counts(1, num_envs=num_envs, env_batch_size=size)
    envs, env, env_f = sources.values()
    if isinstance(envs, str) or not isinstance(envs, Sequence | None):  # ALF has a function there
        envs, env, env_f = (None, None, envs) if callable(envs) else (None, envs, None)
    if size is not None and given and env is None:
        raise ValueError(f"env_batch_size: is {size}, but {given[0]} has its own; leave it out")
    makes: list[Callable[[], Any]]
    if envs is not None:
        check_distinct(envs)
        if num_envs not in (None, len(envs)):
            raise ValueError(f"num_envs: is {num_envs}, but envs has {len(envs)}; leave it out")
        makes = [functools.partial(as_host, each) for each in envs]
    elif env_f is not None:
        makes = [lambda: as_host(env_f())]
    elif env is None:
        makes = [lambda: task.make_envs(size or task.env.num_envs)]
    else:
        if is_object(env) and num_envs not in (None, 1):
            raise ValueError(
                f"env: one object cannot be num_envs={num_envs} batches, each of which is stepped by its own "
                "thread; pass an id or a factory, or num_envs=1"
            )
        makes = [lambda: as_host(env, size or 1)]
    foreign = {id(x) for x in (*(envs or ()), env)}
    made = _all_or_none(makes if envs is not None else makes * (num_envs or 1), foreign)
    return made, {id(x) for x in made} - foreign


def _all_or_none(makes: list[Callable[[], Any]], foreign: set[int]) -> list[HostEnv]:
    """Makes all, or closes what was made but for what is ``foreign``."""
    made: list[Any] = []
    try:
        for make in makes:
            made.append(make())
            check_host(made[-1])
    except Exception:
        for env in made:
            if id(env) not in foreign:
                env.close()
        raise
    return made


def check_host(env: Any) -> None:
    """Refuses environments in JAX."""
    if not isinstance(env, HostEnv):
        raise ValueError(
            f"env: {env.name} is in JAX, and its compiled unrolls need no threads; use an on-policy or a "
            "synchronous driver, or give env a factory of rl_trainers.envs.GymView"
        )


def as_host(env: Any, size: int = 1) -> HostEnv:
    """``size`` environments, unless ``env`` is a batch of them already."""
    return env if isinstance(env, HostEnv) else make_host_env(env, size)
