"""One environment of several: its time limit, its errors, and its state for a checkpoint."""

from __future__ import annotations

import copy
import logging
import math
import multiprocessing
import signal
import traceback
import zlib
from collections.abc import Callable
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

from rl_trainers.envs import adapters, snapshot

_log = logging.getLogger("rl_trainers")


class EnvError(RuntimeError):
    """An environment raised, or its worker process died; the text holds its index and traceback."""


def env_seed(seed: int, index: int) -> int:
    """Seed of the ``index``-th of several streams drawn from ``seed``; below 2**31."""
    return int(np.random.SeedSequence([seed, index]).generate_state(1)[0] >> 1)


def env_name(env: Any) -> str:
    """The id of an environment, or the name of its class."""
    inner = getattr(env, "unwrapped", env)
    return getattr(getattr(inner, "spec", None), "id", type(inner).__name__)


class SubEnv(gymnasium.Wrapper):
    """An environment that ends in time, says where it failed, and whose state can be kept.

    The state is written out where it is plain Python (see :mod:`rl_trainers.envs.snapshot`). Where it is
    not, every episode is reset with a seed of its own and its actions are kept, so that the running episode
    can be replayed; a checksum of all its observations and rewards tells whether the replay went the same
    way. An environment that carries hidden state from one episode to the next may differ later all the
    same.

    Args:
        make: makes the environment, of any kind that :mod:`rl_trainers.envs.adapters` knows.
        index: its place among the others.
        time_limit: decisions after which an episode is truncated; ``None`` for no limit.
    """

    def __init__(self, make: Callable[[], Any], index: int, time_limit: int | None):
        if multiprocessing.parent_process() is not None:
            signal.signal(signal.SIGINT, signal.SIG_IGN)  # the main process decides what Ctrl-C ends
        super().__init__(adapters.as_gymnasium(make()))
        self.name = env_name(self.env)
        self._index = index
        self._limit = math.inf if time_limit is None else time_limit
        self._seed = self._episode = self._length = self._checksum = 0
        self._needs_reset = False
        self._is_plain = True
        self._start: list = []
        self._actions: list = []

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> tuple[Any, dict]:
        """Starts an episode; with a seed, the first one of that seed's sequence."""
        if seed is not None:
            self._seed, self._episode = seed, 0
            self._is_plain = False  # until the environment has shown its state
        else:
            self._episode += 1
        if not self._is_plain:
            self._start = [snapshot.try_encode(*layer) for layer in self._layers()]
            seed = self._episode_seed()
        try:
            observation, info = self.env.reset(seed=seed, options=options)
        except Exception as error:
            raise self._explain(error, "reset") from error
        if self._episode == 0:
            self._is_plain = snapshot.try_encode(self.env) is not None
        self._length, self._needs_reset, self._actions = 0, False, []
        self._checksum = 0 if self._is_plain else _checksum(observation, 0.0, 0)
        return observation, info

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict]:
        """One step; a reset instead if the last one ended an episode and nobody reset since."""
        if self._needs_reset:
            observation, info = self.reset()
            return observation, 0.0, False, False, info
        if not self._is_plain:
            self._actions.append(copy.deepcopy(action))
        try:
            observation, reward, terminated, truncated, info = self.env.step(action)
        except Exception as error:
            raise self._explain(error, f"step {self._length + 1} of its episode") from error
        if not self._is_plain:
            self._checksum = _checksum(observation, reward, self._checksum)
        self._length += 1
        truncated = bool(truncated) or self._length >= self._limit
        self._needs_reset = bool(terminated) or truncated
        return observation, reward, bool(terminated), truncated, info

    def take_snapshot(self) -> dict[str, Any]:
        """Returns the state as a nest of JSON values and arrays."""
        is_nest = isinstance(self.action_space, (spaces.Dict, spaces.Tuple))
        actions = self._actions if is_nest or not self._actions else np.stack(self._actions)
        return {
            "counters": [self._seed, self._episode, self._length, self._needs_reset],
            "state": snapshot.try_encode(self.env) if self._is_plain else None,
            "start": [] if self._is_plain else self._start,
            "actions": snapshot.encode(actions),
            "checksum": self._checksum,
        }

    def apply_snapshot(self, snapshots: list[dict[str, Any]]) -> bool:
        """Continues from its own one of all snapshots; False if the episode has to start anew."""
        saved = snapshots[self._index]
        self._seed, self._episode, self._length, self._needs_reset = saved["counters"]
        try:
            if saved["state"] is not None:
                snapshot.decode(saved["state"], self.env)
                return True
            if self._replay(saved):
                return True
            reason = "the replayed episode went another way"
        except Exception as error:  # whatever it is, a new episode is a way on
            reason = f"{type(error).__name__}: {error}"
        _log.warning(
            "environment %d cannot continue its episode where it stood; it starts a new one (%s)",
            self._index,
            reason,
        )
        self._needs_reset = True
        return False

    def _replay(self, saved: dict[str, Any]) -> bool:
        """Repeats the running episode; whether it went as it did before."""
        self._start = saved["start"]
        self._actions = list(snapshot.decode(saved["actions"]))
        for (attributes, _), node in zip(self._layers(), self._start, strict=True):
            if node is not None:
                attributes.update(snapshot.decode(node, attributes))
        observation, _ = self.env.reset(seed=self._episode_seed())
        self._checksum = _checksum(observation, 0.0, 0)
        for action in self._actions:
            observation, reward, *_ = self.env.step(action)
            self._checksum = _checksum(observation, reward, self._checksum)
        return self._checksum == saved["checksum"]

    def _episode_seed(self) -> int:
        return env_seed(self._seed, self._episode) if self._episode else self._seed

    def _layers(self) -> list[tuple[dict[str, Any], set[int]]]:
        """Attributes of every wrapper and of the environment, and the ids of all these objects."""
        layers = [self.env]
        while isinstance(layers[-1], gymnasium.Wrapper):
            layers.append(layers[-1].env)
        ids = {id(layer) for layer in layers}
        return [(vars(layer), set(ids)) for layer in layers]

    def _explain(self, error: Exception, where: str) -> EnvError:
        what = f"environment {self._index} raised {type(error).__name__}: {error} (in {where})"
        return EnvError("\n".join([what, *traceback.format_exception(error)]))


def _checksum(observation: Any, reward: Any, start: int) -> int:
    """Checksum of a nest of arrays and a number, chained to that of the steps before."""
    if isinstance(observation, dict):
        observation = tuple(observation.values())
    if isinstance(observation, tuple):
        for part in observation:
            start = _checksum(part, 0.0, start)
        observation = ()
    start = zlib.crc32(np.asarray(observation).tobytes(), start)
    return zlib.crc32(np.float64(reward).tobytes(), start)
