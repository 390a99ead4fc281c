"""Joint actor-critic trainers on environments whose answers are known."""

import functools
import logging

import flax.linen as nn
import gymnasium
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gymnasium import spaces

from rl_trainers import A2CJoint, AWRJoint, PPOJoint, RLTask, create_distribution, losses, models, optimizers
from rl_trainers.envs import probe
from rl_trainers.types import Batch

BODY = functools.partial(models.MLP, layer_widths=(8,), activation=nn.tanh)
SMALL = functools.partial(models.PolicyAndValue, body=BODY, joint=False)
NORMALIZED = functools.partial(SMALL, normalizer=models.Normalize)

COMMON_METRICS = {
    "joint_loss",
    "advantage_mean",
    "advantage_norm",
    "value_loss",
    "explained_variance",
    "log_probs_mean",
    "preferred_move",
    "grad_norm",
}
PPO_METRICS = {
    "entropy_loss",
    "probs_ratio_mean",
    "unclipped_objective_mean",
    "clipped_objective_mean",
    "ppo_objective_mean",
    "clip_fraction",
    "approximate_kl_divergence",
}
A2C_METRICS = {"entropy_loss", "a2c_objective_mean", "approximate_kl_divergence"}
AWR_METRICS = {"awr_weight_mean", "awr_weight_std", "awr_weight_min", "awr_weight_max"}


class Constant(nn.Module):
    """Logits and a value that do not depend on the observation."""

    logits: tuple = (2.0, 0.0)

    @nn.compact
    def __call__(self, x):
        logits = self.param("policy", lambda key: jnp.array(self.logits))
        value = self.param("value", lambda key: jnp.zeros(()))
        rows = x.shape[:1]
        return jnp.broadcast_to(logits, (*rows, len(self.logits))), jnp.broadcast_to(value, rows)


class Unpaid(probe.Probe):
    """One step, reward 0."""

    def pay(self, action):
        return 0.0


class ScaledEndless(probe.Endless):
    """Endless, with observations in [0, 1]."""

    def look(self):
        return np.full(1, self.t / 50, np.float32)


class Ignoring(probe.ActionReward):
    """Four steps, and the second and fourth action of each episode have no effect."""

    length = 4
    observation_space = spaces.Box(0.0, 4.0, (1,), np.float32)

    def look(self):
        return np.full(1, self.t, np.float32)

    def step(self, action):
        observation, reward, terminated, truncated, info = super().step(action)
        controls = self.t % 2 == 1
        return observation, reward * controls, terminated, truncated, {"control_mask": float(controls)}


class Recording(gymnasium.Env):
    """Episodes of four steps; keeps the actions that it receives, and refuses strangers."""

    def __init__(self, action_space, observation_space, seen):
        self.action_space, self.observation_space, self.seen = action_space, observation_space, seen
        self.t = 0

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        if seed is not None:
            self.observation_space.seed(seed)
        self.t = 0
        return self.observation_space.sample(), {}

    def step(self, action):
        if not self.action_space.contains(action):
            raise ValueError(f"{action!r} is not in {self.action_space}")
        self.seen.append(action)
        self.t += 1
        return self.observation_space.sample(), 1.0, self.t == 4, False, {}


def trainer_of(cls, env, *, num_envs=8, gamma=0.9, task=None, **settings):
    task = RLTask(env, num_envs=num_envs, gamma=gamma, **(task or {}))
    return cls(task, **{"joint_model": SMALL, **settings})


def fast(cls, **settings):
    """Settings with which the probes are learned within a second or two."""
    n_steps = {PPOJoint: 32, A2CJoint: 4, AWRJoint: 64}[cls]
    return {
        "n_interactions_per_epoch": 256,
        "batch_size": 64,
        "train_steps_per_epoch": n_steps,
        "lr_schedule": 1e-2,
        "value_loss_coeff": 0.5,
        **settings,
    }


def outputs(trainer, observation):
    x = np.asarray(observation, np.float32)
    inputs, value = trainer._model.apply(trainer.state.params, trainer.state.model_state, x)
    return np.asarray(inputs), np.asarray(value)


def values(trainer, observation):
    return outputs(trainer, observation)[1]


def probabilities(trainer, observation):
    return np.asarray(jax.nn.softmax(outputs(trainer, observation)[0]))


def last_record(trainer, n_epochs=1):
    records = []
    trainer.on_epoch = records.append
    trainer.run(n_epochs)
    return records[-1]


