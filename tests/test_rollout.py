"""Unrolls over counting environments, and the helpers that join and pad them."""

import functools

import gymnasium
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gymnasium import spaces

from rl_trainers import rollout
from rl_trainers.distributions import create_distribution
from rl_trainers.envs import probe_jax
from rl_trainers.envs.host import make_host_env
from rl_trainers.envs.native import GymView, JaxEnv, make_jax_env
from rl_trainers.envs.probe import ConstantReward, Counting
from rl_trainers.rollout import (
    bucket,
    concatenate,
    initial_actor,
    pad,
    start_scan,
    unroll_host,
    unroll_scan,
)

KEY = jax.random.PRNGKey(0)


def still(observation, policy_state, needs_reset, key):
    """Always action 0."""
    return np.zeros(len(needs_reset), np.int32), None, policy_state, key


def begin(length, num_envs=1, seed=0, **kwargs):
    env = make_host_env(functools.partial(Counting, length, **kwargs), num_envs)
    observation = env.reset(seed)
    return env, initial_actor(observation, num_envs, np.zeros(2, np.uint32))


def lengths_3_and_5():
    """Two environments with episodes of 3 and of 5 steps."""
    venv = gymnasium.vector.SyncVectorEnv([lambda: Counting(3, 0), lambda: Counting(5, 1)])
    env = make_host_env(venv, 2)
    return env, initial_actor(env.reset(0), 2, np.zeros(2, np.uint32))


# Rows.


@pytest.mark.parametrize("truncates", [False, True])
def test_rows_of_one_environment_by_hand(truncates):
    env, actor = begin(2, truncates=truncates)
    actor, data, episodes = unroll_host(env, still, actor, 5)
    steps = data.steps
    # Rows: step 1, step 2 (ends), reset row, step 1, step 2 (ends).
    np.testing.assert_array_equal(steps.observation[:, 0, 1:], [[0, 0], [0, 1], [0, 2], [1, 0], [1, 1]])
    np.testing.assert_array_equal(steps.mask[:, 0], [1, 1, 0, 1, 1])
    np.testing.assert_array_equal(steps.reward[:, 0], [1, 2, 0, 1, 2])
    ended = [False, True, False, False, True]
    np.testing.assert_array_equal(steps.terminated[:, 0], [x and not truncates for x in ended])
    np.testing.assert_array_equal(steps.truncated[:, 0], [x and truncates for x in ended])
    np.testing.assert_array_equal(data.last_observation, [[0, 1, 2]])
    np.testing.assert_array_equal(episodes.returns, [3, 3])
    np.testing.assert_array_equal(episodes.lengths, [2, 2])
    np.testing.assert_array_equal(actor.needs_reset, [True])
    np.testing.assert_array_equal(actor.episode_return, [0])
    np.testing.assert_array_equal(actor.episode_length, [0])
    assert steps.dist_inputs is None and steps.return_ is None
    np.testing.assert_array_equal(steps.env_info.control_mask, np.ones((5, 1)))


def test_20_vector_steps_of_episodes_of_3_and_5_are_32_transitions():
    env, actor = lengths_3_and_5()
    _, data, episodes = unroll_host(env, still, actor, 20)
    steps = data.steps
    np.testing.assert_array_equal(steps.mask.sum(0), [15, 17])
    np.testing.assert_array_equal(steps.reward[steps.mask == 0], 0)
    following = np.concatenate([steps.observation[1:], data.last_observation[None]])
    decided = steps.mask > 0
    before, after = steps.observation[decided], following[decided]
    np.testing.assert_array_equal(after[:, :2], before[:, :2])  # same environment, same episode
    np.testing.assert_array_equal(after[:, 2], before[:, 2] + 1)
    np.testing.assert_array_equal(
        after[steps.done[decided], 2], np.where(after[steps.done[decided], 0] == 0, 3, 5)
    )
    # Reset rows come where the row before ended, and nowhere else; they show the old episode's end.
    np.testing.assert_array_equal(steps.mask[1:] == 0, steps.done[:-1])
    np.testing.assert_array_equal(steps.observation[1:][steps.done[:-1]][:, 2] % 2, 1)
    # 5 episodes of 3 and 3 of 5, with returns 1 + 2 + 3 and 1 + .. + 5.
    assert sorted(zip(episodes.lengths, episodes.returns, strict=True)) == [(3, 6.0)] * 5 + [(5, 15.0)] * 3


