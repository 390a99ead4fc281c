"""The epoch loop: exact continuation, evaluation, counts, hooks, hyperparameters, streams, errors."""

import functools
import json
import math
import shutil

import flax.linen as nn
import gymnasium
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gymnasium import spaces

from rl_trainers import task as task_lib
from rl_trainers.envs import probe
from rl_trainers.envs.probe import ActionReward, Counting, Endless
from rl_trainers.joint import A2CJoint, AWRJoint, PPOJoint
from rl_trainers.models import MLP, Normalize, Policy, PolicyAndValue
from rl_trainers.policy_trainer import PolicyGradient
from rl_trainers.task import RLTask, Trajectory
from rl_trainers.trainer import to_rows
from rl_trainers.types import Batch

BODY = functools.partial(MLP, layer_widths=(8,))
SMALL = functools.partial(PolicyAndValue, body=BODY)
NORMALIZED = functools.partial(PolicyAndValue, body=BODY, normalizer=Normalize)
TINY = {"joint_model": SMALL, "n_interactions_per_epoch": 32, "batch_size": 16, "train_steps_per_epoch": 4}
TIMES = ("wall_s", "steps_per_s", "collect_s", "train_s", "compilations", "compile_s")


def cartpole(seed=0, **kwargs):
    return RLTask("CartPole-v1", num_envs=4, seed=seed, **kwargs)


def ppo(task=None, **kwargs):
    return PPOJoint(cartpole() if task is None else task, **{**TINY, **kwargs})


def copied(tree):
    """Host copies, which outlive the buffers that the next epoch consumes."""
    return jax.tree.map(lambda x: np.array(x), tree)


def assert_equal(x, y):
    assert jax.tree.structure(x) == jax.tree.structure(y)
    for a, b in zip(jax.tree.leaves(x), jax.tree.leaves(y), strict=True):
        np.testing.assert_array_equal(a, b)


def differ(x, y):
    pairs = zip(jax.tree.leaves(x), jax.tree.leaves(y), strict=True)
    return any(not np.array_equal(a, b) for a, b in pairs)


def timeless(record, *more):
    return {k: v for k, v in record.items() if k not in (*TIMES, *more)}


def jsonl(directory):
    return [timeless(json.loads(line)) for line in (directory / "metrics.jsonl").read_text().splitlines()]


def cache_sizes(trainer):
    return [f._cache_size() for f in (trainer.acting.decide, trainer._learn, trainer.acting.dist_inputs)]


class Ran:
    """A trainer after three epochs, alone in the process, and what was seen on the way."""

    def __init__(self, directory):
        np.random.seed(5)
        before = np.random.get_state()
        self.records = []
        self.directory = directory
        self.trainer = ppo(on_epoch=self.records.append, output_dir=str(directory))
        self.trainer.run(2)
        self.sizes = cache_sizes(self.trainer)
        self.trainer.run(1)
        self.sizes_after = cache_sizes(self.trainer)
        self.state = copied(self.trainer.state)
        self.task_state = copied(self.trainer.task.state_dict())
        after = np.random.get_state()
        self.global_rng_untouched = before[2] == after[2] and np.array_equal(before[1], after[1])


@pytest.fixture(scope="module")
def ran(tmp_path_factory):
    return Ran(tmp_path_factory.mktemp("ran"))


# The loop.


def test_records_tell_epochs_and_steps(ran):
    assert [r["epoch"] for r in ran.records] == [1, 2, 3]
    assert ran.records[-1]["env_steps"] == ran.trainer.task.n_interactions()
    # 32 rows an epoch, of which a few are reset rows.
    steps = np.diff([0, *(r["env_steps"] for r in ran.records)])
    assert all(24 <= n <= 32 for n in steps)
    written = [{k: math.nan if v is None else v for k, v in x.items()} for x in jsonl(ran.directory)]
    np.testing.assert_equal(written, [timeless(r) for r in ran.records])
    assert int(ran.state.step) == 3 * 4
    assert ran.trainer.current_epoch == 3
    assert len(ran.trainer.avg_returns) == 3


