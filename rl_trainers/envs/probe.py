"""Tiny environments whose values are known, to find out which part of a learner is broken.

After A. Jones, "Debugging RL, without the agonizing pain" (2021): each adds one difficulty to the one
before. All have observations f32, and actions from ``Discrete(2)`` or, with ``continuous=True``, from
``Box(-1, 1, (1,))``. ``gamma`` below is the agent's.
"""

# What `look` and `pay` return is said once, by the class.
# ruff: noqa: D102

from __future__ import annotations

from typing import Any

import gin
import gymnasium
import numpy as np
from gymnasium import spaces


class Probe(gymnasium.Env):
    """Episodes of ``length`` steps; ``look`` gives the observation and ``pay`` the reward of a step.

    Args:
        continuous: actions from ``Box(-1, 1, (1,))`` in place of ``Discrete(2)``.
    """

    length = 1
    truncates = False
    redraws = False  # whether every step draws `sign` anew
    observation_space: gymnasium.Space = spaces.Box(-1.0, 1.0, (1,), np.float32)

    def __init__(self, continuous: bool = False):
        self.continuous = continuous
        self.action_space = spaces.Box(-1.0, 1.0, (1,), np.float32) if continuous else spaces.Discrete(2)
        self.t, self.sign = 0, 1.0

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> tuple[Any, dict]:
        """Starts an episode and draws ``sign``, -1 or 1."""
        super().reset(seed=seed)
        self.t, self.sign = 0, float(self.np_random.choice([-1.0, 1.0]))
        return self.look(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict]:
        """One step; the episode ends after ``length`` of them."""
        self.t += 1
        reward, done = self.pay(action), self.t >= self.length
        if self.redraws:
            self.sign = float(self.np_random.choice([-1.0, 1.0]))
        return self.look(), reward, done and not self.truncates, done and self.truncates, {}

    def look(self) -> np.ndarray:
        return np.zeros(1, np.float32)

    def pay(self, action: Any) -> float:
        return 1.0

    def match(self, action: Any, sign: float) -> float:
        """1 for the best action, less for others.

        The best one is 1 (``sign`` 1) or 0 (``sign`` -1), and the other one pays -1. Continuous: the best
        one is ``0.5 * sign``, and the reward is ``1 - (action - best) ** 2``.
        """
        if self.continuous:
            return 1.0 - (float(np.asarray(action).reshape(())) - 0.5 * sign) ** 2
        return 1.0 if (int(action) == 1) == (sign > 0) else -1.0


class ConstantReward(Probe):
    """One step, observation 0, reward 1: ``V = 1``."""


class ObservationReward(Probe):
    """One step, observation -1 or 1, which is also the reward: ``V(x) = x``."""

    def look(self) -> np.ndarray:
        return np.full(1, self.sign, np.float32)

    def pay(self, action: Any) -> float:
        return self.sign


class DelayedReward(Probe):
    """Two steps with observations 0 and 1, reward 1 at the end: ``V(0) = gamma``, ``V(1) = 1``."""

    length = 2

    def look(self) -> np.ndarray:
        return np.full(1, min(self.t, 1), np.float32)

    def pay(self, action: Any) -> float:
        return float(self.t == 2)


class ActionReward(Probe):
    """One step, observation 0, reward ``match(action, 1)``: the best action is 1 (continuous: 0.5)."""

    def pay(self, action: Any) -> float:
        return self.match(action, 1.0)


class ActionAndObservationReward(ObservationReward):
    """One step, observation -1 or 1, reward ``match(action, observation)``."""

    def pay(self, action: Any) -> float:
        return self.match(action, self.sign)


class Endless(Probe):
    """Never ends, reward 1, observation = steps since reset: ``V = 1 / (1 - gamma)`` everywhere."""

    observation_space = spaces.Box(0.0, np.inf, (1,), np.float32)
    length = 2**62

    def look(self) -> np.ndarray:
        return np.full(1, self.t, np.float32)


class Counting(Probe):
    """Observation ``[env_id, episode, t]``, reward ``t``; tells which rows belong together.

    Args:
        length: steps of an episode.
        env_id: first number of every observation.
        truncates: episodes are truncated instead of terminated.
        continuous: as in :class:`Probe`.
    """

    observation_space = spaces.Box(-1.0, np.inf, (3,), np.float32)

    def __init__(self, length: int, env_id: int = 0, truncates: bool = False, continuous: bool = False):
        super().__init__(continuous)
        self.length, self.env_id, self.truncates, self.episode = length, env_id, truncates, -1

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> tuple[Any, dict]:
        """Starts the next episode; the first one is number 0."""
        self.episode += 1
        return super().reset(seed=seed, options=options)

    def look(self) -> np.ndarray:
        return np.array([self.env_id, self.episode, self.t], np.float32)

    def pay(self, action: Any) -> float:
        return float(self.t)


