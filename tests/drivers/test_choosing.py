"""Trainers that are told who steps their environments."""

import functools

import gin
import gymnasium as gym
import jax
import numpy as np
import pytest

from rl_trainers import (
    A2C,
    AWR,
    DQN,
    PPO,
    SAC,
    A2CJoint,
    AWRJoint,
    PolicyGradient,
    PPOJoint,
    RLTask,
    advantages,
    models,
)
from rl_trainers.drivers import AsyncOffPolicyDriver, RayDriver, SyncOffPolicyDriver
from rl_trainers.envs import probe, probe_jax

LOCK_STEP = functools.partial(
    AsyncOffPolicyDriver, num_envs=3, env_batch_size=2, lock_step=True, unroll_length=16, seed=3
)
SMALL = functools.partial(models.MLP, layer_widths=(8,))
GRU = functools.partial(models.GRU, hidden_size=8)


def task(**kwargs):
    return RLTask(**{"env": "CartPole-v1", "num_envs": 6, "seed": 3, "backend": "sync", **kwargs})


def joint(cls=PPOJoint, body=SMALL, **kwargs):
    network = functools.partial(models.PolicyAndValue, body=body)
    settings = {"n_interactions_per_epoch": 96, "batch_size": 16, "train_steps_per_epoch": 4, **kwargs}
    return cls(settings.pop("task", None) or task(), joint_model=network, **settings)


def run(trainer, n_epochs=3):
    try:
        trainer.run(n_epochs)
    finally:
        trainer.close()
    return trainer


def assert_same(one, other):
    jax.tree.map(np.testing.assert_array_equal, one.state.params, other.state.params)
    np.testing.assert_array_equal(one.avg_returns, other.avg_returns)
    assert one.task.n_interactions() == other.task.n_interactions()
    assert one.task.n_trajectories() == other.task.n_trajectories()


@pytest.mark.parametrize("cls", [PPOJoint, A2CJoint])
@pytest.mark.parametrize("body, length", [(SMALL, 1), (GRU, 8)])
def test_threads_in_lock_step_train_as_the_own_loop_does(cls, body, length):
    one = run(joint(cls, body, max_slice_length=length, driver="sync"))
    other = run(joint(cls, body, max_slice_length=length, driver=LOCK_STEP))
    assert int(one.state.step) == 12
    assert_same(one, other)


def test_the_own_loop_is_the_sync_driver():
    one, other = run(joint()), run(joint(driver="sync"))
    pairs = zip(jax.tree.leaves(one.state.params), jax.tree.leaves(other.state.params), strict=True)
    # Alone, probabilities are worked out for all rows at once, which rounds otherwise.
    for x, y in pairs:
        np.testing.assert_allclose(x, y, atol=1e-5)


def records(trainer, n_epochs=3):
    found = []
    trainer.on_epoch = found.append
    run(trainer, n_epochs)
    return found


@pytest.mark.parametrize(
    "make",
    [
        joint,
        functools.partial(joint, A2CJoint, advantage_estimator=advantages.vtrace),
        functools.partial(joint, PPOJoint, GRU, max_slice_length=8),
        lambda **kwargs: PPO(task(), n_interactions_per_epoch=96, policy_train_steps_per_epoch=2, **kwargs),
        lambda **kwargs: A2C(
            task(), n_interactions_per_epoch=96, advantage_estimator=advantages.vtrace, **kwargs
        ),
        lambda **kwargs: AWR(task(), n_interactions_per_epoch=96, value_train_steps_per_epoch=2, **kwargs),
    ],
)
def test_trainers_learn_from_threads(make):
    found = records(make(driver="async"))
    assert [record["env_steps"] for record in found][-1] > 200
    assert all(0 <= record["most_policy_lag"] <= 8 for record in found)
    assert found[-1]["n_trajectories"] > 0
    assert sum(r["n_trajectories"] for r in found) > 5