def test_nothing_compiles_after_the_second_epoch(ran):
    assert ran.sizes == ran.sizes_after
    assert ran.sizes[1] == 1


def test_global_randomness_is_left_alone(ran):
    assert ran.global_rng_untouched


def test_evaluation_and_another_trainer_change_nothing(ran):
    records, evals = [], []
    evaluated = ppo(n_eval_episodes=2, on_epoch=records.append, on_eval=evals.append)
    other = ppo(task=cartpole(seed=1), seed=1)
    np.random.seed(77)
    for _ in range(3):
        evaluated.run(1)
        evaluated.policy(np.zeros(4, np.float32))
        other.run(1)
        np.random.random(3)
    assert_equal(copied(evaluated.state), ran.state)
    counts = evaluated.task.state_dict()["counts"]
    assert counts[3] > 0  # decisions of evaluations
    for name, value in evaluated.task.state_dict().items():
        if name != "counts":
            np.testing.assert_array_equal(value, ran.task_state[name], err_msg=name)
    np.testing.assert_array_equal(counts[:3], ran.task_state["counts"][:3])
    key = "avg_return_temperature0.00_steps0"
    for got, expected in zip(records, ran.records, strict=True):
        np.testing.assert_equal(timeless(got, key, "eval_return"), timeless(expected))
    # Another seed makes another run.
    assert differ(copied(other.state.params), ran.state.params)
    assert other.avg_returns != ran.trainer.avg_returns
    # What the hook got is what is kept.
    assert [set(e) for e in evals] == [{"epoch", "eval_return", key}] * 3
    assert evaluated.eval_returns == {key: [e[key] for e in evals]}
    assert all(e["eval_return"] >= 1 for e in evals)
    assert [r["eval_return"] for r in records] == [e["eval_return"] for e in evals]
    evaluated.close()
    other.close()


def test_total_epochs():
    trainer = ppo(train_steps_per_epoch=1)
    trainer.run(2)
    trainer.run(3, n_epochs_is_total_epochs=True)
    assert trainer.current_epoch == 3
    for total in (3, 2, 0):
        trainer.run(total, n_epochs_is_total_epochs=True)
        assert trainer.current_epoch == 3
    trainer.on_epoch = lambda record: trainer.stop()
    trainer.run(5)
    assert trainer.current_epoch == 4


class Tally(Counting):
    """Counts the calls of its instances' step."""

    calls = 0

    def step(self, action):
        Tally.calls += 1
        return super().step(action)


@pytest.fixture(scope="module")
def tallied():
    Tally.calls = 0
    records = []
    task = RLTask(functools.partial(Tally, 5), num_envs=2)
    trainer = ppo(task, on_epoch=records.append)
    trainer.run(3)
    return trainer, records


def test_env_steps_are_calls_of_step(tallied):
    trainer, records = tallied
    # 48 vector rows of episodes of 5 and a reset row: 48 - 8 reset rows = 40 decisions each (48 = 8 * 6).
    assert trainer.task.n_interactions() == 2 * 40 == Tally.calls == records[-1]["env_steps"]


def test_returns_are_of_finished_episodes(tallied):
    trainer, records = tallied
    # Rewards 1 .. 5 make 15; rows 4, 10 | 16, 22, 28 | 34, 40, 46 end episodes, in each environment.
    assert trainer.avg_returns == [15.0, 15.0, 15.0]
    assert [r["n_trajectories"] for r in records] == [4, 6, 6]
    assert [r["avg_length"] for r in records] == [5, 5, 5]
    assert records[-1]["recent_return"] == 15.0


