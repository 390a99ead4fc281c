"""The command line: what it refuses, what it writes, and that its files reproduce a run."""

import ast
import json
import os
import re
import shutil
import signal
import struct
import subprocess
import sys
import time

import gin
import gymnasium
import jax
import numpy as np
import pytest

from rl_trainers import PPOJoint, checkpoint, cli, metrics

TINY = """
train.trainer = @PPOJoint
train.n_epochs = 2
RLTask.env = 'CartPole-v1'
RLTask.num_envs = 2
PPOJoint.n_interactions_per_epoch = 128
PPOJoint.batch_size = 32
PPOJoint.train_steps_per_epoch = 4
PPOJoint.joint_model = @PolicyAndValue
PolicyAndValue.body = @MLP
MLP.layer_widths = (8,)
MLP.activation = @tanh
"""


@pytest.fixture(autouse=True)
def clean_gin():
    gin.clear_config()
    yield
    gin.clear_config()


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    path = tmp_path_factory.mktemp("config") / "tiny.gin"
    path.write_text(TINY)
    return str(path)


@pytest.fixture(scope="module")
def run(config, tmp_path_factory):
    """A run of two epochs."""
    directory = tmp_path_factory.mktemp("runs") / "a"
    assert cli.main(["train", "--config_file", config, "--output_dir", str(directory)]) == 0
    gin.clear_config()
    return directory


@pytest.fixture
def no_environments(monkeypatch):
    def refuse(*args, **kwargs):
        raise AssertionError("an environment was made")

    monkeypatch.setattr(gymnasium, "make", refuse)
    monkeypatch.setattr(gymnasium, "make_vec", refuse)


def lines(directory):
    return [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]


def params(directory):
    trainer = cli.load(str(directory))
    trainer.close()
    return jax.tree.map(np.asarray, trainer.state.params)


def snapshot(directory):
    return {
        path.relative_to(directory): (path.stat().st_mtime_ns, path.read_bytes() if path.is_file() else b"")
        for path in directory.rglob("*")
    }


# Bindings.


@pytest.mark.parametrize(
    "binding, wrong, nearest",
    [
        ("PPOJoint.epsilno = 0.1", "PPOJoint.epsilno", "'epsilon'"),
        ("PPOJoint.n_interaction_per_epoch = 8", "n_interaction_per_epoch", "'n_interactions_per_epoch'"),
        ("RLTask.num_env = 8", "RLTask.num_env", "'num_envs'"),
        ("train.n_epoch = 8", "train.n_epoch", "'n_epochs'"),
        ("MLP.layer_width = (8,)", "MLP.layer_width", "'layer_widths'"),
        ("PPOJiont.epsilon = 0.1", "PPOJiont", "'PPOJoint'"),
        ("PPOJoint.lr_schedule = @multifacter", "multifacter", "'multifactor'"),
        ("A2CJoint.entropy_coeff = 0.1", "A2CJoint.entropy_coeff", "'PPOJoint'"),
        ("multifactor.constant = 0.1", "multifactor.constant", "Nearest"),
        ("policy/MLP.layer_widths = (4,)", "policy/MLP.layer_widths", "'MLP'"),
        ("PPOJoint.epsilon = ", "", ""),
        ("PPOJoint.n_interactions_per_epoch = 129", "n_interactions_per_epoch=129", "128"),
    ],
)
def test_a_wrong_binding_stops_the_run(binding, wrong, nearest, config, tmp_path, capsys):
    out = tmp_path / "run"
    arguments = ["train", "--config_file", config, "--config", binding, "--output_dir", str(out)]
    assert cli.main(arguments) == 2
    message = capsys.readouterr().err
    assert message.startswith("rl-trainers: ")
    assert wrong in message and nearest in message
    assert not (out / "metrics.jsonl").exists()


@pytest.mark.parametrize("binding", ["PPOJoint.epsilno = 0.1", "A2CJoint.beta = 1", "AWRJoint.beta = 1.0"])
def test_bindings_are_checked_before_an_environment_is_made(binding, config, tmp_path, no_environments):
    arguments = ["train", "--config_file", config, "--config", binding, "--output_dir", str(tmp_path)]
    assert cli.main(arguments) == 2


def test_the_probe_for_environments_works(config, tmp_path, no_environments):
    with pytest.raises(AssertionError, match="an environment was made"):
        cli.main(["train", "--config_file", config, "--output_dir", str(tmp_path)])


