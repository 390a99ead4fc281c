"""Q-learning, and the loop that all trainers with a replay on the device share."""

import functools
import re

import gymnasium
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rl_trainers import DQN, RLTask, advantages, losses, models, off_policy, optimizers, ring
from rl_trainers.envs import probe
from rl_trainers.types import EnvInfo, Rollout, TimeStep

BODY = functools.partial(models.MLP, layer_widths=(16,), activation=jnp.tanh)


def small(env, num_envs=1, gamma=0.9, seed=0, **kwargs):
    settings = {
        "value_body": BODY,
        "value_batch_size": 16,
        "value_lr_schedule": 1e-2,
        "n_interactions_per_epoch": 32 * num_envs,
        "initial_collect_steps": 16,
        "sync_freq": 10,
        "exploration_rate": 0.3,
        "scale_value_targets": False,
    }
    return DQN(RLTask(env, num_envs=num_envs, gamma=gamma, seed=seed), **{**settings, **kwargs})


def q(trainer, observation):
    state = trainer.state
    return np.asarray(trainer.q_values(state.params, state.model_state, jnp.asarray(observation)))


def leaves(tree):
    return [np.array(x) for x in jax.tree.leaves(tree)]


def assert_equal(one, other):
    for x, y in zip(leaves(one), leaves(other), strict=True):
        np.testing.assert_array_equal(x, y)


# Targets.


def facts(reward, terminated=0, truncated=0, mask=None):
    """A rollout ``[T, 1]`` whose observation is the row's number."""
    reward = np.asarray(reward, np.float32)[:, None]
    flags = [
        np.broadcast_to(np.reshape(x, (-1, 1)), reward.shape).astype(bool) for x in (terminated, truncated)
    ]
    mask = np.ones_like(reward) if mask is None else np.asarray(mask, np.float32)[:, None]
    number = np.arange(len(reward) + 1, dtype=np.float32)[:, None, None]
    action = np.zeros(reward.shape, np.int32)
    ones = EnvInfo(np.ones_like(reward), np.ones_like(reward))
    return Rollout(TimeStep(number[:-1], action, reward, *flags, mask, env_info=ones), number[-1])


def with_values(trainer, table, target_table=None):
    """Makes Q(s, .) a table over the observation's number: online, and of the target network."""
    tables = {"online": table, "target": table if target_table is None else target_table}

    def q_values(params, model_state, observation):
        chosen = tables["target"] if params is trainer.state.target_params else tables["online"]
        return jnp.asarray(chosen, jnp.float32)[observation[..., 0].astype(int)]

    trainer.q_values = q_values
    return trainer


@pytest.mark.parametrize(
    ("terminated", "truncated", "target"), [(0, 0, 1 + 0.9 * 7), (1, 0, 1.0), (0, 1, 1 + 0.9 * 7)]
)
def test_target_of_one_step(terminated, truncated, target):
    trainer = with_values(small(probe.ConstantReward), [[0, 0], [5, 7]])
    batch = trainer.make_batch(trainer.state, facts([1.0], terminated, truncated), {})
    np.testing.assert_allclose(batch.value_target, [[target]], atol=1e-6)
    assert batch.observation.shape == (1, 1, 1) and batch.action.shape == (1, 1)


@pytest.mark.parametrize(("double", "value"), [(False, 9.0), (True, 4.0)])
def test_double_q_learning_values_the_online_choice(double, value):
    trainer = small(probe.ConstantReward, double_dqn=double)
    trainer = with_values(trainer, [[0, 0], [5, 7]], [[0, 0], [9, 4]])
    batch = trainer.make_batch(trainer.state, facts([1.0]), {})
    np.testing.assert_allclose(batch.value_target, [[1 + 0.9 * value]], atol=1e-6)


@pytest.mark.parametrize(("start", "reward_sum", "factor"), [(0, 1.75, 0.125), (1, 1.5, 0.25), (2, 1.0, 0.5)])
@pytest.mark.parametrize("estimator", [advantages.td_k, advantages.monte_carlo])
@pytest.mark.parametrize("terminated", [False, True])
def test_n_steps_stop_at_the_end_of_an_episode(start, reward_sum, factor, estimator, terminated):
    # Three rewards of 1, then a reset row, then another episode with rewards of 100.
    reward, mask = [1, 1, 1, 0, 100, 100], [1, 1, 1, 0, 1, 1]
    end = np.array([0, 0, 1, 0, 0, 0])
    data = facts(reward, end * terminated, end * (not terminated), mask)
    steps = jax.tree.map(lambda x: x[start : start + 3], data.steps)
    following = data.steps.observation[start + 3]
    trainer = small(probe.ConstantReward, gamma=0.5, n_step=3, advantage_estimator=estimator)
    trainer = with_values(trainer, [[8.0, 0.0]] * 4 + [[1000.0, 0.0]] * 4)
    batch = trainer.make_batch(trainer.state, Rollout(steps, following), {})
    expected = reward_sum + (0 if terminated else factor * 8.0)
    np.testing.assert_allclose(batch.value_target, [[expected]], atol=1e-6)