def test_no_finished_episode_means_nan_and_eval_has_a_number_for_each_setting(tmp_path):
    trainer = ppo(
        RLTask(Endless, num_envs=2),
        n_eval_episodes=3,
        eval_steps=[4, 9],
        eval_temperatures=[0.0, 0.5],
        output_dir=str(tmp_path),
    )
    trainer.run(2)
    assert all(math.isnan(r) for r in trainer.avg_returns)
    assert trainer.eval_returns == {
        "avg_return_temperature0.00_steps4": [4.0, 4.0],
        "avg_return_temperature0.50_steps4": [4.0, 4.0],
        "avg_return_temperature0.00_steps9": [9.0, 9.0],
        "avg_return_temperature0.50_steps9": [9.0, 9.0],
    }
    assert [line["avg_return"] for line in jsonl(tmp_path)] == [None, None]
    # 3 episodes in each of 2 epochs and at 2 temperatures.
    assert trainer.task.n_eval_interactions >= 2 * 2 * 3 * (4 + 9)


# The policy.


def test_policy_answers_trajectories_and_observations(ran):
    trainer = ran.trainer
    observation = np.array([0.01, 0.02, -0.03, 0.04], np.float32)
    for asked in (observation, Trajectory(observation)):
        action, dist_inputs = trainer.policy(asked)
        assert trainer.task.action_space.contains(np.int64(action))
        assert np.shape(action) == () and dist_inputs.shape == (2,)
    greedy = {int(trainer.policy(observation, temperature=0.0)[0]) for _ in range(10)}
    assert greedy == {int(np.argmax(trainer.policy(observation)[1]))}
    sampled = {int(trainer.policy(observation)[0]) for _ in range(40)}
    assert sampled == {0, 1}
    model = trainer.state.params, trainer.state.model_state
    batch = trainer.acting.dist_inputs(*model, observation[None, None])
    np.testing.assert_allclose(dist_inputs, batch[0, 0], rtol=1e-6)


# Continuing.


def check_resume(make, tmp_path, n_epochs=5):
    """``n_epochs`` twice in one process, against another trainer that takes over half-way."""
    whole, half = tmp_path / "whole", tmp_path / "half"
    first = make(str(whole))
    first.run(n_epochs)
    shutil.copytree(whole, half)
    first.run(n_epochs)
    second = make(str(half))
    assert second.current_epoch == n_epochs
    second.run(n_epochs)
    assert_equal(copied(second.state), copied(first.state))
    states = first.task.state_dict(), second.task.state_dict()
    assert states[0].keys() == states[1].keys()
    for name in states[0]:
        np.testing.assert_array_equal(states[0][name], states[1][name], err_msg=name)
    assert_equal(first.task.actor, second.task.actor)
    np.testing.assert_array_equal(first.avg_returns, second.avg_returns)
    assert first.eval_returns == second.eval_returns
    assert jsonl(whole) == jsonl(half)
    assert [line["epoch"] for line in jsonl(half)] == list(range(1, 2 * n_epochs + 1))
    return first


def test_ppo_resumes_exactly(tmp_path):
    def make(directory):
        return ppo(joint_model=NORMALIZED, n_eval_episodes=1, output_dir=directory)

    trainer = check_resume(make, tmp_path)
    count = trainer.state.model_state["model_state"]["shared"]["normalize"]["count"]
    assert float(count) == trainer.task.n_interactions()
    # A new run in a directory of its own starts from the beginning.
    assert make(str(tmp_path / "new")).current_epoch == 0


@pytest.mark.slow
def test_ppo_in_one_go_is_the_same(tmp_path):
    runs = []
    for parts in ([10], [5, 5], [3, 1, 6]):
        trainer = ppo(output_dir=str(tmp_path / str(len(parts))))
        for n_epochs in parts:
            trainer.run(n_epochs)
        runs.append(copied(trainer.state))
    assert_equal(runs[0], runs[1])
    assert_equal(runs[0], runs[2])


