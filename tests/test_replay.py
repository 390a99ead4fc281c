"""The trajectory replay: order, successors, returns, draws, sizes."""


import jax
import numpy as np
import pytest
from gymnasium.vector import SyncVectorEnv

from rl_trainers import replay as replay_lib
from rl_trainers import rollout as rollout_lib
from rl_trainers.envs.host import make_host_env
from rl_trainers.envs.probe import Counting
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
    player.play(2, pad=4)
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


def test_images_stay_uint8():
    row = first_row(make_rollout([0.0], True).steps)
    row = row._replace(observation=np.zeros((1, 84, 84, 4), np.uint8))
    replay = replay_lib.create(row, 1_000)
    assert replay.steps.observation.dtype == np.uint8
    assert replay.steps.observation.nbytes <= 28_300_000
