"""Values of actions, target networks, and training without an environment."""

import functools

import gymnasium as gym
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rl_trainers import A2C, AWR, PPO, QWR, RWR, RLTask, SamplingAWR, advantages, losses, models, optimizers
from rl_trainers.envs import probe
from rl_trainers.types import Batch

BODY = functools.partial(models.MLP, layer_widths=(8,), activation=jnp.tanh)
POLICY = functools.partial(models.Policy, body=BODY)
VALUE = functools.partial(models.Value, body=BODY, inject_actions_dim=8)


def small(cls, task, **kwargs):
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
    task = task if isinstance(task, RLTask) else RLTask(task, num_envs=4, gamma=0.9)
    return cls(task, **{**settings, **kwargs})


def trees_equal(a, b):
    pairs = zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    return all(np.array_equal(x, y, equal_nan=np.asarray(x).dtype.kind == "f") for x, y in pairs)


# Aggregates.

TWO = jnp.asarray([0.0, np.log(3)]).reshape(2, 1, 1)
HALVES = jnp.full((2, 1, 1), 0.5)


@pytest.mark.parametrize(
    ("how", "want"),
    [("mean", 0.5493061), ("max", 1.0986123), ("softmax", 0.8239592), ("logsumexp", 0.6931472)],
)
def test_aggregates_by_hand(how, want):
    got = losses.aggregate_values(TWO, HALVES, how, 1.0)
    np.testing.assert_allclose(got, [[want]], rtol=1e-6)
    # A weight of 1/4 and 3/4 counts an action as often as samples of it would.
    samples = jnp.concatenate([TWO[:1], TWO[1:], TWO[1:], TWO[1:]])
    weighted = losses.aggregate_values(TWO, jnp.asarray([0.25, 0.75]).reshape(2, 1, 1), how, 0.7)
    counted = losses.aggregate_values(samples, jnp.full((4, 1, 1), 0.25), how, 0.7)
    np.testing.assert_allclose(weighted, counted, rtol=1e-6)


@pytest.mark.parametrize("how", ["softmax", "logsumexp"])
def test_aggregates_lie_between_the_mean_and_the_maximum(how):
    cold = losses.aggregate_values(TWO, HALVES, how, 1e-3)
    hot = losses.aggregate_values(TWO, HALVES, how, 1e4)
    np.testing.assert_allclose(cold, [[np.log(3)]], atol=1e-3)
    np.testing.assert_allclose(hot, [[np.log(3) / 2]], atol=1e-3)


@pytest.mark.parametrize("how", ["mean", "max", "softmax", "logsumexp"])
def test_an_action_that_is_never_taken_does_not_count(how):
    q = jnp.asarray([1.0, 99.0]).reshape(2, 1, 1)
    got = losses.aggregate_values(q, jnp.asarray([1.0, 0.0]).reshape(2, 1, 1), how, 1.0)
    np.testing.assert_allclose(got, [[1.0]], rtol=1e-6)


@pytest.mark.parametrize(("how", "want"), [(None, 1.0), ("std", np.sqrt(2)), ("abs", 1.0)])
def test_spread_by_hand(how, want):
    # Deviations from 2 of -2, 0, 0 and 2; the third state does not count.
    q = jnp.asarray([[[0.0, 2.0, 0.0]], [[2.0, 4.0, 7.0]]])
    got = losses.value_spread(q, jnp.full(q.shape, 0.5), jnp.asarray([[1.0, 1.0, 0.0]]), how)
    np.testing.assert_allclose(got, want, rtol=1e-6)


