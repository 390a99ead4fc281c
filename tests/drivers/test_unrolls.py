import collections
import threading
import time

import gymnasium
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gymnasium import spaces

from rl_trainers.drivers.unrolls import AsyncUnrolls
from rl_trainers.envs import EnvError, make_host_env
from rl_trainers.envs.probe import Counting
from rl_trainers.rollout import initial_actor, unroll_host

KEY = np.array([0, 7], np.uint32)


class Echo(gymnasium.Env):
    """Observation ``[env_id, t]``, checks that the action is ``[env_id, t]``; no end.

    Notes the threads that step it.
    """

    observation_space = spaces.Box(-np.inf, np.inf, (2,), np.float32)
    action_space = spaces.Box(-np.inf, np.inf, (2,), np.float32)

    def __init__(self, env_id, seconds=0.0):
        self.env_id, self.seconds, self.t = env_id, seconds, 0
        self.threads = set()

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.t = 0
        return np.array([self.env_id, 0], np.float32), {}

    def step(self, action):
        assert list(action) == [self.env_id, self.t], (action, self.env_id, self.t)
        self.threads.add(threading.current_thread().name)
        self.t += 1
        time.sleep(self.seconds)
        return np.array([self.env_id, self.t], np.float32), 1.0, False, False, {}


class Failing(Counting):
    """Raises in its fifth step."""

    def step(self, action):
        if self.t == 4:
            raise ValueError("boom")
        return super().step(action)


def echo(observation, policy_state, needs_reset, key):
    """Acts with the environment's number and with its own count of that environment's steps."""
    action = np.stack([observation[:, 0], policy_state], axis=1)
    return action, action, policy_state + 1, key


def zeros(observation, policy_state, needs_reset, key):
    return np.zeros(len(observation), np.int64), None, policy_state, key


def echo_envs(n, size, seconds=0.0):
    singles = [[Echo(i * size + b, seconds) for b in range(size)] for i in range(n)]
    hosts = [make_host_env([lambda e=e: e for e in row], size) for row in singles]
    return hosts, [e for row in singles for e in row]


def counting_envs(n, size, cls=Counting, length=3):
    return [
        make_host_env([lambda e=i * size + b: cls(length, e) for b in range(size)], size) for i in range(n)
    ]


def begin(envs, act=zeros, policy_state=(), unroll_length=4, caps=(1, 1, 1), **settings):
    engine = AsyncUnrolls(
        envs, policy_state, np.asarray, unroll_length, *caps, **{"seed": 0, "key": KEY} | settings
    )
    engine.publish(act, 0)
    engine.start()
    return engine


def our_threads():
    return [t for t in threading.enumerate() if t.name.startswith("rl_trainers")]


@pytest.fixture(autouse=True)
def no_thread_is_left():
    yield
    assert our_threads() == []


def wait_until(predicate):
    """Only guards against a hang."""
    end = time.monotonic() + 30
    while not predicate():
        assert time.monotonic() < end
        time.sleep(0.001)


@pytest.mark.parametrize(
    ("n", "learn_cap", "length", "actor_cap", "n_actors", "size"),
    [
        (50, 20, 10, 5, 5, 1),
        (20, 10, 10, 10, 1, 2),
        (1, 3, 4, 1, 1, 2),
        (5, 2, 3, 2, 2, 2),
        (4, 4, 1, 4, 1, 1),
    ],
)
def test_batches_have_the_unrolls_asked_for_and_answers_reach_who_asked(
    n, learn_cap, length, actor_cap, n_actors, size
):
    envs, singles = echo_envs(n, size)
    engine = begin(envs, echo, np.zeros(size), length, (n_actors, actor_cap, learn_cap))
    batches = [engine.take() for _ in range(5)]
    engine.stop()

    assert [len(batch) for batch in batches] == [learn_cap] * 5
    rows = collections.defaultdict(list)
    for unroll in [u for batch in batches for u in batch]:
        steps = unroll.rollout.steps
        assert steps.mask.shape == (length, size)
        first = unroll.env_index * size
        assert unroll.env_id.tolist() == list(range(first, first + size))
        np.testing.assert_array_equal(steps.observation[..., 0], np.tile(unroll.env_id, (length, 1)))
        np.testing.assert_array_equal(steps.dist_inputs, steps.action)
        np.testing.assert_array_equal(unroll.rollout.last_observation[:, 1], steps.observation[-1, :, 1] + 1)
        rows[unroll.env_index] += steps.observation[:, 0, 1].tolist()
    # Unrolls of an environment follow one another.
    assert all(r == list(range(len(r))) for r in rows.values())
    # Each environment has one thread.
    for single in singles:
        assert single.threads <= {f"rl_trainers env {single.env_id // size}"}


