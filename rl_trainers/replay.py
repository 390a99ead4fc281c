"""The replay of whole trajectories: a ring of rows in time order, one column per environment.

A column holds what one environment did, row after row, so the successor of a row is the next row;
the row after the newest one is the *open row*: it holds the newest observation, with mask 0. Rows
count in *age*: 0 is the oldest row, ``size`` the open row.

A trajectory is a run of decisions of one environment. It ends where the episode ends, and every
``max_steps`` decisions if that is given; its successor's row then has mask 0 or belongs to the next
trajectory.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from rl_trainers.rollout import bucket
from rl_trainers.types import PyTree, Rollout, TimeStep


class Replay(NamedTuple):
    """What is stored; ``C`` = capacity + 1 rows are allocated. Arrays are written in place.

    Attributes:
        steps: :class:`TimeStep` ``[C, B, ..]``, with ``return_``.
        trajectory_id: i32 ``[C, B]``, different for every trajectory, -1 where mask is 0.
        epoch: i32 ``[C]``, -1 for rows that were removed.
        insert: the open row, where the next rows will be written.
        size: rows stored.
        n_open: i64 ``[B]``, decisions since the last end of a trajectory.
        n_ended: i32 ``[B]``, trajectories that ended.
    """

    steps: TimeStep
    trajectory_id: np.ndarray
    epoch: np.ndarray
    insert: int
    size: int
    n_open: np.ndarray
    n_ended: np.ndarray

    @property
    def capacity(self) -> int:
        """Rows that can be stored."""
        return len(self.epoch) - 1

    @property
    def num_envs(self) -> int:
        """``B``."""
        return self.trajectory_id.shape[1]

    def rows(self, age: np.ndarray) -> np.ndarray:
        """Places in the arrays of rows of the given age."""
        return (self.insert - self.size + age) % len(self.epoch)


class Segments(NamedTuple):
    """Stored trajectories, as places in a replay.

    Attributes:
        age: i64 ``[S]``, of the first row.
        column: i64 ``[S]``.
        length: i64 ``[S]``, decisions.
    """

    age: np.ndarray
    column: np.ndarray
    length: np.ndarray


def create(example: TimeStep, capacity: int) -> Replay:
    """An empty replay.

    Args:
        example: one row ``[B, ..]`` in the shapes and dtypes to store; ``return_`` is added.
        capacity: rows to allocate.
    """
    num_envs = len(example.mask)
    example = example._replace(return_=np.zeros(num_envs, np.float32))
    return Replay(
        steps=jax.tree.map(
            lambda x: np.zeros((capacity + 1, *np.shape(x)), np.asarray(x).dtype), example
        ),
        trajectory_id=np.full((capacity + 1, num_envs), -1, np.int32),
        epoch=np.full(capacity + 1, -1, np.int32),
        insert=0,
        size=0,
        n_open=np.zeros(num_envs, np.int64),
        n_ended=np.zeros(num_envs, np.int32),
    )


def add(
    replay: Replay,
    rollout: Rollout,
    epoch: int,
    *,
    gamma: float,
    max_steps: int | None = None,
    grow: bool = True,
) -> Replay:
    """Stores a rollout; consumes ``replay``.

    Rows of padding at the end are not stored. A trajectory goes on from one rollout to the next;
    where the rollout does not start at the open row's observation, all running trajectories end
    before it. ``return_`` is filled in, also for the earlier rows of running trajectories: until a
    trajectory ends, it covers the rewards that are known.

    Args:
        replay: where to store.
        rollout: host arrays ``[T, B]`` of the structure that the replay was created with.
        epoch: at least 0; belongs to all rows.
        gamma: discount factor per step, for ``return_``.
        max_steps: decisions after which a trajectory is cut while the episode goes on.
        grow: double the capacity when it is full; otherwise the oldest rows are overwritten.

    Raises:
        ValueError: if structure or shapes differ from the replay's.
    """
    rollout = trim(rollout)
    _check_fits(replay, rollout.steps)
    if not _follows(replay, rollout):
        replay = cut(replay, grow=grow)
    if not grow and len(rollout.steps.mask) > replay.capacity:
        recent = jax.tree.map(lambda x: x[-replay.capacity :], rollout.steps)
        replay = cut(replay, grow=grow)._replace(size=0)
        rollout = rollout._replace(steps=recent)
    steps = rollout.steps
    length = len(steps.mask)
    replay = _reserve(replay, length, grow)
    decided = steps.mask > 0
    steps = steps._replace(
        terminated=steps.terminated & decided, truncated=steps.truncated & decided
    )
    ends, n_open = trajectory_ends(steps, replay.n_open, max_steps)
    n_ended = np.cumsum(ends, axis=0) - ends + replay.n_ended
    ids = np.where(decided, n_ended * replay.num_envs + np.arange(replay.num_envs), -1)
    steps = steps._replace(return_=_returns(steps, ends, gamma))
    rows = (replay.insert + np.arange(length)) % len(replay.epoch)
    jax.tree.map(lambda stored, x: _set(stored, rows, x), replay.steps, steps)
    replay.trajectory_id[rows] = ids
    replay.epoch[rows] = epoch
    _extend_returns(replay, gamma, steps.return_[0] * decided[0])
    replay = replay._replace(
        insert=(replay.insert + length) % len(replay.epoch),
        size=replay.size + length,
        n_open=n_open,
        n_ended=replay.n_ended + ends.sum(0, dtype=np.int32),
    )
    _open_row(replay, rollout.last_observation, epoch)
    return replay


def trim(rollout: Rollout) -> Rollout:
    """Removes rows at the end that :func:`rl_trainers.rollout.pad` appended.

    A row without decisions is no padding if it is the reset row of all environments; then each of
    them ended its episode in the row before.
    """
    mask, done = rollout.steps.mask > 0, rollout.steps.done
    length = len(mask)
    while length > 1 and not mask[length - 1].any():
        if (mask[length - 2] & done[length - 2]).all():
            break
        length -= 1
    return rollout._replace(steps=jax.tree.map(lambda x: x[:length], rollout.steps))


def trajectory_ends(
    steps: TimeStep, n_open: np.ndarray, max_steps: int | None
) -> tuple[np.ndarray, np.ndarray]:
    """Where trajectories end.

    Args:
        steps: ``[T, B]``.
        n_open: i64 ``[B]``, decisions in the running trajectory, or episode, before the first row.
        max_steps: decisions after which a trajectory is cut; ``None`` for no limit.

    Returns:
        ``(ends bool [T, B], n_open i64 [B])``, the latter after the last row.
    """
    decided = steps.mask > 0
    done = steps.done & decided
    count = np.cumsum(decided, axis=0) + n_open
    at_done = np.maximum.accumulate(np.where(done, count, 0), axis=0)
    after = count[-1] - at_done[-1]
    if max_steps is None:
        return done, after
    before = np.concatenate([np.zeros_like(at_done[:1]), at_done[:-1]])
    return done | (decided & ((count - before) % max_steps == 0)), after % max_steps


def cut(replay: Replay, *, grow: bool = True) -> Replay:
    """Ends all running trajectories; the open row becomes a row with mask 0."""
    replay = replay._replace(n_open=np.zeros_like(replay.n_open), n_ended=replay.n_ended + 1)
    if not replay.size:
        return replay
    replay = _reserve(replay, 1, grow)
    last = jax.tree.map(lambda x: x[replay.insert].copy(), replay.steps.observation)
    epoch = replay.epoch[replay.insert]
    replay = replay._replace(
        insert=(replay.insert + 1) % len(replay.epoch),
        size=replay.size + 1,
    )
    _open_row(replay, last, epoch)
    return replay


def remove(replay: Replay, epochs: np.ndarray) -> Replay:
    """Removes epochs; room at the old end of the ring becomes free.

    Args:
        replay: consumed.
        epochs: bool ``[C]``, the rows to remove, such as ``replay.epoch < 3``.
    """
    replay.epoch[epochs] = -1
    replay.steps.mask[epochs] = 0.0
    kept = replay.epoch[replay.rows(np.arange(replay.size))] >= 0
    size = replay.size - (int(kept.argmax()) if kept.any() else replay.size)
    return replay._replace(size=size)


def epoch_ids(replay: Replay) -> list[int]:
    """Stored epochs, ascending."""
    stored = np.unique(replay.epoch[replay.rows(np.arange(replay.size))])
    return [int(epoch) for epoch in stored if epoch >= 0]


def ordered(replay: Replay, epochs: Sequence[int] | None = None) -> Rollout:
    """Copies everything out in time order, the oldest row first.

    Args:
        replay: what to copy.
        epochs: the epochs wanted; the rows of others get mask 0.

    Returns:
        A rollout ``[capacity, B]``: the same shape until the capacity grows. Rows that are not
        filled have mask 0; the row after the newest one holds its successor's observation, as does
        ``last_observation``.
    """
    age = np.arange(replay.capacity)
    rows = replay.rows(age)
    steps = jax.tree.map(lambda x: x[rows], replay.steps)
    wanted = (age < replay.size) & _wanted(replay, rows, epochs)
    last = jax.tree.map(lambda x: x[replay.insert].copy(), replay.steps.observation)
    return Rollout(steps._replace(mask=steps.mask * wanted[:, None]), last)


def sample_slices(
    rng: np.random.Generator,
    replay: Replay,
    n: int,
    length: int,
    margin: int = 0,
    *,
    epochs: Sequence[int] | None = None,
    per_trajectory: bool = False,
) -> Rollout:
    """Draws slices of trajectories, with replacement.

    A trajectory of S decisions has ``max(1, S + margin - length + 1)`` slices: every slice holds at
    least ``length - margin`` decisions, or the whole trajectory if it is shorter.

    Args:
        rng: advanced.
        replay: what to draw from.
        n: ``N``, how many.
        length: ``L``, rows of a slice, margin included.
        margin: rows that may lie after the end of the trajectory, less than ``length``.
        epochs: the epochs wanted; ``None`` for all.
        per_trajectory: draw a trajectory uniformly, then a slice of it; otherwise all slices are
            equally likely.

    Returns:
        See :func:`gather`.

    Raises:
        ValueError: if no decision is stored in these epochs, or if the margin does not fit.
    """
    if not 0 <= margin < length:
        raise ValueError(f"margin is {margin}; with length {length} it must be 0..{length - 1}.")
    need = length - margin
    if per_trajectory:
        age, column = _draw_exact(rng, replay, n, need, epochs, per_trajectory)
    else:
        age, column = _draw(rng, replay, n, need, epochs)
    return gather(replay, age, column, length, epochs)


def gather(
    replay: Replay,
    age: np.ndarray,
    column: np.ndarray,
    length: int,
    epochs: Sequence[int] | None = None,
) -> Rollout:
    """Copies slices out.

    Args:
        replay: what to copy from.
        age: i64 ``[N]``, first rows; each must be a decision.
        column: i64 ``[N]``.
        length: ``L``.
        epochs: a slice ends where an epoch that is not among these begins.

    Returns:
        A rollout whose leading axes are ``[N, L]``; ``last_observation [N, *obs]`` is the successor
        of row ``L - 1``. Rows after the end of the trajectory have mask 0 and ``terminated``; the
        first of them holds the true successor's observation; all else in them is 0.
    """
    window = age[:, None] + np.arange(length + 1)
    real = _is_same_trajectory(replay, window, column, epochs)
    rows, columns = replay.rows(np.minimum(window, replay.size)), column[:, None]
    seen = np.concatenate([np.ones_like(real[:, :1]), real[:, :-1]], axis=1)
    observation = jax.tree.map(lambda x: _zeroed(x[rows, columns], ~seen), replay.steps.observation)
    rows, real = rows[:, :-1], real[:, :-1]
    steps = jax.tree.map(
        lambda x: _zeroed(x[rows, columns], ~real), replay.steps._replace(observation=None)
    )
    steps = steps._replace(
        observation=jax.tree.map(lambda x: x[:, :-1], observation),
        terminated=steps.terminated | ~real,
    )
    return Rollout(steps, jax.tree.map(lambda x: x[:, -1], observation))


def segments(
    replay: Replay, epochs: Sequence[int] | None = None, *, split_epochs: bool = False
) -> Segments:
    """Finds the stored trajectories, column by column, each column in time order.

    Args:
        replay: where to look.
        epochs: the epochs wanted; ``None`` for all.
        split_epochs: a trajectory also ends where the epoch changes.
    """
    age = np.arange(replay.size)
    rows = replay.rows(age)
    ids = np.where(replay.steps.mask[rows] > 0, replay.trajectory_id[rows], -1)
    ids[~_wanted(replay, rows, epochs)] = -1
    starts = ids >= 0
    goes_on = ids[1:] == ids[:-1]
    if split_epochs:
        epoch = replay.epoch[rows]
        goes_on &= (epoch[1:] == epoch[:-1])[:, None]
    starts[1:] &= ~goes_on
    where = np.flatnonzero(starts.T)
    if not len(where):
        return Segments(where, where, where)
    lengths = np.add.reduceat((ids >= 0).T.ravel(), where, dtype=np.int64)
    return Segments(where % replay.size, where // replay.size, lengths)


def pack(trajectories: Sequence[TimeStep], num_envs: int) -> Rollout:
    """Lays trajectories side by side and after one another, as ``num_envs`` environments would.

    Args:
        trajectories: each with leading axis ``[S + 1]``; the last row has mask 0 and holds the last
            observation.
        num_envs: ``B``.

    Returns:
        A rollout ``[T, B]`` with padding at the end.
    """
    columns: list[list[TimeStep]] = [[] for _ in range(num_envs)]
    filled = [0] * num_envs
    for steps in trajectories:
        shortest = filled.index(min(filled))
        columns[shortest].append(steps)
        filled[shortest] += len(steps.mask)
    length = max(filled)
    empty = jax.tree.map(lambda x: np.zeros((length, *x.shape[1:]), x.dtype), trajectories[0])

    def column(parts: list[TimeStep]) -> TimeStep:
        return jax.tree.map(lambda *xs: np.concatenate(xs)[:length], *parts, empty)

    steps = jax.tree.map(lambda *xs: np.stack(xs, axis=1), *[column(c) for c in columns])
    last = jax.tree.map(lambda x: x[-1], steps.observation)
    return Rollout(jax.tree.map(lambda x: x[:-1], steps), last)


def _check_fits(replay: Replay, steps: TimeStep) -> None:
    given, structure = jax.tree.flatten(steps._replace(return_=None))
    stored, expected = jax.tree.flatten(replay.steps._replace(return_=None))
    if str(structure) != str(expected):
        raise ValueError(f"rollout is {structure}; the replay stores {expected}.")
    for x, y in zip(given, stored, strict=True):
        if x.shape[1:] != y.shape[1:]:
            raise ValueError(
                f"rollout has rows of shape {x.shape[1:]} where the replay stores {y.shape[1:]}."
            )


def _follows(replay: Replay, rollout: Rollout) -> bool:
    pairs = zip(
        jax.tree.leaves(rollout.steps.observation),
        jax.tree.leaves(replay.steps.observation),
        strict=True,
    )
    return all(np.array_equal(x[0], stored[replay.insert]) for x, stored in pairs)


def _reserve(replay: Replay, length: int, grow: bool) -> Replay:
    """Makes room for ``length`` rows after the open row's place, which moves on with them."""
    needed = replay.size + length
    if needed <= replay.capacity:
        return replay
    if not grow:
        return replay._replace(size=max(0, replay.capacity - length))
    rows = replay.rows(np.arange(replay.size + 1))
    extra = bucket(needed) - replay.size

    def larger(x: np.ndarray) -> np.ndarray:
        return np.concatenate([x[rows], np.zeros((extra, *x.shape[1:]), x.dtype)])

    return replay._replace(
        steps=jax.tree.map(larger, replay.steps),
        trajectory_id=larger(replay.trajectory_id),
        epoch=larger(replay.epoch),
        insert=replay.size,
    )


