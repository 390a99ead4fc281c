"""Modules of flax.nnx as models."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from gymnasium import spaces

from rl_trainers import PPO, PPOJoint, RLTask, models
from rl_trainers.distributions import create_distribution

KEY = jax.random.PRNGKey(0)
BOX = spaces.Box(-np.inf, np.inf, (4,), np.float32)
TWO = create_distribution(spaces.Discrete(2))


class Body(nnx.Module):
    def __init__(self, n_outputs, rngs):
        self.layers = nnx.List([nnx.Linear(4, 8, rngs=rngs), nnx.Linear(8, n_outputs, rngs=rngs)])

    def __call__(self, x):
        return self.layers[1](jnp.tanh(self.layers[0](x)))


class NnxPolicy(Body):
    def __init__(self, policy_distribution, rngs):
        super().__init__(policy_distribution.n_inputs, rngs)


class NnxValue(Body):
    def __init__(self, rngs):
        super().__init__(1, rngs)

    def __call__(self, x):
        return super().__call__(x)[..., 0]


class Joint(nnx.Module):
    def __init__(self, policy_distribution, rngs):
        self.policy, self.value = NnxPolicy(policy_distribution, rngs), NnxValue(rngs)

    def __call__(self, x):
        return self.policy(x), self.value(x)


class Normalized(nnx.Module):
    def __init__(self, rngs):
        self.norm = nnx.BatchNorm(4, momentum=0.0, use_bias=False, use_scale=False, rngs=rngs)
        self.head = nnx.Linear(4, 2, rngs=rngs)

    def __call__(self, x, mask=None):
        return self.head(self.norm(x, mask=None if mask is None else mask[:, None] > 0))


def test_parameters_are_made_from_the_key_and_applied():
    model = models.build(NnxPolicy, BOX, "policy", policy_distribution=TWO, mode="train")
    x = np.ones((3, 5, 4), np.float32)
    params, model_state = jax.jit(model.init)(KEY, x)
    assert model_state == {} and params.keys() == {"policy"}
    first, second = (params["policy"]["layers"][i] for i in range(2))
    got = model.apply(params, model_state, x)
    expected = np.tanh(x @ first["kernel"] + first["bias"]) @ second["kernel"] + second["bias"]
    np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-6)
    assert np.array_equal(first["bias"], np.zeros(8)) and second["kernel"].shape == (8, 2)
    other, _ = model.init(jax.random.PRNGKey(1), x)
    assert not np.array_equal(other["policy"]["layers"][0]["kernel"], first["kernel"])


def test_a_module_itself_keeps_its_parameters():
    module = NnxValue(nnx.Rngs(3))
    for factory in (module, lambda: module):
        model = models.build(factory, BOX, "value", mode="train")
        params, model_state = model.init(KEY, np.ones((1, 4), np.float32))
        np.testing.assert_array_equal(params["value"]["layers"][0]["kernel"], module.layers[0].kernel[...])
        x = np.ones((2, 4), np.float32)
        np.testing.assert_allclose(model.apply(params, model_state, x), module(x), rtol=1e-6)


def test_batch_statistics_are_gathered_from_unmasked_rows():
    model = models.build(Normalized, BOX, "policy")
    x = np.array([[1, 0, 0, 0], [3, 0, 0, 0], [99, 9, 9, 9]], np.float32)
    params, model_state = model.init(KEY, x)
    before = model.apply(params, model_state, x)
    gathered = model.gather(params, model_state, x, np.array([1.0, 1.0, 0.0]))
    np.testing.assert_allclose(gathered["norm"]["mean"], [2, 0, 0, 0])
    np.testing.assert_allclose(gathered["norm"]["var"], [1, 0, 0, 0])
    head = params["policy"]["head"]
    got = model.apply(params, gathered, x[:1])
    np.testing.assert_allclose(got[0], head["bias"] - head["kernel"][0], rtol=1e-4)
    np.testing.assert_array_equal(model.apply(params, model_state, x), before)


def test_what_is_not_supported_is_refused():
    class Dropped(nnx.Module):
        def __init__(self, rngs):
            self.drop = nnx.Dropout(0.5, rngs=rngs)

    class Unmasked(nnx.Module):
        def __init__(self, rngs):
            self.norm = nnx.BatchNorm(4, rngs=rngs)

        def __call__(self, x):
            return self.norm(x)

    with pytest.raises(TypeError, match=r"Dropped has the variables \['RngCount', 'RngKey'\]"):
        models.build(Dropped, BOX, "policy")
    with pytest.raises(TypeError, match="Unmasked gathers statistics; its __call__ must take"):
        models.build(Unmasked, BOX, "policy")


def test_trains_and_continues_from_what_was_saved(tmp_path):
    def joint(n_epochs, output_dir):
        task = RLTask("CartPole-v1", num_envs=2)
        settings = {"n_interactions_per_epoch": 64, "batch_size": 32, "train_steps_per_epoch": 3}
        trainer = PPOJoint(task, joint_model=Joint, output_dir=str(output_dir), **settings)
        before = jax.tree.map(np.array, trainer.state.params)
        trainer.run(n_epochs)
        trainer.close()
        return before, trainer.state.params

    before, whole = joint(2, tmp_path / "whole")
    # The module names its parts policy and value, so they are where the trainers look for them.
    assert whole.keys() == {"policy", "value"}
    changed = jax.tree.map(lambda x, y: not np.array_equal(x, y), before, whole)
    assert all(jax.tree.leaves(changed))
    joint(1, tmp_path / "half")
    _, continued = joint(1, tmp_path / "half")
    jax.tree.map(np.testing.assert_array_equal, whole, continued)


def test_two_optimizers():
    trainer = PPO(
        RLTask("CartPole-v1", num_envs=2),
        value_model=NnxValue,
        policy_model=NnxPolicy,
        n_interactions_per_epoch=64,
        value_train_steps_per_epoch=2,
        policy_train_steps_per_epoch=2,
    )
    trainer.run(1)
    assert trainer.state.params.keys() == {"policy", "value"}
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(trainer.state.params))
