"""Adding to and drawing from replays: ours on the device, stable-baselines3's and flashbax's, in one session.

Rows of 8 environments are added one vector step at a time, and batches of 256 transitions are drawn, for
CartPole rows (100,000 kept) and stacks of four 84 x 84 frames (10,000 kept). Prints one JSON line per replay
and kind.

    python benchmarks/ring.py --sb3_python VENV/bin/python --flashbax_python VENV/bin/python
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
NUM_ENVS, BATCH = 8, 256
KINDS = {"cartpole": (100_000, (4,), np.float32), "frames": (10_000, (84, 84, 4), np.uint8)}


def _per_second(call: Callable[[], Any], count: int, seconds: float = 2.0) -> float:
    """Items per second of a call that handles ``count`` of them; after a warm-up."""
    for _ in range(20):
        call()
    calls, begin = 0, time.perf_counter()
    while time.perf_counter() - begin < seconds:
        for _ in range(10):
            call()
        calls += 10
    return calls * count / (time.perf_counter() - begin)


def _rows(kind: str) -> tuple[int, dict[str, np.ndarray]]:
    capacity, shape, dtype = KINDS[kind]
    observation = np.random.default_rng(0).integers(0, 255, (NUM_ENVS, *shape)).astype(dtype)
    flags = np.zeros(NUM_ENVS, bool)
    return capacity, {
        "observation": observation,
        "action": np.zeros(NUM_ENVS, np.int32),
        "reward": np.ones(NUM_ENVS, np.float32),
        "done": flags,
    }


def ours(kind: str) -> tuple[float, float]:
    """``(adds/s, samples/s)`` of :mod:`rl_trainers.ring`; each frame is stored once."""
    import jax

    from rl_trainers import replay, ring

    capacity, row = _rows(kind)
    frames = replay.Frames(4, -1) if kind == "frames" else replay.Frames()
    observation = row["observation"]
    facts = np.stack([row["reward"], *[np.zeros(NUM_ENVS)] * 2, *[np.ones(NUM_ENVS)] * 3], -1).astype(
        np.float32
    )
    stored = observation[..., -1] if kind == "frames" else observation
    zeros = [np.zeros((1, *x.shape), x.dtype) for x in (stored, row["action"], facts)]
    made = ring.from_rows((*zeros, np.zeros((1, NUM_ENVS), np.int32)), capacity // NUM_ENVS)
    add = jax.jit(functools.partial(ring.add, frames=frames), donate_argnums=0)

    def one() -> None:
        nonlocal made
        made = add(made, row["action"], facts, observation)

    adds = _per_second(one, NUM_ENVS)
    while int(made.size) < made.capacity:
        one()

    @jax.jit
    def draw(key: Any, made: Any) -> Any:
        key, key_bits = jax.random.split(key)
        return key, ring.sample(jax.random.bits(key_bits, (BATCH,)), made, 1, frames)

    key = jax.random.PRNGKey(0)

    def batch() -> None:
        nonlocal key
        key, data = draw(key, made)
        data.last_observation.block_until_ready()

    return adds, _per_second(batch, BATCH)


def stable_baselines3(kind: str) -> tuple[float, float]:
    """``(adds/s, samples/s)`` of its ``ReplayBuffer``, which stores each stack of frames whole."""
    from gymnasium import spaces
    from stable_baselines3.common.buffers import ReplayBuffer

    capacity, row = _rows(kind)
    observation = row["observation"]
    space = spaces.Box(0, 255, observation.shape[1:], observation.dtype.type)
    buffer = ReplayBuffer(
        capacity,
        space,
        spaces.Discrete(2),
        "cpu",
        NUM_ENVS,
        kind == "frames",
        handle_timeout_termination=False,
    )
    info: list[dict] = [{}] * NUM_ENVS

    def one() -> None:
        buffer.add(observation, observation, row["action"], row["reward"], row["done"], info)

    adds = _per_second(one, NUM_ENVS)
    while not buffer.full:
        one()
    return adds, _per_second(lambda: buffer.sample(BATCH), BATCH)


def flashbax(kind: str) -> tuple[float, float]:
    """``(adds/s, samples/s)`` of its flat buffer, which stores each stack of frames whole."""
    import flashbax as fbx
    import jax

    capacity, row = _rows(kind)
    buffer = fbx.make_flat_buffer(capacity, BATCH, BATCH, False, NUM_ENVS)
    state = buffer.init(jax.tree.map(lambda x: x[0], row))
    add, draw = jax.jit(buffer.add, donate_argnums=0), jax.jit(buffer.sample)

    def one() -> None:
        nonlocal state
        state = add(state, row)

    adds = _per_second(one, NUM_ENVS)
    while not bool(state.is_full):
        one()
    split = jax.jit(jax.random.split)
    key = jax.random.PRNGKey(0)

    def batch() -> None:
        nonlocal key
        key, key_draw = split(key)
        jax.block_until_ready(draw(state, key_draw))

    return adds, _per_second(batch, BATCH)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sb3_python", help="has stable-baselines3")
    parser.add_argument("--flashbax_python", help="has flashbax")
    parser.add_argument("--worker", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        name, kind = options.worker
        adds, samples = globals()[name](kind)
        rates = {"adds_per_s": round(adds), "samples_per_s": round(samples)}
        print(json.dumps({"replay": name, "kind": kind, **rates, "load_1min": round(os.getloadavg()[0], 2)}))
        return
    pythons = {
        "ours": sys.executable,
        "stable_baselines3": options.sb3_python,
        "flashbax": options.flashbax_python,
    }
    for kind in KINDS:
        for name, python in pythons.items():
            if python:
                environment = {**os.environ, "OMP_NUM_THREADS": "1"}
                if name == "ours":
                    environment["PYTHONPATH"] = str(ROOT)
                subprocess.run([python, __file__, "--worker", name, kind], env=environment, check=True)


if __name__ == "__main__":
    main()
