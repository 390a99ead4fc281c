"""PPO on gymnasium's CartPole-v1: rl_trainers against stable-baselines3, in the same session.

Each run is a process of its own; the two sides take turns. Prints one JSON line per run, and one
with medians and the ratios ours / peer, pair by pair.

    python benchmarks/host_ppo.py --seeds 5 --peer_python VENV/bin/python

The peer's interpreter needs ``stable-baselines3`` and nothing of ours.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
CONFIG = ROOT / "configs" / "ppo_joint_cartpole.gin"
GOAL = 475.0
N_EPISODES = 100
DEFAULT_STEPS = {"same": 600_000, "own": 100_000}
FIGURES = (
    "env_steps_per_s",
    "import_s",
    "start_to_first_update_s",
    "goal_s",
    "goal_env_steps",
    "peak_rss_mib",
)


class Meter:
    """Takes the time at the end of every epoch; the same for both sides.

    Args:
        started: ``time.time()`` when the process was started.
        goal: mean return at which :meth:`epoch_ended` says to stop; infinite for never.
        on_steady: called when the second epoch has ended.
    """

    def __init__(self, started: float, goal: float, on_steady: Callable[[], None] = lambda: None):
        self._started, self._stop_at, self._on_steady = started, goal, on_steady
        self._epochs = 0
        self._recent: float | None = None
        self._first = self._steady = self._last = (0.0, 0)
        self._goal: tuple[float, int] | None = None

    def epoch_ended(self, env_steps: int, n_episodes: int, recent_return: float) -> bool:
        """Returns whether training should go on.

        Args:
            env_steps: decisions taken since the start.
            n_episodes: training episodes that ended since the start.
            recent_return: mean return of the last ``N_EPISODES`` of them.
        """
        now = (time.time(), env_steps)
        self._epochs += 1
        self._last = now
        if self._epochs == 1:
            self._first = now
        if self._epochs == 2:
            self._steady = now
            self._on_steady()
        if n_episodes >= N_EPISODES:
            self._recent = recent_return
            if self._goal is None and recent_return >= GOAL:
                self._goal = now
        return self._recent is None or self._recent < self._stop_at

    def report(self) -> dict[str, Any]:
        """The figures of the run."""
        seconds = self._last[0] - self._steady[0]
        rate = (self._last[1] - self._steady[1]) / seconds if self._epochs > 2 else None
        scale = 2**20 if sys.platform == "darwin" else 2**10
        return {
            "epochs": self._epochs,
            "env_steps": self._last[1],
            "env_steps_per_s": _rounded(rate, 0),
            "start_to_first_update_s": _rounded(self._first[0] - self._started, 2),
            "goal_s": _rounded(self._goal and self._goal[0] - self._started, 2),
            "goal_env_steps": self._goal and self._goal[1],
            "recent_return": _rounded(self._recent, 1),
            "peak_rss_mib": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / scale),
        }


def run_ours(options: argparse.Namespace) -> dict[str, Any]:
    """One run of rl_trainers, in this process."""
    begin = time.time()
    import jax

    import rl_trainers  # noqa: F401

    import_s = time.time() - begin
    compilations = [0, 0]

    def count(event: str, seconds: float, **_: Any) -> None:
        compilations[0] += event == "/jax/core/compile/backend_compile_duration"

    def on_steady() -> None:
        compilations[1] = compilations[0]

    jax.monitoring.register_event_duration_secs_listener(count)
    meter = Meter(options.started, options.goal, on_steady)
    n_episodes = 0

    def on_epoch(record: dict[str, Any]) -> None:
        nonlocal n_episodes
        n_episodes += record["n_trajectories"]
        env_steps = record["env_steps"]
        goes_on = meter.epoch_ended(env_steps, n_episodes, record["recent_return"])
        if not goes_on or env_steps >= options.steps:
            trainer.stop()

    make = {"same": _same_trainer, "own": _own_trainer}[options.settings]
    trainer = make(options.seed, on_epoch)
    trainer.run(options.steps)
    trainer.close()
    return {
        "versions": {"jax": jax.__version__},
        "import_s": _rounded(import_s, 2),
        **meter.report(),
        "compilations": compilations[0],
        "compilations_after_epoch_2": compilations[0] - compilations[1],
    }


def _same_trainer(seed: int, on_epoch: Callable[[dict], None]) -> Any:
    import flax.linen as nn

    from rl_trainers import PPOJoint, RLTask, advantages, models

    body = functools.partial(models.MLP, layer_widths=(64, 64), activation=nn.tanh)
    return PPOJoint(
        RLTask("CartPole-v1", num_envs=8, gamma=0.99, seed=seed),
        joint_model=functools.partial(models.PolicyAndValue, body=body, joint=False),
        lr_schedule=2.5e-4,
        n_interactions_per_epoch=1024,
        batch_size=256,
        train_steps_per_epoch=16,
        epsilon=0.2,
        entropy_coeff=0.01,
        value_loss_coeff=0.5,
        advantage_estimator=functools.partial(advantages.gae, lambda_=0.95),
        seed=seed,
        on_epoch=on_epoch,
    )


def _own_trainer(seed: int, on_epoch: Callable[[dict], None]) -> Any:
    from rl_trainers import PPOJoint, RLTask, cli

    cli.parse([str(CONFIG)], [f"RLTask.seed = {seed}", f"PPOJoint.seed = {seed}"])
    return PPOJoint(RLTask(), on_epoch=on_epoch)


def run_peer(options: argparse.Namespace) -> dict[str, Any]:
    """One run of stable-baselines3, in this process."""
    begin = time.time()
    import stable_baselines3
    import torch
    from stable_baselines3.common.callbacks import BaseCallback
    from stable_baselines3.common.env_util import make_vec_env

    import_s = time.time() - begin
    meter = Meter(options.started, options.goal)

    class EpochEnds(BaseCallback):
        """Tells the meter; an epoch has ended when the next collection starts, or training ends."""

        def __init__(self) -> None:
            super().__init__()
            self.goes_on = True
            self.n_episodes = 0
            self.told = 0

        def _on_step(self) -> bool:
            self.n_episodes += int(self.locals["dones"].sum())
            return self.goes_on

        def _on_rollout_start(self) -> None:
            if self.num_timesteps > self.told:
                self.told = self.num_timesteps
                recent = [episode["r"] for episode in self.model.ep_info_buffer]
                mean = sum(recent) / max(1, len(recent))
                self.goes_on = meter.epoch_ended(self.num_timesteps, self.n_episodes, mean)

        def _on_training_end(self) -> None:
            if self.goes_on:
                self._on_rollout_start()

    settings = {"same": _same_peer_settings, "own": _own_peer_settings}[options.settings]()
    env = make_vec_env("CartPole-v1", n_envs=8, seed=options.seed)
    model = stable_baselines3.PPO("MlpPolicy", env, seed=options.seed, device="cpu", **settings)
    model.learn(options.steps, callback=EpochEnds())
    env.close()
    return {
        "versions": {
            "stable_baselines3": stable_baselines3.__version__,
            "torch": torch.__version__,
            "torch_threads": torch.get_num_threads(),
        },
        "import_s": _rounded(import_s, 2),
        **meter.report(),
    }


def _same_peer_settings() -> dict[str, Any]:
    """The settings of :func:`_same_trainer`; the peer's networks are two of 64 x 64 tanh too."""
    return {
        "learning_rate": 2.5e-4,
        "n_steps": 128,
        "batch_size": 256,
        "n_epochs": 4,
        "gamma": 0.99,
        "gae_lambda": 0.95,
        "clip_range": 0.2,
        "ent_coef": 0.01,
        "vf_coef": 0.5,
        "max_grad_norm": 0.5,
    }


