"""Recurrent policies: the same state while acting and while training."""

import functools

import flax.linen as nn
import gymnasium as gym
import jax
import numpy as np
import pytest

from rl_trainers import (
    A2C,
    AWR,
    DQN,
    AWRJoint,
    PPOJoint,
    RLTask,
    SamplingAWR,
    iteration,
    models,
    rollout,
    types,
)
from rl_trainers.distributions import create_distribution
from rl_trainers.envs import probe, probe_jax
from rl_trainers.trajectory import Trajectory

BOX = gym.spaces.Box(-1.0, 1.0, (3,), np.float32)
EPISODE = np.array([[3, 3, 4, 4, 4, 5]], np.int32)


def gru(hidden_size=8):
    return functools.partial(models.GRU, hidden_size=hidden_size)


def lstm():
    body = functools.partial(models.MLP, layer_widths=(6,))
    return functools.partial(models.LSTM, hidden_size=4, body=body)


def build(body):
    network = models.Policy(create_distribution(gym.spaces.Discrete(4)), body, head_init_range=1.0)
    model = models.build(network, BOX, "policy")
    return model, *model.init(jax.random.PRNGKey(0), np.zeros((1, 3), np.float32))


class Ticks(probe.Probe):
    """Shows how often it was stepped in all its life, in episodes of a given length."""

    def __init__(self, length):
        super().__init__()
        self.length, self.ticks = length, 0

    def look(self):
        self.ticks += 1
        return np.full(1, np.sin(self.ticks), np.float32)

    def pay(self, action):
        return float(action)


ENVS = [functools.partial(Ticks, n) for n in (3, 4, 7)]


def joint(env=ENVS, num_envs=3, algorithm=PPOJoint, body=None, rows=32, **kwargs):
    network = functools.partial(
        models.PolicyAndValue, body=body or gru(), head_init_range=1.0, **kwargs.pop("network", {})
    )
    arguments = {"train_steps_per_epoch": 1, "n_interactions_per_epoch": rows * num_envs, **kwargs}
    initial = arguments.pop("initial", 0)
    task = RLTask(env, num_envs=num_envs, seed=1, initial_trajectories=initial)
    return algorithm(task, joint_model=network, batch_size=None, **{"max_slice_length": 8, **arguments})


def acted(trainer, monkeypatch):
    """Collects an epoch; ``(data, dist_inputs [T, B, D], policy_state after each row)`` as it acted."""
    said, after = [], []

    def spy(*arguments):
        result = decide(*arguments)
        said.append(np.asarray(result[1]))
        after.append(jax.tree.map(np.asarray, result[2]))
        return result

    decide = trainer.acting.decide_fully
    monkeypatch.setattr(trainer.acting, "decide_fully", spy)
    data, *_ = trainer._collect()
    monkeypatch.undo()
    return data, np.stack(said), after


@pytest.mark.parametrize("body", [gru(), lstm()])
def test_a_recurrent_network_depends_on_earlier_rows_of_its_episode_only(body):
    model, params, state = build(body)
    x = np.random.default_rng(0).normal(size=(1, 6, 3)).astype(np.float32)
    before = model.apply(params, state, types.Seen(x, EPISODE))
    for row in range(6):
        changed = x.copy()
        changed[0, row] += 1.0
        differs = np.any(before != model.apply(params, state, types.Seen(changed, EPISODE)), axis=-1)[0]
        later = (np.arange(6) >= row) & (EPISODE[0] == EPISODE[0, row])
        assert differs.tolist() == later.tolist()


@pytest.mark.parametrize("body", [gru(), lstm()])
def test_rows_one_by_one_are_rows_at_once(body):
    model, params, model_state = build(body)
    x = np.random.default_rng(0).normal(size=(1, 6, 3)).astype(np.float32)
    at_once = model.apply(params, model_state, types.Seen(x, EPISODE))
    first = jax.tree.map(lambda s: s[None, None], model.first_state)
    state, said = first, []
    for t in range(6):
        if t and EPISODE[0, t] != EPISODE[0, t - 1]:
            state = first
        row = types.Seen(x[:, t : t + 1], EPISODE[:, t : t + 1], state)
        output, state = model.step(params, model_state, row)
        state = jax.tree.map(lambda s: s[:, None], state)
        said.append(output[0, 0])
    np.testing.assert_allclose(at_once[0], np.stack(said), atol=1e-6)


