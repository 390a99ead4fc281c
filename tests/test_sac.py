"""SAC, DDPG and TD3."""

import functools
import math
import re

import gymnasium
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rl_trainers import DDPG, SAC, TD3, RLTask, create_distribution, losses, models, ring
from rl_trainers.distributions import Deterministic
from rl_trainers.envs import probe
from rl_trainers.types import EnvInfo, Rollout, TimeStep

BODY = functools.partial(models.MLP, layer_widths=(16,), activation=jnp.tanh)
POLICY = functools.partial(models.Policy, body=BODY)
CRITIC = functools.partial(models.Value, body=BODY, concatenate_actions=True)
QUALITY = functools.partial(models.Quality, body=BODY)


def small(cls, env, num_envs=1, gamma=0.9, seed=0, discrete=False, **kwargs):
    settings = {
        "policy_model": POLICY,
        "value_model": QUALITY if discrete else CRITIC,
        "batch_size": 16,
        "policy_lr_schedule": 1e-2,
        "value_lr_schedule": 1e-2,
        "n_interactions_per_epoch": 32 * num_envs,
        "initial_collect_steps": 16,
        "target_tau": 0.1,
    }
    return cls(RLTask(env, num_envs=num_envs, gamma=gamma, seed=seed), **{**settings, **kwargs})


def continuous(env):
    return functools.partial(env, continuous=True)


def leaves(tree):
    return [np.array(x) for x in jax.tree.leaves(tree)]


def equal(one, other):
    return all(np.array_equal(x, y) for x, y in zip(leaves(one), leaves(other), strict=True))


def data_of(trainer, n=16):
    return ring.sample(jax.random.bits(jax.random.PRNGKey(5), (n,)), trainer._ring, trainer.n_step)


# Equations.


def test_soft_value_by_hand():
    q = jnp.array([1.0, 3.0]).reshape(2, 1, 1)
    log_prob = jnp.log(jnp.array([0.25, 0.75])).reshape(2, 1, 1)
    got = losses.soft_value(q, log_prob, jnp.exp(log_prob), jnp.float32(0.5))
    entropy = -(0.25 * math.log(0.25) + 0.75 * math.log(0.75))
    np.testing.assert_allclose(got, [[2.5 + 0.5 * entropy]], atol=1e-6)


@pytest.mark.parametrize(("entropy", "sign"), [(0.2, 1), (0.8, -1)])
def test_the_temperature_rises_while_the_entropy_is_too_low(entropy, sign):
    gradient = jax.grad(losses.temperature_loss)(jnp.float32(0.0), jnp.float32(entropy), 0.5)
    assert np.sign(-gradient) == sign
    assert float(gradient) == pytest.approx(entropy - 0.5)


def test_sampled_density_is_the_density_of_the_sample():
    space = gymnasium.spaces.Box(-2.0, 3.0, (2,), np.float32)
    squashed = create_distribution(space, learn_std="separate", bounds="squash")
    inputs = jax.random.normal(jax.random.PRNGKey(0), (50, 4))
    action, log_prob = squashed.sample_and_log_prob(inputs, jax.random.PRNGKey(1))
    np.testing.assert_allclose(log_prob, squashed.log_prob(inputs, action), atol=2e-3)
    np.testing.assert_array_equal(action, squashed.sample(inputs, jax.random.PRNGKey(1)))
    # Far out, where tanh is 1 in f32, it stays exact: log N(u) - log(1 - tanh(u)^2), u = 20 and std 1.
    wide = create_distribution(gymnasium.spaces.Box(-1.0, 1.0, (1,), np.float32), bounds="squash")
    action, log_prob = wide.sample_and_log_prob(jnp.full((1, 1), 20.0), jax.random.PRNGKey(2))
    noise = float(jax.random.normal(jax.random.PRNGKey(2), (1, 1))[0, 0])
    expected = -0.5 * noise**2 - 0.5 * math.log(2 * math.pi) - (math.log(4) - 2 * (20 + noise))
    assert float(action[0, 0]) == 1.0 and float(log_prob[0]) == pytest.approx(expected, rel=1e-5)


