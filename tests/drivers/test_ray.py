import collections
import functools
import os
import pathlib
import signal
import subprocess
import sys
import time
import warnings

import gymnasium
import jax
import numpy as np
import pytest
from gymnasium import spaces

from rl_trainers import A2CJoint, PPOJoint, RLTask, models
from rl_trainers.drivers.ray_workers import RayDriver, seeds_of
from rl_trainers.envs import EnvError
from rl_trainers.rollout import initial_actor, unroll_host

ray = pytest.importorskip("ray")
pytestmark = [pytest.mark.slow, pytest.mark.ray]

ROOT = pathlib.Path(__file__).parents[2]


class Clock(gymnasium.Env):
    """Observation ``[life, t, process]``: a number drawn at first, looks before this one, and where it is.

    Args:
        seconds: that a step sleeps.
        dies: the step in which the process is killed.
        fails: the step that raises.
        closed: file that gets a line when the environment is closed.
    """

    observation_space = spaces.Box(0.0, 2.0**24, (3,), np.float32)
    action_space = spaces.Discrete(2)
    length = 7

    def __init__(self, seconds=0.0, dies=None, fails=None, closed=None):
        self.seconds, self.dies, self.fails, self.closed = seconds, dies, fails, closed
        self.life, self.looks, self.t = 0, 0, 0

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        if seed is not None:
            self.life = int(self.np_random.integers(1, 2**24))
        self.t = 0
        return self._look(), {}

    def step(self, action):
        time.sleep(self.seconds)
        self.t += 1
        if self.looks == self.dies:
            os.kill(os.getpid(), signal.SIGKILL)
        if self.looks == self.fails:
            raise ZeroDivisionError("boom")
        return self._look(), 1.0, self.t == self.length, False, {}

    def close(self):
        if self.closed is not None:
            with open(self.closed, "a") as file:
                file.write(f"{self.life}\n")

    def _look(self):
        self.looks += 1
        return np.array([self.life, self.looks - 1, os.getpid()], np.float32)


class Watch:
    """An observer that notes the rows of each environment, and where it begins anew."""

    def __init__(self):
        self.rows, self.restarts = collections.defaultdict(list), []

    def __call__(self, rollout, env_id):
        for column, i in enumerate(env_id):
            self.rows[i] += rollout.steps.observation[:, column].astype(int).tolist()

    def restart(self, env_id):
        self.restarts.append(env_id.tolist())

    def lives(self):
        """Of each environment in order, if each has all its rows up to some, one after the other."""
        found = {}
        for i, rows in self.rows.items():
            parts = [[row for row in rows if row[0] == life] for life in dict.fromkeys(r[0] for r in rows)]
            assert sum(parts, []) == rows
            for part in parts:
                assert [row[1] for row in part] == list(range(len(part)))
                assert len({row[2] for row in part}) == 1
            found[i] = [part[0][0] for part in parts]
        return found


def trainer_of(env, num_envs=2, body=models.MLP, timestep_to_np=None, **settings):
    task = RLTask(env, num_envs=num_envs, timestep_to_np=timestep_to_np)
    model = functools.partial(models.PolicyAndValue, body=body)
    return PPOJoint(task, joint_model=model, n_interactions_per_epoch=60, **settings)


@pytest.fixture(scope="module", autouse=True)
def local_ray():
    yield
    ray.shutdown()