@pytest.mark.parametrize("normalization", ["std", "abs"])
@pytest.mark.parametrize("how", ["softmax", "logsumexp"])
def test_normalised_aggregates_are_scale_invariant(how, normalization):
    mask, weights = jnp.ones((3, 2)), jnp.full((4, 3, 2), 0.25)
    q = jax.random.normal(jax.random.PRNGKey(0), (4, 3, 2))

    def value(q):
        spread = losses.value_spread(q, weights, mask, normalization)
        return losses.aggregate_values(q / spread, weights, how, 0.3) * spread

    np.testing.assert_allclose(value(100 * q), 100 * value(q), rtol=1e-5)
    plain = losses.aggregate_values(100 * q, weights, how, 0.3)
    assert np.abs(plain - 100 * losses.aggregate_values(q, weights, how, 0.3)).max() > 1


# The critic.


def exact_q(trainer):
    """Makes Q(s, a) = 10 s + a."""

    def apply(params, model_state, observation, *action):
        dist_inputs = trainer._policy_model.apply(params, model_state, observation)
        return dist_inputs, 10.0 * observation[..., 0] + action[0] if action else None

    trainer._model = trainer._model._replace(apply=apply)
    return trainer


@pytest.mark.parametrize(
    ("how", "next_value"), [("mean", 0.5), ("max", 1.0), ("logsumexp", np.log((1 + np.e) / 2))]
)
def test_target_of_all_actions_by_hand(how, next_value):
    trainer = small(
        AWR,
        probe.DelayedReward,
        q_value=True,
        all_actions=True,
        q_value_aggregate=how,
        advantage_estimator=functools.partial(advantages.td_lambda, lambda_=0.0),
    )
    data, *_ = trainer._collect()
    steps = data.steps
    uniform = steps._replace(dist_inputs=np.zeros_like(steps.dist_inputs))
    assert set(np.unique(steps.observation[steps.mask > 0])) == {0.0, 1.0}
    batch = exact_q(trainer).make_batch(trainer.state, data._replace(steps=uniform), trainer.hparams())
    first = (steps.mask > 0) & (steps.observation[..., 0] == 0)
    second = (steps.mask > 0) & (steps.observation[..., 0] == 1)
    np.testing.assert_allclose(batch.value_target[second], 1.0)
    inside = first[:-1] & second[1:]
    np.testing.assert_allclose(batch.value_target[:-1][inside], 0.9 * (10 + next_value), rtol=1e-5)


def test_batch_sizes_may_differ_and_margin_0_learns():
    trainer = small(AWR, probe.DelayedReward, q_value=True, q_value_n_samples=3, value_batch_size=64)
    trainer.run(40)
    observation = jnp.asarray([[0.0], [1.0]])
    actions = jnp.zeros((2,), jnp.int32)
    state = trainer.state
    got = trainer._value(state.params, state.model_state, observation, actions)
    np.testing.assert_allclose(got, [0.9, 1.0], atol=0.08)


@pytest.mark.parametrize("cls", [PPO, SamplingAWR])
def test_the_best_action_is_found(cls):
    trainer = small(cls, probe.ActionAndObservationReward, q_value=True, q_value_n_samples=3)
    trainer.run(30)
    np.testing.assert_array_equal(trainer.evaluate(20).returns, np.ones(20))


def test_as_many_samples_as_actions_are_all_actions():
    assert small(SamplingAWR, "CartPole-v1", q_value_n_samples=2).all_actions
    assert not small(SamplingAWR, "CartPole-v1", q_value_n_samples=3).all_actions
    assert not small(AWR, "CartPole-v1", q_value_n_samples=2).all_actions


@pytest.mark.parametrize(
    ("normalizer", "n_shared_layers"), [(None, 1), (models.Normalize, 1)]
)
def test_values_of_actions_on_shared_layers(normalizer, n_shared_layers):
    trainer = small(
        SamplingAWR,
        "CartPole-v1",
        policy_model=functools.partial(POLICY, normalizer=normalizer),
        n_shared_layers=n_shared_layers,
        q_value_n_samples=3,
    )
    before = jax.tree.map(np.asarray, trainer.state.params)
    trainer.run(1)
    assert "inject_action" in trainer.state.params["value"]
    assert not any(
        np.array_equal(a, b)
        for a, b in zip(jax.tree.leaves(before), jax.tree.leaves(trainer.state.params), strict=True)
    )


