"""Trax layers as models: stand-ins that behave as Trax's layers do, and Trax where it is installed."""

import functools
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gymnasium import spaces

from rl_trainers import PPO, PPOJoint, RLTask, models
from rl_trainers.distributions import create_distribution

KEY = jax.random.PRNGKey(0)
BOX = spaces.Box(-np.inf, np.inf, (4,), np.float32)
TWO = create_distribution(spaces.Discrete(2))


class Layer:
    """What ``trax.layers.Layer`` is to its callers; it keeps weights while it is traced, as that does."""

    n_in = n_out = 1
    state, weights, sublayers = (), (), ()

    @property
    def name(self):
        return type(self).__name__

    def pure_fn(self, x, weights, state, rng):
        assert x.shape[1] == 1, "batch and time"
        self.weights, self.rng = weights, rng
        return self.forward(x), state


class Dense(Layer):
    def __init__(self, n):
        self.n = n

    def init(self, signature, rng):
        self.weights = [jax.random.normal(rng, (signature.shape[-1], self.n)), jnp.zeros(self.n)]
        return self.weights, ()

    def forward(self, x):
        return x @ self.weights[0] + self.weights[1]


class Serial(Layer):
    def __init__(self, *sublayers):
        self.sublayers, self.state = sublayers, [()] * len(sublayers)

    def init(self, signature, rng):
        self.weights = []
        for i, layer in enumerate(self.sublayers):
            self.weights.append(layer.init(signature, jax.random.fold_in(rng, i))[0])
            shape = (*signature.shape[:-1], layer.n)
            signature = jax.ShapeDtypeStruct(shape, signature.dtype)
        return self.weights, self.state

    def forward(self, x):
        for layer, weights in zip(self.sublayers, self.weights, strict=True):
            x = layer.pure_fn(x, weights, (), self.rng)[0]
        return x


class Branch(Serial):
    n_out = 2

    def init(self, signature, rng):
        return [layer.init(signature, rng)[0] for layer in self.sublayers], self.state

    def forward(self, x):
        pairs = zip(self.sublayers, self.weights, strict=True)
        return tuple(layer.pure_fn(x, weights, (), self.rng)[0] for layer, weights in pairs)


def policy(policy_distribution, mode):
    assert mode == "train"
    return Serial(Dense(8), Dense(policy_distribution.n_inputs))


def value(mode):
    return Serial(Dense(8), Dense(1))


def joint(policy_distribution, mode):
    return Branch(Dense(policy_distribution.n_inputs), Dense(1))


def test_weights_become_tuples_and_outputs_rows():
    made = policy(TWO, "train")
    for network in (policy, made, value):
        part, shape = ("value", (3, 5)) if network is value else ("policy", (3, 5, 2))
        model = models.build(network, BOX, part, policy_distribution=TWO, mode="train")
        x = np.ones((3, 5, 4), np.float32)
        params, model_state = jax.jit(model.init)(KEY, x)
        assert params.keys() == {part} and model_state == {}
        assert all(isinstance(weights, tuple) for weights in (params[part], *params[part]))
        (w, b), (v, c) = params[part]
        got = jax.jit(model.apply)(params, model_state, x)
        np.testing.assert_allclose(got, ((x @ w + b) @ v + c).reshape(shape), rtol=1e-5)
    assert made.weights == (), "the layer itself keeps nothing of a trace"


def test_nested_observations_come_as_one_vector():
    space = spaces.Dict({"a": spaces.Discrete(3), "b": spaces.Box(-1, 1, (2, 2), np.float32)})
    model = models.build(lambda: Dense(2), space, "policy")
    x = {"a": np.array([2]), "b": np.ones((1, 2, 2), np.float32)}
    params, _ = model.init(KEY, x)
    assert params["policy"][0].shape == (3 + 4, 2)
    np.testing.assert_allclose(
        model.apply(params, {}, x)[0], params["policy"][0][2:].sum(0), rtol=1e-5, atol=1e-6
    )


def test_layers_that_keep_state_or_take_actions_are_refused():
    class Stateful(Dense):
        def init(self, signature, rng):
            return super().init(signature, rng)[0], (jnp.zeros(3),)

    class WithAction(Dense):
        n_in = 2

    with pytest.raises(ValueError, match="the Trax layer Stateful keeps state"):
        models.build(lambda: Stateful(2), BOX, "policy")
    with pytest.raises(ValueError, match="the Trax layer WithAction takes 2 inputs; it should take 1"):
        models.build(lambda: WithAction(1), BOX, "value")


