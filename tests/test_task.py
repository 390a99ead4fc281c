"""RLTask: trajectories, counts, evaluation, streams, files and exact continuation."""

import functools
import itertools

import gin
import gymnasium
import jax
import numpy as np
import pytest
from gymnasium import spaces

from rl_trainers import replay as replay_lib
from rl_trainers.distributions import create_distribution
from rl_trainers.envs.probe import Counting, Endless
from rl_trainers.task import RLTask, Trajectory, play
from rl_trainers.types import EnvInfo


def still(trajectory):
    """A policy that always takes action 0."""
    return np.int64(0), np.zeros(2, np.float32)


def still_act(observation, policy_state, needs_reset, key):
    return np.zeros(len(needs_reset), np.int32), None, policy_state, key


def random_act(task):
    inputs = np.zeros((task.env.num_envs, task.distribution.n_inputs), np.float32)

    @jax.jit
    def act(observation, policy_state, needs_reset, key):
        key, key_act = jax.random.split(key)
        return task.distribution.sample(inputs, key_act), inputs, policy_state, key

    return act


class Masked(gymnasium.Env):
    """Episodes of 4 steps that report both masks."""

    observation_space = spaces.Box(0.0, 4.0, (1,), np.float32)
    action_space = spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.t = 0
        return np.zeros(1, np.float32), {}

    def step(self, action):
        info = {"control_mask": float(self.t % 2 == 0), "discount_mask": float(self.t in (0, 3))}
        self.t += 1
        return np.full(1, self.t, np.float32), 0.0, self.t == 4, False, info


class ActionLog(gymnasium.Env):
    """Endless; keeps the actions it received, and a number that deepcopy copies."""

    observation_space = spaces.Box(-np.inf, np.inf, (1,), np.float32)

    def __init__(self, action_space):
        self.action_space = action_space
        self.actions = []

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return np.zeros(1, np.float32), {}

    def step(self, action):
        self.actions.append(action)
        return np.zeros(1, np.float32), 0.0, False, False, {}


def trajectory_of(n, done=True, value=None):
    """Observations 0..n (or ``value``), reward 1 at each of the n steps."""
    at = (lambda t: float(t)) if value is None else (lambda t: float(value))
    trajectory = Trajectory(np.array([0.0, 0.0, at(0)], np.float32))
    for t in range(n):
        trajectory.extend(
            np.array([0.0, 0.0, at(t + 1)], np.float32),
            action=np.int32(0),
            reward=1.0,
            done=done and t == n - 1,
            dist_inputs=np.zeros(2, np.float32),
        )
    return trajectory


# Trajectory.


def test_trajectory_counts_observations():
    trajectory = trajectory_of(5)
    assert len(trajectory) == 6
    assert len(trajectory.timesteps) == 5
    assert trajectory.last_observation[2] == 5
    assert trajectory.total_return == 5.0


def test_trajectory_done():
    trajectory = Trajectory(np.zeros(1))
    assert not trajectory.done
    with pytest.raises(ValueError, match="no steps"):
        trajectory.done = True
    trajectory = trajectory_of(2, done=False)
    assert not trajectory.done
    trajectory.done = True
    assert trajectory.done
    assert trajectory.timesteps[-1].truncated and not trajectory.timesteps[-1].terminated
    trajectory.done = False
    assert not trajectory.done


@pytest.mark.parametrize("length, observations", [(4, [2, 3, 4]), (1, []), (None, range(5))])
def test_trajectory_suffix(length, observations):
    suffix = trajectory_of(5).suffix(length)
    assert len(suffix) == len(observations) + 1
    assert [step.observation[2] for step in suffix.timesteps] == list(observations)
    assert suffix.last_observation[2] == 5


def test_trajectory_to_np_margins():
    trajectory = trajectory_of(2)
    steps = trajectory.to_np()
    assert steps.observation.shape == (3, 3)
    assert steps.action.shape == (3,)
    np.testing.assert_array_equal(steps.observation[:, 2], [0, 1, 2])
    np.testing.assert_array_equal(steps.mask, [1, 1, 0])
    steps = trajectory.to_np(margin=2)
    np.testing.assert_array_equal(steps.observation[:, 2], [0, 1, 2, 0])
    np.testing.assert_array_equal(steps.mask, [1, 1, 0, 0])
    np.testing.assert_array_equal(steps.done, [False, True, True, True])
    np.testing.assert_array_equal(trajectory.to_np(margin=0).observation[:, 2], [0, 1])
    trajectory.extend(np.zeros(3), action=np.int32(1), dist_inputs=np.zeros(2))
    assert trajectory.to_np().observation.shape == (4, 3)


