"""JAX environments: making them, the suites, the probes, and the gymnasium view of one."""

import sys

import gymnasium
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gymnasium import spaces

from rl_trainers.envs import probe, probe_jax
from rl_trainers.envs.native import GymView, JaxEnv, from_brax, from_gymnax, is_jax_env, make_jax_env

KEY = jax.random.PRNGKey(0)
BOX = spaces.Box(-9, 9, (1,), np.float32)
TWINS = {
    "constant_reward": probe.ConstantReward,
    "observation_reward": probe.ObservationReward,
    "delayed_reward": probe.DelayedReward,
    "action_reward": probe.ActionReward,
    "action_and_observation_reward": probe.ActionAndObservationReward,
}


def reset(key):
    """A state whose counter starts as a Python int and goes on as a float."""
    return {"t": 0}, jnp.zeros(1)


def step(state, action, key):
    t = state["t"] + 0.5
    return {"t": t}, t[None], 1, t >= 1, False, {}


def pair(reset=reset, step=step, observation_space=BOX):
    return reset, step, observation_space, spaces.Discrete(2)


# Making one.


def test_records_keep_their_dtypes():
    env = make_jax_env(pair())
    first, seen = env.reset(KEY)
    second, then, reward, terminated, truncated, info = env.step(first, jnp.int32(0), KEY)
    assert first["t"].dtype == second["t"].dtype == seen.dtype == then.dtype == reward.dtype == jnp.float32
    assert terminated.dtype == truncated.dtype == jnp.bool_ and info == {}
    assert (float(second["t"]), float(reward), bool(terminated)) == (0.5, 1.0, False)
    assert env.name == "JaxEnv" and env.time_limit is None


def test_a_jax_env_stays_what_it_is_and_takes_another_limit():
    env = make_jax_env(JaxEnv(*pair(), name="mine", time_limit=7))
    assert (env.name, env.time_limit) == ("mine", 7)
    assert make_jax_env(env, time_limit=3).time_limit == 3


@pytest.mark.parametrize(
    "env, known",
    [
        ("gymnax:CartPole-v1", True),
        ("brax:ant", True),
        (pair(), True),
        (JaxEnv(*pair()), True),
        ("CartPole-v1", False),
        ("ale_py:ALE/Pong-v5", False),
        (probe.ConstantReward, False),
        ([probe.ConstantReward], False),
        (4 * (probe.ConstantReward,), False),
    ],
)
def test_what_is_a_jax_env(env, known):
    assert is_jax_env(env) == known


@pytest.mark.parametrize(
    "env, message",
    [
        (pair(observation_space=spaces.Box(-9, 9, (2,))), r"observation has the shape \(1,\) after a reset"),
        (pair(reset=lambda key: ({"t": 0, "x": 0}, jnp.zeros(1))), "its state has the shape"),
        (
            pair(step=lambda s, a, k: (s, jnp.zeros(1), jnp.ones(1), False, False, {})),
            r"the reward of JaxEnv has the shape \(1,\)",
        ),
        (
            pair(step=lambda s, a, k: (s, jnp.zeros(1), 0.0, False, jnp.zeros(2, bool), {})),
            r"the truncated of JaxEnv has the shape \(2,\)",
        ),
        (pair(step=lambda s, a, k: (s, jnp.zeros(1), 0.0, False, False)), "step of JaxEnv must return"),
        (pair(step=lambda s, a, k: (s, jnp.zeros(1), 0.0, False, False, None)), "info is a dict"),
        (pair(reset=lambda key: (jax.random.key(0), jnp.zeros(1))), "has a typed key"),
        ("gymnasium:CartPole-v1", "the nearest is 'gymnax:'"),
    ],
)
def test_what_does_not_fit_is_refused(env, message):
    with pytest.raises(ValueError, match=message):
        make_jax_env(env)


def test_what_is_not_known_of_info_is_left_out():
    def step(state, action, key):
        return state, jnp.zeros(1), 0.0, False, False, {"name": "x", "control_mask": 0.0}

    env = make_jax_env(pair(step=step))
    state, _ = env.reset(jax.random.PRNGKey(0))
    assert env.step(state, 0, jax.random.PRNGKey(0))[-1] == {"control_mask": 0.0}


