import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rl_trainers import DQN, A2CJoint, AWRJoint, RLTask, metrics, models
from rl_trainers.distributions import Categorical
from rl_trainers.drivers import OnPolicyDriver
from rl_trainers.envs import DeviceEnv, make_host_env, probe_jax
from rl_trainers.envs.probe import ConstantReward, Counting
from rl_trainers.rollout import initial_actor

REDO, SKIP, NO = OnPolicyDriver.FINAL_STEP_REDO, OnPolicyDriver.FINAL_STEP_SKIP, OnPolicyDriver.FINAL_STEP_NO
COUNTING = [functools.partial(Counting, length, i) for i, length in enumerate((3, 4))]
LINEAR = functools.partial(models.PolicyAndValue, body=None)
LSTM = functools.partial(models.PolicyAndValue, body=functools.partial(models.LSTM, hidden_size=4))


def made(env=COUNTING, num_envs=2, network=LINEAR, algorithm=A2CJoint, seed=0, task=None, **settings):
    task = RLTask(env, num_envs=num_envs, seed=seed, **task or {})
    shared = {"batch_size": None, "n_interactions_per_epoch": 5 * num_envs, "max_slice_length": 5}
    return algorithm(task, joint_model=network, **shared | settings)


plain = functools.lru_cache(made)  # for what changes nothing


def trained_by(trainer, monkeypatch):
    """What is trained on from now on: ``[(data, arguments)]``."""
    seen = []
    train_on = trainer.train_on

    def spy(data, *args, **kwargs):
        seen.append((data, kwargs))
        return train_on(data, *args, **kwargs)

    monkeypatch.setattr(trainer, "train_on", spy)
    return seen


def row_numbers(observation, lengths=(3, 4)):
    """How many rows of its environment came before, for observations ``[.., B, 3]`` of ``COUNTING``."""
    _, episode, t = np.moveaxis(np.asarray(observation), -1, 0)
    return (episode * (np.array(lengths) + 1) + t).astype(int)


def same(first, second):
    jax.tree.map(np.testing.assert_array_equal, first, second)


@pytest.mark.parametrize(
    ("mode", "trained", "ends", "rows"),
    [
        (REDO, [range(5), range(5, 10), range(10, 15), range(15, 20), range(20, 25)], [5, 10, 15, 20, 25], 5),
        (SKIP, [range(5), range(6, 11), range(12, 17), range(18, 23), range(24, 29)], [5, 11, 17, 23, 29], 6),
        (NO, [range(4), range(5, 9), range(10, 14), range(15, 19), range(20, 24)], [4, 9, 14, 19, 24], 5),
    ],
)
def test_which_rows_are_trained(mode, trained, ends, rows, monkeypatch):
    trainer = made()
    seen, observed = trained_by(trainer, monkeypatch), []
    driver = OnPolicyDriver(
        None,
        trainer,
        [lambda rollout, env_id: observed.append((rollout, env_id))],
        train_interval=5,
        final_step_mode=mode,
    )
    _, _, steps = driver.run(5 * rows * 2)

    assert steps == 5 * rows * 2
    assert (driver.counter, int(trainer.state.step), len(seen)) == (5, 5, 5)
    for (data, _), numbers, end in zip(seen, trained, ends, strict=True):
        np.testing.assert_array_equal(row_numbers(data.steps.observation), np.array([numbers] * 2).T)
        is_reset = [[k % 4 == 3, k % 5 == 4] for k in numbers]
        np.testing.assert_array_equal(data.steps.mask == 0, is_reset)
        assert row_numbers(data.last_observation).tolist() == [end, end]
    # All that the environments did is seen once, trained or not.
    all_rows = np.concatenate([row_numbers(rollout.steps.observation) for rollout, _ in observed])
    np.testing.assert_array_equal(all_rows, np.array([range(5 * rows)] * 2).T)
    assert [env_id.tolist() for _, env_id in observed] == [[0, 1]] * 5
    n_resets = sum((k % 4 == 3) + (k % 5 == 4) for k in range(5 * rows))
    assert driver.get_step_metrics()[1].result() == trainer.task.n_interactions() == 10 * rows - n_resets
    assert driver.get_step_metrics()[0].result() == 5 * rows // 4 + 5 * rows // 5 + (5 * rows % 4 == 3)