def test_each_environment_asks_its_actor():
    asked = collections.defaultdict(set)

    def act(observation, policy_state, *rest):
        asked[threading.current_thread().name] |= set(observation[:, 0].astype(int))
        return echo(observation, policy_state, *rest)

    envs, _ = echo_envs(5, 1)
    engine = begin(envs, act, np.zeros(1), 3, (2, 2, 5))
    while len(asked.get("rl_trainers actor 0", ())) < 3:  # two of its three are enough for an unroll
        engine.take()
    engine.stop()
    del asked[threading.current_thread().name]  # that of start(), which compiles
    assert asked == {"rl_trainers actor 0": {0, 2, 4}, "rl_trainers actor 1": {1, 3}}


def test_rows_of_each_environment_are_those_of_a_plain_unroll():
    engine = begin(counting_envs(3, 2), unroll_length=5, caps=(1, 2, 3))
    unrolls = [u for _ in range(4) for u in engine.take()]
    engine.stop()

    for i in range(3):
        own = [u.rollout for u in unrolls if u.env_index == i]
        env = counting_envs(3, 2)[i]
        actor = initial_actor(env.reset(0, 2 * i), 2, KEY)
        for rollout in own:
            actor, expected, _ = unroll_host(env, zeros, actor, 5)
            jax.tree.map(np.testing.assert_array_equal, rollout, expected)


def test_rule_against_deadlock():
    envs = counting_envs(5, 1)
    with pytest.raises(
        ValueError, match=r"is 3 \* 2.*only 5.*num_envs=6, actor_queue_cap=1, num_actor_queues=2"
    ):
        AsyncUnrolls(envs, (), np.asarray, 4, 3, 2, 1, seed=0, key=KEY)
    with pytest.raises(ValueError, match=r"is 1 \* 6.*num_envs=6, actor_queue_cap=5$"):
        AsyncUnrolls(envs, (), np.asarray, 4, 1, 6, 1, seed=0, key=KEY)
    for caps in [(5, 1, 1), (1, 5, 1), (2, 2, 7)]:
        engine = begin(counting_envs(5, 1), caps=caps)
        assert len(engine.take()) == caps[2]
        engine.stop()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"unroll_length": 0}, "unroll_length=0 must be a whole number of at least 1"),
        ({"learn_queue_cap": 0}, "learn_queue_cap=0 must be a whole number of at least 1"),
        ({"max_policy_lag": -1}, "max_policy_lag=-1 must be a whole number of at least 0"),
        ({"lock_step": True, "learn_queue_cap": 1}, "learn_queue_cap: is 1, but lock_step with 2 .* needs 2"),
        ({"lock_step": True, "num_actor_queues": 2}, "num_actor_queues: is 2, but lock_step .* needs 1"),
    ],
)
def test_settings_that_do_not_fit_are_refused(settings, message):
    arguments = {"unroll_length": 4, "seed": 0, "key": KEY} | settings
    with pytest.raises(ValueError, match=message):
        AsyncUnrolls(counting_envs(2, 1), (), np.asarray, **arguments)


def test_environments_that_do_not_fit_are_refused():
    one = counting_envs(1, 1)[0]
    for envs, message in [
        ([], "is empty"),
        ([one, one], "given twice"),
        ([one, *counting_envs(1, 2)], "num_envs of number 1 is 2, but 1 of the first"),
    ]:
        with pytest.raises(ValueError, match=message):
            AsyncUnrolls(envs, (), np.asarray, 4, seed=0, key=KEY)


def test_cold_starts_with_two_actor_threads():
    for seed in range(50):

        @jax.jit
        def act(observation, policy_state, needs_reset, key, seed=seed):
            key, key_act = jax.random.split(key)
            action = jax.random.randint(key_act, (len(observation),), 0, 2)
            return action, observation + seed, policy_state, key

        engine = begin(counting_envs(4, 1), act, caps=(2, 2, 1), seed=seed)
        if seed % 2:
            engine.take()
        engine.stop()
        assert our_threads() == []