def leaves(tree):
    return [np.asarray(x) for x in jax.tree.leaves(tree)]


def all_finite(trainer):
    return all(np.isfinite(x).all() for x in leaves(trainer.state.params))


SLOW = pytest.mark.slow
BOTH = [PPOJoint, pytest.param(A2CJoint, marks=SLOW)]
ALL = [*BOTH, pytest.param(AWRJoint, marks=SLOW)]


@pytest.mark.parametrize("cls", [pytest.param(PPOJoint, marks=SLOW), A2CJoint])
def test_delayed_reward(cls):
    trainer = trainer_of(cls, probe.DelayedReward, **fast(cls), gamma=0.5)
    trainer.run({PPOJoint: 12, A2CJoint: 80}[cls])
    np.testing.assert_allclose(values(trainer, [[0], [1]]), [0.5, 1], atol=0.05)


@pytest.mark.parametrize("cls", BOTH)
def test_action_and_observation_reward(cls):
    trainer = trainer_of(cls, probe.ActionAndObservationReward, **fast(cls))
    trainer.run({PPOJoint: 12, A2CJoint: 80}[cls])
    chances = probabilities(trainer, [[-1], [1]])
    assert chances[0, 0] > 0.9 and chances[1, 1] > 0.9


@SLOW
@pytest.mark.parametrize("cls", [PPOJoint, A2CJoint])
class TestProbes:
    def epochs(self, cls):
        return {PPOJoint: 12, A2CJoint: 80}[cls]

    def test_constant_reward(self, cls):
        trainer = trainer_of(cls, probe.ConstantReward, **fast(cls))
        trainer.run(self.epochs(cls))
        np.testing.assert_allclose(values(trainer, [[0]]), [1], atol=0.05)

    def test_observation_reward(self, cls):
        trainer = trainer_of(cls, probe.ObservationReward, **fast(cls))
        trainer.run(self.epochs(cls))
        np.testing.assert_allclose(values(trainer, [[-1], [1]]), [-1, 1], atol=0.1)

    def test_action_reward(self, cls):
        trainer = trainer_of(cls, probe.ActionReward, **fast(cls))
        trainer.run(self.epochs(cls))
        assert probabilities(trainer, [[0]])[0, 1] > 0.9

    @pytest.mark.parametrize("learn_std", ["shared", "separate"])
    def test_box_with_learned_std(self, cls, learn_std):
        env = functools.partial(probe.ActionAndObservationReward, continuous=True)
        task = {"action_distribution": functools.partial(create_distribution, std=0.5, learn_std=learn_std)}
        trainer = trainer_of(cls, env, task=task, **fast(cls, entropy_coeff=0.0, lr_schedule=3e-3))
        before = trainer.task.distribution.entropy(outputs(trainer, [[-1], [1]])[0])
        trainer.run({PPOJoint: 30, A2CJoint: 120}[cls])
        inputs = outputs(trainer, [[-1], [1]])[0]
        np.testing.assert_allclose(trainer.task.distribution.mode(inputs), [[-0.5], [0.5]], atol=0.15)
        assert np.all(np.asarray(trainer.task.distribution.entropy(inputs)) < np.asarray(before) - 0.3)


@SLOW
@pytest.mark.parametrize("cls, n_epochs", [(PPOJoint, 5), (A2CJoint, 8), (AWRJoint, 2)])
def test_default_arguments_learn_a_one_step_environment(cls, n_epochs):
    trainer = cls(RLTask(probe.ActionReward, num_envs=8))
    trainer.run(n_epochs)
    assert probabilities(trainer, [[0]])[0, 1] > 0.9


@pytest.mark.parametrize("cls", BOTH)
def test_a_time_limit_is_not_learned_as_death(cls):
    settings = fast(cls, lr_schedule=2e-2, train_steps_per_epoch=40, batch_size=None)
    trainer = trainer_of(cls, ScaledEndless, task={"time_limit": 50}, **settings)
    trainer.run(40)
    trainer._trainer._schedule = optimizers.resolve_schedule(2e-3)
    trainer.run(20)
    np.testing.assert_allclose(values(trainer, np.linspace(0, 1, 51)[:, None]), 10, rtol=0.02)


