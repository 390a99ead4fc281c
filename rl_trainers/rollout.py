"""Acting: one decision (`act`), and unrolls of many over host environments.

This module and ``envs/`` are the only places that step an environment.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np

from rl_trainers.types import ActorState, EnvInfo, PyTree, Rollout, TimeStep

Act = Callable[[PyTree, PyTree, Any, Any], tuple[PyTree, Any, PyTree, Any]]
"""``(observation, policy_state, needs_reset, key) -> (action, dist_inputs, policy_state, key)``.

All with leading axis ``[B]``; ``dist_inputs`` is ``None`` where it is computed for whole rollouts later.
"""


class Episodes(NamedTuple):
    """Episodes that ended within a rollout, in the order in which they ended.

    Attributes:
        returns: f64 ``[E]``, undiscounted.
        lengths: i64 ``[E]``, decisions taken.
    """

    returns: np.ndarray
    lengths: np.ndarray


def act(apply, distribution, params, model_state, observation, key, temperature):
    """Takes one decision per environment.

    Args:
        apply: ``Model.apply`` of a policy; its output is ``dist_inputs [.., D]``.
        distribution: from :func:`rl_trainers.distributions.create_distribution`.
        params: parameters of the model.
        model_state: statistics of the model.
        observation: ``[B, *obs]``.
        key: u32 ``[2]``; consumed.
        temperature: f32 ``[]``; 1 samples, 0 takes the mode.

    Returns:
        ``(action [B, *act], dist_inputs f32 [B, D], key)`` with a fresh key.
    """
    key, key_act = jax.random.split(key)
    dist_inputs = apply(params, model_state, observation)
    return distribution.sample(dist_inputs, key_act, temperature), dist_inputs, key


def initial_actor(observation, num_envs: int, key, policy_state: PyTree = ()) -> ActorState:
    """The actor state right after a reset of all environments.

    Args:
        observation: ``[B, *obs]`` what the reset returned.
        num_envs: ``B``.
        key: u32 ``[2]``.
        policy_state: initial recurrent state ``[B, ..]``, ``()`` if none.
    """
    return ActorState(
        env_state=(),
        observation=observation,
        policy_state=policy_state,
        needs_reset=np.zeros(num_envs, bool),
        key=key,
        episode_return=np.zeros(num_envs, np.float64),
        episode_length=np.zeros(num_envs, np.int64),
    )


class _Rows:
    """Preallocated ``[T, B, ..]`` host arrays that an unroll writes row by row."""

    def __init__(self, length: int, num_envs: int):
        self.reward = np.zeros((length, num_envs), np.float32)
        self.terminated = np.zeros((length, num_envs), bool)
        self.truncated = np.zeros((length, num_envs), bool)
        self.trees: dict[str, PyTree] = {}
        self._leaves: dict[str, list[np.ndarray]] = {}
        self._length = length

    def write(self, name: str, t: int, tree: PyTree) -> None:
        if name not in self._leaves:
            self.trees[name] = jax.tree.map(
                lambda x: np.zeros((self._length, *np.shape(x)), np.asarray(x).dtype), tree
            )
            self._leaves[name] = jax.tree.leaves(self.trees[name])
        buffers = self._leaves[name]
        leaves = (tree,) if isinstance(tree, np.ndarray) else jax.tree.leaves(tree)
        for buffer, leaf in zip(buffers, leaves, strict=True):
            buffer[t] = leaf

    def cut(self, length: int) -> None:
        self.reward, self.terminated = self.reward[:length], self.terminated[:length]
        self.truncated = self.truncated[:length]
        self.trees = jax.tree.map(lambda x: x[:length], self.trees)


def unroll_host(
    env,
    act: Act,
    actor: ActorState,
    unroll_length: int,
    to_env: Callable = lambda action: action,
    stop: Callable[[np.ndarray], bool] | None = None,
) -> tuple[ActorState, Rollout, Episodes]:
    """Steps host environments ``unroll_length`` times.

    Args:
        env: a :class:`rl_trainers.envs.host.HostEnv`.
        act: chooses the actions, see :data:`Act`.
        actor: where the environments stand.
        unroll_length: ``T``, vector steps to take; reset rows count.
        to_env: maps stored actions to what the environment receives.
        stop: called after every vector step with bool ``[B]``, whether an episode ended; true ends
            the unroll early, and ``T`` is then smaller.

    Returns:
        ``(actor, rollout, episodes)``: where the environments stand now, the facts ``[T, B]`` as host
        arrays (``dist_inputs`` is ``None`` if ``act`` gave none), and the episodes that ended.
    """
    rows = _Rows(unroll_length, env.num_envs)
    observation, policy_state, key = actor.observation, actor.policy_state, actor.key
    needs_reset = actor.needs_reset
    for t in range(unroll_length):
        rows.write("observation", t, observation)
        action, dist_inputs, policy_state, key = act(observation, policy_state, needs_reset, key)
        action = _to_host(action)
        rows.write("action", t, action)
        if dist_inputs is not None:
            rows.write("dist_inputs", t, np.asarray(dist_inputs))
        observation, reward, terminated, truncated, info = env.step(to_env(action))
        rows.reward[t] = reward
        rows.terminated[t] = terminated
        rows.truncated[t] = truncated
        needs_reset = terminated | truncated
        if info:
            _write_env_info(rows, t, info, env.num_envs)
        if stop is not None and stop(needs_reset):
            rows.cut(t + 1)
            break
    steps = _to_steps(rows, actor.needs_reset)
    episodes, episode_return, episode_length = account(steps, actor)
    actor = ActorState(
        (), observation, policy_state, needs_reset, key, episode_return, episode_length
    )
    return actor, Rollout(steps, observation), episodes


def _to_host(tree: PyTree) -> PyTree:
    return np.asarray(tree) if isinstance(tree, jax.Array) else jax.tree.map(np.asarray, tree)


def _write_env_info(rows: _Rows, t: int, info: dict, num_envs: int) -> None:
    for name in EnvInfo._fields:
        if name in info:
            if name not in rows.trees:
                rows.write(name, 0, np.ones(num_envs, np.float32))
                rows.trees[name][:] = 1.0
            rows.write(name, t, np.asarray(info[name], np.float32))


def _to_steps(rows: _Rows, needs_reset: np.ndarray) -> TimeStep:
    mask = np.empty(rows.reward.shape, np.float32)
    mask[:1] = ~needs_reset
    mask[1:] = ~(rows.terminated | rows.truncated)[:-1]
    ones = np.ones((), np.float32)
    info = [rows.trees.get(name, np.broadcast_to(ones, mask.shape)) for name in EnvInfo._fields]
    return TimeStep(
        observation=rows.trees["observation"],
        action=rows.trees["action"],
        reward=rows.reward * mask,
        terminated=rows.terminated,
        truncated=rows.truncated,
        mask=mask,
        dist_inputs=rows.trees.get("dist_inputs"),
        env_info=EnvInfo(*info),
    )


def account(steps: TimeStep, actor: ActorState) -> tuple[Episodes, np.ndarray, np.ndarray]:
    """Returns and lengths of the episodes that ended, and of those that still run.

    Args:
        steps: host arrays ``[T, B]``.
        actor: the actor state before the first row.

    Returns:
        ``(episodes, episode_return f64 [B], episode_length i64 [B])``.
    """
    total = np.cumsum(steps.reward * steps.mask, axis=0, dtype=np.float64) + actor.episode_return
    count = np.cumsum(steps.mask > 0, axis=0) + actor.episode_length
    before_return = np.zeros(total.shape[1])
    before_length = np.zeros(total.shape[1], np.int64)
    returns, lengths = [], []
    for t, b in np.argwhere(steps.done):
        returns.append(total[t, b] - before_return[b])
        lengths.append(count[t, b] - before_length[b])
        before_return[b], before_length[b] = total[t, b], count[t, b]
    episodes = Episodes(np.asarray(returns, np.float64), np.asarray(lengths, np.int64))
    return episodes, total[-1] - before_return, count[-1] - before_length


def concatenate(rollouts: list[Rollout]) -> Rollout:
    """Joins rollouts of the same environments that follow one another, along ``T``."""
    if len(rollouts) == 1:
        return rollouts[0]
    steps = jax.tree.map(lambda *xs: np.concatenate(xs), *[r.steps for r in rollouts])
    return rollouts[-1]._replace(steps=steps)


def pad(rollout: Rollout, length: int) -> Rollout:
    """Appends rows with mask 0 until ``T == length``; they hold the last observation.

    Args:
        rollout: host arrays, ``T <= length``.
        length: the new ``T``.
    """
    steps = rollout.steps
    extra = length - steps.mask.shape[0]
    if extra == 0:
        return rollout
    padded = jax.tree.map(lambda x: np.pad(x, [(0, extra)] + [(0, 0)] * (x.ndim - 1)), steps)
    observation = jax.tree.map(
        lambda x, last: np.concatenate([x, np.broadcast_to(last, (extra, *last.shape))]),
        steps.observation,
        rollout.last_observation,
    )
    return rollout._replace(steps=padded._replace(observation=observation))


def bucket(length: int) -> int:
    """The smallest power of two that is at least ``length``; a run meets few different ones."""
    return 1 << max(0, length - 1).bit_length()