def test_start_and_stop_in_any_order():
    engine = AsyncUnrolls(counting_envs(1, 1), (), np.asarray, 4, seed=0, key=KEY)
    with pytest.raises(RuntimeError, match="publish"):
        engine.start()
    with pytest.raises(RuntimeError, match="call start"):
        engine.take()
    engine.stop()
    engine.stop()
    engine.publish(zeros, 0)
    with pytest.raises(RuntimeError, match="called before"):
        engine.start()

    engine = begin(counting_envs(1, 1))
    with pytest.raises(RuntimeError, match="called before"):
        engine.start()
    engine.stop()
    engine.stop()
    with pytest.raises(RuntimeError, match="stopped"):
        engine.take()


def test_error_of_an_environment_reaches_the_caller():
    envs = counting_envs(3, 1, length=100)
    envs[1] = counting_envs(1, 1, Failing, 100)[0]
    engine = begin(envs, unroll_length=3, caps=(1, 3, 100))
    for _ in range(2):
        with pytest.raises(EnvError, match="boom") as caught:
            engine.take()
    assert isinstance(caught.value.__cause__, ValueError)
    assert caught.value.__notes__ == ["raised in the thread 'env 1'"]
    assert any(entry.name == "_step" for entry in caught.traceback)
    engine.stop()
    engine.stop()


def test_error_of_the_policy_reaches_the_caller():
    calls = []

    def act(observation, *rest):
        calls.append(0)
        if len(calls) == 9:
            raise KeyError("no such action")
        return zeros(observation, *rest)

    engine = begin(counting_envs(4, 1), act, caps=(2, 2, 100))
    with pytest.raises(KeyError, match="no such action") as caught:
        engine.take()
    assert any(entry.name == "act" for entry in caught.traceback)
    engine.stop()


def test_error_of_an_observer_reaches_the_caller_though_batches_are_ready():
    def observe(rollout, env_id):
        raise ZeroDivisionError("in the observer")

    engine = begin(counting_envs(4, 1), caps=(1, 1, 1), observers=[observe])
    with pytest.raises(ZeroDivisionError, match="in the observer"):
        while True:
            engine.take()
    engine.stop()


def test_error_in_start_is_the_callers():
    def act(*arguments):
        raise TypeError("does not fit")

    engine = AsyncUnrolls(counting_envs(1, 1), (), np.asarray, 4, seed=0, key=KEY)
    engine.publish(act, 0)
    with pytest.raises(TypeError, match="does not fit"):
        engine.start()
    engine.stop()


def test_error_that_nobody_took_is_logged_by_stop(caplog):
    engine = begin([*counting_envs(1, 1, Failing, 100)], caps=(1, 1, 100))
    wait_until(lambda: engine.is_stopped)
    engine.stop()

    assert "a thread failed after the last take()" in caplog.text
    assert "ValueError: boom" in caplog.text


def test_stop_ends_every_kind_of_wait():
    # Environments wait for the learner, who never takes.
    engine = begin(counting_envs(3, 1))
    wait_until(lambda: engine.n_finished == 1 + 3)
    time.sleep(0.05)
    assert engine.n_finished == 1 + 3  # the queue's one, and one of each that waits behind it
    engine.stop()
    # An actor waits for a second request, and one of its environments for that actor.
    envs, _ = echo_envs(2, 1, 0.3)
    engine = begin(envs, echo, np.zeros(1), 1, (1, 2, 1))
    engine.stop()
    # A caller waits in another thread.
    envs, _ = echo_envs(1, 1, 0.01)
    engine = begin(envs, echo, np.zeros(1), 1, (1, 1, 10**6))
    errors = []

    def take():
        try:
            engine.take()
        except RuntimeError as error:
            errors.append(str(error))

    thread = threading.Thread(target=take)
    thread.start()
    wait_until(lambda: engine.n_finished > 3)
    engine.stop()
    thread.join(5)
    assert errors == ["the threads are stopped"]


