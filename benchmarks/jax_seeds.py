"""Many seeds of PPO on gymnax's CartPole-v1: in one program, in one process one after another, in processes.

Each way is a process of its own, timed from its start to its end. Prints one JSON line per way.

    python benchmarks/jax_seeds.py --n_seeds 16 --num_envs 8 64
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
WAYS = ("together", "single", "alone")


def run(way: str, n_seeds: int, num_envs: int, n_epochs: int) -> None:
    """Trains the seeds; ``'single'`` and ``'alone'`` one after another, the latter one only."""
    import functools

    from rl_trainers import PPOJoint, RLTask, models, run_together

    body = functools.partial(models.MLP, layer_widths=(64, 64))
    trainers = [
        PPOJoint(
            RLTask("gymnax:CartPole-v1", num_envs=num_envs, seed=seed),
            seed=seed,
            joint_model=functools.partial(models.PolicyAndValue, body=body),
            n_interactions_per_epoch=128 * num_envs,
            batch_size=32 * num_envs,
            train_steps_per_epoch=16,
            lr_schedule=2.5e-4,
        )
        for seed in range(1 if way == "alone" else n_seeds)
    ]
    if way == "together":
        run_together(trainers, n_epochs, distinct=trainers[:1])
        return
    for trainer in trainers:
        trainer.run(n_epochs)


def measure(way: str, options: argparse.Namespace, num_envs: int) -> dict:
    """Seconds of one way, and environment steps per second of all its seeds."""
    numbers = [str(x) for x in (options.n_seeds, num_envs, options.n_epochs)]
    with tempfile.TemporaryDirectory() as cache:
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "JAX_COMPILATION_CACHE_DIR": cache}
        begin = time.perf_counter()
        subprocess.run([sys.executable, __file__, "--worker", way, *numbers], env=environment, check=True)
        seconds = time.perf_counter() - begin
    # Single runs in processes of their own, each of which starts and compiles anew.
    n_runs = options.n_seeds if way == "alone" else 1
    steps = options.n_seeds * options.n_epochs * 128 * num_envs
    return {
        "way": "processes" if way == "alone" else way,
        "num_envs": num_envs,
        "n_seeds": options.n_seeds,
        "wall_s": round(seconds * n_runs, 1),
        "env_steps_per_s": round(steps / (seconds * n_runs)),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--n_seeds", type=int, default=16)
    parser.add_argument("--num_envs", type=int, nargs="+", default=[8, 64])
    parser.add_argument("--n_epochs", type=int, default=100)
    parser.add_argument("--worker", nargs=4, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        way, *numbers = options.worker
        run(way, *(int(x) for x in numbers))
        return
    for num_envs in options.num_envs:
        for way in WAYS:
            print(json.dumps(measure(way, options, num_envs)), flush=True)


if __name__ == "__main__":
    main()
