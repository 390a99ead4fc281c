"""Environment steps per second of the asynchronous driver, where a step of an environment sleeps.

The ideal is what as many environments would do that never wait. ``bare_share`` is what threads reach on the
same machine at the same time that only step the environments, with no policy and no queue.

    python benchmarks/async_driver.py --seconds 10

Prints one JSON line for each of: all steps 5 ms, steps of 1 to 20 ms; each with an idle and with a training
learner, and first the synchronous unroll of all environments one after another.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import sys
import threading
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import gymnasium
import jax
import numpy as np
from gymnasium import spaces

from rl_trainers import PPOJoint, RLTask, models
from rl_trainers.drivers import AsyncOffPolicyDriver
from rl_trainers.envs import make_host_env
from rl_trainers.rollout import unroll_host

SPEEDS = {"even": (5.0, 5.0), "uneven": (1.0, 20.0)}
LENGTH = 200


class Sleeping(gymnasium.Env):
    """A step sleeps for between ``shortest`` and ``longest`` milliseconds; episodes have 200 steps."""

    observation_space = spaces.Box(-1.0, 1.0, (4,), np.float32)
    action_space = spaces.Discrete(2)

    def __init__(self, shortest: float, longest: float):
        self._range, self._t = (shortest * 1e-3, longest * 1e-3), 0

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> tuple[Any, dict]:
        """Starts an episode."""
        super().reset(seed=seed)
        self._t = 0
        return self._look(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict]:
        """One step, after a while."""
        time.sleep(self.np_random.uniform(*self._range))
        self._t += 1
        return self._look(), float(action == 1), self._t == LENGTH, False, {}

    def _look(self) -> np.ndarray:
        return self.np_random.uniform(-1, 1, 4).astype(np.float32)


def bare_rate(make: Any, num_envs: int, seconds: float) -> float:
    """Steps per second of threads that only step."""
    counts, goes_on = [0] * num_envs, True

    def step(i: int) -> None:
        env = make_host_env(make)
        env.reset(i)
        action = np.zeros(1, np.int64)
        while goes_on:
            env.step(action)
            counts[i] += 1

    threads = [threading.Thread(target=step, args=(i,)) for i in range(num_envs)]
    for thread in threads:
        thread.start()
    time.sleep(0.5)
    begin, before = time.perf_counter(), sum(counts)
    time.sleep(seconds)
    rate = (sum(counts) - before) / (time.perf_counter() - begin)
    goes_on = False
    for thread in threads:
        thread.join()
    return rate


def sync_rate(trainer: PPOJoint, options: argparse.Namespace) -> float:
    """Steps per second of one unroll after another in one thread; nothing is learned."""
    task = trainer.task
    act, to_env = trainer.actor(), task.distribution.to_env
    actor, *_ = unroll_host(task.env, act, task.actor, 2, to_env)
    begin, rows = time.perf_counter(), 0
    while time.perf_counter() - begin < options.seconds / 2:
        actor, *_ = unroll_host(task.env, act, actor, options.unroll_length, to_env)
        rows += options.unroll_length * options.num_envs
    return rows / (time.perf_counter() - begin)


def async_run(trainer: PPOJoint, options: argparse.Namespace, trains: bool) -> dict[str, Any]:
    """Steps per second, and how old the policies were that the rows came from."""
    driver = AsyncOffPolicyDriver(
        algorithm=trainer,
        num_envs=options.num_envs,
        env_batch_size=1,
        num_actor_queues=options.num_actor_queues,
        actor_queue_cap=options.actor_queue_cap,
        learn_queue_cap=options.learn_queue_cap,
        unroll_length=options.unroll_length,
    )
    driver.start()
    try:
        for _ in range(3):
            learn(driver, trainer, trains)
        unrolls, lags = driver.unrolls, driver.unrolls.lags.copy()
        finished, begin, training = unrolls.n_finished, time.perf_counter(), 0.0
        while time.perf_counter() - begin < options.seconds:
            training += learn(driver, trainer, trains)
        seconds = time.perf_counter() - begin
        rows = (unrolls.n_finished - finished) * options.unroll_length
        return {
            "steps_per_s": round(rows / seconds),
            "training_share": round(training / seconds, 2),
            "lags": dict(sorted((unrolls.lags - lags).items())),
            "dropped": unrolls.n_dropped,
        }
    finally:
        driver.close()


def learn(driver: AsyncOffPolicyDriver, trainer: PPOJoint, trains: bool) -> float:
    """Takes a batch and trains on it; returns the seconds of training."""
    driver.run_async()
    begin = time.perf_counter()
    if trains:
        trainer.train_on(driver.replayer.replay_all(), 4, 64)
    return time.perf_counter() - begin


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--seconds", type=float, default=10.0, help="of each measurement")
    parser.add_argument("--num_envs", type=int, default=8)
    parser.add_argument("--unroll_length", type=int, default=16)
    parser.add_argument("--num_actor_queues", type=int, default=1)
    parser.add_argument("--actor_queue_cap", type=int, default=1)
    parser.add_argument("--learn_queue_cap", type=int, default=4)
    options = parser.parse_args()
    for name, speeds in SPEEDS.items():
        make = functools.partial(Sleeping, *speeds)
        model = functools.partial(models.PolicyAndValue, body=models.MLP)
        trainer = PPOJoint(
            RLTask(make, num_envs=options.num_envs),
            joint_model=model,
            n_interactions_per_epoch=options.num_envs * options.unroll_length,
        )
        ideal = options.num_envs / (sum(speeds) / 2 * 1e-3)
        sync = sync_rate(trainer, options)
        for learner in ("idle", "trains"):
            bare = bare_rate(make, options.num_envs, options.seconds / 2)
            run = async_run(trainer, options, learner == "trains")
            share = run["steps_per_s"] / ideal
            line = {
                "steps_ms": name,
                "learner": learner,
                "ideal_steps_per_s": round(ideal, 1),
                "sync_steps_per_s": round(sync),
                **run,
                "share": round(share, 3),
                "bare_share": round(bare / ideal, 3),
                "share_of_bare": round(run["steps_per_s"] / bare, 3),
                "cpus": os.cpu_count(),
                "load_1min": round(os.getloadavg()[0], 1),
                "versions": {"jax": jax.__version__},
            }
            print(json.dumps(line), flush=True)
        trainer.task.close()


if __name__ == "__main__":
    main()
