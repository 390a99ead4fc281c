"""The replay of whole trajectories: a ring of rows in time order, one column per environment.

A column holds what one environment did, row after row, so the successor of a row is the next row; the row
after the newest one is the *open row*: it holds the newest observation, with mask 0. Rows count in *age*:
0 is the oldest row, ``size`` the open row.

A trajectory is a run of decisions of one environment. It ends where the episode ends, and every
``max_steps`` decisions if that is given. A row continues the trajectory of the row before it if both are
decisions and its ``position`` is not 0.

Where observations are stacks of the newest frames, a row keeps the newest frame only, and reading stacks the
frames of the rows before it again, by index (:func:`frame_rows`). The last rows that the ring has let go of
stay readable for that.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from rl_trainers.rollout import bucket
from rl_trainers.types import PyTree, Rollout, TimeStep


class Frames(NamedTuple):
    """How observations are stacks of frames.

    Attributes:
        depth: ``k``, frames in a stack; 1 if observations are no stacks.
        axis: of the stack in ``*obs``, 0 or -1; its last entry is the newest frame.
    """

    depth: int = 1
    axis: int = 0


_NO_STACKS = Frames()


class Replay(NamedTuple):
    """What is stored; ``C`` = capacity + ``frames.depth`` rows are allocated. Arrays are written in place.

    Attributes:
        steps: :class:`TimeStep` ``[C, B, ..]``, with ``return_``; the newest frames of stacked observations.
        position: i32 ``[C, B]``, decisions of the running trajectory before the row.
        epoch: i32 ``[C]``, -1 for rows that were removed.
        older: u8 ``[C, B]``, rows right before the row whose frames are older frames of its episode, counted
            to 255 at most; ``()`` if observations are no stacks.
        insert: the open row, where the next rows will be written.
        size: rows stored.
        frames: how observations are stacks.
    """

    steps: TimeStep
    position: np.ndarray
    epoch: np.ndarray
    older: Any
    insert: int
    size: int
    frames: Frames = _NO_STACKS

    @property
    def capacity(self) -> int:
        """Rows that can be stored."""
        return len(self.epoch) - self.frames.depth

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


def create(example: TimeStep, capacity: int, frames: Frames = _NO_STACKS) -> Replay:
    """An empty replay.

    Args:
        example: one row ``[B, ..]`` in the shapes and dtypes to store; ``return_`` is added.
        capacity: rows to allocate.
        frames: how the observations are stacks; of those only the newest frame is stored.
    """
    num_envs, n_rows = len(example.mask), frames.depth
    newest = jax.tree.map(lambda x: _stack_first(x, 1, frames)[:, -1], example.observation)
    row = example._replace(observation=newest, return_=np.zeros(num_envs, np.float32))
    steps = jax.tree.map(lambda x: np.zeros((n_rows, *np.shape(x)), np.asarray(x).dtype), row)
    older = np.zeros((n_rows, num_envs), np.uint8) if frames.depth > 1 else ()
    position, epoch = np.zeros((n_rows, num_envs), np.int32), np.full(n_rows, -1, np.int32)
    return from_rows((steps, position, epoch, older), capacity, frames)


def to_rows(replay: Replay) -> tuple[TimeStep, np.ndarray, np.ndarray, Any]:
    """Copies ``(steps, position, epoch, older)`` of the rows in time order, ``[k - 1 + size + 1, ..]``.

    The first ``k - 1`` rows, for ``k`` stacked frames, are there for their frames only; the last one is the
    open row.
    """
    rows = replay.rows(np.arange(1 - replay.frames.depth, replay.size + 1))
    return jax.tree.map(lambda x: x[rows], replay[:4])


def from_rows(
    rows: tuple[TimeStep, np.ndarray, np.ndarray, Any], capacity: int, frames: Frames = _NO_STACKS
) -> Replay:
    """The inverse of :func:`to_rows`, with room for ``capacity`` rows."""

    def allocated(x: np.ndarray) -> np.ndarray:
        larger = np.zeros((capacity + frames.depth, *x.shape[1:]), x.dtype)
        larger[: len(x)] = x
        return larger

    n_rows = len(rows[2])
    steps, position, epoch, older = jax.tree.map(allocated, rows)
    return Replay(steps, position, epoch, older, n_rows - 1, n_rows - frames.depth, frames)


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

    Rows of padding at the end are not stored. A trajectory goes on from one rollout to the next; where the
    rollout does not start at the open row's observation, all running trajectories end before it.
    ``return_`` is filled in, also for the earlier rows of running trajectories: until a trajectory ends, it
    covers the rewards that are known.

    Args:
        replay: where to store.
        rollout: host arrays ``[T, B]`` of the structure that the replay was created with, but for
            ``policy_state``, which is left out where none is stored and 0 if there is none, and
            ``dist_inputs``, which are NaN if there are none.
        epoch: at least 0; belongs to all rows.
        gamma: discount factor per step, for ``return_``.
        max_steps: decisions after which a trajectory is cut while the episode goes on.
        grow: double the capacity when it is full; otherwise the oldest rows are overwritten.

    Raises:
        ValueError: if structure or shapes differ from the replay's, or a stack of frames is not that of the
            row before moved on by one frame.
    """
    open_row = _observations(replay, np.array([replay.insert]))
    expected = replay.steps._replace(observation=open_row, return_=None)
    steps, last = _storable(expected, _trim(rollout)), rollout.last_observation
    if not grow:
        steps = jax.tree.map(lambda x: x[-replay.capacity :], steps)
    if not _begins_with(open_row, steps.observation):
        replay = _cut(replay, grow)
        steps = with_older_frames(steps, replay.frames)
    older, steps, last = _unstacked(replay, steps, last)
    length, decided = len(steps.mask), steps.mask > 0
    replay = _reserve(replay, length, grow)
    steps = steps._replace(terminated=steps.terminated & decided, truncated=steps.truncated & decided)
    position = positions(steps, replay.position[replay.insert], max_steps)
    steps = steps._replace(return_=_returns(steps, decided & (position[1:] > 0), gamma))
    _extend_returns(replay, gamma, steps.return_[0] * decided[0])
    rows = (replay.insert + np.arange(length)) % len(replay.epoch)
    _write(replay.steps, rows, steps)
    replay.position[rows], replay.epoch[rows] = position[:-1], epoch
    _write(replay.older, np.append(rows, (replay.insert + length) % len(replay.epoch)), older)
    return _open(replay, length, last, position[-1], epoch)


