"""The step metrics, on rollouts made by hand."""

import numpy as np
import pytest

from rl_trainers import checkpoint
from rl_trainers.drivers import (
    AverageEpisodeLength,
    AverageReturn,
    EnvironmentSteps,
    NumberOfEpisodes,
    standard_metrics,
)
from rl_trainers.drivers.metrics import in_order
from rl_trainers.envs import make_host_env, probe
from rl_trainers.rollout import initial_actor, unroll_host
from rl_trainers.types import Rollout, TimeStep

KINDS = [NumberOfEpisodes, EnvironmentSteps, AverageReturn, AverageEpisodeLength]


def rollout(*columns):
    """One column per environment; numbers are rewards, ``.`` and ``|`` end episodes, ``_`` is a reset row."""
    rows = [column.split() for column in columns]
    terminated, truncated, reset = (
        np.array([[row[-1] == sign for row in column] for column in rows]).T for sign in ".|_"
    )
    reward = np.array([[float(row.strip(".|_") or 0) for row in column] for column in rows]).T
    steps = TimeStep(np.zeros_like(reward), None, reward, terminated, truncated, (~reset).astype(np.float32))
    return Rollout(steps, np.zeros(len(columns)))


def results(*unrolls, metrics=None):
    metrics = metrics or standard_metrics(1)
    for data, env_id in unrolls:
        for metric in metrics:
            metric(data, np.array(env_id))
    return [metric.result() for metric in metrics]


def test_the_four_have_their_names_and_are_0_before_anything_was_seen():
    metrics = standard_metrics(3)
    assert [m.name for m in metrics] == [
        "NumberOfEpisodes",
        "EnvironmentSteps",
        "AverageReturn",
        "AverageEpisodeLength",
    ]
    assert [m.result() for m in metrics] == [0, 0, 0.0, 0.0]
    assert results((rollout("1 2 3"), [0])) == [0, 3, 0.0, 0.0]


def test_reset_rows_are_no_steps_and_a_first_and_three_more_make_a_length_of_4():
    assert results((rollout("1 1 1 7. _ 5"), [0])) == [1, 5, 10.0, 4.0]


def test_terminated_and_truncated_episodes_both_count():
    assert results((rollout("1 2. _ 4 4 4| _", "6. _ 9 9 9 9 9"), [0, 1])) == [3, 11, 7.0, 2.0]


def test_an_episode_spans_unrolls_of_any_length():
    unrolls = [(rollout("1"), [4]), (rollout("2 3"), [4]), (rollout("4. _ 1 1"), [4]), (rollout("1."), [4])]
    assert results(*unrolls) == [2, 7, (10 + 3) / 2, (4 + 3) / 2]


def test_unrolls_of_different_environments_come_in_any_order():
    a = [(rollout("1 1 1", "2 2 2"), [0, 1]), (rollout("1 1. _", "2. _ 2"), [0, 1])]
    b = [(rollout("5 5 5"), [7]), (rollout("5 5 5"), [7]), (rollout("5. _ 5"), [7])]
    apart = [results(*a), results(*b)]
    assert apart == [[2, 10, 6.5, 4.5], [1, 8, 35.0, 7.0]]
    # Returns: 5 of environment 0, 8 of environment 1, 35 of environment 7; lengths 5, 4 and 7.
    whole = [3, 18, 16.0, 16 / 3]
    assert results(*a, *b) == whole
    assert results(b[0], a[0], b[1], a[1], b[2]) == whole
    assert results(b[0], b[1], a[0], b[2], a[1]) == whole


def test_columns_are_told_apart_by_their_numbers_and_not_by_their_places():
    first, second = rollout("1 1", "2 2"), rollout("2. _", "1. _")
    assert results((first, [3, 8]), (second, [8, 3])) == [2, 6, (6 + 3) / 2, 3.0]


