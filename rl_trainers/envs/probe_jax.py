"""The environments of :mod:`rl_trainers.envs.probe` as :class:`rl_trainers.envs.native.JaxEnv`.

Values, rewards and observations are those of the classes of the same names, except that ``counting`` knows
no environment number and gives its episodes random ones.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import gymnasium
import jax
import jax.numpy as jnp
import numpy as np
from gymnasium import spaces

from rl_trainers.envs.native import JaxEnv, make_jax_env
from rl_trainers.envs.probe import decisions, unpaid

_UNIT = spaces.Box(-1.0, 1.0, (1,), np.float32)
_COUNTS = spaces.Box(0.0, np.inf, (1,), np.float32)
_FOREVER = int(np.iinfo(np.int32).max)
_MOST_EPISODES = 2**24  # numbers that f32 can tell apart


class ProbeState(NamedTuple):
    """Where an episode stands.

    Attributes:
        t: i32, steps taken.
        sign: f32, -1 or 1, drawn by the reset, and by every step of some.
        episode: i32, a number drawn by the reset.
    """

    t: Any
    sign: Any
    episode: Any


class _Kind(NamedTuple):
    """What tells one probe from another, in the words of :class:`rl_trainers.envs.probe.Probe`."""

    name: str
    look: Callable[[ProbeState], jax.Array] = lambda state: jnp.zeros(1)
    pay: Callable[[ProbeState, jax.Array], Any] = lambda state, action: 1.0
    length: int = 1
    truncates: bool = False
    observation_space: gymnasium.Space = _UNIT
    redraws: bool = False
    actions: gymnasium.Space = _UNIT  # if they are continuous


def _make(kind: _Kind, continuous: bool) -> JaxEnv:
    def reset(key):
        key_sign, key_episode = jax.random.split(key)
        sign = jax.random.rademacher(key_sign, (), jnp.float32)
        state = ProbeState(jnp.int32(0), sign, jax.random.randint(key_episode, (), 0, _MOST_EPISODES))
        return state, kind.look(state)

    def step(state, action, key):
        state = state._replace(t=state.t + 1)
        done = state.t >= kind.length
        ends = done & (not kind.truncates), done & kind.truncates
        reward = kind.pay(state, action)
        if kind.redraws:
            state = state._replace(sign=jax.random.rademacher(key, (), jnp.float32))
        return state, kind.look(state), reward, *ends, {}

    action_space = kind.actions if continuous else spaces.Discrete(2)
    return make_jax_env(JaxEnv(reset, step, kind.observation_space, action_space, kind.name))


def _match(action: jax.Array, sign: Any) -> jax.Array:
    """See :meth:`rl_trainers.envs.probe.Probe.match`."""
    if jnp.issubdtype(action.dtype, jnp.floating):
        return 1.0 - (action.reshape(()) - 0.5 * sign) ** 2
    return jnp.where((action == 1) == (sign > 0), 1.0, -1.0)


def constant_reward(continuous: bool = False) -> JaxEnv:
    """One step, observation 0, reward 1: ``V = 1``."""
    return _make(_Kind("ConstantReward"), continuous)


def observation_reward(continuous: bool = False) -> JaxEnv:
    """One step, observation -1 or 1, which is also the reward: ``V(x) = x``."""
    return _make(
        _Kind("ObservationReward", lambda state: state.sign[None], lambda state, action: state.sign),
        continuous,
    )


def delayed_reward(continuous: bool = False) -> JaxEnv:
    """Two steps with observations 0 and 1, reward 1 at the end: ``V(0) = gamma``, ``V(1) = 1``."""
    return _make(
        _Kind(
            "DelayedReward",
            lambda state: jnp.minimum(state.t, 1).astype(jnp.float32)[None],
            lambda state, action: (state.t == 2).astype(jnp.float32),
            length=2,
        ),
        continuous,
    )


def action_reward(continuous: bool = False) -> JaxEnv:
    """One step, observation 0, reward ``match(action, 1)``: the best action is 1 (continuous: 0.5)."""
    return _make(_Kind("ActionReward", pay=lambda state, action: _match(action, 1.0)), continuous)


def action_and_observation_reward(continuous: bool = False) -> JaxEnv:
    """One step, observation -1 or 1, reward ``match(action, observation)``."""
    return _make(
        _Kind(
            "ActionAndObservationReward",
            lambda state: state.sign[None],
            lambda state, action: _match(action, state.sign),
        ),
        continuous,
    )


def endless(continuous: bool = False) -> JaxEnv:
    """Never ends, reward 1, observation = steps since reset: ``V = 1 / (1 - gamma)`` everywhere."""
    return _make(
        _Kind(
            "Endless",
            lambda state: state.t.astype(jnp.float32)[None],
            length=_FOREVER,
            observation_space=_COUNTS,
        ),
        continuous,
    )


def counting(length: int, truncates: bool = False, continuous: bool = False) -> JaxEnv:
    """Observation ``[0, episode, t]``, reward ``t``; tells which rows belong together.

    Args:
        length: steps of an episode.
        truncates: episodes are truncated instead of terminated.
        continuous: actions from ``Box(-1, 1, (1,))`` in place of ``Discrete(2)``.
    """
    return _make(
        _Kind(
            "Counting",
            lambda state: jnp.stack([0 * state.t, state.episode, state.t]).astype(jnp.float32),
            lambda state, action: state.t.astype(jnp.float32),
            length,
            truncates,
            spaces.Box(-1.0, np.inf, (3,), np.float32),
        ),
        continuous,
    )


def _fixed_length(name: str, episode_length: int, continuous: bool, **kind: Any) -> JaxEnv:
    actions = spaces.Box(0.0, 1.0, (1,), np.float32)
    return _make(_Kind(name, length=decisions(episode_length), actions=actions, **kind), continuous)


def fixed_length(episode_length: int, continuous: bool = False) -> JaxEnv:
    """Observation 1, reward 1, ``episode_length - 1`` decisions; see the class of that name."""
    return _fixed_length("FixedLength", episode_length, continuous, look=lambda state: jnp.ones(1))


def fixed_length_policy(episode_length: int, continuous: bool = False) -> JaxEnv:
    """Observation 0 or 1, drawn at every step; an action's reward is ``1 - |action - observation|``.

    See the class of that name.
    """
    return _fixed_length(
        "FixedLengthPolicy",
        episode_length,
        continuous,
        look=lambda state: (state.sign[None] + 1) / 2,
        pay=lambda state, action: 1.0 - jnp.abs(action.reshape(()) - (state.sign + 1) / 2),
        redraws=True,
    )


def fixed_length_memory(episode_length: int = 5, gap: int = 3, continuous: bool = False) -> JaxEnv:
    """The first observation is -1 or 1 and what actions after ``gap`` others must recall.

    See the class of that name.
    """
    gap = unpaid(gap, decisions(episode_length))

    def pay(state: ProbeState, action: jax.Array) -> jax.Array:
        off = jnp.abs(2 * action.reshape(()) - 1 - state.sign)
        return jnp.where(state.t > gap, 1.0 - 0.5 * off, 0.0)

    return _fixed_length(
        "FixedLengthMemory",
        episode_length,
        continuous,
        look=lambda state: jnp.where(state.t == 0, state.sign, 0.0)[None],
        pay=pay,
    )
