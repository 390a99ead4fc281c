"""Recorded data sets as trajectories."""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np

from rl_trainers.distributions import create_distribution
from rl_trainers.trajectory import Trajectory, padded
from rl_trainers.types import EnvInfo, PyTree, TimeStep


def from_minari(dataset: Any, distribution: Any = None) -> list[Trajectory]:
    """Reads a data set of Minari (https://minari.farama.org, extra ``minari``).

    ``RLTask(env, initial_trajectories='minari:NAME')`` reads one too, and faster.

    Args:
        dataset: a ``minari.MinariDataset``, or the name of one on this machine.
        distribution: of the task's actions; ``None`` for that of the data set's action space.

    Returns:
        One trajectory per episode; the probabilities of the actions are unknown, so ``dist_inputs`` are NaN.

    Raises:
        ImportError: Minari is not installed.
        ValueError: there is no such data set, or it holds numbers that are not finite.
    """
    dataset = load_minari(dataset) if isinstance(dataset, str) else dataset
    if distribution is None:
        distribution = create_distribution(dataset.action_space)
    return [Trajectory.from_np(steps) for steps in minari_episodes(dataset, distribution)]


def load_minari(name: str) -> Any:
    """The ``minari.MinariDataset`` of this name; for errors see :func:`from_minari`."""
    try:
        minari: Any = importlib.import_module("minari")
    except ImportError as error:
        raise ImportError(
            f"the data set {name!r} needs the extra 'minari': pip install 'rl_trainers[minari]'"
        ) from error
    local = list(minari.list_local_datasets())
    if name not in local:
        near = difflib.get_close_matches(name, local, 1, 0.0)
        raise ValueError(
            f"there is no Minari data set {name!r} on this machine; "
            + (f"the nearest is {near[0]!r}." if near else "there is none; MINARI_DATASETS_PATH says where.")
        )
    return minari.load_dataset(name)


def minari_episodes(dataset: Any, distribution: Any) -> Iterator[TimeStep]:
    """The episodes of a data set, ``[S + 1, ..]`` as :func:`rl_trainers.replay.pack` takes them.

    Args:
        dataset: a ``minari.MinariDataset``.
        distribution: of the task's actions.

    Raises:
        ValueError: a reward or an observation is not finite.
    """
    for episode in dataset.iterate_episodes():
        n_rows = len(episode.rewards) + 1
        ones = np.ones(n_rows, np.float32)
        observation = jax.tree.map(_narrow, episode.observations)
        _check_finite(f"{dataset.id}, episode {episode.id}", observation, episode.rewards)
        action = distribution.from_env(episode.actions)
        yield TimeStep(
            observation=observation,
            action=jax.tree.map(lambda x, n=n_rows: padded(np.asarray(x), n), action),
            reward=padded(np.asarray(episode.rewards, np.float32), n_rows),
            terminated=padded(np.asarray(episode.terminations, bool), n_rows),
            truncated=padded(np.asarray(episode.truncations, bool), n_rows),
            mask=padded(ones[:-1], n_rows),
            dist_inputs=np.full((n_rows, distribution.n_inputs), np.nan, np.float32),
            env_info=EnvInfo(ones, ones),
        )


def _narrow(x: Any) -> np.ndarray:
    """As environments return it: float64 is made float32."""
    x = np.asarray(x)
    return x.astype(np.float32) if x.dtype == np.float64 else x


def _check_finite(name: str, observation: PyTree, rewards: np.ndarray) -> None:
    for field, values in (("reward", rewards), ("observation", observation)):
        for x in jax.tree.leaves(values):
            if x.dtype.kind == "f" and not np.isfinite(x).all():
                row = int(np.argmin(np.isfinite(x).reshape(len(x), -1).all(1)))
                raise ValueError(f"{name}: the {field} of step {row} is not finite")
