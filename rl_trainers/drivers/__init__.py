"""Drivers: who steps the environments, who learns, and what stands between; no equations."""

from rl_trainers.drivers.metrics import (
    AverageEpisodeLength,
    AverageReturn,
    EnvironmentSteps,
    NumberOfEpisodes,
    StepMetric,
    standard_metrics,
)

__all__ = [
    "AverageEpisodeLength",
    "AverageReturn",
    "EnvironmentSteps",
    "NumberOfEpisodes",
    "StepMetric",
    "standard_metrics",
]