@pytest.mark.slow
def test_a2c_on_pendulum_resumes_exactly(tmp_path):
    def make(directory):
        task = RLTask("Pendulum-v1", num_envs=2)
        return A2CJoint(task, **{**TINY, "train_steps_per_epoch": 2}, output_dir=directory)

    check_resume(make, tmp_path)


def test_awr_resumes_exactly(tmp_path):
    def make(directory):
        task = RLTask("CartPole-v0", initial_trajectories=5, num_envs=2)
        return AWRJoint(task, n_replay_epochs=3, **TINY, output_dir=directory)

    trainer = check_resume(make, tmp_path)
    assert sorted(trainer.task.trajectories) == [8, 9, 10]


@pytest.mark.slow
def test_policy_gradient_resumes_exactly(tmp_path):
    def make(directory):
        return PolicyGradient(
            cartpole(),
            functools.partial(Policy, body=BODY),
            n_trajectories_per_epoch=5,
            output_dir=directory,
        )

    check_resume(make, tmp_path)


def test_another_network_is_refused_by_name(ran):
    bigger = functools.partial(PolicyAndValue, body=functools.partial(MLP, layer_widths=(9,)))
    with pytest.raises(ValueError, match=r"params/shared/dense_0.*\[4, 8\].*expected.*\[4, 9\]"):
        ppo(joint_model=bigger, output_dir=str(ran.directory))


def test_a_state_can_be_taken_back_in_the_same_process():
    trainer = ppo()
    trainer.run(1)
    saved = trainer.state_dict()
    trainer.run(1)
    after = copied(trainer.state)
    trainer.load_state_dict(saved)
    assert trainer.current_epoch == 1
    trainer.run(1)
    assert_equal(copied(trainer.state), after)


class Broken(Counting):
    """Its 45th step ever pays NaN."""

    def __init__(self):
        super().__init__(5)
        self.steps = 0

    def pay(self, action):
        self.steps += 1
        return math.nan if self.steps == 45 else 1.0


def test_nan_stops_the_run_and_spoils_nothing(tmp_path):
    def make():
        return ppo(RLTask(Broken, num_envs=2), output_dir=str(tmp_path))

    trainer = make()
    trainer.run(2)  # 2 * 16 vector rows
    good = copied(trainer.state)
    with pytest.raises(FloatingPointError, match="reward"):
        trainer.run(5)
    done = trainer.current_epoch
    assert done == 3  # 16 rows more; the 45th decision of a sub-environment is row 53
    assert_equal(
        jax.tree.map(np.isfinite, copied(trainer.state.params)),
        jax.tree.map(lambda x: np.ones(np.shape(x), bool), good.params),
    )
    failed = copied(trainer.state)
    again = make()
    assert again.current_epoch == 2
    assert_equal(copied(again.state), good)
    # Epoch 3 is the same as before, and nothing of the failed epoch 4 was trained on.
    again.run(1)
    assert_equal(copied(again.state), failed)


# Hyperparameters.


def test_hyperparameters_are_arguments_of_the_compiled_step():
    records = []
    trainer = ppo(on_epoch=records.append)
    trainer.run(1)
    sizes = cache_sizes(trainer)
    trainer.entropy_coeff, trainer.epsilon, trainer.value_loss_coeff = 0.5, 1e-7, 0.0
    trainer._trainer.clip_grad_norm = 1e-3
    trainer.run(2)
    assert cache_sizes(trainer) == sizes
    first, last = records[0], records[-1]
    assert first["entropy_loss"] == pytest.approx(0.01 * first["entropy"], rel=1e-4)
    assert last["entropy_loss"] == pytest.approx(0.5 * last["entropy"], rel=1e-4)
    assert first["clip_fraction"] == 0.0 < last["clip_fraction"]
    assert first["clipped_grad_norm"] > 1e-2 > 1.001e-3 > last["clipped_grad_norm"]
    expected = -last["ppo_objective_mean"] - last["entropy_loss"]
    assert last["joint_loss"] == pytest.approx(expected, abs=1e-5)


