"""The trajectory replay: order, successors, returns, draws, sizes."""


import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gymnasium.spaces import Box
from gymnasium.vector import SyncVectorEnv
from gymnasium.wrappers import FrameStackObservation, TransformObservation

from rl_trainers import replay as replay_lib
from rl_trainers import rollout as rollout_lib
from rl_trainers.envs.host import make_host_env
from rl_trainers.envs.probe import Counting
from rl_trainers.replay import Frames
from rl_trainers.types import EnvInfo, Rollout, TimeStep


class Player:
    """Counting environments and a replay; observations are (env id, episode, t), rewards t."""

    def __init__(self, *lengths, capacity=1, **settings):
        venv = SyncVectorEnv([lambda n=n, i=i: Counting(n, i) for i, n in enumerate(lengths)])
        self.env = make_host_env(venv)
        key = np.zeros(2, np.uint32)
        self.actor = rollout_lib.initial_actor(self.env.reset(0), self.env.num_envs, key)
        self.settings = {"gamma": 0.5, **settings}
        self.replay = None
        self.capacity = capacity

    def play(self, length, epoch=0, pad=0):
        self.actor, rollout, _ = rollout_lib.unroll_host(self.env, self.act, self.actor, length)
        if self.replay is None:
            self.replay = replay_lib.create(first_row(rollout.steps), self.capacity)
        rollout = rollout_lib.pad(rollout, length + pad)
        self.replay = replay_lib.add(self.replay, rollout, epoch, **self.settings)
        return rollout

    def row(self):
        """A row to create a replay with."""
        ones = np.ones(self.env.num_envs, np.float32)
        row = first_row(make_rollout([0.0], False).steps)
        row = jax.tree.map(lambda x: np.repeat(x, self.env.num_envs, 0), row)
        return row._replace(observation=self.actor.observation, action=ones.astype(np.int64))

    def act(self, observation, policy_state, needs_reset, key):
        return np.zeros(self.env.num_envs, np.int64), None, policy_state, key


def first_row(steps):
    return jax.tree.map(lambda x: x[0], steps)


def make_rollout(rewards, done, discount_mask=None):
    """One environment; observations count from 0."""
    rewards = np.asarray(rewards)[:, None]
    n = len(rewards)
    ones = np.ones((n, 1), np.float32)
    mask = ones if discount_mask is None else np.asarray(discount_mask, np.float32)[:, None]
    steps = TimeStep(
        observation=np.arange(n, dtype=np.float32)[:, None],
        action=np.zeros((n, 1), np.int32),
        reward=rewards,
        terminated=np.arange(n)[:, None] == (n - 1 if done else n),
        truncated=np.zeros((n, 1), bool),
        mask=ones,
        env_info=EnvInfo(ones, mask),
    )
    return Rollout(steps, np.full(1, n, np.float32))


def stored(rollouts, epochs=None, capacity=1, **settings):
    row = first_row(rollouts[0].steps)
    replay = replay_lib.create(row._replace(reward=row.reward.astype(np.float32)), capacity)
    for i, rollout in enumerate(rollouts):
        epoch = i if epochs is None else epochs[i]
        replay = replay_lib.add(replay, rollout, epoch, **{"gamma": 0.5, **settings})
    return replay


def test_returns_reach_back_into_earlier_rollouts():
    player = Player(3)
    player.play(2)
    # Rewards 1, 2 are known: 1 + 2/2 and 2.
    np.testing.assert_allclose(replay_lib.ordered(player.replay).steps.return_[:2, 0], [2.0, 2.0])
    player.play(2)
    # Reward 3 ends the episode: 3, 2 + 3/2, 1 + 3.5/2; then the reset row.
    steps = replay_lib.ordered(player.replay).steps
    np.testing.assert_allclose(steps.return_[:4, 0], [2.75, 3.5, 3.0, 0.0])
    np.testing.assert_array_equal(steps.mask[:4, 0], [1, 1, 1, 0])
    player.play(5)
    steps = replay_lib.ordered(player.replay).steps
    np.testing.assert_allclose(steps.return_[:9, 0], [2.75, 3.5, 3, 0, 2.75, 3.5, 3, 0, 1.0])


