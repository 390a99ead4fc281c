"""Sequence models see the same rows while acting and while training, and those that the rule says."""

import functools

import flax.linen as nn
import gymnasium
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rl_trainers import (
    A2C,
    AWR,
    PPO,
    A2CJoint,
    AWRJoint,
    ExpertIteration,
    PolicyGradient,
    PPOJoint,
    RLTask,
    models,
    optimizers,
    windows,
)
from rl_trainers.envs import Memory, probe
from rl_trainers.task import Trajectory
from rl_trainers.types import Batch, Seen, TimeStep

TINY = functools.partial(models.TransformerDecoder, d_model=4, d_ff=4)
JOINT = functools.partial(models.PolicyAndValue, body=TINY)
POLICY = functools.partial(models.Policy, body=TINY)
VALUE = functools.partial(models.Value, body=TINY)


class Sums(nn.Module):
    """Says the sum of the observations in sight, which tells which rows they are."""

    sequence = True

    @nn.compact
    def __call__(self, x, episode):
        sees = jnp.tril(episode[:, :, None] == episode[:, None, :]).astype(jnp.float32)
        x = x.reshape(*episode.shape, -1)[..., -1]
        total = jnp.einsum("nij,nj->ni", sees, x).reshape(-1)
        scale = self.param("policy", nn.initializers.ones, ())
        return jnp.stack([total, total], -1) * scale, total


class Powers(probe.Counting):
    """Episodes of given lengths whose t-th observation is ``2 ** t``, so that sums tell their terms."""

    observation_space = gymnasium.spaces.Box(0.0, np.inf, (1,), np.float32)

    def __init__(self, length=7):
        super().__init__(length)

    def look(self):
        return np.full(1, 2.0**self.t, np.float32)


def joint(env, num_envs=2, length=4, rows=12, algorithm=PPOJoint, model=JOINT, **kwargs):
    arguments = {"train_steps_per_epoch": 2, "n_interactions_per_epoch": rows * num_envs} | kwargs
    task = RLTask(env, num_envs=num_envs, seed=3, initial_trajectories=arguments.pop("initial", 0))
    return algorithm(task, joint_model=model, max_slice_length=length, **arguments)


def acted(trainer, monkeypatch):
    """Collects an epoch; ``(data, dist_inputs [T, B, D] as the policy said while it acted)``."""
    said = []

    def spy(*arguments):
        action, dist_inputs, *rest = trainer.acting.decide_fully(*arguments)
        said.append(np.asarray(dist_inputs))
        return action, *rest

    monkeypatch.setattr(trainer.acting, "decide", spy)
    data, *_ = trainer._collect()
    monkeypatch.undo()
    return data, np.stack(said)


@pytest.mark.parametrize("rows, length", [(3, 2), (8, 4), (10, 4)])
def test_what_was_said_while_acting_is_said_again_in_training(rows, length, monkeypatch):
    # Environments with episodes of other lengths; epochs that blocks divide and such that they do not.
    trainer = joint([lambda: Powers(7), lambda: Powers(2)], 2, length, rows, train_steps_per_epoch=1)
    for _ in range(3):
        data, said = acted(trainer, monkeypatch)
        steps = data.steps
        np.testing.assert_allclose(steps.dist_inputs[length:], said, atol=1e-5)
        assert np.abs(np.diff(said, axis=0)).max() > 1e-4
        batch, _ = trainer._make_rows(trainer.state, data, trainer.hparams())
        dist_inputs, _ = trainer._model.apply(trainer.state.params, {}, batch.observation)
        both = (trainer._distribution.log_prob(x, batch.action) for x in (dist_inputs, batch.dist_inputs))
        again, recorded = both
        kept = np.asarray(batch.mask) > 0
        assert kept.sum() == steps.mask.sum() > 0
        np.testing.assert_allclose(again[kept], recorded[kept], atol=1e-5)
        assert trainer.train_epoch(data)["probs_ratio_mean"] == pytest.approx(1, abs=1e-5)


def test_a_decision_sees_its_block_and_the_one_before(monkeypatch):
    # Blocks of 2 rows, epochs of 5, one endless episode: 2**t in row t. Blocks: 0-1 2-3 4 | 5-6 7-8 9.
    trainer = joint(lambda: Powers(100), 1, 2, 5, model=lambda **_: Sums(), train_steps_per_epoch=1)
    first = [range(1), range(2), range(3), range(4), range(2, 5)]
    # The second rollout begins with the block 5-6, and its block before are the newest two rows, 3-4.
    second = [range(3, 6), range(3, 7), range(5, 8), range(5, 9), range(7, 10)]
    for rows in (first, second):
        data, said = acted(trainer, monkeypatch)
        want = [sum(2.0**t for t in row) for row in rows]
        assert said[:, 0, 0].tolist() == want
        assert data.steps.dist_inputs[2:, 0, 0].tolist() == want
    _, values = windows.over_rollout(
        functools.partial(trainer._model.apply, trainer.state.params, {}), data.steps.observation, 2
    )
    assert np.asarray(values)[2:, 0].tolist() == want


