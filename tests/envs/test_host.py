"""Host environments: autoreset, time limits, seeds, errors, adapters and snapshots."""

import collections
import functools
import logging
import multiprocessing
import os
import random
import subprocess
import sys
import threading
import time

import dm_env
import gymnasium
import numpy as np
import pytest
from dm_env import specs
from gymnasium import spaces
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv

from rl_trainers.envs import EnvError, make_eval_env, make_host_env, snapshot
from rl_trainers.envs.host import env_seed, find_spec
from rl_trainers.envs.probe import ConstantReward, Counting, Endless


class Faulty(Counting):
    """Does something bad at one step: a value to return as reward or observation, or an error."""

    def __init__(self, env_id, at, reward=None, observation=None, error=None):
        super().__init__(10**9, env_id)
        self.at, self.bad_reward, self.bad_observation, self.error = at, reward, observation, error
        self.closed = 0

    def step(self, action):
        observation, reward, *rest = super().step(action)
        if self.t == self.at:
            if self.error is not None:
                raise self.error
            reward = reward if self.bad_reward is None else self.bad_reward
            if self.bad_observation is not None:
                observation[1] = self.bad_observation
        return observation, reward, *rest

    def close(self):
        self.closed += 1


class Hidden(gymnasium.Env):
    """A random walk whose place lies where no one can read it, like a physics engine's state."""

    observation_space = spaces.Box(-np.inf, np.inf, (2,), np.float32)
    action_space = spaces.Box(-1.0, 1.0, (2,), np.float32)

    def __init__(self, carries_over=False):
        self.lock = threading.Lock()  # cannot be written out
        self.carries_over = carries_over
        place = np.zeros(2)

        def move(by, anew=False):
            nonlocal place
            place = by if anew else place + by
            return place.astype(np.float32)

        self.move = move

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return self.move(self.np_random.normal(size=2), not self.carries_over), {}

    def step(self, action):
        observation = self.move(action + self.np_random.normal(size=2))
        return observation, float(observation.sum()), self.np_random.uniform() < 0.1, False, {}


class Masks(ConstantReward):
    """Reports masks in ``info`` if it is told to."""

    def __init__(self, reports):
        super().__init__()
        self.length = 5
        self.reports = reports

    def step(self, action):
        *result, _ = super().step(action)
        info = {"control_mask": 0.0, "discount_mask": 0.5} if self.reports else {}
        return *result, info


class Nested(ConstantReward):
    """Dict observations and Tuple actions; one leaf is float64."""

    def __init__(self):
        super().__init__()
        self.observation_space = spaces.Dict(
            a=spaces.Box(0.0, 9.0, (2,), np.float64),
            b=spaces.Tuple([spaces.Discrete(3), spaces.Box(0, 255, (1, 2), np.uint8)]),
        )
        box = spaces.Box(-1.0, 1.0, (2,), np.float32)
        self.action_space = spaces.Tuple([spaces.Discrete(3), box])
        self.length = 3
        self.last = (0, np.zeros(2))

    def step(self, action):
        self.last = action
        return super().step(action)

    def look(self):
        a = np.array([self.t, self.last[0]], np.float64)
        return {"a": a, "b": (2, np.full((1, 2), 7, np.uint8))}


class OldGym:
    """The interface of gym before 0.26."""

    class Box:
        low, high, shape, dtype = np.zeros(1), np.ones(1), (1,), np.dtype("float64")

    class Discrete:
        n = 3

    observation_space = Box()
    action_space = Discrete()

    def seed(self, seed):
        self.x = (seed % 1000) / 1000

    def reset(self):
        self.t = 0
        return np.array([self.x])

    def step(self, action):
        self.t += 1
        info = {"TimeLimit.truncated": True} if action == 2 else {}
        return np.array([self.t / 10]), 1.0, action > 0, info