def test_episodes_go_on_from_one_unroll_to_the_next():
    env, actor = begin(5)
    actor, first, ended = unroll_host(env, still, actor, 3)
    assert len(ended.returns) == 0
    np.testing.assert_array_equal(actor.episode_return, [1 + 2 + 3])
    np.testing.assert_array_equal(actor.episode_length, [3])
    actor, second, ended = unroll_host(env, still, actor, 2)
    np.testing.assert_array_equal(ended.returns, [15])
    np.testing.assert_array_equal(ended.lengths, [5])
    # An unroll may begin with the reset row.
    actor, third, _ = unroll_host(env, still, actor, 2)
    np.testing.assert_array_equal(third.steps.mask[:, 0], [0, 1])
    np.testing.assert_array_equal(third.steps.reward[:, 0], [0, 1])
    np.testing.assert_array_equal(actor.episode_length, [1])
    # In pieces or in one go: the same rows.
    env, actor = begin(5)
    _, whole, _ = unroll_host(env, still, actor, 7)
    joined = concatenate([first, second, third])
    for x, y in zip(jax.tree.leaves(joined), jax.tree.leaves(whole), strict=True):
        np.testing.assert_array_equal(x, y)


def test_many_rewards_are_summed_in_double_precision():
    # 1e8 + 1 is not a f32 number.
    steps = unroll_host(*_start_of(ConstantReward()), 2)[1].steps
    actor = begin(2)[1]._replace(episode_return=np.array([1e8]))
    row = jax.tree.map(lambda x: x[:1], steps._replace(dist_inputs=None))
    episodes, _, _ = rollout.account(row, actor)
    assert episodes.returns[0] == 1e8 + 1


def _start_of(env):
    host = make_host_env(env)
    return host, still, initial_actor(host.reset(0), 1, np.zeros(2, np.uint32))


class Generous:
    """Ends an episode in every second step, and pays 7 in every step, reset rows included."""

    num_envs = 1
    steps = 0

    def step(self, action):
        self.steps += 1
        ended = np.array([self.steps % 3 == 2])
        return np.zeros((1, 1), np.float32), np.full(1, 7.0, np.float32), ended, np.zeros(1, bool), {}


def test_whatever_a_reset_row_pays_counts_for_nothing():
    actor = initial_actor(np.zeros((1, 1), np.float32), 1, np.zeros(2, np.uint32))
    _, data, episodes = unroll_host(Generous(), still, actor, 6)
    np.testing.assert_array_equal(data.steps.reward[:, 0], [7, 7, 0, 7, 7, 0])
    np.testing.assert_array_equal(episodes.returns, [14, 14])


def test_stop_ends_the_unroll_early():
    env, actor = begin(3, num_envs=2)
    calls = []

    def stop(ended):
        calls.append(ended.copy())
        return bool(ended.any())

    actor, data, episodes = unroll_host(env, still, actor, 100, stop=stop)
    assert data.steps.mask.shape == (3, 2)
    np.testing.assert_array_equal(calls, [[False, False], [False, False], [True, True]])
    np.testing.assert_array_equal(episodes.lengths, [3, 3])
    np.testing.assert_array_equal(data.last_observation[:, 2], [3, 3])
    np.testing.assert_array_equal(actor.needs_reset, [True, True])


def test_the_environment_gets_to_env_of_what_is_stored():
    received = []

    class Listens(Counting):
        def step(self, action):
            received.append(float(action[0]))
            return super().step(action)

    env, _, actor = _start_of(Listens(100, continuous=True))
    distribution = create_distribution(env.action_space)
    chosen = iter([-3.0, 0.5, 7.0])

    def act(observation, policy_state, needs_reset, key):
        return np.full((1, 1), next(chosen), np.float32), None, policy_state, key

    _, data, _ = unroll_host(env, act, actor, 3, distribution.to_env)
    np.testing.assert_array_equal(data.steps.action[:, 0, 0], [-3.0, 0.5, 7.0])
    assert received == [-1.0, 0.5, 1.0]