# Sampling AWR.


def weigh(trainer, batch, key=0):
    """The advantages, mask and actions that the loss of a batch sees."""
    state = trainer.state
    dist_inputs = trainer._policy_model.apply(state.params, state.model_state, batch.observation)
    hparams = {**trainer.hparams(), "key": jax.random.PRNGKey(key)}
    return trainer._decisions(state.params, state.model_state, dist_inputs, batch, hparams), hparams


def states(mu, action, n=2):
    zeros = jnp.zeros((n, 1))
    return Batch(
        jnp.arange(n, dtype=jnp.float32).reshape(n, 1, 1),
        jnp.full((n, 1, *np.shape(action)), action),
        jnp.tile(jnp.asarray(mu, jnp.float32), (n, 1, 1)),
        zeros,
        zeros,
        jnp.asarray([[1.0], [0.0]]) if n == 2 else jnp.ones((n, 1)),
    )


def test_all_actions_by_hand():
    trainer = exact_q(
        small(SamplingAWR, probe.DelayedReward, all_actions=True, advantage_normalization=False, w_max=2.0)
    )
    # mu is (1/4, 3/4) and Q - V is (-3/4, 1/4) in every state; the second state is masked.
    (dist_inputs, batch), hparams = weigh(trainer, states([0.0, np.log(3)], 0))
    np.testing.assert_array_equal(batch.action, [[0], [0], [1], [1]])
    np.testing.assert_allclose(batch.mask, [[0.25], [0], [0.75], [0]], rtol=1e-6)
    np.testing.assert_allclose(batch.advantage, [[-0.75], [-0.75], [0.25], [0.25]], rtol=1e-5)
    loss, metrics = trainer.policy_loss(jnp.zeros((4, 1, 2)), batch, hparams)
    want = np.log(2) * (0.25 * np.exp(-0.75) + 0.75 * np.exp(0.25))
    np.testing.assert_allclose(loss, want, rtol=1e-5)
    np.testing.assert_allclose(metrics["awr_weight_min"], np.exp(-0.75), rtol=1e-5)
    np.testing.assert_allclose(metrics["awr_weight_max"], np.exp(0.25), rtol=1e-5)


def test_reweighting_counts_actions_as_the_policy_takes_them():
    settings = {"all_actions": True, "reweight": True, "advantage_normalization": False}
    trainer = exact_q(small(SamplingAWR, probe.DelayedReward, **settings))
    (_, batch), hparams = weigh(trainer, states([0.0, np.log(3)], 0))
    loss, _ = trainer.policy_loss(jnp.tile(jnp.asarray([np.log(4.0), 0.0]), (4, 1, 1)), batch, hparams)
    want = -(0.8 * np.exp(-0.75) * np.log(0.8) + 0.2 * np.exp(0.25) * np.log(0.2))
    np.testing.assert_allclose(loss, want, rtol=1e-5)


def test_samples_come_from_the_distribution_that_acted():
    trainer = exact_q(
        small(SamplingAWR, probe.DelayedReward, q_value_n_samples=1000, advantage_normalization=False)
    )
    (_, batch), _ = weigh(trainer, states([0.0, np.log(3)], 0))
    drawn = np.asarray(batch.action).reshape(1000, 2)
    # Four standard errors of a share of 3/4 among 1,000.
    np.testing.assert_allclose(drawn.mean(0), 0.75, atol=0.055)
    advantage = np.asarray(batch.advantage).reshape(1000, 2)
    np.testing.assert_allclose(advantage.mean(0), 0.0, atol=1e-4)
    np.testing.assert_allclose(advantage, drawn - drawn.mean(0), atol=1e-4)
    (_, again), _ = weigh(trainer, states([0.0, np.log(3)], 0), key=1)
    assert not np.array_equal(again.action, batch.action)


