"""Compiled epochs over JAX environments against epochs that step them row by row."""

import functools
import signal

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gymnasium import spaces

from rl_trainers import A2C, AWR, DQN, PPO, RWR, A2CJoint, AWRJoint, PPOJoint, RLTask, metrics, models
from rl_trainers.envs import DeviceEnv, JaxEnv, make_host_env, probe_jax
from rl_trainers.iteration import keep, keep_stored, report
from rl_trainers.rollout import Endings
from rl_trainers.trainer import RLTrainer
from rl_trainers.types import EnvInfo, Rollout, TimeStep

ON_POLICY = {
    PPOJoint: {"batch_size": 16, "train_steps_per_epoch": 8},
    A2CJoint: {"batch_size": 16},
    PPO: {"value_train_steps_per_epoch": 4, "policy_train_steps_per_epoch": 4},
    A2C: {"value_train_steps_per_epoch": 4},
}
OFF_POLICY = {
    AWRJoint: {"batch_size": 16, "train_steps_per_epoch": 8},
    AWR: {"value_train_steps_per_epoch": 4, "policy_train_steps_per_epoch": 4},
    RWR: {"policy_train_steps_per_epoch": 4},
}


def task(**kwargs):
    return RLTask(probe_jax.counting(7, truncates=True), **{"num_envs": 4, "gamma": 0.9, "seed": 3, **kwargs})


def make(cls, options, **kwargs):
    return cls(task(**kwargs), n_interactions_per_epoch=64, seed=1, **options)


def row_by_row(monkeypatch, *arguments, **kwargs):
    with monkeypatch.context() as patch:
        patch.setattr(RLTrainer, "_iterates", lambda self: False)
        return make(*arguments, **kwargs)


def difference(one, other):
    pairs = zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True)
    return max(float(np.max(np.abs(np.asarray(a, float) - np.asarray(b, float)))) for a, b in pairs)


@pytest.mark.parametrize("cls", ON_POLICY)
def test_compiled_epochs_equal_those_row_by_row(cls, monkeypatch):
    options = {**ON_POLICY[cls], "n_eval_episodes": 0}
    compiled, plain = make(cls, options), row_by_row(monkeypatch, cls, options)
    compiled.run(3)
    plain.run(3)

    assert compiled._iteration is not None and plain._iteration is None
    assert difference(compiled.state.params, plain.state.params) < 1e-5
    assert compiled.task.n_interactions() == plain.task.n_interactions()
    assert compiled.task.n_trajectories() == plain.task.n_trajectories()
    np.testing.assert_allclose(compiled.avg_returns, plain.avg_returns, rtol=1e-6)
    np.testing.assert_allclose(compiled._recent, plain._recent, rtol=1e-6)
    for name in ("observation", "needs_reset", "key", "episode_return", "episode_length"):
        assert difference(getattr(compiled.task.actor, name), getattr(plain.task.actor, name)) == 0


@pytest.mark.parametrize("cls", OFF_POLICY)
def test_rows_kept_on_the_device_are_those_of_the_replay(cls, monkeypatch):
    options = {"n_replay_epochs": 2, **OFF_POLICY[cls]}
    compiled = make(cls, options, initial_trajectories=3)
    plain = row_by_row(monkeypatch, cls, options, initial_trajectories=3)
    compiled.run(1)
    plain.run(1)
    kept, stored = compiled._iteration.kept.rollout.steps, plain.task.replayed().steps
    decided = [np.asarray(x.mask) > 0 for x in (kept, stored)]
    for b in range(4):
        ours, theirs = kept.reward[decided[0][:, b], b], stored.reward[decided[1][:, b], b]
        np.testing.assert_array_equal(ours, theirs)
    assert (compiled._iteration.kept.epoch[decided[0].any(1)] >= 0).all()

    compiled.run(2)
    epoch = np.asarray(compiled._iteration.kept.epoch)
    mask = np.asarray(compiled._iteration.kept.rollout.steps.mask)
    assert mask[epoch < 2].sum() == 0 and mask[epoch >= 2].sum() > 100


