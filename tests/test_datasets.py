"""Recorded data sets: what was recorded is what is read and trained on, without a step of an environment."""

import functools
import sys

import gymnasium
import jax
import numpy as np
import pytest
from gymnasium import spaces

from rl_trainers import AWR, AWRJoint, RLTask, datasets
from rl_trainers.distributions import create_distribution

minari = pytest.importorskip("minari", reason="the extra minari is not installed")
N_EPISODES = 4


class Recorded(gymnasium.Wrapper):
    """Keeps what went through it."""

    episodes: list

    def reset(self, **kwargs):
        observation, info = self.env.reset(**kwargs)
        self.episodes.append([observation, []])
        return observation, info

    def step(self, action):
        result = self.env.step(action)
        self.episodes[-1][1].append((action, *result[:4]))
        return result


class Nested(gymnasium.Env):
    """Three steps, then terminated and truncated at once; Dict observations, Tuple actions."""

    observation_space = spaces.Dict({"a": spaces.Box(0, 9, (2,), np.float64), "b": spaces.Discrete(9)})
    action_space = spaces.Tuple([spaces.Discrete(2, start=1), spaces.Box(-3, 1, (1,), np.float32)])

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.t = 0
        return self.look(), {}

    def step(self, action):
        self.t += 1
        return self.look(), self.t / 4, self.t == 3, self.t == 3, {}

    def look(self):
        return {"a": np.full(2, self.t, np.float64), "b": np.int64(self.t)}


ENVS = {
    "box": functools.partial(gymnasium.make, "Pendulum-v1", max_episode_steps=25),
    "discrete": functools.partial(gymnasium.make, "CartPole-v1", max_episode_steps=25),
    "nested": Nested,
}


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    """Data sets by name, and what was recorded into them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MINARI_DATASETS_PATH", str(tmp_path_factory.mktemp("datasets")))
        yield {name: record(name, make) for name, make in ENVS.items()}


def record(name, make):
    inner = Recorded(make())
    inner.episodes = []
    env = minari.DataCollector(inner)
    env.action_space.seed(0)
    for seed in range(N_EPISODES):
        env.reset(seed=seed)
        done = False
        while not done:
            *_, terminated, truncated, _ = env.step(env.action_space.sample())
            done = terminated or truncated
    env.create_dataset(f"test/{name}-v0", eval_env="CartPole-v1", algorithm_name="random", author="test")
    env.close()
    return inner.episodes


def check_steps(episode, distribution, trajectory):
    """Whether a trajectory is what was recorded."""
    observation, steps = episode
    assert len(trajectory) == len(steps) + 1
    for got, (action, following, reward, terminated, truncated) in zip(
        trajectory.timesteps, steps, strict=True
    ):
        jax.tree.map(np.testing.assert_array_equal, got.observation, narrow(observation))
        jax.tree.map(np.testing.assert_array_equal, got.action, distribution.from_env(action))
        assert got.reward == np.float32(reward) and got.mask == 1
        assert (got.terminated, got.truncated) == (terminated, truncated)
        assert np.isnan(got.dist_inputs).all() and got.dist_inputs.shape == (distribution.n_inputs,)
        observation = following
    jax.tree.map(np.testing.assert_array_equal, trajectory.last_observation, narrow(observation))


def narrow(observation):
    return jax.tree.map(lambda x: np.asarray(x, np.float32) if x.dtype == np.float64 else x, observation)


@pytest.mark.parametrize("name", ENVS)
@pytest.mark.parametrize("num_envs", [1, 3])
def test_every_transition_is_read(recorded, name, num_envs):
    squashed = functools.partial(create_distribution, bounds="squash") if name == "box" else None
    task = RLTask(ENVS[name], f"minari:test/{name}-v0", num_envs=num_envs, action_distribution=squashed)
    trajectories = task.trajectories[0]
    assert task.n_trajectories() == len(trajectories) == N_EPISODES and task.n_interactions() == 0
    assert task.n_initial_interactions == sum(len(steps) for _, steps in recorded[name])

    def first(trajectory):
        return [np.asarray(x).tolist() for x in jax.tree.leaves(trajectory.timesteps[0][:2])]

    direct = datasets.from_minari(f"test/{name}-v0", task.distribution)
    for episode, trajectory in zip(recorded[name], direct, strict=True):
        check_steps(episode, task.distribution, trajectory)
        (stored,) = [t for t in trajectories if first(t) == first(trajectory)]
        check_steps(episode, task.distribution, stored)


@pytest.mark.parametrize("trainer_class", [AWR, AWRJoint])
@pytest.mark.parametrize("name", ["box", "discrete"])
def test_training_takes_no_step_and_stays_finite(recorded, name, trainer_class):
    task = RLTask(ENVS[name], f"minari:test/{name}-v0")
    steps = {"train_steps_per_epoch": 3}
    if trainer_class is AWR:
        steps = {"value_train_steps_per_epoch": 3, "policy_train_steps_per_epoch": 3}
    records = []
    trainer = trainer_class(
        task, only_eval=True, n_trajectories_per_epoch=1, on_epoch=records.append, **steps
    )
    before = jax.tree.map(np.array, trainer.state.params)
    trainer.run(2)
    assert task.n_interactions() == 0 and task.replay.size >= task.n_initial_interactions
    changed = jax.tree.map(lambda x, y: not np.array_equal(x, y), before, trainer.state.params)
    assert all(jax.tree.leaves(changed))
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(trainer.state.params))
    for record in records:
        assert {name: x for name, x in record.items() if not np.isfinite(x)} == {}


def test_mistakes_are_named(recorded, monkeypatch):
    match = r"no Minari data set 'test/bx-v0' on this machine; the nearest is 'test/box-v0'"
    with pytest.raises(ValueError, match=match):
        RLTask("Pendulum-v1", "minari:test/bx-v0")
    with pytest.raises(ValueError, match=r"the actions of test/box-v0 are Box\(-2.0, 2.0.*Discrete\(2\)"):
        RLTask("CartPole-v1", "minari:test/box-v0")
    with pytest.raises(ValueError, match=r"the observations of test/discrete-v0 have the shape \(4,\)"):
        RLTask("CartPole-v1", "minari:test/discrete-v0", num_stacked_frames=2)
    monkeypatch.setitem(sys.modules, "minari", None)
    with pytest.raises(ImportError, match="needs the extra 'minari': pip install"):
        RLTask("Pendulum-v1", "minari:test/box-v0")


def test_numbers_that_are_not_finite_are_named():
    steps = {"rewards": np.array([0.0, np.nan]), "actions": np.zeros(2)}

    class Bad:
        id = "bad"

        def iterate_episodes(self):
            return [type("Episode", (), {"id": 7, "observations": np.zeros((3, 1)), **steps})]

    with pytest.raises(ValueError, match="bad, episode 7: the reward of step 1 is not finite"):
        datasets.from_minari(Bad(), create_distribution(spaces.Discrete(2)))