@pytest.mark.parametrize("n_replay_epochs", [1, 3])
def test_rows_behind_a_cut_begin_with_the_recorded_states(n_replay_epochs):
    made = joint(
        AWRJoint,
        functools.partial(models.GRU, hidden_size=8),
        max_slice_length=8,
        n_replay_epochs=n_replay_epochs,
        lr_schedule=0.0,
        driver="async",
    )
    made.run(4)
    data = made._stored()
    made.close()
    states = data.steps.observation.state["shared"]["state"]
    episode = data.steps.observation.episode
    begins = np.concatenate([np.ones_like(episode[:1]), np.diff(episode, axis=0)]) != 0
    # In the middle of episodes: of the first unroll, or of one behind those of other environments.
    cuts = begins & states.any(-1) & (data.steps.mask > 0)
    assert cuts[1:].any() == (n_replay_epochs > 1)
    assert cuts.any()
    said = made.acting.dist_inputs(made.state.params, {}, data.steps.observation)
    decided = data.steps.mask > 0
    np.testing.assert_allclose(said[decided], data.steps.dist_inputs[decided], atol=1e-6)


@pytest.mark.parametrize("cls, env", [(DQN, "CartPole-v1"), (SAC, "Pendulum-v1")])
def test_trainers_with_a_replay_learn_from_threads(cls, env):
    prefix = "value_" if cls is DQN else ""
    made = cls(
        task(env=env, num_envs=2),
        n_interactions_per_epoch=32,
        initial_collect_steps=40,
        replay_capacity=200,
        driver="async",
        **{f"{prefix}train_steps_per_epoch": 8, f"{prefix}batch_size": 8},
    )
    found = records(made, 6)
    # Learning begins when 40 decisions are there, after two epochs.
    assert int(made.state.step) == 5 * 8 * len(made._trainers)
    name = "value_loss"
    assert [np.isfinite(record[name]) for record in found] == [False] + [True] * 5
    ring = made._ring
    assert int(ring.size) == 100  # rows of two environments


def test_actors_explore_as_the_schedule_says(monkeypatch):
    made = DQN(
        RLTask(functools.partial(probe.Counting, 1000), num_envs=2),
        n_interactions_per_epoch=32,
        initial_collect_steps=48,
        exploration_rate=lambda decisions: 0.001 * decisions,
        exploration_interval="step",
        value_train_steps_per_epoch=1,
        driver=functools.partial(
            AsyncOffPolicyDriver, num_envs=1, env_batch_size=2, lock_step=True, unroll_length=16
        ),
    )
    acted_with, explore = [], made._explore_alone

    def spy(*arguments):
        acted_with.append(float(arguments[-1]))
        return explore(*arguments)

    monkeypatch.setattr(made, "_explore_alone", spy)
    rates = [record["exploration_rate"] for record in records(made, 4)]
    # At random: 32 decisions, then 8 of 16 rows; the others' rates are those of decisions 33, 35 and so on.
    later = [0.5 + 0.001 * sum(range(49, 65, 2)) / 16, 0.001 * (65 + 95) / 2, 0.001 * (97 + 127) / 2]
    np.testing.assert_allclose(rates, [1.0, *later], atol=1e-6)
    # Once more at the start, to compile.
    np.testing.assert_allclose(acted_with, np.repeat([1.0, *later], [17, 16, 16, 16]), atol=1e-6)


def test_an_unroll_is_stored_with_the_successor_of_its_last_row():
    counting = [functools.partial(probe.Counting, 5, env_id=i) for i in range(2)]
    made = DQN(
        RLTask(counting, num_envs=2),
        n_interactions_per_epoch=8,
        initial_collect_steps=100,
        replay_capacity=40,
        driver=functools.partial(
            AsyncOffPolicyDriver, num_envs=1, env_batch_size=2, lock_step=True, unroll_length=4
        ),
    )
    run(made, 2)
    ring = made._ring
    t = np.asarray(ring.observation)[:10, :, 2]
    mask = np.asarray(ring.facts)[:10, 0, 3]
    # Episodes of 5 decisions; each unroll of 4 rows is followed by one that shows what came after it.
    assert t[:, 0].tolist() == [0, 1, 2, 3, 4, 4, 5, 0, 1, 2]
    assert mask.tolist() == [1, 1, 1, 1, 0, 1, 0, 1, 1, 0]