def test_the_last_binding_wins(config, tmp_path):
    second = tmp_path / "second.gin"
    second.write_text("PPOJoint.epsilon = 0.3\nRLTask.gamma = 0.8\n")
    cli.parse([config, str(second)], ["PPOJoint.epsilon = 0.4", "PPOJoint.epsilon = 0.5"])
    assert gin.query_parameter("PPOJoint.epsilon") == 0.5
    assert gin.query_parameter("RLTask.gamma") == 0.8
    assert gin.query_parameter("PPOJoint.batch_size") == 32


def test_unused_bindings_can_be_allowed(config):
    with pytest.raises(ValueError, match="would not use: AWRJoint.beta.*--allow_unused"):
        cli.parse([config], ["AWRJoint.beta = 2.0"])
    cli.parse([config], ["AWRJoint.beta = 2.0"], allow_unused=True)
    assert gin.query_parameter("AWRJoint.beta") == 2.0
    with pytest.raises(ValueError, match="no parameter 'btea'; nearest: 'beta'"):
        cli.parse([config], ["AWRJoint.btea = 2.0"], allow_unused=True)


@pytest.mark.parametrize(
    "bindings",
    [
        ["Gaussian.std = 0.5"],
        ["create_distribution.std = 0.5"],
        ["PPOJoint.lr_schedule = @multifactor", "multifactor.constant = 1e-3"],
        ["PPOJoint.lr_schedule = @a/multifactor", "a/multifactor.constant = 1e-3"],
        ["PPOJoint.optimizer = @Adam", "Adam.b1 = 0.8"],
        ["PPOJoint.optimizer = @optax.adam", "optax.adam.b1 = 0.8"],
        ["PPOJoint.advantage_estimator = @gae", "gae.lambda_ = 0.9"],
        ["td_lambda.lambda_ = 0.9"],
        ["PolicyAndValue.normalizer = @Normalize", "Normalize.limit = 5.0"],
        ["MLP.layer_widths = (%width,)", "width = 16"],
        ["schedule = @multifactor", "PPOJoint.lr_schedule = %schedule", "multifactor.constant = 1e-3"],
        ["PPOJoint.seed = 3", "PPOJoint.n_eval_episodes = 2"],
    ],
)
def test_bindings_that_a_run_uses_are_accepted(bindings, config):
    cli.parse([config], bindings)
    name, _, value = bindings[-1].partition(" = ")
    parameter = name if "." in name else f"{name}/gin.macro.value"
    assert gin.query_parameter(parameter) == ast.literal_eval(value)


def test_defaults_count_as_used():
    cli.parse([], ["RLTask.env = 'CartPole-v1'", "PPOJoint.epsilon = 0.1", "MLP.layer_widths = (8,)"])
    assert gin.query_parameter("MLP.layer_widths") == (8,)


@pytest.mark.parametrize("binding", ["MLP.layer_widths = (8,)", "Quality.normalizer = @Normalize"])
def test_the_default_network_of_dqn_counts_as_used(binding):
    cli.parse([], ["train.trainer = @DQN", "RLTask.env = 'CartPole-v1'", binding])
    assert binding.partition(" ")[0] in gin.config_str()


def test_output_dir_cannot_be_bound(config, tmp_path, capsys):
    arguments = ["train", "--config_file", config, "--output_dir", str(tmp_path)]
    assert cli.main([*arguments, "--config", "PPOJoint.output_dir = 'x'"]) == 2
    assert "output_dir" in capsys.readouterr().err


# Running.


def test_what_a_run_leaves(run):
    assert [line["epoch"] for line in lines(run)] == [1, 2]
    # 128 rows an epoch, of which reset rows are not interactions.
    for line in lines(run):
        assert 128 * line["epoch"] - 40 < line["env_steps"] <= 128 * line["epoch"]
    assert {path.name for path in run.iterdir()} == {
        ".lock",
        "metrics.jsonl",
        "config.gin",
        "checkpoints",
        "rl",
        "curves.png",
    }
    assert [path.name for path in (run / "checkpoints").iterdir()] == ["2"]
    assert len(list((run / "rl").glob("*tfevents*"))) == 1
    assert "PPOJoint.epsilon = 0.2" in (run / "config.gin").read_text()
    check_picture(run / "curves.png")