class Catch(dm_env.Environment):
    """A dm_env environment; action 1 ends it with discount 0, action 2 with discount 1."""

    def __init__(self):
        self.t = 0

    def observation_spec(self):
        return {"x": specs.BoundedArray((2,), np.float64, 0.0, 1.0), "n": specs.DiscreteArray(9)}

    def action_spec(self):
        return specs.DiscreteArray(3)

    def look(self):
        return {"x": np.full(2, self.t / 10), "n": np.int64(self.t)}

    def reset(self):
        self.t = 0
        return dm_env.restart(self.look())

    def step(self, action):
        self.t += 1
        if action == 1:
            return dm_env.termination(2.0, self.look())
        if action == 2:
            return dm_env.truncation(3.0, self.look())
        return dm_env.transition(1.0, self.look())


def zeros(env):
    return np.zeros((env.num_envs, *env.action_space.shape), env.action_space.dtype)


def roll(env, steps, rng):
    """Steps with random actions; every array that came back."""
    rows = []
    for _ in range(steps):
        if isinstance(env.action_space, spaces.Discrete):
            action = rng.integers(0, env.action_space.n, env.num_envs)
        else:
            action = rng.uniform(-1, 1, (env.num_envs, *env.action_space.shape))
        rows.append(env.step(action)[:4])
    return rows


def assert_same(a, b):
    for t, (row_a, row_b) in enumerate(zip(a, b, strict=True)):
        for x, y in zip(row_a, row_b, strict=True):
            np.testing.assert_array_equal(x, y, err_msg=f"row {t}")


def transitions(env, steps):
    """(observation, next observation) of all rows that took a decision."""
    observation, found = env.reset(0), []
    ended = np.zeros(env.num_envs, bool)
    for _ in range(steps):
        after, reward, terminated, truncated, _ = env.step(zeros(env))
        found += [(observation[i], after[i]) for i in range(env.num_envs) if not ended[i]]
        assert (reward[ended] == 0).all()
        observation, ended = after, terminated | truncated
    return found


@pytest.mark.parametrize("truncates", [False, True])
@pytest.mark.parametrize("mode", [None, *AutoresetMode])
def test_next_step_autoreset_stores_no_step_across_a_reset(mode, truncates):
    fns = [lambda: Counting(3, 0, truncates), lambda: Counting(5, 1, truncates)]
    env = make_host_env(fns if mode is None else SyncVectorEnv(fns, autoreset_mode=mode))
    found = transitions(env, 20)
    # Rows of env 0: 3 of every 4; of env 1: 5 of every 6 and the first 2 of the last episode.
    assert [sum(before[0] == i for before, _ in found) for i in (0, 1)] == [15, 17]
    assert all(before[1] == after[1] and after[2] == before[2] + 1 for before, after in found)
    last = {(after[0], after[1]): after[2] for _, after in found}
    assert [last[0, k] for k in range(5)] == [3] * 5
    assert [last[1, k] for k in range(4)] == [5, 5, 5, 2]


@pytest.mark.parametrize("mode", [AutoresetMode.SAME_STEP, AutoresetMode.DISABLED])
def test_other_autoreset_modes_are_refused_where_they_cannot_be_changed(mode):
    venv = gymnasium.make_vec("CartPole-v1", 2)
    venv.metadata = {**venv.metadata, "autoreset_mode": mode}
    with pytest.raises(ValueError, match=r"env: .*autoreset mode .*NEXT_STEP"):
        make_host_env(venv)


@pytest.mark.parametrize("backend", ["sync", "process"])
def test_flags_and_rewards_of_an_episode(backend):
    env = make_host_env(lambda: Counting(2, 4, True), 1, backend=backend)
    assert env.reset(0).tolist() == [[4, 0, 0]]
    rows = [env.step(np.zeros(1)) for _ in range(3)]
    env.close()
    assert [r[0].tolist() for r in rows] == [[[4, 0, 1]], [[4, 0, 2]], [[4, 1, 0]]]
    assert [r[1].tolist() for r in rows] == [[1], [2], [0]]
    assert [r[2].tolist() for r in rows] == [[False], [False], [False]]
    assert [r[3].tolist() for r in rows] == [[False], [True], [False]]
    assert rows[0][1].dtype == np.float32 and rows[0][2].dtype == np.bool_


