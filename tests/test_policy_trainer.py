"""Policy trainers: returns and baselines by hand, a gradient by hand, imitation of the best."""

import functools
import inspect

import flax.linen as nn
import gin
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rl_trainers import (
    ActorCriticJointTrainer,
    ExamplePolicyTrainer,
    ExpertIteration,
    PolicyGradient,
    PolicyTrainer,
    RLTask,
    models,
    optimizers,
)
from rl_trainers.envs import probe
from rl_trainers.policy_trainer import best_trajectories, n_best, returns_to_go, sharpened_network_policy
from rl_trainers.types import Batch, TimeStep

SMALL = functools.partial(models.Policy, body=functools.partial(models.MLP, layer_widths=(8,)))


class Constant(nn.Module):
    """Logits that do not depend on the observation."""

    @nn.compact
    def __call__(self, x):
        logits = self.param("policy", lambda key: jnp.array([0.5, 0.0]))
        return jnp.broadcast_to(logits, (x.shape[0], 2))


def steps_of(reward, done, mask, truncates=False):
    """Rows ``[T, B]`` from one list per environment."""
    reward, mask = np.array(reward, np.float32).T, np.array(mask, np.float32).T
    done, no = np.array(done, bool).T, np.zeros(np.shape(done), bool).T
    terminated, truncated = (no, done) if truncates else (done, no)
    observation = np.zeros((*reward.shape, 1), np.float32)
    return TimeStep(observation, np.zeros(reward.shape, np.int32), reward, terminated, truncated, mask)


def chance_of_best(trainer):
    inputs = trainer.policy_apply(
        trainer.state.params, trainer.state.model_state, np.zeros((1, 1), np.float32)
    )
    return float(jax.nn.softmax(inputs)[0, 1])


@pytest.mark.parametrize("truncates", [False, True])
def test_returns_to_go_and_tails_that_nobody_knows(truncates):
    steps = steps_of(
        reward=[[1, 1, 1, 0, 8, 8], [2, 0, 4, 4, 4, 4], [1, 1, 1, 1, 1, 1]],
        done=[[0, 0, 1, 0, 0, 0], [1, 0, 0, 0, 0, 1], [0, 0, 0, 0, 0, 0]],
        mask=[[1, 1, 1, 0, 1, 1], [1, 0, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1]],
        truncates=truncates,
    )
    returns, known = (np.asarray(x).T for x in returns_to_go(steps, 0.5))
    np.testing.assert_array_equal(known, [[1, 1, 1, 0, 0, 0], [1, 0, 1, 1, 1, 1], [0, 0, 0, 0, 0, 0]])
    np.testing.assert_allclose(returns[0, :3], [1.75, 1.5, 1])
    np.testing.assert_allclose(returns[1, [0, 2, 3, 4, 5]], [2, 7.5, 7, 6, 4])


def test_the_baseline_is_the_mean_over_decisions():
    """Returns [3, 2, 1] and [1]: 7 / 4, not the 7 / 8 of the padded array."""
    task = RLTask(probe.ActionReward, gamma=1.0)
    trainer = PolicyGradient(task, SMALL)
    steps = steps_of(
        reward=[[1, 1, 1, 0], [1, 0, 0, 0]],
        done=[[0, 0, 1, 0], [1, 0, 0, 0]],
        mask=[[1, 1, 1, 0], [1, 0, 0, 0]],
    )
    advantage, known = trainer.policy_inputs(steps)
    np.testing.assert_array_equal(known, steps.mask)
    np.testing.assert_allclose(np.asarray(advantage)[steps.mask > 0], [1.25, -0.75, 0.25, -0.75])


@pytest.mark.parametrize("normalize", [False, True])
def test_one_step_of_reinforce_by_hand(normalize):
    task = RLTask(probe.ActionReward, num_envs=4)
    trainer = PolicyGradient(
        task,
        Constant,
        optimizers.SGD,
        lr_schedule=0.5,
        n_trajectories_per_epoch=16,
        advantage_normalization=normalize,
    )
    data, *_ = trainer._collect()
    mask = np.asarray(data.steps.mask) > 0
    actions, rewards = np.asarray(data.steps.action)[mask], np.asarray(data.steps.reward)[mask]
    assert len(actions) == 16 and set(actions) == {0, 1}
    np.testing.assert_array_equal(rewards, 2 * actions - 1)
    trainer.train_epoch(data)

    weights = rewards - rewards.mean()
    if normalize:
        weights = weights / (weights.std() + 1e-5)
    p = np.exp([0.5, 0.0]) / np.exp([0.5, 0.0]).sum()
    gradient = -np.mean(weights[:, None] * (np.eye(2)[actions] - p), axis=0)
    np.testing.assert_allclose(
        trainer.state.params["policy"], np.array([0.5, 0.0]) - 0.5 * gradient, atol=1e-5
    )