def check_picture(path):
    data = path.read_bytes()
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    width, height = struct.unpack(">II", data[16:24])
    assert 400 <= width <= 4000 and 300 <= height <= 4000
    import matplotlib.image

    assert matplotlib.image.imread(path).std() > 0.01


def test_the_report_names_the_next_commands(config, run, tmp_path, capsys):
    """Continuing a finished run trains nothing, and reports."""
    copy = tmp_path / "copy"
    shutil.copytree(run, copy)
    before = params(copy)
    gin.clear_config()
    assert cli.main(["train", "--output_dir", str(copy)]) == 0
    out = capsys.readouterr().out
    assert "20 greedy episodes: return" in out
    assert f"python -m rl_trainers.cli eval {copy}" in out and f"tensorboard --logdir {copy}" in out
    assert len(lines(copy)) == 2
    gin.clear_config()
    for x, y in zip(jax.tree.leaves(before), jax.tree.leaves(params(copy)), strict=True):
        np.testing.assert_array_equal(x, y)


def test_a_second_call_does_only_the_rest(config, run, tmp_path):
    copy = tmp_path / "copy"
    shutil.copytree(run, copy)
    more = ["train", "--output_dir", str(copy), "--config", "train.n_epochs = 3"]
    assert cli.main(more) == 0
    assert [line["epoch"] for line in lines(copy)] == [1, 2, 3]
    assert lines(copy)[:2] == lines(run)
    assert "train.n_epochs = 3" in (copy / "config.gin").read_text()
    gin.clear_config()
    straight = tmp_path / "straight"
    more = ["--config_file", config, "--config", "train.n_epochs = 3"]
    assert cli.main(["train", "--output_dir", str(straight), *more]) == 0
    for x, y in zip(jax.tree.leaves(params(copy)), jax.tree.leaves(params(straight)), strict=True):
        np.testing.assert_array_equal(x, y)


def test_the_effective_configuration_gives_the_same_run(run, tmp_path):
    again = tmp_path / "again"
    assert cli.main(["train", "--config_file", str(run / "config.gin"), "--output_dir", str(again)]) == 0
    for x, y in zip(jax.tree.leaves(params(run)), jax.tree.leaves(params(again)), strict=True):
        np.testing.assert_array_equal(x, y)
    assert (run / "config.gin").read_text() == (again / "config.gin").read_text()


def test_seed(config, run, tmp_path):
    out = tmp_path / "run"
    arguments = ["train", "--config_file", config, "--output_dir", str(out), "--seed", "5"]
    assert cli.main([*arguments, "--config", "train.n_epochs = 1"]) == 0
    gin.clear_config()
    trainer = cli.load(str(out))
    assert trainer.seed == 5
    assert any(
        np.any(x != np.asarray(y))
        for x, y in zip(jax.tree.leaves(params(run)), jax.tree.leaves(trainer.state.params), strict=True)
    )
    trainer.close()
    assert gin.query_parameter("RLTask.seed") is not None
    assert "seed" in (out / "config.gin").read_text()