def test_time_limit_truncates_and_never_terminates():
    env = make_host_env(Endless, 2, time_limit=3)
    env.reset(0)
    rows = [env.step(np.zeros(2)) for _ in range(8)]
    assert [r[3][0] for r in rows] == [False, False, True, False] * 2
    assert not any(r[2].any() for r in rows)
    assert [r[0][1, 0] for r in rows] == [1, 2, 3, 0] * 2


def test_time_limit_at_the_step_that_terminates_keeps_both():
    env = make_host_env(lambda: Counting(3), 1, time_limit=3)
    env.reset(0)
    rows = [env.step(np.zeros(1)) for _ in range(3)]
    assert rows[-1][2].tolist() == [True] and rows[-1][3].tolist() == [True]


def test_time_limit_of_vector_environments():
    env = make_host_env("CartPole-v1", 2, time_limit=4)
    env.reset(0)
    assert [env.step(np.array([0, 1]))[3].all() for _ in range(4)] == [False, False, False, True]
    with pytest.raises(ValueError, match="time_limit: CartPoleVectorEnv cannot be limited to 4"):
        make_host_env(gymnasium.make_vec("CartPole-v1", 2), time_limit=4)
    env = make_host_env(SyncVectorEnv([Endless]), time_limit=4)
    env.reset(0)
    assert [env.step([0])[3][0] for _ in range(4)] == [False, False, False, True]


def test_seeds_differ_between_envs_and_agree_between_backends():
    def first(seed, backend, num_envs=8):
        env = make_host_env("Pendulum-v1", num_envs, backend=backend)
        observation = env.reset(seed)
        env.close()
        return observation

    here = first(0, "sync")
    assert len(np.unique(here, axis=0)) == 8
    np.testing.assert_array_equal(first(0, "sync"), here)
    np.testing.assert_array_equal(first(0, "process", 3), here[:3])
    assert not (first(1, "sync") == here).all(axis=1).any()
    alone = gymnasium.make("Pendulum-v1").reset(seed=env_seed(0, 5))[0]
    np.testing.assert_array_equal(alone, here[5])
    assert len(np.unique(make_host_env("CartPole-v1", 8).reset(0), axis=0)) == 8
    with pytest.raises(ValueError, match="seed: must be >= 0, got -1"):
        make_host_env("CartPole-v1").reset(-1)


@pytest.mark.parametrize("backend", ["sync", "process"])
@pytest.mark.parametrize(
    ("field", "value"), [("reward", np.nan), ("reward", np.inf), ("observation", np.nan)]
)
def test_numbers_that_are_not_finite_stop_with_index_step_and_field(field, value, backend):
    bad = functools.partial(Faulty, 2, 137, **{field: value})
    fns = [functools.partial(Faulty, i, -1) for i in range(4)]
    env = make_host_env([*fns[:2], bad, fns[3]], backend=backend)
    env.reset(0)
    for _ in range(136):
        env.step(np.zeros(4))
    message = rf"environment 2 \(Faulty\): {field} is {value} at its step 137 \(step 137 of"
    with pytest.raises(FloatingPointError, match=message):
        env.step(np.zeros(4))
    env.close()


def test_the_step_of_a_bad_number_is_counted_without_reset_rows():
    def make():
        env = Counting(3)
        env.pay = lambda action: np.nan if (env.episode, env.t) == (2, 2) else 0.0
        return env

    env = make_host_env(make)
    env.reset(0)
    with pytest.raises(FloatingPointError, match=r"its step 8 \(step 2 of its episode\)"):
        for _ in range(20):
            env.step(np.zeros(1))
    assert env._steps == 10  # 8 decisions and 2 reset rows


@pytest.mark.parametrize("backend", ["sync", "process"])
def test_an_error_in_one_env_surfaces_and_closes_the_others(backend, tmp_path):
    class Noted(Faulty):
        def close(self):
            with open(tmp_path / f"closed{self.env_id}", "a") as file:
                file.write("x")

    def make(i):
        return lambda: Noted(i, 5 if i == 2 else -1, error=ValueError("boom"))

    env = make_host_env([make(i) for i in range(4)], backend=backend)
    env.reset(0)
    for _ in range(4):
        env.step(np.zeros(4))
    for path in tmp_path.iterdir():  # of the environment that only showed its spaces
        path.unlink()
    start = time.monotonic()
    with pytest.raises(EnvError) as caught:
        env.step(np.zeros(4))
    assert time.monotonic() - start < 10
    text = str(caught.value)
    for part in ("environment 2", "ValueError", "boom", "Traceback", "raise self.error"):
        assert part in text
    assert "step 5 of its episode" in text
    assert multiprocessing.active_children() == []
    closed = {path.name: path.read_text() for path in tmp_path.iterdir()}
    assert [closed[f"closed{i}"] for i in (0, 1, 3)] == ["x"] * 3
    env.close()
    with pytest.raises(RuntimeError, match="closed"):
        env.step(np.zeros(4))


