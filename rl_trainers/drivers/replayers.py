"""Replayers: what a driver has observed, given back to train on.

They hold host arrays, keyed by ``env_id``, and are not thread safe. An unroll that a replayer observes
continues the environment's last one if it begins with that one's last observation. Where it does not, or
where :meth:`Replayer.restart` was called in between, the replayer puts a *cut* there: a row with mask 0 that
holds the true successor of the row before, as a reset row does, so that nothing bootstraps across it.
"""

from __future__ import annotations

import difflib
from typing import Any

import gin
import jax
import numpy as np

from rl_trainers.drivers.metrics import in_order
from rl_trainers.supervised import check_counts
from rl_trainers.types import EnvInfo, PyTree, Rollout, TimeStep


class Replayer:
    """What all replayers do."""

    _batch_size = 0

    def observe(self, rollout: Rollout, env_id: Any) -> None:
        """Takes an unroll in.

        Args:
            rollout: host arrays ``[T, B]``.
            env_id: i32 ``[B]``; where one is repeated, its columns are unrolls that follow one another.

        Raises:
            ValueError: shapes, structure or numbers do not fit.
        """
        raise NotImplementedError

    def replay(self, n: int, length: int) -> Rollout:
        """Draws ``n`` sequences of neighbouring rows, ``[length, n]``, if the replayer samples."""
        raise NotImplementedError(
            f"{type(self).__name__} does not sample: train on all of it, or use exp_replayer='uniform'"
        )

    def replay_all(self) -> Rollout:
        """Everything, rows in time order."""
        raise NotImplementedError

    def clear(self) -> None:
        """Forgets what was observed."""
        raise NotImplementedError

    def restart(self, env_id: Any) -> None:
        """Says that these environments begin anew: their next unrolls continue nothing."""

    @property
    def batch_size(self) -> int:
        """Sequences in a mini-batch if nobody says how many: columns of :meth:`replay_all`.

        Raises:
            RuntimeError: that is not known before something was observed.
        """
        if not self._batch_size:
            raise RuntimeError(f"{type(self).__name__}: batch_size is not known before the first observe")
        return self._batch_size

    @property
    def total_size(self) -> int:
        """Rows stored, of all environments together."""
        raise NotImplementedError


class OneTimeReplayer(Replayer):
    """Holds the newest rollout alone and gives it back once, column for column as it was observed.

    Every row can be trained, the last one bootstraps from ``last_observation``.
    """

    def __init__(self) -> None:
        self._rollout: Rollout | None = None

    def observe(self, rollout: Rollout, env_id: Any) -> None:
        """See :class:`Replayer`; takes the place of what was observed before."""
        _check_columns(rollout, env_id)
        self._rollout, self._batch_size = rollout, rollout.steps.mask.shape[1]

    def replay_all(self) -> Rollout:
        """The rollout ``[T, B]`` that was observed last.

        Raises:
            RuntimeError: nothing was observed since the last call.
        """
        if self._rollout is None:
            raise RuntimeError("one_time: nothing was observed since the last replay_all")
        rollout, self._rollout = self._rollout, None
        return rollout

    def clear(self) -> None:
        """See :class:`Replayer`."""
        self._rollout = None

    @property
    def total_size(self) -> int:
        """See :class:`Replayer`."""
        return 0 if self._rollout is None else self._rollout.steps.mask.size


class _RingReplayer(Replayer):
    def __init__(self, total_envs: int, capacity: int):
        self._ring = _Ring(total_envs, capacity)

    def restart(self, env_id: Any) -> None:
        self._ring.broken[env_id] = True

    @property
    def total_size(self) -> int:
        return int(self._ring.size.sum())


