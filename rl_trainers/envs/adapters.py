"""Older interfaces as ``gymnasium.Env``: gym before 0.26, and dm_env; neither is imported."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces


def as_gymnasium(env: Any) -> gymnasium.Env:
    """Returns ``env`` as a ``gymnasium.Env``.

    Raises:
        TypeError: the object has none of the known interfaces.
        ValueError: one of its spaces has no counterpart.
    """
    if isinstance(env, gymnasium.Env):
        return env
    for adapter, kind in ((DmEnv, "spec"), (LegacyGymEnv, "space")):
        if all(hasattr(env, name) for name in ("reset", "step", f"action_{kind}", f"observation_{kind}")):
            return adapter(env)
    raise TypeError(
        f"env: {type(env).__qualname__} is none of a gymnasium.Env, an old gym environment (reset, "
        "step, action_space, observation_space) and a dm_env.Environment"
    )


class _Adapter(gymnasium.Env):
    """What the adapters share."""

    def __init__(self, env: Any, observation_space: spaces.Space, action_space: spaces.Space):
        self.env = env
        self.observation_space = observation_space
        self.action_space = action_space

    @property
    def unwrapped(self) -> Any:
        """The adapted environment, which is not a ``gymnasium.Env``."""
        return getattr(self.env, "unwrapped", self.env)

    def close(self) -> None:
        """Closes the adapted environment."""
        if hasattr(self.env, "close"):
            self.env.close()


class LegacyGymEnv(_Adapter):
    """An environment of gym: four values from ``step``, a bare observation from ``reset``.

    A time limit is read from ``info['TimeLimit.truncated']``. The five values and the ``(observation,
    info)`` of gym 0.26 are understood as well.
    """

    def __init__(self, env: Any):
        super().__init__(env, _space(env.observation_space), _space(env.action_space))

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> tuple[Any, dict]:
        """Starts an episode; a seed goes to ``env.seed``, or to ``env.reset`` if there is none."""
        has_seed = hasattr(self.env, "seed")
        if seed is not None and has_seed:
            self.env.seed(seed)
        result = self.env.reset() if seed is None or has_seed else self.env.reset(seed=seed)
        pair = isinstance(result, tuple) and len(result) == 2 and isinstance(result[1], dict)
        if pair and not isinstance(self.observation_space, spaces.Tuple):
            return result
        return result, {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict]:
        """One step; ``done`` is split into terminated and truncated."""
        result = self.env.step(action)
        if len(result) == 5:
            return result
        observation, reward, done, info = result
        truncated = bool(done and info.get("TimeLimit.truncated", False))
        return observation, reward, bool(done) and not truncated, truncated, info


class DmEnv(_Adapter):
    """A ``dm_env.Environment``.

    A last step with discount 0 terminated; with any other discount it was truncated. Discounts of other
    steps are not used. dm_env has no seeds: one is passed on to ``env.task.random`` (dm_control) where that
    exists.
    """

    def __init__(self, env: Any):
        super().__init__(env, _spec(env.observation_spec()), _spec(env.action_spec()))

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> tuple[Any, dict]:
        """Starts an episode."""
        source = getattr(getattr(self.env, "task", None), "random", None)
        if seed is not None and isinstance(source, np.random.RandomState):
            source.seed(seed)
        return _plain_nest(self.env.reset().observation), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict]:
        """One step."""
        step = self.env.step(action)
        last = bool(step.last())
        terminated = last and float(step.discount) == 0.0
        reward = 0.0 if step.reward is None else float(step.reward)
        return _plain_nest(step.observation), reward, terminated, last and not terminated, {}


_SPACES: dict[str, Callable[[Any], spaces.Space]] = {
    "Box": lambda s: spaces.Box(np.asarray(s.low), np.asarray(s.high), dtype=s.dtype.type),
    "Discrete": lambda s: spaces.Discrete(int(s.n), start=int(getattr(s, "start", 0))),
    "MultiDiscrete": lambda s: spaces.MultiDiscrete(np.asarray(s.nvec)),
    "MultiBinary": lambda s: spaces.MultiBinary(s.n),
    "Dict": lambda s: spaces.Dict({name: _space(child) for name, child in s.spaces.items()}),
    "Tuple": lambda s: spaces.Tuple([_space(child) for child in s.spaces]),
}


def _space(space: Any) -> spaces.Space:
    """The gymnasium space that equals a space of gym, found by the name of its class."""
    if isinstance(space, spaces.Space):
        return space
    kind = type(space).__name__
    if kind not in _SPACES:
        raise ValueError(f"env: a gym space of kind {kind} is not supported; known are {', '.join(_SPACES)}")
    return _SPACES[kind](space)


def _spec(spec: Any) -> spaces.Space:
    """The gymnasium space of a dm_env spec or of a nest of specs."""
    if isinstance(spec, (list, tuple)):
        return spaces.Tuple([_spec(child) for child in spec])
    if hasattr(spec, "items"):
        return spaces.Dict({name: _spec(child) for name, child in spec.items()})
    if hasattr(spec, "num_values"):
        return spaces.Discrete(int(spec.num_values))
    dtype = np.dtype(spec.dtype)
    if dtype == np.bool_:
        return spaces.MultiBinary(spec.shape)
    if dtype.kind not in "iuf":
        raise ValueError(f"env: a dm_env spec of dtype {dtype} is not supported ({spec})")
    ends = (-np.inf, np.inf) if dtype.kind == "f" else (np.iinfo(dtype).min, np.iinfo(dtype).max)
    low = np.broadcast_to(getattr(spec, "minimum", ends[0]), spec.shape).astype(dtype)
    high = np.broadcast_to(getattr(spec, "maximum", ends[1]), spec.shape).astype(dtype)
    return spaces.Box(low, high, spec.shape, dtype.type)


def _plain_nest(value: Any) -> Any:
    """Ordered dicts and lists as the dicts and tuples that gymnasium spaces batch."""
    if hasattr(value, "items"):
        return {name: _plain_nest(child) for name, child in value.items()}
    if isinstance(value, (list, tuple)):
        return tuple(_plain_nest(child) for child in value)
    return value
