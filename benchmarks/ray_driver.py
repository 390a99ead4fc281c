"""Environment steps per second of the Ray driver, with one and two workers, and over the death of a worker.

    python benchmarks/ray_driver.py --seconds 10

Prints one JSON line for each of CartPole-v1 and an environment whose step sleeps 5 ms, with 1 and with 2
workers, each with an idle and with a training learner; and one for a run in which a worker is killed. The
ideal of the sleeping environment is what as many would do that never wait. A local unroll of the same
batch, one process without Ray, is measured just before each line.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import gymnasium
import jax
import numpy as np
import ray
from gymnasium import spaces

from rl_trainers import PPOJoint, RLTask, models
from rl_trainers.drivers import RayDriver
from rl_trainers.rollout import unroll_host

SLEEP_S = 5e-3


class Sleeping(gymnasium.Env):
    """A step sleeps 5 ms; episodes have 200 steps; the observation begins with the process."""

    observation_space = spaces.Box(-1.0, 1.0, (4,), np.float32)
    action_space = spaces.Discrete(2)

    def __init__(self) -> None:
        self._t = 0

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> tuple[Any, dict]:  # noqa: D102
        super().reset(seed=seed)
        self._t = 0
        return self._look(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict]:  # noqa: D102
        time.sleep(SLEEP_S)
        self._t += 1
        return self._look(), float(action == 1), self._t == 200, False, {}

    def _look(self) -> np.ndarray:
        look = self.np_random.uniform(-1, 1, 4).astype(np.float32)
        look[0] = os.getpid() / 2**24
        return look


def make_trainer(env: Any, options: argparse.Namespace, size: int) -> PPOJoint:
    model = functools.partial(models.PolicyAndValue, body=models.MLP)
    rows = size * options.unroll_length
    return PPOJoint(RLTask(env, num_envs=size), joint_model=model, n_interactions_per_epoch=rows)


def local_rate(trainer: PPOJoint, options: argparse.Namespace) -> float:
    """Steps per second of one unroll after another in this process; nothing is learned."""
    task, act = trainer.task, trainer.actor()
    actor, *_ = unroll_host(task.env, act, task.actor, 2, task.distribution.to_env)
    begin, rows = time.perf_counter(), 0
    while time.perf_counter() - begin < options.seconds / 2:
        actor, rollout, _ = unroll_host(task.env, act, actor, options.unroll_length, task.distribution.to_env)
        rows += rollout.steps.mask.size
    return rows / (time.perf_counter() - begin)


def learn(driver: RayDriver, trainer: PPOJoint, trains: bool) -> float:
    """Takes a batch and trains on it; returns the seconds of training."""
    rollout, _ = driver.collect()
    begin = time.perf_counter()
    if trains:
        trainer.train_on(rollout, 4, 256)
    return time.perf_counter() - begin


def make_driver(trainer: PPOJoint, n: int, options: argparse.Namespace, cap: int = 0) -> RayDriver:
    return RayDriver(
        algorithm=trainer, num_workers=n, unroll_length=options.unroll_length, learn_queue_cap=cap or n
    )


def measure(trainer: PPOJoint, n: int, options: argparse.Namespace, trains: bool) -> dict[str, Any]:
    """Steps per second, and how old the policies were that the rows came from."""
    begin = time.perf_counter()
    driver = make_driver(trainer, n, options)
    driver.start()
    try:
        seen: set[int] = set()
        while len(seen) < n * trainer.task.env.num_envs:
            seen |= set(driver.collect()[1])
        ready = time.perf_counter() - begin
        for _ in range(3):
            learn(driver, trainer, trains)
        unrolls, lags = driver.unrolls, driver.unrolls.lags.copy()
        finished, begin, training = unrolls.n_finished, time.perf_counter(), 0.0
        while time.perf_counter() - begin < options.seconds:
            training += learn(driver, trainer, trains)
        seconds = time.perf_counter() - begin
        rows = (unrolls.n_finished - finished) * options.unroll_length * trainer.task.env.num_envs
        return {
            "steps_per_s": round(rows / seconds),
            "training_share": round(training / seconds, 2),
            "lags": dict(sorted((unrolls.lags - lags).items())),
            "all_workers_ready_s": round(ready, 1),
        }
    finally:
        driver.stop()


def kill_one(trainer: PPOJoint, options: argparse.Namespace) -> dict[str, Any]:
    """Kills a worker of two in the middle of the run."""
    driver = make_driver(trainer, 2, options, 1)
    driver.start()
    try:
        pids: dict[int, int] = {}
        victim, killed_at, again, waits = 0, 0.0, 0.0, [0.0]
        while not again or time.perf_counter() < killed_at + options.seconds:
            begin = time.perf_counter()
            rollout, env_id = driver.collect()
            now = time.perf_counter()
            process = np.round(rollout.steps.observation[0, :, 0] * 2**24).astype(int)
            pids.update(zip(env_id.tolist(), process.tolist(), strict=True))
            if killed_at:
                waits.append(now - begin)
                again = again or (now - killed_at) * (pids[0] != victim)
            elif len(set(pids.values())) == 2:
                victim, killed_at = pids[0], now
                os.kill(victim, signal.SIGKILL)
        unrolls = driver.unrolls
        return {
            "restarts": unrolls.n_restarts,
            "longest_wait_s": round(max(waits), 2),
            "new_worker_after_s": round(again, 1),
            "dropped": unrolls.n_dropped,
            "load_1min": round(os.getloadavg()[0], 1),
        }
    finally:
        driver.stop()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--seconds", type=float, default=10.0, help="of each measurement")
    parser.add_argument("--num_envs", type=int, default=8, help="of each worker")
    parser.add_argument("--unroll_length", type=int, default=128)
    parser.add_argument("--sleeping_unroll_length", type=int, default=16)
    parser.add_argument("--envs", nargs="*", default=["CartPole-v1", "sleeps_5_ms"])
    parser.add_argument("--workers", type=int, nargs="*", default=[1, 2])
    options = parser.parse_args()
    about = {"cpus": os.cpu_count(), "versions": {"jax": jax.__version__, "ray": ray.__version__}}
    for name in options.envs:
        env = {"sleeps_5_ms": Sleeping}.get(name, name)
        if env is Sleeping:
            options.unroll_length = options.sleeping_unroll_length
        trainer = make_trainer(env, options, options.num_envs)
        for n in options.workers:
            for trains in (False, True):
                local = local_rate(trainer, options)
                line = {"env": name, "workers": n, "learner": "trains" if trains else "idle"}
                line |= measure(trainer, n, options, trains) | {"local_steps_per_s": round(local)}
                if env is Sleeping:  # the environments of a worker are stepped one after another
                    line["share_of_ideal"] = round(line["steps_per_s"] * SLEEP_S / n, 3)
                line |= {"load_1min": round(os.getloadavg()[0], 1), **about}
                print(json.dumps(line), flush=True)
        trainer.task.close()
    options.unroll_length = options.sleeping_unroll_length
    trainer = make_trainer(Sleeping, options, options.num_envs)
    print(json.dumps({"env": "sleeps_5_ms", "workers": 2, "killed": 1, **kill_one(trainer, options)}))
    trainer.task.close()


if __name__ == "__main__":
    main()