def test_act_gets_what_it_needs_and_what_it_gives_is_kept():
    env, actor = begin(2)
    seen = []

    def act(observation, policy_state, needs_reset, key):
        seen.append((observation[0, 2], policy_state, bool(needs_reset[0]), int(key)))
        inputs = jnp.full((1, 2), float(key))
        return jnp.zeros(1, jnp.int32), inputs, policy_state + 1, key + 1

    actor = actor._replace(policy_state=10, key=0)
    actor, data, _ = unroll_host(env, act, actor, 4)
    assert seen == [(0, 10, False, 0), (1, 11, False, 1), (2, 12, True, 2), (0, 13, False, 3)]
    assert actor.policy_state == 14 and actor.key == 4
    assert isinstance(data.steps.action, np.ndarray)
    np.testing.assert_array_equal(data.steps.dist_inputs[:, 0], [[0, 0], [1, 1], [2, 2], [3, 3]])


class Nested(Counting):
    """Observations and actions that are nests."""

    observation_space = spaces.Dict(t=spaces.Discrete(9), pair=spaces.Tuple([Counting.observation_space]))

    def __init__(self):
        super().__init__(2)
        self.action_space = spaces.Dict(go=spaces.Discrete(2), turn=spaces.Box(-1, 1, (2,)))

    def look(self):
        return {"t": self.t, "pair": (super().look(),)}

    def pay(self, action):
        return float(action["go"]) + float(action["turn"].sum())


def test_nests():
    env, _, actor = _start_of(Nested())

    def act(observation, policy_state, needs_reset, key):
        action = {"go": np.ones(1, np.int32), "turn": np.full((1, 2), 0.25, np.float32)}
        return action, None, policy_state, key

    _, data, _ = unroll_host(env, act, actor, 4, create_distribution(env.action_space).to_env)
    steps = data.steps
    np.testing.assert_array_equal(steps.observation["t"][:, 0], [0, 1, 2, 0])
    np.testing.assert_array_equal(steps.observation["pair"][0][:, 0, 2], [0, 1, 2, 0])
    np.testing.assert_array_equal(steps.action["turn"], np.full((4, 1, 2), 0.25))
    np.testing.assert_array_equal(steps.reward[:, 0], [1.5, 1.5, 0, 1.5])
    padded = pad(data, 6)
    np.testing.assert_array_equal(padded.steps.observation["t"][:, 0], [0, 1, 2, 0, 1, 1])


class Masks(Counting):
    """Reports a control mask from its second step on."""

    def step(self, action):
        observation, reward, terminated, truncated, _ = super().step(action)
        info = {"control_mask": 0.0} if self.t == 2 else {}
        return observation, reward, terminated, truncated, info


def test_masks_from_info_are_one_where_nothing_was_said():
    env, _, actor = _start_of(Masks(3))
    _, data, _ = unroll_host(env, still, actor, 3)
    np.testing.assert_array_equal(data.steps.env_info.control_mask[:, 0], [1, 0, 1])
    np.testing.assert_array_equal(data.steps.env_info.discount_mask[:, 0], [1, 1, 1])


# Padding.


def test_padding_rows_count_for_nothing():
    env, actor = begin(2)
    _, data, _ = unroll_host(env, still, actor, 5)
    padded = pad(data, 8)
    np.testing.assert_array_equal(padded.steps.mask[:, 0], [1, 1, 0, 1, 1, 0, 0, 0])
    np.testing.assert_array_equal(padded.steps.reward[5:], 0)
    assert not padded.steps.done[5:].any()
    # The row after the last real one still is its successor.
    np.testing.assert_array_equal(padded.steps.observation[5:, 0], [[0, 1, 2]] * 3)
    np.testing.assert_array_equal(padded.last_observation, data.last_observation)
    for before, after in zip(jax.tree.leaves(data.steps), jax.tree.leaves(padded.steps), strict=True):
        np.testing.assert_array_equal(before, after[:5])
    assert pad(data, 5) is data


@pytest.mark.parametrize("length, size", [(1, 1), (2, 2), (3, 4), (4, 4), (5, 8), (1000, 1024)])
def test_bucket_is_the_next_power_of_two(length, size):
    assert bucket(length) == size