@gin.configurable(module="rl_trainers.drivers")
class UniformReplayer(_RingReplayer):
    """Holds the newest ``max_length`` rows of every environment.

    Args:
        total_envs: single environments, whose ids are ``0 .. total_envs - 1``.
        max_length: rows to hold of each; reset rows count.
        seed: what draws sequences begins with, an int or a generator.

    Raises:
        ValueError: an argument is less than 1.
    """

    def __init__(self, total_envs: int, max_length: int = 1024, seed: int | np.random.Generator = 0):
        check_counts(1, total_envs=total_envs, max_length=max_length)
        super().__init__(total_envs, max_length)
        self.rng, self._batch_size = np.random.default_rng(seed), total_envs

    def observe(self, rollout: Rollout, env_id: Any) -> None:
        """See :class:`Replayer`."""
        self._ring.add(rollout, env_id)

    def replay(self, n: int, length: int) -> Rollout:
        """Draws sequences with replacement.

        Of each of the ``E`` environments come ``n // E``, the others from different environments drawn at
        random; all starts in an environment are equally likely. Sequences cross the ends of episodes, never
        the newest row.

        Args:
            n: how many.
            length: ``L``, rows of each; all environments must hold as many.

        Returns:
            A rollout ``[L, n]``.

        Raises:
            RuntimeError: nothing of an environment is stored.
            ValueError: an environment holds fewer rows, or an argument is less than 1.
        """
        check_counts(1, n=n, length=length)
        size = self._ring.size
        if not size.min():
            raise RuntimeError(
                f"uniform: nothing was observed of environment {size.argmin()} yet; collect more, as "
                "collect_initially does"
            )
        if size.min() < length:
            raise ValueError(
                f"length: environment {size.argmin()} holds {size.min()} rows, which is less than "
                f"length={length}; collect more first, or use a length of at most {size.min()}"
            )
        each, rest = divmod(n, len(size))
        others = self.rng.choice(len(size), rest, replace=False)
        env = np.concatenate([np.repeat(np.arange(len(size)), each), others])
        start = self.rng.integers(size[env] - length + 1)
        return self._ring.gather(start + np.arange(length + 1)[:, None], env)

    def replay_all(self) -> Rollout:
        """All rows ``[size, E]``, the oldest first; column ``i`` is environment ``i``.

        Raises:
            RuntimeError: nothing is stored.
            ValueError: environments hold different numbers of rows.
        """
        size = self._ring.size
        if not size.any():
            raise RuntimeError("uniform: nothing was observed since the last clear")
        if size.min() != size.max():
            raise ValueError(
                f"replay_all: environment {size.argmin()} holds {size.min()} rows and environment "
                f"{size.argmax()} holds {size.max()}; train on samples of them instead"
            )
        return self._ring.gather(np.arange(size[0] + 1)[:, None], np.arange(len(size)))

    def clear(self) -> None:
        """See :class:`Replayer`."""
        self._ring.size[:] = 0


class CycleOneTimeReplayer(_RingReplayer):
    """Gives back every row once, each environment's newest one only with the unroll that comes next.

    That row's observation is what the sequence bootstraps from. Thus the first unroll of an environment gives
    ``T - 1`` rows and each later one ``T``: the last row of the one before and ``T - 1`` new ones.

    Args:
        total_envs: single environments, whose ids are ``0 .. total_envs - 1``.
        num_envs: batched environments that these belong to.
        unroll_length: ``T``, rows of an unroll; others are taken too.
        learn_queue_cap: unrolls of batched environments that are observed at once.

    Raises:
        ValueError: an argument is less than 1, ``num_envs`` no multiple of ``learn_queue_cap`` or
            ``total_envs`` none of ``num_envs``.
    """

    def __init__(
        self, total_envs: int, num_envs: int = 1, unroll_length: int = 8, learn_queue_cap: int = 1
    ) -> None:
        check_counts(
            1,
            total_envs=total_envs,
            num_envs=num_envs,
            unroll_length=unroll_length,
            learn_queue_cap=learn_queue_cap,
        )
        _check_multiple("num_envs", num_envs, "learn_queue_cap", learn_queue_cap)
        _check_multiple("total_envs", total_envs, "num_envs", num_envs)
        super().__init__(total_envs, unroll_length + 1)
        self._observed, self._is_new = np.zeros(0, np.int64), False

    def observe(self, rollout: Rollout, env_id: Any) -> None:
        """See :class:`Replayer`.

        Raises:
            RuntimeError: what was observed before was not given back yet.
        """
        if self._is_new:
            raise RuntimeError("cycle_one_time: observed twice without a replay_all in between")
        env_id = _check_columns(rollout, env_id)
        turns = in_order(env_id)
        # The row that was kept, and for every unroll its rows and perhaps a cut.
        self._ring.grow(1 + len(turns) * (len(rollout.steps.mask) + 1))
        self._ring.add(rollout, env_id)
        self._observed, self._is_new, self._batch_size = env_id[turns[0]], True, len(turns[0])

    def replay_all(self) -> Rollout:
        """The rows ``[L, B']`` of the environments that were observed last, in the order of their columns.

        Where environments have different numbers of rows, padding with mask 0 follows the last one, as
        :func:`rl_trainers.rollout.pad` appends it.
        ``L`` is 1 at least.

        Raises:
            RuntimeError: nothing was observed since the last call.
        """
        if not self._is_new:
            raise RuntimeError("cycle_one_time: nothing was observed since the last replay_all")
        kept = self._ring.size[self._observed] - 1
        length = max(1, int(kept.max()))
        rollout = self._ring.gather(np.minimum(np.arange(length + 1)[:, None], kept), self._observed)
        self._ring.size[self._observed], self._is_new = 1, False
        padding = np.arange(length)[:, None] >= kept
        return rollout._replace(steps=_blank(rollout.steps, padding))

    def clear(self) -> None:
        """Does nothing: the newest rows are still to be trained."""