@pytest.mark.parametrize(
    ("env", "n_samples"), [("CartPole-v1", 2), ("MountainCarContinuous-v0", 3)]
)
def test_sampling_awr_trains_and_compiles_once(env, n_samples):
    trainer = small(
        SamplingAWR,
        env,
        q_value_n_samples=n_samples,
        q_value_aggregate="max",
        advantage_estimator=advantages.monte_carlo,
        added_policy_slice_length=1,
    )
    trainer.run(2)
    compiled = trainer._learn._cache_size()
    trainer.beta = 0.5
    record = trainer._run_epoch()
    assert trainer._learn._cache_size() == compiled == 1
    names = ["policy_loss", "advantage_std", "awr_weight_mean", "awr_weight_std", "value_loss"]
    assert np.isfinite([record[name] for name in names]).all()
    assert record["awr_weight_min"] <= record["awr_weight_mean"] <= record["awr_weight_max"] <= 20


def test_the_best_continuous_action_is_found():
    class Nearest(gym.Env):
        observation_space = gym.spaces.Box(0, 1, (1,), np.float32)
        action_space = gym.spaces.Box(-2, 2, (1,), np.float32)

        def reset(self, *, seed=None, options=None):
            return np.zeros(1, np.float32), {}

        def step(self, action):
            return np.zeros(1, np.float32), -float((action[0] - 1) ** 2), True, False, {}

    task = RLTask(Nearest, num_envs=4)
    trainer = small(SamplingAWR, task, q_value_n_samples=4, policy_train_steps_per_epoch=16)
    trainer.run(40)
    assert trainer.evaluate(4).returns.min() > -0.05


def test_qwr_is_another_name():
    assert QWR is SamplingAWR


def test_sampling_awr_needs_values_of_actions():
    with pytest.raises(ValueError, match="q_value=False"):
        small(SamplingAWR, "CartPole-v1", q_value=False)


# Target parameters.


class Falling(PPO):
    """Every step of the value function lowers each of its parameters by the learning rate."""

    def _value_loss(self, params, model_state, batch, hparams):
        return sum(jnp.sum(x) for x in jax.tree.leaves(params["value"])), {}


def falling(target_sync, n_steps=4):
    return small(
        Falling,
        probe.ConstantReward,
        target_sync=target_sync,
        value_train_steps_per_epoch=n_steps,
        value_optimizer=functools.partial(optimizers.SGD, clip_grad_norm=None),
        value_lr_schedule=0.25,
    )


@pytest.mark.parametrize(
    ("target_sync", "steps_at_copy"), [(1, [3, 7, 11]), (2, [2, 6, 10]), (4, [0, 4, 8]), (8, [0, 0, 8])]
)
def test_targets_are_copied_at_multiples_of_target_sync(target_sync, steps_at_copy):
    trainer = falling(target_sync)
    begin = jax.tree.map(np.asarray, trainer.state.params["value"])
    assert trees_equal(trainer.state.target_params, {"value": begin})
    for steps in steps_at_copy:
        trainer.run(1)
        fallen = jax.tree.map(lambda a, b: a - b, begin, trainer.state.target_params["value"])
        for leaf in jax.tree.leaves(fallen):
            np.testing.assert_allclose(leaf, 0.25 * steps, atol=1e-5)


@pytest.mark.parametrize("target_sync", [None, 50])
def test_the_first_state_learns_what_the_second_was_worth_at_the_last_copy(target_sync):
    trainer = small(
        AWR,
        probe.DelayedReward,
        value_train_steps_per_epoch=400,
        target_sync=target_sync,
        advantage_estimator=functools.partial(advantages.td_lambda, lambda_=0.0),
    )
    params = jax.tree.map(jnp.zeros_like, trainer.state.params)
    params["value"] = jax.tree.map(lambda x: jnp.full_like(x, 0.1), trainer.state.params["value"])
    trainer.state = trainer.state._replace(params=params)
    observations = jnp.asarray([[0.0], [1.0]])
    before = trainer._value(params, trainer.state.model_state, observations)
    assert before[1] < 0.5
    trainer.run(1)
    state = trainer.state
    after = trainer._value(state.params, state.model_state, observations)
    want = 0.9 * float(before[1]) if target_sync is None else 0.9
    np.testing.assert_allclose(after, [want, 1.0], atol=0.02)