def test_rollouts_up_to_1000_rows_have_11_different_lengths():
    assert len({bucket(n) for n in range(1, 1001)}) == 11


# Deciding.


@functools.lru_cache
def decider(continuous):
    """A jitted :func:`rollout.act` whose network doubles the observation, and its distribution."""
    space = spaces.Box(-1, 1, (2,), np.float32) if continuous else spaces.Discrete(3)
    distribution = create_distribution(space)

    def apply(params, model_state, observation):
        return params * observation + model_state

    return jax.jit(functools.partial(rollout.act, apply, distribution)), distribution


@pytest.mark.parametrize("continuous", [False, True])
def test_temperature_0_is_the_mode(continuous):
    act, distribution = decider(continuous)
    observation = np.random.default_rng(0).normal(size=(50, distribution.n_inputs)).astype(np.float32)
    action, dist_inputs, _ = act(2.0, 1.0, observation, KEY, 0.0)
    np.testing.assert_allclose(dist_inputs, 2 * observation + 1, rtol=1e-6)
    np.testing.assert_array_equal(action, distribution.mode(dist_inputs))
    if not continuous:
        np.testing.assert_array_equal(action, np.argmax(observation, -1))


def test_temperature_1_samples_from_the_policy():
    # Logits (ln 3, ln 1, -inf): the first three times out of four, the last never.
    act, _ = decider(False)
    observation = np.tile(np.array([np.log(3), 0, -1e9], np.float32), (4000, 1))
    action, _, _ = act(1.0, 0.0, observation, KEY, 1.0)
    counts = np.bincount(action, minlength=3)
    assert counts[2] == 0
    assert counts[0] == pytest.approx(3000, abs=110)  # four standard deviations of 27.4


def test_keys():
    act, _ = decider(True)
    observation = np.zeros((4, 2), np.float32)
    first, _, after = act(1.0, 0.0, observation, KEY, 1.0)
    again, _, _ = act(1.0, 0.0, observation, KEY, 1.0)
    other, _, _ = act(1.0, 0.0, observation, after, 1.0)
    np.testing.assert_array_equal(first, again)
    assert not np.array_equal(first, other)
    assert not np.array_equal(after, KEY)
    # Every environment draws for itself.
    assert len(np.unique(np.asarray(first))) == first.size


def unrolled(seed, env_seed=0):
    """60 rows of 2 environments under a policy that samples."""
    act, distribution = decider(True)
    env = make_host_env(functools.partial(Counting, 7, continuous=True), 2)

    def choose(observation, policy_state, needs_reset, key):
        action, _, key = act(1.0, 0.0, observation[:, :2], key, 1.0)
        return action, None, policy_state, key

    actor = initial_actor(env.reset(env_seed), 2, jax.random.PRNGKey(seed))
    spaces_to_env = distribution.to_env
    _, data, _ = unroll_host(env, choose, actor, 10, lambda a: spaces_to_env(a)[:, :1])
    return data.steps


def test_same_key_same_rows_other_key_other_rows():
    first, again, other = unrolled(3), unrolled(3), unrolled(4)
    for x, y in zip(jax.tree.leaves(first), jax.tree.leaves(again), strict=True):
        np.testing.assert_array_equal(x, y)
    assert not np.array_equal(first.action, other.action)
    # No row repeats another's draw.
    assert len(np.unique(first.action)) == first.action.size


# On the device.


def walk(time_limit=None, continuous=False):
    """Walks from 0 by 1 or 2 a step; ends at 6 or beyond, and is cut in its 5th step at exactly 5."""

    def reset(key):
        return (jnp.int32(0), jnp.int32(0)), jnp.zeros(2)

    def step(state, action, key):
        place, t = state
        by = (action[0] > 0).astype(jnp.int32) if continuous else action
        place, t = place + 1 + by, t + 1
        observation = jnp.stack([place, t]).astype(jnp.float32)
        info = {"control_mask": (place % 3 > 0).astype(jnp.float32)}
        truncated = (t == 5) & (place == 5)
        return (place, t), observation, place * (1.5 - by), place >= 6, truncated, info

    box = spaces.Box(0.0, np.inf, (2,), np.float32)
    actions = spaces.Box(-1.0, 1.0, (1,), np.float32) if continuous else spaces.Discrete(2)
    return make_jax_env(JaxEnv(reset, step, box, actions, "walk", time_limit))