def positions(steps: TimeStep, before: np.ndarray, max_steps: int | None) -> np.ndarray:
    """Decisions of the running trajectory before each row, i64 ``[T + 1, B]``; 0 after its end.

    Args:
        steps: ``[T, B]``.
        before: i64 ``[B]``, decisions in the running trajectory, or episode, before the first row.
        max_steps: decisions after which a trajectory is cut; ``None`` for no limit.
    """
    decided = steps.mask > 0
    count = np.cumsum(decided, axis=0) + before
    after = count - np.maximum.accumulate(np.where(steps.done & decided, count, 0), axis=0)
    return np.concatenate([before[None], after if max_steps is None else after % max_steps])


def end_running(replay: Replay, columns: Any = slice(None)) -> None:
    """Ends the running trajectories of these columns; what is added next begins others."""
    replay.position[replay.insert, columns] = 0


def remove(replay: Replay, epochs: np.ndarray) -> Replay:
    """Removes epochs; room at the old end of the ring becomes free.

    Args:
        replay: consumed.
        epochs: bool ``[C]``, the rows to remove, such as ``replay.epoch < 3``.
    """
    replay.epoch[epochs] = -1
    replay.steps.mask[epochs] = 0.0
    kept = replay.epoch[replay.rows(np.arange(replay.size))] >= 0
    return replay._replace(size=replay.size - int(kept.argmax()) if kept.any() else 0)


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
        A rollout ``[capacity, B]``: the same shape until the capacity grows. Rows that are not filled have
        mask 0; the row after the newest one holds its successor's observation, as does
        ``last_observation``.
    """
    age = np.arange(replay.capacity)
    rows = replay.rows(age)
    steps = jax.tree.map(lambda x: x[rows], replay.steps._replace(observation=None))
    wanted = (age < replay.size) & _wanted(replay, rows, epochs)
    steps = steps._replace(observation=_observations(replay, rows), mask=steps.mask * wanted[:, None])
    return Rollout(steps, jax.tree.map(lambda x: x[0], _observations(replay, np.array([replay.insert]))))


def sample_slices(
    rng: np.random.Generator,
    replay: Replay,
    n: int,
    length: int,
    margin: int = 0,
    *,
    epochs: Sequence[int] | None = None,
    per_trajectory: bool = False,
    min_slice_length: int = 0,
) -> Rollout:
    """Draws slices of trajectories, with replacement.

    A trajectory of S decisions has ``max(1, S + margin - length + 1)`` slices: every slice holds at least
    ``length - margin`` decisions, or the whole trajectory if it is shorter.

    Args:
        rng: advanced.
        replay: what to draw from.
        n: ``N``, how many.
        length: ``L``, rows of a slice, margin included.
        margin: rows that may lie after the end of the trajectory, less than ``length``.
        epochs: the epochs wanted; ``None`` for all.
        per_trajectory: draw a trajectory uniformly, then a slice of it; otherwise all slices are equally
            likely.
        min_slice_length: slices with fewer rows, margin included, are left out.

    Returns:
        See :func:`gather`.

    Raises:
        ValueError: if no decision is stored in these epochs, or no slice is long enough, or if the margin
            does not fit.
    """
    if not 0 <= margin < length:
        raise ValueError(f"margin is {margin}; with length {length} it must be 0..{length - 1}.")
    if not per_trajectory:
        # Tries any rows first, which costs nothing per stored row, and keeps those that can start a slice.
        age = rng.integers(max(1, replay.size), size=4 * n)
        column = rng.integers(replay.position.shape[1], size=4 * n)
        _, same = _follow(replay, age, column, length - margin, epochs)
        is_first = ~_follow(replay, age - 1, column, 2, epochs)[1][:, 1]
        starts = same[:, 0] & (same[:, -1] | is_first) & (same.sum(1) + margin >= min_slice_length)
        chosen = np.flatnonzero(starts)[:n]
        if len(chosen) == n:
            return gather(replay, age[chosen], column[chosen], length, epochs)
    found = segments(replay, epochs)
    if not len(found.age):
        raise ValueError(f"no decision is stored in the epochs {epochs}; epochs stored: {epoch_ids(replay)}.")
    rows = np.minimum(found.length + margin, length)
    if rows.max() < min_slice_length:
        raise ValueError(f"min_slice_length is {min_slice_length}; slices have {rows.max()} rows at most.")
    n_starts = np.maximum(1, found.length + margin - length + 1) * (rows >= min_slice_length)
    weights = n_starts > 0 if per_trajectory else n_starts
    chosen = np.searchsorted(np.cumsum(weights), rng.integers(weights.sum(), size=n), side="right")
    age = found.age[chosen] + rng.integers(n_starts[chosen])
    return gather(replay, age, found.column[chosen], length, epochs)


def gather(
    replay: Replay, age: np.ndarray, column: np.ndarray, length: int, epochs: Sequence[int] | None = None
) -> Rollout:
    """Copies slices out.

    Args:
        replay: what to copy from.
        age: i64 ``[N]``, first rows; each must be a decision.
        column: i64 ``[N]``.
        length: ``L``.
        epochs: a slice ends where an epoch that is not among these begins.

    Returns:
        A rollout whose leading axes are ``[N, L]``; ``last_observation [N, *obs]`` is the successor of row
        ``L - 1``. Rows after the end of the trajectory have mask 0 and ``terminated``; the first of them
        holds the true successor's observation; all else in them is 0.
    """
    rows, real = _follow(replay, age, column, length + 1, epochs)
    follows_real = np.concatenate([np.ones_like(real[:, :1]), real[:, :-1]], axis=1)

    def cleared(copy: PyTree, kept: np.ndarray) -> PyTree:
        _write(copy, ~kept, jax.tree.map(lambda x: 0, copy))
        return copy

    place = rows[:, :-1], column[:, None]
    observation = cleared(_observations(replay, rows, column[:, None]), follows_real)
    steps = jax.tree.map(lambda x: x[place], replay.steps._replace(observation=None))
    steps = cleared(steps, real[:, :-1])
    steps = steps._replace(
        observation=jax.tree.map(lambda x: x[:, :-1], observation),
        terminated=steps.terminated | ~real[:, :-1],
    )
    return Rollout(steps, jax.tree.map(lambda x: x[:, -1], observation))


def segments(replay: Replay, epochs: Sequence[int] | None = None) -> Segments:
    """Finds the stored trajectories, column by column, each column in time order.

    Args:
        replay: where to look.
        epochs: the epochs wanted; ``None`` for all.
    """
    rows = replay.rows(np.arange(replay.size))
    real = (replay.steps.mask[rows] > 0) & _wanted(replay, rows, epochs)[:, None]
    starts = real.copy()
    starts[1:] &= ~real[:-1] | (replay.position[rows[1:]] == 0)
    where = np.flatnonzero(starts.T)
    if not len(where):
        return Segments(where, where, where)
    lengths = np.add.reduceat(real.T.ravel(), where, dtype=np.int64)
    return Segments(where % replay.size, where // replay.size, lengths)


def trajectories(replay: Replay, epoch: int) -> Iterator[TimeStep]:
    """Copies the trajectories of an epoch out, each as :func:`pack` takes it."""
    for age, column, length in zip(*segments(replay, [epoch]), strict=True):
        yield trajectory(replay, age, column, length, [epoch])


def trajectory(
    replay: Replay, age: int, column: int, length: int, epochs: Sequence[int] | None = None
) -> TimeStep:
    """Copies a segment out, ``[length + 1, ..]``; the last row has mask 0 and holds the last observation."""
    steps = gather(replay, np.array([age]), np.array([column]), length + 1, epochs).steps
    return jax.tree.map(lambda x: x[0], steps)


def pack(trajectories: Sequence[TimeStep], num_envs: int, frames: Frames = _NO_STACKS) -> Rollout:
    """Lays trajectories side by side and after one another, as ``num_envs`` environments would.

    Args:
        trajectories: each with leading axis ``[S + 1]``; the last row has mask 0 and holds the last
            observation.
        num_envs: ``B``.
        frames: how the observations are stacks.

    Returns:
        A rollout ``[T, B]`` with padding at the end.
    """
    trajectories = [
        with_older_frames(steps._replace(policy_state=(), return_=None), frames) for steps in trajectories
    ]
    columns: list[list[TimeStep]] = [[] for _ in range(num_envs)]
    filled = [0] * num_envs
    for steps in trajectories:
        shortest = filled.index(min(filled))
        columns[shortest].append(steps)
        filled[shortest] += len(steps.mask)
    length = max(filled)
    empty = jax.tree.map(lambda x: np.zeros((length, *x.shape[1:]), x.dtype), trajectories[0])
    joined = [jax.tree.map(lambda *xs: np.concatenate(xs)[:length], *parts, empty) for parts in columns]
    steps = jax.tree.map(lambda *xs: np.stack(xs, axis=1), *joined)
    last = jax.tree.map(lambda x: x[-1], steps.observation)
    return Rollout(jax.tree.map(lambda x: x[:-1], steps), last)


# Stacks of frames.


def frame_rows(row: Any, older: Any, frames: int, n_rows: int) -> Any:
    """The rows of a ring that hold the frames of stacked observations.

    Args:
        row: int ``[..]``, of the observations.
        older: int ``[..]``, rows right before each that hold older frames of its episode; where they are
            fewer than needed, the oldest of them stands for those that are missing.
        frames: ``k``, how many are stacked.
        n_rows: of the ring.

    Returns:
        int ``[.., k]``, the oldest frame first; NumPy or JAX, as the arguments are.
    """
    back = older[..., None].clip(max=np.arange(frames - 1, -1, -1))
    return (row[..., None] - back) % n_rows


def with_older_frames(steps: TimeStep, frames: Frames) -> TimeStep:
    """Puts rows before steps that begin within an episode, so that their older frames have a place.

    Args:
        steps: ``[T, ..]``, observations ``[T, .., *obs]``.
        frames: how the observations are stacks.

    Returns:
        ``[k - 1 + T, ..]``, the added rows with mask 0 and all else 0; ``steps`` where the frames of the
        first observations are all the same, as at the start of an episode.
    """
    k, leading = frames.depth, steps.mask.ndim

    def grown(i: int) -> PyTree:
        """The first observations as they are ``k - 1 - i`` steps earlier."""
        index = (np.arange(1 - k, 1) + i).clip(min=0)
        return jax.tree.map(
            lambda x: _stack_back(_stack_first(x[:1], leading, frames).take(index, leading), leading, frames),
            steps.observation,
        )

    pairs = zip(jax.tree.leaves(grown(0)), jax.tree.leaves(grown(k - 1)), strict=True)
    if all(np.array_equal(start, x) for start, x in pairs):
        return steps
    before = jax.tree.map(lambda x: np.zeros((k - 1, *x.shape[1:]), x.dtype), steps)
    observation = jax.tree.map(lambda *xs: np.concatenate(xs), *map(grown, range(k - 1)))
    before = before._replace(observation=observation)
    return jax.tree.map(lambda *xs: np.concatenate(xs), before, steps)


def _unstacked(replay: Replay, steps: TimeStep, last: PyTree) -> tuple[Any, TimeStep, PyTree]:
    """``older [T + 1, B]`` of ``steps`` and what follows them, and both with their newest frames alone."""
    frames = replay.frames
    if frames.depth == 1:
        return (), steps, last
    joined = jax.tree.map(lambda x, y: np.concatenate([x, y[None]]), steps.observation, last)
    moved = np.ones((len(steps.mask), steps.mask.shape[1]), bool)
    for x in map(lambda x: _stack_first(x, 2, frames), jax.tree.leaves(joined)):
        for i in range(frames.depth - 1):  # frame by frame, since NumPy is slow along a short last axis
            moved &= (x[1:, :, i] == x[:-1, :, i + 1]).all(tuple(range(2, x.ndim - 1)))
    t, b = np.nonzero(~moved)
    for x in map(lambda x: _stack_first(x, 2, frames)[t + 1, b], jax.tree.leaves(joined)):
        for wrong in np.flatnonzero((x != x[:, -1:]).any(tuple(range(1, x.ndim)))):
            raise ValueError(
                f"rollout: the {frames.depth} frames of row {t[wrong] + 1}, environment {b[wrong]}, are "
                "neither those of the row before moved on by one nor all the same, as at an episode's start."
            )
    row = np.arange(len(moved) + 1)[:, None]
    begin = np.concatenate([-replay.older[[replay.insert]].astype(int), np.where(moved, -256, row[1:])])
    older = (row - np.maximum.accumulate(begin)).clip(max=255)
    newest = jax.tree.map(lambda x: _stack_first(x, 2, frames)[:, :, -1], joined)
    steps = steps._replace(observation=jax.tree.map(lambda x: x[:-1], newest))
    return older, steps, jax.tree.map(lambda x: x[-1], newest)


def _observations(replay: Replay, row: np.ndarray, column: np.ndarray | None = None) -> PyTree:
    """Copies observations out: ``[N, B, *obs]`` of rows ``[N]``, or those at rows and columns ``[N, L]``."""
    frames, stored = replay.frames, replay.steps.observation
    if frames.depth == 1:
        place = row if column is None else (row, column)
        return jax.tree.map(lambda x: x[place], stored)
    if column is None:
        row, column = row[:, None], np.arange(replay.position.shape[1])
    rows = frame_rows(row, replay.older[row, column], frames.depth, len(replay.epoch))
    return jax.tree.map(lambda x: _stack_back(x[rows, column[..., None]], 2, frames), stored)


def _stack_first(x: Any, leading: int, frames: Frames) -> Any:
    """``[.., *obs]`` as ``[.., k, *frame]``."""
    if frames.depth == 1:
        return np.expand_dims(x, leading)
    return np.moveaxis(x, -1, leading) if frames.axis == -1 else x


def _stack_back(x: Any, leading: int, frames: Frames) -> Any:
    """The inverse of :func:`_stack_first`."""
    return np.moveaxis(x, leading, -1) if frames.axis == -1 else x


def _trim(rollout: Rollout) -> TimeStep:
    """Removes rows at the end that :func:`rl_trainers.rollout.pad` appended.

    A row without decisions is no padding if it is the reset row of all environments; then each of them
    ended its episode in the row before, and other observations follow.
    """
    steps, last = rollout.steps, jax.tree.leaves(rollout.last_observation)
    length, decided = len(steps.mask), steps.mask > 0
    ended = decided & steps.done
    while length > 1 and not decided[length - 1].any():
        rows = [x[length - 1] for x in jax.tree.leaves(steps.observation)]
        if ended[length - 2].all() and not all(map(np.array_equal, rows, last)):
            break
        length -= 1
    return jax.tree.map(lambda x: x[:length], steps)


def _storable(stored: TimeStep, steps: TimeStep) -> TimeStep:
    """Steps ``[T, B]`` with the fields that the replay stores; unknown ``dist_inputs`` are NaN."""
    steps = steps._replace(return_=None)
    if not same_structure(steps.policy_state, stored.policy_state):
        nothing = jax.tree.map(
            lambda x: np.zeros((*steps.mask.shape, *x.shape[2:]), x.dtype), stored.policy_state
        )
        steps = steps._replace(policy_state=nothing)
    if steps.dist_inputs is None and stored.dist_inputs is not None:
        shape = (*steps.mask.shape, stored.dist_inputs.shape[-1])
        steps = steps._replace(dist_inputs=np.full(shape, np.nan, np.float32))
    given, expected = jax.tree.structure(steps), jax.tree.structure(stored)
    if str(given) != str(expected):
        raise ValueError(f"rollout is {given}; the replay stores {expected}.")
    for x, y in zip(jax.tree.leaves(steps), jax.tree.leaves(stored), strict=True):
        if x.shape[1:] != y.shape[1:]:
            raise ValueError(
                f"rollout has rows of shape {x.shape[1:]} where the replay stores {y.shape[1:]}."
            )
    return steps


def same_structure(one: PyTree, other: PyTree) -> bool:
    """Whether two trees have the same nodes."""
    return str(jax.tree.structure(one)) == str(jax.tree.structure(other))


def _begins_with(first: PyTree, observation: PyTree) -> bool:
    """Whether ``first [1, B, ..]`` is the first of ``observation [T, B, ..]``."""
    pairs = zip(jax.tree.leaves(first), jax.tree.leaves(observation), strict=True)
    return all(np.array_equal(x, y[:1]) for x, y in pairs)


def _cut(replay: Replay, grow: bool) -> Replay:
    """Ends all running trajectories; the open row becomes a row with mask 0."""
    if replay.size:
        replay = _reserve(replay, 1, grow)
        observation = jax.tree.map(lambda x: x[replay.insert], replay.steps.observation)
        replay = _open(replay, 1, observation, 0, replay.epoch[replay.insert])
    end_running(replay)
    _write(replay.older, replay.insert, jax.tree.map(lambda x: 0, replay.older))
    return replay


def _reserve(replay: Replay, length: int, grow: bool) -> Replay:
    """Makes room for ``length`` rows after the open row's place, which moves on with them."""
    needed = replay.size + length
    if needed <= replay.capacity:
        return replay
    if grow:
        return from_rows(to_rows(replay), bucket(needed), replay.frames)
    return replay._replace(size=replay.capacity - length)


