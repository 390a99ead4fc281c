"""Unrolls of many batched environments, made by threads while the caller learns.

After the queues of ALF's asynchronous driver (https://github.com/HorizonRobotics/alf) and IMPALA
(Espeholt et al. 2018, https://arxiv.org/abs/1802.01561). Nothing here knows a trainer.
"""

from __future__ import annotations

import atexit
import collections
import functools
import logging
import operator
import queue
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from rl_trainers.drivers.driver import Observer
from rl_trainers.envs.host import HostEnv, is_object
from rl_trainers.rollout import Act, Episodes, initial_actor, unroll_host
from rl_trainers.supervised import check_counts
from rl_trainers.types import PyTree, Rollout

_log = logging.getLogger(__name__)

_STOP_SECONDS = 5.0


class Unroll(NamedTuple):
    """What one batched environment did.

    Attributes:
        env_index: which one.
        rollout: host arrays ``[T, B]``; ``policy_version`` is that of the first row.
        env_id: i32 ``[B]``, unique over all environments.
        policy_lag: publishes between the first row and :meth:`AsyncUnrolls.take`.
        episodes: that ended in it.
    """

    env_index: int
    rollout: Rollout
    env_id: np.ndarray
    policy_lag: int
    episodes: Episodes


class _Policy(NamedTuple):
    act: Act
    version: int
    number: int  # publishes before this one


class _Stopped(Exception):
    """The way out of a thread that was told to end."""