def scripted(observation, policy_state, needs_reset, key):
    """Another action for each environment and place; what it gives and remembers tells the row."""
    number = jnp.arange(len(needs_reset))
    place = jnp.asarray(observation[:, 0], jnp.int32)
    action = (jnp.array([0, 1, 0, 1])[number] + jnp.array([0, 0, 1, 1])[number] * place) % 2
    return action, jnp.stack([observation[:, 1], number], axis=-1), policy_state + 1, key


def on_host(env, num_envs, act, lengths, to_env=lambda a: a):
    host = make_host_env(functools.partial(GymView, env), num_envs)
    actor = initial_actor(host.reset(0), num_envs, np.asarray(KEY), np.zeros(num_envs, np.int32))
    for length in lengths:
        actor, data, episodes = unroll_host(host, act, actor, length, to_env)
        yield actor, data, episodes


def on_device(env, num_envs, act, lengths, key_env=KEY, to_env=lambda a: a):
    actor = start_scan(env, num_envs, key_env, KEY, jnp.zeros(num_envs, jnp.int32))
    unroll = jax.jit(lambda actor, n: unroll_scan(env, act, actor, n, to_env), static_argnums=1)
    for length in lengths:
        actor, data, endings = unroll(actor, length)
        yield actor, data, endings.episodes()


def assert_same(ours, theirs):
    """Actors, rollouts and episodes, field by field."""
    for (actor, *rest), (host_actor, *host_rest) in zip(ours, theirs, strict=True):
        pairs = [*zip(rest, host_rest, strict=True), (actor[1:], host_actor[1:])]
        for x, y in pairs:
            assert jax.tree.structure(x) == jax.tree.structure(y)
            for a, b in zip(jax.tree.leaves(x), jax.tree.leaves(y), strict=True):
                np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("time_limit", [None, 4, 1])
def test_rows_on_the_device_are_those_on_the_host(time_limit):
    env, lengths = walk(time_limit), 6 * [7]
    ours = list(on_device(env, 4, scripted, lengths))
    assert_same(ours, list(on_host(env, 4, jax.jit(scripted), lengths)))
    steps = concatenate([data for _, data, _ in ours]).steps
    lengths = np.concatenate([episodes.lengths for *_, episodes in ours])
    assert steps.truncated.any() and steps.observation.dtype == np.float32
    # Environments have episodes of different lengths, and both kinds of ends, unless a limit of 1 cuts all.
    if time_limit != 1:
        assert steps.terminated.any() and len(set(lengths.tolist())) > 1
    else:
        np.testing.assert_array_equal(lengths, 1)


def test_rows_on_the_device_by_hand():
    # Environment 0 walks by 1 and is cut in step 5; environment 1 walks by 2 to 6 in 3 steps.
    [(actor, data, episodes)] = on_device(walk(), 2, scripted, [7])
    steps = data.steps
    np.testing.assert_array_equal(steps.observation[:, 0, 0], [0, 1, 2, 3, 4, 5, 0])
    np.testing.assert_array_equal(steps.observation[:, 1, 0], [0, 2, 4, 6, 0, 2, 4])
    np.testing.assert_array_equal(steps.mask, np.array([[1, 1, 1, 1, 1, 0, 1], [1, 1, 1, 0, 1, 1, 1]]).T)
    np.testing.assert_array_equal(steps.reward[:, 0], [1.5, 3, 4.5, 6, 7.5, 0, 1.5])
    np.testing.assert_array_equal(steps.reward[:, 1], [1, 2, 3, 0, 1, 2, 3])
    np.testing.assert_array_equal(np.argwhere(steps.truncated), [[4, 0]])
    np.testing.assert_array_equal(np.argwhere(steps.terminated), [[2, 1], [6, 1]])
    np.testing.assert_array_equal(steps.env_info.control_mask[:, 0], [1, 1, 0, 1, 1, 1, 1])
    np.testing.assert_array_equal(steps.env_info.discount_mask, 1)
    np.testing.assert_array_equal(steps.dist_inputs[:, 1, 0], [0, 1, 2, 3, 0, 1, 2])
    np.testing.assert_array_equal(data.last_observation, [[1, 1], [6, 3]])
    np.testing.assert_array_equal(episodes.returns, [6, 22.5, 6])
    np.testing.assert_array_equal(episodes.lengths, [3, 5, 3])
    np.testing.assert_array_equal(actor.episode_return, [1.5, 0])
    np.testing.assert_array_equal(actor.needs_reset, [False, True])
    np.testing.assert_array_equal(actor.episode_length, [1, 0])
    np.testing.assert_array_equal(actor.policy_state, [7, 7])