def test_other_objects_are_refused():
    with pytest.raises(TypeError, match="expected 'gymnax:ID'"):
        make_jax_env(probe.ConstantReward())
    with pytest.raises(TypeError, match="expected 'gymnax:ID'"):
        make_jax_env((reset, step))
    with pytest.raises(ValueError, match="time_limit: must be >= 1"):
        make_jax_env(pair(), time_limit=0)


@pytest.mark.parametrize("suite, module", [("gymnax", "gymnax"), ("brax", "brax")])
def test_without_the_library_the_extra_is_named(suite, module, monkeypatch):
    monkeypatch.setitem(sys.modules, module, None)  # makes its import fail
    with pytest.raises(ImportError, match=r"rl_trainers\[jax-envs\]"):
        make_jax_env(f"{suite}:something")


# The probes.


def episode(env, act, key=KEY):
    """Observations, rewards and the end of one episode."""
    state, observation = env.reset(key)
    seen, rewards = [observation.tolist()], []
    while True:
        state, observation, reward, *ends, _ = env.step(state, jnp.asarray(act(observation)), key)
        seen.append(observation.tolist())
        rewards.append(float(reward))
        if any(ends):
            return seen, rewards, tuple(map(bool, ends))


@pytest.mark.parametrize("continuous", [False, True])
@pytest.mark.parametrize("name", TWINS)
def test_probes_do_what_their_host_twins_do(name, continuous):
    native, host = getattr(probe_jax, name)(continuous), TWINS[name](continuous)
    assert native.observation_space == host.observation_space
    assert native.action_space == host.action_space and native.name == type(host).__name__
    signs = set()
    for i in range(8):
        key = jax.random.PRNGKey(i)
        action = np.array([i / 8], np.float32) if continuous else i % 2
        seen, rewards, ends = episode(native, lambda o, a=action: a, key)
        host.reset()
        host.sign = float(native.reset(key)[0].sign)
        signs.add(host.sign)
        expected = [host.look().tolist()], []
        for _ in rewards:
            observation, reward, *host_ends, _ = host.step(action)
            expected[0].append(observation.tolist())
            expected[1].append(reward)
        assert seen == expected[0] and ends == tuple(host_ends)
        np.testing.assert_allclose(rewards, expected[1], rtol=1e-6)
    assert signs == {-1.0, 1.0}


FIXED_LENGTH = {
    "fixed_length": probe.FixedLength,
    "fixed_length_policy": probe.FixedLengthPolicy,
    "fixed_length_memory": probe.FixedLengthMemory,
}


@pytest.mark.parametrize("continuous", [False, True])
@pytest.mark.parametrize("name", FIXED_LENGTH)
def test_fixed_length_probes_do_what_their_host_twins_do(name, continuous, monkeypatch):
    native = getattr(probe_jax, name)(6, continuous=continuous)
    host = FIXED_LENGTH[name](6, continuous=continuous)
    assert native.observation_space == host.observation_space
    assert native.action_space == host.action_space and native.name == type(host).__name__
    monkeypatch.setattr(host, "redraws", False)  # its draws are put in
    seen = set()
    for i in range(8):
        key = jax.random.PRNGKey(i)
        action = np.array([i / 8], np.float32) if continuous else i % 2
        state, observation = native.reset(key)
        host.reset()
        host.sign = float(state.sign)
        for t in range(5):
            seen.add(float(observation[0]))
            assert observation.tolist() == host.look().tolist()
            state, observation, reward, *ends, _ = native.step(
                state, jnp.asarray(action), jax.random.fold_in(key, t)
            )
            _, host_reward, *host_ends, _ = host.step(action)
            host.sign = float(state.sign)
            assert [bool(end) for end in ends] == host_ends == [t == 4, False]
            assert float(reward) == pytest.approx(host_reward, rel=1e-6)
        assert observation.tolist() == host.look().tolist()
    assert (
        seen == {"fixed_length": {1}, "fixed_length_policy": {0, 1}, "fixed_length_memory": {-1, 0, 1}}[name]
    )


