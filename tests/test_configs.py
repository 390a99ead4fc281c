"""Every configuration file is free of mistakes, can be built, and trains."""

from pathlib import Path

import gin
import numpy as np
import pytest

from rl_trainers import PPOJoint, cli

CONFIGS = sorted((Path(__file__).parent.parent / "configs").glob("*.gin"))


@pytest.fixture(autouse=True)
def clean_gin():
    gin.clear_config()
    yield
    gin.clear_config()


def trainer_name():
    return cli._bound("train", "trainer", PPOJoint).__name__


def tiny(name):
    """Bindings that make an epoch of this trainer short."""
    if name == "PolicyGradient":
        return ["PolicyGradient.n_trajectories_per_epoch = 2"]
    if name == "ExpertIteration":
        counts = {"n_trajectories_per_epoch": 4, "n_train_steps_per_epoch": 2}
        return [f"{name}.{count} = {value}" for count, value in counts.items()]
    bindings = [f"{name}.n_interactions_per_epoch = 64"]
    off_policy = name in ("SAC", "DDPG", "TD3", "DQN")
    if off_policy:
        bindings += [f"{name}.initial_collect_steps = 16", f"{name}.replay_capacity = 1000"]
    parts = ["value_"] if name == "DQN" else [""]
    if not off_policy and not name.endswith("Joint"):
        parts = ["policy_", "value_"][: 1 if name == "RWR" else 2]
    bindings += [f"{name}.{part}train_steps_per_epoch = 2" for part in parts]
    return bindings + ["RLTask.initial_trajectories = 2"] * ("AWR" in name)


def test_there_are_configurations():
    assert len(CONFIGS) >= 7


@pytest.mark.parametrize("config", CONFIGS, ids=lambda path: path.stem)
def test_configuration_has_no_unused_binding(config):
    cli.parse([str(config)], [])
    assert gin.query_parameter("train.n_epochs") > 1
    assert config.read_text().startswith("# ")


@pytest.mark.slow
@pytest.mark.parametrize("config", CONFIGS, ids=lambda path: path.stem)
def test_configuration_trains(config, tmp_path):
    cli.parse([str(config)], [])
    bindings = tiny(trainer_name())
    cli.parse([str(config)], ["train.n_epochs = 1", "train.progress = False", *bindings])
    trainer = cli.train(str(tmp_path))
    assert trainer.current_epoch == 1 and trainer.task.n_interactions() > 0 and trainer.state.step > 0
    assert np.isfinite(trainer.hparams()[trainer._trainers[0].name]["learning_rate"]).all()
    trainer.close()