def test_deterministic_actions_and_their_noise():
    space = gymnasium.spaces.Box(np.array([0.0, -3.0]), np.array([10.0, 1.0]), dtype=np.float32)
    distribution = Deterministic((2,), 0.1, low=space.low, high=space.high, bounds="squash")
    inputs = jnp.array([[0.0, 50.0]] * 4000)
    np.testing.assert_allclose(distribution.mode(inputs[:1]), [[0.0, 1.0]])
    np.testing.assert_allclose(distribution.to_env(distribution.mode(inputs[:1])), [[5.0, 1.0]])
    action = np.asarray(distribution.sample(inputs, jax.random.PRNGKey(0)))
    assert action[:, 0].std() == pytest.approx(0.1, rel=0.05) and action.max() == 1.0
    np.testing.assert_array_equal(
        distribution.sample(inputs, jax.random.PRNGKey(0), 0.0), distribution.mode(inputs)
    )
    density = -0.5 * math.log(2 * math.pi) - math.log(0.1)
    np.testing.assert_allclose(
        distribution.log_prob(inputs[:1], jnp.array([[0.1, 1.0]])), [2 * density - 0.5], atol=1e-4
    )
    np.testing.assert_allclose(distribution.entropy(inputs[:1]), [2 * (density * -1 + 0.5)], atol=1e-4)


# Targets.


def facts(reward=1.0, terminated=False):
    row = np.ones((1, 1), np.float32)
    number = np.zeros((1, 1, 1), np.float32)
    steps = TimeStep(
        number,
        np.zeros((1, 1), np.int32),
        reward * row,
        np.full((1, 1), terminated),
        np.zeros((1, 1), bool),
        row,
        env_info=EnvInfo(row, row),
    )
    return Rollout(steps, number[0] + 1)


@pytest.mark.parametrize("terminated", [False, True])
def test_target_of_soft_actor_critic_by_hand(terminated):
    trainer = small(SAC, probe.ConstantReward, discrete=True, entropy_coeff=0.5)
    # Two target critics on the next observation: Q1 = (1, 4), Q2 = (2, 3); pi = (1/4, 3/4).
    trainer.q_values = lambda params, state, observation, action: jnp.array([[1.0, 4.0], [2.0, 3.0]]).reshape(
        2, 2, 1, 1
    )
    trainer.policy_apply = lambda params, state, observation: jnp.log(jnp.array([0.25, 0.75])).reshape(
        1, 1, 2
    )
    batch = trainer.make_batch(trainer.state, facts(terminated=terminated), {"key": jax.random.PRNGKey(0)})
    entropy = -(0.25 * math.log(0.25) + 0.75 * math.log(0.75))
    value = 0.25 * 1.0 + 0.75 * 3.0 + 0.5 * entropy
    np.testing.assert_allclose(batch.value_target, [[1.0 if terminated else 1 + 0.9 * value]], atol=1e-6)


def test_targets_use_the_target_critics_and_the_current_policy():
    trainer = small(SAC, "Pendulum-v1", entropy_coeff=0.0)
    trainer.run(2)
    data, hparams = data_of(trainer), {"key": jax.random.PRNGKey(3)}
    state = trainer.state
    want = trainer.make_batch(state, data, hparams).value_target
    critics = state._replace(
        params={**state.params, "value": jax.tree.map(lambda x: x + 1, state.params["value"])}
    )
    assert equal(want, trainer.make_batch(critics, data, hparams).value_target)
    policy = state._replace(
        params={**state.params, "policy": jax.tree.map(lambda x: x + 1, state.params["policy"])}
    )
    assert not equal(want, trainer.make_batch(policy, data, hparams).value_target)


def test_target_noise_of_td3_is_clipped():
    trainer = small(TD3, "Pendulum-v1", target_std=0.2)
    inputs = jnp.zeros((5000, 1))
    action, _, _ = trainer.decide(inputs, jax.random.PRNGKey(0), True)
    assert float(jnp.abs(action).max()) == 0.5
    assert float(action.std()) == pytest.approx(0.2, rel=0.1)
    action, _, _ = trainer.decide(inputs, jax.random.PRNGKey(0), False)
    assert float(jnp.abs(action).max()) == 0.0


def test_target_parameters_follow_slowly():
    trainer = small(SAC, "Pendulum-v1", n_interactions_per_epoch=1, initial_collect_steps=1)
    trainer.run(3)
    before = trainer._n_updates
    old = leaves(trainer.state.target_params)
    trainer.run(1)
    assert trainer._n_updates == before + 1
    new = leaves({"value": trainer.state.params["value"]})
    for x, y, z in zip(leaves(trainer.state.target_params), old, new, strict=True):
        np.testing.assert_allclose(x, 0.9 * y + 0.1 * z, atol=1e-6)


# Who trains what.


