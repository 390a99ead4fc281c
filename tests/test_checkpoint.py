import os
import random
import resource
import signal
import subprocess
import sys
import time
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rl_trainers import checkpoint


class Pair(NamedTuple):
    first: object
    second: object


def _tree(offset=0):
    return {
        "train": Pair(jnp.arange(6.0).reshape(2, 3) + offset, (np.uint8([1, 2]), None, ())),
        "key": jax.random.PRNGKey(7),
        "epoch": 3 + offset,
        "best": 1.5,
        "done": offset == 0,
        "scalar": jnp.float32(0.25),
        "half": jnp.bfloat16([1.5, 2.5]),
        "empty": np.zeros((0, 4), np.int16),
        "dots": {"a.b": {"c": np.ones(1)}, "a": {"b.c": np.zeros(1)}},
    }


def test_every_kind_of_leaf_comes_back_as_it_was(tmp_path):
    checkpoint.save(tmp_path, 4, _tree())

    step, tree = checkpoint.restore(tmp_path, _tree(offset=100))

    assert step == 4
    assert isinstance(tree["train"], Pair)
    assert tree["train"].second[1:] == (None, ())
    np.testing.assert_array_equal(tree["train"].first, [[0, 1, 2], [3, 4, 5]])
    assert isinstance(tree["train"].first, jax.Array)
    assert type(tree["train"].second[0]) is np.ndarray
    np.testing.assert_array_equal(tree["train"].second[0], np.uint8([1, 2]))
    np.testing.assert_array_equal(tree["key"], np.uint32([0, 7]))
    assert (tree["epoch"], type(tree["epoch"])) == (3, int)
    assert tree["done"] is True
    assert (tree["best"], type(tree["best"])) == (1.5, float)
    assert tree["scalar"].dtype == jnp.float32 and tree["scalar"] == 0.25
    assert tree["half"].dtype == jnp.bfloat16 and tree["half"].tolist() == [1.5, 2.5]
    assert tree["empty"].shape == (0, 4) and tree["empty"].dtype == np.int16
    assert tree["dots"]["a.b"]["c"] == 1 and tree["dots"]["a"]["b.c"] == 0


def test_any_takes_another_shape_and_a_whole_subtree(tmp_path):
    saved = {"replay": {"reward": np.arange(5.0)}, "env": {"0/rng": np.uint8([9]), "t": 3}}
    checkpoint.save(tmp_path, 1, saved)

    target = {"replay": {"reward": checkpoint.ANY}, "env": checkpoint.ANY}
    _, tree = checkpoint.restore(tmp_path, target)

    assert tree["replay"]["reward"].tolist() == [0, 1, 2, 3, 4]
    assert {name: value.tolist() for name, value in tree["env"].items()} == {"0/rng": [9], "t": 3}
    assert set(checkpoint.restore(tmp_path)[1]) == {"replay/reward", "env/0/rng", "env/t"}


def test_any_is_empty_where_nothing_was_saved(tmp_path):
    checkpoint.save(tmp_path, 1, {"env": None, "x": 1})

    assert checkpoint.restore(tmp_path, {"env": checkpoint.ANY, "x": 0})[1] == {"env": {}, "x": 1}


def test_no_checkpoint_is_none(tmp_path):
    assert checkpoint.restore(tmp_path, {"x": 1}) is None
    assert checkpoint.latest_step(tmp_path / "missing") is None


def test_keeps_the_newest_and_replaces_the_same_step(tmp_path):
    for step in (1, 2, 3):
        checkpoint.save(tmp_path, step, {"x": step})
    checkpoint.save(tmp_path, 3, {"x": 30})

    assert sorted(os.listdir(tmp_path / "checkpoints")) == ["2", "3"]
    assert checkpoint.restore(tmp_path, {"x": 0}) == (3, {"x": 30})


def test_a_replaced_step_is_readable_until_its_successor_is_committed(tmp_path):
    checkpoint.save(tmp_path, 3, {"x": 3}, keep=1)
    os.rename(tmp_path / "checkpoints" / "3", tmp_path / "checkpoints" / "3.aside")

    assert checkpoint.remove_leftovers(tmp_path) == []
    assert checkpoint.restore(tmp_path, {"x": 0}) == (3, {"x": 3})
    checkpoint.save(tmp_path, 3, {"x": 33}, keep=1)
    assert os.listdir(tmp_path / "checkpoints") == ["3"]
    assert checkpoint.restore(tmp_path, {"x": 0}) == (3, {"x": 33})


