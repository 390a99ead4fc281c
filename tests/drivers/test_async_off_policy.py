import collections
import functools
import multiprocessing
import threading
import time
import types

import gymnasium
import jax
import numpy as np
import pytest

from rl_trainers import RLTask
from rl_trainers.drivers import AsyncOffPolicyDriver, StepMetric
from rl_trainers.envs import EnvError, GymView, make_host_env
from rl_trainers.envs.probe import ConstantReward, Counting
from rl_trainers.rollout import unroll_host


class FourSteps(ConstantReward):
    """ALF's value environment: reward 1, four decisions, and the reset row is the fifth of an episode."""

    length = 4


class Algorithm:
    """What a driver needs of a trainer; acts with ``step`` modulo 2, or as it is told."""

    is_recurrent = on_policy = False

    def __init__(self, env, act=None, policy_state=(), use_rollout_state=False, **settings):
        self.task = env if isinstance(env, RLTask) else RLTask(env, **settings)
        self.task.make_envs = functools.partial(make_host_env, env)
        self.use_rollout_state = use_rollout_state
        self.state = types.SimpleNamespace(step=0)
        self._act, self._policy_state = act, policy_state

    def why_not(self, driver):
        return ""

    def train_on(self, data):
        raise AssertionError("no test here trains")

    def actor(self):
        step = self.state.step

        def act(observation, policy_state, needs_reset, key):
            return np.full(len(observation), step % 2), np.zeros((len(observation), 2)), policy_state, key

        return self._act or act

    def initial_policy_state(self, num_envs):
        return jax.tree.map(lambda x: np.repeat(x[None], num_envs, axis=0), self._policy_state)


@jax.jit
def sampling(observation, policy_state, needs_reset, key):
    key, key_act = jax.random.split(key)
    action = jax.random.uniform(key_act, (len(observation), 1), minval=-1.0)
    return action, observation, policy_state + action[:, 0], key


@pytest.fixture(autouse=True)
def no_thread_is_left():
    yield
    assert [t for t in threading.enumerate() if t.name.startswith("rl_trainers")] == []


@pytest.fixture
def closing():
    drivers = []
    yield lambda *args, **kwargs: drivers.append(AsyncOffPolicyDriver(*args, **kwargs)) or drivers[-1]
    for driver in drivers:
        driver.close()


@pytest.mark.parametrize(
    ("n", "learn_cap", "length", "actor_cap", "n_actors", "iterations"),
    [(50, 20, 10, 5, 5, 10), (20, 10, 100, 10, 1, 20)],
)
def test_steps_and_metrics_of_alf(closing, n, learn_cap, length, actor_cap, n_actors, iterations):
    driver = closing(
        None, Algorithm(FourSteps), n_actors, length, learn_cap, actor_cap, env=FourSteps, num_envs=n
    )
    driver.start()
    taken = [driver.run_async() for _ in range(iterations)]
    driver.stop()

    assert taken == [learn_cap * length] * iterations
    assert sum(taken) in (2_000, 20_000)
    episodes, steps, average_return, average_length = driver.get_metrics()
    assert driver.get_step_metrics() == [episodes, steps]
    # Every finished unroll counts, and four rows in five are decisions.
    rows = driver.unrolls.n_finished * length
    assert sum(taken) <= rows <= sum(taken) + (learn_cap + n) * length
    assert steps.result() == rows * 4 // 5
    assert episodes.result() == rows // 5
    assert average_return.result() == average_length.result() == 4


def test_what_is_collected():
    algorithm = Algorithm(lambda: Counting(3), seed=0)
    envs = [make_host_env([lambda e=2 * i + b: Counting(3, e) for b in range(2)], 2) for i in range(3)]
    with_ids = []
    driver = AsyncOffPolicyDriver(
        envs, algorithm, unroll_length=5, learn_queue_cap=4, observers=[lambda r, e: with_ids.append(e)]
    )
    driver.start()
    rows = collections.defaultdict(list)
    for step in range(6):
        rollout, env_id = driver.collect()
        assert rollout.steps.mask.shape == (5, 8)
        assert env_id.shape == rollout.last_observation.shape[:1] == (8,)
        np.testing.assert_array_equal(rollout.steps.observation[0, :, 0], env_id)
        assert 0 <= rollout.policy_version <= step
        for column, i in enumerate(env_id):
            rows[i] += rollout.steps.observation[:, column, 1:].tolist()
        algorithm.state.step += 1
    driver.close()

    for own in rows.values():
        assert own == [[e, t] for e in range(len(own)) for t in range(4)][: len(own)]
    assert {tuple(ids) for ids in with_ids} == {(0, 1), (2, 3), (4, 5)}
    assert not any(env._venv.closed for env in envs)  # whoever made them closes them