@pytest.mark.parametrize("cls", [SAC, DDPG])
def test_each_loss_moves_its_own_parameters_only(cls):
    trainer = small(cls, "Pendulum-v1")
    trainer.run(2)
    hparams = {
        **trainer.hparams(),
        "update": jnp.int32(0),
        "key": jax.random.PRNGKey(0),
        "policy_entropy": jnp.float32(0.0),
    }
    before = trainer.state
    batch = trainer.make_batch(before, data_of(trainer), hparams)
    for one in trainer._trainers:
        after, _ = trainer.take_step(one, before, batch, hparams)
        moved = {name for name in before.params if not equal(before.params[name], after.params[name])}
        assert moved == {one.name}


@pytest.mark.parametrize(("delay", "steps"), [(1, 4), (2, 2)])
def test_the_policy_of_td3_waits_for_its_critics(delay, steps):
    trainer = small(
        TD3, "Pendulum-v1", policy_delay=delay, n_interactions_per_epoch=1, initial_collect_steps=1
    )
    trainer.run(3)
    moved = {"policy": 0, "value": 0}
    for _ in range(4):
        before = jax.tree.map(np.array, trainer.state.params)
        trainer.run(1)
        for name in moved:
            moved[name] += not equal(before[name], trainer.state.params[name])
    assert moved == {"policy": steps, "value": 4}


def test_critics_differ_and_the_smaller_counts():
    trainer = small(SAC, "Pendulum-v1")
    params = trainer.state.params["value"]
    assert set(params) == {"0", "1"} and not equal(params["0"], params["1"])
    observation, action = jnp.ones((4, 1, 3)), jnp.zeros((6, 4, 1, 1))
    q = trainer.q_values(trainer.state.params, trainer.state.model_state, observation, action)
    assert q.shape == (2, 6, 4, 1)


# Actions.


@pytest.mark.parametrize("cls", [SAC, TD3])
def test_actions_are_stored_between_minus_one_and_one(cls):
    class Wide(probe.Probe):
        """Keeps the actions that it received."""

        length = 7
        seen: list = []  # noqa: RUF012

        def __init__(self):
            super().__init__()
            self.action_space = gymnasium.spaces.Box(
                np.array([0, -3], np.float32), np.array([10, 1], np.float32)
            )

        def pay(self, action):
            self.seen.append(np.array(action))
            return 0.0

    trainer = small(cls, Wide, n_interactions_per_epoch=100, initial_collect_steps=150)
    trainer.run(3)
    stored = np.asarray(trainer._ring.action)[:300, 0]
    decided = np.asarray(trainer._ring.facts)[:300, 0, 3] > 0
    assert np.abs(stored).max() <= 1.0
    seen = np.array(Wide.seen)
    np.testing.assert_allclose(trainer.task.distribution.to_env(stored[decided]), seen, atol=1e-6)
    assert (seen >= [0, -3]).all() and (seen <= [10, 1]).all()
    np.testing.assert_allclose(trainer.task.distribution.to_env(np.zeros((1, 2), np.float32)), [[5, -1]])


def test_initial_trajectories_are_put_into_the_squashed_form():
    task = RLTask("Pendulum-v1", initial_trajectories=1)
    before = task.distribution.to_env(task.replay.steps.action[:200])
    trainer = SAC(task, policy_model=POLICY, value_model=CRITIC)
    stored = np.asarray(trainer._ring.action)[:200]
    assert np.abs(stored).max() <= 1.0
    np.testing.assert_allclose(task.distribution.to_env(stored), before, atol=1e-5)


# Learning.


@pytest.mark.parametrize("cls", [DDPG, TD3])
def test_random_actions_of_deterministic_policies_are_uniform(cls):
    trainer = small(cls, continuous(probe.ActionReward))
    draws, _ = trainer._draw(jax.random.PRNGKey(0), np.ones(4000, np.float32))
    action = np.asarray(draws.action)
    assert action.std() == pytest.approx(1 / math.sqrt(3), rel=0.03) and abs(action).max() <= 1.0
    assert np.mean(action > 0.5) == pytest.approx(0.25, abs=0.03)


@pytest.mark.parametrize("cls", [SAC, DDPG, TD3])
def test_the_best_action_of_a_box_is_found(cls):
    kwargs = {"entropy_coeff": 0.01} if cls is SAC else {"exploration_std": 0.3}
    trainer = small(cls, continuous(probe.ActionAndObservationReward), num_envs=2, **kwargs)
    trainer.run(20)
    actions = [float(trainer.policy(np.array([x], np.float32), 0.0)[0][0]) for x in (-1.0, 1.0)]
    np.testing.assert_allclose(actions, [-0.5, 0.5], atol=0.12)


