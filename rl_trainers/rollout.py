"""Acting: one decision (`act`), and unrolls of many over host environments and over JAX ones.

This module and ``envs/`` are the only places that step an environment.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from rl_trainers.envs import native
from rl_trainers.types import ActorState, EnvInfo, PyTree, Rollout, TimeStep
from rl_trainers.windows import Window

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


NO_EPISODES = Episodes(np.zeros(0), np.zeros(0, np.int64))


class Endings(NamedTuple):
    """Episodes that ended within a rollout, where they ended; of fixed shape.

    Attributes:
        returns: f32 ``[T, B]``, undiscounted; means nothing where ``mask`` is false.
        lengths: i32 ``[T, B]``, decisions taken; likewise.
        mask: bool ``[T, B]``, whether an episode ended with this row.
    """

    returns: Any
    lengths: Any
    mask: Any

    def episodes(self) -> Episodes:
        """The same as host arrays, in the order in which they ended."""
        returns, lengths, mask = jax.device_get(self)
        return Episodes(returns[mask].astype(np.float64), lengths[mask].astype(np.int64))


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
        env: a :class:`rl_trainers.envs.HostEnv`; the arrays it returns are kept, so they must be new ones.
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
    rows, infos = [], []
    observation, policy_state, key = actor.observation, actor.policy_state, actor.key
    needs_reset = actor.needs_reset
    for _ in range(unroll_length):
        before = recorded(policy_state)
        action, dist_inputs, policy_state, key = act(observation, policy_state, needs_reset, key)
        action = _to_host(action)
        following, reward, terminated, truncated, info = env.step(to_env(action))
        rows.append((observation, action, dist_inputs, reward, terminated, truncated, before))
        infos.append(info)
        observation, needs_reset = following, terminated | truncated
        if stop is not None and stop(needs_reset):
            break
    steps = _to_steps(rows, infos, actor.needs_reset)
    episodes, episode_return, episode_length = account(steps, actor)
    actor = ActorState(
        (), observation, policy_state, needs_reset, key, episode_return, episode_length
    )
    return actor, Rollout(steps, observation), episodes


# Environments on the device.


def start_scan(env, num_envs: int, key_env, key, policy_state: PyTree = ()) -> ActorState:
    """Resets ``B`` environments; traced or not.

    Args:
        env: a :class:`rl_trainers.envs.native.JaxEnv`.
        num_envs: ``B``.
        key_env: u32 ``[2]``, for all that the environments draw from now on.
        key: u32 ``[2]``, to act with.
        policy_state: initial recurrent state ``[B, ..]``, ``()`` if none.
    """
    envs, observation = native.reset(env, num_envs, key_env)
    return ActorState(
        env_state=envs,
        observation=observation,
        policy_state=policy_state,
        needs_reset=jnp.zeros(num_envs, bool),
        key=key,
        episode_return=jnp.zeros(num_envs, jnp.float32),
        episode_length=jnp.zeros(num_envs, jnp.int32),
    )


def unroll_scan(
    env,
    act: Act,
    actor: ActorState,
    unroll_length: int,
    to_env: Callable = lambda action: action,
) -> tuple[ActorState, Rollout, Endings]:
    """Steps JAX environments ``unroll_length`` times; traced. The rows are those of :func:`unroll_host`.

    Args:
        env: a :class:`rl_trainers.envs.native.JaxEnv`.
        act: chooses the actions, see :data:`Act`; traced.
        actor: where the environments stand, see :func:`start_scan`.
        unroll_length: ``T``, vector steps to take; reset rows count.
        to_env: maps stored actions to what the environment receives; traced.

    Returns:
        ``(actor, rollout, endings)``: where the environments stand now, the facts ``[T, B]``
        (``dist_inputs`` is ``None`` if ``act`` gave none), and the episodes that ended.
    """

    def row(actor: ActorState, _):
        return row_scan(env, act, actor, to_env)

    actor, (steps, endings) = jax.lax.scan(row, actor, length=unroll_length)
    return actor, Rollout(steps, actor.observation), endings


def play_scan(
    env, act: Act, actor: ActorState, limit: Any, to_env: Callable = lambda action: action
) -> tuple[jax.Array, jax.Array]:
    """Plays the first episode of each of ``B`` JAX environments; traced.

    Args:
        env: a :class:`rl_trainers.envs.native.JaxEnv`.
        act: chooses the actions, see :data:`Act`; traced.
        actor: right after a reset.
        limit: i32 ``[]``, decisions after which an episode counts as over.
        to_env: maps stored actions to what the environment receives; traced.

    Returns:
        ``(return f32 [B], length i32 [B])``.
    """

    def is_running(x):
        return jnp.any(x[1])

    def step(x):
        actor, runs, returns, lengths = x
        actor, (steps, _) = row_scan(env, act, actor, to_env)
        returns = returns + jnp.where(runs, steps.reward, 0.0)
        lengths = lengths + runs.astype(jnp.int32)
        return actor, runs & ~steps.done & (lengths < limit), returns, lengths

    runs = ~actor.needs_reset
    start = (actor, runs, jnp.zeros(len(runs)), jnp.zeros(len(runs), jnp.int32))
    return jax.lax.while_loop(is_running, step, start)[2:]


def row_scan(
    env, act: Act, actor: ActorState, to_env: Callable = lambda action: action
) -> tuple[ActorState, tuple[TimeStep, Endings]]:
    """One row of :func:`unroll_scan`, whose arguments these are; steps and endings are ``[B]``."""
    action, dist_inputs, policy_state, key = act(
        actor.observation, actor.policy_state, actor.needs_reset, actor.key
    )
    anew = actor.needs_reset
    envs, observation, reward, terminated, truncated, info = native.step_or_reset(
        env, actor.env_state, anew, actor.episode_length, to_env(action)
    )
    steps = TimeStep(
        observation=actor.observation,
        action=action,
        reward=reward,
        terminated=terminated,
        truncated=truncated,
        mask=(~anew).astype(jnp.float32),
        dist_inputs=dist_inputs,
        policy_state=recorded(actor.policy_state),
        env_info=EnvInfo(*(info[name] for name in EnvInfo._fields)),
    )
    total = actor.episode_return + steps.reward
    count = actor.episode_length + steps.mask.astype(jnp.int32)
    endings = Endings(total, count, steps.done)
    total, count = jnp.where(steps.done, 0, total), jnp.where(steps.done, 0, count)
    actor = ActorState(envs, observation, policy_state, steps.done, key, total, count)
    return actor, (steps, endings)


def recorded(policy_state: PyTree) -> PyTree:
    """What a row keeps of it: a recurrent state; of a window nothing, since the rows show it."""
    return () if isinstance(policy_state, Window) else policy_state


def all_finite(steps: TimeStep) -> jax.Array:
    """Whether no reward and no observation is NaN or infinite, bool ``[]``; traced."""
    leaves = [steps.reward, *jax.tree.leaves(steps.observation)]
    return jnp.all(jnp.stack([jnp.all(jnp.isfinite(x)) for x in leaves]))


def _to_host(tree: PyTree) -> PyTree:
    return np.asarray(tree) if isinstance(tree, jax.Array) else jax.tree.map(np.asarray, tree)


def _to_steps(rows: list[tuple], infos: list[dict], needs_reset: np.ndarray) -> TimeStep:
    stacked = jax.tree.map(lambda *xs: np.stack(xs), *rows)
    observation, action, dist_inputs, reward, terminated, truncated, policy_state = stacked
    mask = np.concatenate([~needs_reset[None], ~(terminated | truncated)[:-1]]).astype(np.float32)
    return TimeStep(
        observation=observation,
        action=action,
        reward=reward * mask,
        terminated=terminated,
        truncated=truncated,
        mask=mask,
        dist_inputs=dist_inputs,
        policy_state=policy_state,
        env_info=EnvInfo(*(_env_info(infos, name, mask.shape) for name in EnvInfo._fields)),
    )


def _env_info(infos: list[dict], name: str, shape: tuple[int, ...]) -> np.ndarray:
    ones = np.broadcast_to(np.ones((), np.float32), shape)
    if not any(name in info for info in infos):
        return ones
    return np.stack([np.asarray(info.get(name, ones[0]), np.float32) for info in infos])


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