def test_max_slice_length_is_one_more_than_the_steps():
    assert small(probe.ConstantReward, max_slice_length=2).n_step == 1
    assert small(probe.ConstantReward, max_slice_length=4).n_step == 3
    assert small(probe.ConstantReward, max_slice_length=1).n_step == 1


def test_huber_loss_by_hand():
    value, target = jnp.array([[0.5], [3.0], [9.0]]), jnp.zeros((3, 1))
    mask = jnp.array([[1.0], [1.0], [0.0]])
    assert float(losses.huber_loss(value, target, mask)) == pytest.approx((0.125 + 2.5) / 2)


def test_rows_without_a_decision_train_nothing():
    trainer = small("CartPole-v1")
    data = facts_of(trainer)
    batch = trainer.make_batch(trainer.state, data, {})
    hidden = batch._replace(mask=batch.mask.at[::2].set(0.0))
    changed = hidden._replace(
        observation=hidden.observation.at[::2].add(7.0), value_target=hidden.value_target.at[::2].add(1e6)
    )
    grads = [
        jax.grad(lambda p, b=b: trainer._value_loss(p, trainer.state.model_state, b, {})[0])(
            trainer.state.params
        )
        for b in (hidden, changed)
    ]
    assert_equal(*grads)


def facts_of(trainer):
    trainer.run(2)
    return ring.sample(jax.random.bits(jax.random.PRNGKey(0), (16,)), trainer._ring, trainer.n_step)


# Learning.


def test_values_of_terminal_and_discounted_steps():
    trainer = small(probe.DelayedReward)
    trainer.run(60)
    np.testing.assert_allclose(q(trainer, [[0.0], [1.0]]), [[0.9, 0.9], [1.0, 1.0]], atol=0.05)


@pytest.mark.parametrize("double", [False, True])
def test_the_best_action_is_found(double):
    trainer = small(probe.ActionAndObservationReward, double_dqn=double, num_envs=2)
    trainer.run(25)
    np.testing.assert_array_equal(trainer.evaluate(20).returns, np.ones(20))
    np.testing.assert_allclose(q(trainer, [[1.0], [-1.0]]), [[-1, 1], [1, -1]], atol=0.1)


def test_a_time_limit_is_not_death():
    class Limited(probe.Endless):
        """Observation 0 always."""

        def look(self):
            return np.zeros(1, np.float32)

    task = RLTask(Limited, gamma=0.5, time_limit=5)
    trainer = DQN(task, value_body=BODY, value_lr_schedule=1e-2, sync_freq=5, n_interactions_per_epoch=200)
    trainer.run(6)
    np.testing.assert_allclose(q(trainer, [[0.0]]), [[2.0, 2.0]], atol=0.05)


def test_scaled_targets_give_the_same_values():
    trainer = small(probe.DelayedReward, scale_value_targets=True)
    trainer.run(60)
    np.testing.assert_allclose(q(trainer, [[0.0], [1.0]]), [[0.9, 0.9], [1.0, 1.0]], atol=0.05)


@pytest.mark.parametrize("env", ["FrozenLake-v1", "Shifted"])
def test_discrete_observations_and_shifted_actions(env):
    class Shifted(gymnasium.Env):
        """Pays the action -1 best; any other than -1, 0 and 1 is an error."""

        observation_space = gymnasium.spaces.Discrete(3, start=5)
        action_space = gymnasium.spaces.Discrete(3, start=-1)
        seen: set = set()  # noqa: RUF012

        def reset(self, *, seed=None, options=None):
            super().reset(seed=seed)
            return 6, {}

        def step(self, action):
            self.seen.add(int(action))
            return 7, -float(action), True, False, {}

    trainer = small(env if env != "Shifted" else Shifted)
    trainer.run(20)
    if env == "Shifted":
        assert Shifted.seen == {-1, 0, 1}
        assert trainer.policy(6, 0.0)[0] == -1


# The loop.


