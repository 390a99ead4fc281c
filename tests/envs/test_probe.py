"""The probe environments have the values that their docstrings state."""

import numpy as np
import pytest

from rl_trainers.envs import probe


def episode(env, act, seed=0):
    """Observations, rewards and the end of one episode."""
    observation, _ = env.reset(seed=seed)
    seen, rewards = [observation], []
    while True:
        observation, reward, terminated, truncated, _ = env.step(act(observation))
        rewards.append(reward)
        if terminated or truncated:
            return np.concatenate(seen).tolist(), rewards, (terminated, truncated)
        seen.append(observation)


def test_constant_reward():
    assert episode(probe.ConstantReward(), lambda o: 0) == ([0.0], [1.0], (True, False))


def test_observation_reward_is_the_observation_and_takes_both_values():
    runs = [episode(probe.ObservationReward(), lambda o: 0, seed) for seed in range(20)]
    assert all(seen == rewards for seen, rewards, _ in runs)
    assert {rewards[0] for _, rewards, _ in runs} == {-1.0, 1.0}


def test_delayed_reward():
    assert episode(probe.DelayedReward(), lambda o: 1) == ([0.0, 1.0], [0.0, 1.0], (True, False))


def test_action_reward():
    assert [episode(probe.ActionReward(), lambda o, a=a: a)[1][0] for a in (0, 1)] == [-1, 1]
    rewards = [
        episode(probe.ActionReward(True), lambda o, a=a: np.array([a]))[1][0] for a in (0.5, -0.5)
    ]
    assert rewards == [1.0, 0.0]


@pytest.mark.parametrize("seed", range(6))
def test_action_and_observation_reward(seed):
    env = probe.ActionAndObservationReward()
    assert episode(env, lambda o: int(o[0] > 0), seed)[1] == [1.0]
    assert episode(env, lambda o: int(o[0] < 0), seed)[1] == [-1.0]
    env = probe.ActionAndObservationReward(continuous=True)
    assert episode(env, lambda o: 0.5 * o, seed)[1] == [1.0]
    assert episode(env, lambda o: -0.5 * o, seed)[1] == [0.0]


def test_endless_counts_its_steps():
    env = probe.Endless()
    assert env.reset(seed=0)[0].tolist() == [0]
    rows = [env.step(0) for _ in range(1000)]
    assert [row[0][0] for row in rows] == list(range(1, 1001))
    assert all(row[1:4] == (1.0, False, False) for row in rows)


def test_counting():
    env = probe.Counting(2, env_id=7, truncates=True)
    assert episode(env, lambda o: 0) == ([7, 0, 0, 7, 0, 1], [1.0, 2.0], (False, True))
    assert episode(env, lambda o: 0)[0] == [7, 1, 0, 7, 1, 1]


@pytest.mark.parametrize("continuous", [False, True])
@pytest.mark.parametrize(
    "kind",
    [
        probe.ConstantReward,
        probe.ObservationReward,
        probe.DelayedReward,
        probe.ActionReward,
        probe.ActionAndObservationReward,
        probe.Endless,
    ],
)
def test_observations_and_actions_fit_their_spaces(kind, continuous):
    env = kind(continuous)
    observation, _ = env.reset(seed=0)
    assert env.observation_space.contains(observation)
    observation, reward, *_ = env.step(env.action_space.sample())
    assert env.observation_space.contains(observation) and isinstance(reward, float)