def test_nothing_of_an_earlier_episode_is_seen(monkeypatch):
    trainer = joint(lambda: Powers(2), 1, 4, 9, model=lambda **_: Sums(), train_steps_per_epoch=1)
    _, said = acted(trainer, monkeypatch)
    # Two decisions and the reset row, which shows the last observation: 1, 1 + 2, 1 + 2 + 4.
    assert said[:, 0, 0].tolist() == [1, 3, 7] * 3


def test_rows_are_blocks_behind_the_block_before():
    x = np.arange(1, 11).reshape(5, 2)
    rows = windows.blocks_and_before({"x": x}, 2)["x"]
    assert rows.tolist() == [
        [0, 0, 1, 3],
        [0, 0, 2, 4],
        [1, 3, 5, 7],
        [2, 4, 6, 8],
        [5, 7, 9, 0],
        [6, 8, 10, 0],
    ]
    seen = Seen(x, np.ones_like(x))
    assert windows.over_rollout(lambda rows: rows.observation * 2, seen, 2).tolist() == (2 * x).tolist()


def test_numbers_of_episodes():
    mask = np.array([[1, 1, 0, 1, 1, 0, 0]], np.float32).T
    no = np.zeros_like(mask, bool)
    done = no.copy()
    done[1] = True
    steps = TimeStep((), (), mask, done, no, mask)
    assert windows.episodes(steps)[:, 0].tolist() == [1, 1, 1, 2, 2, 2, 3, 4]
    # Without a reset row the next episode begins right after the end.
    steps = steps._replace(mask=np.ones_like(mask))
    assert windows.episodes(steps)[:, 0].tolist() == [1, 1, 2, 2, 2, 2, 2, 2]


@pytest.mark.parametrize("n", [1, 3, 4, 5, 8, 9, 11])
def test_a_trajectory_is_seen_as_an_episode_is_while_acting(n, monkeypatch):
    trainer = joint(lambda: Powers(100), 1, 4, n)
    _, said = acted(trainer, monkeypatch)
    trajectory = Trajectory(np.ones(1, np.float32))
    for t in range(1, n):
        trajectory.extend(np.full(1, 2.0**t, np.float32), action=0)
    _, dist_inputs = trainer.policy(trajectory)
    np.testing.assert_allclose(dist_inputs, said[-1, 0], atol=1e-5)
    if n == 1:
        _, dist_inputs = trainer.policy(np.ones(1, np.float32))
        np.testing.assert_allclose(dist_inputs, said[-1, 0], atol=1e-5)


def test_the_window_starts_anew_after_steps_of_another_policy():
    trainer = joint(lambda: Powers(100), 1, 4, 8, train_steps_per_epoch=1)
    trainer.run(1)
    assert trainer.task.actor.policy_state.seen.episode.any()
    trainer.task.collect_trajectories(trainer.policy, n_interactions=3)
    assert not trainer.task.actor.policy_state.seen.episode.any()
    trainer.run(1)


def test_hooks_change_what_the_window_holds(monkeypatch):
    def double(steps):
        return steps._replace(observation=2 * steps.observation)

    task = RLTask(lambda: Powers(100), timestep_to_np=double)
    trainer = PPOJoint(
        task,
        joint_model=lambda **_: Sums(),
        max_slice_length=2,
        n_interactions_per_epoch=3,
        train_steps_per_epoch=1,
    )
    trainer._collect()
    _, said = acted(trainer, monkeypatch)
    # Rows 3, 4, 5 behind the rows 1, 2 of the rollout before, each doubled.
    assert said[:, 0, 0].tolist() == [2 * (2 + 4 + 8), 2 * (2 + 4 + 8 + 16), 2 * (8 + 16 + 32)]


def test_a_resumed_run_equals_an_undisturbed_one(tmp_path):
    def make(directory):
        return joint(Memory, 2, 4, 9, output_dir=str(directory), n_eval_episodes=2)

    straight = make(tmp_path / "straight")
    straight.run(4)
    first = make(tmp_path / "halves")
    first.run(2)
    first.close()
    second = make(tmp_path / "halves")
    assert second.current_epoch == 2
    second.run(2)
    jax.tree.map(np.testing.assert_array_equal, second.state, straight.state)
    jax.tree.map(np.testing.assert_array_equal, second.task.actor, straight.task.actor)
    assert second.eval_returns == straight.eval_returns