def test_trajectory_to_np_before_the_first_step_and_with_a_hook():
    steps = Trajectory(np.ones(3)).to_np()
    np.testing.assert_array_equal(steps.observation, [[1, 1, 1]])
    np.testing.assert_array_equal(steps.mask, [0])
    doubled = trajectory_of(2).to_np(
        timestep_to_np=lambda steps: steps._replace(observation=2 * steps.observation)
    )
    np.testing.assert_array_equal(doubled.observation[:, 2], [0, 2, 4])


def test_trajectory_returns():
    trajectory = Trajectory(0)
    for mask in (1.0, 0.0, 1.0):
        trajectory.extend(0, action=0, reward=1, env_info=EnvInfo(1.0, mask))
    trajectory.calculate_returns(0.5)
    # 1; 1 + 1 without gamma; 1 + 2/2.
    assert [step.return_ for step in trajectory.timesteps] == [2.0, 2.0, 1.0]


# Collecting.


def test_time_limit_ends_episodes():
    task = RLTask(Endless, max_steps=None, time_limit=10)
    assert task.collect_trajectories(still, n_trajectories=3) == 10.0
    trajectories = task.trajectories[1]
    assert [len(t) for t in trajectories] == [11, 11, 11]
    assert all(t.timesteps[-1].truncated for t in trajectories)
    assert not any(t.timesteps[-1].terminated for t in trajectories)
    assert trajectories[0].last_observation == 10


def test_max_steps_cuts_and_the_episode_goes_on():
    task = RLTask(Endless, max_steps=5, time_limit=10)
    # One episode of 10 in two pieces.
    assert task.collect_trajectories(still, n_trajectories=2) == 10.0
    first, second = task.trajectories[1]
    assert (len(first), len(second)) == (6, 6)
    assert not first.done and second.done
    assert first.last_observation == second.timesteps[0].observation == 5


def test_time_limit_is_max_steps_by_default():
    task = RLTask(Endless, max_steps=5)
    assert task.time_limit == 5
    task.collect_trajectories(still, n_trajectories=1)
    assert task.trajectories[1][0].done


@pytest.mark.parametrize("num_envs", [1, 4])
def test_interactions_are_counted_exactly(num_envs):
    task = RLTask(functools.partial(Counting, 7), num_envs=num_envs, max_steps=3, time_limit=20)
    task.collect_trajectories(still, n_interactions=12)
    assert task.n_interactions() == 12
    assert sum(len(t) - 1 for t in task.trajectories[1]) == 12
    rollout, _ = task.collect(still_act, n_interactions=10)
    assert 10 <= rollout.steps.mask.sum() < 10 + num_envs
    assert task.n_interactions() == 12 + rollout.steps.mask.sum()


def test_trajectories_are_counted_exactly():
    task = RLTask(functools.partial(Counting, 7), max_steps=3, time_limit=20)
    task.collect_trajectories(still, n_trajectories=4)
    assert task.n_trajectories() == 4
    assert [len(t) - 1 for t in task.trajectories[1]] == [3, 3, 1, 3]
    # Nothing beyond the count was played.
    assert task.n_interactions() == 10


def test_average_return_is_of_finished_episodes():
    task = RLTask(functools.partial(Counting, 7), max_steps=3, time_limit=20)
    assert np.isnan(task.collect_trajectories(still, n_trajectories=2))
    # The episode that began before counts in full: 1 + .. + 7.
    assert task.collect_trajectories(still, n_trajectories=1, epoch_id=2) == 28.0


@pytest.mark.parametrize("counts", [{}, {"n_trajectories": 1, "n_interactions": 1}])
def test_exactly_one_count_is_given(counts):
    task = RLTask(Endless, max_steps=3)
    with pytest.raises(ValueError, match="exactly one"):
        task.collect_trajectories(still, **counts)
    with pytest.raises(ValueError, match="exactly one"):
        task.collect(still_act, **counts)
    with pytest.raises(ValueError, match="n_trajectories is 0; it must be at least 1"):
        task.collect(still_act, n_trajectories=0)