@pytest.fixture
def closing(local_ray):
    if not ray.is_initialized():
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "os.fork", RuntimeWarning)
            ray.init("local", num_cpus=8, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    drivers = []
    yield lambda *args, **kwargs: drivers.append(RayDriver(*args, **kwargs)) or drivers[-1]
    for driver in drivers:
        driver.close()
    assert ray.is_initialized()  # whoever started it ends it


@pytest.mark.parametrize(("n", "learn_cap"), [(1, 2), (2, 2), (2, 1)])
def test_rows_of_an_environment_follow_one_another(closing, n, learn_cap):
    watch = Watch()
    trainer = trainer_of(Clock)
    driver = closing(
        algorithm=trainer, num_workers=n, unroll_length=5, learn_queue_cap=learn_cap, observers=[watch]
    )
    driver.start()
    taken = collections.defaultdict(list)
    for step in range(6):
        rollout, env_id = driver.collect()
        assert rollout.steps.mask.shape == (5, learn_cap * 2)
        assert env_id.dtype == np.int32
        assert 0 <= rollout.policy_version <= step
        for column, i in enumerate(env_id):
            taken[i] += rollout.steps.observation[:, column, 1].astype(int).tolist()
        trainer.state = trainer.state._replace(step=trainer.state.step + 1)
    driver.stop()

    assert all(rows == list(range(len(rows))) for rows in taken.values())
    lives = watch.lives()
    assert lives.keys() == set(range(2 * n))
    assert len(set(sum(lives.values(), []))) == 2 * n  # all environments differ
    unrolls = driver.unrolls
    assert sum(unrolls.lags.values()) == 6 * learn_cap
    assert unrolls.n_finished * 10 == sum(len(rows) for rows in watch.rows.values())
    episodes, steps, average_return, average_length = driver.get_metrics()
    rows = [row for own in watch.rows.values() for row in own]
    assert steps.result() == sum(row[1] % 8 < 7 for row in rows)
    assert episodes.result() == sum(row[1] % 8 == 6 for row in rows)
    assert average_return.result() == average_length.result() == (7 if episodes.result() else 0)


def doubled(steps):
    return steps._replace(observation=2 * steps.observation)


@pytest.mark.parametrize(
    ("env", "settings"),
    [
        ("CartPole-v1", {}),
        ("Pendulum-v1", {"timestep_to_np": doubled}),
        ("CartPole-v1", {"body": functools.partial(models.GRU, hidden_size=8), "max_slice_length": 8}),
        ("Pendulum-v1", {"body": functools.partial(models.LSTM, hidden_size=8), "max_slice_length": 8}),
    ],
)
def test_unrolls_are_those_of_a_local_unroll(closing, env, settings):
    trainer = trainer_of(env, 3, **settings)
    driver = closing(algorithm=trainer, unroll_length=20, seed=5)
    driver.start()
    acts, collected = [trainer.actor()] * 2, []
    for step in range(3):
        rollout, env_id = driver.collect()
        assert env_id.tolist() == [0, 1, 2]
        collected.append(rollout)
        if step == 0:
            trainer.train_on(rollout, batch_size=4)
            acts.append(trainer.actor())

    env_seed, key = seeds_of(5, 0, 0)
    env = trainer.task.make_envs(3)
    actor = initial_actor(env.reset(env_seed), 3, key, trainer.initial_policy_state(3))
    for act, rollout, version in zip(acts, collected, [0, 0, int(trainer.state.step)], strict=True):
        assert rollout.policy_version == version
        actor, expected, _ = unroll_host(env, act, actor, 20, trainer.task.distribution.to_env)
        assert len(jax.tree.leaves(rollout)) == len(jax.tree.leaves(expected))
        jax.tree.map(np.testing.assert_array_equal, rollout._replace(policy_version=0), expected)
    env.close()


def test_environments_begin_as_those_of_a_task():
    assert seeds_of(3, 0, 0)[0] == seeds_of(3, 1, 0)[0]  # their numbers tell them apart
    task = RLTask(Clock, num_envs=2, seed=3)
    env = task.make_envs(2)
    np.testing.assert_array_equal(env.reset(seeds_of(3, 0, 0)[0]), task.actor.observation)
    seeds = [seeds_of(3, number, generation) for number in (0, 1) for generation in (0, 1, 2)]
    assert len({tuple(key) for _, key in seeds}) == 6
    assert len({seed for seed, _ in seeds}) == 5


def test_a_worker_that_is_killed_is_replaced(closing):
    watch = Watch()
    driver = closing(
        functools.partial(Clock, 0.01),
        trainer_of(Clock),
        num_workers=2,
        unroll_length=20,
        learn_queue_cap=2,
        env_batch_size=2,
        observers=[watch],
        exp_replayer="uniform",
    )
    driver.start()
    while len(watch.rows) < 4:
        driver.run_async()
    os.kill(watch.rows[0][0][2], signal.SIGKILL)
    while driver.unrolls.n_restarts == 0 or len(watch.lives()[0]) == 1:
        assert driver.run_async() == 80
    for _ in range(3):
        driver.run_async()
    driver.stop()

    assert [len(lives) for _, lives in sorted(watch.lives().items())] == [2, 2, 1, 1]
    assert driver.unrolls.n_restarts == 1
    assert watch.restarts == [[0, 1]]
    rows = [row for own in watch.rows.values() for row in own]
    episodes, steps, average_return, average_length = driver.get_metrics()
    assert steps.result() == sum(row[1] % 8 < 7 for row in rows)
    assert average_return.result() == average_length.result() == 7
    # The replayer puts a row with mask 0 between the lives.
    stored = driver.replayer.replay(400, 15).steps
    life = stored.observation[..., 0]
    breaks = life[1:] != life[:-1]
    assert breaks.any()
    assert not stored.mask[:-1][breaks].any()


def test_a_worker_that_always_dies_is_an_error(closing):
    driver = closing(functools.partial(Clock, dies=3), trainer_of(Clock), max_restarts=1)
    driver.start()
    with pytest.raises(ray.exceptions.RayActorError) as raised:
        driver.collect()
    assert "worker 0 was replaced max_restarts=1 times in a row" in raised.value.__notes__[0]
    assert driver.unrolls.n_restarts == 1


def test_a_worker_that_cannot_be_made_is_an_error_at_once(closing):
    no_jax = {"runtime_env": {"env_vars": {"JAX_ENABLE_X64": "perhaps"}}}
    driver = closing(Clock, trainer_of(Clock), worker_options=no_jax)
    driver.start()
    with pytest.raises(ray.exceptions.RayActorError) as raised:
        driver.collect()
    assert "worker 0 could not be made: it needs this package" in raised.value.__notes__[0]
    assert driver.unrolls.n_restarts == 0


def test_a_trainer_that_lag_would_harm_is_refused():
    algorithm = A2CJoint(RLTask("CartPole-v1"))
    with pytest.raises(ValueError, match="algorithm: A2CJoint takes all rows for those of the newest policy"):
        RayDriver(algorithm=algorithm)


def test_an_address_where_nobody_is_is_refused(monkeypatch):
    def nobody(*_, **__):
        raise ConnectionError("Could not find any running Ray instance.\nAnd more.")

    monkeypatch.setattr(ray, "init", nobody)
    with pytest.raises(ValueError, match="^address='auto': Could not find any running Ray instance. Without"):
        RayDriver(algorithm=trainer_of(Clock), address="auto")


def test_errors_of_environments_are_raised_as_themselves(closing):
    driver = closing(functools.partial(Clock, fails=4), trainer_of(Clock), num_workers=2, learn_queue_cap=3)
    driver.start()
    for _ in range(2):
        with pytest.raises(EnvError, match="ZeroDivisionError.*boom") as raised:
            driver.run_async()
        assert not isinstance(raised.value, ray.exceptions.RayError)
    note = raised.value.__notes__[0]
    assert "raised in the worker " in note
    assert "in step" in note, "it has the traceback of the worker"

    def broken():
        raise KeyError("no such game")

    driver = closing(env_f=broken, algorithm=trainer_of(Clock))
    driver.start()
    with pytest.raises(KeyError, match="no such game"):
        driver.collect()


def test_the_number_of_workers_changes_while_it_runs(closing):
    watch = Watch()
    driver = closing(algorithm=trainer_of(Clock), learn_queue_cap=2, observers=[watch])
    driver.start()
    driver.collect()
    driver.set_num_workers(3)
    while len(watch.rows) < 6:
        driver.collect()
    driver.set_num_workers(1)
    assert driver.num_workers == 1
    for _ in range(3):
        _, env_id = driver.collect()
        assert set(env_id) == {0, 1}
    assert watch.restarts == []
    driver.set_num_workers(2)
    assert watch.restarts == [[2, 3]]
    while len(watch.lives()[2]) == 1:
        driver.collect()
    driver.stop()

    assert [len(lives) for _, lives in sorted(watch.lives().items())] == [1, 1, 2, 2, 1, 1]
    with pytest.raises(ValueError, match="num_workers=0 must be a whole number of at least 1"):
        driver.set_num_workers(0)


def test_a_replayer_of_environments_has_no_place_for_more(closing):
    driver = closing(algorithm=trainer_of(Clock), num_workers=2, exp_replayer="uniform")
    driver.set_num_workers(1)
    driver.set_num_workers(2)
    with pytest.raises(ValueError, match="num_workers: is 3, .* the nearest is 2, or use"):
        driver.set_num_workers(3)


def test_unrolls_that_are_too_old_are_dropped(closing):
    trainer = trainer_of(Clock)
    driver = closing(algorithm=trainer, num_workers=2, max_policy_lag=1)
    driver.start()
    for step in range(1, 13):
        driver.collect()
        trainer.state = trainer.state._replace(step=np.int32(step))
        for _ in range(step % 3):  # up to three publishes between two calls
            driver.unrolls.publish(driver._policy(), step)
    assert set(driver.unrolls.lags) <= {0, 1}
    assert driver.unrolls.n_dropped >= 4


def test_calls_at_the_wrong_time_say_so(closing):
    driver = closing(algorithm=trainer_of(Clock))
    with pytest.raises(RuntimeError, match=r"call start\(\)"):
        driver.run_async()
    with pytest.raises(RuntimeError, match=r"RayDriver steps by itself.*run_async"):
        driver.run(100)
    driver.start()
    with pytest.raises(RuntimeError, match="start.. was called before"):
        driver.start()
    driver.stop()
    driver.stop()
    with pytest.raises(RuntimeError, match="stopped"):
        driver.collect()
    driver.close()
    with pytest.raises(RuntimeError, match="closed"):
        driver.start()


def test_it_starts_anew_after_a_stop_and_after_an_error(closing):
    watch = Watch()
    driver = closing(functools.partial(Clock, fails=12), trainer_of(Clock), observers=[watch])
    for starts in (1, 2, 3):
        driver.start()
        assert driver.run_async() == 8
        if starts == 2:
            with pytest.raises(EnvError):
                driver.run_async()
            assert not driver.is_running
        else:
            assert driver.is_running
            driver.stop()
    assert [len(lives) for lives in watch.lives().values()] == [3]
    assert watch.restarts == [[0], [0]]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"algorithm": None}, "algorithm: must be a trainer such as PPOJoint\\(task\\), got None"),
        ({"env": Clock, "env_f": Clock}, "env, env_f: give one of them"),
        ({"env": Clock()}, "env: one object, a Clock, cannot be in every worker"),
        ({"num_workers": 0}, "num_workers=0 must be a whole number of at least 1"),
        ({"unroll_length": 0}, "unroll_length=0 must be a whole number of at least 1"),
        ({"learn_queue_cap": 0}, "learn_queue_cap=0 must be a whole number of at least 1"),
        ({"max_restarts": -1}, "max_restarts=-1 must be a whole number of at least 0"),
        ({"worker_options": {"max_restarts": 1}}, "worker_options: max_restarts would start"),
        ({"exp_replayer": "uniformly"}, "nearest is 'uniform'"),
        ({"use_rollout_state": False}, "use_rollout_state: is False, but True"),
    ],
)
def test_arguments_that_do_not_fit_are_refused(closing, settings, message):
    with pytest.raises(ValueError, match=message):
        closing(**{"algorithm": trainer_of(Clock)} | settings)


