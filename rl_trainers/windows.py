"""What models see of earlier rows: the same while acting and while training.

A recurrent model has a state, which goes from row to row and is that of a first row again at the start of
every episode. Slices that are trained begin with the state that was recorded for their first row, or with
that of a first row; so do the rows behind a cut, where rows of another unroll or environment follow.

A sequence model without one has a window. Time is cut into blocks of ``L`` rows. A decision sees the rows
of its own block up to itself and all rows of the block before, as far as they belong to its episode: never
fewer than the last ``L``, fewer than ``2 L``. Every rollout begins a block. So one pass over rows
``[N, 2 L]``, each a block behind the one before, gives for the second half what :func:`append` showed the
acting policy one by one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from rl_trainers.types import PyTree, Rollout, Seen, TimeStep


class Window(NamedTuple):
    """The last rows that an acting policy saw, block before first; its ``policy_state``.

    Attributes:
        seen: :class:`rl_trainers.types.Seen` ``[B, 2 L]``; rows from ``count`` on mean nothing.
        running: i32 ``[B]``, number of the running episode.
        count: i32 ``[]``, where the next row goes, at least ``L``.
    """

    seen: Seen
    running: Any
    count: Any


def empty(observation: PyTree, length: int) -> Window:
    """A window without rows.

    Args:
        observation: ``[B, *obs]``, an example.
        length: ``L``.
    """
    num_envs = len(jax.tree.leaves(observation)[0])
    rows = jax.tree.map(
        lambda x: np.zeros((num_envs, 2 * length, *x.shape[1:]), x.dtype), observation
    )
    episode = np.zeros((num_envs, 2 * length), np.int32)
    return Window(Seen(rows, episode), np.ones(num_envs, np.int32), np.int32(length))


def begin(window: Window) -> Window:
    """Begins a block: the newest ``L`` rows are the block before; traced."""
    length = window.seen.episode.shape[1] // 2
    seen = jax.tree.map(lambda x: jnp.roll(x, length - window.count, axis=1), window.seen)
    return window._replace(seen=seen, count=jnp.full_like(window.count, length))


def append(window: Window, observation: PyTree, needs_reset: jax.Array) -> Window:
    """The window with one more row, at ``count - 1``; begins a block where one is full; traced.

    Args:
        window: of the rows before.
        observation: ``[B, *obs]``.
        needs_reset: bool ``[B]``, this is the reset row, the last one of its episode.
    """
    is_full = window.count == window.seen.episode.shape[1]
    window = jax.tree.map(lambda x, y: jnp.where(is_full, x, y), begin(window), window)
    seen = jax.tree.map(
        lambda x, new: x.at[:, window.count].set(new), window.seen, Seen(observation, window.running)
    )
    return Window(seen, window.running + needs_reset, window.count + 1)


def of_episode(observations: Sequence[PyTree], length: int) -> Window:
    """The window before the last of an episode's observations; the first one begins a block.

    Args:
        observations: each ``[1, *obs]``.
        length: ``L``.
    """
    before = len(observations) - 1
    block, place = divmod(before, length)
    start = 0 if block else length
    window = empty(observations[-1], length)

    def fill(x, *rows):
        x[0, start : start + len(rows)] = np.concatenate(rows)

    rows = [Seen(x, np.ones(1, np.int32)) for x in observations[max(0, block - 1) * length : before]]
    if rows:
        jax.tree.map(fill, window.seen, *rows)
    return window._replace(count=np.int32(length + place))


def see(rollout: Rollout, window: Window | None = None) -> Rollout:
    """A rollout as sequence models see it, with the rows before it in front.

    Args:
        rollout: host arrays ``[T, B]``.
        window: as it was when the rollout began, right after :func:`begin`; ``None`` if nothing is known.

    Returns:
        A rollout whose observations are :class:`rl_trainers.types.Seen`, ``[L + T, B]`` with mask 0 in the
        first ``L`` rows, or ``[T, B]`` without a window.
    """
    episode = episodes(rollout.steps)
    if window is None:
        seen, steps = Seen(rollout.steps.observation, episode[:-1]), rollout.steps
        last = Seen(rollout.last_observation, episode[-1])
        return rollout._replace(steps=steps._replace(observation=seen), last_observation=last)
    length = window.seen.episode.shape[1] // 2
    episode += np.asarray(window.running) - 1
    before = jax.tree.map(lambda x: np.asarray(x)[:, :length].swapaxes(0, 1), window.seen)
    seen = Seen(rollout.steps.observation, episode[:-1])
    seen = jax.tree.map(lambda x, y: np.concatenate([x, y]), before, seen)
    steps = jax.tree.map(
        lambda x: np.concatenate([np.zeros_like(x, shape=(length, *x.shape[1:])), x]),
        rollout.steps._replace(observation=()),
    )
    last = Seen(rollout.last_observation, episode[-1])
    return rollout._replace(steps=steps._replace(observation=seen), last_observation=last)


def see_recurrent(rollout: Rollout, first_state: PyTree) -> Rollout:
    """A rollout as recurrent models see it.

    Args:
        rollout: ``[T, B]``, whose ``policy_state`` is that before each row, or ``()`` if it is not known and
            every slice shall begin with
        first_state: the state ``[..]`` before the first row of an episode.

    Returns:
        A rollout whose observations are :class:`rl_trainers.types.Seen`.
    """
    steps = rollout.steps
    episode = episodes(steps)
    first = states(first_state, *steps.mask.shape)
    known = jax.tree.leaves(steps.policy_state)
    seen = Seen(steps.observation, episode[:-1], steps.policy_state if known else first)
    # Nothing begins with the last observation, so its state is never looked at.
    last = Seen(rollout.last_observation, episode[-1], jax.tree.map(lambda x: x[0], first))
    return rollout._replace(steps=steps._replace(observation=seen), last_observation=last)


def states(first_state: PyTree, *leading: int) -> PyTree:
    """``first_state [..]`` for many, ``[*leading, ..]``."""
    return jax.tree.map(lambda x: np.broadcast_to(x, (*leading, *x.shape)), first_state)


def follow(state: PyTree, needs_reset: jax.Array, first_state: PyTree) -> PyTree:
    """The state before the next row: that of a first row after reset rows; traced.

    Args:
        state: ``[B, ..]`` after this row.
        needs_reset: bool ``[B]``, this is the reset row, the last one of its episode.
        first_state: ``[..]``.
    """

    def choose(x, first):
        return jnp.where(needs_reset.reshape(-1, *[1] * (x.ndim - 1)), first, x)

    return jax.tree.map(choose, state, first_state)


def episodes(steps: TimeStep) -> Any:
    """Numbers of episodes i32 ``[T + 1, B]``, from 1 on; the last row's is that of the successor.

    An episode is over after a row without a decision, or after its end if there is no such row.

    Args:
        steps: ``[T, B]``, host arrays or traced.
    """
    xp: Any = np if isinstance(steps.mask, np.ndarray) else jnp
    undecided = steps.mask == 0
    ended = xp.concatenate([steps.done[:-1] & ~undecided[1:], xp.zeros_like(undecided[:1])])
    first = xp.ones_like(undecided[:1], dtype=np.int32)
    return xp.concatenate([first, 1 + xp.cumsum(undecided | ended, axis=0, dtype=np.int32)])


def blocks(tree: PyTree, length: int) -> PyTree:
    """Cuts ``[T, B, ..]`` into blocks ``[N, L, ..]``, ``N = ceil(T / L) B``, the last filled up with 0."""

    def cut(x):
        steps, envs = x.shape[:2]
        x = jnp.pad(x, [(0, -steps % length)] + [(0, 0)] * (x.ndim - 1))
        x = x.reshape(-1, length, envs, *x.shape[2:]).swapaxes(1, 2)
        return x.reshape(-1, length, *x.shape[3:])

    return jax.tree.map(cut, tree)


def blocks_and_before(tree: PyTree, length: int) -> PyTree:
    """Rows ``[N, 2 L, ..]``: the blocks of ``[T, B, ..]``, each behind the one before it, or behind zeros."""

    def cut(x):
        own = blocks(x, length)
        before = jnp.concatenate([jnp.zeros_like(x, shape=(length, *x.shape[1:])), x])
        return jnp.concatenate([blocks(before, length)[: len(own)], own], axis=1)

    return jax.tree.map(cut, tree)


def over_rollout(
    apply: Callable[..., PyTree], observation: PyTree, length: int, *others: PyTree
) -> PyTree:
    """``apply`` to whole rollouts, with the context that :func:`append` gave.

    Args:
        apply: a model; its output has the leading axes of what it is given.
        observation: ``[T, B, ..]``; only for :class:`rl_trainers.types.Seen` the rest matters.
        length: ``L``.
        *others: more arguments ``[T, B, ..]`` of the model.

    Returns:
        What ``apply`` says, ``[T, B, ..]``.
    """

    def alone(*rows):  # Several devices may share the environments; of rows [T B] each would do all.
        return jax.tree.map(lambda y: y[:, 0], apply(*jax.tree.map(lambda x: x[:, None], rows)))

    if not isinstance(observation, Seen):
        return jax.vmap(alone, 1, 1)(observation, *others)
    if jax.tree.leaves(observation.state):
        runs = jax.tree.map(lambda x: jnp.swapaxes(x, 0, 1), (observation, *others))
        return jax.tree.map(lambda y: jnp.swapaxes(y, 0, 1), apply(*runs))
    steps, envs = observation.episode.shape

    def join(y):
        y = y[:, length:].reshape(-1, envs, length, *y.shape[2:]).swapaxes(1, 2)
        return y.reshape(-1, envs, *y.shape[3:])[:steps]

    return jax.tree.map(join, apply(*blocks_and_before((observation, *others), length)))