def test_no_limits_at_all():
    task = RLTask(functools.partial(Counting, 3))
    assert task.max_steps is None and task.time_limit is None
    assert task.collect_trajectories(still, n_trajectories=2) == 6.0


def test_unroll_length_is_exact_and_other_counts_are_padded():
    task = RLTask(functools.partial(Counting, 4), num_envs=3)
    rollout, episodes = task.collect(still_act, unroll_length=11)
    assert rollout.steps.mask.shape == (11, 3)
    np.testing.assert_array_equal(episodes.lengths, [4] * 6)
    np.testing.assert_array_equal(episodes.returns, [10.0] * 6)
    rollout, _ = task.collect(still_act, n_interactions=14)
    assert rollout.steps.mask.shape == (8, 3)


def test_n_trajectories_over_several_environments():
    task = RLTask(functools.partial(Counting, 4), num_envs=3)
    rollout, episodes = task.collect(still_act, n_trajectories=4)
    # All three end together: 4 rows, the reset row, 4 rows.
    assert len(episodes.returns) == 6
    assert rollout.steps.mask.sum() == 24
    assert task.n_trajectories() == 6


def test_python_policies_see_what_happened():
    seen = []

    def policy(trajectory):
        steps = trajectory.to_np(margin=0)
        seen.append((steps.observation[:, 2].tolist(), steps.reward.tolist()))
        return np.int64(len(trajectory) % 2), np.zeros(2)

    task = RLTask(functools.partial(Counting, 3), max_steps=2, time_limit=9)
    task.collect_trajectories(policy, n_interactions=4)
    assert seen == [([], []), ([0], [1]), ([], []), ([], [])]
    actions = [[int(s.action) for s in t.timesteps] for t in task.trajectories[1]]
    assert actions == [[1, 0], [1], [1]]
    # The second piece of the running episode ends where it would have ended anyway.
    seen.clear()
    task.collect_trajectories(policy, n_interactions=2, epoch_id=2)
    assert seen == [([], []), ([], [])]
    assert [t.last_observation[2] for t in task.trajectories[2]] == [2, 3]


def test_epochs_of_the_replay_are_exactly_the_newest():
    task = RLTask(functools.partial(Counting, 3), n_replay_epochs=2)
    for epoch in range(1, 6):
        task.collect_trajectories(still, n_trajectories=epoch, epoch_id=epoch)
    assert {e: len(t) for e, t in task.trajectories.items()} == {4: 4, 5: 5}
    assert task.replayed().steps.mask.sum() == 27
    assert task.replayed([-1]).steps.mask.sum() == 15
    task.set_n_replay_epochs(1)
    assert list(task.trajectories) == [5]


def test_collecting_twice_into_an_epoch_keeps_both():
    task = RLTask(functools.partial(Counting, 3))
    task.collect_trajectories(still, n_trajectories=2)
    task.collect_trajectories(still, n_trajectories=1)
    assert [t.last_observation[1] for t in task.trajectories[1]] == [0, 1, 2]
    batch = next(task.trajectory_batch_stream(300, epochs=[-1], max_slice_length=1))
    assert set(batch.observation[:, 0, 1]) == {0, 1, 2}


def test_remove_epoch():
    task = RLTask(functools.partial(Counting, 3), initial_trajectories=2, n_replay_epochs=3)
    task.collect_trajectories(still, n_trajectories=1)
    task.remove_epoch(0)
    assert list(task.trajectories) == [1]


def test_capacity_bounds_the_replay():
    task = RLTask(Endless, num_envs=2, capacity=21, n_replay_epochs=100)
    for epoch in range(5):
        rollout, _ = task.collect(still_act, unroll_length=8)
        task.add(rollout, epoch)
    stored = task.replayed()
    assert stored.steps.mask.shape == (10, 2)
    np.testing.assert_array_equal(stored.steps.observation[:, 0, 0], range(30, 40))


def test_a_rollout_without_dist_inputs_is_stored_as_unknown():
    task = RLTask(Endless)
    rollout, _ = task.collect(still_act, unroll_length=4)
    task.add(rollout, 1)
    assert np.isnan(task.replayed().steps.dist_inputs[:4]).all()


# Initial trajectories.