_NAMES = ("one_time", "uniform", "cycle_one_time")


def make_replayer(
    name: str,
    total_envs: int,
    num_envs: int = 1,
    unroll_length: int = 8,
    learn_queue_cap: int = 1,
    seed: int | np.random.Generator = 0,
) -> Replayer:
    """Makes the replayer that drivers call ``exp_replayer``.

    Args:
        name: ``'one_time'``, ``'uniform'`` or ``'cycle_one_time'``.
        total_envs: single environments.
        num_envs: batched environments, for ``'cycle_one_time'``, as the next two.
        unroll_length: rows of an unroll.
        learn_queue_cap: unrolls that are observed at once.
        seed: for ``'uniform'``.

    Raises:
        ValueError: there is no such replayer, or an argument does not fit it.
    """
    if name == "one_time":
        return OneTimeReplayer()
    if name == "uniform":
        return UniformReplayer(total_envs, seed=seed)
    if name == "cycle_one_time":
        return CycleOneTimeReplayer(total_envs, num_envs, unroll_length, learn_queue_cap)
    near = difflib.get_close_matches(str(name), _NAMES, 1, 0.0)[0]
    raise ValueError(f"exp_replayer: {name!r} is none of {_NAMES}; the nearest is {near!r}")


class _Ring:
    """The newest rows of every environment, each with a write position and a size of its own.

    The row at the write position is the *open row*: its observation is the successor of the newest row.

    Attributes:
        steps: :class:`TimeStep` ``[capacity + 1, E, ..]``, ``None`` before the first rollout.
        insert: i64 ``[E]``, the open row.
        size: i64 ``[E]``, rows stored.
        broken: bool ``[E]``, whether the next row continues nothing.
        policy_version: of the newest rollout.
    """

    def __init__(self, total_envs: int, capacity: int):
        self.steps: Any = None
        self.capacity = capacity
        self.insert, self.size = np.zeros((2, total_envs), np.int64)
        self.broken = np.zeros(total_envs, bool)
        self.policy_version: Any = 0

    def add(self, rollout: Rollout, env_id: Any) -> None:
        """Stores unrolls; of those longer than the capacity the newest rows."""
        env_id = _check_columns(rollout, env_id, len(self.size))
        shape = rollout.steps.mask.shape
        env_info = EnvInfo(*(np.broadcast_to(np.float32(x), shape) for x in rollout.steps.env_info))
        steps = rollout.steps._replace(env_info=env_info)
        if self.steps is None:
            first = self.capacity + 1, len(self.size)
            self.steps = jax.tree.map(lambda x: np.zeros((*first, *x.shape[2:]), x.dtype), steps)
        _check_same(self.steps, steps)
        for columns in in_order(env_id):
            self._add(steps, rollout.last_observation, columns, env_id[columns])
        self.policy_version = rollout.policy_version

    def _add(self, steps: TimeStep, last: PyTree, columns: np.ndarray, env: np.ndarray) -> None:
        steps = jax.tree.map(lambda x: x[:, columns], steps)
        opened = jax.tree.map(lambda x: x[self.insert[env], env], self.steps.observation)
        differs = self.broken[env]
        for x, y in zip(jax.tree.leaves(opened), jax.tree.leaves(steps.observation), strict=True):
            differs = differs | (x != y[0]).reshape(len(env), -1).any(axis=1)
        cut = np.flatnonzero(differs & (self.size[env] > 0))
        if len(cut):
            # Facts of the first new row stand where nothing happened, so that all numbers are valid.
            row = jax.tree.map(lambda x: x[:1, cut], steps)._replace(
                observation=jax.tree.map(lambda x: x[None, cut], opened)
            )
            self._write(_blank(row, True), env[cut])
        self._write(jax.tree.map(lambda x: x[-self.capacity :], steps), env)
        last = jax.tree.map(lambda x: x[columns], last)
        _put(self.steps.observation, (self.insert[env], env), last)
        self.broken[env] = False

    def _write(self, steps: TimeStep, env: np.ndarray) -> None:
        length, n_rows = len(steps.mask), self.capacity + 1
        _put(self.steps, ((self.insert[env] + np.arange(length)[:, None]) % n_rows, env), steps)
        self.insert[env] = (self.insert[env] + length) % n_rows
        self.size[env] = np.minimum(self.size[env] + length, self.capacity)

    def gather(self, age: np.ndarray, env: np.ndarray) -> Rollout:
        """Copies rows out.

        Args:
            age: i64 ``[L + 1, n]``, 0 for the oldest row and the size for the open one; those of the
                last row are the successors.
            env: i64 ``[n]``.
        """
        rows = (self.insert[env] - self.size[env] + age) % (self.capacity + 1)
        steps = jax.tree.map(lambda x: x[rows[:-1], env], self.steps)
        last = jax.tree.map(lambda x: x[rows[-1], env], self.steps.observation)
        return Rollout(steps, last, self.policy_version)

    def grow(self, capacity: int) -> None:
        """Makes room for as many rows of each environment, if there is less."""
        if self.steps is not None and capacity > self.capacity:
            env, more = np.arange(len(self.size)), capacity - self.capacity
            rows = (self.insert - self.size + np.arange(self.capacity + 1)[:, None]) % (self.capacity + 1)
            self.steps = jax.tree.map(
                lambda x: np.pad(x[rows, env], [(0, more)] + [(0, 0)] * (x.ndim - 1)), self.steps
            )
            self.insert = self.size.copy()
        self.capacity = max(capacity, self.capacity)