def test_fixed_length_policy_draws_at_every_step():
    env = probe_jax.fixed_length_policy(1000)
    state, _ = env.reset(KEY)

    def step(state, key):
        state, observation, *_ = env.step(state, jnp.int32(0), key)
        return state, observation[0]

    _, seen = jax.lax.scan(step, state, jax.random.split(KEY, 900))
    assert 390 < seen.sum() < 510  # 450 +- 4 standard deviations of 15


def test_fixed_length_probes_refuse_what_leaves_nothing():
    with pytest.raises(ValueError, match="episode_length: must be >= 2, got 1"):
        probe_jax.fixed_length(1)
    with pytest.raises(ValueError, match=r"gap: must be 0\.\.3, got 4"):
        probe_jax.fixed_length_memory(5, gap=4)


def test_endless_counts_its_steps():
    env = probe_jax.endless()
    state, observation = env.reset(KEY)
    assert observation.tolist() == [0]
    for t in range(1, 9):
        state, observation, reward, terminated, truncated, _ = env.step(state, jnp.int32(0), KEY)
        assert (observation.tolist(), float(reward)) == ([t], 1.0) and not (terminated | truncated)


@pytest.mark.parametrize("truncates", [False, True])
def test_counting(truncates):
    env = probe_jax.counting(3, truncates)
    seen, rewards, ends = episode(env, lambda o: 0)
    assert rewards == [1, 2, 3] and ends == (not truncates, truncates)
    assert [o[2] for o in seen] == [0, 1, 2, 3] and len({o[1] for o in seen}) == 1
    assert episode(env, lambda o: 0, jax.random.PRNGKey(1))[0][0][1] != seen[0][1]


# The view.


def test_a_view_counts_to_the_limit_and_starts_anew():
    view = GymView(tuple(probe_jax.endless())[:4])  # what is not settled yet is taken too
    assert view.reset(seed=0)[0].shape == (1,)
    view = GymView(probe_jax.endless()._replace(time_limit=2))
    for _ in range(2):
        assert view.reset()[0].tolist() == [0]
        assert view.step(0)[:4] == (1.0, 1.0, False, False)
        assert view.step(1)[:4] == (2.0, 1.0, False, True)


def test_a_view_follows_its_seed():
    views = [GymView(probe_jax.counting(3)) for _ in range(2)]
    first, second = ([v.reset(seed=5)[0][1], v.reset()[0][1], v.reset(seed=5)[0][1]] for v in views)
    assert first == second and first[0] == first[2] != first[1]
    assert views[0].reset(seed=6)[0][1] != first[0]


def test_a_view_is_a_gymnasium_env():
    view = GymView(probe_jax.action_and_observation_reward(continuous=True))
    observation, info = view.reset(seed=0)
    assert isinstance(observation, np.ndarray) and view.observation_space.contains(observation)
    observation, reward, terminated, truncated, info = view.step(np.array([0.5], np.float32))
    assert view.observation_space.contains(observation) and isinstance(reward, float) and info == {}
    assert (terminated, truncated) == (True, False) and int(view.state.t) == 1


# Gymnax; these need the extra jax-envs.


@pytest.fixture
def gymnax():
    return pytest.importorskip("gymnax", reason="needs the extra jax-envs")


def test_cartpole_moves_as_gymnasiums_does(gymnax):
    env = make_jax_env("gymnax:CartPole-v1")
    host = gymnasium.make("CartPole-v1").unwrapped
    host.reset(seed=0)
    assert env.action_space == host.action_space and env.name == "CartPole-v1"
    # Where gymnasium says inf, gymnax says the largest f32.
    bounds = np.minimum(host.observation_space.high, np.finfo(np.float32).max)
    np.testing.assert_allclose(env.observation_space.high, bounds, rtol=1e-6)
    advance, rng = jax.jit(env.step), np.random.default_rng(0)
    for i in range(20):
        state, observation = env.reset(jax.random.PRNGKey(i))
        assert np.abs(observation).max() <= 0.05
        host.reset()
        terminated = False
        while not terminated:
            host.state, action = np.asarray(observation, np.float64), int(rng.integers(2))
            expected = host.step(action)
            state, observation, reward, terminated, truncated, _ = advance(state, action, KEY)
            np.testing.assert_allclose(observation, expected[0], rtol=1e-5, atol=1e-6)
            assert (float(reward), bool(terminated)) == expected[1:3] and not truncated