def test_a_worker_that_dies_is_named():
    class Dies(Endless):
        def step(self, action):
            os._exit(3)

    env = make_host_env([Endless, Dies], backend="process")
    env.reset(0)
    with pytest.raises(EnvError, match=r"worker process of environment 1 \(exit code 3\) died"):
        env.step(np.zeros(2))
    assert multiprocessing.active_children() == []


def test_closing_ends_a_worker_that_hangs(monkeypatch):
    class Hangs(Endless):
        def close(self):
            time.sleep(60)

    env = make_host_env(lambda: Endless(), 1, backend="process")
    env.close()
    env.close()
    monkeypatch.setattr("rl_trainers.envs.host._CLOSE_SECONDS", 0.5)
    env = make_host_env([Endless, Hangs], backend="process")
    env.reset(0)
    start = time.monotonic()
    env.close()
    assert time.monotonic() - start < 5
    assert multiprocessing.active_children() == []


def test_masks_are_one_where_an_env_reports_none():
    env = make_host_env([lambda: Masks(True), lambda: Masks(False)])
    env.reset(0)
    info = env.step(np.zeros(2))[-1]
    assert info["control_mask"].tolist() == [0, 1] and info["discount_mask"].tolist() == [0.5, 1]
    assert info["control_mask"].dtype == np.float32


@pytest.mark.parametrize("backend", ["sync", "process"])
def test_nested_spaces(backend):
    env = make_host_env(Nested, 2, backend=backend)
    observation = env.reset(0)
    assert observation["a"].tolist() == [[0, 0], [0, 0]] and observation["a"].dtype == np.float32
    assert env.observation_space["a"].dtype == np.float32
    assert observation["b"][0].tolist() == [2, 2]
    assert observation["b"][1].shape == (2, 1, 2) and observation["b"][1].dtype == np.uint8
    action = (np.array([1, 2], np.int32), np.zeros((2, 2), np.float64))
    observation = env.step(action)[0]
    env.close()
    assert observation["a"].tolist() == [[1, 1], [1, 2]]


def test_actions_arrive_in_the_dtype_of_the_space():
    env = make_host_env(Nested)
    env.reset(0)
    env.step((np.array([1], np.int32), np.full((1, 2), 0.5, np.float64)))
    discrete, box = env._venv.envs[0].unwrapped.last
    assert discrete.dtype == np.int64 and box.dtype == np.float32
    assert make_host_env("CartPole-v1", 2).reset(0).shape == (2, 4)
    cartpole = make_host_env("CartPole-v1", 2)
    cartpole.reset(0)
    cartpole.step([0, 1])  # the environment asserts an integer array


def test_old_gym():
    env = make_host_env(OldGym())
    assert env.observation_space == spaces.Box(0, 1, (1,), np.float32)
    assert env.action_space == spaces.Discrete(3) and env.name == "OldGym"
    seed = env_seed(7, 0)
    np.testing.assert_allclose(env.reset(7), [[seed % 1000 / 1000]], rtol=1e-6)
    assert [x.tolist() for x in env.step([0])[1:4]] == [[1], [False], [False]]
    assert [x.tolist() for x in env.step([1])[1:4]] == [[1], [True], [False]]
    env.step([0])
    assert [x.tolist() for x in env.step([2])[1:4]] == [[1], [False], [True]]