def test_target_parameters_are_the_online_ones_of_every_kth_step():
    trainer = small("CartPole-v1", n_interactions_per_epoch=1, sync_freq=3, initial_collect_steps=1)
    online = {0: leaves(trainer.state.params)}
    assert_equal(trainer.state.target_params, online[0])
    for _ in range(14):
        trainer.run(1)
        done = trainer._n_updates
        online[done] = leaves(trainer.state.params)
        assert_equal(trainer.state.target_params, online[done // 3 * 3])
    assert trainer._n_updates == 13


@pytest.mark.parametrize(("n_evals", "n_eval_steps"), [(1, None), (4, 2)])
def test_evaluations_of_metrics_change_no_weight(n_evals, n_eval_steps):
    def ran(**kwargs):
        trainer = small("CartPole-v1", **kwargs)
        trainer.run(3)
        return trainer.state.params

    assert_equal(ran(), ran(value_evals_per_epoch=n_evals, value_eval_steps=n_eval_steps))


@pytest.mark.parametrize(("steps", "expected"), [(8, 8), (32, 32), (80, 80), (None, 32)])
def test_optimizer_steps_are_spread_over_the_epoch(steps, expected):
    trainer = small("CartPole-v1", value_train_steps_per_epoch=steps)
    taken = [trainer.updates_after(row) - trainer.updates_after(row - 1) for row in range(32)]
    assert sum(taken) == expected and max(taken) - min(taken) <= 1
    trainer.run(2)
    before = trainer._n_updates
    trainer.run(1)
    assert trainer._n_updates - before == expected == int(trainer.state.step) - before


def test_learning_begins_after_the_initial_steps():
    trainer = small("CartPole-v1", initial_collect_steps=40)
    first = leaves(trainer.state.params)
    record = trainer._run_epoch()
    assert trainer._n_updates == 0 and np.isnan(record["value_loss"])
    assert_equal(trainer.state.params, first)
    trainer.run(1)
    # 40 of 64 decisions are taken before; reset rows shift the place by a few.
    assert 20 <= trainer._n_updates <= 24


def test_initial_trajectories_are_in_the_replay():
    task = RLTask("CartPole-v1", initial_trajectories=5)
    trainer = DQN(task, value_body=BODY, n_interactions_per_epoch=10)
    assert task.n_initial_interactions > 30
    assert float(trainer._ring.facts[..., 3].sum()) == task.n_initial_interactions
    assert int(trainer._ring.size) == task.replay.size + 1
    assert trainer.n_random_left() == max(0, 100 - task.n_initial_interactions)


def test_exploration_by_epochs_and_by_steps():
    decay = functools.partial(
        optimizers.multifactor,
        factors="constant * decay_every",
        constant=1.0,
        decay_factor=0.995,
        steps_per_decay=1,
        minimum=0.1,
    )
    by_epoch = small("CartPole-v1", exploration_rate=decay, initial_collect_steps=1)
    np.testing.assert_allclose(by_epoch.exploration_rates()[1:], 0.995, atol=1e-6)
    by_epoch._epoch = 5000
    np.testing.assert_allclose(by_epoch.exploration_rates()[1:], 0.1, atol=1e-6)
    by_step = small(
        "CartPole-v1",
        num_envs=4,
        exploration_rate=lambda step: 1 / step,
        exploration_interval="step",
        initial_collect_steps=1,
        n_interactions_per_epoch=12,
    )
    np.testing.assert_allclose(by_step.exploration_rates(), [1, 1 / 5, 1 / 9], atol=1e-6)


def test_share_of_random_actions():
    trainer = small(
        "CartPole-v1",
        num_envs=8,
        exploration_rate=0.25,
        n_interactions_per_epoch=8 * 500,
        initial_collect_steps=0,
    )
    draws, _ = trainer._draw(jax.random.PRNGKey(0), trainer.exploration_rates())
    assert float(draws.at_random[1:].mean()) == pytest.approx(0.25, abs=0.03)
    assert float(draws.action.mean()) == pytest.approx(0.5, abs=0.03)


def test_trajectories_per_epoch():
    trainer = small(
        "CartPole-v1",
        n_interactions_per_epoch=None,
        n_trajectories_per_epoch=5,
        value_train_steps_per_epoch=2,
    )
    trainer.run(2)
    assert trainer._n_updates == 4 and trainer.task.n_trajectories() == 10
    assert float(trainer._ring.facts[..., 3].sum()) == trainer.task.n_interactions()


def test_epochs_of_trajectories_learn_after_the_initial_steps():
    trainer = small(
        probe.ConstantReward,
        n_interactions_per_epoch=None,
        n_trajectories_per_epoch=10,
        value_train_steps_per_epoch=7,
        initial_collect_steps=15,
    )
    trainer.run(1)
    assert trainer.n_random_left() == 5 and trainer._n_updates == 0
    trainer.run(1)
    assert trainer.n_random_left() == 0 and trainer._n_updates == 7


def test_only_eval_trains_on_what_is_stored():
    task = RLTask("CartPole-v1", initial_trajectories=5)
    trainer = DQN(task, value_body=BODY, only_eval=True, value_train_steps_per_epoch=7)
    trainer.run(2)
    assert trainer._n_updates == 14 and task.n_interactions() == 0


@pytest.mark.parametrize("cls", [DQN])
def test_offline_takes_no_step(cls):
    task = RLTask("CartPole-v1", initial_trajectories=5)
    trainer = cls(task, value_body=BODY, offline=True, value_train_steps_per_epoch=7)
    trainer.run(2)
    assert trainer._n_updates == 14 and task.n_interactions() == 0
    assert np.isnan(trainer.avg_returns).all()


def test_nothing_compiles_after_learning_has_begun():
    trainer = small("CartPole-v1", n_eval_episodes=1)
    trainer.run(2)
    compiled = [trainer._run_epoch()["compilations"] for _ in range(3)]
    assert compiled == [compiled[0]] * 3


def test_the_replay_is_written_in_place():
    """A step that copied the replay would cost as much as the replay is long."""
    trainer = small("CartPole-v1", replay_capacity=54_321)
    trainer.run(1)
    learner = off_policy._Learner(trainer)
    learner.act(trainer.task.actor.observation, (), np.zeros(1, bool), trainer.task.actor.key)
    learner.step(np.zeros(1, np.int64))
    event = off_policy.Event(
        learner._facts(),
        learner._action,
        learner._outcome[0],
        trainer.task.actor.key,
        np.int32(0),
        np.int32(0),
    )
    arguments = (1, trainer.state, trainer._ring, learner._totals, event, learner._draws, learner._hparams)
    program = trainer._advance.lower(*arguments).compile().as_text()
    assert "54322" in program
    assert re.findall(r"\[54322[^=]*copy\(", program) == []


@pytest.mark.parametrize("num_envs", [1, 3])
def test_resumed_equals_uninterrupted(tmp_path, num_envs):
    def made(directory):
        return small(
            "CartPole-v1", num_envs=num_envs, output_dir=str(directory), n_step=2, value_optimizer=None
        )

    straight = made(tmp_path / "a")
    straight.run(6)
    made(tmp_path / "b").run(3)
    resumed = made(tmp_path / "b")
    assert resumed.current_epoch == 3
    resumed.run(3)
    for name in ("params", "target_params", "opt_state", "key", "step"):
        assert_equal(getattr(straight.state, name), getattr(resumed.state, name))
    assert straight._n_updates == resumed._n_updates
    np.testing.assert_array_equal(straight.avg_returns, resumed.avg_returns)


def test_an_exception_of_the_environment_loses_nothing():
    class Failing(probe.ActionReward):
        """Raises when it is told to."""

        fail = False

        def step(self, action):
            if Failing.fail and self.np_random.random() < 0.1:
                raise RuntimeError("boom")
            return super().step(action)

    trainer = small(Failing)
    trainer.run(2)
    Failing.fail = True
    with pytest.raises(RuntimeError, match="boom"):
        trainer.run(1)
    assert trainer.current_epoch == 2
    assert all(np.isfinite(x).all() for x in leaves(trainer.state))
    assert trainer.policy(np.zeros(1, np.float32), 0.0)[0] in (0, 1)


def test_steps_that_others_take_in_between_make_no_transition():
    trainer = small(functools.partial(probe.Counting, 5))
    trainer.run(2)
    trainer.task.collect_trajectories(lambda _: (np.int32(1), np.zeros(2, np.float32)), n_interactions=3)
    trainer.run(1)
    observation, _, facts, _ = ring.to_rows(trainer._ring)
    mask = facts[:-1, :, 3] > 0
    np.testing.assert_array_equal(np.diff(observation[..., 2], axis=0)[mask], 1.0)
    assert mask.sum() > 60


def test_timestep_to_np_changes_what_is_stored_and_seen():
    def doubled(steps):
        return steps._replace(observation=2 * steps.observation, reward=3 * steps.reward)

    task = RLTask(probe.ObservationReward, timestep_to_np=doubled)
    trainer = DQN(task, value_body=BODY, n_interactions_per_epoch=20)
    trainer.run(1)
    stored = np.asarray(trainer._ring.observation)[:20]
    assert set(np.abs(stored).ravel()) == {2.0}
    taken = np.asarray(trainer._ring.facts)[:20]
    np.testing.assert_array_equal(taken[..., 0], 1.5 * stored[..., 0] * taken[..., 3])


def test_a_replay_that_is_too_small_for_a_stack_is_refused():
    task = RLTask("CartPole-v1", num_stacked_frames=4)
    with pytest.raises(ValueError, match="replay_capacity=5 .* nearest valid value: 6"):
        DQN(task, value_body=BODY, n_step=3, replay_capacity=5)


def test_normaliser_statistics_are_gathered():
    model = functools.partial(models.Quality, body=BODY, normalizer=models.Normalize)
    trainer = small("CartPole-v1", value_body=None, value_model=model)
    trainer.run(3)
    count = trainer.state.model_state["model_state"]["normalize"]["count"]
    assert float(count) == trainer.task.n_interactions() == 96 - np.sum(trainer._ring.facts[:96, :, 3] == 0)


@pytest.mark.parametrize("arguments", [{"offline": True}, {"only_eval": True}, {}])
def test_normaliser_statistics_take_in_initial_trajectories(arguments):
    model = functools.partial(models.Quality, body=BODY, normalizer=models.Normalize)
    task = RLTask("CartPole-v1", initial_trajectories=5)
    trainer = DQN(task, value_model=model, n_interactions_per_epoch=10, **arguments)
    trainer.run(2)
    count = trainer.state.model_state["model_state"]["normalize"]["count"]
    assert float(count) == task.n_initial_interactions + task.n_interactions()


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"value_batch_size": 0}, ValueError, "value_batch_size=0 must be a whole number of at least 1"),
        ({"sync_freq": 0}, ValueError, "sync_freq=0"),
        ({"n_step": 0}, ValueError, "n_step=0"),
        ({"n_step": 2.4}, ValueError, "of at least 1; nearest valid value: 2"),
        ({"max_slice_length": 0}, ValueError, "max_slice_length=0"),
        ({"value_train_steps_per_epoch": 0}, ValueError, "value_train_steps_per_epoch=0"),
        ({"n_replay_epochs": 0}, ValueError, "n_replay_epochs=0"),
        ({"initial_collect_steps": -1}, ValueError, "initial_collect_steps=-1"),
        ({"exploration_rate": 1.5}, ValueError, "exploration_rate=1.5 begins with 1.5"),
        ({"exploration_rate": -0.5}, ValueError, "nearest valid value: 0.0"),
        ({"replay_capacity": 5, "n_step": 3, "num_envs": 2}, ValueError, "replay_capacity=5 must be a whole"),
        ({"exploration_interval": "steps"}, ValueError, "exploration_interval='steps'"),
        ({"value_bodi": None}, TypeError, "nearest: 'value_body'"),
        ({"env": "Pendulum-v1"}, TypeError, "Discrete"),
    ],
)
def test_wrong_arguments_are_refused(arguments, error, message):
    with pytest.raises(error, match=re.escape(message)):
        small(**{"env": "CartPole-v1", **arguments})


