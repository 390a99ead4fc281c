import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rl_trainers import DQN, SAC, AWRJoint, PPOJoint, RLTask, metrics, models, supervised
from rl_trainers.drivers import AsyncOffPolicyDriver, OffPolicyDriver, SyncOffPolicyDriver
from rl_trainers.envs import probe_jax
from rl_trainers.envs.probe import Counting, Endless
from rl_trainers.rollout import unroll_host

COUNTING = [functools.partial(Counting, length, i) for i, length in enumerate((3, 4))]
LINEAR = functools.partial(models.PolicyAndValue, body=None)
LSTM = functools.partial(models.PolicyAndValue, body=functools.partial(models.LSTM, hidden_size=4))
REPLAYERS = ["one_time", "uniform", "cycle_one_time"]


def made(env=COUNTING, num_envs=2, network=LINEAR, algorithm=PPOJoint, seed=0, **settings):
    task = RLTask(env, num_envs=num_envs, seed=seed)
    shared = {"batch_size": None, "n_interactions_per_epoch": 10 * num_envs}
    return algorithm(task, joint_model=network, **shared | settings)


plain = functools.lru_cache(made)  # for what does not look at parameters


def recurrent(**settings):
    return made(network=LSTM, max_slice_length=4, **settings)


def trained_by(trainer, monkeypatch):
    """The rollouts that are trained on from now on."""
    seen = []
    train_on = trainer.train_on
    monkeypatch.setattr(trainer, "train_on", lambda data, *rest: seen.append(data) or train_on(data, *rest))
    return seen


def decisions(data, column, length):
    """Numbers of the decisions of a column, in the order of its rows."""
    rows = data.steps.observation[data.steps.mask[:, column] > 0, column].astype(int)
    return [episode * length + t for _, episode, t in rows.tolist()]


def same(first, second):
    jax.tree.map(np.testing.assert_array_equal, first, second)