def _own_peer_settings() -> dict[str, Any]:
    """What rl-baselines3-zoo lists as tuned for CartPole-v1, for 100,000 steps."""
    return {
        "learning_rate": lambda left: 1e-3 * left,
        "n_steps": 32,
        "batch_size": 256,
        "n_epochs": 20,
        "gamma": 0.98,
        "gae_lambda": 0.8,
        "clip_range": lambda left: 0.2 * left,
        "ent_coef": 0.0,
    }


def summarize(runs: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """Medians of each side, and the ratios ours / peer of the runs with the same seed.

    Args:
        runs: what the two sides reported, with ``side`` and ``seed``.

    Returns:
        For each figure the median of the runs that have it (``goal_s`` and ``goal_env_steps`` are
        missing where the goal was not reached), and the ratio of each pair that has it on both
        sides.
    """
    by_side: dict[str, dict[int, dict[str, Any]]] = {}
    for run in runs:
        by_side.setdefault(run["side"], {})[run["seed"]] = run
    summary: dict[str, Any] = {"summary": True}
    for side, of_side in by_side.items():
        known = {f: [r[f] for r in of_side.values() if r[f] is not None] for f in FIGURES}
        summary[side] = {
            "runs": len(of_side),
            "reached_goal": len(known["goal_s"]),
            **{f: statistics.median(values) for f, values in known.items() if values},
        }
        if side == "ours":
            after = [run["compilations_after_epoch_2"] for run in of_side.values()]
            summary[side]["compilations_after_epoch_2"] = max(after)
    ours, peer = by_side.get("ours", {}), by_side.get("peer", {})
    if ours and peer:
        summary["ours_over_peer"] = ratios = {}
        for figure in FIGURES:
            pairs = [(ours[s][figure], peer[s][figure]) for s in ours if s in peer]
            pairs = [pair for pair in pairs if None not in pair]
            if pairs:
                each = [round(a / b, 3) for a, b in pairs]
                ratios[figure] = {"median": round(statistics.median(each), 3), "pairs": each}
    return summary


def _rounded(value: float | None, digits: int) -> float | None:
    return None if value is None else round(value, digits) if digits else round(value)


def _worker(side: str, seed: int, options: argparse.Namespace, cache: str, steps: int) -> dict:
    """Starts a run as a process of its own and returns what it reports."""
    environment = {k: v for k, v in os.environ.items() if k != "JAX_COMPILATION_CACHE_DIR"}
    python = options.peer_python
    if side == "peer" and options.peer_threads:
        environment["OMP_NUM_THREADS"] = str(options.peer_threads)
    if side == "ours":
        python = sys.executable
        environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), environment.get("PYTHONPATH", "")])
        # The compilation cache lies under it, with the settings that users get.
        environment["XDG_CACHE_HOME"] = cache
    arguments = [
        *("--worker", side, "--steps", str(steps), "--settings", options.settings),
        *("--seed", str(seed), "--started", repr(time.time()), "--goal", repr(options.goal)),
    ]
    done = subprocess.run([python, __file__, *arguments], env=environment, stdout=subprocess.PIPE, text=True)
    if done.returncode:
        raise SystemExit(f"the run of {side} with seed {seed} failed with {done.returncode}")
    return json.loads(done.stdout.splitlines()[-1])