def test_the_learning_rate_follows_the_optimizer_steps():
    trainer = ppo(lr_schedule=lambda step: 1.0 / step, train_steps_per_epoch=2)
    np.testing.assert_allclose(trainer.hparams()["joint"]["learning_rate"], [1, 1 / 2])
    trainer.run(1)
    np.testing.assert_allclose(trainer.hparams()["joint"]["learning_rate"], [1 / 3, 1 / 4])


# What models see.


def double(steps):
    return steps._replace(observation=np.concatenate([steps.observation, 2 * steps.observation], -1))


def test_timestep_to_np_is_used_to_collect_train_and_evaluate():
    trainer = ppo(cartpole(timestep_to_np=double), n_eval_episodes=1)
    trainer.run(1)
    assert trainer.state.params["shared"]["dense_0"]["kernel"].shape == (8, 8)
    assert trainer.policy(np.zeros(4, np.float32))[1].shape == (2,)
    batch = next(trainer.batches_stream())
    np.testing.assert_array_equal(batch.observation[..., 4:], 2 * batch.observation[..., :4])
    # The replay keeps what the environment gave.
    assert trainer.task.replay.steps.observation.shape[-1] == 4


class Frames(ActionReward):
    """Observations uint8 [4, 4, 1]."""

    observation_space = spaces.Box(0, 255, (4, 4, 1), np.uint8)

    def look(self):
        return np.full((4, 4, 1), 51, np.uint8)


def crop(steps):
    return steps._replace(observation=steps.observation[..., :2, :2, :])


def test_timestep_to_np_may_give_images():
    trainer = ppo(RLTask(Frames, num_envs=2, timestep_to_np=crop))
    assert trainer.observation_space.shape == (2, 2, 1)
    assert trainer.observation_space.dtype == np.uint8
    assert trainer.state.params["shared"]["dense_0"]["kernel"].shape == (4, 8)


class Named(ActionReward):
    """Observations in a dict."""

    observation_space = spaces.Dict(x=ActionReward.observation_space, y=ActionReward.observation_space)

    def look(self):
        return {"x": super().look(), "y": super().look()}


def only_x(steps):
    return steps._replace(observation={"x": steps.observation["x"]})


def test_timestep_to_np_may_give_a_dict():
    trainer = ppo(RLTask(Named, num_envs=2, timestep_to_np=only_x))
    assert trainer.state.params["shared"]["dense_0"]["kernel"].shape == (1, 8)


def thousandfold(steps):
    return steps._replace(reward=1000 * steps.reward)


def test_timestep_to_np_may_change_rewards():
    # Returns to go of 1 .. 5, times 1000, are between 5,000 and 15,000; values start near 0.
    records = []
    task = RLTask(functools.partial(Counting, 5), num_envs=2, timestep_to_np=thousandfold)
    ppo(task, on_epoch=records.append).run(1)
    assert records[0]["value_loss"] > 1e6
    assert records[0]["avg_return"] == 15.0


class Own(nn.Module):
    """A network with names of its own."""

    n_inputs: int

    @nn.compact
    def __call__(self, x):
        hidden = nn.tanh(nn.Dense(8)(x))
        return nn.Dense(self.n_inputs)(hidden), nn.Dense(1)(hidden)[..., 0]


def test_all_parameters_of_an_own_network_are_trained():
    trainer = ppo(
        RLTask(functools.partial(Counting, 5), num_envs=2),
        joint_model=lambda policy_distribution: Own(policy_distribution.n_inputs),
    )
    before = copied(trainer.state.params)
    trainer.run(1)
    for x, y in zip(jax.tree.leaves(before), jax.tree.leaves(trainer.state.params), strict=True):
        assert not np.array_equal(x, y)


# Where the data come from.