def test_reinforce_leaves_out_what_nobody_knows():
    """All episodes still run, so no return is known and nothing may be learned."""
    trainer = PolicyGradient(
        RLTask(probe.Endless, num_envs=2), Constant, optimizers.SGD, n_interactions_per_epoch=16
    )
    trainer.run(1)
    np.testing.assert_array_equal(trainer.state.params["policy"], np.array([0.5, 0.0], np.float32))


def test_defaults_of_reinforce():
    trainer = PolicyGradient(RLTask(probe.ActionReward), SMALL)
    assert (trainer.n_trajectories_per_epoch, trainer.n_interactions_per_epoch) == (8, None)
    assert (trainer._policy_trainer.n_steps, trainer._policy_trainer.batch_size) == (1, None)
    trainer = PolicyGradient(RLTask(probe.ActionReward), SMALL, collect_per_epoch=3)
    assert trainer.n_trajectories_per_epoch == 3
    trainer = PolicyGradient(RLTask(probe.ActionReward), SMALL, n_interactions_per_epoch=30)
    assert (trainer.n_trajectories_per_epoch, trainer.n_interactions_per_epoch) == (None, 30)
    with pytest.raises(ValueError, match="n_replay_epochs=2.*on-policy"):
        PolicyGradient(RLTask(probe.ActionReward), SMALL, n_replay_epochs=2)


@pytest.mark.parametrize("cls", [ExamplePolicyTrainer, pytest.param(PolicyGradient, marks=pytest.mark.slow)])
def test_policy_trainers_learn_which_action_pays(cls):
    settings = (
        {"train_steps_per_epoch": 100, "collect_per_epoch": 50}
        if cls is ExamplePolicyTrainer
        else {"n_train_steps_per_epoch": 4}
    )
    trainer = cls(RLTask(probe.ActionReward, num_envs=8), SMALL, lr_schedule=1e-2, **settings)
    assert 0.4 < chance_of_best(trainer) < 0.6
    records = []
    trainer.on_epoch = records.append
    trainer.run(3 if cls is ExamplePolicyTrainer else 60)
    assert chance_of_best(trainer) > 0.9
    names = {"policy_loss", "policy_entropy", "advantage_mean", "advantage_std", "log_probs_mean"}
    assert records[-1].keys() >= names
    assert all(np.isfinite(records[-1][name]) for name in names)
    assert 0 < records[0]["policy_entropy"] <= np.log(2)


@pytest.mark.parametrize(
    "n, quantile, count", [(256, 0.9, 26), (10, 0.8, 2), (10, 0.7, 3), (1, 0.9, 1), (5, 0, 5)]
)
def test_n_best(n, quantile, count):
    assert n_best(n, quantile) == count


class TestBestTrajectories:
    """Environment 0: returns 2 and 5; 1: 4 and one that still runs; 2: 1 and 3, each after a reset row."""

    STEPS = steps_of(
        reward=[[1, 1, 0, 5, 0, 0], [0, 4, 0, 9, 9, 9], [1, 0, 1, 1, 1, 0]],
        done=[[0, 1, 0, 1, 0, 0], [0, 1, 0, 0, 0, 0], [1, 0, 0, 0, 1, 0]],
        mask=[[1, 1, 0, 1, 0, 0], [1, 1, 0, 1, 1, 1], [1, 0, 1, 1, 1, 0]],
    )

    def chosen(self, gamma=1.0, quantile=0.6, group_size=256):
        rng = np.random.default_rng(0)
        return best_trajectories(self.STEPS, gamma, quantile, group_size, rng).T.tolist()

    def test_two_of_five(self):
        assert self.chosen() == [[0, 0, 0, 1, 0, 0], [1, 1, 0, 0, 0, 0], [0, 0, 0, 0, 0, 0]]

    def test_discounted(self):
        # 1.1, 5; .4; 1, 1.11
        assert self.chosen(gamma=0.1) == [[0, 0, 0, 1, 0, 0], [0, 0, 0, 0, 0, 0], [0, 0, 1, 1, 1, 0]]

    def test_all_that_have_finished(self):
        assert self.chosen(quantile=0.0) == [[1, 1, 0, 1, 0, 0], [1, 1, 0, 0, 0, 0], [1, 0, 1, 1, 1, 0]]

    def test_groups_of_one_leave_nothing_out(self):
        assert self.chosen(group_size=1) == self.chosen(quantile=0.0)

    def test_nothing_to_choose_from(self):
        nothing = self.STEPS._replace(mask=np.zeros_like(self.STEPS.mask))
        assert best_trajectories(nothing, 1.0, 0.5, 8, np.random.default_rng(0)).sum() == 0