class TestFirstUpdate:
    """Before any parameter changes the policy is the one that acted."""

    def ratios(self, trainer):
        data, *_ = trainer._collect()
        state, steps, dist = trainer.state, data.steps, trainer.task.distribution
        now = trainer.policy_apply(state.params, state.model_state, steps.observation)
        ratio = losses.probability_ratio(
            dist.log_prob(now, steps.action), dist.log_prob(steps.dist_inputs, steps.action)
        )
        return np.asarray(ratio)[np.asarray(steps.mask) > 0]

    def check(self, trainer):
        record = last_record(trainer)
        assert abs(record["probs_ratio_mean"] - 1) < 1e-5
        assert record["clip_fraction"] == 0
        assert abs(record["approximate_kl_divergence"]) < 1e-6

    @pytest.mark.parametrize("model", [pytest.param(SMALL, marks=SLOW), NORMALIZED])
    def test_ratio_is_one(self, model):
        settings = fast(PPOJoint, train_steps_per_epoch=1, joint_model=model)
        trainer = trainer_of(PPOJoint, "CartPole-v1", **settings)
        for _ in range(3):
            self.check(trainer)
        if model is NORMALIZED:
            assert float(trainer.state.model_state["model_state"]["shared"]["normalize"]["count"]) > 500
        assert np.max(np.abs(self.ratios(trainer) - 1)) < 1e-5

    def test_actions_are_stored_as_sampled_and_clipped_for_the_environment(self):
        box, seen = spaces.Box(-1.0, 1.0, (2,), np.float32), []
        env = functools.partial(Recording, box, spaces.Box(-1.0, 1.0, (3,), np.float32), seen)
        task = {"action_distribution": functools.partial(create_distribution, std=2.0)}
        trainer = trainer_of(PPOJoint, env, task=task, **fast(PPOJoint, train_steps_per_epoch=1))
        self.check(trainer)
        assert np.max(np.abs(self.ratios(trainer) - 1)) < 1e-5
        steps = trainer.task.replayed().steps
        stored = np.asarray(steps.action)[np.asarray(steps.mask) > 0]
        assert np.mean(np.abs(stored) > 1) > 0.5
        assert np.max(np.abs(seen)) == 1
        assert np.asarray(seen[0]).dtype == np.float32

    @SLOW
    def test_later_updates_move_the_ratio(self):
        trainer = trainer_of(PPOJoint, "CartPole-v1", **fast(PPOJoint))
        record = last_record(trainer)
        assert record["approximate_kl_divergence"] > 1e-5
        assert 0 < record["clip_fraction"] < 1


@SLOW
def test_a_leftover_minibatch_of_one_row_keeps_parameters_finite():
    settings = {"n_interactions_per_epoch": 65, "batch_size": 64}
    trainer = trainer_of(PPOJoint, "CartPole-v1", num_envs=1, **settings)
    assert trainer._trainer.n_steps == 20
    trainer.run(2)
    assert all_finite(trainer)


@pytest.mark.parametrize("cls", BOTH)
def test_equal_advantages_give_no_policy_gradient(cls):
    settings = fast(cls, entropy_coeff=0.0, n_interactions_per_epoch=65, optimizer=optimizers.SGD)
    trainer = trainer_of(cls, probe.ConstantReward, num_envs=1, **settings)
    before = leaves(trainer.state.params["policy"])
    assert last_record(trainer)["advantage_norm"] < 1e-4
    assert all_finite(trainer)
    for x, y in zip(before, leaves(trainer.state.params["policy"]), strict=True):
        np.testing.assert_allclose(x, y, atol=1e-6)


@pytest.mark.parametrize("cls", [PPOJoint, A2CJoint])
def test_the_entropy_bonus_raises_entropy(cls):
    coeff = 0.01
    trainer = trainer_of(
        cls,
        Unpaid,
        joint_model=Constant,
        entropy_coeff=coeff,
        value_loss_coeff=0.0,
        n_interactions_per_epoch=64,
        train_steps_per_epoch=1,
        optimizer=optimizers.SGD,
        lr_schedule=1.0,
    )
    record = last_record(trainer)
    assert abs(record["entropy"] - 0.3653) < 1e-3
    assert abs(record["entropy_loss"] - coeff * 0.3653) < 1e-5
    # d entropy / d logits = -p (log p + entropy), so plain gradient descent moves the logits by this.
    p = np.exp([2.0, 0.0]) / np.exp([2.0, 0.0]).sum()
    step = -p * (np.log(p) + 0.36533)
    np.testing.assert_allclose(trainer.state.params["policy"], np.array([2.0, 0.0]) + coeff * step, atol=1e-6)
    after = float(trainer.task.distribution.entropy(trainer.state.params["policy"][None])[0])
    assert after - 0.36533 > 1e-6