def test_parameters_are_those_of_the_trainers_own_loop():
    by_driver, alone = (
        made("CartPole-v1", 3, max_slice_length=1, n_interactions_per_epoch=15) for _ in range(2)
    )
    OnPolicyDriver(None, by_driver, train_interval=5).run(6 * 15)
    alone.run(6)
    assert int(alone.state.step) == 6
    same(by_driver.state.params, alone.state.params)
    np.testing.assert_array_equal(by_driver.task.actor.observation, alone.task.actor.observation)


@pytest.mark.parametrize(
    ("asked", "mode", "expected"),
    [(1, REDO, 10), (10, REDO, 10), (11, REDO, 20), (21, NO, 30), (12, SKIP, 12), (13, SKIP, 24)],
)
def test_steps_are_rounded_up_to_unrolls(asked, mode, expected):
    driver = OnPolicyDriver(None, plain(seed=1), train_interval=5, final_step_mode=mode)
    assert driver.run(asked)[2] == expected
    assert driver.counter == expected // driver.steps_per_unroll


ENVS = {"host": "CartPole-v1", "jax": probe_jax.fixed_length_memory()}


@pytest.mark.parametrize("env", ENVS)
@pytest.mark.parametrize(("network", "is_given"), [(LINEAR, False), (LSTM, True)])
def test_two_runs_are_one(env, network, is_given):
    once, twice = (made(ENVS[env], network=network) for _ in range(2))
    end = OnPolicyDriver(None, once, train_interval=5).run(60)[0]
    driver = OnPolicyDriver(None, twice, train_interval=5)
    time_step, policy_state, _ = driver.run(30)
    given = (time_step, policy_state) if is_given else ()
    same(driver.run(30, *given)[0], end)
    same(twice.state, once.state)
    assert any(np.any(x != y) for x, y in zip(*map(jax.tree.leaves, (end, time_step)), strict=True))


def test_environments_in_jax_go_back_to_a_time_step():
    trainer = made(probe_jax.counting(3))
    seen = []
    driver = OnPolicyDriver(
        probe_jax.counting(3), trainer, [lambda r, _: seen.append(r)], training=False, env_batch_size=2
    )
    first, _ = driver.run(8)
    driver.run(4, first)
    driver.run(8, first)
    same(jax.tree.map(lambda x: x[:2], seen[2].steps), seen[1].steps)
    # Two episodes of each environment ended, one of them after going back: with what came before left out.
    assert [metric.result() for metric in driver.get_metrics()] == [4, 16, 6.0, 3.0]


def test_a_time_step_of_ones_own_is_taken():
    trainer, seen = plain("CartPole-v1"), []
    env = make_host_env("CartPole-v1", 2)
    observer = lambda rollout, _: seen.append(rollout.steps)  # noqa: E731
    driver = OnPolicyDriver(env, trainer, [observer], training=False)
    actions = []
    for key in (1, 1, 2):
        observation = env.reset(5)
        driver.run(40, initial_actor(observation, 2, jax.random.PRNGKey(key)))
        np.testing.assert_array_equal(seen[-1].observation[0], observation)
        actions.append(seen[-1].action.tolist())
    assert actions[0] == actions[1] != actions[2]


def test_a_policy_state_of_ones_own_is_taken(monkeypatch):
    trainer = made("CartPole-v1", network=LSTM)
    seen = trained_by(trainer, monkeypatch)
    state = jax.tree.map(lambda x: x + 0.5, trainer.initial_policy_state(2))
    _, after, _ = OnPolicyDriver(None, trainer, train_interval=3).run(6, None, state)
    same(jax.tree.map(lambda x: x[0], seen[0][0].steps.policy_state), state)
    assert jax.tree.leaves(after)[0].shape == (2, 4)


@pytest.mark.parametrize(("network", "length"), [(LINEAR, 1), (LSTM, 7)])
def test_the_gradient_of_recurrent_policies_goes_through_the_unroll(network, length, monkeypatch):
    trainer = made(network=network)
    seen = trained_by(trainer, monkeypatch)
    OnPolicyDriver(None, trainer, train_interval=7).run(28)
    assert [kwargs["slice_length"] for _, kwargs in seen] == [length] * 2


def test_recurrent_policies_are_trained_from_the_states_they_had():
    trainer = made(network=LSTM)
    driver = OnPolicyDriver(None, trainer, train_interval=7)
    for _ in range(3):
        driver.run(14)
        assert abs(driver.train_metrics["approximate_kl_divergence"]) < 1e-6
    assert driver.train_metrics["grad_norm"] > 0