def test_eval_writes_nothing_into_the_run(run, capsys):
    before = snapshot(run)
    assert cli.main(["eval", str(run), "--n_episodes", "3", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["epoch"] == 2 and result["n_episodes"] == len(result["returns"]) == 3
    np.testing.assert_allclose(result["return_mean"], np.mean(result["returns"]))
    np.testing.assert_allclose(result["return_std"], np.std(result["returns"]))
    assert result["length_mean"] == result["return_mean"]
    assert cli.main(["eval", str(run), "--n_episodes", "3", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == result
    assert cli.main(["eval", str(run), "--n_episodes", "3"]) == 0
    assert "epoch 2, 3 episodes: return" in capsys.readouterr().out
    assert snapshot(run) == before


def test_plot(run, tmp_path, capsys):
    out = tmp_path / "plot.png"
    assert cli.main(["plot", str(run), "--out", str(out), "--key", "joint_loss"]) == 0
    assert str(out) in capsys.readouterr().out
    check_picture(out)
    assert np.isfinite(metrics.read_curve(run)["joint_loss"]).all()


@pytest.mark.parametrize("command", [["eval", "{}"], ["plot", "{}", "--out", "{}/x.png"]])
def test_a_directory_without_a_run(command, tmp_path, capsys):
    assert cli.main([part.format(tmp_path) for part in command]) == 2
    assert str(tmp_path) in capsys.readouterr().err


def test_a_config_file_that_is_not_there(tmp_path, capsys):
    missing = str(tmp_path / "missing.gin")
    assert cli.main(["train", "--config_file", missing, "--output_dir", str(tmp_path)]) == 2
    assert "missing.gin" in capsys.readouterr().err


def test_an_environment_that_does_not_exist(config, tmp_path, capsys):
    arguments = ["train", "--config_file", config, "--output_dir", str(tmp_path)]
    assert cli.main([*arguments, "--config", "RLTask.env = 'CartPoel-v1'"]) == 2
    message = capsys.readouterr().err
    assert "CartPoel-v1" in message and "CartPole-v1" in message


def test_mistakes_in_arguments_exit_with_2(capsys):
    for arguments in ([], ["train"], ["evaluate", "x"], ["train", "--output_dir", "x", "--n_epochs", "3"]):
        with pytest.raises(SystemExit) as exit_:
            cli.main(arguments)
        assert exit_.value.code == 2
    assert "usage" in capsys.readouterr().err


def test_an_interrupt_finishes_the_epoch(config, tmp_path, interrupts):
    def interrupt(self, record, original=PPOJoint.train_epoch):
        if self.current_epoch == 1:
            signal.raise_signal(signal.SIGINT)
        return original(self, record)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PPOJoint, "train_epoch", interrupt)
        arguments = ["train", "--config_file", config, "--output_dir", str(tmp_path)]
        assert cli.main([*arguments, "--config", "train.n_epochs = 50"]) == 130
    assert [line["epoch"] for line in lines(tmp_path)] == [1, 2]
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["2"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_an_ignored_interrupt_stays_ignored(config, tmp_path, interrupts):
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    seen = []

    def look(self, record, original=PPOJoint.train_epoch):
        seen.append(signal.getsignal(signal.SIGINT))
        return original(self, record)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PPOJoint, "train_epoch", look)
        assert cli.main(["train", "--config_file", config, "--output_dir", str(tmp_path)]) == 0
    assert seen == [signal.SIG_IGN, signal.SIG_IGN]


def test_nothing_to_continue(tmp_path, capsys):
    assert cli.main(["train", "--output_dir", str(tmp_path / "nothing")]) == 2
    assert "holds no run yet: give --config_file" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["auto", "process"])
def test_ctrl_c_ends_after_the_running_epoch_and_the_run_goes_on(tmp_path, backend, interrupts):
    run_dir = tmp_path / "run"
    command = [sys.executable, "-m", "rl_trainers.cli", "train", "--output_dir", str(run_dir)]
    bindings = [
        "train.n_epochs = 100000",
        "RLTask.env = 'CartPole-v1'",
        "RLTask.num_envs = 2",
        f"RLTask.backend = '{backend}'",
        "PPOJoint.n_interactions_per_epoch = 64",
    ]
    for binding in bindings:
        command += ["--config", binding]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    deadline = time.monotonic() + 120
    path = run_dir / "metrics.jsonl"
    while time.monotonic() < deadline and not (path.exists() and path.read_text().count("\n") > 3):
        time.sleep(0.1)
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does: to the workers as well
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    (epoch,) = re.findall(r"stopped after epoch (\d+) of 100000", out)
    assert lines(run_dir)[-1]["epoch"] == int(epoch)
    assert [path.name for path in (run_dir / "checkpoints").iterdir()] == [epoch]
    assert "Traceback" not in err


def test_two_processes_do_not_train_into_one_directory(run, tmp_path):
    copy = tmp_path / "copy"
    shutil.copytree(run, copy)
    code = f"from rl_trainers import checkpoint as c; f = c.lock({str(copy)!r})"
    code += "; print('held', flush=True); input()"
    holder = subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert holder.stdout.readline() == "held\n"
    with pytest.raises(ValueError, match="another process is training into"):
        checkpoint.lock(copy)
    holder.communicate("\n")
    checkpoint.lock(copy).close()


def test_a_run_in_which_no_episode_ended_reports_all_the_same(tmp_path, capsys):
    bindings = ["train.n_epochs = 1", "RLTask.env = 'CartPole-v1'", "PPOJoint.n_interactions_per_epoch = 2"]
    arguments = [word for binding in bindings for word in ("--config", binding)]
    assert cli.main(["train", "--output_dir", str(tmp_path), *arguments]) == 0
    out = capsys.readouterr().out
    assert "20 greedy episodes: return" in out and "none, since no episode has ended" in out


def test_a_second_interrupt_ends_the_run_at_once_and_saves_nothing(config, tmp_path, interrupts):
    """Within an epoch environments are ahead of the parameters, so that there is nothing whole to save."""

    def interrupt(self, record, original=PPOJoint.train_epoch):
        if self.current_epoch == 1:
            signal.raise_signal(signal.SIGINT)
            signal.raise_signal(signal.SIGINT)
        return original(self, record)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PPOJoint, "train_epoch", interrupt)
        arguments = ["train", "--config_file", config, "--output_dir", str(tmp_path)]
        assert cli.main([*arguments, "--config", "train.n_epochs = 50"]) == 130
    assert [line["epoch"] for line in lines(tmp_path)] == [1]
    assert checkpoint.latest_step(tmp_path) is None


@pytest.mark.parametrize("name", ["DQN", "SAC"])
def test_a_run_with_default_networks_goes_on_from_its_own_config(name, tmp_path):
    arguments = ["train", "--output_dir", str(tmp_path / "run")]
    bindings = [
        f"train.trainer = @{name}",
        "train.n_epochs = 1",
        "RLTask.env = 'CartPole-v1'",
        f"{name}.n_interactions_per_epoch = 4",
    ]
    first = [part for binding in bindings for part in ("--config", binding)]
    assert cli.main([*arguments, *first]) == 0
    assert cli.main([*arguments, "--config", "train.n_epochs = 2"]) == 0
    assert len(metrics.read_curve(tmp_path / "run")["epoch"]) == 2
    # What is added must still have an effect.
    assert cli.main([*arguments, "--config", "PPOJoint.epsilon = 0.1"]) == 2


def test_every_value_is_tried_with_every_seed():
    found = cli.members(["PPOJoint.epsilon = [0.1, 0.2]", "A.b = (3,)"], 5, 2)
    assert [member.name for member in found] == [
        "epsilon_0.1-b_3-seed_5",
        "epsilon_0.1-b_3-seed_6",
        "epsilon_0.2-b_3-seed_5",
        "epsilon_0.2-b_3-seed_6",
    ]
    assert found[2].bindings == ["PPOJoint.epsilon = 0.2", "A.b = 3"]
    assert [member.name for member in cli.members([], 0, 2)] == ["seed_0", "seed_1"]
    near = cli.members(["A.b = [0.12345678, 0.12345679]"], 0, 1)
    assert len({member.name for member in near}) == 2
    with pytest.raises(ValueError, match="names a number twice"):
        cli.members(["A.b = [0.5, 1, 1.0]"], 0, 1)


@pytest.mark.parametrize("sweep", ["PPOJoint.epsilon = 0.1", "PPOJoint.epsilon = ['a']", "= []", "[1, 2]"])
def test_what_is_no_list_of_numbers_cannot_be_swept(sweep):
    with pytest.raises(ValueError, match="must bind a list of numbers"):
        cli.members([sweep], 0, 1)


def check_many(directory, names, capsys):
    printed = capsys.readouterr().out
    for name in names:
        assert len(lines(directory / name)) == 2
        assert (directory / name / "config.gin").exists()
    check_picture(directory / "curves.png")
    assert "interquartile mean" in printed and "2 seeds" in printed
    first, second = (params(directory / name) for name in names[:2])
    leaves = zip(jax.tree.leaves(first), jax.tree.leaves(second), strict=True)
    assert any((a != b).any() for a, b in leaves)


def test_many_seeds_on_python_environments(config, tmp_path, capsys):
    arguments = ["--config_file", str(config), "--output_dir", str(tmp_path), "--n_seeds", "2"]
    assert cli.main(["train", *arguments, "--workers", "2", "--driver", "async"]) == 0
    check_many(tmp_path, ["seed_0", "seed_1"], capsys)
    for name in ("seed_0", "seed_1"):  # the processes are told who steps the environments
        assert all("policy_lag" in line for line in lines(tmp_path / name))


def test_processes_of_many_seeds_are_told_of_workers(config, tmp_path, monkeypatch):
    commands = []

    def note(command, **settings):
        commands.append(cli._parser().parse_args(command[3:]))
        return subprocess.CompletedProcess(command, 0)

    arguments = cli._parser().parse_args(
        ["train", "--output_dir", str(tmp_path), "--driver", "ray", "--num_workers", "3", "--address", "auto"]
    )
    monkeypatch.setattr(cli.subprocess, "run", note)
    cli._train_member(arguments, cli.Member("seed_4", [], 4))
    (told,) = commands
    assert (told.driver, told.num_workers, told.address, told.seed) == ("ray", 3, "auto", 4)


def test_many_settings_on_jax_environments(config, tmp_path, capsys):
    pytest.importorskip("gymnax")
    bindings = ["train.n_epochs = 2", "RLTask.env = 'gymnax:CartPole-v1'"]
    arguments = ["--config_file", str(config), "--output_dir", str(tmp_path)]
    arguments += [word for binding in bindings for word in ("--config", binding)]
    arguments += ["--n_seeds", "2", "--sweep", "PPOJoint.epsilon = [0.1, 0.2]"]
    assert cli.main(["train", *arguments]) == 0
    check_many(tmp_path, ["epsilon_0.1-seed_0", "epsilon_0.1-seed_1", "epsilon_0.2-seed_0"], capsys)
    text = (tmp_path / "epsilon_0.2-seed_1" / "config.gin").read_text()
    assert "PPOJoint.epsilon = 0.2" in text and "seed = 1" in text

    # The same command does only the rest; one that is behind catches up.
    trainer = cli.load(str(tmp_path / "epsilon_0.2-seed_1"))
    assert trainer.current_epoch == 2


def test_a_wrong_sweep_stops_before_anything_runs(config, tmp_path, no_environments, capsys):
    arguments = ["--config_file", str(config), "--output_dir", str(tmp_path)]
    assert cli.main(["train", *arguments, "--sweep", "PPOJoint.epsilom = [1, 2]"]) == 2
    assert "epsilon" in capsys.readouterr().err


def test_settings_that_are_not_one_program_train_in_processes(config, tmp_path, capsys):
    pytest.importorskip("gymnax")
    bindings = ["train.n_epochs = 2", "RLTask.env = 'gymnax:CartPole-v1'"]
    arguments = ["--config_file", str(config), "--output_dir", str(tmp_path)]
    arguments += [word for binding in bindings for word in ("--config", binding)]
    assert cli.main(["train", *arguments, "--sweep", "PPOJoint.batch_size = [32, 64]"]) == 0
    for name in ("batch_size_32-seed_0", "batch_size_64-seed_0"):
        assert len(lines(tmp_path / name)) == 2


def test_a_driver_steps_the_environments(config, tmp_path, capsys):
    directory = tmp_path / "run"
    arguments = ["train", "--config_file", config, "--output_dir", str(directory), "--driver", "async"]
    bindings = ["train.progress = False", "AsyncOffPolicyDriver.max_policy_lag = 5"]
    for binding in bindings:
        arguments += ["--config", binding]
    assert cli.main(arguments) == 0
    lines = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    assert [line["epoch"] for line in lines] == [1, 2]
    assert all(line["most_policy_lag"] <= 5 for line in lines)
    text = (directory / "config.gin").read_text()
    assert "PPOJoint.driver = 'async'" in text and "AsyncOffPolicyDriver.max_policy_lag = 5" in text
    gin.clear_config()
    assert cli.main(["train", "--output_dir", str(directory), "--config", "train.n_epochs = 3"]) == 0
    gin.clear_config()
    assert cli.main(["eval", str(directory), "--n_episodes", "2", "--json"]) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["epoch"] == 3


def test_settings_of_a_driver_that_is_not_used_are_refused(config, tmp_path, capsys):
    arguments = ["train", "--config_file", config, "--output_dir", str(tmp_path / "run")]
    assert cli.main([*arguments, "--config", "AsyncOffPolicyDriver.max_policy_lag = 5"]) == 2
    assert "this run would not use: AsyncOffPolicyDriver.max_policy_lag" in capsys.readouterr().err
    gin.clear_config()
    assert cli.main([*arguments, "--num_workers", "2"]) == 2
    assert "RayDriver.num_workers (which needs --driver ray)" in capsys.readouterr().err
    assert cli.main([*arguments, "--driver", "async", "--num_workers", "2"]) == 2
    assert "--num_workers=2 is for Ray; nearest valid value of --driver: ray" in capsys.readouterr().err
    gin.clear_config()
    assert cli.main([*arguments, "--driver", "on_policy"]) == 2
    assert "it takes one optimizer step on all rows of each unroll" in capsys.readouterr().err
