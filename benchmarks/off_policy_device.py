"""DQN in CartPole-v1 and SAC in Pendulum-v1: compiled epochs against a compiled call per vector step.

Three trainers of each kind take turns, epoch by epoch: in gymnax's environment with compiled epochs, in the
same one with the host's loop, and in gymnasium's. One optimizer step per vector step. Prints one JSON line
per kind, number of environments and capacity of the replay, with medians over the turns and the ratios to
the compiled epochs, turn by turn.

    python benchmarks/off_policy_device.py --turns 5
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import statistics
import time

from rl_trainers import DQN, SAC, RLTask, models

ROWS = {"dqn": 2000, "sac": 250}
ENVS = {"dqn": (1, 8, 64), "sac": (1, 8)}
NAMES = {"dqn": "CartPole-v1", "sac": "Pendulum-v1"}


def make(kind: str, side: str, num_envs: int, capacity: int) -> DQN | SAC:
    name = NAMES[kind] if side == "gymnasium" else "gymnax:" + NAMES[kind]
    task = RLTask(name, gamma=0.99, num_envs=num_envs)
    counts = {"n_interactions_per_epoch": ROWS[kind] * num_envs, "replay_capacity": capacity}
    if kind == "dqn":
        trainer: DQN | SAC = DQN(
            task,
            value_body=functools.partial(models.MLP, layer_widths=(64, 64)),
            value_batch_size=64,
            value_lr_schedule=1e-3,
            sync_freq=250,
            exploration_rate=0.05,
            **counts,
        )
    else:
        trainer = SAC(task, **counts)
    if side == "host":
        trainer._on_device = False
    return trainer


def epoch(trainer: DQN | SAC) -> tuple[float, float]:
    """Seconds of an epoch, and of processor time."""
    begin = time.perf_counter(), time.process_time()
    trainer.run(1)
    return time.perf_counter() - begin[0], time.process_time() - begin[1]


def measure(kind: str, num_envs: int, capacity: int, turns: int) -> dict:
    trainers = {s: make(kind, s, num_envs, capacity) for s in ("device", "host", "gymnasium")}
    first = {side: round(sum(epoch(trainer)[0] for _ in range(2)), 2) for side, trainer in trainers.items()}
    taken: dict[str, list] = {side: [] for side in trainers}
    for _ in range(turns):
        for side, trainer in trainers.items():
            taken[side].append(epoch(trainer))
    rows = ROWS[kind]
    result = {"kind": kind, "num_envs": num_envs, "capacity": capacity, "load_1min": os.getloadavg()[0]}
    for side, pairs in taken.items():
        wall, cpu = zip(*pairs, strict=True)
        slower = [x / y[0] for x, y in zip(wall, taken["device"], strict=True)]
        result[side] = {
            "env_steps_per_s": round(rows * num_envs / statistics.median(wall)),
            "us_per_row": round(1e6 * statistics.median(wall) / rows, 1),
            "cpu_us_per_row": round(1e6 * statistics.median(cpu) / rows, 1),
            "times_device": [round(x, 2) for x in slower],
            "first_two_epochs_s": first[side],
        }
        trainers[side].close()
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kinds", nargs="+", choices=tuple(ROWS), default=list(ROWS))
    parser.add_argument("--num_envs", nargs="+", type=int, help="1, 8 and 64 for DQN, 1 and 8 for SAC")
    parser.add_argument("--capacity", nargs="+", type=int, default=[100_000])
    parser.add_argument("--turns", type=int, default=5)
    options = parser.parse_args()
    for kind in options.kinds:
        for num_envs in options.num_envs or ENVS[kind]:
            for capacity in options.capacity:
                print(json.dumps(measure(kind, num_envs, capacity, options.turns)), flush=True)


if __name__ == "__main__":
    main()