@pytest.mark.parametrize(
    ("name", "ours"),
    [
        ("batch_size", "value_batch_size"),
        ("target_sync", "sync_freq"),
        ("learning_starts", "initial_collect_steps"),
        ("exploration_fraction", "exploration_rate"),
        ("learning_rate", "value_lr_schedule"),
    ],
)
def test_names_from_elsewhere_are_answered_with_ours(name, ours):
    with pytest.raises(TypeError, match=f"DQN has no argument '{name}'; nearest: '{ours}'"):
        small("CartPole-v1", **{name: 1})


def test_sequence_networks_are_refused():
    body = functools.partial(models.TransformerDecoder, d_model=8, d_ff=8, n_layers=1, n_heads=1)
    with pytest.raises(ValueError, match="DQN draws single steps"):
        small("CartPole-v1", value_body=body)


def test_the_default_exploration_falls_within_ten_epochs():
    trainer = DQN(RLTask("CartPole-v1"), value_body=BODY, n_interactions_per_epoch=4, initial_collect_steps=1)
    assert trainer.exploration_rates()[-1] == pytest.approx(0.9)
    trainer._epoch = 9
    assert trainer.exploration_rates()[-1] == pytest.approx(0.05)
    record = trainer._run_epoch()
    assert record["exploration_rate"] == pytest.approx((3 * 0.05 + 1) / 4, abs=0.3)