def test_shared_sublayers_are_one_tree():
    pair = models.build_pair(policy, value, BOX, 1, policy_distribution=TWO, mode="train")
    x = np.ones((3, 4), np.float32)
    params, model_state = pair.init(KEY, x)
    assert params.keys() == {"shared", "policy", "value"}
    ((w, b),), ((p, c),), ((v, d),) = (params[part] for part in ("shared", "policy", "value"))
    dist_inputs, values = pair.apply(params, model_state, x)
    np.testing.assert_allclose(dist_inputs, (x @ w + b) @ p + c, rtol=1e-5)
    np.testing.assert_allclose(values, ((x @ w + b) @ v + d)[:, 0], rtol=1e-5)
    with pytest.raises(ValueError, match="n_shared_layers=2 must lie between 0 and 1; the policy's sub"):
        models.build_pair(policy, value, BOX, 2, policy_distribution=TWO, mode="train")

    def wide(mode):
        return Serial(Dense(9), Dense(1))

    with pytest.raises(ValueError, match="n_shared_layers=1: the first sublayers of the policy"):
        models.build_pair(policy, wide, BOX, 1, policy_distribution=TWO, mode="train")
    with pytest.raises(ValueError, match="or two Serial layers of Trax; these are Serial and Value"):
        models.build_pair(policy, models.Value, BOX, 1, policy_distribution=TWO, mode="train")


def ppo(policy_model, value_model, n_shared_layers, **settings):
    return PPO(
        RLTask("CartPole-v1", num_envs=2),
        policy_model=policy_model,
        value_model=value_model,
        n_shared_layers=n_shared_layers,
        n_interactions_per_epoch=64,
        value_train_steps_per_epoch=2,
        policy_train_steps_per_epoch=2,
        **settings,
    )


def check_shared_layers_train(policy_model, value_model, tmp_path):
    trainer = ppo(policy_model, value_model, 1, output_dir=str(tmp_path))
    before = jax.tree.map(np.array, trainer.state.params)
    trainer.run(2)
    after = trainer.state.params
    assert after.keys() == {"shared", "policy", "value"}
    changed = jax.tree.map(lambda x, y: not np.array_equal(x, y), before, after)
    assert all(jax.tree.leaves(changed))
    trainer.close()
    again = ppo(policy_model, value_model, 1, output_dir=str(tmp_path))
    assert again.current_epoch == 2
    jax.tree.map(np.testing.assert_array_equal, again.state.params, after)


def test_shared_layers_train_and_are_restored(tmp_path):
    check_shared_layers_train(policy, value, tmp_path)


def test_joint_layer_trains():
    trainer = PPOJoint(RLTask("CartPole-v1", num_envs=2), joint_model=joint, n_interactions_per_epoch=64)
    trainer.run(1)
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(trainer.state.params))


# With Trax itself, in an environment of its own: `make trax`.


@pytest.fixture(scope="module")
def trax():
    pytest.importorskip("trax", reason="the extra trax is not installed")
    import trax.models

    return trax


@pytest.mark.trax
@pytest.mark.slow
def test_either_import_may_come_first():
    for code in ("import tensorflow, rl_trainers", "import rl_trainers, tensorflow"):
        subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[1])


@pytest.mark.trax
@pytest.mark.slow
def test_trax_policy_and_value_solves_cartpole(trax):
    body = functools.partial(
        trax.models.MLP, layer_widths=(64, 64), activation_fn=trax.layers.Tanh, out_activation=True
    )
    trainer = PPOJoint(
        RLTask("CartPole-v1", num_envs=8, gamma=0.99),
        joint_model=functools.partial(trax.models.PolicyAndValue, body=body, joint=False),
        n_interactions_per_epoch=1024,
        batch_size=256,
        train_steps_per_epoch=16,
        lr_schedule=2.5e-3,
        value_loss_coeff=0.5,
    )
    trainer.run(97)
    assert trainer.task.n_interactions() <= 100_000
    assert trainer.evaluate(20).returns.mean() >= 475


@pytest.mark.trax
@pytest.mark.slow
def test_trax_layers_are_shared(trax, tmp_path):
    body = functools.partial(trax.models.MLP, layer_widths=(16,))
    networks = (functools.partial(x, body=body) for x in (trax.models.Policy, trax.models.Value))
    check_shared_layers_train(*networks, tmp_path)


@pytest.mark.trax
@pytest.mark.slow
def test_trax_layers_that_keep_state_are_refused(trax):
    normalized = functools.partial(trax.models.Policy, normalizer=trax.layers.BatchNorm)
    with pytest.raises(ValueError, match="the Trax layer Serial keeps state"):
        models.build(normalized, BOX, "policy", policy_distribution=TWO, mode="train")