def steps_of(mask, done):
    mask = jnp.array(mask, jnp.float32)
    nothing = jnp.zeros_like(mask)
    done = jnp.array(done, bool)
    ones = EnvInfo(jnp.ones_like(mask), jnp.ones_like(mask))
    return TimeStep(nothing, nothing, nothing, done, jnp.zeros_like(done), mask, env_info=ones)


def test_a_report_counts_what_happened():
    done = [[0, 1], [0, 0], [1, 0]]
    steps = steps_of([[1, 1], [1, 0], [1, 1]], done)
    endings = Endings(
        jnp.array([[1.0, 5.0], [2.0, 0.0], [3.0, 1.0]]),
        jnp.array([[1, 4], [2, 0], [3, 1]]),
        jnp.array(done, bool),
    )
    counts = report({}, steps, endings, None)
    assert (counts.n_interactions, counts.n_trajectories, counts.n_episodes) == (5, 2, 2)
    assert (counts.return_sum, counts.length_sum) == (8.0, 7.0)
    np.testing.assert_array_equal(counts.latest[:3], [3.0, 5.0, np.nan])
    assert counts.latest.shape == (100,)

    # Cut after 2 decisions, and after 4: the latter ended there anyway.
    assert report({}, steps, endings, 2).n_trajectories == 3


def test_rows_are_kept_for_as_many_epochs_as_asked_for():
    def rollout(value, n, last=0.0):
        steps = steps_of(np.ones((n, 1)), np.zeros((n, 1)))
        return Rollout(steps._replace(reward=jnp.full((n, 1), value)), jnp.full(1, last))

    data = rollout(0.0, 5, last=9.0)
    data = data._replace(steps=data.steps._replace(mask=np.array([[1], [1], [0], [0], [0]], np.float32)))
    kept = keep_stored(jax.tree.map(np.asarray, data), np.array([0, 0]), 2)
    np.testing.assert_array_equal(kept.epoch, [-1, -1, -1, 0, 0, 0])
    np.testing.assert_array_equal(kept.rollout.steps.mask[:, 0], [0, 0, 0, 1, 1, 0])
    assert kept.rollout.steps.observation[5, 0] == 9.0

    kept = keep(kept, rollout(1.0, 2), 1, 2)
    np.testing.assert_array_equal(kept.epoch, [-1, 0, 0, 0, 1, 1])
    np.testing.assert_array_equal(kept.rollout.steps.mask[:, 0], [0, 1, 1, 0, 1, 1])
    kept = keep(kept, rollout(2.0, 2), 2, 2)
    np.testing.assert_array_equal(kept.epoch, [0, 0, 1, 1, 2, 2])
    np.testing.assert_array_equal(kept.rollout.steps.mask[:, 0], [0, 0, 1, 1, 1, 1])
    np.testing.assert_array_equal(kept.rollout.steps.reward[2:, 0], [1, 1, 2, 2])

    # More rows than there is room for.
    kept = keep(kept, rollout(3.0, 8), 3, 2)
    np.testing.assert_array_equal(kept.epoch, [3] * 6)
    np.testing.assert_array_equal(kept.rollout.steps.reward[:, 0], [3] * 6)


def test_rows_that_lost_their_successor_are_not_learned_from():
    env = JaxEnv(
        lambda key: (jnp.int32(0), jnp.zeros(1)),
        lambda state, action, key: (state + 1, jnp.ones(1) * (state + 1), 1.0, state >= 90, False, {}),
        spaces.Box(0.0, np.inf, (1,), np.float32),
        spaces.Discrete(2),
    )
    options = {"n_replay_epochs": 3, "batch_size": None, "train_steps_per_epoch": 1}
    trainer = AWRJoint(RLTask(env, num_envs=2), n_interactions_per_epoch=8, **options)
    trainer.run(2)
    trainer.task.collect(lambda *args: (np.zeros(2, np.int32), None, args[1], args[3]), unroll_length=5)
    trainer.run(1)
    steps = trainer._iteration.kept.rollout.steps
    np.testing.assert_array_equal(steps.observation[:, 0, 0], [*range(8), 13, 14, 15, 16])
    np.testing.assert_array_equal(steps.mask[:, 0], [1] * 7 + [0] + [1] * 4)