def _put(stored: PyTree, place: tuple, new: PyTree) -> None:
    for x, y in zip(jax.tree.leaves(stored), jax.tree.leaves(new), strict=True):
        x[place] = y


def _blank(steps: TimeStep, where: Any) -> TimeStep:
    """Steps in which these rows are no decisions."""
    return steps._replace(
        mask=np.where(where, np.float32(0), steps.mask),
        reward=np.where(where, np.zeros_like(steps.reward), steps.reward),
        terminated=steps.terminated & ~np.asarray(where),
        truncated=steps.truncated & ~np.asarray(where),
    )


def _check_columns(rollout: Rollout, env_id: Any, total_envs: int | None = None) -> np.ndarray:
    env_id, columns = np.asarray(env_id), rollout.steps.mask.shape[1]
    if env_id.shape != (columns,):
        raise ValueError(f"env_id: has the shape {env_id.shape}, the rollout has {columns} columns")
    if total_envs is not None and not ((env_id >= 0) & (env_id < total_envs)).all():
        raise ValueError(f"env_id: must be 0..{total_envs - 1}, got {env_id.tolist()}")
    return env_id


def _check_same(stored: TimeStep, steps: TimeStep) -> None:
    if str(jax.tree.structure(stored)) != str(jax.tree.structure(steps)):
        raise ValueError(
            f"rollout: is {jax.tree.structure(steps)}, the replayer holds {jax.tree.structure(stored)}"
        )
    for x, y in zip(jax.tree.leaves(stored), jax.tree.leaves(steps), strict=True):
        if x.shape[2:] != y.shape[2:]:
            raise ValueError(f"rollout: has rows of shape {y.shape[2:]}, the replayer holds {x.shape[2:]}")


def _check_multiple(name: str, value: int, of: str, unit: int) -> None:
    if value % unit:
        nearest = max(1, round(value / unit)) * unit
        raise ValueError(f"{name}: {value} must be a multiple of {of}={unit}; the nearest is {nearest}")
