"""Speed of the replay: CartPole-v1 steps of 8 environments, added by rollouts, drawn in batches.

Prints one JSON line.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import jax
import numpy as np

from rl_trainers import RLTask, replay

NUM_ENVS = 8
BLOCK = 1000


def _milliseconds(call: Callable[[], Any], repeats: int) -> float:
    """Median time of a call."""
    call()
    times = []
    for _ in range(repeats):
        begin = time.perf_counter()
        call()
        times.append(time.perf_counter() - begin)
    return statistics.median(times) * 1e3


def filled(n_steps: int) -> tuple[RLTask, float, float]:
    """A task that stores ``n_steps`` steps of random actions.

    Returns:
        ``(task, seconds spent stepping the environments, seconds spent adding)``.
    """
    task = RLTask("CartPole-v1", num_envs=NUM_ENVS, capacity=n_steps)
    rng = np.random.default_rng(0)
    dist_inputs = np.zeros((NUM_ENVS, task.distribution.n_inputs), np.float32)

    def act(observation: Any, policy_state: Any, needs_reset: Any, key: Any) -> tuple:
        action = rng.integers(2, size=NUM_ENVS, dtype=np.int32)
        return action, dist_inputs, policy_state, key

    stepping = adding = 0.0
    while (task.replay.size + BLOCK) * NUM_ENVS <= n_steps:
        begin = time.perf_counter()
        rollout, _ = task.collect(act, unroll_length=BLOCK)
        collected = time.perf_counter()
        task.add(rollout, 1)
        stepping += collected - begin
        adding += time.perf_counter() - collected
    return task, stepping, adding


def _row_adds(task: RLTask, n_rows: int) -> float:
    """Seconds to add ``n_rows`` rows of all environments one by one, to a ring that is full."""
    stored = replay.ordered(task.replay)
    rows = [
        stored._replace(
            steps=jax.tree.map(lambda x, t=t: x[t : t + 1], stored.steps._replace(return_=None)),
            last_observation=stored.steps.observation[t + 1],
        )
        for t in range(n_rows)
    ]
    begin = time.perf_counter()
    for row in rows:
        task.add(row, 1)
    return time.perf_counter() - begin


def measure(n_steps: int, batch_size: int, repeats: int) -> dict[str, Any]:
    """All figures, as one flat record."""
    task, stepping, adding = filled(n_steps)
    stored = task.replay
    n_stored = stored.size * NUM_ENVS
    rng = np.random.default_rng(1)
    draws = {
        "slices_1": lambda: replay.sample_slices(rng, stored, batch_size, 1),
        "slices_16": lambda: replay.sample_slices(rng, stored, batch_size, 16),
        "slices_16_per_trajectory": lambda: replay.sample_slices(
            rng, stored, batch_size, 16, per_trajectory=True
        ),
    }
    times = {name: _milliseconds(draw, repeats) for name, draw in draws.items()}
    for length in (1, 16):
        stream = task.trajectory_batch_stream(batch_size, max_slice_length=length)
        times[f"stream_{length}"] = _milliseconds(lambda stream=stream: next(stream), repeats)
    leaves = [x for x in jax.tree.leaves(stored) if isinstance(x, np.ndarray)]
    n_rows = min(2000, stored.size - 1)
    return {
        "benchmark": "replay",
        "stored_steps": n_stored,
        "batch_size": batch_size,
        "collected_steps_per_s": round(n_stored / stepping),
        "adds_per_s": round(n_stored / adding),
        "adds_per_s_row_by_row": round(n_rows * NUM_ENVS / _row_adds(task, n_rows)),
        "samples_per_s": round(batch_size / times["slices_1"] * 1e3),
        "bytes_per_step": round(sum(x.nbytes for x in leaves) / (stored.capacity * NUM_ENVS), 1),
        **{f"ms_per_batch_{name}": round(ms, 3) for name, ms in times.items()},
        "cores": os.cpu_count(),
        "load_1min": round(os.getloadavg()[0], 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=1_000_000, help="to store")
    parser.add_argument("--batch_size", type=int, default=256)
    parser.add_argument("--repeats", type=int, default=200, help="batches drawn of each kind")
    options = parser.parse_args()
    if options.steps < NUM_ENVS * BLOCK:
        parser.error(f"--steps {options.steps} must be at least {NUM_ENVS * BLOCK}")
    print(json.dumps(measure(options.steps, options.batch_size, options.repeats)))


if __name__ == "__main__":
    main()