@SLOW
def test_the_entropy_bonus_raises_the_entropy_of_a_squashed_gaussian():
    task = {
        "action_distribution": functools.partial(
            create_distribution, std=0.2, learn_std="separate", bounds="squash"
        )
    }
    env = functools.partial(Unpaid, continuous=True)
    settings = fast(PPOJoint, entropy_coeff=0.1, value_loss_coeff=0.0, joint_model=SMALL)
    trainer = trainer_of(PPOJoint, env, task=task, **settings)
    dist = trainer.task.distribution
    before = float(dist.entropy(outputs(trainer, [[0]])[0])[0])
    trainer.run(2)
    assert float(dist.entropy(outputs(trainer, [[0]])[0])[0]) > before + 0.1


LINE = spaces.Box(-1.0, 1.0, (3,), np.float32)
MIXED = {"hand": spaces.Discrete(2), "arm": spaces.Box(-1.0, 1.0, (2,), np.float32)}
NESTED = spaces.Dict(
    {
        "shifted": spaces.Discrete(3, start=-1),
        "rows": spaces.MultiDiscrete([2, 3, 4]),
        "bits": spaces.MultiBinary(3),
        "pair": spaces.Tuple(list(MIXED.values())),
    }
)
SPACES = {
    "start": (spaces.Discrete(3, start=-1), spaces.Discrete(5, start=-2)),
    "nested": (
        NESTED,
        spaces.Dict({"line": LINE, "pair": spaces.Tuple([spaces.Discrete(4), spaces.MultiBinary(2)])}),
    ),
    "multi_discrete": (spaces.MultiDiscrete([2, 3, 4]), LINE),
    "multi_binary": (spaces.MultiBinary(3), LINE),
    "dict": (spaces.Dict(MIXED), spaces.Dict(MIXED)),
    "tuple": (spaces.Tuple(list(MIXED.values())), spaces.MultiDiscrete([2, 3], start=[1, -1])),
}


@pytest.mark.parametrize(
    "name", [name if name == "nested" else pytest.param(name, marks=SLOW) for name in SPACES]
)
def test_spaces(name):
    """The environment itself refuses what is not in its space."""
    action_space, observation_space = SPACES[name]
    seen = []
    env = functools.partial(Recording, action_space, observation_space, seen)
    settings = fast(PPOJoint, n_interactions_per_epoch=64, train_steps_per_epoch=2)
    trainer = trainer_of(PPOJoint, env, num_envs=2, **settings)
    before = leaves(trainer.state.params)
    record = last_record(trainer)
    # 32 rows per environment: episodes of 4 decisions and a reset row, so 6 rows are resets.
    assert len(seen) == record["env_steps"] == 64 - 2 * 6
    assert record["avg_return"] == 4 and np.isfinite(record["joint_loss"])
    assert any(np.any(x != y) for x, y in zip(before, leaves(trainer.state.params), strict=True))
    trainer.evaluate(2)
    observation = observation_space.sample()
    for temperature in (0.0, 1.0):
        action, dist_inputs = trainer.policy(observation, temperature)
        assert dist_inputs.shape == (trainer.task.distribution.n_inputs,)
        action = trainer.task.distribution.to_env(jax.tree.map(lambda x: x[None], action))
        assert jax.tree.structure(action) == jax.tree.structure(action_space.sample())
    if name == "nested":
        assert {int(action["shifted"]) for action in seen} == {-1, 0, 1}
    if name == "start":
        assert {int(a) for a in seen} == {-1, 0, 1}


@pytest.mark.parametrize("cls", ALL)
def test_ignored_actions_have_no_gradient(cls):
    trainer = trainer_of(cls, Ignoring, **fast(cls, optimizer=optimizers.SGD, train_steps_per_epoch=4))
    data, *_ = trainer._collect()
    steps = data.steps
    ignored = np.asarray(steps.mask * steps.env_info.control_mask) == 0
    assert ignored.sum() > steps.mask.size / 3
    other = np.where(ignored, 1 - np.asarray(steps.action), steps.action)
    controlled = np.where(ignored, steps.action, 1 - np.asarray(steps.action))
    learn, hparams = jax.jit(trainer.learn), trainer.hparams()
    params = [
        leaves(learn(trainer.state, data._replace(steps=steps._replace(action=a)), hparams)[0].params)
        for a in (steps.action, other, controlled)
    ]
    for x, y in zip(params[0], params[1], strict=True):
        np.testing.assert_array_equal(x, y)
    assert any(np.any(x != y) for x, y in zip(params[0], params[2], strict=True))