@functools.lru_cache
def biased(env):
    """Takes action 1 with probability 0.6, whatever it sees."""
    source, num_envs = {"host": (ConstantReward, 200), "jax": (probe_jax.constant_reward(), 2000)}[env]
    trainer = made(source, num_envs)
    params = jax.tree.map(jnp.zeros_like, trainer.state.params)
    params["policy"]["head"]["bias"] = jnp.log(jnp.array([0.4, 0.6]))
    trainer.state = trainer.state._replace(params=params)
    return trainer


@pytest.mark.parametrize("env", ["host", "jax"])
@pytest.mark.parametrize(
    ("settings", "rate"),
    [
        ({}, 0.4),
        ({"epsilon_greedy": 1}, 0.4),
        ({"epsilon_greedy": 0.0, "greedy_predict": True}, 0.0),
        ({"epsilon_greedy": 0.1}, 0.04),
        ({"greedy_predict": True}, 0.04),
    ],
)
def test_the_coin_is_tossed_for_each_row(env, settings, rate):
    trainer, actions = biased(env), []
    num_envs = trainer.task.env.num_envs
    observer = lambda rollout, _: actions.append(rollout.steps.action == 0)  # noqa: E731
    driver = OnPolicyDriver(None, trainer, [observer], training=False, **settings)
    driver.run(40 * num_envs)
    zeros = np.concatenate(actions)
    assert zeros.shape == (40, num_envs)
    deviation = np.sqrt(rate * (1 - rate) / zeros.size)
    assert abs(zeros.mean() - rate) <= 4 * deviation
    # One coin for all would make it 0 or 0.4 in each row.
    each = np.sqrt(rate * (1 - rate) / num_envs)
    assert np.abs(zeros.mean(axis=1) - rate).max() <= 4.5 * each
    assert (0 < zeros.mean(axis=1)).all() == (rate > 0)


@pytest.mark.parametrize("env", ENVS)
def test_playing_changes_nothing(env):
    trainer = made(ENVS[env], 4)
    before = jax.tree.map(np.array, (trainer.state, trainer.task.actor))
    driver = OnPolicyDriver(None, trainer, training=False, greedy_predict=True, train_interval=3)
    pair = driver.run(41)  # 11 rows
    assert len(pair) == 2
    same(jax.tree.map(np.array, (trainer.state, trainer.task.actor)), before)
    assert (driver.counter, driver.train_metrics) == (0, {})
    assert (trainer.task.n_interactions(), trainer.task.replay.size) == (0, 0)
    episodes, steps, *_ = driver.get_metrics()
    assert steps.result() + (episodes.result() if env == "jax" else 0) >= 44 - 4
    driver.close()


@pytest.mark.parametrize("env", ["CartPole-v1", "gymnax:CartPole-v1"])
@pytest.mark.parametrize("rate, epsilon", [(1.0, 0.0), (0.0, None)])
def test_who_explores_by_a_schedule_plays_the_mode_where_it_is_asked_to(env, rate, epsilon):
    trainer = DQN(RLTask(env, num_envs=2), exploration_rate=rate)
    trainer.initial_collect_steps = 0  # at random, without a word about the first 2
    seen = []
    driver = OnPolicyDriver(
        None, trainer, [lambda rollout, env_id: seen.append(rollout)], training=False, epsilon_greedy=epsilon
    )
    driver.run(100)
    driver.close()
    for rollout in seen:
        model = trainer.state.params, trainer.state.model_state
        values = trainer.q_values(*model, jnp.asarray(rollout.steps.observation))
        np.testing.assert_array_equal(rollout.steps.action, values.argmax(-1))


def test_playing_takes_whole_rows():
    trainer, seen = plain(), []
    observer = lambda rollout, _: seen.append(len(rollout.steps.mask))  # noqa: E731
    driver = OnPolicyDriver(COUNTING, trainer, [observer], training=False, train_interval=4, env_batch_size=2)
    driver.run(1)
    driver.run(13)
    assert seen == [1, 4, 3]


class Modeless(Categorical):
    def mode(self, inputs):
        raise NotImplementedError("no mode here")