def _set(stored: np.ndarray, rows: Any, values: Any) -> None:
    stored[rows] = values


def _open_row(replay: Replay, observation: PyTree, epoch: int) -> None:
    jax.tree.map(lambda x: _set(x, replay.insert, 0), replay.steps._replace(observation=None))
    jax.tree.map(
        lambda x, last: _set(x, replay.insert, last), replay.steps.observation, observation
    )
    replay.trajectory_id[replay.insert] = -1
    replay.epoch[replay.insert] = epoch


def _discounts(discount_mask: np.ndarray, gamma: float) -> np.ndarray:
    return np.where(np.asarray(discount_mask) > 0, gamma, 1.0)


def _returns(steps: TimeStep, ends: np.ndarray, gamma: float) -> np.ndarray:
    """f32 ``[T, B]``, G[t] = r[t] + d[t] G[t+1] up to the end of the trajectory or the rollout."""
    carry = _discounts(steps.env_info.discount_mask, gamma) * ~ends * (steps.mask > 0)
    reward = np.asarray(steps.reward, np.float64)
    returns = np.empty_like(reward)
    following = np.zeros(reward.shape[1])
    for t in reversed(range(len(reward))):
        following = returns[t] = reward[t] + carry[t] * following
    return returns.astype(np.float32)


