import io
import json
import struct

import jax.numpy as jnp
import numpy as np
import pytest
from tensorboardX.proto.event_pb2 import Event, SessionLog

from rl_trainers import metrics


def _events(directory):
    """All events of a TensorBoard directory, in the order in which TensorBoard reads them."""
    events = []
    for path in sorted(directory.iterdir()):
        data = path.read_bytes()
        while data:
            (length,) = struct.unpack("<Q", data[:8])
            events.append(Event.FromString(data[12 : 12 + length]))
            data = data[16 + length :]
    return events


def _write(directory, epochs, resume_epoch=0):
    writer = metrics.MetricsWriter(directory, resume_epoch)
    for epoch in epochs:
        writer.write({"epoch": epoch, "env_steps": 100 * epoch, "avg_return": 1.5 * epoch})
    writer.close()


def test_a_record_is_one_line_and_one_event_with_trax_tags(tmp_path):
    writer = metrics.MetricsWriter(tmp_path)
    writer.write_text("gin_config", "RLTask.gamma = 0.9\nPPO.epsilon = 0.2")
    writer.write(
        {
            "epoch": 2,
            "env_steps": 2048,
            "steps_per_s": np.float32(512),
            "avg_return": jnp.float32(20.5),
            metrics.eval_key(0.5, 200): 30.0,
            "n_trajectories": np.int64(7),
            "collect_s": 0.25,
            "train_s": 0.5,
            "policy_loss": float("nan"),
            "entropy": jnp.float32(0.75),
        }
    )
    writer.close()
    writer.close()

    (line,) = (tmp_path / "metrics.jsonl").read_text().splitlines()
    record = json.loads(line)
    assert record["policy_loss"] is None
    assert (record["env_steps"], record["avg_return"]) == (2048, 20.5)
    assert record["n_trajectories"] == 7
    scalars = [e for e in _events(tmp_path / "rl") if e.step == 2048]
    assert {v.tag: v.simple_value for v in scalars[0].summary.value} == {
        "rl/epoch": 2,
        "rl/n_interactions": 2048,
        "rl/n_interactions_per_second": 512,
        "rl/avg_return": 20.5,
        "rl/avg_return_temperature0.50_steps200": 30,
        "rl/n_trajectories": 7,
        "timing/collect": 0.25,
        "timing/train": 0.5,
        "metrics/entropy": 0.75,
    }
    texts = [v for e in _events(tmp_path / "rl") for v in e.summary.value if "gin" in v.tag]
    assert b"PPO.epsilon = 0.2" in texts[0].tensor.string_val[0]


def test_resuming_drops_what_came_later_and_a_torn_line(tmp_path):
    _write(tmp_path, [1, 2, 3, 4])
    with open(tmp_path / "metrics.jsonl", "a") as file:
        file.write('{"epoch": 5, "env_st')

    assert metrics.read_curve(tmp_path)["epoch"].tolist() == [1, 2, 3, 4]
    _write(tmp_path, [3, 4, 5], resume_epoch=2)

    assert metrics.read_curve(tmp_path)["epoch"].tolist() == [1, 2, 3, 4, 5]
    assert not (tmp_path / "metrics.jsonl.tmp").exists()
    starts = [e.step for e in _events(tmp_path / "rl") if e.session_log.status == SessionLog.START]
    assert starts == [201]
    assert len(list((tmp_path / "rl").iterdir())) == 2


def test_a_run_from_the_start_drops_everything(tmp_path):
    _write(tmp_path, [1, 2])
    _write(tmp_path, [1])

    assert metrics.read_curve(tmp_path)["env_steps"].tolist() == [100]
    starts = [e for e in _events(tmp_path / "rl") if e.session_log.status == SessionLog.START]
    assert [e.step for e in starts] == [0]


def test_a_line_is_on_disk_as_soon_as_it_is_written(tmp_path):
    writer = metrics.MetricsWriter(tmp_path)
    writer.write({"epoch": 1, "env_steps": 10})

    assert metrics.read_curve(tmp_path)["env_steps"].tolist() == [10]
    writer.close()


def test_read_curve_fills_gaps_with_nan(tmp_path):
    (tmp_path / "metrics.jsonl").write_text(
        '{"epoch": 1, "env_steps": 5, "avg_return": null}\n{"epoch": 2, "value_loss": 0.5}\n'
    )

    curve = metrics.read_curve(tmp_path)

    assert curve["epoch"].tolist() == [1, 2]
    np.testing.assert_array_equal(curve["avg_return"], [np.nan, np.nan])
    np.testing.assert_array_equal(curve["env_steps"], [5, np.nan])
    np.testing.assert_array_equal(curve["value_loss"], [np.nan, 0.5])


def test_read_curve_of_no_run_names_the_file(tmp_path):
    with pytest.raises(FileNotFoundError, match="metrics.jsonl"):
        metrics.read_curve(tmp_path)


class _Terminal(io.StringIO):
    def isatty(self):
        return True