def _runs(options: argparse.Namespace) -> list[dict[str, Any]]:
    runs = []
    with tempfile.TemporaryDirectory() as warm:
        if options.cache == "warm" and options.side != "peer":
            _worker("ours", 0, options, warm, 3 * 1024)
        for seed in range(options.first_seed, options.first_seed + options.seeds):
            for side in ("ours", "peer") if options.side == "both" else (options.side,):
                with tempfile.TemporaryDirectory() as cold:
                    cache = warm if options.cache == "warm" else cold
                    result = _worker(side, seed, options, cache, options.steps)
                context = {"side": side, "seed": seed, "settings": options.settings}
                if side == "ours":
                    context["cache"] = options.cache
                runs.append({**context, **result, "load_1min": round(os.getloadavg()[0], 2)})
                print(json.dumps(runs[-1]), flush=True)
    return runs


def _check_peer(python: str) -> None:
    asked = subprocess.run([python, "-c", "import stable_baselines3"], capture_output=True)
    if asked.returncode:
        raise SystemExit(
            f"{python} cannot import stable_baselines3: name an interpreter that can with "
            "--peer_python, or measure one side with --side ours"
        )


def _cpu() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=3, help="runs of each side")
    parser.add_argument("--first_seed", type=int, default=0)
    parser.add_argument("--steps", type=int, help="limit; 600,000, or 100,000 with own settings")
    parser.add_argument("--settings", choices=("same", "own"), default="same")
    parser.add_argument("--cache", choices=("cold", "warm"), default="cold", help="of compilations")
    parser.add_argument("--side", choices=("both", "ours", "peer"), default="both")
    parser.add_argument("--peer_python", default=sys.executable, help="has stable-baselines3")
    parser.add_argument("--peer_threads", type=int, default=1, help="of torch; 0: its own choice")
    parser.add_argument("--full", action="store_true", help="go on to the limit at a mean of 475")
    for hidden, kind in (("worker", str), ("seed", int), ("started", float), ("goal", float)):
        parser.add_argument(f"--{hidden}", type=kind, help=argparse.SUPPRESS)
    return parser


def main() -> None:
    options = _parser().parse_args()
    if options.worker:
        run = {"ours": run_ours, "peer": run_peer}[options.worker]
        print(json.dumps(run(options)))
        return
    options.steps = options.steps or DEFAULT_STEPS[options.settings]
    options.goal = float("inf") if options.full else GOAL
    if options.side != "ours":
        _check_peer(options.peer_python)
    machine = {"cpu": _cpu(), "cores": os.cpu_count(), "python": platform.python_version()}
    summary = summarize(_runs(options))
    print(json.dumps({**summary, "settings": options.settings, "cache": options.cache, **machine}))


if __name__ == "__main__":
    main()