def test_the_on_policy_driver_takes_one_step_on_each_unroll():
    trainer = run(joint(A2CJoint, batch_size=None, train_steps_per_epoch=1, driver="on_policy"))
    assert int(trainer.state.step) == 3
    with pytest.raises(ValueError, match="driver='on_policy': it takes one optimizer step on all rows"):
        joint(driver="on_policy")
    with pytest.raises(ValueError, match="driver='on_policy': DQN learns from what older policies did"):
        DQN(task(), driver="on_policy")


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda: joint(driver="asynch"), "driver='asynch' is none of .*; nearest valid value: 'async'"),
        (lambda: joint(driver="ASYNC"), "driver='ASYNC' is none of .*; nearest valid value: 'async'"),
        (lambda: AsyncOffPolicyDriver(algorithm=joint(A2CJoint)), "algorithm: A2CJoint takes all rows for"),
        (
            lambda: joint(driver=SyncOffPolicyDriver),
            "makes a SyncOffPolicyDriver.*; nearest valid value: 'sync'",
        ),
        (lambda: joint(driver=lambda algorithm: None), "makes a NoneType"),
        (lambda: joint(A2CJoint, driver="async"), "A2CJoint takes all rows for those of the newest policy"),
        (lambda: DQN(task(), driver="ray"), "workers act by the policy alone, and DQN .*: 'async'"),
        (
            lambda: DQN(task(), driver=functools.partial(RayDriver, num_workers=2)),
            "workers act by the policy alone, and DQN .*: 'async'",
        ),
        (lambda: DQN(task(num_stacked_frames=2), driver="async"), "num_stacked_frames=2: .* 'sync'"),
        (
            lambda: DQN(task(num_stacked_frames=2), n_interactions_per_epoch=96, driver=LOCK_STEP),
            "num_stacked_frames=2: .* 'sync'",
        ),
        (lambda: PolicyGradient(task(), driver="async"), "epochs are counted in trajectories"),
        (
            lambda: joint(task=RLTask(probe_jax.counting(3), num_envs=6), driver="async"),
            "the environments are in JAX",
        ),
        (
            lambda: joint(driver=functools.partial(AsyncOffPolicyDriver, num_envs=2, env_batch_size=1)),
            "learn batches have 2 columns, .* num_envs=6",
        ),
        (
            lambda: joint(
                driver=functools.partial(
                    AsyncOffPolicyDriver, num_envs=6, env_batch_size=1, unroll_length=8
                )
            ),
            "n_interactions_per_epoch=96, but .* unroll_length=8 times 6 rows; leave .* valid value: 48",
        ),
    ],
)
def test_what_makes_no_sense_is_refused_with_the_reason(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_a_macro_may_stand_for_a_count():
    gin.parse_config(["n = 2", "AsyncOffPolicyDriver.num_envs = %n"])
    try:
        made = joint(driver="async")
    finally:
        gin.clear_config()
    made.close()
    assert [env.num_envs for env in made._driver._envs] == [3, 3]


class Fails(gym.Wrapper):
    """An environment that fails in its fifth step."""

    def __init__(self):
        super().__init__(gym.make("CartPole-v1"))
        self.count = 0

    def step(self, action):
        self.count += 1
        if self.count == 5:
            raise KeyError("boom")
        return super().step(action)


def test_an_error_in_a_thread_ends_the_run_as_itself():
    made = joint(task=task(env=Fails), driver="async")
    with pytest.raises(Exception, match="boom"):
        run(made)


def test_what_a_driver_is_not_told_fits_the_trainer():
    made = joint(task=task(num_envs=4), driver=functools.partial(AsyncOffPolicyDriver, num_envs=2))
    driver = made._driver
    assert driver.shape == (24, 4)
    assert [env.num_envs for env in driver._envs] == [2, 2]
    run(made, 1)
    assert driver.unrolls.n_finished >= 2
    made = joint(driver=functools.partial(AsyncOffPolicyDriver, max_policy_lag=9))
    assert (made._driver.shape, made._driver.unrolls.max_policy_lag) == ((16, 6), 9)
    made.close()


def test_a_vector_environment_is_made_anew_one_by_one():
    made = joint(task=RLTask(gym.make_vec("CartPole-v1", num_envs=3)), driver="async")
    assert [env.num_envs for env in made._driver._envs] == [1, 1, 1]
    run(made, 1)


def test_a_run_goes_on_after_a_stop(tmp_path):
    made = joint(driver="async", output_dir=str(tmp_path))
    made.run(2)
    made.run(1)
    made.close()
    again = joint(driver="async", output_dir=str(tmp_path))
    assert again.current_epoch == 3
    run(again, 1)
    assert int(again.state.step) == 16