def test_returns_of_environments_with_different_ends():
    player = Player(2, 3)
    for _ in range(4):
        player.play(1)
    returns = replay_lib.ordered(player.replay).steps.return_[:4]
    np.testing.assert_allclose(returns[:, 0], [2.0, 2.0, 0.0, 1.0])
    np.testing.assert_allclose(returns[:, 1], [2.75, 3.5, 3.0, 0.0])


def test_returns_skip_gamma_where_no_time_passes():
    mask = [0, 0, 1, 0, 0, 1]
    replay = stored([make_rollout([0, 0, 1.0, 0, 0, 1.0], True, mask)])
    returns = replay_lib.ordered(replay).steps.return_[:6, 0]
    np.testing.assert_allclose(returns, [1.5, 1.5, 1.5, 1, 1, 1])


@pytest.mark.parametrize("dtype", [np.int64, np.uint8, bool])
def test_returns_of_integer_rewards_are_not_rounded(dtype):
    replay = stored([make_rollout(np.ones(3, dtype), True)], gamma=0.9)
    returns = replay_lib.ordered(replay).steps.return_
    assert returns.dtype == np.float32
    np.testing.assert_allclose(returns[:3, 0], [2.71, 1.9, 1.0], rtol=1e-6)


def test_max_steps_cuts_trajectories_but_not_returns_of_the_next():
    player = Player(5, max_steps=2)
    player.play(3)
    player.play(3)
    found = replay_lib.segments(player.replay)
    np.testing.assert_array_equal(found.age, [0, 2, 4])
    np.testing.assert_array_equal(found.length, [2, 2, 1])
    # Pieces (1, 2), (3, 4), (5): 1 + 2/2, 2, 3 + 4/2, 4, 5.
    returns = replay_lib.ordered(player.replay).steps.return_[:5, 0]
    np.testing.assert_allclose(returns, [2, 2, 5, 4, 5])


def test_ordered_keeps_its_shape_and_order_in_a_ring():
    player = Player(100, 100, capacity=4, grow=False)
    for epoch in range(3):
        player.play(3, epoch)
        rollout = replay_lib.ordered(player.replay)
        assert rollout.steps.mask.shape == (4, 2)
    np.testing.assert_array_equal(rollout.steps.observation[:, 0, 2], [5, 6, 7, 8])
    np.testing.assert_array_equal(rollout.last_observation[:, 2], [9, 9])
    np.testing.assert_array_equal(rollout.steps.mask, 1)
    assert replay_lib.epoch_ids(player.replay) == [1, 2]
    newest = replay_lib.ordered(player.replay, [2]).steps.mask
    np.testing.assert_array_equal(newest[:, 0], [0, 1, 1, 1])


def test_a_rollout_longer_than_the_ring_keeps_its_newest_rows():
    player = Player(100, capacity=4, grow=False)
    player.play(2)
    player.play(9)
    rollout = replay_lib.ordered(player.replay)
    np.testing.assert_array_equal(rollout.steps.observation[:, 0, 2], [7, 8, 9, 10])
    # Rewards 8, 9, 10, 11: 11, 10 + 11/2, 9 + 15.5/2, 8 + 16.75/2.
    np.testing.assert_allclose(rollout.steps.return_[:, 0], [16.375, 16.75, 15.5, 11.0])


def test_capacity_doubles_and_rows_after_the_newest_are_masked():
    player = Player(100)
    for _ in range(5):
        player.play(3)
    rollout = replay_lib.ordered(player.replay)
    np.testing.assert_array_equal(rollout.steps.observation[:16, 0, 2], range(16))
    np.testing.assert_array_equal(rollout.steps.mask[:, 0], [1] * 15 + [0])


