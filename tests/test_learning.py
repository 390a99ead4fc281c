"""The configurations reach the returns that they promise. One seed each; minutes, not seconds."""

from pathlib import Path

import gin
import numpy as np
import pytest

from rl_trainers import cli

CONFIGS = Path(__file__).parent.parent / "configs"

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def clean_gin():
    gin.clear_config()
    yield
    gin.clear_config()


def train(name, *bindings):
    cli.parse([str(CONFIGS / f"{name}.gin")], ["train.progress = False", *bindings])
    return cli.train(None)


@pytest.mark.parametrize(
    "name, env_steps, least",
    [
        ("ppo_joint_cartpole", 102_400, 475),
        ("ppo_cartpole", 102_400, 475),
        ("a2c_joint_cartpole", 302_000, 450),
        ("awr_joint_cartpole", 41_000, 180),
        ("awr_cartpole", 41_000, 180),
        ("ppo_joint_acrobot", 205_000, -100),
        ("ppo_joint_pendulum", 305_000, -300),
        ("ppo_joint_memory", 31_000, 0.95),
        ("expert_iteration_copy", 160_000, 0.9),
    ],
)
def test_greedy_return(name, env_steps, least):
    trainer = train(name)
    returns = trainer.evaluate(20).returns
    trainer.close()
    assert trainer.task.n_interactions() <= env_steps
    assert len(returns) == 20
    assert np.mean(returns) >= least, returns


def test_policy_gradient_reaches_the_limit_in_some_epoch():
    trainer = train("policy_gradient_cartpole")
    trainer.close()
    assert trainer.current_epoch <= 200
    assert max(trainer.avg_returns) == 200