def test_cartpole_is_truncated_by_its_clock_and_terminated_by_its_fall(gymnax):
    env, params = gymnax.make("CartPole-v1")
    assert is_jax_env((env, params))
    made = make_jax_env((env, params.replace(max_steps_in_episode=4)))
    state, _ = made.reset(KEY)
    ends = []
    for _ in range(4):
        state, observation, reward, *flags, _ = made.step(state, 0, KEY)
        ends.append([bool(x) for x in flags])
    assert ends == [[False, False]] * 3 + [[False, True]]
    # Where both come together it is a termination.
    fallen = state.replace(theta=jnp.float32(1.0), time=jnp.int32(3))
    _, observation, reward, terminated, truncated, _ = made.step(fallen, 0, KEY)
    assert (bool(terminated), bool(truncated)) == (True, False)
    # The observation is that of the fall, not of a reset.
    assert observation[2] > 0.9


def test_breakout_of_minatar(gymnax):
    env = make_jax_env("gymnax:Breakout-MinAtar", time_limit=50)
    assert env.observation_space.shape == (10, 10, 4) and env.action_space == spaces.Discrete(3)
    advance = jax.jit(env.step)
    state, observation = env.reset(KEY)
    assert float(observation[:, :, 3].sum()) == 30  # bricks
    n_steps, terminated = 0, False
    while not terminated and n_steps < 50:
        state, observation, reward, terminated, truncated, _ = advance(state, 0, KEY)
        n_steps += 1
    # The ball falls through where the paddle does not move.
    assert bool(terminated) and not bool(truncated) and n_steps > 5


def test_spaces_and_dtypes_of_gymnax(gymnax):
    # It states int64, which JAX has not, and returns f32.
    catch = make_jax_env("gymnax:Catch-bsuite")
    assert catch.observation_space == spaces.Box(0.0, 1.0, (10, 5), np.float32)
    # It states f32 and returns integers.
    rooms = make_jax_env("gymnax:FourRooms-misc")
    assert rooms.observation_space.dtype == rooms.reset(KEY)[1].dtype == np.float32
    pendulum = make_jax_env("gymnax:Pendulum-v1")
    assert pendulum.action_space == spaces.Box(-2.0, 2.0, (1,), np.float32)


def test_the_clock_that_an_observation_shows_is_the_real_one(gymnax):
    env = from_gymnax("DiscountingChain-bsuite")
    state, _ = env.reset(KEY)
    _, observation, *_ = env.step(state, 0, KEY)
    assert observation[1] == pytest.approx(1 / 100)


def test_unknown_ids_of_gymnax_name_the_nearest(gymnax):
    with pytest.raises(ValueError, match="no environment 'CartPole-v2'; the nearest is 'gymnax:CartPole-v1'"):
        make_jax_env("gymnax:CartPole-v2")


# Brax; these need the extra jax-envs.


@pytest.fixture
def brax():
    return pytest.importorskip("brax.envs", reason="needs the extra jax-envs")


def test_fast_of_brax(brax):
    env = make_jax_env("brax:fast")
    assert env.time_limit == 1000 and env.name == "fast"
    assert env.observation_space == spaces.Box(-np.inf, np.inf, (2,), np.float32)
    assert env.action_space == spaces.Box(-1.0, 1.0, (1,), np.float32)
    state, observation = env.reset(KEY)
    # Its speed grows by 0.02 a step, and its place, which is the reward, by 0.02 times that.
    for place in (1, 3, 6):
        state, observation, reward, terminated, truncated, _ = env.step(state, jnp.ones(1), KEY)
        assert float(reward) == float(observation[0]) == pytest.approx(0.02**2 * place)
        assert not terminated and not truncated
    assert observation[1] == pytest.approx(0.06)
    assert from_brax(brax.get_environment("fast"), time_limit=5).time_limit == 5
    with pytest.raises(ValueError, match="the nearest is 'brax:fast'"):
        make_jax_env("brax:fest")