def test_padding_is_not_stored_but_reset_rows_are():
    player = Player(3)
    player.play(2, pad=2)
    assert player.replay.size == 2
    player.play(1, pad=1)
    assert player.replay.size == 3
    player.play(1, pad=4)
    player.play(1)
    found = replay_lib.segments(player.replay)
    np.testing.assert_array_equal(found.length, [3, 1])
    steps = replay_lib.ordered(player.replay).steps
    np.testing.assert_array_equal(steps.observation[3, 0], [0, 0, 3])
    np.testing.assert_array_equal(steps.mask[3, 0], 0)


def test_a_rollout_from_elsewhere_does_not_continue_the_trajectory():
    replay = stored([make_rollout([1.0, 1.0], False), make_rollout([4.0, 4.0], False)])
    found = replay_lib.segments(replay)
    np.testing.assert_array_equal(found.length, [2, 2])
    steps = replay_lib.ordered(replay).steps
    # The row between them holds the successor, observation 2.
    np.testing.assert_array_equal(steps.observation[:5, 0], [0, 1, 2, 0, 1])
    np.testing.assert_array_equal(steps.mask[:5, 0], [1, 1, 0, 1, 1])
    np.testing.assert_allclose(steps.return_[:5, 0], [1.5, 1.0, 0.0, 6.0, 4.0])


def test_remove_frees_old_rows_and_splits_trajectories():
    player = Player(100)
    for epoch in range(4):
        player.play(2, epoch)
    replay = replay_lib.remove(player.replay, player.replay.epoch == 2)
    np.testing.assert_array_equal(replay_lib.segments(replay).length, [4, 2])
    drawn = replay_lib.sample_slices(np.random.default_rng(0), replay, 200, 4, 3)
    assert set(drawn.steps.observation[:, 0, 2].astype(int)) == {0, 1, 2, 3, 6, 7}
    from_3 = drawn.steps.observation[:, 0, 2] == 3
    np.testing.assert_array_equal(drawn.steps.mask[from_3][0], [1, 0, 0, 0])
    replay = replay_lib.remove(replay, replay.epoch < 3)
    assert replay.size == 2
    assert replay_lib.epoch_ids(replay) == [3]


@pytest.mark.parametrize("margin, n_starts", [(1, 7), (0, 6)])
def test_every_transition_starts_slices_equally_often(margin, n_starts):
    replay = stored([make_rollout(np.arange(7.0), True)])
    drawn = replay_lib.sample_slices(np.random.default_rng(0), replay, 10_000, 2, margin)
    counts = np.bincount(drawn.steps.observation[:, 0].astype(int), minlength=7)
    expected = np.where(np.arange(7) < n_starts, 10_000 / n_starts, 0)
    np.testing.assert_allclose(counts, expected, atol=150)
    last = drawn.steps.observation[:, 0] == 6
    np.testing.assert_array_equal(drawn.steps.mask[last], np.tile([1, 0], (last.sum(), 1)))
    np.testing.assert_array_equal(drawn.steps.terminated[last], True)
    np.testing.assert_array_equal(drawn.steps.observation[last], np.tile([6, 7], (last.sum(), 1)))


def test_short_trajectories_have_one_slice_each():
    player = Player(3, 2)
    player.play(20)
    rng = np.random.default_rng(0)
    drawn = replay_lib.sample_slices(rng, player.replay, 4_000, 8, 0)
    np.testing.assert_array_equal(drawn.steps.observation[:, 0, 2], 0)
    # 5 whole trajectories of the first environment, 7 of the second.
    share = np.mean(drawn.steps.observation[:, 0, 0] == 0)
    assert abs(share - 5 / 12) < 0.03
    first = drawn.steps.observation[:, 0, 0] == 0
    np.testing.assert_array_equal(drawn.steps.mask[first].sum(1), 3)
    np.testing.assert_array_equal(drawn.steps.mask[~first].sum(1), 2)
    np.testing.assert_array_equal(drawn.steps.observation[first, 3, 2], 3)
    np.testing.assert_array_equal(drawn.steps.observation[first, 4:], 0)