def test_only_eval_steps_no_training_environment():
    task = RLTask(functools.partial(Counting, 5), initial_trajectories=4, num_envs=2)
    stored = task.replay.size
    actor = copied(task.actor)
    trainer = AWRJoint(task, only_eval=True, **TINY)
    before = copied(trainer.state.params)
    trainer.run(2)
    assert task.n_interactions() == 0
    assert task.n_initial_interactions == 20
    assert task.n_eval_interactions > 0
    assert task.replay.size == stored
    assert_equal(copied(task.actor), actor)
    assert trainer.avg_returns == [15.0, 15.0]
    assert differ(before, copied(trainer.state.params))


def test_normaliser_statistics_take_in_each_row_once():
    task = RLTask(functools.partial(Counting, 1000), num_envs=2)
    trainer = AWRJoint(task, n_replay_epochs=3, **{**TINY, "joint_model": NORMALIZED})
    trainer.run(3)
    normalize = trainer.state.model_state["model_state"]["shared"]["normalize"]
    # t = 0 .. 47 in both environments.
    assert float(normalize["count"]) == 96
    np.testing.assert_allclose(normalize["mean"][2], np.arange(48).mean(), rtol=1e-5)
    np.testing.assert_allclose(normalize["variance"][2], np.arange(48).var(), rtol=1e-4)


def test_batches_stream_passes_over_all_rows(tallied):
    trainer, _ = tallied
    stream = trainer.batches_stream()
    batches = [next(stream) for _ in range(4)]
    for batch in batches:
        assert batch.observation.shape == (16, 1, 3)
        assert batch.action.shape == batch.advantage.shape == batch.mask.shape == (16, 1)
        assert batch.dist_inputs.shape == (16, 1, 2)
    # Rows 32 .. 47: 41 and 35 are reset rows, so 2 * 13 or 14 decisions remain.
    stored = trainer.task.replayed().steps
    decisions = int(stored.mask.sum())
    assert decisions < 32
    masks = np.stack([b.mask[:, 0] for b in batches])
    assert masks[:2].sum() == masks[2:].sum() == decisions
    # Each pass has each decision once; [environment's episode, step] tells them apart, by environment twice.
    wanted = sorted(map(tuple, stored.observation[stored.mask > 0].tolist()))
    for part in (batches[:2], batches[2:]):
        got = np.concatenate([b.observation[b.mask > 0] for b in part])
        assert sorted(map(tuple, got.tolist())) == wanted


class Streamed(PPOJoint):
    """Trains on batches of its own: advantage 0, value target 100."""

    drawn = 0

    def batches_stream(self):
        for batch in super().batches_stream():
            self.drawn += 1
            yield batch._replace(advantage=0 * batch.advantage, value_target=0 * batch.mask + 100.0)


@pytest.fixture(scope="module")
def streamed():
    records = []
    task = RLTask(functools.partial(Counting, 1000), num_envs=2)
    trainer = Streamed(task, on_epoch=records.append, **{**TINY, "joint_model": NORMALIZED})
    keys = [np.array(trainer.state.key)]
    for _ in range(2):
        trainer.run(1)
        keys.append(np.array(trainer.state.key))
    return trainer, records, keys


def test_an_overridden_stream_is_what_is_trained_on(streamed):
    trainer, records, _ = streamed
    assert trainer.drawn == 2 * 4
    assert records[0]["advantage_mean"] == 0.0
    # Values start near 0, so the mean squared error to 100 is near 10,000.
    assert records[0]["value_loss"] == pytest.approx(1e4, rel=0.2)
    assert int(trainer.state.step) == 8


def test_an_overridden_stream_still_gathers_statistics(streamed):
    trainer, _, _ = streamed
    normalize = trainer.state.model_state["model_state"]["shared"]["normalize"]
    assert float(normalize["count"]) == trainer.task.n_interactions() == 64