def _open(replay: Replay, length: int, observation: PyTree, position: Any, epoch: int) -> Replay:
    """Moves the open row on by ``length`` rows."""
    row = (replay.insert + length) % len(replay.epoch)
    _write(replay.steps, row, jax.tree.map(lambda x: 0, replay.steps)._replace(observation=observation))
    replay.position[row], replay.epoch[row] = position, epoch
    return replay._replace(insert=row, size=replay.size + length)


def _write(stored: PyTree, rows: Any, values: PyTree) -> None:
    for array, value in zip(jax.tree.leaves(stored), jax.tree.leaves(values), strict=True):
        array[rows] = value


def _discounts(steps: TimeStep, gamma: float, rows: Any = slice(None)) -> np.ndarray:
    return np.where(steps.env_info.discount_mask[rows] > 0, gamma, 1.0)


def _returns(steps: TimeStep, goes_on: np.ndarray, gamma: float) -> np.ndarray:
    """f32 ``[T, B]``, G[t] = r[t] + d[t] G[t+1] up to the end of the trajectory or the rollout."""
    carry = _discounts(steps, gamma) * goes_on
    returns = np.array(steps.reward, np.float64)
    for t in reversed(range(len(returns) - 1)):
        returns[t] += carry[t] * returns[t + 1]
    return returns.astype(np.float32)


