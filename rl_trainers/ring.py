"""The replay on the device: a ring of rows, added to and drawn from inside compiled programs.

It has the layout of :mod:`rl_trainers.replay`: rows in time order, one column per environment, the successor
of a row is the next one, and the row after the newest one is the *open row*, which holds the newest
observation. The numbers of a step are kept in one array, since each array costs a gather, a write and an
argument.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from rl_trainers.replay import Frames, frame_rows
from rl_trainers.types import EnvInfo, PyTree, Rollout, TimeStep

_NO_STACKS = Frames()


class Ring(NamedTuple):
    """What is stored; ``C`` = capacity + 1 rows are allocated.

    Attributes:
        observation: ``[C, B, *obs]``, or single frames.
        action: ``[C, B, *act]`` as sampled.
        facts: f32 ``[C, B, 6]``, see :func:`pack`.
        position: i32 ``[C, B]``, observations of the running episode before the row's.
        insert: i32 ``[]``, the open row.
        size: i32 ``[]``, rows stored.
    """

    observation: PyTree
    action: PyTree
    facts: jax.Array
    position: jax.Array
    insert: jax.Array
    size: jax.Array

    @property
    def capacity(self) -> int:
        """Rows that can be stored."""
        return len(self.position) - 1


def pack(steps: TimeStep, xp: Any = np) -> Any:
    """Reward, terminated, truncated, mask, control mask and discount mask, f32 ``[.., 6]``.

    Args:
        steps: host arrays, or any with
        xp: ``jax.numpy``.
    """
    facts = (steps.reward, steps.terminated, steps.truncated, steps.mask, *steps.env_info)
    return xp.stack([xp.asarray(x, xp.float32) for x in facts], axis=-1)


def _unpack(observation: PyTree, action: PyTree, facts: jax.Array) -> TimeStep:
    reward, terminated, truncated, mask, control, discount = jnp.moveaxis(facts, -1, 0)
    return TimeStep(
        observation=observation,
        action=action,
        reward=reward,
        terminated=terminated > 0,
        truncated=truncated > 0,
        mask=mask,
        env_info=EnvInfo(control, discount),
    )


def create(
    steps: TimeStep, observation: PyTree, capacity: int, frames: Frames = _NO_STACKS
) -> Ring:
    """A ring that holds the newest rows of ``steps``.

    Args:
        steps: host arrays ``[S, B, ..]`` in time order, in the shapes and dtypes to store; ``S`` may be 0.
        observation: ``[B, *obs]`` what the open row is about.
        capacity: rows to hold.
        frames: how observations are stacks, of which only the newest frame is stored.
    """
    steps = jax.tree.map(lambda x: x[-capacity:], steps)
    row = np.arange(len(steps.mask) + 1)[:, None]
    begins = np.concatenate([np.ones_like(steps.mask[:1], shape=(1, steps.mask.shape[1])), 1 - steps.mask])
    position = row - np.maximum.accumulate(np.where(begins > 0, row, 0), axis=0)

    def with_open_row(x, new=None):
        new = np.zeros_like(x, shape=x.shape[1:]) if new is None else new
        return np.concatenate([x, np.asarray(new)[None]])

    stored, first = _newest(steps.observation, frames, 2), _newest(observation, frames, 1)
    rows = (
        jax.tree.map(with_open_row, stored, first),
        jax.tree.map(with_open_row, steps.action),
        with_open_row(pack(steps)),
        position.astype(np.int32),
    )
    return from_rows(rows, capacity)


def to_rows(ring: Ring) -> tuple:
    """Copies the first four fields in time order, ``[size + 1, ..]`` with the open row."""
    size = int(ring.size)
    rows = (int(ring.insert) - size + np.arange(size + 1)) % len(ring.position)
    return jax.tree.map(lambda x: np.asarray(x)[rows], ring[:4])


def from_rows(rows: tuple, capacity: int) -> Ring:
    """The inverse of :func:`to_rows`, with room for the newest ``capacity`` rows and the open one."""
    rows = jax.tree.map(lambda x: x[-capacity - 1 :], rows)
    *others, position = rows
    size = len(position) - 1
    if size < capacity:
        # What came before the oldest row is not there to be stacked.
        position = np.minimum(position, np.arange(size + 1, dtype=np.int32)[:, None])

    def allocated(x):
        larger = np.zeros((capacity + 1, *x.shape[1:]), x.dtype)
        larger[: len(x)] = x
        return jnp.array(larger)

    observation, action, facts, position = jax.tree.map(allocated, (*others, position))
    return Ring(observation, action, facts, position, jnp.int32(size), jnp.int32(size))


def add(
    ring: Ring, action: PyTree, facts: Any, following: PyTree, frames: Frames = _NO_STACKS
) -> Ring:
    """Stores what happened after the open row's observation; traced.

    Args:
        ring: consumed.
        action: ``[B, *act]`` as sampled.
        facts: f32 ``[B, 6]``, see :func:`pack`.
        following: ``[B, *obs]`` the successor, which the next row will be about.
        frames: as given to :func:`create`.
    """
    here, after = ring.insert, (ring.insert + 1) % len(ring.position)

    def put(x, new, row):
        return jax.lax.dynamic_update_index_in_dim(x, new.astype(x.dtype), row, 0)

    following = _newest(following, frames, 1)
    position = jnp.where(facts[:, 3] > 0, ring.position[here] + 1, 0)
    return Ring(
        jax.tree.map(lambda x, new: put(x, new, after), ring.observation, following),
        jax.tree.map(lambda x, new: put(x, new, here), ring.action, action),
        put(ring.facts, facts, here),
        put(ring.position, position, after),
        after,
        jnp.minimum(ring.size + 1, ring.capacity),
    )


def sample(bits: jax.Array, ring: Ring, length: int, frames: Frames = _NO_STACKS) -> Rollout:
    """Draws runs of neighbouring rows with replacement, all stored ones equally likely; traced.

    Args:
        bits: u32 ``[N]``, random; each draws a run.
        ring: must hold ``length`` rows or more.
        length: ``L``, rows of each run.
        frames: as given to :func:`create`.

    Returns:
        A rollout whose leading axes are ``[L, N]``. Runs do not stop at the end of an episode: reset rows
        have mask 0, as in any rollout.
    """
    n_rows, num_envs = ring.position.shape
    # Stacks of the oldest rows would reach into rows that are overwritten.
    lost = jnp.where(ring.size == n_rows - 1, frames.depth - 1, 0)
    count = (jnp.maximum(ring.size - length - lost, 0) + 1).astype(jnp.uint32) * num_envs
    # The rest of 32 random bits favours no number by more than count / 2^32.
    drawn = (bits % count).astype(jnp.int32)
    age, column = lost + drawn // num_envs, drawn % num_envs
    rows = (ring.insert - ring.size + age + jnp.arange(length + 1)[:, None]) % n_rows
    observation = _observations(ring, rows, column, frames)
    action = jax.tree.map(lambda x: x[rows[:-1], column], ring.action)
    before = jax.tree.map(lambda x: x[:-1], observation)
    steps = _unpack(before, action, ring.facts[rows[:-1], column])
    return Rollout(steps, jax.tree.map(lambda x: x[-1], observation))


def restart(ring: Ring, observation: PyTree, frames: Frames = _NO_STACKS) -> Ring:
    """Makes the open row be about ``observation``, after a break.

    Where it is about something else, its environment restarted, and the newest row is dropped, since what
    followed it is not known.

    Args:
        ring: consumed.
        observation: ``[B, *obs]``.
        frames: as given to :func:`create`.
    """
    num_envs = ring.position.shape[1]
    first = _newest(observation, frames, 1)
    different = jax.tree.map(
        lambda x, new: jnp.any((x[ring.insert] != new).reshape(num_envs, -1), axis=1),
        ring.observation,
        first,
    )
    same = 1 - functools.reduce(jnp.logical_or, jax.tree.leaves(different))
    before = (ring.insert - 1) % len(ring.position)
    return ring._replace(
        observation=jax.tree.map(lambda x, new: x.at[ring.insert].set(new), ring.observation, first),
        facts=ring.facts.at[before, :, 3].multiply(same),
        position=ring.position.at[ring.insert].multiply(same),
    )


def _newest(observation: PyTree, frames: Frames, n_leading: int) -> PyTree:
    """The newest frames of observations with ``n_leading`` leading axes."""
    if frames.depth == 1:
        return observation
    axis = -1 if frames.axis == -1 else n_leading
    return jax.tree.map(lambda x: x.take(-1, axis), observation)


def _observations(ring: Ring, rows: Any, column: Any, frames: Frames) -> PyTree:
    """Observations ``[L, N, *obs]`` of rows, stacked again where only frames are stored."""
    if frames.depth == 1:
        return jax.tree.map(lambda x: x[rows, column], ring.observation)
    rows = frame_rows(rows, ring.position[rows, column], frames.depth, len(ring.position))
    stacked = jax.tree.map(lambda x: x[rows, column[:, None]], ring.observation)
    if frames.axis == 0:
        return stacked
    return jax.tree.map(lambda x: jnp.moveaxis(x, 2, -1), stacked)