def test_a_repeated_number_means_unrolls_that_follow_one_another():
    together = rollout("1 1", "9 9", "1. _", "9 9.")
    assert results((together, [0, 1, 0, 1])) == [2, 7, (3 + 36) / 2, 3.5]
    assert [c.tolist() for c in in_order(np.array([5, 2, 5, 5, 2]))] == [[0, 1], [2, 4], [3]]


def test_averages_are_of_the_newest_episodes():
    metrics = [AverageReturn(2), AverageEpisodeLength(2)]
    assert results((rollout("8. _ 1 1. _ 4. _"), [0]), metrics=metrics) == [3.0, 1.5]
    many = rollout(*(f"{i}." for i in range(12)))
    assert results((many, range(12)), metrics=[standard_metrics(1)[2]]) == [6.5]  # the newest 10
    assert results((many, range(12)), metrics=[standard_metrics(12)[2]]) == [5.5]
    with pytest.raises(ValueError, match="window: must be >= 1, got 0"):
        AverageReturn(0)


@pytest.mark.parametrize("kind", KINDS)
def test_saved_metrics_go_on_where_they_were(kind, tmp_path):
    def through_a_checkpoint(metric, step):
        checkpoint.save(tmp_path, step, {"step": step, "metric": metric.state_dict()})
        names = dict.fromkeys(metric.state_dict(), checkpoint.ANY)
        return checkpoint.restore(tmp_path, {"step": 0, "metric": names})[1]["metric"]

    new = kind()
    new.load_state_dict(through_a_checkpoint(new, 0))
    assert new.result() == 0
    first, second = (rollout("3. _ 1", "2 2 2"), [0, 1]), (rollout("1. _ 1", "2. _ 2"), [0, 1])
    straight = kind()
    results(first, metrics=[straight])
    saved, at_half = through_a_checkpoint(straight, 1), straight.result()
    results(second, metrics=[straight])
    other = kind()
    results((rollout("5. _ 5"), [9]), metrics=[other])
    other.load_state_dict(saved)
    assert other.result() == at_half
    assert results(second, metrics=[other]) == [straight.result()] != [at_half]
    # An environment that was not there before:
    assert results((rollout("7. _"), [20]), metrics=[other]) != [straight.result()]


@pytest.mark.parametrize("kind", KINDS)
def test_a_metric_that_was_reset_is_as_new(kind):
    metric = kind()
    results((rollout("3. _ 1"), [0]), metrics=[metric])
    metric.reset()
    assert metric.result() == 0
    assert results((rollout("1. _ 1"), [0]), metrics=[metric]) == results(
        (rollout("1. _ 1"), [0]), metrics=[kind()]
    )


def test_restarted_environments_begin_their_episodes_anew():
    metrics = standard_metrics(1)
    results((rollout("100 100", "1 1"), [0, 1]), metrics=metrics)
    for metric in metrics:
        metric.restart(np.array([0, 30]))
    assert results((rollout("5. _", "1. _"), [0, 1]), metrics=metrics) == [2, 6, 4.0, 2.0]


@pytest.mark.parametrize("unroll_length", [1, 7, 10])
def test_a_fixed_length_environment(unroll_length):
    env = make_host_env(lambda: probe.FixedLength(5), 2)
    observation = env.reset(0)
    actor, metrics = initial_actor(observation, 2, ()), standard_metrics(2)

    def act(observation, policy_state, needs_reset, key):
        return np.zeros(2, np.int64), None, policy_state, key

    for _ in range(50 // unroll_length):
        actor, data, _ = unroll_host(env, act, actor, unroll_length)
        results((data, [0, 1]), metrics=metrics)
    rows = 50 // unroll_length * unroll_length
    # Four of five rows are steps; the last one may be part of an episode.
    steps = 2 * (rows // 5 * 4 + rows % 5)
    assert [m.result() for m in metrics] == [2 * ((rows + 1) // 5), steps, 4.0, 4.0]