def test_initial_random_trajectories_have_counts_of_their_own():
    task = RLTask(functools.partial(Counting, 3), initial_trajectories=13)
    assert task.n_trajectories() == 13
    assert task.n_initial_interactions == 39
    assert task.n_interactions() == 0
    assert len(task.trajectories[0]) == 13


@pytest.mark.parametrize(
    "space, log_density",
    [
        (spaces.Discrete(3, start=-1), -np.log(3)),
        (spaces.MultiDiscrete([2, 3]), -np.log(6)),
        (spaces.Box(-1.0, 1.0, (1,), np.float32), None),
    ],
)
def test_initial_random_actions_have_the_density_that_is_stored(space, log_density):
    env = ActionLog(space)
    task = RLTask(env, initial_trajectories=4, max_steps=100)
    received = np.array(env.actions)
    assert len(received) == 400
    assert all(space.contains(a) for a in env.actions)
    steps = task.replayed().steps
    stored = steps.mask[:, 0] > 0
    actions, inputs = steps.action[stored, 0], steps.dist_inputs[stored, 0]
    np.testing.assert_array_equal(task.distribution.to_env(actions), received)
    if log_density is None:
        # Standard Gaussian before it was clipped.
        assert abs(actions.std() - 1.0) < 0.15
        assert np.abs(actions).max() > 1.0
    else:
        log_prob = task.distribution.log_prob(inputs, actions)
        np.testing.assert_allclose(log_prob, log_density, rtol=1e-6)
        assert len(np.unique(received, axis=0)) == round(np.exp(-log_density))


@pytest.mark.parametrize("num_envs", [1, 2])
def test_initial_trajectories_from_lists_and_dicts(num_envs):
    made = functools.partial(RLTask, functools.partial(Counting, 3), num_envs=num_envs)
    listed = [trajectory_of(2), trajectory_of(3, done=False)]
    task = made(initial_trajectories=listed, gamma=0.5)
    assert sorted(len(t) for t in task.trajectories[0]) == [3, 4]
    assert task.n_trajectories() == 2 and task.n_initial_interactions == 5
    longer = max(task.trajectories[0], key=len)
    assert not longer.done and longer.last_observation[2] == 3
    assert [float(s.return_) for s in longer.timesteps] == [1.75, 1.5, 1.0]
    # What follows in the environment is not their continuation.
    task.collect_trajectories(still, n_trajectories=1, epoch_id=0)
    assert sorted(len(t) for t in task.trajectories[0])[:3] == [3, 4, 4]
    task = made(initial_trajectories={2: [trajectory_of(2)], 5: [trajectory_of(1)]})
    assert {e: len(t[0]) for e, t in task.trajectories.items()} == {2: 3, 5: 2}


def test_what_is_loaded_does_not_run_on_into_what_is_played():
    # The last observation is that of a fresh environment.
    task = RLTask(functools.partial(Counting, 3), [trajectory_of(2, done=False, value=0)])
    task.collect_trajectories(still, n_trajectories=1, epoch_id=0)
    assert [len(t) for t in task.trajectories[0]] == [3, 4]


def test_save_and_load(tmp_path):
    path = tmp_path / "trajectories.npz"
    task = RLTask(functools.partial(Counting, 3), 13, max_steps=9, gamma=0.9)
    task.save_to_file(path)
    other = RLTask(functools.partial(Counting, 3), 4, max_steps=19, gamma=1.0, num_envs=2)
    assert (other.n_trajectories(), other.max_steps, other.gamma) == (4, 19, 1.0)
    other.init_from_file(path)
    assert (other.n_trajectories(), other.max_steps, other.gamma) == (13, 9, 0.9)
    assert len(other.trajectories[0]) == 13
    np.testing.assert_allclose(
        [s.return_ for s in other.trajectories[0][0].timesteps], [5.23, 4.7, 3.0], rtol=1e-6
    )
    assert [p.name for p in tmp_path.iterdir()] == ["trajectories.npz"]