def test_environments_that_do_not_fit_are_refused(closing):
    driver = closing("CartPole-v1", trainer_of(Clock))
    driver.start()
    with pytest.raises(ValueError, match=r"env: observation_space is Box\(.*\(4,\).* in the task"):
        driver.collect()
    driver = closing(env_f=Clock, env_batch_size=2, algorithm=trainer_of(Clock))
    driver.start()
    with pytest.raises(ValueError, match="env_batch_size: is 2, but env_f made 1"):
        driver.collect()
    window = trainer_of(Clock, body=models.TransformerDecoder, max_slice_length=4)
    with pytest.raises(ValueError, match="window of the last rows"):
        closing(algorithm=window)
    with pytest.raises(ValueError, match="is in JAX"):
        closing(algorithm=trainer_of("gymnax:CartPole-v1"))


def test_without_ray_it_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ImportError, match=r"pip install 'rl_trainers\[ray\]'"):
        RayDriver(algorithm=trainer_of(Clock))


SCRIPT = """
import os, pathlib, sys, time
from tests.drivers.test_ray import Clock, RayDriver, functools, ray, trainer_of

def descendants():
    parents = {}
    for stat in pathlib.Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        parents[int(stat.parent.name)] = int(fields[1])
    found = {os.getpid()}
    while more := {pid for pid, parent in parents.items() if parent in found} - found:
        found |= more
    return found - {os.getpid()}

driver = RayDriver(functools.partial(Clock, closed=sys.argv[1]), trainer_of(Clock), num_workers=2)
driver.start()
for _ in range(4):
    driver.run_async()
assert len(descendants()) > 2
driver.close()
driver.close()
assert not ray.is_initialized()
deadline = time.monotonic() + 20
while descendants() and time.monotonic() < deadline:
    time.sleep(0.1)
print(len(descendants()))
"""