def test_expert_iteration_improves():
    trainer = ExpertIteration(
        RLTask(probe.ActionReward, num_envs=8),
        SMALL,
        quantile=0.8,
        n_replay_epochs=1,
        n_train_steps_per_epoch=50,
        n_trajectories_per_epoch=64,
        lr_schedule=1e-2,
    )
    assert chance_of_best(trainer) < 0.6
    trainer.run(3)
    assert chance_of_best(trainer) > 0.9
    assert trainer._stored().steps.mask.sum() == n_best(64, 0.8)


def test_the_expert_acts_at_a_temperature_of_its_own():
    task = RLTask(probe.ActionReward, num_envs=4)
    trainer = ExpertIteration(task, Constant, lambda temperature: 0.0, n_trajectories_per_epoch=32)
    trainer._collect()
    steps = task.replayed().steps
    actions = np.asarray(steps.action)[np.asarray(steps.mask) > 0]
    assert len(actions) == 32 and set(actions) == {0}
    assert sharpened_network_policy(0.5, 0.5) == 0.25
    with gin.unlock_config():
        gin.bind_parameter("sharpened_network_policy.temperature_multiplier", 0.5)
    try:
        assert ExpertIteration(task, Constant).collect_temperature == 0.5
    finally:
        gin.clear_config()


@pytest.mark.parametrize("quantile", [1.0, -0.1])
def test_a_quantile_must_leave_something(quantile):
    with pytest.raises(ValueError, match=rf"quantile={quantile}.*\[0, 1\)"):
        ExpertIteration(RLTask(probe.ActionReward), SMALL, quantile=quantile)


def test_a_subclass_can_override_the_stream_of_batches():
    class Imitation(PolicyTrainer):
        def policy_batches_stream(self):
            ones = np.ones((4, 1), np.float32)
            while True:
                yield Batch(
                    observation=np.zeros((4, 1, 1), np.float32),
                    action=np.ones((4, 1), np.int32),
                    dist_inputs=np.zeros((4, 1, 2), np.float32),
                    advantage=ones,
                    value_target=ones,
                    mask=ones,
                )

    trainer = Imitation(
        RLTask(probe.ActionReward),
        SMALL,
        policy_lr_schedule=1e-2,
        policy_train_steps_per_epoch=200,
        n_interactions_per_epoch=4,
    )
    trainer.run(1)
    assert chance_of_best(trainer) > 0.9


def test_abstract_trainers_say_what_is_missing():
    trainer = PolicyTrainer(
        RLTask(probe.ActionReward), SMALL, policy_train_steps_per_epoch=1, n_interactions_per_epoch=4
    )
    with pytest.raises(NotImplementedError):
        trainer.run(1)


SEED_NAMES = {
    PolicyTrainer: {
        "policy_model": SMALL,
        "policy_optimizer": optimizers.Adam,
        "policy_lr_schedule": optimizers.multifactor,
        "policy_batch_size": 64,
        "policy_train_steps_per_epoch": 500,
        "policy_evals_per_epoch": 1,
        "policy_eval_steps": 1,
        "collect_per_epoch": 50,
        "max_slice_length": 1,
        "output_dir": None,
    },
    ExamplePolicyTrainer: {
        "model": SMALL,
        "optimizer": optimizers.Adam,
        "lr_schedule": optimizers.multifactor,
        "batch_size": 64,
        "train_steps_per_epoch": 500,
        "collect_per_epoch": 50,
        "max_slice_length": 1,
        "output_dir": None,
    },
    ActorCriticJointTrainer: {
        "joint_model": functools.partial(models.PolicyAndValue, body=SMALL.keywords["body"]),
        "optimizer": optimizers.Adam,
        "lr_schedule": optimizers.multifactor,
        "batch_size": 64,
        "train_steps_per_epoch": 500,
        "collect_per_epoch": 50,
        "max_slice_length": 1,
        "output_dir": None,
    },
}


@pytest.mark.parametrize("cls", SEED_NAMES)
def test_old_argument_names(cls):
    trainer = cls(RLTask(probe.ActionReward), **SEED_NAMES[cls])
    assert trainer.n_trajectories_per_epoch == 50
    (inner,) = trainer._trainers
    assert (inner.n_steps, inner.batch_size, inner._schedule(200)) == (500, 64, pytest.approx(0.0025))


def test_old_positions():
    """Trax and its forerunners were also called by position."""
    names = list(inspect.signature(PolicyTrainer.__init__).parameters)[2:8]
    assert names == list(SEED_NAMES[PolicyTrainer])[:6]
    names = list(inspect.signature(inspect.unwrap(ExamplePolicyTrainer.__init__)).parameters)[2:10]
    assert names == list(SEED_NAMES[ExamplePolicyTrainer])