@pytest.mark.parametrize("exp_replayer", REPLAYERS)
def test_every_decision_is_trained_once(exp_replayer, monkeypatch):
    trainer = made()
    seen, observed = trained_by(trainer, monkeypatch), []
    observer = lambda rollout, env_id: observed.append((rollout, env_id.tolist()))  # noqa: E731
    driver = SyncOffPolicyDriver(None, trainer, 4, exp_replayer, [observer])
    trained = []
    for _ in range(5):
        driver.run(12)  # 6 rows
        trained.append(driver.train())
    first = 10 if exp_replayer == "cycle_one_time" else 12
    assert trained == [first] + [12] * 4
    n_rows = 29 if exp_replayer == "cycle_one_time" else 30
    for column, length in enumerate((3, 4)):
        numbers = sum([decisions(data, column, length) for data in seen], [])
        n_decisions = n_rows - n_rows // (length + 1)
        assert numbers == list(range(n_decisions))
    assert [len(rollout.steps.mask) for rollout, _ in observed] == [4, 2] * 5
    for column, length in enumerate((3, 4)):
        numbers = sum([decisions(rollout, column, length) for rollout, _ in observed], [])
        assert numbers == list(range(30 - 30 // (length + 1)))
    assert {tuple(env_id) for _, env_id in observed} == {(0, 1)}
    assert driver.get_step_metrics()[1].result() == 60 - 7 - 6
    assert (driver.counter, int(trainer.state.step)) == (5, 5)


def test_the_rows_are_those_of_an_unroll():
    trainer, other = made("CartPole-v1", 3), made("CartPole-v1", 3)
    driver = SyncOffPolicyDriver(None, trainer, 4, "one_time")
    time_step, policy_state = driver.run(30)
    actor, expected, _ = unroll_host(
        other.task.env, other.actor(), other.task.actor, 10, other.task.distribution.to_env
    )
    rollout = driver.replayer.replay_all()
    same(rollout._replace(policy_version=0), expected)
    same(time_step, actor)
    assert policy_state == () == time_step.policy_state
    assert (driver.counter, int(trainer.state.step)) == (0, 0)


@pytest.mark.parametrize("env", ["CartPole-v1", probe_jax.fixed_length_memory()])
def test_two_runs_are_one(env):
    trainer = made(env, network=LSTM, max_slice_length=4)
    ends, stored = [], []
    for runs in ([9], [5, 4]):
        driver = SyncOffPolicyDriver(env, trainer, 3, "uniform", env_batch_size=2, seed=3)
        given = ()
        for n in runs:
            given = driver.run(2 * n, *given)
        ends.append(given)
        stored.append(driver.replayer.replay_all())
    same(*ends)
    same(*stored)


@pytest.mark.parametrize(
    ("updates", "size", "length", "batches"),
    [
        (1, None, None, 1),
        (3, None, 1, 1),
        (2, 5, 1, 4),
        (2, 3, 2, 4),
        (4, 1, 0, 2),
        (1, 7, 5, 1),
        (1, 50, 1, 1),
    ],
)
def test_counts_of_mini_batches(updates, size, length, batches):
    trainer = made()
    driver = SyncOffPolicyDriver(None, trainer, 10, "one_time")
    driver.run(20)
    assert driver.train(updates, size, length) == 20 * updates
    assert int(trainer.state.step) == updates * batches
    assert driver.counter == 1
    driver.run(20)
    driver.train(updates, size, length, update_counter_every_mini_batch=True)
    assert driver.counter == 1 + updates * batches


def test_an_update_visits_every_valid_row_once():
    valid = np.arange(20) % 3 > 0  # 13 rows
    trainer = plain()
    _, (index, keep) = trainer._trainers[0].sized(5, 8, 2)._shuffle(trainer.state, jnp.array(valid))
    index, keep = index.reshape(8, 5), keep.reshape(8, 5)
    for update in range(2):
        part = slice(4 * update, 4 * update + 4)
        assert np.asarray(keep[part]).sum(axis=1).tolist() == [4, 3, 3, 3]
        assert sorted(np.asarray(index[part])[np.asarray(keep[part]) > 0]) == np.flatnonzero(valid).tolist()
    # With fewer rows than batches no batch is empty.
    _, keep = supervised.shuffled(jax.random.PRNGKey(0), jnp.arange(20) < 3, 5, 8, 4)
    assert np.asarray(keep).sum(axis=1).tolist() == [1] * 8


@pytest.mark.parametrize(
    ("whole", "clear", "rows", "left"),
    [(True, True, [12, 12], [0, 0]), (True, False, [12, 24], [12, 24]), (False, True, [10, 10], [12, 24])],
)
def test_what_is_replayed_and_cleared(whole, clear, rows, left, monkeypatch):
    trainer = made()
    seen = trained_by(trainer, monkeypatch)
    driver = SyncOffPolicyDriver(None, trainer, 6, "uniform")
    for n, size in zip(rows, left, strict=True):
        driver.run(12)
        how = {"whole_replay_buffer_training": whole, "clear_replay_buffer": clear}
        assert driver.train(3, None if whole else 5, None if whole else 2, **how) == 3 * n
        assert driver.replayer.total_size == size
    assert int(trainer.state.step) == 6
    assert [data.steps.mask.size for data in seen] == rows
    if not whole:
        assert seen[0].steps.mask.shape == (2, 5)
        driver.train(1, None, 2, False)
        assert seen[-1].steps.mask.shape == (2, 2)


@pytest.mark.parametrize(("size", "env"), [(None, "CartPole-v1"), (7, Endless)])
def test_one_time_is_the_trainers_own_loop(size, env):
    batches = -(-30 // (size or 30))
    own, trainer = (
        made(env, 3, batch_size=size, n_interactions_per_epoch=30, train_steps_per_epoch=4 * batches)
        for _ in range(2)
    )
    own.run(3)
    driver = SyncOffPolicyDriver(None, trainer, 10, "one_time")
    for _ in range(3):
        driver.run(30)
        driver.train(4, size, 1)
    assert int(trainer.state.step) == int(own.state.step) == 12 * batches
    same(trainer.state.params, own.state.params)
    same(trainer.task.actor, own.task.actor)
    assert trainer.task.n_interactions() == own.task.n_interactions()


@pytest.mark.parametrize("exp_replayer", REPLAYERS)
def test_recurrent_policies_are_trained_from_stored_states(exp_replayer):
    trainer = recurrent(use_rollout_state=True)
    driver = SyncOffPolicyDriver(None, trainer, 8, exp_replayer, use_rollout_state=True)
    for _ in range(2):
        driver.run(16)
        driver.train(mini_batch_length=4)
    # Of what this policy has collected, ratios are 1; rows before are not replayed.
    if exp_replayer != "cycle_one_time":
        assert abs(driver.train_metrics["probs_ratio_mean"] - 1) < 1e-6
    assert jax.tree.leaves(driver.time_step.policy_state)[0].shape == (2, 4)


def test_without_the_stored_state_none_is_kept(monkeypatch):
    trainer = recurrent(use_rollout_state=False)
    driver = SyncOffPolicyDriver(None, trainer, 8, "one_time")
    driver.run(16)
    with pytest.raises(
        ValueError, match="mini_batch_length: is 1, but without use_rollout_state.* nearest is 2"
    ):
        driver.train(mini_batch_length=1)
    seen = trained_by(trainer, monkeypatch)
    driver.train(mini_batch_length=4)
    assert seen[0].steps.policy_state == ()


def test_environments_that_begin_anew_leave_a_cut(monkeypatch):
    env, trainer = probe_jax.counting(3), made(probe_jax.counting(3))
    seen = trained_by(trainer, monkeypatch)
    driver = SyncOffPolicyDriver(env, trainer, 4, "uniform", env_batch_size=2)
    first = driver.run(4)
    driver.run(2)
    driver.run(4, *first)
    driver.train()
    # Rows 0 to 2, the cut after them, and rows 2 and 3 once more.
    assert seen[0].steps.observation[:, 0, 2].tolist() == [0, 1, 2, 3, 2, 3]
    assert seen[0].steps.mask[:, 0].tolist() == [1, 1, 1, 0, 1, 0]


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"num_updates": 0}, ValueError, "num_updates=0 must be .* nearest valid value: 1"),
        ({"mini_batch_size": 0}, ValueError, "mini_batch_size=0 must be .* nearest valid value: 1"),
        (
            {"mini_batch_length": 4},
            ValueError,
            "mini_batch_length: 4 does not divide the 10 rows.*nearest is 5",
        ),
        ({"whole_replay_buffer_training": False}, ValueError, "mini_batch_length: is None"),
        (
            {"whole_replay_buffer_training": False, "mini_batch_length": 11},
            ValueError,
            "environment 0 holds 10 rows, which is less than length=11",
        ),
    ],
)
def test_trainings_that_do_not_fit_are_refused(arguments, error, message):
    driver = SyncOffPolicyDriver(COUNTING, plain(), 10, env_batch_size=2)
    driver.run(20)
    with pytest.raises(error, match=message):
        driver.train(**arguments)