def test_dm_env():
    env = make_host_env(Catch())
    assert env.observation_space["x"] == spaces.Box(0, 1, (2,), np.float32)
    assert env.observation_space["n"] == spaces.Discrete(9)
    assert env.reset(0)["n"].tolist() == [0]
    observation, *rest = env.step([0])
    np.testing.assert_array_equal(observation["x"], np.full((1, 2), 0.1, np.float32))
    assert [x.tolist() for x in rest[:3]] == [[1], [False], [False]]
    assert [x.tolist() for x in env.step([1])[1:4]] == [[2], [True], [False]]
    assert env.step([0])[0]["n"].tolist() == [0]
    assert [x.tolist() for x in env.step([2])[1:4]] == [[3], [False], [True]]


def test_arguments_that_do_not_fit_are_named(caplog):
    with pytest.raises(ValueError, match="env: .*'CartPol-v1'.*nearest is 'CartPole-v1'"):
        make_host_env("CartPol-v1")
    with pytest.raises(ValueError, match="backend: 'proces' is none of .*nearest is 'process'"):
        make_host_env("CartPole-v1", backend="proces")
    with pytest.raises(ValueError, match="backend: Pendulum-v1 has no vector version"):
        make_host_env("Pendulum-v1", backend="vector")
    with pytest.raises(ValueError, match="num_envs: must be >= 1, got 0"):
        make_host_env("CartPole-v1", 0)
    with pytest.raises(ValueError, match="time_limit: must be >= 1 or None, got 0"):
        make_host_env("CartPole-v1", time_limit=0)
    with pytest.raises(ValueError, match="env: one environment object cannot be num_envs=2"):
        make_host_env(Endless(), 2)
    with pytest.raises(TypeError, match="env: expected an id, an environment or a factory"):
        make_host_env(3)
    shared = Endless()
    with pytest.raises(ValueError, match="env: the factory returned the same object twice"):
        make_host_env(lambda: shared, 2)
    text = Endless()
    text.action_space = spaces.Text(3)
    with pytest.raises(ValueError, match="env: action_space is a Text"):
        make_host_env(text)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("LunarLander-v2", "LunarLander-v3"),
        ("DM-HalfCheetah-v2", "HalfCheetah-v5"),
        ("Hopper-v3", "Hopper-v5"),
    ],
)
def test_old_ids_stand_for_the_newest_version_and_say_so_once(old, new, caplog):
    with caplog.at_level(logging.WARNING, "rl_trainers"):
        assert find_spec(old).id == new
    assert [record.getMessage() for record in caplog.records] == [
        f"env: {old} is not available any more; using {new}"
    ]
    assert find_spec("gymnasium:CartPole-v1").id == "CartPole-v1"


def test_evaluation_gets_environments_of_its_own():
    for env in (gymnasium.make("Pendulum-v1"), Endless(), OldGym(), SyncVectorEnv([Endless])):
        train, other = make_host_env(env), make_eval_env(env, 2)
        assert other.num_envs == 2
        ours = [e.unwrapped for e in train._venv.envs]
        ours += [getattr(e, "env", e) for e in ours]
        theirs = [e.unwrapped for e in other._venv.envs]
        theirs += [getattr(e, "env", e) for e in theirs]
        assert not {id(e) for e in ours} & {id(e) for e in theirs}
        assert other.name == train.name
    assert make_eval_env("CartPole-v1", 3).num_envs == 3
    assert make_eval_env(Endless, 3, time_limit=2).num_envs == 3
    assert make_eval_env(gymnasium.make_vec("CartPole-v1", 3), 3).num_envs == 3
    assert make_eval_env(gymnasium.make_vec("CartPole-v1", 3), 2).num_envs == 2
    without_spec = gymnasium.make_vec("CartPole-v1", 3)
    without_spec.spec = None
    with pytest.raises(ValueError, match="num_envs: 2, but env is a CartPoleVectorEnv of 3 .* value: 3"):
        make_eval_env(without_spec, 2)
    with pytest.raises(ValueError, match=r"env: .*Hidden cannot be copied.*pass a factory"):
        make_eval_env(Hidden())
    shared = Endless()
    with pytest.raises(ValueError, match="env: the factory returned the same object twice"):
        make_eval_env(lambda: shared)