def test_an_overridden_stream_is_shuffled_anew_in_each_epoch(streamed):
    _, _, keys = streamed
    assert not np.array_equal(keys[1], keys[2])


def test_to_rows_by_hand():
    # T = 3, B = 2, L = 2: time 0-1 of both environments, then time 2 and a masked row.
    numbers = np.float32([[1, 10], [2, 20], [3, 30]])
    observation = np.stack([numbers, -numbers], -1)
    batch = Batch(observation, numbers, numbers, numbers, numbers, np.ones((3, 2), np.float32))
    got = to_rows(batch, 2)
    np.testing.assert_array_equal(got.advantage, [[1, 2], [10, 20], [3, 0], [30, 0]])
    np.testing.assert_array_equal(got.mask, [[1, 1], [1, 1], [1, 0], [1, 0]])
    np.testing.assert_array_equal(got.observation[1], [[10, -10], [20, -20]])
    np.testing.assert_array_equal(to_rows(batch, 1).advantage[:, 0], [1, 10, 2, 20, 3, 30])


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["name", "object", "factory"])
def test_evaluation_changes_nothing_however_the_environment_is_given(kind):
    runs = []
    for n_eval_episodes in (0, 2):
        given = {
            "name": "CartPole-v1",
            "object": gymnasium.make("CartPole-v1"),
            "factory": lambda: gymnasium.make("CartPole-v1"),
        }[kind]
        trainer = ppo(RLTask(given), n_eval_episodes=n_eval_episodes)
        trainer.run(3)
        runs.append((copied(trainer.state), copied(trainer.task.replay), trainer.avg_returns))
    assert trainer.task.eval_env is not trainer.task.env
    assert_equal(runs[0][0], runs[1][0])
    assert_equal(runs[0][1], runs[1][1])
    np.testing.assert_array_equal(runs[0][2], runs[1][2])


def test_trajectories_per_epoch_by_their_old_name():
    task = RLTask(functools.partial(Counting, 5))
    trainer = PPOJoint(task, joint_model=SMALL, train_steps_per_epoch=1, collect_per_epoch=3)
    trainer.run(1)
    assert trainer.n_trajectories_per_epoch == 3
    assert task.n_interactions() == 15
    assert task.n_trajectories() == 3


# Errors, all before anything runs.


@pytest.mark.parametrize(
    "arguments, message",
    [
        (
            {"n_trajectories_per_epoch": 3, "n_interactions_per_epoch": 64},
            "n_trajectories_per_epoch=3 and n_interactions_per_epoch=64 exclude one another",
        ),
        ({"n_trajectories_per_epoch": 3, "collect_per_epoch": 3}, "collect_per_epoch is the old name"),
        (
            {"n_interactions_per_epoch": 30},
            r"=30 must be a positive multiple of num_envs=4.*value: (28|32)\n",
        ),
        ({"n_interactions_per_epoch": 1}, r"=1 must be a positive multiple of num_envs=4.*value: 4\n"),
        ({"n_interactions_per_epoch": 0}, r"=0 must be a positive multiple of num_envs=4.*value: 4\n"),
        ({"n_replay_epochs": 2}, "n_replay_epochs=2: PPOJoint is on-policy.*nearest valid value: 1"),
        ({"max_slice_length": 0}, "max_slice_length=0 must be at least 1"),
        ({"batch_size": 0}, "batch_size=0"),
        ({"train_steps_per_epoch": 0}, "steps per epoch=0"),
    ],
)
def test_contradictions_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        PPOJoint(cartpole(), joint_model=SMALL, **arguments)


def test_the_default_count_is_a_multiple_of_the_environments():
    trainer = PPOJoint(RLTask(ActionReward, num_envs=3), joint_model=SMALL)
    assert trainer.n_interactions_per_epoch == 2049


def test_arguments_that_do_not_exist_name_the_nearest():
    with pytest.raises(TypeError, match="PPOJoint has no argument 'batchsize'; nearest: 'batch_size'"):
        PPOJoint(RLTask("CartPole-v1"), batchsize=3)


