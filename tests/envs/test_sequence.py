"""Environments made of data: what they show, pay and tell, and that every trainer heeds it."""

import functools

import jax
import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env

from rl_trainers import (
    A2C,
    AWR,
    PPO,
    A2CJoint,
    AWRJoint,
    ExpertIteration,
    PolicyGradient,
    PPOJoint,
    RLTask,
    advantages,
    models,
)
from rl_trainers.envs import Memory, SequenceDataEnv, copy_stream, make_host_env
from rl_trainers.policy_trainer import best_trajectories
from rl_trainers.types import EnvInfo, TimeStep


def copying(length=2, vocab_size=16, n=1, **kwargs):
    return SequenceDataEnv(copy_stream(length, n=n), vocab_size, **kwargs)


def masks(info):
    return info["control_mask"], info["discount_mask"]


def test_a_right_copy_pays_1():
    env = copying()
    x1, _ = env.reset(seed=0)
    x2, *step = env.step(0)
    assert step == [0.0, False, False, {"control_mask": 0, "discount_mask": 0}]
    eos, reward, terminated, _, info = env.step(0)
    assert (eos, reward, terminated, masks(info)) == (1, 0.0, False, (0, 0))
    y1, reward, terminated, _, info = env.step(x1)
    assert (y1, reward, terminated, masks(info)) == (x1, 0.0, False, (1, 0))
    y2, reward, terminated, _, info = env.step(x2)
    assert (y2, reward, terminated, masks(info)) == (x2, 0.0, False, (1, 0))
    eos, reward, terminated, truncated, info = env.step(1)
    assert (eos, reward, terminated, truncated, masks(info)) == (1, 1.0, True, False, (1, 1))
    # After the end nothing happens any more.
    eos, reward, terminated, truncated, info = env.step(5)
    assert (eos, reward, terminated, truncated, masks(info)) == (1, 0.0, True, False, (0, 0))


def test_each_output_is_paid_for_its_right_tokens():
    env = copying(n=2)
    x1, _ = env.reset(seed=0)
    x2, *_ = env.step(0)
    env.step(0)
    env.step(x1)
    env.step(x2 + 1)
    y1, reward, terminated, *_ = env.step(1)
    assert (reward, terminated) == (0.5, False)
    y2, *_ = env.step(0)
    env.step(0)
    env.step(y1 + 1)
    env.step(y2 + 1)
    eos, reward, terminated, *_ = env.step(1)
    assert (eos, reward, terminated) == (1, 0.0, True)


def test_spaces_are_tokens():
    assert copying().action_space.n == copying().observation_space.n == 16
    check_env(copying(), skip_render_check=True)


def test_max_length_ends_a_reply():
    env = copying(10, max_length=2)
    env.reset(seed=0)
    for _ in range(10):
        observation, reward, terminated, *_ = env.step(0)
        assert (reward, terminated) == (0.0, False)
    assert observation == 1
    for action in (7, 8):
        observation, reward, terminated, *_ = env.step(action)
        assert (observation, reward, terminated) == (action, 0.0, False)
    for action in (9, 10):
        observation, _, terminated, *_ = env.step(action)
        assert (observation, terminated) == (1, True)


def test_number_of_masks():
    given, wanted = 2 * np.ones(4), np.zeros(5)
    env = SequenceDataEnv(iter([(given, wanted, given, wanted, given)]), 16, max_length=5)
    env.reset()
    infos, terminated = [], False
    while not terminated:
        *_, terminated, _, info = env.step(0)
        infos.append(masks(info))
    control, discount = np.sum(infos, axis=0)
    assert discount == 2 and control == (5 + 1) * 2
    assert len(infos) - control == 4 * 3


def test_the_metric_sees_the_reply_without_its_end():
    seen = []
    env = SequenceDataEnv(iter([[(2, 3), (4, 5)]]), 8, metric=lambda *pair: seen.append(pair) or 0.25)
    env.reset()
    for action in (0, 0, 4, 6):
        env.step(action)
    assert env.step(1)[1] == 0.25
    assert seen == [([4, 6], [4, 5])]


@pytest.mark.parametrize(
    "error, words, make",
    [
        (ValueError, "eos_id=16.*vocab_size=16.*15", lambda: copying(eos_id=16)),
        (ValueError, "max_length=-1", lambda: copying(max_length=-1)),
        (TypeError, "data_stream", lambda: SequenceDataEnv([1, 2], 16)),
        (ValueError, "high=2 .*3", lambda: copy_stream(2, 2, 2)),
        (ValueError, "length=0 .*1", lambda: copy_stream(0)),
        (ValueError, "vocab_size=8", lambda: SequenceDataEnv(iter([[(9,), (1,)]]), 8).reset()),
    ],
)
def test_mistakes_are_named(error, words, make):
    with pytest.raises(error, match=words):
        make()


def test_a_seed_gives_the_same_episodes_and_environments_have_their_own():
    streams = functools.partial(SequenceDataEnv, functools.partial(copy_stream, 4, high=1000), 1000)
    envs = [make_host_env(streams, 3) for _ in range(2)]
    first = [env.reset(5) for env in envs]
    assert first[0].tolist() == first[1].tolist() and len(set(first[0].tolist())) == 3
    for _ in range(30):
        rows = [env.step(np.ones(3, np.int64))[0].tolist() for env in envs]
        assert rows[0] == rows[1]
    assert envs[0].reset(6).tolist() != first[0].tolist()