@pytest.mark.parametrize("body", [gru(), lstm()])
def test_rows_behind_a_cut_begin_with_their_own_state(body):
    model, params, model_state = build(body)
    random = np.random.default_rng(0)
    x = random.normal(size=(1, 6, 3)).astype(np.float32)
    states = jax.tree.map(
        lambda s: random.normal(size=(1, 6, *s.shape)).astype(np.float32), model.first_state
    )
    at_once = model.apply(params, model_state, types.Seen(x, EPISODE, states))
    for rows in (slice(0, 2), slice(2, 5), slice(5, 6)):  # the episodes
        own = jax.tree.map(lambda leaf, rows=rows: leaf[:, rows], types.Seen(x, EPISODE, states))
        np.testing.assert_allclose(at_once[:, rows], model.apply(params, model_state, own), atol=1e-6)


def test_a_gated_unit_is_that_of_flax():
    model, params, state = build(gru(5))
    x = np.random.default_rng(0).normal(size=(1, 2, 3)).astype(np.float32)
    cell = nn.GRUCell(5)
    own = {"params": params["policy"]["body"]["cell"]}
    carry = np.zeros((1, 5), np.float32)
    for t in range(2):
        carry, y = cell.apply(own, carry, x[:, t])
    head = params["policy"]["head"]
    said = model.apply(params, state, types.Seen(x, np.ones((1, 2), np.int32)))
    np.testing.assert_allclose(said[0, 1], y[0] @ head["kernel"] + head["bias"], atol=1e-6)


