"""The replay on the device."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rl_trainers import ring
from rl_trainers.envs.probe import Counting
from rl_trainers.replay import Frames
from rl_trainers.types import EnvInfo, TimeStep


def rows(observation, mask, done=None):
    """Host rows ``[S, 1]`` whose action is the row's number."""
    mask = np.asarray(mask, np.float32)[:, None]
    number = np.arange(len(mask), dtype=np.int32)[:, None]
    done = np.zeros_like(mask, bool) if done is None else np.asarray(done, bool)[:, None]
    return TimeStep(
        observation=np.asarray(observation, np.float32)[:, None],
        action=number,
        reward=10.0 * number.astype(np.float32),
        terminated=done,
        truncated=np.zeros_like(done),
        mask=mask,
        env_info=EnvInfo(np.ones_like(mask), np.full_like(mask, 0.5)),
    )


NO_STACKS = Frames()


def added(steps, last, capacity, frames=NO_STACKS):
    """The same rows, put in one by one."""
    observation = [*steps.observation, np.asarray(last, np.float32)[None]]
    empty = jax.tree.map(lambda x: x[:0], steps)
    made = ring.create(empty, observation[0], capacity, frames)
    add = jax.jit(functools.partial(ring.add, frames=frames))
    for t, facts in enumerate(ring.pack(steps)):
        made = add(made, steps.action[t], facts, observation[t + 1])
    return made


EPISODES = rows([[0], [1], [2], [10], [11], [12], [13]], [1, 1, 0, 1, 1, 1, 1], [0, 1, 0, 0, 0, 0, 0])