def test_what_replayers_refuse():
    for exp_replayer in REPLAYERS:
        driver = SyncOffPolicyDriver(COUNTING, plain(), 4, exp_replayer, env_batch_size=2)
        with pytest.raises(RuntimeError, match="nothing was observed since"):
            driver.train()
        driver.run(8)
        if exp_replayer != "uniform":
            with pytest.raises(NotImplementedError, match="use exp_replayer='uniform'"):
                driver.train(mini_batch_length=2, whole_replay_buffer_training=False)
        driver.train()
        with pytest.raises(RuntimeError, match="nothing was observed since"):
            driver.train()
    driver.run(8)
    with pytest.raises(RuntimeError, match="observed twice"):
        driver.run(8)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"algorithm": None}, "algorithm: must be a trainer such as PPOJoint\\(task\\), got None"),
        ({"unroll_length": 0}, "unroll_length=0 must be .* nearest valid value: 1"),
        ({"exp_replayer": "uniformly"}, "exp_replayer: 'uniformly' is none of .*; the nearest is 'uniform'"),
        ({"observation_transformer": len}, r"RLTask\(timestep_to_np"),
        ({"use_rollout_state": False}, "use_rollout_state: is False, but True in the algorithm"),
    ],
)
def test_arguments_that_do_not_fit_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        SyncOffPolicyDriver(**{"algorithm": plain()} | settings)


@pytest.mark.parametrize("cls, env", [(DQN, "CartPole-v1"), (SAC, "Pendulum-v1")])
def test_who_learns_from_a_replay_of_its_own_is_refused(cls, env):
    trainer = cls(RLTask(env))
    with pytest.raises(ValueError, match=f"algorithm: {cls.__name__} .*driver='sync'"):
        SyncOffPolicyDriver(None, trainer)
    driver = AsyncOffPolicyDriver(algorithm=trainer)
    driver.start()
    driver.run_async()
    try:
        with pytest.raises(NotImplementedError, match=f"{cls.__name__} draws .* driver='async'"):
            driver.train()
    finally:
        driver.close()


@pytest.mark.parametrize("exp_replayer", REPLAYERS)
def test_initial_steps_are_rounded_up_to_unrolls(exp_replayer):
    driver = SyncOffPolicyDriver(COUNTING, plain(), 4, exp_replayer, env_batch_size=2)
    assert driver.collect_initially(17) == 24
    kept = 22 if exp_replayer == "cycle_one_time" else 24
    assert driver.train() == kept
    # Three rows of the twelve of the first environment reset, and two of the second.
    assert driver.get_step_metrics()[1].result() == 24 - 3 - 2


def test_an_asynchronous_driver_trains_in_the_same_way():
    trainer = made("CartPole-v1", 1, algorithm=AWRJoint, n_interactions_per_epoch=10)
    driver = AsyncOffPolicyDriver(
        None, trainer, num_envs=2, learn_queue_cap=2, unroll_length=5, lock_step=True
    )
    assert isinstance(driver, OffPolicyDriver)
    driver.start()
    try:
        assert driver.collect_initially(11) == 20
        assert driver.train(2, 2, 1) == 20  # the newest ten rows
        assert (driver.counter, int(trainer.state.step)) == (1, 10)
    finally:
        driver.close()


@pytest.mark.parametrize(("env", "exp_replayer"), [("CartPole-v1", "one_time"), (None, "uniform")])
def test_nothing_compiles_after_the_second_iteration(env, exp_replayer):
    trainer = made(env or probe_jax.counting(3))
    driver = SyncOffPolicyDriver(None, trainer, 4, exp_replayer)

    def iterate():
        driver.run(12)
        driver.train(2, 5, 1)

    iterate()
    iterate()
    before = metrics.compilations().programs
    for _ in range(3):
        iterate()
    assert metrics.compilations().programs == before
    assert [learn._cache_size() for _, learn in trainer._learners.values()] == [1]