@pytest.mark.parametrize("body", [gru(), lstm()])
@pytest.mark.parametrize("algorithm", [PPOJoint, AWRJoint])
def test_what_was_said_while_acting_is_said_again_in_training(algorithm, body, monkeypatch):
    trainer = joint(algorithm=algorithm, body=body)
    for epoch in range(3):
        data, said, _ = acted(trainer, monkeypatch)
        first = 0 if trainer.on_policy else 32 * epoch  # of a replay that is not full
        rows = slice(first, first + 32)
        np.testing.assert_array_equal(data.steps.dist_inputs[rows], said)
        assert np.abs(np.diff(said, axis=0)).max() > 1e-3
        batch, _ = trainer._make_rows(trainer.state, data, trainer.hparams())
        dist_inputs, _ = trainer._model.apply(trainer.state.params, {}, batch.observation)
        kept = np.asarray(batch.mask) > 0
        assert kept.sum() == data.steps.mask.sum() > 0
        kept[: 3 * first // 8] = False  # of policies before
        again, recorded = (
            trainer._distribution.log_prob(x, batch.action) for x in (dist_inputs, batch.dist_inputs)
        )
        np.testing.assert_allclose(again[kept], recorded[kept], atol=1e-5)
        trainer.train_epoch(data)


def test_the_state_is_that_of_a_first_row_after_each_episode(monkeypatch):
    trainer = joint(rows=20)
    data, _, after = acted(trainer, monkeypatch)
    h = np.stack([x["shared"]["state"] for x in after])  # [T, B, H]
    resets = data.steps.mask == 0
    assert resets.sum(0).tolist() == [5, 4, 2]
    assert not h[resets].any()
    assert h[~resets].any(-1).all()
    before = data.steps.observation.state["shared"]["state"]
    np.testing.assert_array_equal(before[1:], h[:-1])
    assert not before[0].any()


def test_an_earlier_episode_changes_nothing_later(monkeypatch):
    trainer = joint(rows=16)
    data, *_ = acted(trainer, monkeypatch)
    batch, _ = trainer._make_rows(trainer.state, data, trainer.hparams())
    model = functools.partial(trainer._model.apply, trainer.state.params, {})
    seen = batch.observation
    changed = np.array(seen.observation)
    changed[0, 0] += 1.0  # of an episode of 3 decisions and the reset row
    differs = model(seen)[0] != model(seen._replace(observation=changed))[0]
    assert differs[0].any(-1).tolist() == [True] * 4 + [False] * 4
    assert not differs[1:].any()


def test_without_the_stored_state_slices_begin_anew():
    trainer = joint(use_rollout_state=False)
    data, *_ = trainer._collect()
    batch, _ = trainer._make_rows(trainer.state, data, trainer.hparams())
    assert batch.observation.state["shared"]["state"].shape == (12, 8, 8)
    assert not np.asarray(batch.observation.state["shared"]["state"]).any()
    with_state = joint()
    data, *_ = with_state._collect()
    batch, _ = with_state._make_rows(with_state.state, data, with_state.hparams())
    states = np.asarray(batch.observation.state["shared"]["state"])[:, :1]
    # Rows 0, 8, 16, 24 of environments whose episodes take 4, 5 and 8 rows.
    assert states.any((1, 2)).reshape(4, 3).tolist() == [[False] * 3] + 3 * [[False, True, False]]


@pytest.mark.parametrize("stored", [True, False])
def test_the_replay_keeps_states_only_where_they_are_used(stored):
    trainer = joint(algorithm=AWRJoint, use_rollout_state=stored, initial=5, n_replay_epochs=3)
    trainer.run(2)
    leaves = jax.tree.leaves(trainer.task.replay.steps.policy_state)
    assert [x.shape[1:] for x in leaves] == ([(3, 8)] if stored else [])
    if stored:
        steps = trainer.task.replayed().steps
        size = trainer.task.replay.size
        h = steps.policy_state["shared"]["state"][:size]
        # Each epoch begins in the middle of an episode but for the first, which random ones came before.
        assert not h[: size - 64].any()
        assert h[size - 64 :].any((1, 2)).sum() > 60


@pytest.mark.parametrize("model", ["shared", "apart"])
def test_policy_and_value_may_each_have_a_state(model, monkeypatch):
    task = RLTask(ENVS, num_envs=3, seed=1)
    trainer = A2C(
        task,
        policy_model=functools.partial(models.Policy, body=gru()),
        value_model=functools.partial(models.Value, body=gru() if model == "shared" else lstm()),
        n_shared_layers=1 if model == "shared" else 0,
        n_interactions_per_epoch=48,
        max_slice_length=4,
        value_train_steps_per_epoch=2,
        policy_train_steps_per_epoch=1,
    )
    trainer.run(2)
    assert np.isfinite([x for x in jax.tree.leaves(trainer.state.params)][0]).all()
    leaves = jax.tree.leaves(task.actor.policy_state)
    assert sorted(x.shape for x in leaves) == ([(3, 8)] if model == "shared" else [(3, 4), (3, 4), (3, 8)])


def test_a_recurrent_policy_beside_a_value_of_single_rows():
    task = RLTask(ENVS, num_envs=3, seed=1)
    policy = functools.partial(models.Policy, body=gru())
    trainer = AWR(task, policy_model=policy, max_slice_length=4, n_interactions_per_epoch=48)
    trainer.run(1)
    assert trainer.is_recurrent


@pytest.mark.parametrize("n_shared_layers", [0, 1])
def test_a_recurrent_value_of_actions_has_the_state_that_the_rows_leave(n_shared_layers):
    task = RLTask(ENVS, num_envs=3, seed=1)
    trainer = SamplingAWR(
        task,
        policy_model=functools.partial(models.Policy, body=gru()),
        value_model=functools.partial(models.Value, body=gru()),
        n_shared_layers=n_shared_layers,
        n_interactions_per_epoch=48,
        max_slice_length=4,
        value_train_steps_per_epoch=1,
        policy_train_steps_per_epoch=1,
    )
    params, model_state = jax.tree.map(np.array, (trainer.state.params, trainer.state.model_state))
    trainer.run(1)
    steps = task.replayed().steps
    part = "shared" if n_shared_layers else "value"
    (h,) = jax.tree.leaves(steps.policy_state[part])
    own = params[part]["cell"] if n_shared_layers else params[part]["body"]["cell"]
    state = nn.GRUCell(8).apply({"params": own}, np.zeros((3, 8), np.float32), steps.observation[0])[0]
    np.testing.assert_array_equal(h[0], 0)
    np.testing.assert_allclose(h[1], state, atol=1e-6)


@pytest.mark.parametrize("body", [gru(), lstm()])
def test_on_jax_environments_too_what_was_said_is_said_again(body):
    trainer = joint(probe_jax.counting(3), 2, body=body, rows=16)
    assert trainer.compiles_epochs
    trainer.run(2)
    state, task = trainer.state, trainer.task
    act = trainer.acting.acting(state.params, state.model_state, 1.0)
    unroll = functools.partial(rollout.unroll_scan, task.env.functions, act, unroll_length=16)
    actor, data, _ = jax.jit(unroll)(task.device_actor())
    assert data.steps.mask.sum() == 24
    shapes = [x.shape for x in jax.tree.leaves((data.steps.policy_state, actor.policy_state))]
    assert shapes[0] == (16, *shapes[len(shapes) // 2])
    batch, _ = trainer._make_rows(state, trainer._see_rollout(data), trainer.hparams())
    dist_inputs, _ = trainer._model.apply(state.params, {}, batch.observation)
    kept = np.asarray(batch.mask) > 0
    assert kept.sum() == 24
    np.testing.assert_allclose(dist_inputs[kept], batch.dist_inputs[kept], atol=1e-6)
    assert trainer.evaluate(4).lengths.tolist() == [3] * 4


@pytest.mark.parametrize("stored", [True, False])
def test_the_replay_of_jax_environments_keeps_states_only_where_they_are_used(stored):
    trainer = joint(
        probe_jax.counting(3), 2, AWRJoint, rows=16, n_replay_epochs=2, use_rollout_state=stored
    )
    trainer.run(3)
    assert trainer.compiles_epochs
    kept = trainer._iteration.kept.rollout.steps
    assert [x.shape for x in jax.tree.leaves(kept.policy_state)] == [(32, 2, 8)] * stored
    assert kept.mask.sum() == 48  # three rows in four are decisions


def test_rows_that_were_kept_are_said_again_behind_those_that_are_too_old():
    env = functools.partial(probe_jax.counting, 9)
    trainer = joint(env(), 2, AWRJoint, rows=16, n_replay_epochs=2, initial=12, lr_schedule=0.0)
    trainer.run(4)
    kept = jax.tree.map(np.array, trainer._iteration.kept.rollout)
    n_old = len(kept.steps.mask) - 32
    assert n_old > 40 and not kept.steps.mask[:n_old].any()
    rows = jax.jit(iteration.oldest_first)(kept)
    # Episodes have nine decisions and a reset row; 59 random rows came before, the last of the sixth episode.
    t = np.arange(59 + 32, 59 + 65) % 10
    np.testing.assert_array_equal(rows.steps.mask[:32, 0], t[:32] < 9)
    np.testing.assert_array_equal(rows.steps.observation[:33, 0, 2], t)
    assert not rows.steps.mask[32:].any()
    seen = trainer._see_rollout(jax.tree.map(np.array, rows))
    said = trainer.acting.dist_inputs(trainer.state.params, {}, seen.steps.observation)
    decided = kept.steps.mask[n_old:] > 0
    np.testing.assert_allclose(said[:32][decided], kept.steps.dist_inputs[n_old:][decided], atol=1e-6)


def test_slices_of_single_rows_are_refused():
    with pytest.raises(ValueError, match=r"max_slice_length=1: .* nearest valid value: 2"):
        joint(max_slice_length=1)
    with pytest.raises(ValueError, match="draws single steps"):
        DQN(RLTask(ENVS, num_envs=3), value_body=gru())


def test_policy_remembers_the_trajectory(monkeypatch):
    trainer = joint([ENVS[2]], 1, rows=8)
    data, said, _ = acted(trainer, monkeypatch)
    trajectory = Trajectory(data.steps.observation.observation[0, 0])
    for t in range(5):
        np.testing.assert_allclose(trainer.policy(trajectory, temperature=0.0)[1], said[t, 0], atol=1e-6)
        trajectory.extend(data.steps.observation.observation[t + 1, 0], action=np.int64(0))


def test_evaluation_changes_nothing_and_resets_between_episodes():
    trainer = joint()
    before = jax.tree.map(np.array, trainer.task.actor)
    one = trainer.evaluate(3)
    assert one.lengths.tolist() == trainer.evaluate(3).lengths.tolist()
    jax.tree.map(np.testing.assert_array_equal, before, jax.tree.map(np.array, trainer.task.actor))