def test_nothing_compiles_after_the_second_epoch():
    trainer = joint(Memory, 2, 4, 10, n_eval_episodes=2)
    programs = []
    trainer.on_epoch = lambda record: programs.append(record["compilations"])
    trainer.run(4)
    assert programs[1] == programs[2] == programs[3]


def test_a_single_row_is_too_little_for_a_sequence_network():
    with pytest.raises(ValueError, match="max_slice_length=1: .*sequence network.*nearest valid value: 2"):
        joint(Memory, length=1)
    with pytest.raises(ValueError, match="max_slice_length=1"):
        PolicyGradient(RLTask(Memory), POLICY)
    with pytest.raises(ValueError, match="max_slice_length=1"):
        PPO(RLTask(Memory), policy_model=POLICY)


def test_models_that_see_single_rows_have_no_window():
    trainer = joint(Memory, model=models.PolicyAndValue)
    trainer.run(1)
    assert trainer.task.actor.policy_state == ()
    data, *_ = trainer._collect()
    assert not isinstance(data.steps.observation, Seen) and len(data.steps.mask) == 12


PARTS = {"policy_model": POLICY, "policy_train_steps_per_epoch": 2}
BOTH = {**PARTS, "value_model": VALUE, "value_train_steps_per_epoch": 2, "n_interactions_per_epoch": 24}
ONE = {"joint_model": JOINT, "train_steps_per_epoch": 2, "n_interactions_per_epoch": 24}
TRAINERS = {
    "PolicyGradient": (PolicyGradient, {"model_fn": POLICY}),
    "ExpertIteration": (
        ExpertIteration,
        {"model_fn": POLICY, "n_train_steps_per_epoch": 2, "n_trajectories_per_epoch": 8},
    ),
    "PPO": (PPO, BOTH),
    "A2C": (A2C, BOTH),
    "AWR": (AWR, {**BOTH, "added_policy_slice_length": 1, "thresholds": ((70, 1.0, 0), (90, 4.0, 0))}),
    "PPO_shared": (PPO, {**BOTH, "n_shared_layers": 1}),
    "PPO_own_value": (PPO, {**BOTH, "value_model": models.Value}),
    "PPOJoint": (PPOJoint, ONE),
    "A2CJoint": (A2CJoint, {**ONE, "optimizer": optimizers.RMSProp}),
    "AWRJoint": (AWRJoint, ONE),
    "AWRJoint_normalized": (
        AWRJoint,
        {**ONE, "joint_model": functools.partial(JOINT, normalizer=models.Normalize)},
    ),
}


@pytest.mark.parametrize("name", TRAINERS)
def test_every_trainer_trains_transformers(name):
    make, arguments = TRAINERS[name]
    trainer = make(RLTask(Memory, num_envs=2), max_slice_length=2, **arguments)
    before = jax.tree.map(np.array, trainer.state.params)
    trainer.run(2)
    assert trainer.current_epoch == 2
    changed = jax.tree.map(lambda x, y: bool(np.any(x != y)), before, trainer.state.params)
    layers = {part: jax.tree.leaves(tree) for part, tree in changed.items()}
    assert all(any(leaves) for leaves in layers.values()), layers
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(trainer.state.params))
    if name.endswith("normalized"):
        statistics = trainer.state.model_state["model_state"]["shared"]["normalize"]
        assert statistics["count"] == trainer.task.n_interactions()


@pytest.mark.parametrize("algorithm", [AWRJoint, A2CJoint])
def test_batches_hold_the_rows_before_masked(algorithm):
    trainer = joint(Memory, algorithm=algorithm)
    trainer.run(1)
    batch: Batch = next(trainer.batches_stream())
    assert batch.mask.shape[1] == 8 and batch.observation.episode.shape == batch.mask.shape
    assert not batch.mask[:, :4].any() and batch.mask[:, 4:].any()


def test_replayed_episodes_are_kept_apart():
    trainer = joint(Memory, 2, 3, 12, AWRJoint, initial=5, n_replay_epochs=3)
    trainer.run(2)
    data = trainer._stored()
    steps, seen = data.steps, data.steps.observation
    for b in range(2):
        numbers = seen.episode[:, b][steps.mask[:, b] > 0]
        cues = seen.observation[:, b, 0][steps.mask[:, b] > 0]
        for number in np.unique(numbers):
            cue = cues[numbers == number]
            assert len(cue) <= 6 and np.count_nonzero(cue) == 1 and cue[0] != 0