@pytest.mark.parametrize("cls", [PPOJoint, AWR])
def test_a_continued_run_equals_an_uninterrupted_one(cls, tmp_path):
    options = {**ON_POLICY, **OFF_POLICY}[cls]
    whole = make(cls, options)
    whole.run(4)
    first = make(cls, {**options, "output_dir": str(tmp_path)})
    first.run(2)
    first.close()
    second = make(cls, {**options, "output_dir": str(tmp_path)})
    assert second.current_epoch == 2
    second.run(2)
    second.close()

    assert difference(second.state_dict(), whole.state_dict() | {"loop": second.state_dict()["loop"]}) == 0
    assert second.avg_returns == whole.avg_returns


def test_nothing_compiles_after_the_second_epoch():
    trainer = make(PPOJoint, ON_POLICY[PPOJoint])
    trainer.run(2)
    before = metrics.compilations().programs
    trainer.run(40)
    assert metrics.compilations().programs == before
    assert trainer._iteration.epochs_per_call > 1
    assert trainer.current_epoch == len(trainer.avg_returns) == 42


def test_several_epochs_of_a_call_equal_single_ones():
    together, alone = (make(PPOJoint, ON_POLICY[PPOJoint]) for _ in range(2))
    together._iteration.epochs_per_call = 5
    together.run(5)
    alone.on_epoch = lambda record: None
    alone.run(5)
    assert difference(together.state, alone.state) == 0
    assert together.avg_returns == alone.avg_returns


def test_evaluation_plays_the_first_episode_of_each_environment():
    trainer = make(PPOJoint, ON_POLICY[PPOJoint])
    before = jax.tree.map(np.array, trainer.task.actor)
    episodes = trainer.evaluate(6)
    assert len(episodes.returns) == 6
    np.testing.assert_array_equal(episodes.lengths, np.full(6, 7))
    assert trainer.task.n_eval_interactions == 8 * 7  # two rounds of four environments
    np.testing.assert_array_equal(trainer.evaluate(3, max_steps=5).lengths, [5, 5, 5])
    assert difference(before, trainer.task.actor) == 0


def test_evaluation_equals_that_of_single_rows():
    trainer = make(PPOJoint, ON_POLICY[PPOJoint])
    compiled = trainer.evaluate(4)
    trainer.acting.is_traceable = False
    plain = trainer.evaluate(4)
    np.testing.assert_array_equal(compiled.lengths, plain.lengths)
    np.testing.assert_array_equal(compiled.returns, plain.returns)


def test_a_hook_that_is_not_traceable_steps_rows():
    def to_numpy(steps):
        return steps._replace(observation=np.asarray(steps.observation) * 2)

    trainer = make(PPOJoint, ON_POLICY[PPOJoint], timestep_to_np=to_numpy)
    assert trainer._iteration is None
    trainer.run(1)
    assert trainer.task.n_interactions() > 0


def test_a_traceable_hook_is_compiled():
    def double(steps):
        return steps._replace(observation=steps.observation * 2)

    trainer = make(PPOJoint, ON_POLICY[PPOJoint], timestep_to_np=double)
    assert trainer._iteration is not None
    trainer.run(1)


def test_normaliser_statistics_are_those_of_all_rows(monkeypatch):
    model = functools.partial(models.PolicyAndValue, normalizer=models.Normalize)
    options = {**ON_POLICY[PPOJoint], "joint_model": model}
    compiled, plain = make(PPOJoint, options), row_by_row(monkeypatch, PPOJoint, options)
    compiled.run(2)
    plain.run(2)
    assert jax.tree.leaves(compiled.state.model_state)
    assert difference(compiled.state.model_state, plain.state.model_state) < 1e-5