def test_a_distribution_without_a_mode_is_named():
    trainer = made(task={"action_distribution": lambda space: Modeless(int(space.n), dtype=space.dtype)})
    with pytest.raises(
        ValueError, match=r"epsilon_greedy: 0.1 takes the mode of .*no mode here.*nearest is 1"
    ):
        OnPolicyDriver(None, trainer, training=False, greedy_predict=True)
    OnPolicyDriver(None, trainer, training=False).close()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"algorithm": None}, "algorithm: must be a trainer such as PPOJoint\\(task\\), got None"),
        ({"final_step_mode": 3}, "final_step_mode: must be 0 .* got 3; the nearest is 2"),
        ({"train_interval": 0}, "train_interval: must be at least 1 rows, got 0; the nearest is 1"),
        (
            {"train_interval": 1, "final_step_mode": NO},
            "at least 2 rows, of which FINAL_STEP_NO .* nearest is 2",
        ),
        ({"greedy_predict": True}, "greedy_predict: True is for training=False"),
        ({"epsilon_greedy": 0.1}, "epsilon_greedy: 0.1 is for training=False"),
        ({"epsilon_greedy": 1.5, "training": False}, "epsilon_greedy: .* got 1.5; the nearest is 1"),
        ({"observation_transformer": len}, r"observation_transformer: .*RLTask\(timestep_to_np"),
        ({"use_rollout_state": False}, "use_rollout_state: is False, but True in the algorithm"),
        ({"env": "CartPole-v1"}, "env: observation_space is .* in the task"),
        ({"env_batch_size": 3}, "env_batch_size: is 3, but env has 2"),
        ({"env": "CartPole-v1", "env_batch_size": 0}, "env_batch_size=0 must be a whole number"),
    ],
)
def test_arguments_that_do_not_fit_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        OnPolicyDriver(**{"algorithm": plain()} | settings)


def test_algorithms_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match="AWRJoint learns from a replay; use SyncOffPolicyDriver"):
        OnPolicyDriver(None, made(algorithm=AWRJoint))
    with pytest.raises(ValueError, match="use_rollout_state: is False in the algorithm"):
        OnPolicyDriver(None, made(network=LSTM, use_rollout_state=False))
    with pytest.raises(ValueError, match="max_num_steps: must be >= 1, got 0"):
        OnPolicyDriver(None, plain()).run(0)


class Noting(Counting):
    closed = 0

    def close(self):
        type(self).closed += 1


def test_environments_are_closed_by_who_made_them():
    trainer = made()
    Noting.closed = 0
    make = functools.partial(Noting, 3)
    for env, size, closed in [(make_host_env(make, 2), None, 0), (make, 3, 3), (None, None, 3)]:
        driver = OnPolicyDriver(env, trainer, env_batch_size=size)
        driver.run(1)
        driver.close()
        driver.close()
        assert Noting.closed == closed
    assert not trainer.task.env._venv.closed


def test_seeds_are_those_of_a_task():
    own, other = (made("CartPole-v1", seed=4) for _ in range(2))
    OnPolicyDriver(None, own, train_interval=4).run(16)
    driver = OnPolicyDriver("CartPole-v1", other, env_batch_size=2, seed=4, train_interval=4)
    driver.run(16)
    same(driver.time_step, own.task.actor)
    same(other.state.params, own.state.params)


@pytest.mark.parametrize(("env", "network"), [("host", LSTM), ("jax", LINEAR)])
def test_nothing_compiles_after_the_second_unroll(env, network):
    trainer = made(ENVS[env], network=network)
    driver = OnPolicyDriver(None, trainer, train_interval=6)
    driver.run(24)
    before = metrics.compilations().programs
    for _ in range(4):
        driver.run(24)
    assert metrics.compilations().programs == before
    assert len(trainer._learners) == 1


def test_jax_environments_that_cannot_be_compiled_with_the_policy_are_stepped():
    def hook(steps):
        return steps._replace(observation=np.asarray(steps.observation) * 2)

    trainer = made(probe_jax.counting(3), task={"timestep_to_np": hook})
    driver = OnPolicyDriver(None, trainer, train_interval=5)
    first = driver.run(10)[0]
    end = driver.run(20)[0]
    assert isinstance(driver.env, DeviceEnv)
    assert trainer.task.n_interactions() == 2 * (15 - 3)
    np.testing.assert_array_equal(
        end.observation[:, 2], [3, 3]
    )  # after 15 rows, of which every fourth resets
    np.testing.assert_array_equal(first.observation[:, 2], [1, 1])