@gin.configurable(module="rl_trainers.envs")
class Memory(Probe):
    """Six steps; the first observation shows what the last action must be, for a reward of 1, else 0.

    Observations are ``[cue, last]``: a cue of -1 or 1 in the first step and 0 afterwards, and 1 in the last
    step. Who does not remember the cue for five steps gets 0.5 on average.
    """

    length = 6
    observation_space = spaces.Box(-1.0, 1.0, (2,), np.float32)

    def look(self) -> np.ndarray:
        cue = self.sign if self.t == 0 else 0.0
        return np.array([cue, self.t == self.length - 1], np.float32)

    def pay(self, action: Any) -> float:
        return max(0.0, self.match(action, self.sign)) if self.t == self.length else 0.0


class FixedLength(Probe):
    """Observation 1, reward 1: ``V`` is the number of decisions that are left, where ``gamma`` is 1.

    ALF's ``ValueUnittestEnv``, whose episodes count the observation after the last decision too; so do
    ``episode_length`` here and the two classes below. All terminate. Actions are from ``Discrete(2)`` or,
    with ``continuous=True``, from ``Box(0, 1, (1,))``.

    Args:
        episode_length: observations of an episode, at least 2; there is one decision less.
        continuous: see above.

    Raises:
        ValueError: ``episode_length`` is less than 2.
    """

    def __init__(self, episode_length: int, continuous: bool = False):
        super().__init__(continuous)
        if continuous:
            self.action_space = spaces.Box(0.0, 1.0, (1,), np.float32)
        self.length = decisions(episode_length)

    def look(self) -> np.ndarray:
        return np.ones(1, np.float32)


class FixedLengthPolicy(FixedLength):
    """Observation 0 or 1, drawn at every step; an action's reward is ``1 - |action - observation|``.

    That is the observation that the action was chosen for. ALF's ``PolicyUnittestEnv``.
    """

    redraws = True

    def look(self) -> np.ndarray:
        return np.full(1, (self.sign + 1) / 2, np.float32)

    def pay(self, action: Any) -> float:
        return 1.0 - abs(float(np.asarray(action).reshape(())) - (self.sign + 1) / 2)


class FixedLengthMemory(FixedLength):
    """The first observation is -1 or 1 and what late actions must recall; all later ones are 0.

    An action's reward is ``1 - |2 action - 1 - first| / 2``, but 0 for the first ``gap`` decisions of an
    episode. ALF's ``RNNPolicyUnittestEnv``, which shows at step s, the first one being 0, the reward of the
    action taken at step s - 1, and pays at the steps s > gap. So with ``episode_length`` 5 and ``gap`` 3 the
    fourth and last decision alone is paid, and the best return is ``episode_length - 1 - gap`` = 1.

    Args:
        episode_length: observations of an episode, at least 2; there is one decision less.
        gap: decisions without a reward, from 0 on and less than there are decisions.
        continuous: see :class:`FixedLength`.

    Raises:
        ValueError: ``episode_length`` is less than 2, or ``gap`` leaves nothing to be paid.
    """

    def __init__(self, episode_length: int = 5, gap: int = 3, continuous: bool = False):
        super().__init__(episode_length, continuous)
        self.gap = unpaid(gap, self.length)

    def look(self) -> np.ndarray:
        return np.full(1, self.sign if self.t == 0 else 0.0, np.float32)

    def pay(self, action: Any) -> float:
        off = abs(2 * float(np.asarray(action).reshape(())) - 1 - self.sign)
        return 1.0 - 0.5 * off if self.t > self.gap else 0.0


def decisions(episode_length: int) -> int:
    """Decisions of an episode with so many observations."""
    if episode_length < 2:
        raise ValueError(f"episode_length: must be >= 2, got {episode_length}; the nearest valid value is 2")
    return episode_length - 1


def unpaid(gap: int, length: int) -> int:
    """``gap``, if some of ``length`` decisions come after it."""
    if not 0 <= gap < length:
        nearest = min(max(gap, 0), length - 1)
        raise ValueError(f"gap: must be 0..{length - 1}, got {gap}; the nearest valid value is {nearest}")
    return gap