def test_initial_trajectories_from_a_path(tmp_path):
    task = RLTask(functools.partial(Counting, 3), 2, n_replay_epochs=9)
    task.collect_trajectories(still, n_trajectories=3, epoch_id=1)
    task.save_to_file(tmp_path / "some.npz")
    loaded = RLTask(functools.partial(Counting, 3), tmp_path / "some.npz", n_replay_epochs=9)
    assert {e: len(t) for e, t in loaded.trajectories.items()} == {0: 2, 1: 3}
    later = RLTask(functools.partial(Counting, 3), n_replay_epochs=9)
    later.load_initial_trajectories_from_path(tmp_path, "some.npz", start_epoch_to_load=1)
    assert {e: len(t) for e, t in later.trajectories.items()} == {1: 3}
    with pytest.raises(ValueError, match=r"no file of trajectories at .*none\.npz"):
        RLTask(functools.partial(Counting, 3), tmp_path / "none.npz")


# Evaluation.


def collected(env, evaluate):
    task = RLTask(env, num_envs=1, seed=3)
    act = random_act(task)
    rollouts = []
    for epoch in range(3):
        rollout, _ = task.collect(act, unroll_length=20)
        task.add(rollout, epoch)
        rollouts.append(rollout)
        if evaluate:
            task.evaluate(act, 2)
            task.collect_trajectories(still, n_trajectories=1, only_eval=True)
            task.collect_trajectories(still, n_interactions=5, only_eval=True)
    batch = next(task.trajectory_batch_stream(4, max_slice_length=2))
    return rollouts, batch, task.n_interactions()


@pytest.mark.parametrize("kind", ["id", "object", "factory"])
def test_evaluation_leaves_training_alone(kind):
    makers = {
        "id": lambda: "CartPole-v1",
        "object": lambda: gymnasium.make("CartPole-v1"),
        "factory": lambda: functools.partial(gymnasium.make, "CartPole-v1"),
    }
    plain = collected(makers[kind](), False)
    evaluated = collected(makers[kind](), True)
    jax.tree.map(np.testing.assert_array_equal, plain, evaluated)


def test_evaluation_counts_the_first_episode_of_each_environment():
    lengths = itertools.cycle([2, 9, 4])
    task = RLTask(lambda: Counting(next(lengths)), num_envs=3)
    episodes = task.evaluate(still_act, 5)
    # Returns are 1 + .. + n; the quota of short environments is no larger.
    assert sorted(episodes.lengths[:3]) == [2, 4, 9]
    np.testing.assert_array_equal(episodes.lengths[3:], episodes.lengths[:2])
    np.testing.assert_array_equal(episodes.returns, episodes.lengths * (episodes.lengths + 1) / 2)
    assert task.n_eval_interactions >= episodes.lengths.sum()
    assert task.n_interactions() == 0


def test_evaluation_may_be_longer_than_training_episodes():
    task = RLTask(Endless, max_steps=200, num_envs=2)
    assert task.evaluate(still_act, 2).returns.tolist() == [200.0, 200.0]
    assert task.evaluate(still_act, 1, max_steps=1000).returns.tolist() == [1000.0]
    assert task.collect_trajectories(still, 1, only_eval=True, max_steps=300) == 300.0


def test_only_eval_steps_no_training_environment():
    task = RLTask(Endless, max_steps=4)
    before = task.state_dict()
    assert task.collect_trajectories(still, n_trajectories=2, only_eval=True) == 4.0
    task.collect_trajectories(still, n_interactions=6, only_eval=True)
    assert task.n_interactions() == 0 and task.n_eval_interactions == 14
    after = task.state_dict()
    assert not after.pop("counts")[:3].any() and before.pop("counts") is not None
    jax.tree.map(np.testing.assert_array_equal, before, after)


def test_evaluation_repeats_and_follows_its_seed():
    task = RLTask("CartPole-v1", num_envs=2)
    act = random_act(task)
    first, again = task.evaluate(act, 4), task.evaluate(act, 4)
    np.testing.assert_array_equal(first.returns, again.returns)
    assert (task.evaluate(act, 4, seed=1).returns != first.returns).any()


def test_an_environment_of_its_own_for_evaluation():
    task = RLTask(functools.partial(Counting, 3), eval_env=functools.partial(Counting, 5))
    np.testing.assert_array_equal(task.evaluate(still_act, 1).lengths, [5])


# Streams.


