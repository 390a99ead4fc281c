"""The probe environments have the values that their docstrings state."""

import functools

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
    rewards = [episode(probe.ActionReward(True), lambda o, a=a: np.array([a]))[1][0] for a in (0.5, -0.5)]
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


def test_fixed_length_counts_the_observation_after_the_last_decision():
    assert episode(probe.FixedLength(5), lambda o: 0) == ([1.0] * 4, [1.0] * 4, (True, False))
    assert episode(probe.FixedLength(2, continuous=True), lambda o: np.ones(1)) == ([1], [1], (True, False))


@pytest.mark.parametrize("seed", range(3))
def test_fixed_length_policy_pays_for_the_observation_that_was_seen(seed):
    env = probe.FixedLengthPolicy(13)
    seen, rewards, ends = episode(env, lambda o: 1, seed)
    assert rewards == seen and set(seen) == {0.0, 1.0} and (len(seen), ends) == (12, (True, False))
    assert episode(env, lambda o: int(o[0]), seed)[1] == [1.0] * 12
    assert episode(env, lambda o: 1 - int(o[0]), seed)[1] == [0.0] * 12
    env = probe.FixedLengthPolicy(13, continuous=True)
    seen, rewards, _ = episode(env, lambda o: np.array([0.75]), seed)
    assert rewards == [0.75 if o else 0.25 for o in seen]


@pytest.mark.parametrize("seed", range(3))
def test_fixed_length_memory_pays_after_the_gap(seed):
    env = probe.FixedLengthMemory(6, 3)  # steps 0 to 5; paid are the decisions of steps 3 and 4
    for action in (0, 1):
        seen, rewards, ends = episode(env, lambda o, a=action: a, seed)
        right = float(seen[0] == 2 * action - 1)
        assert seen[1:] == [0.0] * 4 and abs(seen[0]) == 1 and ends == (True, False)
        assert rewards == [0.0, 0.0, 0.0, right, right]
    seen, rewards, _ = episode(
        probe.FixedLengthMemory(5, 3, continuous=True), lambda o: np.array([0.75]), seed
    )
    assert rewards == [0.0, 0.0, 0.0, 0.75 if seen[0] == 1 else 0.25]


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda: probe.FixedLength(1), "episode_length: must be >= 2, got 1"),
        (lambda: probe.FixedLengthMemory(5, 4), r"gap: must be 0\.\.3, got 4; the nearest valid value is 3"),
        (lambda: probe.FixedLengthMemory(5, -1), "gap: .* the nearest valid value is 0"),
    ],
)
def test_lengths_that_leave_nothing_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


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
        functools.partial(probe.FixedLength, 3),
        functools.partial(probe.FixedLengthPolicy, 3),
        functools.partial(probe.FixedLengthMemory, 5, 3),
    ],
)
def test_observations_and_actions_fit_their_spaces(kind, continuous):
    env = kind(continuous=continuous)
    observation, _ = env.reset(seed=0)
    assert env.observation_space.contains(observation)
    observation, reward, *_ = env.step(env.action_space.sample())
    assert env.observation_space.contains(observation) and isinstance(reward, float)