def test_normaliser_statistics_are_those_of_initial_trajectories_too(monkeypatch):
    model = functools.partial(models.PolicyAndValue, normalizer=models.Normalize)
    options = {**OFF_POLICY[AWRJoint], "joint_model": model, "n_replay_epochs": 3}
    compiled = make(AWRJoint, options, initial_trajectories=9)
    plain = row_by_row(monkeypatch, AWRJoint, options, initial_trajectories=9)
    for _ in range(2):
        compiled.run(1)
        plain.run(1)
        counts = [jax.tree.leaves(trainer.state.model_state)[0] for trainer in (compiled, plain)]
        n_initial = compiled.task.n_initial_interactions
        assert counts[0] == counts[1] == n_initial + compiled.task.n_interactions()


def test_an_interrupt_waits_for_the_compiled_epochs(monkeypatch, interrupts):
    trainer = make(PPOJoint, ON_POLICY[PPOJoint])
    trainer.run(2)
    put_down = trainer._iteration.put_down

    def interrupted(carry):
        signal.raise_signal(signal.SIGINT)
        put_down(carry)

    monkeypatch.setattr(trainer._iteration, "put_down", interrupted)
    with pytest.raises(KeyboardInterrupt):
        trainer.run(10_000)
    monkeypatch.undo()
    n_epochs = trainer.current_epoch
    assert n_epochs < 10_000
    trainer.run(1)
    assert trainer.current_epoch == n_epochs + 1
    assert trainer.state.step == 8 * trainer.current_epoch


def test_a_device_env_goes_on_from_its_snapshot():
    env = DeviceEnv(probe_jax.counting(3), 2)
    env.reset(5)
    env.step(np.zeros(2, np.int32))
    saved = env.snapshot()
    expected = [env.step(np.zeros(2, np.int32)) for _ in range(4)]
    other = DeviceEnv(probe_jax.counting(3), 2)
    assert other.restore(saved)
    for step in expected:
        assert difference(other.step(np.zeros(2, np.int32)), step) == 0
    with pytest.raises(ValueError, match="3 environments"):
        DeviceEnv(probe_jax.counting(3), 3).restore(saved)
    on_host = make_host_env("CartPole-v1", 2)
    with pytest.raises(ValueError, match="the checkpoint is of JAX environments"):
        on_host.restore(saved)
    on_host.reset(0)
    with pytest.raises(ValueError, match="checkpoint is not of 2 environments"):
        other.restore(on_host.snapshot())


def test_what_is_for_python_environments_is_refused():
    with pytest.raises(ValueError, match="num_stacked_frames=4.*nearest valid value: 1"):
        RLTask(probe_jax.counting(3), num_stacked_frames=4)
    with pytest.raises(ValueError, match="backend='async'.*nearest valid value: 'auto'"):
        RLTask(probe_jax.counting(3), backend="async")


def spoilt():
    """A probe whose reward is NaN from its second step on."""
    env = probe_jax.counting(7, truncates=True)

    def step(state, action, key):
        state, observation, reward, *rest = env.step(state, action, key)
        return state, observation, jnp.where(state.t > 1, jnp.nan, reward), *rest

    return env._replace(step=step)


@pytest.mark.parametrize("cls", [PPOJoint, DQN])
def test_what_is_not_finite_stops_the_run(cls):
    trainer = cls(RLTask(spoilt(), num_envs=2), n_interactions_per_epoch=32)
    with pytest.raises(FloatingPointError, match="NaN or infinite in epoch 1"):
        trainer.run(2)
    assert trainer.current_epoch == 0


def test_a_run_goes_on_with_room_for_more_epochs(tmp_path):
    options = {**OFF_POLICY[AWR], "output_dir": str(tmp_path)}
    first = make(AWR, {**options, "n_replay_epochs": 2})
    first.run(3)
    kept = np.asarray(first._iteration.kept.rollout.steps.reward)
    first.close()
    second = make(AWR, {**options, "n_replay_epochs": 4})
    assert second._iteration.kept.epoch.shape == (64,)
    np.testing.assert_array_equal(second._iteration.kept.epoch[:32], np.full(32, -1))
    np.testing.assert_array_equal(second._iteration.kept.rollout.steps.reward[32:], kept)
    assert np.asarray(second._iteration.kept.rollout.steps.mask)[:32].sum() == 0
    second.run(1)
    second.close()