@pytest.mark.parametrize("kind", ["id", "object", "factory", "object without a spec"])
def test_evaluation_leaves_training_alone(kind):
    def run(evaluates):
        env = {
            "id": "Pendulum-v1",
            "object": gymnasium.make("Pendulum-v1"),
            "factory": lambda: gymnasium.make("Pendulum-v1"),
            "object without a spec": Counting(4),
        }[kind]
        train, rng = make_host_env(env, time_limit=7), np.random.default_rng(0)
        rows = [(train.reset(0),)]
        for _ in range(3):
            rows += roll(train, 5, rng)
            if evaluates:
                other = make_eval_env(env)
                other.reset(1)
                roll(other, 6, np.random.default_rng(1))
                other.close()
        return rows

    assert_same(run(False), run(True))


@pytest.mark.parametrize(
    ("source", "backend"),
    [
        ("CartPole-v1", "auto"),
        ("CartPole-v1", "sync"),
        ("CartPole-v1", "process"),
        (Hidden, "sync"),
        (Hidden, "process"),
    ],
)
def test_a_restored_env_goes_on_to_the_last_bit(source, backend):
    rng = np.random.default_rng(0)
    env = make_host_env(source, 3, backend=backend)
    env.reset(5)
    for steps in (0, 1, 40, 23):  # among these: right after a reset, and on reset rows
        roll(env, steps, rng)
        saved, key = env.snapshot(), rng.bit_generator.state
        expected = roll(env, 30, rng)
        other = make_host_env(source, 3, backend=backend)
        assert other.restore(saved) and not other.restarted.any()
        rng.bit_generator.state = key
        assert_same(roll(other, 30, rng), expected)
        other.close()
        assert env.restore(saved)  # also where it has gone on meanwhile
        rng.bit_generator.state = key
        assert_same(roll(env, 30, rng), expected)
    env.close()
    assert {k: v.dtype for k, v in saved.items()} == {"header": np.uint8, "data": np.uint8}


def test_a_snapshot_taken_between_an_end_and_its_reset_row():
    env = make_host_env([lambda: Counting(3, 0), lambda: Counting(2, 1)])
    env.reset(0)
    roll(env, 2, np.random.default_rng(0))
    saved = env.snapshot()
    other = make_host_env([lambda: Counting(3, 0), lambda: Counting(2, 1)])
    assert other.restore(saved)
    observation, reward, terminated, _, _ = other.step(np.zeros(2))
    assert observation.tolist() == [[0, 0, 3], [1, 1, 0]]
    assert reward.tolist() == [3, 0] and terminated.tolist() == [True, False]


def test_restoring_in_another_process(tmp_path):
    env = make_host_env("Pendulum-v1", 2)
    env.reset(5)
    roll(env, 30, np.random.default_rng(0))
    np.savez(tmp_path / "saved.npz", **env.snapshot())
    script = (
        "import sys, numpy as np; from rl_trainers.envs import make_host_env\n"
        "env = make_host_env('Pendulum-v1', 2)\n"
        "assert env.restore(dict(np.load(sys.argv[1])))\n"
        "print(env.step(np.full((2, 1), 0.3, np.float32))[0].tobytes().hex())"
    )
    command = [sys.executable, "-c", script, str(tmp_path / "saved.npz")]
    out = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout
    assert out.strip() == env.step(np.full((2, 1), 0.3, np.float32))[0].tobytes().hex()


def test_an_env_that_cannot_go_on_restarts_and_says_so(caplog):
    make = functools.partial(Hidden, carries_over=True)
    env = make_host_env([make, Hidden])
    env.reset(5)
    roll(env, 60, np.random.default_rng(0))
    assert all(length > 0 for _, _, length, _ in _counters(env))
    other = make_host_env([make, Hidden])
    with caplog.at_level(logging.WARNING, "rl_trainers"):
        assert not other.restore(env.snapshot())
    assert other.restarted.tolist() == [True, False]
    assert "environment 0 cannot continue its episode" in caplog.text
    _, reward, terminated, truncated, _ = other.step(zeros(other))
    assert reward[0] == 0 and not terminated[0] and not truncated[0]
    assert _counters(other)[0][2] == 0 and _counters(other)[1][2] == _counters(env)[1][2] + 1