def assert_same(one, other):
    for a, b in zip(jax.tree.leaves(ring.to_rows(one)), jax.tree.leaves(ring.to_rows(other)), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("capacity", [7, 9])
def test_rows_added_one_by_one_are_those_created_at_once(capacity):
    assert_same(added(EPISODES, [14], capacity), ring.create(EPISODES, np.array([[14.0]]), capacity))


def test_positions_begin_anew_after_a_reset_row():
    made = added(EPISODES, [14], 9)
    np.testing.assert_array_equal(ring.to_rows(made)[3][:, 0], [0, 1, 2, 0, 1, 2, 3, 4])


def test_the_oldest_rows_are_overwritten_and_the_order_stays():
    made = added(EPISODES, [14], 3)
    observation, action, facts, _ = ring.to_rows(made)
    np.testing.assert_array_equal(observation[:, 0, 0], [11, 12, 13, 14])
    np.testing.assert_array_equal(action[:-1, 0], [4, 5, 6])
    np.testing.assert_array_equal(facts[:-1, 0, 0], [40, 50, 60])
    assert int(made.size) == made.capacity == 3


def test_rows_survive_a_copy_out_and_in():
    made = added(EPISODES, [14], 4)
    assert_same(ring.from_rows(ring.to_rows(made), 4), made)


def test_copies_into_a_smaller_capacity_hold_the_newest_rows():
    made = ring.to_rows(added(EPISODES, [14], 6))
    smaller = ring.from_rows(made, 3)
    assert int(smaller.size) == smaller.capacity == 3
    for x, y in zip(made, ring.to_rows(smaller), strict=True):
        np.testing.assert_array_equal(x[-4:], y)


def test_stacks_do_not_reach_before_the_oldest_row_of_a_copy():
    frames = Frames(3, 0)
    stacks = np.array([[max(0, t - 2), max(0, t - 1), t] for t in range(8)], np.float32)
    steps = rows(stacks[:7], np.ones(7))
    made = added(steps, stacks[7], 4, frames)
    larger = ring.from_rows(ring.to_rows(made), 9)
    data = ring.sample(jnp.arange(4, dtype=jnp.uint32), larger, 1, frames)
    expected = [[3, 3, 3], [3, 3, 4], [3, 4, 5], [4, 5, 6]]
    np.testing.assert_array_equal(data.steps.observation[0], expected)


@pytest.mark.parametrize("capacity", [20, 5])
def test_samples_are_what_happened(capacity):
    made = added(EPISODES, [14], capacity)
    data = ring.sample(jax.random.bits(jax.random.PRNGKey(0), (200,)), made, 2)
    number = np.asarray(data.steps.action)
    followers = np.array([0, 1, 2, 10, 11, 12, 13, 14], np.float32)
    np.testing.assert_array_equal(number[1], number[0] + 1)
    np.testing.assert_array_equal(data.steps.observation[..., 0], followers[number])
    np.testing.assert_array_equal(data.last_observation[..., 0], followers[number[1] + 1])
    np.testing.assert_array_equal(data.steps.reward, 10 * number)
    np.testing.assert_array_equal(data.steps.mask, EPISODES.mask[number, 0])
    np.testing.assert_array_equal(data.steps.terminated, EPISODES.terminated[number, 0])
    np.testing.assert_array_equal(data.steps.env_info.discount_mask, np.full_like(number, 0.5, np.float32))
    assert set(number[0]) == set(range(max(0, 7 - capacity), 6))


def test_every_row_is_drawn_equally_often_terminal_ones_too():
    steps = rows(np.arange(7)[:, None], np.ones(7), [0, 0, 0, 0, 0, 0, 1])
    made = added(steps, [7], 7)
    data = ring.sample(jax.random.bits(jax.random.PRNGKey(1), (10_000,)), made, 1)
    counts = np.bincount(np.asarray(data.steps.action).ravel(), minlength=7)
    assert np.abs(counts - 10_000 / 7).max() < 150
    assert bool(data.steps.terminated.any())


def test_all_columns_are_drawn():
    steps = jax.tree.map(
        lambda x: np.concatenate([x, x + 100], 1) if x.dtype != bool else np.repeat(x, 2, 1), EPISODES
    )
    steps = steps._replace(mask=np.ones((7, 2), np.float32))
    made = ring.create(steps, np.array([[14.0], [114.0]]), 7)
    data = ring.sample(jax.random.bits(jax.random.PRNGKey(0), (4000,)), made, 1)
    number = np.asarray(data.steps.action)
    assert np.mean(number >= 100) == pytest.approx(0.5, abs=0.03)
    expected = np.array([0, 1, 2, 10, 11, 12, 13])[number % 100] + 100 * (number >= 100)
    np.testing.assert_array_equal(data.steps.observation[..., 0], expected)


@pytest.mark.parametrize("capacity", [40, 12])
def test_frames_are_stored_once_and_stacked_as_the_environment_did(capacity):
    """Two episodes of 5 steps and one of many; the stack repeats an episode's first frame."""
    frames = Frames(depth=3, axis=0)
    env, stacks, mask = Counting(5), [], []
    for t in range(24):
        if t % 6 == 0:
            stack = [env.reset()[0]] * 3
        else:
            stack = [*stack[1:], env.step(0)[0]]
        stacks.append(np.stack(stack))
        mask.append(t % 6 != 5)
    steps = rows(np.zeros((23, 1)), mask[:23])._replace(observation=np.stack(stacks)[:23, None])
    made = ring.create(jax.tree.map(lambda x: x[:0], steps), stacks[0][None], capacity, frames)
    add = jax.jit(functools.partial(ring.add, frames=frames))
    for t, facts in enumerate(ring.pack(steps)):
        made = add(made, steps.action[t], facts, stacks[t + 1][None])
    assert made.observation.shape == (capacity + 1, 1, 3)
    data = ring.sample(jax.random.bits(jax.random.PRNGKey(0), (500,)), made, 1, frames)
    number = np.asarray(data.steps.action)[0]
    np.testing.assert_array_equal(data.steps.observation[0], np.stack(stacks)[number])
    np.testing.assert_array_equal(data.last_observation, np.stack(stacks)[number + 1])
    # Of a full ring the two oldest rows are not drawn, whose older frames are gone.
    assert number.min() == (0 if capacity == 40 else 23 - 12 + 2)


def test_a_restart_drops_the_step_whose_successor_is_unknown():
    made = ring.restart(added(EPISODES, [14], 9), np.array([[99.0]], np.float32))
    observation, _, facts, position = ring.to_rows(made)
    np.testing.assert_array_equal(facts[:, 0, 3], [1, 1, 0, 1, 1, 1, 0, 0])
    assert observation[-1, 0, 0] == 99 and position[-1, 0] == 0
    same = ring.restart(added(EPISODES, [14], 9), np.array([[14.0]], np.float32))
    assert_same(same, added(EPISODES, [14], 9))


def test_images_stay_bytes():
    steps = rows(np.zeros((3, 1)), [1, 1, 1])
    steps = steps._replace(observation=np.full((3, 1, 4, 4, 4), 255, np.uint8))
    made = ring.create(steps, np.zeros((1, 4, 4, 4), np.uint8), 1000, Frames(depth=4, axis=-1))
    assert made.observation.dtype == jnp.uint8 and made.observation.nbytes == 1001 * 16
