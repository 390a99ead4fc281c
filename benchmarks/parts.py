"""What single parts cost: a step through HostEnv, a throttled progress update, a small checkpoint.

Prints one JSON line.
"""

from __future__ import annotations

import io
import json
import os
import sys
import tempfile
import timeit
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import gymnasium
import numpy as np
from gymnasium import spaces

from rl_trainers import checkpoint, metrics
from rl_trainers.envs import make_host_env


class Still(gymnasium.vector.VectorEnv):
    """8 environments that do nothing, so that all the time is the interface's."""

    metadata = {"autoreset_mode": gymnasium.vector.AutoresetMode.NEXT_STEP}
    single_observation_space = spaces.Box(-1, 1, (4,), np.float32)
    single_action_space = spaces.Discrete(2)
    action_space = spaces.MultiDiscrete([2] * 8)
    num_envs = 8
    no, zero, reward = np.zeros(8, bool), np.zeros((8, 4), np.float32), np.ones(8, np.float32)

    def reset(self, *, seed=None, options=None):
        """All zeros."""
        return self.zero, {}

    def step(self, actions):
        """All zeros."""
        return self.zero, self.reward, self.no, self.no, {}


class Terminal(io.StringIO):
    """A terminal that nobody looks at."""

    def isatty(self) -> bool:
        """Says that it is one."""
        return True


def _microseconds(call, number: int) -> float:
    """Least mean time of a call."""
    return min(timeit.repeat(call, number=number, repeat=9)) / number * 1e6


def main() -> None:
    """Measures and prints."""
    bare, action = Still(), np.zeros(8, np.int64)
    env = make_host_env(bare)
    env.reset(0)
    step = _microseconds(lambda: env.step(action), 2000) - _microseconds(lambda: bare.step(action), 2000)
    progress = metrics.Progress(10_000, stream=Terminal())
    record = {"epoch": 1, "env_steps": 1, "steps_per_s": 1.0, "avg_return": 1.0}
    update = _microseconds(lambda: progress.update(record), 2000)
    progress.close()
    tree = {f"layer_{i}": np.ones((64, 64), np.float32) for i in range(40)}
    with tempfile.TemporaryDirectory() as directory:
        save = _microseconds(lambda: checkpoint.save(directory, 1, tree), 1)
    figures = {
        "benchmark": "parts",
        "host_env_step_us": round(step, 2),
        "progress_update_us": round(update, 2),
        "checkpoint_of_40_arrays_ms": round(save / 1e3, 1),
        "load_1min": os.getloadavg()[0],
    }
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
