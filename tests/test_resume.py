"""A run that is killed again and again ends where an undisturbed one does."""

import os
import pathlib
import random
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

from rl_trainers import checkpoint, metrics

ROOT = pathlib.Path(__file__).parent.parent
N_EPOCHS = 200
N_KILLS = 8


def start(output_dir):
    command = [sys.executable, "-m", "rl_trainers.cli", "train", "--output_dir", str(output_dir)]
    for binding in (
        "train.trainer = @PPOJoint",
        f"train.n_epochs = {N_EPOCHS}",
        "RLTask.env = 'CartPole-v1'",
        "RLTask.num_envs = 4",
        "PPOJoint.n_interactions_per_epoch = 512",
        "PPOJoint.n_eval_episodes = 2",
        "PPOJoint.checkpoint_interval_s = 0.05",
    ):
        command += ["--config", binding]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def epochs_done(output_dir):
    try:
        return len(metrics.read_curve(output_dir)["epoch"])
    except (FileNotFoundError, KeyError, ValueError):
        return 0


@pytest.mark.slow
def test_killed_and_restarted_equals_undisturbed(tmp_path):
    straight, killed = tmp_path / "straight", tmp_path / "killed"
    output, _ = start(straight).communicate()
    assert epochs_done(straight) == N_EPOCHS, output
    rng = random.Random(0)
    for i in range(N_KILLS):
        before = epochs_done(killed)
        process = start(killed)
        deadline = time.monotonic() + 120
        while epochs_done(killed) <= before and process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.01)
        time.sleep(rng.uniform(0, 0.3))
        assert process.poll() is None, f"ended before it could be killed: {process.communicate()[0]}"
        os.kill(process.pid, signal.SIGKILL)
        process.communicate()
        assert epochs_done(killed) > 0, f"kill {i}"
    output, _ = start(killed).communicate()
    assert epochs_done(killed) == N_EPOCHS, output

    _, want = checkpoint.restore(straight)
    _, got = checkpoint.restore(killed)
    timing = {"loop/wall_s"}
    assert set(got) == set(want)
    for name in set(want) - timing:
        np.testing.assert_array_equal(got[name], want[name], err_msg=name)
    curves = [metrics.read_curve(directory) for directory in (straight, killed)]
    for key in ("epoch", "env_steps", "avg_return", "eval_return", "joint_loss", "value_loss"):
        np.testing.assert_array_equal(curves[1][key], curves[0][key], err_msg=key)