@pytest.mark.parametrize("make", [Memory, copying], ids=["memory", "copy"])
def test_an_episode_goes_on_from_a_snapshot(make):
    straight, resumed = make_host_env(make, 2), make_host_env(make, 2)
    straight.reset(1)
    actions = np.random.default_rng(0).integers(0, 2, (40, 2))
    for action in actions[:17]:
        straight.step(action)
    assert resumed.restore(straight.snapshot())
    for action in actions[17:]:
        one, other = straight.step(action), resumed.step(action)
        jax.tree.map(np.testing.assert_array_equal, one, other)


def test_what_comes_last_is_what_was_shown_first():
    env = Memory()
    for seed in range(4):
        observation, _ = env.reset(seed=seed)
        cue, rows = observation[0], [observation.tolist()]
        for _ in range(4):
            observation, reward, done, *_ = env.step(0)
            rows.append(observation.tolist())
            assert (reward, done) == (0.0, False)
        rows.append(env.step(0)[0].tolist())
        assert rows == [[cue, 0], [0, 0], [0, 0], [0, 0], [0, 0], [0, 1]]
        action = seed % 2
        _, reward, terminated, truncated, _ = env.step(action)
        assert reward == float((action == 1) == (cue > 0)) and terminated and not truncated


BODY = functools.partial(models.MLP, layer_widths=(8,))
POLICY = functools.partial(models.Policy, body=BODY)
VALUE = functools.partial(models.Value, body=BODY)
JOINT = functools.partial(models.PolicyAndValue, body=BODY)
APART = {
    "policy_model": POLICY,
    "policy_train_steps_per_epoch": 4,
    "value_model": VALUE,
    "value_train_steps_per_epoch": 4,
    "n_interactions_per_epoch": 40,
}
TOGETHER = {"joint_model": JOINT, "train_steps_per_epoch": 4, "n_interactions_per_epoch": 40}
VTRACE = {"advantage_estimator": advantages.vtrace}
EXPERT = {"model_fn": POLICY, "n_train_steps_per_epoch": 4, "n_trajectories_per_epoch": 8, "quantile": 0.5}
TRAINERS = {
    "PolicyGradient": (PolicyGradient, {"model_fn": POLICY}),
    "ExpertIteration": (ExpertIteration, EXPERT),
    "PPO": (PPO, APART),
    "A2C": (A2C, APART),
    "AWR": (AWR, APART | VTRACE),
    "PPOJoint": (PPOJoint, TOGETHER),
    "A2CJoint": (A2CJoint, TOGETHER),
    "AWRJoint": (AWRJoint, TOGETHER | VTRACE),
}


@pytest.mark.parametrize("name", TRAINERS)
def test_actions_without_effect_change_no_gradient(name):
    make, arguments = TRAINERS[name]

    def trained(replaced):
        task = RLTask(lambda: copying(n=2, max_length=2), num_envs=2, initial_trajectories=8, seed=2)
        trainer = make(task, **arguments)
        data, *_ = trainer._collect()
        steps = data.steps
        ignored = steps.env_info.control_mask == 0
        assert 0 < ignored[steps.mask > 0].mean() < 1
        other = np.random.default_rng(0).integers(0, 16, steps.action.shape).astype(steps.action.dtype)
        if replaced:
            steps = steps._replace(action=np.where(ignored, other, steps.action))
            assert (steps.action != data.steps.action).any()
        before = jax.tree.map(np.array, trainer.state.params)
        trainer.train_epoch(data._replace(steps=steps))
        moved = jax.tree.map(lambda x, y: np.abs(x - y).max(), before, trainer.state.params)
        assert max(jax.tree.leaves(moved)) > 0
        return trainer.state.params

    jax.tree.map(np.testing.assert_array_equal, trained(True), trained(False))


def in_one_column(reward, discount_mask, done):
    column = [np.asarray(x, np.float32)[:, None] for x in (reward, discount_mask, done)]
    ones = np.ones_like(column[0])
    end, no = column[2] > 0, np.zeros(ones.shape, bool)
    return TimeStep((), (), column[0], end, no, ones, env_info=EnvInfo(ones, column[1]))


@pytest.mark.parametrize(
    "estimator", [advantages.monte_carlo(0.5), advantages.td_lambda(0.5, 1.0), advantages.td_k(0.5, 6)]
)
def test_no_discount_where_no_time_passes(estimator):
    three = in_one_column([0, 0, 1], [0, 0, 1], [0, 0, 0])
    ones = np.ones((3, 1), np.float32)
    assert estimator(three, np.zeros((4, 1), np.float32), ones)[:, 0].tolist() == [1, 1, 1]
    six = in_one_column([0, 0, 1, 0, 0, 1], [0, 0, 1, 0, 0, 1], [0, 0, 0, 0, 0, 1])
    targets = estimator(six, np.zeros((7, 1), np.float32), np.ones((6, 1), np.float32))
    assert targets[:, 0].tolist() == [1.5, 1.5, 1.5, 1, 1, 1]


def test_the_best_trajectories_are_so_without_discount_where_no_time_passes():
    # Returns with gamma 0.5: 1 (after two steps without time), and 0.8; with time in each step 0.25 and 0.8.
    steps = in_one_column([0, 0, 1, 0.8], [0, 0, 1, 1], [0, 0, 1, 1])
    chosen = best_trajectories(steps, 0.5, 0.5, 256, np.random.default_rng(0))
    assert chosen[:, 0].tolist() == [1, 1, 1, 0]
    steps = in_one_column([0, 0, 1, 0.8], [1, 1, 1, 1], [0, 0, 1, 1])
    chosen = best_trajectories(steps, 0.5, 0.5, 256, np.random.default_rng(0))
    assert chosen[:, 0].tolist() == [0, 0, 0, 1]
