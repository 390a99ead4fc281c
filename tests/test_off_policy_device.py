"""Epochs of off-policy trainers in JAX environments, compiled as a whole, do what the host's loop does."""

import functools
import logging
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rl_trainers import DQN, SAC, TD3, RLTask, models, ring
from rl_trainers.envs import probe_jax

BODY = functools.partial(models.MLP, layer_widths=(16,), activation=jnp.tanh)
COUNTING = probe_jax.counting(3)
TRUNCATED = probe_jax.counting(7, truncates=True)
MATCH = probe_jax.action_and_observation_reward()
SMOOTH_MATCH = probe_jax.action_and_observation_reward(continuous=True)
NORMALIZED = functools.partial(models.Quality, body=BODY, normalizer=models.Normalize)


def tripled(steps):
    return steps._replace(observation=3 * steps.observation, reward=-steps.reward)


def made(cls, env, num_envs=2, task=None, on_device=True, **kwargs):
    task = RLTask(env, num_envs=num_envs, gamma=0.9, **(task or {}))
    # After 23 rows environments that end with every 3rd or 7th decision are about to be reset.
    settings = {"n_interactions_per_epoch": 23 * num_envs, "initial_collect_steps": 10}
    size = {"batch_size": 8, "value_body": BODY, "policy_body": BODY}
    if cls is DQN:
        size = {"value_batch_size": 8, "value_body": BODY, "sync_freq": 5, "exploration_rate": 0.3}
        size["scale_value_targets"] = False
    trainer = cls(task, **{**size, **settings, **kwargs})
    assert trainer._on_device
    trainer._on_device = on_device
    return trainer


def contents(trainer):
    """All that an epoch changes."""
    task = trainer.task
    counts = task.n_interactions(), task.n_trajectories(), trainer._n_updates
    rows, envs = ring.to_rows(trainer._ring), task.env.snapshot()
    return jax.tree.map(np.array, (trainer.state, rows, task.actor, envs, counts))


def assert_close(one, other, tolerance=1e-5):
    assert jax.tree.structure(one) == jax.tree.structure(other)
    for x, y in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        assert x.dtype == y.dtype and x.shape == y.shape
        if x.dtype.kind == "f":
            np.testing.assert_allclose(x, y, rtol=tolerance, atol=tolerance)
        else:
            np.testing.assert_array_equal(x, y)


CASES = {
    "terminated": (DQN, COUNTING, {"num_envs": 1}),
    "truncated, a full replay": (DQN, TRUNCATED, {"n_step": 3, "replay_capacity": 30}),
    "cut, initial trajectories": (
        DQN,
        probe_jax.endless(),
        {"task": {"max_steps": 5, "time_limit": 50, "initial_trajectories": 4}, "initial_collect_steps": 30},
    ),
    "limit, exploration by step": (
        DQN,
        probe_jax.endless(),
        {
            "task": {"time_limit": 5},
            "exploration_rate": lambda step: 1 / step,
            "exploration_interval": "step",
        },
    ),
    "fewer updates than rows": (DQN, MATCH, {"value_train_steps_per_epoch": 7}),
    "more updates than rows": (DQN, MATCH, {"value_train_steps_per_epoch": 53}),
    "warm-up of more than an epoch": (DQN, COUNTING, {"initial_collect_steps": 60}),
    "statistics, timestep_to_np": (
        DQN,
        MATCH,
        {"value_model": NORMALIZED, "value_body": None, "task": {"timestep_to_np": tripled}},
    ),
    "discrete SAC": (SAC, MATCH, {}),
    "SAC": (SAC, SMOOTH_MATCH, {}),
    "TD3": (TD3, SMOOTH_MATCH, {}),
}


def assert_same_epochs(cls, env, **kwargs):
    device, host = (made(cls, env, on_device=x, **kwargs) for x in (True, False))
    for _ in range(3):
        records = [trainer._run_epoch() for trainer in (device, host)]
        assert_close(contents(device), contents(host))
        assert records[0].keys() == records[1].keys()
        for name in records[0]:
            if name[-2:] not in ("_s", "ns"):  # seconds, compilations
                np.testing.assert_allclose(records[0][name], records[1][name], rtol=1e-4, atol=1e-5)
    assert device._n_updates > 0


@pytest.mark.parametrize("case", CASES)
def test_an_epoch_is_that_of_the_host(case):
    cls, env, kwargs = CASES[case]
    assert_same_epochs(cls, env, **kwargs)