def test_stream_follows_new_data():
    task = RLTask(functools.partial(Counting, 2), n_replay_epochs=5)
    task.collect_trajectories(still, n_trajectories=1, epoch_id=1)
    stream = task.trajectory_slice_stream(epochs=[-1], max_slice_length=1)
    assert next(stream).observation[0, 1] == 0
    task.collect_trajectories(still, n_trajectories=1, epoch_id=2)
    assert {next(stream).observation[0, 1] for _ in range(9)} == {1}


def test_whole_trajectories_are_padded_to_a_power_of_two():
    task = RLTask(functools.partial(Counting, 3), [trajectory_of(2), trajectory_of(3)])
    batch = next(task.trajectory_batch_stream(64))
    assert batch.observation.shape == (64, 4, 3)
    assert set(batch.mask.sum(1)) == {2, 3}
    np.testing.assert_array_equal(batch.done[batch.mask == 0], True)
    slices = [next(task.trajectory_slice_stream(margin=1)) for _ in range(20)]
    assert {s.mask.shape for s in slices} == {(3,), (4,)}


def test_slices_at_the_end_of_a_trajectory():
    task = RLTask(functools.partial(Counting, 3), [trajectory_of(2, value=1)])
    stream = task.trajectory_slice_stream(max_slice_length=4, margin=3)
    ends = [s for s in itertools.islice(stream, 30) if s.mask.sum() == 1]
    np.testing.assert_array_equal(ends[0].observation[:, 2], [1, 1, 0, 0])
    np.testing.assert_array_equal(ends[0].done, True)
    np.testing.assert_array_equal(ends[0].mask, [1, 0, 0, 0])


def test_sampling_slices_or_trajectories_uniformly():
    short, long = trajectory_of(1, value=101), trajectory_of(101, value=0)
    task = RLTask(functools.partial(Counting, 3), [short, long])
    by_slice = next(task.trajectory_batch_stream(2_000, max_slice_length=1))
    # One slice in 102 has observation 101.
    assert abs(by_slice.observation[..., 2].mean() - 101 / 102) < 1.0
    uniform = task.trajectory_batch_stream(
        2_000, max_slice_length=1, sample_trajectories_uniformly=True
    )
    assert abs(next(uniform).observation[..., 2].mean() - 50.5) < 5.0


def test_slices_of_equal_length():
    task = RLTask(functools.partial(Counting, 3), [trajectory_of(2), trajectory_of(6)])
    stream = task.trajectory_batch_stream(3, min_slice_length=4, max_slice_length=4)
    for _ in range(5):
        batch = next(stream)
        assert batch.observation.shape == (3, 4, 3)
        np.testing.assert_array_equal(batch.mask, 1)
    stream = task.trajectory_batch_stream(3, min_slice_length=9, max_slice_length=9)
    with pytest.raises(ValueError, match="min_slice_length is 9"):
        next(stream)


def test_env_info_reaches_the_stream():
    task = RLTask(Masked)
    task.collect_trajectories(still, n_trajectories=1)
    steps = next(task.trajectory_batch_stream(1, max_slice_length=4))
    np.testing.assert_array_equal(steps.env_info.control_mask, [[1, 0, 1, 0]])
    np.testing.assert_array_equal(steps.env_info.discount_mask, [[1, 0, 0, 1]])


def test_trajectory_streams_can_be_filtered():
    def only_long(trajectories):
        return (t for t in trajectories if len(t) > 3)

    task = RLTask(functools.partial(Counting, 3), [trajectory_of(2), trajectory_of(6)])
    stream = task.trajectory_batch_stream(
        5, max_slice_length=3, margin=1, trajectory_stream_preprocessing_fn=only_long
    )
    batch = next(stream)
    assert batch.observation.shape == (5, 3, 3)
    starts = [next(stream).observation[:, 0, 2] for _ in range(20)]
    # 6 + 1 - 3 + 1 = 5 slices.
    assert set(np.concatenate(starts)) == {0, 1, 2, 3, 4}


def test_a_filter_may_end_the_stream():
    task = RLTask(functools.partial(Counting, 3), [trajectory_of(2)])
    stream = task.trajectory_slice_stream(
        trajectory_stream_preprocessing_fn=lambda trajectories: itertools.islice(trajectories, 2)
    )
    assert len(list(stream)) == 2


def test_timestep_to_np_is_applied():
    def doubled(steps):
        return steps._replace(observation=2 * steps.observation)

    task = RLTask(functools.partial(Counting, 3), [trajectory_of(2)], timestep_to_np=doubled)
    batch = next(task.trajectory_batch_stream(8, max_slice_length=1))
    assert set(batch.observation[..., 2].ravel()) == {0, 2}