def _extend_returns(replay: Replay, gamma: float, following: np.ndarray) -> None:
    """Adds the return from the open row on to the rows of the running trajectories."""
    n_open = np.minimum(replay.position[replay.insert], max(0, replay.size))
    longest = int(n_open.max())
    rows = (replay.insert + np.arange(-longest, 0)) % len(replay.epoch)
    factor = np.cumprod(_discounts(replay.steps, gamma, rows)[::-1], axis=0)[::-1]
    is_open = np.arange(longest)[:, None] >= longest - n_open
    replay.steps.return_[rows] += np.where(is_open, factor * following, 0.0)


def _wanted(replay: Replay, rows: np.ndarray, epochs: Sequence[int] | None) -> np.ndarray:
    if epochs is None:
        return np.ones(rows.shape, bool)
    return np.isin(replay.epoch[rows], np.asarray(epochs, np.int32))


def _follow(
    replay: Replay, age: np.ndarray, column: np.ndarray, length: int, epochs: Sequence[int] | None
) -> tuple[np.ndarray, np.ndarray]:
    """``(rows i64, same bool)``, both ``[N, length]``: the rows from ``age`` on.

    ``same`` tells whether all rows up to each one are decisions of one trajectory.
    """
    window = age[:, None] + np.arange(length)
    rows = replay.rows(np.minimum(window, replay.size))
    place = rows, column[:, None]
    same = (window >= 0) & (window < replay.size)
    same &= (replay.steps.mask[place] > 0) & _wanted(replay, rows, epochs)
    same[:, 1:] &= replay.position[place][:, 1:] > 0
    return rows, np.logical_and.accumulate(same, axis=1)