@pytest.mark.skipif(not pathlib.Path("/proc").exists(), reason="reads /proc")
def test_a_local_ray_leaves_no_process_behind(tmp_path):
    closed = tmp_path / "closed"
    command = [sys.executable, "-c", SCRIPT, str(closed)]
    ray.shutdown()  # one at a time: on a busy machine a second one may not start in time
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=300)
    assert done.stdout == "0\n", done.stderr
    assert len(closed.read_text().splitlines()) == 2


CLUSTER = """
from ray.cluster_utils import Cluster
from tests.drivers.test_ray import Clock, RayDriver, Watch, ray, trainer_of

cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1})
cluster.add_node(num_cpus=1)
watch = Watch()
driver = RayDriver(algorithm=trainer_of(Clock), num_workers=2, address=cluster.address, observers=[watch])
driver.start()
while len(watch.rows) < 4:
    driver.run_async()
nodes = len(ray.nodes())
driver.close()
print(nodes, len(watch.lives()), ray.is_initialized())
cluster.shutdown()
"""


def test_it_connects_to_a_cluster_of_two_nodes():
    command = [sys.executable, "-c", CLUSTER]
    ray.shutdown()  # one at a time: on a busy machine a second one may not start in time
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=300)
    assert done.stdout == "2 4 False\n", done.stderr