# Continuing.


@pytest.mark.parametrize("env", ["CartPole-v1", "MountainCarContinuous-v0"])
def test_a_task_continues_exactly(env):
    def make():
        return RLTask(env, num_envs=3, n_replay_epochs=2, seed=5, max_steps=15, time_limit=40)

    def advance(task, epochs):
        for epoch in epochs:
            rollout, _ = task.collect(random_act(task), unroll_length=20)
            task.add(rollout, epoch)
        stream = task.trajectory_batch_stream(4, max_slice_length=3, margin=1)
        return rollout, task.replayed(), next(stream)

    task = make()
    advance(task, range(3))
    state = jax.tree.map(np.copy, task.state_dict())
    continued = make()
    continued.load_state_dict(state)
    jax.tree.map(np.testing.assert_array_equal, advance(task, [3, 4]), advance(continued, [3, 4]))
    assert task.n_interactions() == continued.n_interactions()
    assert task.n_trajectories() == continued.n_trajectories()
    assert state.keys() == make().state_dict().keys()
    assert all(x.dtype.kind in "biuf" for x in state.values())


def test_state_of_another_size_is_refused():
    state = RLTask("CartPole-v1", num_envs=2).state_dict()
    with pytest.raises(ValueError, match="num_envs is 3; the state has 2"):
        RLTask("CartPole-v1", num_envs=3).load_state_dict(state)


def test_an_environment_that_hides_its_state_restarts(caplog):
    task = RLTask(functools.partial(Counting, 9))
    rollout, _ = task.collect(still_act, unroll_length=4)
    task.add(rollout, 1)
    state = task.state_dict()
    other = RLTask(functools.partial(Counting, 9))
    other.env.snapshot = lambda: None
    state["env"] = other.state_dict()["env"]
    other.load_state_dict(state)
    assert "restart" in caplog.text
    assert other.collect_trajectories(still, n_trajectories=1, epoch_id=1) == 45.0
    assert [len(t) - 1 for t in other.trajectories[1]] == [4, 9]


def test_seeds():
    def first(seed):
        task = RLTask("CartPole-v1", num_envs=2, seed=seed, initial_trajectories=2)
        return task.replayed(), task.collect(random_act(task), unroll_length=30)

    before = np.random.get_state()[1].copy()
    jax.tree.map(np.testing.assert_array_equal, first(1), first(1))
    assert (first(1)[1][0].steps.observation != first(2)[1][0].steps.observation).any()
    np.testing.assert_array_equal(before, np.random.get_state()[1])


# Arguments.


@pytest.mark.parametrize(
    "argument, value, message",
    [
        ("gamma", 1.5, r"gamma is 1.5; it must be in \[0, 1\]"),
        ("max_steps", 0, "max_steps is 0; it must be at least 1"),
        ("n_replay_epochs", 0, "n_replay_epochs is 0; it must be at least 1"),
        ("initial_trajectories", -1, "initial_trajectories is -1; it must be at least 0"),
        ("capacity", 0, "capacity is 0; it must be at least 1"),
        ("seed", -3, "seed is -3; it must be at least 0"),
    ],
)
def test_arguments_out_of_range(argument, value, message):
    with pytest.raises(ValueError, match=message):
        RLTask("CartPole-v1", **{argument: value})


def test_gin_binds_the_task():
    gin.clear_config()
    gin.parse_config("RLTask.env = 'CartPole-v1'\nRLTask.max_steps = 7\nRLTask.gamma = 0.5")
    try:
        task = RLTask()
    finally:
        gin.clear_config()
    assert (task.env_name, task.max_steps, task.gamma) == ("CartPole-v1", 7, 0.5)


def test_stacked_frames():
    task = RLTask(functools.partial(Counting, 9), num_stacked_frames=3)
    assert task.observation_space.shape == (3, 3)
    rollout, _ = task.collect(still_act, unroll_length=3)
    np.testing.assert_array_equal(rollout.steps.observation[2, 0, :, 2], [0, 1, 2])