@pytest.mark.parametrize("cls", ALL)
def test_padding_rows_change_no_metric_and_no_gradient(cls):
    trainer = trainer_of(cls, "CartPole-v1", num_envs=1, joint_model=NORMALIZED)
    rng = np.random.default_rng(0)

    def batch(n, scale, mask):
        normal = functools.partial(rng.normal, 0, scale)
        return Batch(
            observation=normal(size=(n, 1, 4)).astype(np.float32),
            action=rng.integers(0, 2, (n, 1)).astype(np.int32),
            dist_inputs=normal(size=(n, 1, 2)).astype(np.float32),
            advantage=normal(size=(n, 1)).astype(np.float32),
            value_target=normal(size=(n, 1)).astype(np.float32),
            mask=np.full((n, 1), mask, np.float32),
        )

    real, junk = batch(13, 1, 1), batch(7, 100, 0)
    padded = jax.tree.map(lambda *xs: np.concatenate(xs), real, junk)
    state, hparams = trainer.state, trainer.hparams()

    @jax.jit
    def judge(batch):
        return jax.value_and_grad(trainer._loss, has_aux=True)(
            state.params, state.model_state, batch, hparams
        )

    (loss, metrics), grads = judge(real)
    (padded_loss, padded_metrics), padded_grads = judge(padded)
    np.testing.assert_allclose(loss, padded_loss, rtol=1e-6)
    assert metrics.keys() >= COMMON_METRICS - {"grad_norm"}
    for name, value in metrics.items():
        np.testing.assert_allclose(value, padded_metrics[name], rtol=1e-5, atol=1e-6, err_msg=name)
    for x, y in zip(leaves(grads), leaves(padded_grads), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    "cls, names",
    [
        (PPOJoint, PPO_METRICS),
        pytest.param(A2CJoint, A2C_METRICS, marks=SLOW),
        pytest.param(AWRJoint, AWR_METRICS, marks=SLOW),
    ],
)
def test_metrics(cls, names):
    env = functools.partial(probe.Counting, 10)
    trainer = trainer_of(cls, env, joint_model=NORMALIZED, **fast(cls))
    record = last_record(trainer, 2)
    assert record.keys() >= COMMON_METRICS | names
    assert all(np.isfinite(record[name]) for name in COMMON_METRICS | names)
    assert record["log_probs_mean"] <= 0
    assert record["explained_variance"] <= 1
    assert 0 <= record["preferred_move"] <= 1
    if "entropy" in record:
        assert 0 < record["entropy"] <= np.log(2) + 1e-6
        np.testing.assert_allclose(record["entropy_loss"], 0.01 * record["entropy"], rtol=1e-5)
    if "approximate_kl_divergence" in record:
        assert record["approximate_kl_divergence"] >= -1e-7


@SLOW
def test_explained_variance_of_a_critic_that_has_learned():
    trainer = trainer_of(PPOJoint, probe.ObservationReward, **fast(PPOJoint))
    assert last_record(trainer, 12)["explained_variance"] > 0.95


def test_awr_weights_do_not_saturate():
    """Returns here reach 55: exp(55) stands at any w_max."""
    env = functools.partial(probe.Counting, 10)
    record = last_record(trainer_of(AWRJoint, env, gamma=1.0, **fast(AWRJoint, w_max=5.0)))
    assert record["awr_weight_std"] > 0.1
    assert record["awr_weight_clipped"] < 0.5
    assert record["awr_weight_min"] <= record["awr_weight_mean"] <= record["awr_weight_max"] <= 5


@SLOW
def test_awr_weights_saturate_without_normalisation():
    env = functools.partial(probe.Counting, 10)
    raw = fast(AWRJoint, normalize_advantages=False, train_steps_per_epoch=1)
    record = last_record(trainer_of(AWRJoint, env, gamma=1.0, **raw))
    assert record["awr_weight_clipped"] > 0.5 and record["awr_weight_max"] == 20