class AsyncUnrolls:
    """Threads that step ``N`` batched environments and ask a shared policy what to do.

    There is one thread per batched environment, ``num_actor_queues`` actor threads that decide for exactly
    ``actor_queue_cap`` environments at once (environment ``i`` asks actor ``i % num_actor_queues``), and one
    that calls the observers. With a capacity of 1 there is nothing to gather, and an environment's own thread
    decides in the place of its actor, one at a time. The learner is the caller. An environment whose unroll
    is not among the next ``learn_queue_cap`` to be taken waits before it starts another one.

    Some actor can always fill its batch: every environment has at most one request under way, an actor has
    at least ``N // num_actor_queues`` of them, and while the caller waits no environment does.

    Args:
        envs: ``N`` batched environments of the same ``B``; they are reset in :meth:`start` and stepped by a
            thread of their own until :meth:`stop`. They are not closed.
        policy_state: initial recurrent state ``[B, ..]`` of one batched environment, ``()`` if none.
        to_env: maps stored actions to what the environment receives.
        unroll_length: ``T``, vector steps of an unroll; reset rows count.
        num_actor_queues: actor threads; 1 by default.
        actor_queue_cap: batched environments that one call of the policy decides for; 1 by default.
        learn_queue_cap: ``Q``, unrolls that :meth:`take` returns; 1 by default. It may exceed ``N``.
        seed: of the environments; environment ``b`` of batch ``i`` has number ``i * B + b``, which is also
            its ``env_id``.
        key: u32 ``[2]``, what the actors draw from.
        observers: called in this order with every finished unroll, whether or not it is taken.
        lock_step: all environments step together and only within :meth:`take`, so that the rows are those
            that :func:`rl_trainers.rollout.unroll_host` makes of one batch of ``N * B`` environments, if
            these are seeded one by one, as with ``backend='sync'``. Needs one actor for all of them, and
            ``learn_queue_cap == N``; both are set.
        max_policy_lag: an unroll whose first row is older than so many publishes is dropped when its turn
            comes. By default four times ``ceil(N / Q) + 1``, which is the largest lag where all environments
            are equally fast and each batch is followed by one publish. An environment that is ``k`` times
            slower than the average has about ``k`` times that lag, and what it does should still be learned
            from; V-trace and clipped ratios bear it.

    Attributes:
        num_envs: ``B``.
        learn_queue_cap, max_policy_lag: as given, or what stands for it.
        lags: how many of the unrolls that were taken had a policy lag of so many publishes.
        is_stopped: whether :meth:`stop` was called or a thread has failed.
        n_finished: unrolls that were finished, and thus observed.
        n_dropped: unrolls that were too old when their turn came.

    Raises:
        ValueError: the arguments do not fit each other, named in the message.
    """

    def __init__(
        self,
        envs: Sequence[HostEnv],
        policy_state: PyTree,
        to_env: Callable[[Any], Any],
        unroll_length: int,
        num_actor_queues: int | None = None,
        actor_queue_cap: int | None = None,
        learn_queue_cap: int | None = None,
        *,
        seed: int,
        key: Any,
        observers: Sequence[Observer] = (),
        lock_step: bool = False,
        max_policy_lag: int | None = None,
    ):
        self._envs = _checked(envs)
        n, self.num_envs = len(envs), envs[0].num_envs
        caps = num_actor_queues, actor_queue_cap, learn_queue_cap
        n_actors, self._actor_cap, self.learn_queue_cap = _capacities(n, *caps, lock_step)
        check_counts(1, unroll_length=unroll_length)
        check_counts(0, max_policy_lag=max_policy_lag, seed=seed)
        self._to_env, self._unroll_length, self._observers = to_env, unroll_length, tuple(observers)
        self._policy_state, self._seed, self._lock_step = policy_state, seed, lock_step
        self._keys = [key] if n_actors == 1 else list(jax.random.split(key, n_actors))
        self.max_policy_lag = max_policy_lag
        if max_policy_lag is None:
            self.max_policy_lag = 4 * (-(-n // self.learn_queue_cap) + 1)
        self._policy: _Policy | None = None
        self._threads: list[threading.Thread] = []
        self.is_stopped = self._is_log_closed = False
        self._error: tuple[BaseException, Any] | None = None
        self._was_raised = False

        # From environments to actors and back. Each environment waits for its answer before it asks again.
        self._asked: list[list] = [[] for _ in range(n_actors)]
        self._asking = [threading.Lock() for _ in range(n_actors)]
        self._requests: list[queue.SimpleQueue] = [queue.SimpleQueue() for _ in range(n_actors)]
        self._answers: list[queue.SimpleQueue] = [queue.SimpleQueue() for _ in range(n)]
        self._begun_with: list[_Policy | None] = [None] * n

        # From environments to the learner and the observers. Unrolls are numbered as they are finished; an
        # environment goes on when its last number is below _admitted.
        lock = threading.Lock()
        self._go_on = threading.Condition(lock)
        self._has_finished = threading.Condition(lock)
        self._has_log = threading.Condition(lock)
        self._finished: collections.deque[tuple[int, Rollout, Episodes, int]] = collections.deque()
        self._unobserved: collections.deque[tuple[Rollout, np.ndarray]] = collections.deque()
        self._last_number = [-1] * n
        self._admitted = -1 if lock_step else self.learn_queue_cap
        self.n_finished = self.n_dropped = 0
        self.lags: collections.Counter[int] = collections.Counter()

    # What the caller does.

    def publish(self, act: Act, version: int) -> None:
        """Sets what the actors use from their next decision on.

        Args:
            act: decides for ``actor_queue_cap * B`` rows at once; called from several threads.
            version: optimizer steps taken by its parameters.
        """
        number = 0 if self._policy is None else self._policy.number + 1
        self._policy = _Policy(act, int(version), number)

    def start(self) -> None:
        """Resets the environments, compiles the policy, and starts the threads.

        Raises:
            RuntimeError: nothing was published, or this was called before.
        """
        if self._policy is None:
            raise RuntimeError("publish a policy before start()")
        if self._threads or self.is_stopped:
            raise RuntimeError("start() was called before; make a new object to start anew")
        size = self.num_envs
        observations = [env.reset(self._seed, i * size) for i, env in enumerate(self._envs)]
        actors = [initial_actor(obs, size, None, self._policy_state) for obs in observations]
        # Two threads that meet a new program would both compile it, and an error in it is the caller's.
        rows = [(a.observation, a.policy_state, a.needs_reset) for a in actors[: self._actor_cap]]
        observation, policy_state, needs_reset = _join(rows)
        jax.block_until_ready(self._policy.act(observation, policy_state, needs_reset, self._keys[0]))
        works = [("observers", self._observe)]
        if self._actor_cap > 1:
            works += [(f"actor {a}", functools.partial(self._decide, a)) for a in range(len(self._keys))]
        works += [(f"env {i}", functools.partial(self._step, i, actors[i])) for i in range(len(actors))]
        self._threads = [
            threading.Thread(target=self._run, args=work, name=f"rl_trainers {work[0]}", daemon=True)
            for work in works
        ]
        atexit.register(self.stop)  # threads that are in compiled code when Python ends would crash it
        for thread in self._threads:
            thread.start()

    def take(self) -> list[Unroll]:
        """Waits for the next ``learn_queue_cap`` unrolls.

        Returns:
            Them in the order in which they were finished; in lock step in that of the environments.

        Raises:
            RuntimeError: the threads do not run.
            Exception: what a thread raised, as itself, at once.
        """
        if not self._threads:
            raise RuntimeError("nothing runs yet: call start() first")
        unrolls: list[Unroll] = []
        with self._has_finished:
            self._admit(0 if self._lock_step else self.learn_queue_cap)
            while (missing := self.learn_queue_cap - len(unrolls)) > 0:
                self._check_alive()
                if len(self._finished) < missing:
                    self._has_finished.wait()
                    continue
                for _ in range(missing):
                    unrolls += self._next_unroll()
                if not self._lock_step:
                    self._admit(self.learn_queue_cap)
        self.lags.update(unroll.policy_lag for unroll in unrolls)
        return sorted(unrolls, key=operator.attrgetter("env_index")) if self._lock_step else unrolls

    def stop(self) -> None:
        """Ends the threads and lets the observers see what is finished; does nothing the second time.

        Takes as long as a step of an environment, and 5 s at most; the log names what did not end.
        """
        self._close()
        deadline = time.monotonic() + _STOP_SECONDS
        self._join_threads(self._threads[1:], deadline)
        with self._has_log:
            self._is_log_closed = True
            self._has_log.notify_all()
        self._join_threads(self._threads[:1], deadline)
        with self._has_log:
            if self._unobserved and self._error is None:
                _log.warning("observers: %d unrolls were not observed in time", len(self._unobserved))
            self._unobserved.clear()
        if self._error is not None and not self._was_raised:
            self._was_raised = True
            _log.error("a thread failed after the last take()", exc_info=self._error[0])
        atexit.unregister(self.stop)

    def tell(self) -> None:
        """Raises what a thread raised, if neither :meth:`take` nor the log has told it yet."""
        if self._error is not None and not self._was_raised:
            self._check_alive()

    def is_running(self, env_index: int) -> bool:
        """Whether a thread may still step that environment."""
        return any(t.name == f"rl_trainers env {env_index}" and t.is_alive() for t in self._threads)

    def _next_unroll(self) -> list[Unroll]:
        """The oldest finished one, or none if it is too old."""
        i, rollout, episodes, number = self._finished.popleft()
        assert self._policy is not None and self.max_policy_lag is not None
        lag = self._policy.number - number
        if lag <= self.max_policy_lag:
            return [Unroll(i, rollout, self._env_id(i), lag, episodes)]
        self.n_dropped += 1
        if self.n_dropped == 1:
            _log.warning(
                "environment batch %d: an unroll is %d publishes old and is dropped, as are others "
                "older than max_policy_lag=%d",
                *(i, lag, self.max_policy_lag),
            )
        return []

    def _admit(self, count: int) -> None:
        """Lets environments go on whose last unroll is among the next ``count``, or was taken."""
        self._admitted = self.n_finished - len(self._finished) + count
        self._go_on.notify_all()

    def _check_alive(self) -> None:
        if self._error is not None:
            self._was_raised = True
            error, traceback = self._error
            raise error.with_traceback(traceback)
        if self.is_stopped:
            raise RuntimeError("the threads are stopped")

    def _close(self) -> None:
        """Wakes all threads, whatever they wait for, and the caller."""
        with self._go_on:
            self.is_stopped = True
            for condition in (self._go_on, self._has_finished):
                condition.notify_all()
        for waited in (*self._requests, *self._answers):
            waited.put(None)

    def _join_threads(self, threads: list[threading.Thread], deadline: float) -> None:
        for thread in threads:
            if thread is threading.current_thread() or thread.ident is None:
                continue
            thread.join(max(0.0, deadline - time.monotonic()))
            if thread.is_alive():
                _log.warning("the thread %r did not end within %g s", thread.name, _STOP_SECONDS)

    def _env_id(self, i: int) -> np.ndarray:
        return np.arange(i * self.num_envs, (i + 1) * self.num_envs, dtype=np.int32)

    # What the threads do.

    def _run(self, name: str, work: Callable[[], None]) -> None:
        try:
            work()
        except _Stopped:
            pass
        except BaseException as error:  # the caller gets it, whatever it is
            error.add_note(f"raised in the thread {name!r}")
            with self._go_on:
                if self._error is None:
                    self._error = error, error.__traceback__
            self._close()

    def _step(self, i: int, actor: Any) -> None:
        """Unrolls environment ``i`` from where it stands."""
        act = functools.partial(self._ask, i)
        while True:
            self._await_turn(i)
            self._begun_with[i] = None
            rest = self._unroll_length, self._to_env
            actor, rollout, episodes = unroll_host(self._envs[i], act, actor, *rest)
            begun = self._begun_with[i]
            assert begun is not None
            rollout = rollout._replace(policy_version=np.int32(begun.version))
            with self._has_finished:
                self._last_number[i] = self.n_finished
                self.n_finished += 1
                self._finished.append((i, rollout, episodes, begun.number))
                self._unobserved.append((rollout, self._env_id(i)))
                self._has_finished.notify_all()
                self._has_log.notify_all()

    def _await_turn(self, i: int) -> None:
        with self._go_on:
            while not self.is_stopped and (
                self._last_number[i] >= self._admitted or len(self._unobserved) > len(self._envs)
            ):
                self._go_on.wait()
        if self.is_stopped:
            raise _Stopped

    def _ask(self, i: int, observation: PyTree, policy_state: PyTree, needs_reset: Any, key: Any) -> tuple:
        """The :data:`Act` of environment ``i``: its actor's."""
        actor = i % len(self._requests)
        if self._actor_cap == 1:
            return (*self._decide_alone(i, actor, (observation, policy_state, needs_reset)), key)
        with self._asking[actor]:
            asked = self._asked[actor]
            asked.append((i, (observation, policy_state, needs_reset)))
            if len(asked) == self._actor_cap:
                self._requests[actor].put(asked)
                self._asked[actor] = []
        # Asked first and looked up then: whoever stops does it the other way round.
        answer = None if self.is_stopped else self._answers[i].get()
        if answer is None:
            raise _Stopped
        policy, (action, dist_inputs, policy_state) = answer
        if self._begun_with[i] is None:
            self._begun_with[i] = policy
        return action, dist_inputs, policy_state, key

    def _decide_alone(self, i: int, a: int, rows: tuple) -> tuple:
        """Actor ``a``'s decision in the thread of environment ``i``, without handing over to another."""
        if self.is_stopped:
            raise _Stopped
        with self._asking[a]:
            policy: Any = self._policy
            *answer, self._keys[a] = policy.act(*rows, self._keys[a])
        if self._begun_with[i] is None:
            self._begun_with[i] = policy
        return jax.tree.map(np.asarray, tuple(answer))

    def _decide(self, a: int) -> None:
        """Answers batches of requests, in the order of the environments within each."""
        key, size = self._keys[a], self.num_envs
        while (asked := self._requests[a].get()) is not None:
            policy: Any = self._policy
            asked.sort(key=operator.itemgetter(0))
            *answer, key = policy.act(*_join([rows for _, rows in asked]), key)
            answer = jax.device_get(answer)
            for k, (i, _) in enumerate(asked):
                self._answers[i].put((policy, _rows(answer, k * size, size) if len(asked) > 1 else answer))
        raise _Stopped

    def _observe(self) -> None:
        while True:
            with self._has_log:
                while not self._unobserved and not self._is_log_closed:
                    self._has_log.wait()
                if not self._unobserved:
                    raise _Stopped
                rollout, env_id = self._unobserved.popleft()
                if len(self._unobserved) == len(self._envs):
                    self._go_on.notify_all()
            for observer in self._observers:
                observer(rollout, env_id)


def _join(rows: list[tuple]) -> tuple:
    """Stacks rows of several batched environments along ``B``."""
    return rows[0] if len(rows) == 1 else jax.tree.map(lambda *xs: np.concatenate(xs), *rows)


def _rows(tree: PyTree, first: int, count: int) -> PyTree:
    return jax.tree.map(lambda x: x[first : first + count], tree)


def check_distinct(envs: Sequence[Any]) -> None:
    """Refuses no environments, and one that two threads would step."""
    if not envs:
        raise ValueError("envs: is empty; at least one batched environment is needed")
    objects = [id(env) for env in envs if is_object(env)]
    if len(set(objects)) < len(objects):
        raise ValueError("envs: the same object is given twice, but each is stepped by its own thread")


def _checked(envs: Sequence[HostEnv]) -> list[HostEnv]:
    """Environments that can take turns in the same batches of the policy."""
    check_distinct(envs)
    first = envs[0]
    for i, env in enumerate(envs):
        for name in ("num_envs", "observation_space", "action_space"):
            if getattr(env, name) != getattr(first, name):
                raise ValueError(
                    f"envs: {name} of number {i} is {getattr(env, name)}, but {getattr(first, name)} of the "
                    "first; all must be alike"
                )
    return list(envs)


def _capacities(n: int, n_actors: Any, actor_cap: Any, learn_cap: Any, lock_step: bool) -> tuple:
    """``(num_actor_queues, actor_queue_cap, learn_queue_cap)`` that ``n`` environments can serve."""
    given = {"num_actor_queues": n_actors, "actor_queue_cap": actor_cap, "learn_queue_cap": learn_cap}
    check_counts(1, **given)
    if lock_step:
        for (name, value), needed in zip(given.items(), (1, n, n), strict=True):
            if value not in (None, needed):
                raise ValueError(
                    f"{name}: is {value}, but lock_step with {n} batched environments needs {needed}; "
                    "leave it out"
                )
        return 1, n, n
    n_actors, actor_cap, learn_cap = (1 if value is None else value for value in given.values())
    if n_actors * actor_cap > n:
        nearest = [f"num_envs={n_actors * actor_cap}"]
        nearest += [f"actor_queue_cap={n // n_actors}"] * (n_actors <= n)
        nearest += [f"num_actor_queues={n // actor_cap}"] * (actor_cap <= n)
        raise ValueError(
            f"num_actor_queues * actor_queue_cap: is {n_actors} * {actor_cap}, but there are only {n} "
            "batched environments, so that an actor would wait for ever; the nearest valid are "
            + ", ".join(nearest)
        )
    return n_actors, actor_cap, learn_cap
