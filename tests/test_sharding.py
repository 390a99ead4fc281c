"""Several devices against one, in a process of its own: how many there are is settled when JAX starts."""

import functools
import json
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile

import jax
import numpy as np
import pytest

from rl_trainers import AWR, DQN, PPO, PPOJoint, RLTask, metrics, models
from rl_trainers.envs import probe, probe_jax

ROOT = pathlib.Path(__file__).parents[1]
CASES = {
    "PPOJoint": (
        PPOJoint,
        {
            "batch_size": 32,
            "train_steps_per_epoch": 8,
            "joint_model": functools.partial(models.PolicyAndValue, normalizer=models.Normalize),
        },
    ),
    "PPO": (PPO, {"value_train_steps_per_epoch": 4, "policy_train_steps_per_epoch": 4}),
    "AWR": (
        AWR,
        {
            "value_train_steps_per_epoch": 4,
            "policy_train_steps_per_epoch": 4,
            "policy_batch_size": 32,
            "n_replay_epochs": 2,
        },
    ),
}


def make(cls=PPOJoint, n_devices=None, num_envs=16, env=None, **options):
    env = probe_jax.action_and_observation_reward() if env is None else env
    task = RLTask(env, num_envs=num_envs, gamma=0.9, seed=3)
    options = {"n_interactions_per_epoch": 8 * num_envs, **options}
    return cls(task, seed=1, n_devices=n_devices, **options)


def difference(one, other):
    pairs = zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True)
    return max([float(np.max(np.abs(np.asarray(a, float) - np.asarray(b, float)))) for a, b in pairs])


def differences(one, other):
    """Largest ones of what learning, the statistics, the environments and the returns came to."""
    found = {
        name: difference(getattr(one.state, name), getattr(other.state, name))
        for name in ("params", "model_state", "key")
        if jax.tree.leaves(getattr(one.state, name))
    }
    found["observation"] = difference(one.task.actor.observation, other.task.actor.observation)
    return {**found, "avg_returns": difference(one.avg_returns, other.avg_returns)}