def _record(epoch, avg_return=None):
    record = {"epoch": epoch, "env_steps": 1024 * epoch, "steps_per_s": 5000.0}
    return record if avg_return is None else {**record, "avg_return": avg_return}


def test_plain_lines_are_the_first_and_the_last_of_a_quick_run():
    stream = io.StringIO()
    with metrics.Progress(300, stream=stream) as progress:
        for epoch in range(1, 301):
            progress.update(_record(epoch, avg_return=2.0 * epoch if epoch < 300 else float("nan")))

    first, last = stream.getvalue().splitlines()
    assert first.startswith("0 % · epoch 1/300 · 1,024 steps · 5,000/s · return 2.0 · ")
    assert last.startswith("100 % · epoch 300/300 · 307,200 steps · 5,000/s · return 598.0 ")


def test_a_run_that_stops_early_does_not_show_a_full_bar():
    stream = io.StringIO()
    with metrics.Progress(1000, stream=stream) as progress:
        progress.update(_record(1))
        progress.update(_record(999))

    assert stream.getvalue().splitlines()[-1].startswith("99 % · epoch 999/1000")


def test_a_budget_of_steps_that_is_overrun_ends_at_exactly_100_percent():
    stream = io.StringIO()
    with metrics.Progress(None, 10_000, stream=stream) as progress:
        progress.update(_record(9))
        assert progress.fraction == 9216 / 10_000
        progress.update(_record(10))
        assert progress.fraction == 1.0

    assert stream.getvalue().splitlines()[-1].startswith("100 % · epoch 10 · 10,240/10,000 steps")


def test_time_left_is_of_what_this_process_did(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(metrics.time, "perf_counter", lambda: now[0])
    stream = io.StringIO()
    progress = metrics.Progress(100, stream=stream)
    now[0] = 160.0
    progress.update(_record(50))
    assert stream.getvalue().endswith(" · starting\n")
    now[0] = 220.0
    progress.update(_record(60))

    # Ten epochs took 60 s, and forty are to come; what came before the first record was compilation.
    assert stream.getvalue().endswith(" · 04:00 left\n")


def test_the_bar_on_a_terminal_ends_full():
    stream = _Terminal()
    with metrics.Progress(10, stream=stream) as progress:
        for epoch in range(1, 11):
            progress.update(_record(epoch, 21.5))

    last_frame = stream.getvalue().rpartition("100 %")[2]
    assert "epoch 10/10" in last_frame and "return 21.5" in last_frame


@pytest.mark.parametrize(("epochs", "steps"), [(None, None), (0, None), (None, 0)])
def test_progress_needs_a_total(epochs, steps):
    with pytest.raises(ValueError, match=f"total_epochs is {epochs} and total_steps is {steps}"):
        metrics.Progress(epochs, steps)


def _run(directory, seed, gamma, scale):
    directory.mkdir()
    (directory / "config.gin").write_text(f"RLTask.gamma = {gamma}\nRLTask.seed = {seed}\n")
    writer = metrics.MetricsWriter(directory)
    for epoch in range(1, 6):
        writer.write({"epoch": epoch, "env_steps": 100 * epoch, "avg_return": scale * epoch})
    writer.close()
    return directory


def test_runs_that_differ_in_the_seed_alone_share_a_group(tmp_path):
    runs = [_run(tmp_path / f"a{seed}", seed, 0.9, seed + 1) for seed in range(4)]
    runs.append(_run(tmp_path / "b", 0, 0.99, 5))

    groups = metrics._group_by_config(runs)

    assert [[run.name for run in group] for group in groups] == [["a0", "a1", "a2", "a3"], ["b"]]
    # Fewer than four are told apart.
    assert [[run.name for run in group] for group in metrics._group_by_config(runs[2:])] == [
        ["a2"],
        ["a3"],
        ["b"],
    ]


def test_interquartile_mean_of_four_runs():
    steps = np.array([0.0, 100.0])
    curves = [(steps, np.array([0.0, top])) for top in (1.0, 2.0, 4.0, 1000.0)]

    grid, middle, low, high = metrics._iqm(curves)

    assert (grid[0], grid[-1]) == (0, 100)
    # The lowest and the highest run are left out: (2 + 4) / 2.
    assert middle[-1] == 3
    assert low[-1] >= 1 and high[-1] <= 1000 and low[-1] < 3 < high[-1]


def test_plot_writes_a_picture_and_names_what_is_missing(tmp_path):
    runs = [_run(tmp_path / f"a{seed}", seed, 0.9, seed + 1) for seed in range(2)]

    metrics.plot_curves(runs, tmp_path / "out.png")

    assert (tmp_path / "out.png").read_bytes()[:4] == b"\x89PNG"
    with pytest.raises(ValueError, match="key is 'loss'"):
        metrics.plot_curves(runs, tmp_path / "out.png", key="loss")
    with pytest.raises(ValueError, match="dirs is empty"):
        metrics.plot_curves([], tmp_path / "out.png")