def test_evaluations_change_no_weight():
    settings = {"target_sync": 2, "q_value": True}
    runs = [
        small(AWR, "CartPole-v1", value_evals_per_epoch=n, value_eval_steps=k, **settings)
        for n, k in ((1, None), (4, 1))
    ]
    for trainer in runs:
        trainer.run(2)
    assert trees_equal(runs[0].state, runs[1].state)


def test_targets_do_not_stand_in_for_the_layers_of_the_policy():
    estimator = functools.partial(advantages.vtrace, lambda_=0.0, clip_rho_threshold=2.0)
    trainer = small(PPO, "CartPole-v1", n_shared_layers=1, target_sync=4, advantage_estimator=estimator)
    assert sorted(trainer.state.target_params) == ["shared", "value"]
    data, *_ = trainer._collect()
    nothing = jax.tree.map(jnp.zeros_like, trainer.state.target_params)
    batch = trainer._judge(trainer.state, {**trainer.state.params, **nothing}, data)
    # All values are 0 and the policy is the one that acted, so targets are rewards.
    np.testing.assert_allclose(batch.value_target, data.steps.reward, atol=1e-6)


@pytest.mark.parametrize(("target_sync", "near"), [(3, 2), (0, 1), (7, 8), (13, 16)])
def test_target_sync_must_fit(target_sync, near):
    message = f"target_sync={target_sync} must divide.*nearest valid value: {near}\\b"
    with pytest.raises(ValueError, match=message):
        small(PPO, "CartPole-v1", target_sync=target_sync)


def test_a_run_with_targets_continues_exactly(tmp_path):
    first = small(SamplingAWR, "CartPole-v1", target_sync=16, output_dir=str(tmp_path / "run"))
    first.run(1)
    first.close()
    second = small(SamplingAWR, "CartPole-v1", target_sync=16, output_dir=str(tmp_path / "run"))
    second.run(2)
    straight = small(SamplingAWR, "CartPole-v1", target_sync=16)
    straight.run(3)
    assert trees_equal(second.state, straight.state)


# Reward-weighted regression.


def test_rwr_is_awr_without_a_value_function():
    def nothing():
        return lambda key, x: jnp.zeros(1), lambda params, x: jnp.zeros(len(x)) * params

    shared = {"n_replay_epochs": 1, "beta": 0.5, "w_max": 3.0}
    awr = small(
        AWR, probe.ActionReward, value_model=nothing, advantage_estimator=advantages.monte_carlo, **shared
    )
    settings = {"policy_model": POLICY, "n_interactions_per_epoch": 64, "policy_batch_size": 32}
    rwr = RWR(RLTask(probe.ActionReward, num_envs=4, gamma=0.9), **settings, **shared)
    data, *_ = awr._collect()
    params = {**rwr.state.params, "value": awr.state.params["value"]}
    batches = [t.make_batch(t.state, data, t.hparams()) for t in (awr, rwr)]
    returns = [batch.advantage * data.steps.mask for batch in batches]
    np.testing.assert_array_equal(*returns)
    assert set(np.unique(returns[0])) == {-1.0, 0.0, 1.0}
    np.testing.assert_array_equal(batches[0].mask, batches[1].mask)

    def losses_of(trainer, batch, model_state):
        return jax.value_and_grad(
            lambda p: trainer._policy_loss({**params, "policy": p}, model_state, batch, trainer.hparams())[0]
        )(params["policy"])

    assert trees_equal(
        losses_of(awr, batches[0], awr.state.model_state), losses_of(rwr, batches[1], rwr.state.model_state)
    )