def _extend_returns(replay: Replay, gamma: float, following: np.ndarray) -> None:
    """Adds the return from the open row on to the rows of the running trajectories."""
    n_open = np.minimum(replay.n_open, replay.size)
    longest = int(n_open.max())
    if not longest:
        return
    rows = (replay.insert + np.arange(-longest, 0)) % len(replay.epoch)
    discounts = _discounts(replay.steps.env_info.discount_mask[rows], gamma)
    factor = np.cumprod(discounts[::-1], axis=0)[::-1]
    is_open = np.arange(longest)[:, None] >= longest - n_open
    replay.steps.return_[rows] += np.where(is_open, factor * following, 0.0)


def _wanted(replay: Replay, rows: np.ndarray, epochs: Sequence[int] | None) -> np.ndarray:
    if epochs is None:
        return np.ones(rows.shape, bool)
    return np.isin(replay.epoch[rows], np.asarray(epochs, np.int32))


def _is_same_trajectory(
    replay: Replay, window: np.ndarray, column: np.ndarray, epochs: Sequence[int] | None
) -> np.ndarray:
    """Whether, bool ``[N, W]``, the rows up to each age continue the trajectory of the first."""
    rows = replay.rows(np.minimum(window, replay.size))
    columns = column[:, None]
    ids = replay.trajectory_id[rows, columns]
    same = (window < replay.size) & (replay.steps.mask[rows, columns] > 0)
    same &= (ids == ids[:, :1]) & _wanted(replay, rows, epochs)
    return np.logical_and.accumulate(same, axis=1)


