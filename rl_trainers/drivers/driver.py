"""What all drivers have: environments, an algorithm, observers and metrics."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from rl_trainers.drivers.metrics import StepMetric, standard_metrics
from rl_trainers.rollout import NO_EPISODES, Episodes
from rl_trainers.types import Rollout
from rl_trainers.windows import Window

Observer = Callable[[Rollout, np.ndarray], Any]
"""``(rollout [T, B], env_id i32 [B])``: host arrays, what the environments gave, reset rows with mask 0."""


def joined(episodes: Sequence[Episodes]) -> Episodes:
    """Episodes of several unrolls."""
    return Episodes(*(np.concatenate(x) for x in zip(*episodes, strict=True)))


class Driver:
    """Decides who steps the environments and who learns.

    Observers, and after them metrics, are called once with every unroll, and thus with every row, in time
    order for each environment.

    Args:
        algorithm: a trainer, see :class:`rl_trainers.trainer.RLTrainer`.
        total_envs: single environments, of all batches together.
        observers: see :data:`Observer`.
        metrics: further ones than the standard ones.
        use_rollout_state: ``None`` or what the algorithm says, which alone decides whether training starts
            from recurrent states that acting has stored.

    Attributes:
        episodes: those that ended in what was collected last.
        lags: publishes that each unroll of it was old.
        counter: trainings so far, as ALF counts them.
        train_metrics: what the last training said, by name.

    Raises:
        ValueError: ``use_rollout_state`` is not that of the algorithm, or something to call is no function.
    """

    def __init__(
        self,
        algorithm: Any,
        total_envs: int,
        observers: Sequence[Observer] = (),
        metrics: Sequence[StepMetric] = (),
        use_rollout_state: bool | None = None,
    ):
        if use_rollout_state not in (None, algorithm.use_rollout_state):
            raise ValueError(
                f"use_rollout_state: is {use_rollout_state}, but {algorithm.use_rollout_state} in the "
                "algorithm, which decides; leave it out here"
            )
        for name, called in {"observers": observers, "metrics": metrics}.items():
            if not isinstance(called, Sequence) or not all(map(callable, called)):
                raise ValueError(f"{name}: expected a list of functions (rollout, env_id), got {called!r}")
        self.algorithm, self.total_envs = algorithm, total_envs
        self.episodes, self.lags = NO_EPISODES, [0]
        self._observers = tuple(observers)
        self._metrics = [*standard_metrics(total_envs), *metrics]
        self.counter = 0
        self.train_metrics: dict[str, float] = {}

    def get_metrics(self) -> list[StepMetric]:
        """The standard metrics (episodes, steps, average return and length), then those given."""
        return self._metrics

    def get_step_metrics(self) -> list[StepMetric]:
        """The first two: number of episodes and environment steps."""
        return self._metrics[:2]

    def start(self) -> None:
        """Begins to step the environments, where a driver does so by itself."""

    def stop(self) -> None:
        """Ends what :meth:`start` began."""

    def close(self) -> None:
        """Stops, and closes the environments that the driver has made."""
        self.stop()

    def observe(self, rollout: Rollout, env_id: np.ndarray) -> None:
        """Calls observers and metrics with an unroll."""
        observers: list[Observer] = [*self._observers, *self._metrics]
        for observer in observers:
            observer(rollout, env_id)


def check_algorithm(algorithm: Any, driver: str | None = None) -> None:
    """Refuses what is no trainer, or one that a kind of driver would harm.

    Args:
        algorithm: a trainer?
        driver: as ``why_not`` of :class:`rl_trainers.trainer.RLTrainer` takes it.
    """
    if isinstance(algorithm, type) or not hasattr(algorithm, "train_on"):
        raise ValueError(f"algorithm: must be a trainer such as PPOJoint(task), got {algorithm!r}")
    reason = algorithm.why_not(driver) if driver else ""
    if reason:
        raise ValueError(f"algorithm: {reason}")


def check_like(task: Any, env: Any) -> None:
    """Refuses environments that are not like a task's."""
    for name in ("observation_space", "action_space"):
        if getattr(env, name) != getattr(task, name):
            raise ValueError(
                f"env: {name} is {getattr(env, name)}, but {getattr(task, name)} in the task of the algorithm"
            )


def check_no_window(algorithm: Any) -> None:
    """Refuses models that drivers cannot run."""
    if isinstance(algorithm.initial_policy_state(1), Window):
        raise ValueError(
            "algorithm: its model sees a window of the last rows, which unrolls of a driver do not "
            "carry; use a recurrent model, such as models.GRU"
        )


def check_fits(algorithm: Any, env: Any) -> None:
    """Both.

    Raises:
        ValueError: says what does not fit.
    """
    check_like(algorithm.task, env)
    check_no_window(algorithm)