def test_observers_see_every_finished_unroll_once_and_in_order():
    seen = collections.defaultdict(list)
    slow, order = [], []

    def observe(rollout, env_id):
        time.sleep(0.002)
        seen[int(env_id[0])].append(rollout)
        order.append("first")

    engine = begin(
        counting_envs(3, 2),
        caps=(1, 1, 2),
        observers=[observe, lambda rollout, env_id: slow.append(rollout.steps.mask)],
    )
    taken = [u for _ in range(5) for u in engine.take()]
    engine.stop()

    assert sum(map(len, seen.values())) == len(slow) == engine.n_finished >= 10
    for i, rollouts in seen.items():
        # Rows of one environment in time order: [episode, t] of Counting, whose episodes have 3 steps.
        got = np.concatenate([r.steps.observation[:, 0, 1:] for r in rollouts])
        expected = [[e, t] for e in range(len(got)) for t in range(4)][: len(got)]
        np.testing.assert_array_equal(got, expected)
        own = [u.rollout for u in taken if u.env_index * 2 == i]
        assert all(any(r is o for r in rollouts) for o in own)
    # A row in four is a reset row.
    total = sum(int(mask.sum()) for mask in slow)
    assert total == 3 * 2 * engine.n_finished


def test_observer_that_is_too_slow_is_given_up_at_stop(caplog, monkeypatch):
    monkeypatch.setattr("rl_trainers.drivers.unrolls._STOP_SECONDS", 0.2)
    release = threading.Event()
    engine = begin(counting_envs(2, 1), observers=[lambda rollout, env_id: release.wait(20)])
    wait_until(lambda: engine.n_finished >= 2)
    engine.stop()
    assert "the thread 'rl_trainers observers' did not end" in caplog.text
    assert "were not observed in time" in caplog.text
    release.set()
    wait_until(lambda: our_threads() == [])


def test_slow_observers_hold_environments_back():
    release = threading.Event()
    engine = begin(counting_envs(2, 1), caps=(1, 1, 1), observers=[lambda rollout, env_id: release.wait(20)])
    for _ in range(3):
        engine.take()
    wait_until(lambda: len(engine._unobserved) > 2)
    time.sleep(0.05)
    # One is being observed; two may wait before environments do, and each of them finished one more at most.
    assert engine.n_finished <= 1 + 2 + 2
    release.set()
    engine.take()
    engine.stop()


@jax.jit
def sampling(observation, policy_state, needs_reset, key):
    """Draws with the key, and remembers a sum that starts anew with each episode."""
    key, key_act = jax.random.split(key)
    action = jax.random.uniform(key_act, (len(observation), 1), minval=-1.0)
    policy_state = jnp.where(needs_reset, 0.0, policy_state + action[:, 0])
    return action, jnp.stack([observation[:, 0], policy_state], -1), policy_state, key


@pytest.mark.parametrize("env", ["Pendulum-v1", "MountainCarContinuous-v0"])
def test_lock_step_makes_the_rows_of_one_large_batch(env):
    envs = [make_host_env(env, 2, time_limit=7) for _ in range(3)]
    engine = begin(envs, sampling, np.zeros(2, np.float32), 5, (None, None, None), seed=3, lock_step=True)
    large = make_host_env(env, 6, time_limit=7)
    actor = initial_actor(large.reset(3), 6, KEY, np.zeros(6, np.float32))
    for _ in range(4):
        unrolls = engine.take()
        actor, expected, _ = unroll_host(large, sampling, actor, 5)

        assert [u.env_index for u in unrolls] == [0, 1, 2]
        got = jax.tree.map(lambda *xs: np.concatenate(xs, 1), *[u.rollout.steps for u in unrolls])
        jax.tree.map(np.testing.assert_array_equal, got, expected.steps)
        last = np.concatenate([u.rollout.last_observation for u in unrolls])
        np.testing.assert_array_equal(last, expected.last_observation)
    engine.stop()
    assert engine.n_finished == 12
    assert engine.lags == {0: 12}


def test_lock_step_waits_for_a_caller_who_was_interrupted(monkeypatch):
    engine = begin(counting_envs(2, 1, length=100), unroll_length=3, caps=(None, None, None), lock_step=True)

    def interrupted():
        raise KeyboardInterrupt

    for k in range(3):
        with monkeypatch.context() as patch:
            patch.setattr(engine._has_finished, "wait", interrupted)
            patch.setattr(engine, "_finished", collections.deque())
            with pytest.raises(KeyboardInterrupt):
                engine.take()
            wait_until(lambda k=k: engine.n_finished == 2 * (k + 1))
            time.sleep(0.05)
            made = list(engine._finished)
        engine._finished.extend(made)
        assert engine.n_finished == 2 * (k + 1)  # each one more, and no more
        rows = [u.rollout.steps.observation[:, 0, 2].tolist() for u in engine.take()]
        assert rows == [[3 * k, 3 * k + 1, 3 * k + 2]] * 2
    engine.stop()