def _counters(env):
    return [state["counters"] for state in snapshot.unpack(env.snapshot())["states"]]


def test_a_snapshot_of_other_environments_is_refused():
    env = make_host_env("Pendulum-v1", 2)
    env.reset(0)
    with pytest.raises(ValueError, match="num_envs: is 3, but the checkpoint has 2"):
        make_host_env("Pendulum-v1", 3).restore(env.snapshot())
    venv = AsyncVectorEnv([lambda: gymnasium.make("Pendulum-v1")], context="forkserver")
    opaque = make_host_env(venv)
    opaque.reset(0)
    assert opaque.snapshot() is None
    opaque.close()


def test_snapshots_hold_every_kind_of_plain_state():
    class Part:
        def __init__(self):
            self.rng = np.random.default_rng(3)
            self.old = np.random.RandomState(4)
            self.py = random.Random(5)

    class Owner:
        def __init__(self):
            self.array = np.arange(6.0).reshape(2, 3)
            self.view = self.array[1]
            self.part = Part()
            self.again = self.part
            self.queue = collections.deque([np.float32(1.5), None], maxlen=2)
            self.table = {("a", 1): [1, 2.5, np.nan], 3: {True}}
            self.space = spaces.Discrete(2)

    owner, other = Owner(), Owner()
    for source in (owner.part.rng.random, owner.part.old.rand, owner.part.py.random):
        source()
    owner.array[:] = -1.0
    owner.queue.append(np.int8(7))
    owner.table[3].add(False)
    packed = snapshot.pack(snapshot.encode(owner))
    expected = [owner.part.rng.random(), owner.part.old.rand(), owner.part.py.random()]
    snapshot.decode(snapshot.unpack(packed), other)
    assert [other.part.rng.random(), other.part.old.rand(), other.part.py.random()] == expected
    assert (other.array == -1).all() and other.again is other.part
    other.array[1, 0] = 9
    assert other.view[0] == 9  # still a view
    assert list(other.queue) == [None, 7] and other.queue.maxlen == 2
    assert other.table[3] == {True, False} and other.table["a", 1][:2] == [1, 2.5]
    with pytest.raises(snapshot.OpaqueError, match="lock"):
        snapshot.encode([threading.Lock()])


class ReusesItsBuffers(gymnasium.vector.VectorEnv):
    """Returns the same arrays at every step, with other contents."""

    metadata = {"autoreset_mode": gymnasium.vector.AutoresetMode.NEXT_STEP}

    def __init__(self):
        self.num_envs = 2
        self.single_observation_space = spaces.Box(-np.inf, np.inf, (1,), np.float32)
        self.single_action_space = spaces.Discrete(2)
        self.observation_space = spaces.Box(-np.inf, np.inf, (2, 1), np.float32)
        self.action_space = spaces.MultiDiscrete([2, 2])
        self.observation = np.zeros((2, 1), np.float32)
        self.flags = np.zeros((3, 2))

    def reset(self, *, seed=None, options=None):
        self.observation[:] = 0
        return self.observation, {}

    def step(self, action):
        self.observation += 1
        self.flags[0] += 1
        truncated = self.flags[1].astype(bool, copy=False)
        return self.observation, self.flags[0], self.flags[2] > 0, truncated, {}


def test_what_a_step_returned_is_not_changed_by_the_next_one():
    env = make_host_env(ReusesItsBuffers())
    first = env.reset(0)
    second, reward, *_ = env.step(np.zeros(2, int))
    env.step(np.zeros(2, int))
    assert first.tolist() == [[0], [0]]
    assert second.tolist() == [[1], [1]]
    assert reward.tolist() == [1, 1]


def test_only_older_versions_stand_for_the_newest():
    assert find_spec("LunarLander-v2").id == "LunarLander-v3"
    for wrong in ("CartPole-v9", "CartPole-v2"):
        with pytest.raises(ValueError, match=f"no environment '{wrong}' is registered; the nearest is"):
            find_spec(wrong)


def test_an_unknown_module_or_suite_is_named():
    with pytest.raises(ValueError, match="'gymnx:CartPole-v1'.*No module named 'gymnx'.*'gymnax:'"):
        make_host_env("gymnx:CartPole-v1")