def test_a_trainer_learns_from_workers(tmp_path):
    body = functools.partial(models.MLP, layer_widths=(8,))
    shape = {"env_batch_size": 2, "learn_queue_cap": 2, "unroll_length": 32}
    trainer = PPOJoint(
        RLTask("CartPole-v1", num_envs=4, seed=1),
        joint_model=functools.partial(models.PolicyAndValue, body=body),
        n_interactions_per_epoch=128,
        driver=functools.partial(RayDriver, num_workers=2, **shape),
        output_dir=str(tmp_path),
    )
    records = []
    trainer.on_epoch = records.append
    try:
        trainer.run(3)
    finally:
        trainer.close()
    assert [record["epoch"] for record in records] == [1, 2, 3]
    assert records[-1]["env_steps"] > 300 and records[-1]["n_trajectories"] > 0
    assert max(record["most_policy_lag"] for record in records) <= 8


def test_the_command_line_starts_workers(tmp_path):
    command = [sys.executable, "-m", "rl_trainers.cli", "train", "--output_dir", str(tmp_path / "run")]
    command += ["--config_file", str(ROOT / "configs" / "ppo_joint_cartpole.gin")]
    command += ["--config", "train.n_epochs = 3", "--driver", "ray", "--num_workers", "2"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=240)
    assert done.returncode == 0, done.stderr[-2000:]
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    assert len(lines) == 3 and '"most_policy_lag"' in lines[-1]
    assert "RayDriver.num_workers = 2" in (tmp_path / "run" / "config.gin").read_text()
