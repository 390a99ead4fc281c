import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


def _script(name):
    path = ROOT / "benchmarks" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(f"benchmark_{name}", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _lines(name, *arguments):
    script = str(ROOT / "benchmarks" / f"{name}.py")
    done = subprocess.run([sys.executable, script, *arguments], capture_output=True, text=True, check=True)
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_meter_counts_from_the_second_epoch_and_finds_the_goal(monkeypatch):
    host_ppo = _script("host_ppo")
    clock = iter([103.0, 104.0, 106.0, 108.0, 110.0])
    monkeypatch.setattr(host_ppo.time, "time", lambda: next(clock))
    steady = []
    meter = host_ppo.Meter(100.0, 475.0, lambda: steady.append(True))
    assert meter.epoch_ended(1000, 10, 20.0)
    assert meter.epoch_ended(2000, 50, 30.0)
    assert steady == [True]
    assert meter.epoch_ended(3000, 99, 480.0), "99 episodes are too few to tell"
    assert meter.epoch_ended(4000, 110, 474.9)
    assert not meter.epoch_ended(5600, 120, 475.0)
    report = meter.report()
    assert report["start_to_first_update_s"] == 3.0
    assert report["env_steps_per_s"] == 600  # 3600 steps from second 104 to second 110
    assert (report["goal_s"], report["goal_env_steps"]) == (10.0, 5600)
    assert (report["epochs"], report["recent_return"]) == (5, 475.0)


def test_meter_goes_on_without_a_goal(monkeypatch):
    host_ppo = _script("host_ppo")
    monkeypatch.setattr(host_ppo.time, "time", lambda: 1.0)
    meter = host_ppo.Meter(0.0, float("inf"))
    assert meter.epoch_ended(1000, 200, 500.0)
    report = meter.report()
    assert report["goal_env_steps"] == 1000, "it is noted all the same"
    assert report["env_steps_per_s"] is None, "there is no third epoch to measure"


def test_ratios_are_taken_pair_by_pair():
    host_ppo = _script("host_ppo")

    def run(side, seed, rate, goal):
        figures = dict.fromkeys(host_ppo.FIGURES, 1.0)
        extra = {"env_steps_per_s": rate, "goal_s": goal, "compilations_after_epoch_2": seed}
        return {"side": side, "seed": seed, **figures, **extra}

    runs = [
        *(run("ours", 0, 40.0, 8.0), run("peer", 0, 10.0, 16.0)),
        *(run("ours", 1, 30.0, 9.0), run("peer", 1, 20.0, None)),
        *(run("ours", 2, 20.0, 10.0), run("peer", 2, 10.0, 40.0)),
    ]
    summary = host_ppo.summarize(runs)
    ratios = summary["ours_over_peer"]
    assert ratios["env_steps_per_s"] == {"median": 2.0, "pairs": [4.0, 1.5, 2.0]}
    assert ratios["goal_s"] == {"median": 0.375, "pairs": [0.5, 0.25]}
    assert summary["ours"]["env_steps_per_s"] == 30.0
    assert summary["ours"]["compilations_after_epoch_2"] == 2
    assert (summary["ours"]["reached_goal"], summary["peer"]["reached_goal"]) == (3, 2)
    assert summary["peer"]["goal_s"] == 28.0


def test_summary_is_the_interquartile_mean_and_names_the_worst_seed():
    learning = _script("learning")
    runs = [
        {"seed": seed, "greedy_return": value, "wall_s": 2.0 + seed, "env_steps": 100 + seed}
        for seed, value in enumerate([20.0, 500.0, -7.0, 10.0])
    ]
    summary = learning.summarize(runs)
    assert summary["greedy_return_iqm"] == 15.0  # of -7, 10, 20, 500 the middle half
    assert (summary["worst_seed"], summary["worst_greedy_return"]) == (2, -7.0)
    assert (summary["wall_s_mean"], summary["env_steps"]) == (3.5, 103)


def test_jax_ppo_measures_from_the_third_call_on():
    # Calls take 7, 2, 4, 4 seconds; 6 seconds are asked for: two calls of 1,000 steps in 8 seconds.
    now, waits = [100.0], iter([7.0, 2.0, 4.0, 4.0])

    def advance():
        now[0] += next(waits)
        return 1000

    result = _script("jax_ppo").measure(advance, 97.0, 6.0, clock=lambda: now[0])
    assert (result["env_steps"], result["env_steps_per_s"]) == (2000, 250)
    assert (result["compile_s"], result["start_to_first_update_s"]) == (5.0, 10.0)


def test_jax_ppo_ratios_are_taken_pair_by_pair():
    jax_ppo = _script("jax_ppo")

    def run(side, repeat, rate):
        figures = {**dict.fromkeys(jax_ppo.FIGURES, 1.0), "env_steps_per_s": rate}
        return {"side": side, "repeat": repeat, **figures}

    rates = {"ours": [40.0, 30.0, 20.0], "peer": [20.0, 20.0, 5.0], "limit": [400.0, 300.0, 100.0]}
    summary = jax_ppo.summarize(run(s, i, rate) for s, all_ in rates.items() for i, rate in enumerate(all_))
    assert summary["ours"]["env_steps_per_s"] == 30.0
    assert summary["ours_over_peer"]["env_steps_per_s"] == {"median": 2.0, "pairs": [2.0, 1.5, 4.0]}
    assert summary["ours_over_limit"]["env_steps_per_s"] == {"median": 0.1, "pairs": [0.1, 0.1, 0.2]}


def test_replay_is_filled_with_what_was_asked_for():
    result = _script("replay").measure(n_steps=16_000, batch_size=32, repeats=2)
    assert result["stored_steps"] == 16_000
    assert result["samples_per_s"] == pytest.approx(32e3 / result["ms_per_batch_slices_1"], rel=0.01)
    assert all(value > 0 for name, value in result.items() if name.startswith("ms_per_batch"))


@pytest.mark.slow
def test_host_ppo_compiles_nothing_after_the_second_epoch():
    run, summary = _lines("host_ppo", "--side", "ours", "--seeds", "1", "--steps", "5000", "--full")
    assert run["epochs"] == 6, "an epoch is 1,024 rows, of which a few are resets"
    assert 5000 <= run["env_steps"] <= 6 * 1024
    assert run["compilations"] > 0
    assert summary["ours"]["compilations_after_epoch_2"] == 0


@pytest.mark.slow
def test_learning_reports_each_seed(tmp_path):
    config = str(ROOT / "configs" / "ppo_joint_cartpole.gin")
    arguments = ["--config_file", config, "--config", "train.n_epochs = 2", "--json"]
    where = ["--seeds", "2", "--workers", "2", "--output_root", str(tmp_path)]
    *runs, summary = _lines("learning", *arguments, *where)
    assert sorted(run["seed"] for run in runs) == [0, 1]
    assert all(run["epochs"] == 2 and run["greedy_return"] >= 8 for run in runs)
    assert summary["seeds"] == 2
    assert (tmp_path / "seed_1" / "metrics.jsonl").exists()


@pytest.mark.slow
def test_async_driver_reports_shares_and_lags():
    arguments = "--seconds 0.3 --num_envs 2 --unroll_length 4 --learn_queue_cap 1".split()
    lines = _lines("async_driver", *arguments)
    kinds = [(line["steps_ms"], line["learner"]) for line in lines]
    assert kinds == [("even", "idle"), ("even", "trains"), ("uneven", "idle"), ("uneven", "trains")]
    for line in lines:
        assert line["share"] == pytest.approx(line["steps_per_s"] / line["ideal_steps_per_s"], abs=2e-3)
        assert sum(line["lags"].values()) > 0
        assert line["dropped"] == 0
    assert all(line["lags"].keys() == {"0"} for line in lines if line["learner"] == "idle")
