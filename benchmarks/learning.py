"""What a configuration learns: trains it with several seeds and plays the final policies greedily.

Every seed is trained by the command line in a process of its own. Prints one JSON line per seed,
and a summary with the interquartile mean over seeds (Agarwal et al. 2021,
https://arxiv.org/abs/2108.13264).

    python benchmarks/learning.py --config_file configs/ppo_joint_cartpole.gin --workers 2
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

import numpy as np
from rliable import metrics

ROOT = Path(__file__).resolve().parents[1]
N_EPISODES = 20
_ONE_THREAD = {
    "XLA_FLAGS": "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1",
    "OMP_NUM_THREADS": "1",
}


def _environment(workers: int) -> dict[str, str]:
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    limits = _ONE_THREAD if workers > 1 else {}
    return {**os.environ, **limits, "PYTHONPATH": path}


def _command(arguments: Sequence[str], workers: int) -> str:
    """Runs the command line of rl_trainers and returns what it prints."""
    done = subprocess.run(
        [sys.executable, "-m", "rl_trainers.cli", *arguments],
        env=_environment(workers),
        capture_output=True,
        text=True,
    )
    if done.returncode:
        raise SystemExit(f"rl_trainers.cli {' '.join(arguments)} failed:\n{done.stderr}")
    return done.stdout


def train(seed: int, output_dir: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Trains one seed and evaluates its final policy.

    Args:
        seed: of environments and training.
        output_dir: of this run; a run found there is continued.
        options: ``config_file``, ``config``, ``workers``.
    """
    arguments = ["train", "--output_dir", str(output_dir), "--seed", str(seed)]
    for path in options.config_file:
        arguments += ["--config_file", path]
    for binding in options.config:
        arguments += ["--config", binding]
    begin = time.monotonic()
    _command(arguments, options.workers)
    wall_s = time.monotonic() - begin
    evaluation = ["eval", str(output_dir), "--n_episodes", str(N_EPISODES), "--json"]
    greedy = json.loads(_command(evaluation, options.workers))
    lines = (output_dir / "metrics.jsonl").read_text().splitlines()
    last = json.loads(lines[-1])
    return {
        "seed": seed,
        "epochs": last["epoch"],
        "env_steps": last["env_steps"],
        "wall_s": round(wall_s, 2),
        "train_wall_s": round(last["wall_s"], 2),
        "greedy_return": round(greedy["return_mean"], 2),
        "greedy_return_std": round(greedy["return_std"], 2),
        "recent_return": last["recent_return"],
    }


def summarize(runs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The interquartile mean over seeds, and the seed that did worst."""
    returns = np.array([run["greedy_return"] for run in runs], np.float64)
    worst = runs[int(returns.argmin())]
    return {
        "summary": True,
        "seeds": len(runs),
        "greedy_return_iqm": round(float(metrics.aggregate_iqm(returns)), 2),
        "greedy_return_median": round(float(np.median(returns)), 2),
        "worst_greedy_return": worst["greedy_return"],
        "worst_seed": worst["seed"],
        "wall_s_mean": round(statistics.fmean(run["wall_s"] for run in runs), 2),
        "env_steps": max(run["env_steps"] for run in runs),
    }


def _train_all(root: Path, options: argparse.Namespace) -> list[dict[str, Any]]:
    runs = []
    with ThreadPoolExecutor(options.workers) as pool:
        seeds = range(options.first_seed, options.first_seed + options.seeds)
        waiting = [pool.submit(train, seed, root / f"seed_{seed}", options) for seed in seeds]
        try:
            for done in as_completed(waiting):
                runs.append(done.result())
                print(json.dumps(runs[-1]), flush=True)
        finally:
            pool.shutdown(cancel_futures=True)
    return sorted(runs, key=lambda run: run["seed"])


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--config_file", action="append", required=True, help="may be repeated")
    parser.add_argument("--config", action="append", default=[], help="gin binding, likewise")
    parser.add_argument("--seeds", type=int, default=10, help="how many")
    parser.add_argument("--first_seed", type=int, default=0)
    parser.add_argument("--workers", type=int, default=1, help="seeds at a time; if > 1, 1 thread each")
    parser.add_argument("--output_root", type=Path, help="keep the runs in seed_0, seed_1, .. here")
    parser.add_argument("--json", action="store_true", help="the summary as JSON too")
    return parser


def main() -> None:
    options = _parser().parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        summary = summarize(_train_all(options.output_root or Path(temporary), options))
    if options.json:
        print(json.dumps({**summary, "config_file": options.config_file, "config": options.config}))
    else:
        print(
            f"{summary['seeds']} seeds: greedy return IQM {summary['greedy_return_iqm']}, worst "
            f"{summary['worst_greedy_return']} (seed {summary['worst_seed']}), "
            f"{summary['env_steps']} env steps, {summary['wall_s_mean']} s a run"
        )


if __name__ == "__main__":
    main()