def test_another_model_size_names_the_path_and_both_shapes(tmp_path):
    checkpoint.save(tmp_path, 1, {"policy": {"kernel": np.zeros((4, 64), np.float32)}})

    with pytest.raises(ValueError) as error:
        checkpoint.restore(tmp_path, {"policy": {"kernel": np.zeros((4, 32), np.float32)}})

    assert "policy/kernel was saved as float32[4, 64], expected float32[4, 32]" in str(error.value)


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ({"layer_0": 1.0}, "layer_1 was saved but is not expected"),
        ({"layer_0": 1.0, "layer_1": 1.0, "layer_2": 1.0}, "layer_2 was not saved"),
        ({"layer_0": 1.0, "layer_1": 1}, "layer_1 was saved as float64[], expected a int"),
        ({"layer_0": 1.0, "layer_1": np.float32(1)}, "saved as float64[], expected float32[]"),
    ],
)
def test_another_structure_is_an_error(tmp_path, target, message):
    checkpoint.save(tmp_path, 1, {"layer_0": 1.0, "layer_1": 2.0})

    with pytest.raises(ValueError) as error:
        checkpoint.restore(tmp_path, target)

    assert message in str(error.value)


@pytest.mark.parametrize(
    ("step", "tree", "keep", "error", "message"),
    [
        (-1, {"x": 1}, 2, ValueError, "step is -1"),
        (4, {"x": 1}, 2, ValueError, "already holds step 5"),
        (6, {"x": 1}, 0, ValueError, "keep is 0"),
        (6, {"x": "text"}, 2, TypeError, "x is a str"),
        (6, {"x": jax.random.key(0)}, 2, TypeError, "x is a typed PRNG key"),
        (6, {"x": None}, 2, ValueError, "no numbers"),
        (6, {"a": {"b": 1}, "a/b": 2}, 2, ValueError, "path a/b"),
    ],
)
def test_what_cannot_be_saved_is_refused_before_anything_changes(
    tmp_path, step, tree, keep, error, message
):
    checkpoint.save(tmp_path, 5, {"x": 5})

    with pytest.raises(error, match=message):
        checkpoint.save(tmp_path, step, tree, keep=keep)

    assert os.listdir(tmp_path / "checkpoints") == ["5"]


@pytest.mark.parametrize("step", [1, 2])
def test_a_full_disk_is_an_error_and_the_old_checkpoint_stays(tmp_path, step):
    checkpoint.save(tmp_path, 1, {"x": np.arange(10)}, keep=1)
    noise = np.random.default_rng(0).integers(0, 256, 2_000_000, np.uint8)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (500_000, hard))  # No file grows beyond 500 kB.
    try:
        with pytest.raises(OSError, match=f"step {step} could not be written.*step 1 is complete"):
            checkpoint.save(tmp_path, step, {"x": noise}, keep=1)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))

    assert len(os.listdir(tmp_path / "checkpoints")) == 1
    assert checkpoint.restore(tmp_path, {"x": np.zeros(10, int)})[1]["x"].tolist() == [*range(10)]
    checkpoint.save(tmp_path, 2, {"x": noise}, keep=1)
    assert os.listdir(tmp_path / "checkpoints") == ["2"]


_SAVER = """
import sys
import numpy as np
from rl_trainers import checkpoint

found = checkpoint.latest_step(sys.argv[1])
checkpoint.remove_leftovers(sys.argv[1])
step = 0 if found is None else found + 1
while True:
    tree = {str(i): np.full((50, 100), step) for i in range(20)}
    checkpoint.save(sys.argv[1], step, tree, keep=1)
    print(step, flush=True)
    step += 1
"""


@pytest.mark.slow
def test_killed_at_random_moments_a_complete_checkpoint_is_left(tmp_path):
    moments = random.Random(0)
    leftovers = []
    for _ in range(20):
        child = subprocess.Popen(
            [sys.executable, "-c", _SAVER, str(tmp_path)], stdout=subprocess.PIPE, text=True
        )
        reported = int(child.stdout.readline())
        time.sleep(moments.uniform(0.0, 0.3))
        child.send_signal(signal.SIGKILL)
        reported = max([reported, *map(int, child.stdout.read().split())])
        child.wait()

        step, tree = checkpoint.restore(tmp_path)
        assert step in (reported, reported + 1)
        assert len(tree) == 20
        assert all((value == step).all() and value.shape == (50, 100) for value in tree.values())
        leftovers.append(len(os.listdir(tmp_path / "checkpoints")) - 1)

    assert max(leftovers) == 1  # Some kill landed inside a save, and none left more than one thing.
    checkpoint.remove_leftovers(tmp_path)
    assert all(name.isdecimal() for name in os.listdir(tmp_path / "checkpoints"))