def test_lock_step_is_a_synchronous_unroll_of_one_task(closing):
    algorithm = Algorithm("Pendulum-v1", sampling, np.float32(0), True, time_limit=7)
    driver = closing(
        algorithm=algorithm,
        env=functools.partial(gymnasium.make, "Pendulum-v1", max_episode_steps=7),
        num_envs=3,
        env_batch_size=2,
        unroll_length=5,
        lock_step=True,
        seed=11,
    )
    driver.start()
    task = RLTask("Pendulum-v1", num_envs=6, seed=11, time_limit=7)
    actor = task.actor._replace(policy_state=np.zeros(6, np.float32))
    for step in range(4):
        rollout, env_id = driver.collect()
        actor, expected, _ = unroll_host(task.env, sampling, actor, 5, task.distribution.to_env)

        assert env_id.tolist() == list(range(6))
        assert int(rollout.policy_version) == step
        jax.tree.map(np.testing.assert_array_equal, rollout._replace(policy_version=0), expected)
        algorithm.state.step += 1
    assert driver.get_step_metrics()[1].result() <= 4 * 5 * 6


def test_what_was_learned_is_acted_on(closing):
    algorithm = Algorithm(FourSteps)
    driver = closing(algorithm=algorithm, num_envs=2, lock_step=True)
    driver.start()
    for step in range(4):
        rollout, _ = driver.collect()
        assert (rollout.steps.action == step % 2).all()
        assert int(rollout.policy_version) == step
        algorithm.state.step += 1


@pytest.mark.parametrize("exp_replayer", ["one_time", "cycle_one_time"])
def test_replayers_give_every_decision_back_once(closing, exp_replayer):
    envs = [make_host_env(lambda i=i: Counting(3, i)) for i in range(4)]
    algorithm = Algorithm(lambda: Counting(3))
    driver = closing(envs, algorithm, unroll_length=5, learn_queue_cap=2, exp_replayer=exp_replayer)
    driver.start()
    decisions = collections.defaultdict(list)
    for _ in range(12):
        assert driver.run_async() == 10
        steps = driver.replayer.replay_all().steps
        for column in range(steps.mask.shape[1]):
            rows = steps.observation[steps.mask[:, column] > 0, column].astype(int)
            decisions[rows[0, 0]] += rows[:, 1:].tolist()
    for own in decisions.values():
        assert own == [[e, t] for e in range(len(own)) for t in range(3)][: len(own)]


def test_uniform_replay_holds_every_row(closing):
    driver = closing(algorithm=Algorithm(FourSteps), num_envs=4, learn_queue_cap=2, exp_replayer="uniform")
    driver.start()
    assert [driver.run_async() for _ in range(6)] == [16] * 6
    assert driver.replayer.total_size == 96


class Noting(FourSteps):
    """Notes what was made and closed, and whether it was closed in the middle of a step."""

    made, closed, broken = 0, 0, 0

    def __init__(self):
        super().__init__()
        type(self).made += 1
        self.is_open, self.is_stepping = True, False

    def step(self, action):
        self.is_stepping = True
        time.sleep(0.003)
        self.is_stepping = False
        return super().step(action)

    def close(self):
        type(self).broken += self.is_stepping
        type(self).closed += self.is_open
        self.is_open = False


@pytest.mark.parametrize("how", ["env", "env_f", "as in ALF", "task"])
def test_environments_are_made_once_and_closed_after_their_threads(how):
    algorithm = Algorithm(Noting, num_envs=2)
    Noting.made = Noting.closed = Noting.broken = 0
    source = {
        "env": {"env": Noting, "env_batch_size": 2},
        "env_f": {"env_f": lambda: make_host_env([Noting, Noting])},
        "as in ALF": {"envs": lambda: make_host_env([Noting, Noting])},
        "task": {},
    }[how]
    driver = AsyncOffPolicyDriver(algorithm=algorithm, num_envs=3, learn_queue_cap=2, **source)
    driver.start()
    for _ in range(3):
        driver.run_async()
    assert (Noting.made, Noting.closed) == (6, 0)
    driver.close()
    driver.close()
    assert (Noting.made, Noting.closed, Noting.broken) == (6, 6, 0)