def test_short_trajectories_are_drawn_among_long_ones():
    player = Player(1, 50)
    player.play(20)
    rng = np.random.default_rng(0)
    drawn = replay_lib.sample_slices(rng, player.replay, 8_000, 3)
    # 10 trajectories of one decision, and one of 20 that has 18 slices.
    assert abs(np.mean(drawn.steps.observation[:, 0, 0]) - 18 / 28) < 0.02


def test_drawing_by_trajectory_and_by_slice():
    player = Player(2, 9)
    player.play(10)
    # First environment: 4 trajectories of 2 (the last one with 1); second: 1 of 9.
    rng = np.random.default_rng(0)
    by_slice = replay_lib.sample_slices(rng, player.replay, 8_000, 1)
    by_trajectory = replay_lib.sample_slices(rng, player.replay, 8_000, 1, per_trajectory=True)
    second = [np.mean(x.steps.observation[:, 0, 0]) for x in (by_slice, by_trajectory)]
    assert abs(second[0] - 9 / 16) < 0.02
    assert abs(second[1] - 1 / 5) < 0.02


@pytest.mark.parametrize("seed", range(6))
def test_slices_stay_in_one_episode_with_true_successors(seed):
    rng = np.random.default_rng(seed)
    player = Player(*rng.integers(1, 9, size=3), capacity=37, grow=bool(seed % 2))
    for epoch in range(12):
        player.play(int(rng.integers(1, 8)), epoch, pad=int(rng.integers(0, 3)))
    length, margin = int(rng.integers(2, 6)), 1
    drawn = replay_lib.sample_slices(rng, player.replay, 300, length, margin)
    steps, observation = drawn.steps, drawn.steps.observation
    following = np.concatenate([observation[:, 1:], drawn.last_observation[:, None]], axis=1)
    real = steps.mask > 0
    assert real[:, 0].all()
    np.testing.assert_array_equal(following[real], observation[real] + [0, 0, 1])
    np.testing.assert_array_equal(steps.reward[real], following[real][:, 2])
    np.testing.assert_array_equal(steps.reward[~real], 0)
    rollout = replay_lib.ordered(player.replay)
    real = rollout.steps.mask > 0
    observation = rollout.steps.observation
    following = np.concatenate([observation[1:], rollout.last_observation[None]])
    np.testing.assert_array_equal(following[real], observation[real] + [0, 0, 1])


def test_slices_of_wanted_epochs_only():
    player = Player(4)
    for epoch in range(6):
        player.play(3, epoch)
    rng = np.random.default_rng(0)
    drawn = replay_lib.sample_slices(rng, player.replay, 500, 3, 2, epochs=[1, 4])
    found = replay_lib.segments(player.replay, [1, 4])
    np.testing.assert_array_equal(found.length, [1, 1, 2])
    starts = {tuple(x) for x in drawn.steps.observation[:, 0, 1:].astype(int)}
    # Rows 3..5 and 12..14, of which 4 and 14 are reset rows.
    assert starts == {(0, 3), (1, 0), (2, 2), (2, 3)}


def test_drawing_from_nothing_names_the_epochs():
    replay = stored([make_rollout([1.0], True)], epochs=[5])
    rng = np.random.default_rng(0)
    with pytest.raises(ValueError, match=r"epochs \[4\]; epochs stored: \[5\]"):
        replay_lib.sample_slices(rng, replay, 1, 1, epochs=[4])
    with pytest.raises(ValueError, match="margin is 2; with length 2 it must be 0..1"):
        replay_lib.sample_slices(rng, replay, 1, 2, 2)