def test_a_task_is_asked_for():
    with pytest.raises(TypeError, match="must be an RLTask, such as RLTask\\('CartPole-v1'\\)"):
        PPOJoint("CartPole-v1")


@pytest.mark.parametrize("n_epochs", [-1, 1.5])
def test_epochs_are_counted_in_whole_numbers(n_epochs):
    trainer = PPOJoint(RLTask("CartPole-v1"), n_interactions_per_epoch=8)
    with pytest.raises(ValueError, match=f"n_epochs={n_epochs} must be a whole number"):
        trainer.run(n_epochs)


def test_policy_takes_lists_and_names_wrong_shapes():
    trainer = PPOJoint(RLTask("CartPole-v1"), n_interactions_per_epoch=8)
    assert trainer.policy([0.0, 0.0, 0.0, 0.0])[0] in (0, 1)
    with pytest.raises(ValueError, match=r"has the shape \(3,\), expected \(4,\)"):
        trainer.policy(np.zeros(3))


def test_an_evaluation_that_nothing_ends_is_stopped(monkeypatch, caplog):
    monkeypatch.setattr(task_lib, "_MOST_EVAL_STEPS", 50)
    trainer = PPOJoint(RLTask(probe.Endless), n_interactions_per_epoch=8)
    assert trainer.evaluate(2).lengths.tolist() == [50, 50]
    assert "an episode was stopped after 50 steps" in caplog.text


def test_an_overridden_stream_compiles_nothing_after_the_first_epoch():
    class Own(PPOJoint):
        def batches_stream(self):
            yield from super().batches_stream()

    trainer = Own(RLTask("CartPole-v1"), n_interactions_per_epoch=16, batch_size=8, train_steps_per_epoch=2)
    compiled = [trainer._run_epoch()["compilations"] for _ in range(4)]
    assert compiled[1:] == [compiled[1]] * 3


def test_an_overridden_stream_compiles_nothing_while_the_replay_fills_up():
    class Own(AWRJoint):
        def batches_stream(self):
            yield from super().batches_stream()

    trainer = Own(RLTask("CartPole-v1"), n_interactions_per_epoch=16, batch_size=8, train_steps_per_epoch=2)
    compiled = [trainer._run_epoch()["compilations"] for _ in range(5)]
    assert compiled[2:] == [compiled[2]] * 3


def test_evaluation_settings_are_sequences():
    with pytest.raises(TypeError, match=r"eval_temperatures=0.0 must be a sequence; nearest .*: \[0.0\]"):
        PPOJoint(RLTask("CartPole-v1"), eval_temperatures=0.0)


def rows_for_training():
    task = RLTask("CartPole-v1", num_envs=2, seed=1)
    trainer = PPOJoint(task, **{**TINY, "lr_schedule": lambda step: jnp.where(step < 4, 0.1, 0.0)})
    data, _ = task.collect(trainer.actor(), unroll_length=8)
    return trainer, data


def test_training_on_given_rows_follows_the_schedule():
    trainer, data = rows_for_training()
    before = []
    for _ in range(3):
        before.append(jax.tree.map(np.array, trainer.state.params))
        trainer.train_on(data, n_passes=2)
    changed = [
        any((x != y).any() for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True))
        for a, b in zip(before, [*before[1:], trainer.state.params], strict=True)
    ]
    assert int(trainer.state.step) == 6
    assert changed == [True, True, False]


def test_training_on_given_rows_heeds_changed_numbers():
    trainer, data = rows_for_training()
    first = trainer.train_on(data)
    trainer.entropy_coeff = 100.0
    second = trainer.train_on(data)
    assert second["entropy_loss"] == pytest.approx(100.0 * second["entropy"])
    assert first["entropy_loss"] == pytest.approx(0.01 * first["entropy"])