def test_environments_that_were_made_are_closed_if_something_does_not_fit():
    algorithm = Algorithm(Noting)
    Noting.made = Noting.closed = 0
    for settings in [{"num_actor_queues": 4}, {"exp_replayer": "twice"}, {"use_rollout_state": True}]:
        with pytest.raises(ValueError, match=next(iter(settings))):
            AsyncOffPolicyDriver(algorithm=algorithm, num_envs=3, **settings)
    assert (Noting.made, Noting.closed) == (9, 9)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"algorithm": None}, "algorithm: must be a trainer such as PPOJoint\\(task\\), got None"),
        ({"envs": [FourSteps], "env": FourSteps}, "envs, env: give one of envs, env, env_f"),
        ({"envs": []}, "envs: is empty"),
        ({"envs": 2 * [FourSteps()]}, "envs: the same object is given twice"),
        ({"observers": print}, "observers: expected a list of functions"),
        ({"metrics": [3]}, "metrics: expected a list of functions"),
        ({"algorithm": Algorithm}, "algorithm: must be a trainer"),
        ({"unroll_length": 2.5}, "unroll_length=2.5 must be a whole number of at least 1"),
        ({"envs": [FourSteps], "num_envs": 2}, "num_envs: is 2, but envs has 1"),
        ({"env": FourSteps(), "num_envs": 2}, "env: one object cannot be num_envs=2 batches"),
        ({"env_f": FourSteps, "env_batch_size": 2}, "env_batch_size: is 2, but env_f has its own"),
        ({"num_envs": 0}, "num_envs=0 must be a whole number of at least 1"),
        ({"env": "CartPole-v1"}, r"env: observation_space is Box\(.*\(4,\).* in the task"),
        ({"exp_replayer": "uniformly"}, "nearest is 'uniform'"),
        ({"num_envs": 3, "learn_queue_cap": 2, "exp_replayer": "cycle_one_time"}, "learn_queue_cap"),
    ],
)
def test_arguments_that_do_not_fit_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        AsyncOffPolicyDriver(**{"algorithm": Algorithm(FourSteps)} | settings)


def test_a_class_may_make_several_environments(closing):
    driver = closing([FourSteps, FourSteps], Algorithm(FourSteps))
    assert len({id(env) for env in driver._envs}) == driver.total_envs == 2


def test_environments_in_jax_are_refused_with_the_way_out(closing):
    algorithm = Algorithm("gymnax:CartPole-v1")
    algorithm.task.make_envs = lambda n: algorithm.task.env
    with pytest.raises(ValueError, match="env: CartPole.*is in JAX.*GymView"):
        AsyncOffPolicyDriver(algorithm=algorithm)
    driver = closing(algorithm=algorithm, env=lambda: GymView("gymnax:CartPole-v1"), num_envs=2)
    driver.start()
    assert driver.run_async() == 8


def test_calls_at_the_wrong_time_say_so(closing):
    driver = closing(algorithm=Algorithm(FourSteps))
    driver.stop()
    with pytest.raises(RuntimeError, match="run_async"):
        driver.run(100)
    driver = closing(algorithm=Algorithm(FourSteps))
    with pytest.raises(RuntimeError, match=r"call start\(\)"):
        driver.run_async()


def test_rollout_states_are_kept_only_where_they_are_used(closing):
    for use in (False, True):
        algorithm = Algorithm("Pendulum-v1", sampling, np.float32(0), use)
        driver = closing(algorithm=algorithm, unroll_length=3, use_rollout_state=use)
        driver.start()
        assert len(jax.tree.leaves(driver.collect()[0].steps.policy_state)) == use