def test_a_rollout_of_another_shape_is_refused():
    replay = stored([make_rollout([1.0], True)])
    rollout = make_rollout([1.0], True)
    wide = rollout.steps._replace(action=np.zeros((1, 1, 2)))
    with pytest.raises(ValueError, match=r"rows of shape \(1, 2\) where the replay stores \(1,\)"):
        replay_lib.add(replay, rollout._replace(steps=wide), 1, gamma=0.5)
    more = rollout.steps._replace(dist_inputs=np.zeros((1, 1, 2)))
    with pytest.raises(ValueError, match="the replay stores"):
        replay_lib.add(replay, rollout._replace(steps=more), 1, gamma=0.5)


def test_pack_keeps_trajectories_and_their_last_observations():
    def trajectory(first, n):
        steps = make_rollout(np.ones(n + 1), False).steps
        mask = (np.arange(n + 1) < n).astype(np.float32)
        row = jax.tree.map(lambda x: x[:, 0], steps)
        return row._replace(observation=row.observation + first, mask=mask)

    rollout = replay_lib.pack([trajectory(10, 3), trajectory(20, 1), trajectory(30, 1)], 2)
    np.testing.assert_array_equal(rollout.steps.observation[:, 0], [10, 11, 12])
    np.testing.assert_array_equal(rollout.steps.observation[:, 1], [20, 21, 30])
    np.testing.assert_array_equal(rollout.steps.mask[:, 1], [1, 0, 1])
    np.testing.assert_array_equal(rollout.last_observation, [13, 31])


def big_replay(n):
    ones = np.ones((n, 1), np.float32)
    steps = TimeStep(
        observation=np.zeros((n, 1, 4), np.float32),
        action=np.zeros((n, 1), np.int32),
        reward=ones,
        terminated=(np.arange(n) % 200 == 199)[:, None],
        truncated=np.zeros((n, 1), bool),
        mask=ones,
        dist_inputs=np.zeros((n, 1, 2), np.float32),
        env_info=EnvInfo(ones, ones),
    )
    return steps, Rollout(steps, np.zeros((1, 4), np.float32))


def test_slices_of_a_million_steps_stay_within_trajectories():
    steps, _ = big_replay(1_000_000)
    replay = replay_lib.create(first_row(steps), len(steps.mask))
    # Written directly: adding computes returns row by row.
    replay.steps.mask[:-1] = 1.0
    replay.steps.terminated[:-1] = steps.terminated
    replay.position[:-1, 0] = np.arange(len(steps.mask)) % 200
    replay.epoch[:-1] = 0
    replay = replay._replace(size=len(steps.mask), insert=len(steps.mask))
    rng = np.random.default_rng(0)
    drawn = replay_lib.sample_slices(rng, replay, 256, 4, 1).steps
    assert drawn.mask.shape == (256, 4)
    # Trajectories have 200 steps: the last start has a row of padding, and no other slice has any.
    np.testing.assert_array_equal(drawn.mask[:, :3], 1.0)
    assert 0.9 < drawn.mask[:, 3].mean() <= 1.0


def nbytes(replay):
    arrays = jax.tree.leaves((replay.steps, replay.position, replay.epoch))
    return sum(x.nbytes for x in arrays)


def test_memory_of_a_cartpole_step():
    steps, rollout = big_replay(1_024)
    replay = replay_lib.add(replay_lib.create(first_row(steps), 1), rollout, 0, gamma=0.9)
    # Raw: observation 16, action 4, reward 4, two flags 2.
    assert nbytes(replay) / 1_024 <= 3 * 26