@pytest.mark.parametrize("continuous", [False, True])
def test_a_policy_draws_the_same_on_the_device_as_on_the_host(continuous):
    env = walk(continuous=continuous)
    distribution = create_distribution(env.action_space)

    def act(observation, policy_state, needs_reset, key):
        def apply(params, model_state, x):
            return 0.1 * x[:, : distribution.n_inputs]

        choice = rollout.act(apply, distribution, None, None, observation, key, 1.0)
        return *choice[:2], policy_state, choice[2]

    ours = list(on_device(env, 3, act, [40], to_env=distribution.to_env))
    theirs = list(on_host(env, 3, jax.jit(act), [40], to_env=distribution.to_env))
    assert len(np.unique(ours[0][2].lengths)) > 1
    for _, data, _ in (*ours, *theirs):
        assert data.steps.dist_inputs.shape == (40, 3, distribution.n_inputs)
    np.testing.assert_array_equal(ours[0][1].steps.observation, theirs[0][1].steps.observation)
    np.testing.assert_allclose(ours[0][1].steps.action, theirs[0][1].steps.action, rtol=1e-6)


def test_each_episode_draws_anew_even_if_nobody_else_does():
    def still(observation, policy_state, needs_reset, key):
        return jnp.zeros(len(needs_reset), jnp.int32), None, policy_state, key

    env = probe_jax.counting(2)
    [(_, first, _), (_, second, _)] = on_device(env, 3, still, [30, 30])
    numbers = np.concatenate([x.steps.observation[:, :, 1] for x in (first, second)])
    # An episode of 2 decisions has 3 rows, with its reset row, and keeps its number in them.
    assert len(np.unique(numbers)) == 3 * 20
    np.testing.assert_array_equal(numbers.reshape(20, 3, 3), numbers[::3, None].repeat(3, 1))
    assert first.steps.dist_inputs is None


def test_the_same_keys_give_the_same_rows_and_others_do_not():
    env = probe_jax.counting(3)

    def numbers(seed):
        [(_, data, _)] = on_device(env, 4, scripted, [8], key_env=jax.random.PRNGKey(seed))
        return np.asarray(data.steps.observation[:, :, 1])

    np.testing.assert_array_equal(numbers(0), numbers(0))
    assert not np.intersect1d(numbers(0), numbers(1)).size


def test_pieces_and_seeds_side_by_side_give_the_rows_of_single_runs():
    env = probe_jax.counting(3)
    [(_, whole, _)] = on_device(env, 2, scripted, [12])
    pieces = concatenate([data for _, data, _ in on_device(env, 2, scripted, [6, 6])])

    def run(key_env):
        actor = start_scan(env, 2, key_env, KEY, jnp.zeros(2, jnp.int32))
        return unroll_scan(env, scripted, actor, 12)[1]

    many = jax.vmap(run)(jnp.stack([jax.random.PRNGKey(1), KEY]))
    second = jax.tree.map(lambda x: x[1], many)
    for x, y, z in zip(*map(jax.tree.leaves, (whole, pieces, second)), strict=True):
        np.testing.assert_array_equal(x, y)
        np.testing.assert_array_equal(x, z)


def test_an_unroll_is_traced_once():
    traces = []

    def act(*arguments):
        traces.append(1)
        return scripted(*arguments)

    list(on_device(walk(4), 4, act, [8, 8, 8, 8]))
    assert len(traces) == 1