def parts(tree):
    """Numbers of parts that the arrays are cut into, and of the devices that hold them."""
    arrays = jax.tree.leaves(tree)
    return sorted({(x.size // x.addressable_shards[0].data.size, len(x.sharding.device_set)) for x in arrays})


def placed(trainer):
    actor = trainer.task.device_actor()
    result = {
        "state": parts(trainer.state),
        "envs": parts((actor.observation, actor.env_state.state)),
        "keys": parts((actor.key, actor.env_state.key)),
    }
    if not trainer.on_policy:
        kept = trainer._iteration.kept.rollout
        result["kept"] = parts((kept.steps, kept.last_observation))
    return result


def compare(cls, options, directory):
    """Runs three epochs on one device and on all, and one more on the other's checkpoint of two."""
    pair = [make(cls, n, **options, output_dir=f"{directory}/{n}") for n in (1, None)]
    for trainer in pair:
        trainer.run(2)
        shutil.copytree(trainer.output_dir, f"{trainer.output_dir}-2")
    compiled = metrics.compilations().programs
    for trainer in pair:
        trainer.run(1)
    one, all_ = pair
    compiled = metrics.compilations().programs - compiled
    result = {
        "n_devices": [one.n_devices, all_.n_devices],
        "differences": differences(one, all_),
        "compiled": compiled,
        "placed": placed(all_),
        "avg_returns": one.avg_returns,
    }
    if cls is AWR:
        fresh = make(cls, None, **options, output_dir=f"{directory}/1-2")
        fresh.run(1)
        result["all go on from one"] = differences(one, fresh)
        result["placed again"] = placed(fresh)
        one.restore(f"{directory}/None-2")
        one.run(1)
        result["one goes on from all"] = differences(all_, one)
    return result


def refusal(**arguments):
    with pytest.raises(ValueError) as caught:
        make(**arguments)
    return str(caught.value)


def main():
    """All that takes several devices; prints what came out."""
    result = {"n": len(jax.devices())}
    for name, (cls, options) in CASES.items():
        with tempfile.TemporaryDirectory() as directory:
            result[name] = compare(cls, options, directory)
    result["refusals"] = {
        "too many": refusal(n_devices=9),
        "envs": refusal(num_envs=21),
        "envs of two": refusal(num_envs=5, n_devices=2),
        "batch": refusal(cls=PPO, policy_batch_size=30),
        "python": refusal(env=probe.ActionReward, n_devices=2),
        "off-policy": refusal(cls=DQN, n_devices=2),
        "trajectories": refusal(n_interactions_per_epoch=None, n_trajectories_per_epoch=3, n_devices=2),
    }
    single = {
        "python": make(env=probe.ActionReward, num_envs=2),
        "off-policy": make(cls=DQN, num_envs=2),
        "trajectories": make(n_interactions_per_epoch=None, n_trajectories_per_epoch=3, num_envs=2),
        "asked for": make(n_devices=1, num_envs=5, batch_size=3),
    }
    result["single"] = {name: trainer.n_devices for name, trainer in single.items()}
    print(json.dumps(result))


@pytest.fixture(scope="module")
def seen():
    flags = "--xla_force_host_platform_device_count=8"
    env = {**os.environ, "XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, __file__], capture_output=True, text=True, cwd=ROOT, env=env)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("case", CASES)
def test_eight_devices_come_to_what_one_does(case, seen):
    assert seen["n"] == 8 and seen[case]["n_devices"] == [1, 8]
    assert max(seen[case]["differences"].values()) < 1e-5, seen[case]["differences"]
    assert len(set(seen[case]["avg_returns"])) > 1


def test_normaliser_statistics_are_those_of_all_devices(seen):
    assert seen["PPOJoint"]["differences"]["model_state"] < 1e-5


@pytest.mark.parametrize("case", CASES)
def test_environments_are_shared_and_parameters_are_everywhere(case, seen):
    placed = seen[case]["placed"]
    assert (placed["envs"], placed["keys"], placed["state"]) == ([[8, 8]], [[1, 8]], [[1, 8]])
    assert placed.get("kept", [[8, 8]]) == [[8, 8]]


@pytest.mark.parametrize("case", CASES)
def test_nothing_compiles_after_the_second_epoch(case, seen):
    assert seen[case]["compiled"] == 0


def test_runs_go_on_with_other_numbers_of_devices(seen):
    result = seen["AWR"]
    assert max(result["one goes on from all"].values()) < 1e-5
    assert max(result["all go on from one"].values()) < 1e-5
    assert result["placed again"] == result["placed"]


def test_counts_that_do_not_divide_are_refused(seen):
    refusals = seen["refusals"]
    assert "n_devices=9: this process has 8; nearest valid value: 8" in refusals["too many"]
    assert "num_envs=21 must be a multiple of n_devices=8; nearest valid value: 24" in refusals["envs"]
    assert "num_envs=5 must be a multiple of n_devices=2; nearest valid value: 4" in refusals["envs of two"]
    message = "policy trainer's batch_size=30 must be a multiple of n_devices=8; nearest valid value: 32"
    assert message in refusals["batch"]


def test_what_runs_on_one_device_only_says_so(seen):
    refusals = seen["refusals"]
    for name, reason in {
        "python": "environments in Python",
        "off-policy": "while they act",
        "trajectories": "n_interactions_per_epoch",
    }.items():
        assert refusals[name].startswith("n_devices=2: ") and reason in refusals[name]
        assert "; nearest valid value: 1\n" in refusals[name]
    assert set(seen["single"].values()) == {1}


def test_a_count_of_devices_is_a_whole_number():
    with pytest.raises(ValueError, match="n_devices=0 must be a whole number of at least 1"):
        make(n_devices=0)


if __name__ == "__main__":
    main()