def test_rwr_finds_the_best_action():
    trainer = RWR(
        RLTask(probe.ActionAndObservationReward, num_envs=4),
        n_interactions_per_epoch=64,
        policy_lr_schedule=1e-2,
        policy_train_steps_per_epoch=16,
    )
    trainer.run(10)
    np.testing.assert_array_equal(trainer.evaluate(20).returns, np.ones(20))


# Training without an environment.


@pytest.mark.parametrize("cls", [AWR, SamplingAWR, RWR])
@pytest.mark.parametrize("env", [probe.ActionAndObservationReward, "Pendulum-v1"])
def test_offline(cls, env):
    task = RLTask(env, num_envs=4)
    data = RLTask(env, num_envs=4, initial_trajectories=40, max_steps=20, seed=3)
    unknown = np.full_like(data.replay.steps.dist_inputs, np.nan)
    data.replay = data.replay._replace(steps=data.replay.steps._replace(dist_inputs=unknown))
    task.replay = data.replay
    n_epochs = {"n_replay_epochs": 1}
    if cls is RWR:
        trainer = RWR(task, policy_model=POLICY, policy_lr_schedule=1e-2, offline=True, **n_epochs)
    else:
        trainer = small(cls, task, offline=True, q_value=True, policy_train_steps_per_epoch=64, **n_epochs)
    begin = jax.tree.map(np.asarray, (task.actor, task.replay))
    trainer.run(5)
    assert (task.n_interactions(), task.n_eval_interactions) == (0, 0)
    assert trees_equal(begin, (task.actor, task.replay))
    assert np.isnan(trainer.avg_returns).all() and len(trainer.avg_returns) == 5
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(trainer.state))
    if env is probe.ActionAndObservationReward:
        np.testing.assert_array_equal(trainer.evaluate(20).returns, np.ones(20))


def test_offline_targets_use_the_stored_next_action():
    trainer = small(
        AWR,
        RLTask(probe.DelayedReward, num_envs=1, initial_trajectories=10, gamma=0.9),
        n_replay_epochs=1,
        q_value=True,
        offline=True,
        advantage_estimator=functools.partial(advantages.td_lambda, lambda_=0.0),
    )
    data = trainer._collect()[0]
    steps = data.steps
    batch = exact_q(trainer).make_batch(trainer.state, data, trainer.hparams())
    first = (steps.mask > 0) & (steps.observation[..., 0] == 0)
    inside = first[:-1] & (steps.mask[1:] > 0)
    assert len(set(steps.action[1:][inside])) == 2
    want = 0.9 * (10 + steps.action[1:][inside])
    np.testing.assert_allclose(batch.value_target[:-1][inside], want, rtol=1e-6)


def test_offline_is_for_off_policy_trainers_with_data():
    with pytest.raises(ValueError, match="offline=True: PPO is on-policy"):
        small(PPO, RLTask("CartPole-v1", initial_trajectories=2), offline=True)
    with pytest.raises(ValueError, match="offline=True: there is nothing to train on"):
        small(AWR, "CartPole-v1", offline=True)


# Arguments.


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"q_value_aggregate": "median"}, "q_value_aggregate='median' must be one of"),
        ({"q_value_normalization": "l2"}, "q_value_normalization='l2' must be one of"),
        ({"q_value_temperature": 0.0}, "q_value_temperature=0.0 must be positive"),
        ({"q_value_n_samples": 0}, "q_value_n_samples=0 must be at least 1"),
        ({"vocab_size": 3}, "vocab_size=3 must be the number of actions.*nearest valid value: 2"),
        ({"q_value_aggregate_max": True, "q_value_aggregate": "mean"}, "contradicts"),
        ({"on_policy": True}, "on_policy=True contradicts AWR with n_replay_epochs=10"),
    ],
)
def test_arguments_that_cannot_be(arguments, message):
    with pytest.raises(ValueError, match=message):
        small(AWR, "CartPole-v1", **arguments)


