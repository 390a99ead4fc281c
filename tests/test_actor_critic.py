"""Value and policy with optimizers of their own."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rl_trainers import A2C, AWR, PPO, RLTask, losses, models, optimizers
from rl_trainers.envs import probe

BODY = functools.partial(models.MLP, layer_widths=(8,), activation=jnp.tanh)
POLICY = functools.partial(models.Policy, body=BODY)
VALUE = functools.partial(models.Value, body=BODY)


def small(cls, env, num_envs=4, gamma=0.9, **kwargs):
    settings = {
        "policy_model": POLICY,
        "value_model": VALUE,
        "n_interactions_per_epoch": 64,
        "policy_batch_size": 32,
        "policy_train_steps_per_epoch": 4,
        "value_batch_size": 16,
        "value_train_steps_per_epoch": 8,
        "policy_lr_schedule": 1e-2,
        "value_lr_schedule": 1e-2,
    }
    task = RLTask(env, num_envs=num_envs, gamma=gamma)
    return cls(task, **{**settings, **kwargs})


def values(trainer, observations):
    state = trainer.state
    _, value = trainer._model.apply(state.params, state.model_state, jnp.asarray(observations))
    return np.asarray(value)


@pytest.mark.parametrize("cls", [A2C, PPO, AWR])
@pytest.mark.parametrize("scale", [False, True])
def test_values_of_the_delayed_reward(cls, scale):
    trainer = small(cls, probe.DelayedReward, scale_value_targets=scale)
    trainer.run(40)
    got = values(trainer, np.array([[0.0], [1.0]], np.float32))
    np.testing.assert_allclose(got, [0.9, 1.0], atol=0.05)


@pytest.mark.parametrize(("cls", "epochs"), [(A2C, 60), (PPO, 30), (AWR, 30)])
def test_the_best_action_is_found(cls, epochs):
    trainer = small(cls, probe.ActionAndObservationReward)
    trainer.run(epochs)
    episodes = trainer.evaluate(20)
    np.testing.assert_array_equal(episodes.returns, np.ones(20))


def test_one_step_environment_with_default_arguments():
    # Margin 0 and slices of one step are the defaults; the advantages must not be zero.
    trainer = PPO(RLTask(probe.ActionReward, num_envs=4))
    trainer.run(4)
    state = trainer.state
    inputs = trainer.policy_apply(state.params, state.model_state, jnp.zeros((1, 1)))
    assert float(jax.nn.softmax(inputs)[0, 1]) > 0.9


def test_first_policy_step_starts_from_the_policy_that_acted():
    trainer = small(PPO, "CartPole-v1", policy_train_steps_per_epoch=1)
    record = trainer._run_epoch()
    assert record["probs_ratio_mean"] == pytest.approx(1.0, abs=1e-5)
    assert record["clip_fraction"] == 0.0
    assert record["approximate_kl_divergence"] == pytest.approx(0.0, abs=1e-6)


@pytest.mark.parametrize(
    ("normalizer", "n_shared_layers", "shares_body", "shares_normalizer"),
    [
        (None, 0, False, False),
        (None, 1, True, False),
        (models.Normalize, 1, False, True),
        (models.Normalize, 2, True, True),
    ],
)
def test_shared_layers_are_one_tree(normalizer, n_shared_layers, shares_body, shares_normalizer):
    trainer = small(
        PPO,
        "CartPole-v1",
        policy_model=functools.partial(POLICY, normalizer=normalizer),
        n_shared_layers=n_shared_layers,
    )
    assert ("shared" in trainer.state.params) == shares_body
    if shares_normalizer:
        assert list(trainer.state.model_state) == ["model_state"]
    before = jax.tree.map(np.asarray, trainer.state.params)
    trainer.run(1)
    assert all(
        np.abs(np.asarray(new) - old).max() > 0
        for new, old in zip(
            jax.tree.leaves(trainer.state.params), jax.tree.leaves(before), strict=True
        )
    )


def test_each_trainer_leaves_the_others_parameters_alone():
    trainer = small(PPO, "CartPole-v1", n_shared_layers=1, policy_optimizer=optimizers.SGD)
    trainer.run(1)
    data, *_ = trainer._collect()
    state = trainer.state
    rows, valid = trainer._rows(state, data, trainer.hparams())
    for supervised, other in zip(trainer._trainers, ("policy", "value"), strict=True):
        after, _ = supervised.fit(state, rows, valid, trainer.hparams())
        same = jax.tree.map(np.array_equal, after.params[other], state.params[other])
        assert all(jax.tree.leaves(same))
        assert not np.array_equal(
            after.params["shared"]["dense_0"]["kernel"], state.params["shared"]["dense_0"]["kernel"]
        )


def test_the_policy_is_judged_by_the_value_function_that_was_just_trained():
    trainer = small(PPO, probe.ConstantReward, value_train_steps_per_epoch=200)
    # After the value steps V is 1 = the reward, so what is left of the advantages is small.
    record = trainer._run_epoch()
    assert record["value_loss"] < 1.0
    data, *_ = trainer._collect()
    batch = trainer.make_batch(trainer.state, data, trainer.hparams())
    assert float(np.abs(batch.advantage * batch.mask).max()) < 0.1


@pytest.mark.parametrize("bad", [-1, 2])
def test_too_many_shared_layers(bad):
    with pytest.raises(ValueError, match=f"n_shared_layers={bad} must lie between 0 and 1"):
        small(PPO, "CartPole-v1", n_shared_layers=bad)


def test_networks_of_other_makes_cannot_share():
    pair = (lambda key, x: {"w": jnp.zeros((4, 2))}, lambda params, x: x @ params["w"])
    with pytest.raises(ValueError, match="these are tuple and Value"):
        small(PPO, "CartPole-v1", policy_model=lambda: pair, n_shared_layers=1)


def test_on_policy_trainers_refuse_replay():
    for cls in (A2C, PPO):
        with pytest.raises(ValueError, match="n_replay_epochs=2"):
            small(cls, "CartPole-v1", n_replay_epochs=2)


def test_awr_weights_by_hand():
    hparams = {"beta": 1.0, "w_max": 5.0}
    advantage = jnp.asarray([[0.0], [1.0], [2.0]])
    got = losses.regression_weights(advantage, jnp.ones((3, 1)), hparams, None)
    np.testing.assert_allclose(got, [[1], [np.e], [5]], rtol=1e-6)
    got = losses.regression_weights(advantage, jnp.ones((3, 1)), hparams, ((50, 2.0, 0.5),))
    np.testing.assert_allclose(got, [[0], [2], [2]])


def test_normalization_factor_sharpens_the_weights():
    weights = [
        small(AWR, "CartPole-v1", advantage_normalization_factor=factor)._run_epoch()["awr_weight_std"]
        for factor in (0.1, 1.0)
    ]
    assert weights[0] < 0.3 * weights[1]


def test_steps_are_counted_per_epoch_and_continue(tmp_path):
    def make():
        return small(
            PPO,
            "CartPole-v1",
            n_shared_layers=1,
            policy_model=functools.partial(POLICY, normalizer=models.Normalize),
            output_dir=str(tmp_path / "run"),
        )

    first = make()
    first.run(2)
    first.close()
    second = make()
    assert (second.current_epoch, int(second.state.step)) == (2, 2 * (8 + 4))
    second.run(2)
    straight = small(
        PPO,
        "CartPole-v1",
        n_shared_layers=1,
        policy_model=functools.partial(POLICY, normalizer=models.Normalize),
    )
    straight.run(4)
    for got, want in zip(jax.tree.leaves(second.state), jax.tree.leaves(straight.state), strict=True):
        np.testing.assert_array_equal(got, want)


def test_nothing_compiles_after_the_first_epoch():
    trainer = small(PPO, "CartPole-v1")
    trainer.run(1)
    compiled = trainer._learn._cache_size()
    trainer.epsilon, trainer.entropy_coeff = 0.1, 0.0
    trainer.run(2)
    assert trainer._learn._cache_size() == compiled == 1


def test_an_overridden_value_stream_is_trained_on():
    class Constant(PPO):
        def value_batches_stream(self):
            for batch in super().value_batches_stream():
                yield batch._replace(value_target=np.full_like(batch.value_target, 3.0))

    trainer = small(Constant, probe.ConstantReward, value_train_steps_per_epoch=200)
    trainer.run(2)
    np.testing.assert_allclose(values(trainer, np.zeros((1, 1), np.float32)), [3.0], atol=0.1)