@pytest.mark.parametrize(("cls", "name"), [(DQN, "CartPole-v1"), (SAC, "Pendulum-v1"), (TD3, "Pendulum-v1")])
def test_an_epoch_in_gymnax_is_that_of_the_host(cls, name):
    pytest.importorskip("gymnax")
    assert_same_epochs(cls, f"gymnax:{name}")


def test_counts_of_the_task_and_the_episodes():
    # Of 23 rows in each environment 18 are decisions: 3, then a reset row.
    trainer = made(DQN, COUNTING)
    record = trainer._run_epoch()
    assert trainer.task.n_interactions() == 36 and trainer.task.n_trajectories() == 12
    assert record["avg_return"] == 1 + 2 + 3 and record["avg_length"] == 3
    assert trainer._n_updates == 23 - 5  # the first 10 decisions are 5 rows


def test_trajectories_that_are_cut():
    # The episodes go on: of 23 decisions 5 pieces of 4 are finished, of 46 there are 11.
    trainer = made(DQN, probe_jax.endless(), task={"max_steps": 4, "time_limit": 1000})
    trainer.run(1)
    assert trainer.task.n_trajectories() == 2 * 5 and trainer.task.n_interactions() == 46
    trainer.run(1)
    assert trainer.task.n_trajectories() == 2 * 11 and np.isnan(trainer.avg_returns).all()
    np.testing.assert_array_equal(trainer.task.actor.episode_length, 46)


@pytest.mark.parametrize(("cls", "env"), [(DQN, TRUNCATED), (SAC, SMOOTH_MATCH)])
def test_resumed_equals_uninterrupted(cls, env):
    straight, first, second = (made(cls, env, n_step=2) for _ in range(3))
    straight.run(4)
    first.run(2)
    second.load_state_dict(first.state_dict())
    second.run(2)
    assert_close(contents(second), contents(straight), tolerance=0)
    np.testing.assert_array_equal(second.avg_returns, straight.avg_returns)


@pytest.mark.parametrize("initial", [10, 110])
def test_nothing_compiles_after_the_second_epoch(initial):
    # With 110 the learning begins in the third epoch.
    trainer = made(DQN, COUNTING, initial_collect_steps=initial, value_model=NORMALIZED, value_body=None)
    trainer.run(2)
    compiled = [trainer._run_epoch()["compilations"] for _ in range(3)]
    assert compiled == [compiled[0]] * 3


def test_the_replay_is_written_in_place():
    """A step that copied the replay would cost as much as the replay is long."""
    trainer = made(DQN, COUNTING, num_envs=1, replay_capacity=54_321)
    arguments = trainer._arguments()
    program = trainer._run_rows.lower(trainer.state, trainer._ring, *arguments).compile().as_text()
    assert "54322" in program
    assert re.findall(r"\[54322[^=]*copy\(", program) == []


def test_steps_that_others_take_in_between_make_no_transition():
    trainer = made(DQN, TRUNCATED)
    trainer.run(2)
    trainer.task.collect_trajectories(lambda _: (np.int32(1), np.zeros(2, np.float32)), n_interactions=3)
    trainer.run(1)
    observation, _, facts, _ = ring.to_rows(trainer._ring)
    mask = facts[:-1, :, 3] > 0
    np.testing.assert_array_equal(np.diff(observation[..., 2], axis=0)[mask], 1.0)
    assert mask.sum() > 100


def test_a_hook_of_numpy_keeps_the_host_path_and_says_so(caplog):
    def hook(steps):
        return steps._replace(observation=np.clip(np.array(steps.observation), 0, 1))

    task = RLTask(COUNTING, timestep_to_np=hook)
    with caplog.at_level(logging.WARNING):
        trainer = DQN(task, value_body=BODY, n_interactions_per_epoch=20)
        trainer.run(2)
    assert not trainer._on_device and task.n_interactions() == 30
    assert sum("timestep_to_np cannot be compiled" in x.getMessage() for x in caplog.records) == 1


@pytest.mark.parametrize(
    "arguments",
    [{"offline": True}, {"only_eval": True}, {"n_trajectories_per_epoch": 3}],
)
def test_other_epochs_are_the_hosts(arguments):
    task = RLTask(COUNTING, initial_trajectories=5)
    trainer = DQN(task, value_body=BODY, value_train_steps_per_epoch=7, **arguments)
    assert not trainer._on_device
    trainer.run(1)
    assert task.n_interactions() == (9 if "n_trajectories_per_epoch" in arguments else 0)


def test_the_best_action_is_found():
    trainer = made(DQN, MATCH, value_lr_schedule=1e-2)
    trainer.run(30)
    np.testing.assert_array_equal(trainer.evaluate(20).returns, np.ones(20))
