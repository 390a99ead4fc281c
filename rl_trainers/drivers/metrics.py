"""Step metrics: observers that count what the environments did.

All take ``(rollout, env_id)`` as every observer does, and keep what they know of an environment's running
episode under its ``env_id``, so that the unrolls of different environments may come in any order and an
episode may span many of them. Only the unrolls of one environment must come in their order.
"""

from __future__ import annotations

import collections
from typing import Any

import numpy as np

from rl_trainers.rollout import Episodes, account, initial_actor
from rl_trainers.types import Rollout, TimeStep

_SMALLEST_WINDOW = 10
_FACTS = ("reward", "terminated", "truncated", "mask")


def in_order(env_id: np.ndarray) -> list[np.ndarray]:
    """Columns of each environment's first unroll, of its second, and so on; in each no id repeats.

    Args:
        env_id: int ``[B]``; where an id repeats, its unrolls follow one another in this order.
    """
    order = np.argsort(env_id, kind="stable")
    _, counts = np.unique(env_id, return_counts=True)
    nth = np.zeros(len(env_id), np.int64)
    nth[order] = np.arange(len(env_id)) - np.repeat(np.cumsum(counts) - counts, counts)
    return [np.flatnonzero(nth == k) for k in range(max(counts, default=0))]


class StepMetric:
    """Counts something of every unroll that it is called with."""

    @property
    def name(self) -> str:
        """What logs call it."""
        return type(self).__name__

    def __call__(self, rollout: Rollout, env_id: Any) -> None:
        """Takes an unroll in.

        Args:
            rollout: host arrays ``[T, B]``; rows with mask 0 are no steps.
            env_id: i32 ``[B]``; a repeated id means unrolls that follow one another.
        """
        raise NotImplementedError

    def result(self) -> float:
        """The number so far."""
        raise NotImplementedError

    def reset(self) -> None:
        """Forgets everything."""
        raise NotImplementedError

    def restart(self, env_id: Any) -> None:
        """Forgets the running episodes of these environments, which begin anew; no counts."""

    def state_dict(self) -> dict[str, Any]:
        """Copies everything, for :meth:`load_state_dict`: NumPy arrays, as a checkpoint takes them."""
        raise NotImplementedError

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Puts back what :meth:`state_dict` gave, however many environments there are now."""
        raise NotImplementedError


class _Count(StepMetric):
    def __init__(self) -> None:
        self._count = 0

    def result(self) -> int:
        return self._count

    def reset(self) -> None:
        self._count = 0

    def state_dict(self) -> dict[str, Any]:
        return {"count": np.int64(self._count)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._count = int(state["count"])


class NumberOfEpisodes(_Count):
    """Episodes that ended, whether terminated or truncated."""

    def __call__(self, rollout: Rollout, env_id: Any) -> None:
        """See :class:`StepMetric`."""
        self._count += int((rollout.steps.done & (rollout.steps.mask > 0)).sum())


class EnvironmentSteps(_Count):
    """Decisions taken; reset rows do not count."""

    def __call__(self, rollout: Rollout, env_id: Any) -> None:
        """See :class:`StepMetric`."""
        self._count += int((rollout.steps.mask > 0).sum())


class _Average(StepMetric):
    def __init__(self, window: int = _SMALLEST_WINDOW):
        if window < 1:
            raise ValueError(f"window: must be >= 1, got {window}; the nearest valid value is 1")
        self._newest: collections.deque[float] = collections.deque(maxlen=window)
        self._return, self._length = np.zeros(0), np.zeros(0, np.int64)

    def __call__(self, rollout: Rollout, env_id: Any) -> None:
        """See :class:`StepMetric`."""
        steps, env_id = rollout.steps, np.asarray(env_id)
        missing = max(env_id, default=-1) + 1 - len(self._return)
        if missing > 0:
            self._return = np.append(self._return, np.zeros(missing))
            self._length = np.append(self._length, np.zeros(missing, np.int64))
        done = steps.done & (steps.mask > 0)
        facts = TimeStep(None, None, steps.reward, done, np.zeros_like(done), steps.mask)
        for columns in in_order(env_id):
            env = env_id[columns]
            before = initial_actor((), len(env), ())._replace(
                episode_return=self._return[env], episode_length=self._length[env]
            )
            part = facts._replace(**{k: getattr(facts, k)[:, columns] for k in _FACTS})
            episodes, self._return[env], self._length[env] = account(part, before)
            self._newest.extend(self._numbers(episodes).tolist())

    def _numbers(self, episodes: Episodes) -> np.ndarray:
        raise NotImplementedError

    def result(self) -> float:
        return float(np.mean(self._newest)) if self._newest else 0.0

    def reset(self) -> None:
        self._newest.clear()
        self._return, self._length = np.zeros(0), np.zeros(0, np.int64)

    def restart(self, env_id: Any) -> None:
        known = np.asarray(env_id)[np.asarray(env_id) < len(self._return)]
        self._return[known], self._length[known] = 0.0, 0

    def state_dict(self) -> dict[str, Any]:
        newest = np.array(self._newest, np.float64)
        return {"newest": newest, "return": self._return.copy(), "length": self._length.copy()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.reset()
        self._newest.extend(np.asarray(state["newest"]).tolist())
        self._return = np.array(state["return"], np.float64)
        self._length = np.array(state["length"], np.int64)


class AverageReturn(_Average):
    """Mean undiscounted return of the newest ``window`` episodes that ended; 0 before the first.

    Args:
        window: how many episodes, at least 1.
    """

    def _numbers(self, episodes: Episodes) -> np.ndarray:
        return episodes.returns


class AverageEpisodeLength(_Average):
    """Mean number of decisions of the newest ``window`` episodes that ended; 0 before the first.

    Args:
        window: how many episodes, at least 1.
    """

    def _numbers(self, episodes: Episodes) -> np.ndarray:
        return episodes.lengths


def standard_metrics(num_envs: int) -> list[StepMetric]:
    """The four that every driver has, in ALF's order: the first two are its *step metrics*.

    Args:
        num_envs: single environments; the averages are over as many episodes, but 10 at least.
    """
    window = max(_SMALLEST_WINDOW, num_envs)
    return [NumberOfEpisodes(), EnvironmentSteps(), AverageReturn(window), AverageEpisodeLength(window)]