def test_a_driver_starts_anew_after_stop(closing):
    driver = closing(
        algorithm=Algorithm("Pendulum-v1", sampling, np.float32(0), time_limit=5),
        env=functools.partial(gymnasium.make, "Pendulum-v1", max_episode_steps=5),
        num_envs=2,
        lock_step=True,
        unroll_length=8,
        exp_replayer="uniform",
    )
    driver.stop()  # before the start it changes nothing
    first = []
    for _ in range(3):
        driver.start()
        with pytest.raises(RuntimeError, match="called before"):
            driver.start()
        for k in range(2):
            rollout, env_id = driver.collect()
            driver.replayer.observe(rollout, env_id)
            if k == 0:
                first.append(rollout.steps.observation[0])
        driver.stop()
        assert driver.unrolls.n_finished == 4
    # Other episodes each time; those that were cut do not count, and nothing runs on across the cut.
    assert len(np.unique(np.concatenate(first), axis=0)) == 6
    episodes, steps, _, length = driver.get_metrics()
    assert episodes.result() == 3 * 2 * 2  # 16 rows: two episodes of 5 with a reset row each, and 4 rows
    assert steps.result() == 3 * 2 * 14
    assert length.result() == 5
    stored = driver.replayer.replay_all().steps
    assert stored.mask.shape == (3 * 16 + 2, 2)  # with a row for each cut
    driver.close()
    with pytest.raises(RuntimeError, match="are closed"):
        driver.start()


class Failing(Counting):
    def step(self, action):
        if self.t == 4:
            raise ValueError("boom")
        return super().step(action)


def test_errors_of_environments_and_metrics_reach_the_caller(closing):
    driver = closing(algorithm=Algorithm(lambda: Failing(100)), num_envs=2, learn_queue_cap=9)
    driver.start()
    with pytest.raises(EnvError, match="boom"):
        driver.run_async()

    class Broken(StepMetric):
        def __call__(self, rollout, env_id):
            raise ZeroDivisionError("in a metric")

    driver = closing(algorithm=Algorithm(FourSteps), num_envs=2, metrics=[Broken()])
    driver.start()
    with pytest.raises(ZeroDivisionError, match="in a metric"):
        while True:
            driver.run_async()


def wait_for(condition):
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_an_error_while_the_caller_learns_is_told_before_a_new_start(closing):
    seen = []
    failing = make_host_env(lambda: Failing(100), 1)
    driver = closing(
        [failing], Algorithm(lambda: Failing(100)), unroll_length=2, observers=[lambda r, e: seen.append(e)]
    )
    driver.start()
    driver.run_async()
    wait_for(lambda: not driver.is_running)  # two unrolls are finished, the third one fails
    with pytest.raises(EnvError, match="boom"):
        driver.start()
    for _ in range(2):  # the environments have closed themselves
        with pytest.raises(RuntimeError, match="are closed"):
            driver.start()
        assert not driver.is_running
    assert len(seen) == 2
    assert [t for t in threading.enumerate() if t.name.startswith("rl_trainers")] == []


class Waits(Counting):
    """Says when it is in a step, and stays there until it is told to go on."""

    def __init__(self):
        super().__init__(100)
        self.entered, self.told = threading.Event(), threading.Event()

    def step(self, action):
        self.entered.set()
        self.told.wait(10)
        return super().step(action)


def test_a_new_start_waits_for_the_threads_that_an_error_has_stopped(closing):
    waits = Waits()

    class FailsMeanwhile(Counting):
        def step(self, action):
            waits.entered.wait(10)
            raise ValueError("boom")

    envs = [make_host_env(waits), make_host_env(FailsMeanwhile(100))]
    driver = closing(envs, Algorithm(lambda: Counting(100)), learn_queue_cap=2)
    driver.start()
    with pytest.raises(EnvError, match="boom"):
        driver.run_async()
    assert driver.unrolls.is_running(0)
    threading.Timer(0.2, waits.told.set).start()
    with pytest.raises(RuntimeError, match="are closed"):  # the failed ones closed themselves
        driver.start()
    assert waits.told.is_set()  # or waits would have been reset within its step


def test_environments_may_be_processes():
    before = set(multiprocessing.active_children())
    driver = AsyncOffPolicyDriver(
        algorithm=Algorithm("CartPole-v1"),
        env_f=lambda: make_host_env("CartPole-v1", 2, backend="process"),
        num_envs=2,
        learn_queue_cap=2,
    )
    driver.start()
    assert driver.run_async() == 2 * 8 * 2
    driver.close()
    assert set(multiprocessing.active_children()) == before