def test_images_stay_uint8_and_each_frame_is_stored_once():
    row = first_row(make_rollout([0.0], True).steps)
    row = row._replace(observation=np.zeros((1, 84, 84, 4), np.uint8))
    replay = replay_lib.create(row, 1_000, Frames(4, -1))
    assert replay.steps.observation.dtype == np.uint8
    assert replay.steps.observation.nbytes == 84 * 84 * 1_004
    whole = replay_lib.create(row, 1_000)
    assert whole.steps.observation.nbytes == 84 * 84 * 4 * 1_001 <= 28_300_000


@pytest.mark.parametrize("array", [np.asarray, jnp.asarray])
def test_frame_rows(array):
    row, older = array([5, 1, 0]), array(np.array([0, 2, 255], np.uint8))
    rows = replay_lib.frame_rows(row, older, 4, 10)
    np.testing.assert_array_equal(rows, [[5, 5, 5, 5], [9, 9, 0, 1], [7, 8, 9, 0]])


def stack_player(axis, *lengths, k=3, **settings):
    """A player whose observations are the newest ``k`` of (env id, episode, t), as u8 along ``axis``."""
    player = Player(*lengths, **settings)

    def make(n, i):
        env = FrameStackObservation(Counting(n, i), k)
        return env if axis == 0 else TransformObservation(env, np.transpose, Box(-1, 255, (3, k)))

    player.env = make_host_env(SyncVectorEnv([lambda n=n, i=i: make(n, i) for i, n in enumerate(lengths)]))
    player.actor = player.actor._replace(observation=player.env.reset(0))
    player.replay = replay_lib.create(player.row(), player.capacity, Frames(k, axis))
    return player


def check_stacks(observation, axis, real=True):
    """The stacks of observations ``[.., *obs]``, whose frames count up to the newest from 0 or more."""
    stacks = np.moveaxis(observation, -1, -2) if axis == -1 else observation
    k = stacks.shape[-2]
    expected = np.repeat(stacks[..., -1:, :], k, axis=-2)
    expected[..., 2] = (expected[..., 2] - np.arange(k)[::-1]).clip(min=0)
    np.testing.assert_array_equal(stacks[real], expected[real])
    return stacks


@pytest.mark.parametrize("axis", [0, -1])
@pytest.mark.parametrize("seed", range(6))
def test_restacked_frames_equal_whole_stacks(seed, axis):
    """Over ends of episodes, ring wrap-around, pieces, removed epochs and a way through files."""
    rng = np.random.default_rng(seed)
    lengths, capacity, k = rng.integers(1, 14, 3), int(rng.integers(5, 40)), int(rng.integers(2, 6))
    max_steps = [None, 4][seed % 2]
    settings = {"capacity": capacity, "grow": seed % 3 == 0, "max_steps": max_steps}
    player = stack_player(axis, *lengths, k=k, **settings)
    whole = replay_lib.create(player.row(), capacity)
    for epoch in range(20):
        rollout = player.play(int(rng.integers(1, min(9, capacity))), epoch, pad=int(rng.integers(3)))
        whole = replay_lib.add(whole, rollout, epoch, **player.settings)
        if epoch % 3 == 1:
            player.replay, whole = (
                replay_lib.remove(x, (x.epoch == epoch - 1) | (x.epoch < epoch - 6))
                for x in (player.replay, whole)
            )
        if epoch % 4 == 2:
            rows = replay_lib.to_rows(player.replay)
            player.replay = replay_lib.from_rows(rows, player.replay.capacity, Frames(k, axis))
        got, expected = replay_lib.ordered(player.replay), replay_lib.ordered(whole)
        end = whole.size  # what lies beyond is of no meaning
        assert len(got.steps.mask) >= end == player.replay.size
        for x, y in zip(*map(jax.tree.leaves, (got.steps, expected.steps)), strict=True):
            np.testing.assert_array_equal(x[:end], y[:end])
        np.testing.assert_array_equal(got.last_observation, expected.last_observation)
        check_stacks(got.steps.observation[:end], axis)
        draws = [
            replay_lib.sample_slices(np.random.default_rng(epoch), replay, 64, 5, 2)
            for replay in (player.replay, whole)
        ]
        jax.tree.map(np.testing.assert_array_equal, *draws)
        for some, others in zip(
            replay_lib.trajectories(player.replay, epoch), replay_lib.trajectories(whole, epoch), strict=True
        ):
            jax.tree.map(np.testing.assert_array_equal, some, others)