def test_the_best_of_discrete_actions_is_found():
    trainer = small(SAC, probe.ActionAndObservationReward, num_envs=2, discrete=True, entropy_coeff=0.05)
    trainer.run(25)
    np.testing.assert_array_equal(trainer.evaluate(20).returns, np.ones(20))


def test_a_learned_temperature_keeps_the_entropy_at_its_target():
    trainer = small(
        SAC, continuous(probe.ActionReward), num_envs=4, target_entropy=-1.0, temperature_lr_schedule=1e-2
    )
    record = {}
    for _ in range(40):
        record = trainer._run_epoch()
    assert record["policy_entropy"] == pytest.approx(-1.0, abs=0.4)


def test_the_default_target_entropy():
    assert small(SAC, "Pendulum-v1")._target_entropy == -1.0
    assert small(SAC, "CartPole-v1", discrete=True)._target_entropy == pytest.approx(0.5 * math.log(2))


# Keeping.


@pytest.mark.parametrize("cls", [SAC, TD3])
def test_resumed_equals_uninterrupted(tmp_path, cls):
    def made(name):
        return small(cls, "Pendulum-v1", output_dir=str(tmp_path / name))

    straight = made("a")
    straight.run(4)
    made("b").run(2)
    resumed = made("b")
    resumed.run(2)
    assert equal(straight.state, resumed.state)


def test_nothing_compiles_after_learning_has_begun():
    trainer = small(SAC, "Pendulum-v1")
    trainer.run(2)
    compiled = [trainer._run_epoch()["compilations"] for _ in range(3)]
    assert compiled == [compiled[0]] * 3


def test_normalisers_of_policy_and_critics_gather_alike():
    trainer = small(
        SAC,
        "Pendulum-v1",
        policy_model=functools.partial(POLICY, normalizer=models.Normalize),
        value_model=functools.partial(CRITIC, normalizer=models.Normalize),
    )
    trainer.run(2)
    state = trainer.state.model_state
    assert equal(state["policy"], state["value"])
    assert float(jax.tree.leaves(state["policy"])[0]) == trainer.task.n_interactions()


@pytest.mark.parametrize(
    ("cls", "space"),
    [
        (SAC, gymnasium.spaces.Box(-np.inf, np.inf, (1,), np.float32)),
        (SAC, gymnasium.spaces.MultiDiscrete([2, 3])),
        (TD3, gymnasium.spaces.Discrete(2)),
    ],
)
def test_action_spaces_that_it_cannot_do_are_refused(cls, space):
    class Env(probe.ConstantReward):
        """Has that space."""

        def __init__(self):
            super().__init__()
            self.action_space = space

    with pytest.raises(TypeError, match=f"{cls.__name__} needs actions of a bounded Box"):
        small(cls, Env)


@pytest.mark.parametrize(
    ("cls", "arguments", "message"),
    [
        (SAC, {"n_critics": 0}, "n_critics=0 must be a whole number of at least 1; nearest valid value: 1"),
        (TD3, {"policy_delay": 0}, "policy_delay=0"),
        (SAC, {"target_entropy": "auto"}, "target_entropy='auto' must be a finite number; nearest"),
        (SAC, {"entropy_coeff": "auto"}, "entropy_coeff='auto'"),
        (SAC, {"entropy_coeff": -0.1}, "entropy_coeff=-0.1 must be a finite number of at least 0.0"),
        (TD3, {"target_std": -0.1}, "target_std=-0.1"),
        (TD3, {"target_limit": -0.1}, "target_limit=-0.1"),
        (DDPG, {"exploration_std": -0.1}, "exploration_std=-0.1"),
    ],
)
def test_wrong_arguments_are_refused(cls, arguments, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        small(cls, continuous(probe.ActionReward), **arguments)


def test_critics_that_would_stay_the_same_are_refused():
    def model(key):
        return (
            lambda _, x, action: jax.random.normal(key, (x.shape[-1] + action.shape[-1],)),
            lambda w, x, action: action @ w[x.shape[-1] :] + x @ w[: x.shape[-1]],
        )

    fixed = functools.partial(model, jax.random.PRNGKey(0))
    with pytest.raises(ValueError, match="n_critics=2: value_model gives each critic the same parameters"):
        small(SAC, continuous(probe.ActionReward), value_model=fixed)
    assert small(SAC, continuous(probe.ActionReward), value_model=fixed, n_critics=1)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"max_slice_length": 4}, "max_slice_length=4: SAC learns from single steps; nearest valid value: 1"),
        ({"only_eval": True}, "only_eval=True: there is nothing to train on"),
    ],
)
def test_what_would_have_no_effect_is_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        small(SAC, "Pendulum-v1", **arguments)
