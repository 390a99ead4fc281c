"""DQN on CartPole-v1 and SAC on Pendulum-v1: rl_trainers against stable-baselines3, in the same session.

One environment and one optimizer step per step, the same networks and batches on both sides. Each run is a
process of its own; the two sides take turns. Prints one JSON line per run, and one per algorithm with medians
and the ratios ours / peer, pair by pair.

    python benchmarks/off_policy.py --repeats 3 --peer_python VENV/bin/python

The peer's interpreter needs ``stable-baselines3`` and nothing of ours.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
WARM_UP = {"dqn": 2000, "sac": 500}
STEPS = {"dqn": 20_000, "sac": 2_500}


def ours(algorithm: str) -> float:
    """Steps per second of rl_trainers, from the end of the warm-up on."""
    from rl_trainers import DQN, SAC, RLTask, models

    body = functools.partial(models.MLP, layer_widths=(64, 64))
    warm_up = WARM_UP[algorithm]
    if algorithm == "dqn":
        trainer = DQN(
            RLTask("CartPole-v1", gamma=0.99),
            value_body=body,
            value_batch_size=64,
            value_lr_schedule=1e-3,
            sync_freq=250,
            exploration_rate=0.05,
            n_interactions_per_epoch=warm_up,
        )
    else:
        trainer = SAC(RLTask("Pendulum-v1", gamma=0.99), n_interactions_per_epoch=warm_up)
    trainer.run(2)
    begin, before = time.perf_counter(), trainer._n_updates
    trainer.run(STEPS[algorithm] // warm_up)
    seconds = time.perf_counter() - begin
    assert trainer._n_updates - before == STEPS[algorithm], "one optimizer step per vector step"
    return STEPS[algorithm] / seconds


def peer(algorithm: str) -> float:
    """Steps per second of stable-baselines3, from the end of the warm-up on."""
    import gymnasium
    import stable_baselines3

    common = {"device": "cpu", "train_freq": 1, "gradient_steps": 1, "learning_starts": 100, "seed": 0}
    if algorithm == "dqn":
        model = stable_baselines3.DQN(
            "MlpPolicy",
            gymnasium.make("CartPole-v1"),
            learning_rate=1e-3,
            buffer_size=100_000,
            batch_size=64,
            target_update_interval=250,
            exploration_fraction=1e-6,
            **common,
        )
    else:
        model = stable_baselines3.SAC(
            "MlpPolicy", gymnasium.make("Pendulum-v1"), buffer_size=100_000, batch_size=256, **common
        )
    model.learn(2 * WARM_UP[algorithm])
    begin = time.perf_counter()
    model.learn(STEPS[algorithm], reset_num_timesteps=False)
    return STEPS[algorithm] / (time.perf_counter() - begin)


def _run(side: str, algorithm: str, options: argparse.Namespace) -> float:
    environment = dict(os.environ)
    python = sys.executable
    if side == "peer":
        python = options.peer_python
        environment["OMP_NUM_THREADS"] = str(options.peer_threads)
    else:
        environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), environment.get("PYTHONPATH", "")])
    command = [python, __file__, "--worker", side, "--algorithms", algorithm]
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    return float(done.stdout.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--algorithms", nargs="+", choices=tuple(STEPS), default=list(STEPS))
    parser.add_argument("--repeats", type=int, default=3, help="runs of each side")
    parser.add_argument("--side", choices=("both", "ours", "peer"), default="both")
    parser.add_argument("--peer_python", default=sys.executable, help="has stable-baselines3")
    parser.add_argument("--peer_threads", type=int, default=1, help="of torch")
    parser.add_argument("--worker", choices=("ours", "peer"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        print({"ours": ours, "peer": peer}[options.worker](options.algorithms[0]))
        return
    sides = ("ours", "peer") if options.side == "both" else (options.side,)
    for algorithm in options.algorithms:
        rates: dict[str, list[float]] = {side: [] for side in sides}
        for repeat in range(options.repeats):
            for side in sides:
                rates[side].append(round(_run(side, algorithm, options), 1))
                line: dict[str, Any] = {"algorithm": algorithm, "side": side, "repeat": repeat}
                load = round(os.getloadavg()[0], 2)
                print(json.dumps({**line, "env_steps_per_s": rates[side][-1], "load_1min": load}), flush=True)
        summary: dict[str, Any] = {"summary": True, "algorithm": algorithm}
        summary.update({side: statistics.median(values) for side, values in rates.items()})
        if len(sides) == 2:
            pairs = [round(a / b, 2) for a, b in zip(*rates.values(), strict=True)]
            summary["ours_over_peer"] = {"median": statistics.median(pairs), "pairs": pairs}
        print(json.dumps(summary), flush=True)


if __name__ == "__main__":
    main()
