"""Runs the examples: briefly, and as they stand."""

import importlib.util
import math
from pathlib import Path

import pytest

_EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
_LEAST = {
    "train_cartpole": 400.0,
    "own_model": 400.0,
    "own_trainer": 250.0,
    "continuous_actions": -400.0,
}


def _load(name: str):
    spec = importlib.util.spec_from_file_location(name, _EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_example_is_tested():
    assert {path.stem for path in _EXAMPLES.glob("*.py")} == set(_LEAST)


def test_own_trainer_runs(capsys):
    mean_return = _load("own_trainer").main(n_epochs=1, n_episodes=2)
    assert math.isfinite(mean_return)
    assert f"return of 2 greedy episodes: {mean_return:.1f}" in capsys.readouterr().out


def test_own_model_learns():
    # A model whose parameters stay as they are drops the pole after about 10 steps.
    assert _load("own_model").main(n_epochs=6, n_episodes=8) > 40


@pytest.mark.slow
@pytest.mark.parametrize("name", _LEAST)
def test_reaches_what_it_promises(name):
    assert _load(name).main() >= _LEAST[name]