def test_lock_step_acts_with_what_was_published_before_take():
    engine = begin(counting_envs(2, 1), caps=(None, None, None), lock_step=True)
    for version in range(1, 5):
        unrolls = engine.take()
        assert [int(u.rollout.policy_version) for u in unrolls] == [version - 1] * 2
        assert (np.concatenate([u.rollout.steps.action for u in unrolls]) == (version - 1) % 2).all()

        def act(observation, policy_state, needs_reset, key, version=version):
            return np.full(len(observation), version % 2), None, policy_state, key

        engine.publish(act, version)
    engine.stop()


@pytest.mark.parametrize(("n", "learn_cap"), [(4, 2), (5, 2), (3, 3), (1, 1), (3, 1)])
def test_lag_where_the_learner_is_the_bottleneck(n, learn_cap):
    engine = begin(counting_envs(n, 1), caps=(1, 1, learn_cap), max_policy_lag=1000)
    lags = []
    for k in range(12):
        wait_until(lambda k=k: engine.n_finished == (k + 1) * learn_cap + n)  # all environments wait
        unrolls = engine.take()
        assert [int(u.rollout.policy_version) + u.policy_lag for u in unrolls] == [k] * learn_cap
        lags += [u.policy_lag for u in unrolls]
        engine.publish(zeros, k + 1)
    engine.stop()

    bound = -(-n // learn_cap) + 1
    assert bound - 1 <= max(lags) <= bound
    assert engine.lags == collections.Counter(lags)
    assert engine.n_dropped == 0


def test_unrolls_that_are_too_old_are_dropped(caplog):
    engine = begin(counting_envs(3, 1), max_policy_lag=1)
    wait_until(lambda: engine.n_finished == 1 + 3)
    engine.publish(zeros, 1)
    engine.publish(zeros, 2)
    (unroll,) = engine.take()  # the four that were ready are two publishes old

    assert int(unroll.rollout.policy_version) == 2
    assert engine.n_dropped == 4
    assert engine.lags == {0: 1}
    assert caplog.text.count("max_policy_lag=1") == 1
    engine.stop()


def test_lag_is_bounded_whatever_the_speeds():
    envs = [make_host_env(lambda s=s: Echo(0, s)) for s in (0.0, 0.001, 0.02)]
    engine = begin(envs, echo, np.zeros(1), 4, (1, 1, 1), max_policy_lag=3)
    for version in range(1, 40):
        (unroll,) = engine.take()
        assert unroll.policy_lag <= 3
        assert version - 1 - int(unroll.rollout.policy_version) == unroll.policy_lag
        engine.publish(echo, version)
    engine.stop()


class Waiting(Echo):
    """Its steps take until ``released``."""

    released = None

    def step(self, action):
        self.released.wait(30)
        return super().step(action)


def test_slow_environments_do_not_hold_fast_ones_up(monkeypatch):
    monkeypatch.setattr(Waiting, "released", threading.Event())
    envs = [make_host_env(lambda cls=cls: cls(0)) for cls in (Echo, Waiting)]
    engine = begin(envs, echo, np.zeros(1), 4, (1, 1, 1))
    assert [engine.take()[0].env_index for _ in range(20)] == [0] * 20
    Waiting.released.set()
    while engine.take()[0].env_index != 1:
        pass
    engine.stop()


def test_sub_environments_have_seeds_of_their_own():
    engine = begin([make_host_env("CartPole-v1", 2, backend="sync") for _ in range(3)], caps=(1, 1, 3))
    unrolls = {}
    while len(unrolls) < 3:
        for unroll in engine.take():
            unrolls.setdefault(unroll.env_index, unroll)
    engine.stop()
    first = np.concatenate([unrolls[i].rollout.steps.observation[0] for i in range(3)])
    expected = make_host_env("CartPole-v1", 6, backend="sync").reset(0)
    np.testing.assert_array_equal(first, expected)
    assert len(np.unique(first, axis=0)) == 6