def test_stacked_frames_are_stored_once_through_files_and_resume(tmp_path):
    def make(**settings):
        env = functools.partial(Counting, 9)
        return RLTask(env, num_stacked_frames=3, max_steps=4, time_limit=20, **settings)

    task = make(capacity=14, num_envs=2, n_replay_epochs=9)
    for epoch in range(3):
        task.add(task.collect(still_act, unroll_length=5)[0], epoch)
    assert task.replay.steps.observation.shape == (7 + 3, 2, 3)
    expected = task.replayed()
    np.testing.assert_array_equal(expected.steps.observation[0, 0, :, 2], [6, 7, 8])
    np.testing.assert_array_equal(expected.steps.observation[3, 0, :, 2], [0, 0, 1])
    task.save_to_file(tmp_path / "saved.npz")
    resumed, loaded = make(capacity=14, num_envs=2), make(initial_trajectories=tmp_path / "saved.npz")
    resumed.load_state_dict(task.state_dict())
    jax.tree.map(np.testing.assert_array_equal, resumed.replayed(), expected)
    for other in (resumed, loaded):
        for epoch, trajectories in task.trajectories.items():
            pairs = zip(trajectories, other.trajectories[epoch], strict=True)
            for one, another in pairs:
                jax.tree.map(np.testing.assert_array_equal, one.to_np(), another.to_np())
    with pytest.raises(ValueError, match="num_stacked_frames is 300; it must be at most 256"):
        RLTask(functools.partial(Counting, 9), num_stacked_frames=300)


def test_atari_frames_are_stored_once_and_read_as_they_came():
    pytest.importorskip("ale_py", reason="the extra atari is not installed")
    task = RLTask("pong", dm_suite=True, num_stacked_frames=4, num_envs=2, time_limit=9)
    assert task.observation_space.shape == (84, 84, 4)
    rollout, _ = task.collect(random_act(task), unroll_length=30)
    assert rollout.steps.truncated.sum() == 6 and rollout.steps.observation.dtype == np.uint8
    task.add(rollout, 1)
    assert task.replay.steps.observation.nbytes == (32 + 4) * 2 * 84 * 84
    stored = task.replayed()
    np.testing.assert_array_equal(stored.steps.observation[:30], rollout.steps.observation)
    np.testing.assert_array_equal(stored.last_observation, rollout.last_observation)
    # The frames of an episode's first observation are all the same, those of its last one are not.
    first = rollout.steps.observation[0, 0]
    np.testing.assert_array_equal(first, np.repeat(first[..., -1:], 4, -1))
    assert not np.array_equal(rollout.steps.observation[9, 0, :, :, 0], first[..., -1])


def test_a_missing_extra_is_named(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ImportError, match=r"Atari games need the extra 'atari': pip install 'rl_tr"):
        RLTask("pong", dm_suite=True)


def test_dict_observations_and_actions():
    class Pairs(gymnasium.Env):
        observation_space = spaces.Dict({"a": spaces.Box(0, 9, (2,), np.float32)})
        action_space = spaces.Tuple([spaces.Discrete(2), spaces.Box(-1, 1, (1,), np.float32)])

        def reset(self, *, seed=None, options=None):
            self.t = 0
            return {"a": np.zeros(2, np.float32)}, {}

        def step(self, action):
            self.t += 1
            return {"a": np.full(2, self.t, np.float32)}, 1.0, self.t == 3, False, {}

    task = RLTask(Pairs, initial_trajectories=4, num_envs=2)
    batch = next(task.trajectory_batch_stream(6, max_slice_length=2, margin=1))
    assert batch.observation["a"].shape == (6, 2, 2)
    assert [x.shape for x in batch.action] == [(6, 2), (6, 2, 1)]
    assert len(task.trajectories[0]) == 4


def test_play():
    trajectory = play(functools.partial(Counting, 5), still)
    assert len(trajectory) == 6 and trajectory.done and trajectory.total_return == 15
    assert len(play(functools.partial(Counting, 5), still, max_steps=2)) == 3


def test_action_distribution_is_used():
    space_to = functools.partial(create_distribution, std=0.1)
    env = ActionLog(spaces.Box(-1.0, 1.0, (1,)))
    task = RLTask(env, 1, max_steps=200, action_distribution=space_to)
    actions = task.replayed().steps.action[:200]
    assert abs(actions.std() - 0.1) < 0.02
    assert replay_lib.segments(task.replay).length.tolist() == [200]