def test_all_actions_are_those_of_a_discrete_space():
    with pytest.raises(ValueError, match="all_actions=True needs a Discrete action space"):
        small(AWR, "Pendulum-v1", q_value=True, all_actions=True)
    with pytest.raises(ValueError, match="on_policy=False contradicts PPO"):
        small(PPO, "CartPole-v1", on_policy=False)


@pytest.mark.parametrize(("old", "new"), [(True, "max"), (False, "mean")])
def test_the_old_spelling_of_the_aggregate(old, new):
    assert small(AWR, "CartPole-v1", q_value_aggregate_max=old).q_value_aggregate == new


POLICY_ARGUMENTS = {
    "policy_model": POLICY,
    "policy_optimizer": optimizers.Adam,
    "policy_lr_schedule": optimizers.multifactor,
    "policy_batch_size": 8,
    "policy_train_steps_per_epoch": 2,
    "policy_evals_per_epoch": 1,
    "policy_eval_steps": 1,
    "max_slice_length": 2,
    "output_dir": None,
}
VALUE_ARGUMENTS = {
    "value_model": VALUE,
    "value_optimizer": optimizers.Adam,
    "value_lr_schedule": optimizers.multifactor,
    "value_batch_size": 8,
    "value_train_steps_per_epoch": 2,
    "n_shared_layers": 1,
}
EVALS = {"value_evals_per_epoch": 1, "value_eval_steps": 1}
LATER = {**EVALS, "added_policy_slice_length": 1, "n_replay_epochs": 1, "scale_value_targets": True}
Q = {"q_value": True, "q_value_aggregate_max": True, "q_value_n_samples": 1, "vocab_size": 2}


@pytest.mark.parametrize("cls", [A2C, SamplingAWR])
@pytest.mark.parametrize(
    "published",
    [
        {"on_policy": True, "n_replay_epochs": 1, "collect_per_epoch": 2},
        {"added_policy_slice_length": 1, "collect_per_epoch": 2},
        {**LATER, "n_eval_episodes": 1, "only_eval": False, "n_trajectories_per_epoch": 2},
        {**LATER, **Q, "n_eval_episodes": 1, "n_interactions_per_epoch": 64},
        {
            **LATER,
            "q_value": True,
            "q_value_aggregate": "logsumexp",
            "q_value_temperature": 0.3,
            "q_value_n_samples": 4,
            "q_value_normalization": False,
            "offline": False,
        },
    ],
    ids=["layers", "margin", "replay", "q_values", "aggregates"],
)
def test_published_arguments_are_accepted(cls, published):
    if cls is SamplingAWR and published.get("q_value_n_samples") == 1:
        published = {**published, "q_value_n_samples": 2}  # it compares samples with one another
    task = RLTask("CartPole-v1", num_envs=2, max_steps=20)
    trainer = cls(task, **POLICY_ARGUMENTS, **VALUE_ARGUMENTS, **published)
    assert trainer.current_epoch == 0
    assert sorted(trainer.state.params) == ["policy", "shared", "value"]


def test_a_target_network_beside_own_batches_is_refused():
    class Own(AWR):
        def value_batches_stream(self):
            yield from super().value_batches_stream()

    with pytest.raises(ValueError, match="target_sync=4 has no effect"):
        Own(RLTask("CartPole-v1"), target_sync=4, value_train_steps_per_epoch=8)


def test_one_sample_is_refused_since_it_has_no_advantage():
    with pytest.raises(ValueError, match="q_value_n_samples=1: one action has no advantage"):
        SamplingAWR(RLTask("CartPole-v1"), q_value_n_samples=1)


def test_sampling_awr_takes_all_actions_or_8_samples_by_default():
    discrete, box = (SamplingAWR(RLTask(env)) for env in ("CartPole-v1", "Pendulum-v1"))
    assert discrete.all_actions and not box.all_actions and box.q_value_n_samples == 8