def _zeroed(x: np.ndarray, where: np.ndarray) -> np.ndarray:
    x[where] = 0
    return x


def _draw(
    rng: np.random.Generator, replay: Replay, n: int, need: int, epochs: Sequence[int] | None
) -> tuple[np.ndarray, np.ndarray]:
    """Draws starts uniformly: any decisions, of which those that can start a slice are kept.

    This costs nothing per stored row. Where few decisions can start a slice, all are listed
    instead.
    """
    ages, columns, missing = [], [], n
    for _ in range(4):
        age = rng.integers(max(1, replay.size), size=2 * missing)
        column = rng.integers(replay.num_envs, size=2 * missing)
        whole = _is_same_trajectory(replay, age[:, None] + np.arange(need), column, epochs)
        previous = replay.rows(np.maximum(age - 1, 0))
        here = replay.trajectory_id[replay.rows(age), column]
        follows = (replay.trajectory_id[previous, column] == here) & (age > 0)
        follows &= (replay.steps.mask[previous, column] > 0) & _wanted(replay, previous, epochs)
        keep = np.flatnonzero(whole[:, 0] & (whole[:, -1] | ~follows))[:missing]
        ages.append(age[keep])
        columns.append(column[keep])
        missing -= len(keep)
        if not missing:
            return np.concatenate(ages), np.concatenate(columns)
    age, column = _draw_exact(rng, replay, missing, need, epochs, False)
    return np.concatenate([*ages, age]), np.concatenate([*columns, column])


def _draw_exact(
    rng: np.random.Generator,
    replay: Replay,
    n: int,
    need: int,
    epochs: Sequence[int] | None,
    per_trajectory: bool,
) -> tuple[np.ndarray, np.ndarray]:
    found = segments(replay, epochs)
    if not len(found.age):
        stored = "none" if not replay.size else f"{np.unique(replay.epoch[replay.epoch >= 0])}"
        raise ValueError(f"no decision is stored in the epochs {epochs}; epochs stored: {stored}.")
    starts = np.maximum(1, found.length - need + 1)
    if per_trajectory:
        chosen = rng.integers(len(starts), size=n)
        offset = rng.integers(starts[chosen])
    else:
        ends = np.cumsum(starts)
        place = rng.integers(ends[-1], size=n)
        chosen = np.searchsorted(ends, place, side="right")
        offset = place - (ends - starts)[chosen]
    return found.age[chosen] + offset, found.column[chosen]