@SLOW
def test_awr_with_thresholds():
    thresholds = ((50.0, 1.0, 0.0), (90.0, 4.0, 0.0))
    trainer = trainer_of(AWRJoint, probe.ActionReward, **fast(AWRJoint, thresholds=thresholds))
    record = last_record(trainer, 6)
    assert record["awr_weight_min"] == 0 and record["awr_weight_max"] <= 5
    assert probabilities(trainer, [[0]])[0, 1] > 0.9


def test_awr_trains_on_the_newest_epochs_only():
    env = functools.partial(probe.Counting, 4)
    settings = fast(AWRJoint, n_replay_epochs=2, n_interactions_per_epoch=40, train_steps_per_epoch=2)
    trainer = trainer_of(AWRJoint, env, **settings)
    for n_epochs in (1, 2, 2, 2):
        data, *_ = trainer._collect()
        assert np.asarray(data.steps.mask).sum() == n_epochs * 32
        trainer._epoch += 1


@pytest.mark.parametrize("cls", [PPOJoint, A2CJoint])
def test_on_policy_trainers_refuse_old_data(cls):
    with pytest.raises(ValueError, match="n_replay_epochs=2.*on-policy"):
        trainer_of(cls, probe.ActionReward, n_replay_epochs=2)


def test_a2c_warns_of_several_passes(caplog):
    with caplog.at_level(logging.WARNING):
        trainer_of(A2CJoint, probe.ActionReward, n_interactions_per_epoch=256, train_steps_per_epoch=4)
    assert not caplog.records
    with caplog.at_level(logging.WARNING):
        trainer_of(A2CJoint, probe.ActionReward, n_interactions_per_epoch=256, train_steps_per_epoch=5)
    assert "train_steps_per_epoch=5" in caplog.text and "4 steps make one pass" in caplog.text


def test_default_numbers_of_steps():
    env = probe.ActionReward
    steps = lambda cls, **kw: trainer_of(cls, env, **kw)._trainer.n_steps  # noqa: E731
    assert steps(PPOJoint) == 10 * 2048 // 64
    assert steps(A2CJoint) == 2048 // 64
    assert steps(PPOJoint, n_interactions_per_epoch=136, max_slice_length=2) == 10 * 2
    assert steps(PPOJoint, batch_size=None) == 10
    assert steps(PPOJoint, n_trajectories_per_epoch=4) == 500


class Images(Recording):
    def __init__(self):
        super().__init__(spaces.Discrete(2), spaces.Box(0, 255, (84, 84, 4), np.uint8), [])


@SLOW
def test_images_get_a_convolutional_network():
    trainer = PPOJoint(
        RLTask(Images, num_envs=2),
        n_interactions_per_epoch=16,
        train_steps_per_epoch=1,
        batch_size=None,
    )
    assert trainer.state.params["shared"]["conv_0"]["kernel"].shape == (8, 8, 4, 32)
    assert np.isfinite(last_record(trainer)["joint_loss"])
    assert trainer.task.replayed().steps.observation.dtype == np.uint8


class Own(nn.Module):
    """A network whose layers have names of their own."""

    n_outputs: int

    @nn.compact
    def __call__(self, x):
        x = nn.tanh(nn.Dense(8)(x))
        return nn.Dense(self.n_outputs)(x), nn.Dense(1)(x)[:, 0]


def test_every_layer_of_a_users_own_network_is_trained():
    def own(policy_distribution):
        return Own(policy_distribution.n_inputs)

    trainer = trainer_of(PPOJoint, "CartPole-v1", **fast(PPOJoint, joint_model=own))
    before = trainer.state.params
    before = jax.tree.map(np.asarray, before)
    trainer.run(1)
    changed = jax.tree.map(lambda x, y: bool(np.any(x != y)), before, trainer.state.params)
    assert all(jax.tree.leaves(changed)), changed


@SLOW
def test_a_users_pair_of_functions_is_trained():
    def pair(policy_distribution):
        def init(key, x):
            return [jnp.zeros((x.shape[-1], policy_distribution.n_inputs + 1))]

        def apply(params, x):
            y = x @ params[0]
            return y[:, :-1], y[:, -1]

        return init, apply

    trainer = trainer_of(PPOJoint, "CartPole-v1", **fast(PPOJoint, joint_model=pair))
    trainer.run(1)
    assert np.any(np.asarray(jax.tree.leaves(trainer.state.params)[0]) != 0)