def test_frames_before_the_oldest_row_are_kept():
    player = stack_player(0, 100, k=4, capacity=5, grow=False)
    for epoch in range(9):
        player.play(2, epoch)
    observation = check_stacks(replay_lib.ordered(player.replay).steps.observation, 0)
    np.testing.assert_array_equal(observation[0, 0, :, 2], [10, 11, 12, 13])
    rows = replay_lib.to_rows(player.replay)
    assert len(rows[2]) == 3 + 5 + 1
    # A rollout that is longer than the ring leaves its newest rows, with the frames before them.
    player.play(3)
    player.play(11)
    observation = check_stacks(replay_lib.ordered(player.replay).steps.observation, 0)
    np.testing.assert_array_equal(observation[0, 0, :, 2], [24, 25, 26, 27])


@pytest.mark.parametrize("axis", [0, -1])
@pytest.mark.parametrize("grow", [True, False])
def test_a_rollout_from_the_middle_of_episodes_brings_its_older_frames(axis, grow):
    player = stack_player(axis, 9, 4, capacity=16, grow=grow)
    player.play(3)
    kept, player.replay = player.replay, replay_lib.create(player.row(), 1, Frames(3, axis))
    player.play(4)  # is not added
    player.replay = kept
    player.play(6, 1)
    replay = player.replay
    # Decisions of the first environment: t = 0..2, then 7, 8, and 0..2 of the next episode; of the second
    # one, whose rollout from elsewhere begins at t = 2 of its next episode: 0..2, then 2, 3 and 0..2.
    steps = replay_lib.ordered(replay).steps
    real = steps.mask > 0
    stacks = check_stacks(steps.observation, axis, real)
    np.testing.assert_array_equal(stacks[:, 0, -1, 2][real[:, 0]], [0, 1, 2, 7, 8, 0, 1, 2])
    np.testing.assert_array_equal(replay_lib.segments(replay).length, [3, 2, 3, 3, 2, 3])
    np.testing.assert_array_equal(stacks[real[:, 0], 0][3, :, 2], [5, 6, 7])


@pytest.mark.parametrize("axis", [0, -1])
def test_packed_pieces_of_episodes_keep_their_older_frames(axis):
    player = stack_player(axis, 11, 5, max_steps=3)
    player.play(20)
    pieces = list(replay_lib.trajectories(player.replay, 0))
    rollout = replay_lib.pack(pieces, 3, player.replay.frames)
    row = first_row(rollout.steps)
    packed = replay_lib.create(row, 1, player.replay.frames)
    packed = replay_lib.add(packed, rollout, 0, gamma=0.5)
    again = list(replay_lib.trajectories(packed, 0))

    def numbers(piece):
        return tuple(check_stacks(piece.observation, axis)[:, -1].astype(int).ravel())

    def by_number(pieces):
        return dict(zip(map(numbers, pieces), pieces, strict=True))

    pieces, again = by_number(pieces), by_number(again)
    assert pieces.keys() == again.keys() and len(pieces) == 14
    for key, piece in pieces.items():
        jax.tree.map(np.testing.assert_array_equal, piece, again[key])


def test_stacks_that_do_not_follow_one_another_are_refused():
    player = stack_player(0, 9)
    rollout = player.play(5)
    rollout.steps.observation[3, 0, 0] = 77
    with pytest.raises(ValueError, match="the 3 frames of row 3, environment 0, are neither those of"):
        replay_lib.add(replay_lib.create(player.row(), 1, Frames(3, 0)), rollout, 0, gamma=0.5)
