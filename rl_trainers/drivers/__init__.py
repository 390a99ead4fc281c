"""Drivers: who steps the environments, who learns, and what stands between; no equations."""

from rl_trainers.drivers.async_off_policy import AsyncOffPolicyDriver
from rl_trainers.drivers.choosing import make
from rl_trainers.drivers.driver import Driver
from rl_trainers.drivers.metrics import (
    AverageEpisodeLength,
    AverageReturn,
    EnvironmentSteps,
    NumberOfEpisodes,
    StepMetric,
    standard_metrics,
)
from rl_trainers.drivers.off_policy import OffPolicyDriver, SyncOffPolicyDriver
from rl_trainers.drivers.on_policy import OnPolicyDriver
from rl_trainers.drivers.replayers import (
    CycleOneTimeReplayer,
    OneTimeReplayer,
    Replayer,
    UniformReplayer,
    make_replayer,
)

__all__ = [
    "AsyncOffPolicyDriver",
    "AverageEpisodeLength",
    "AverageReturn",
    "CycleOneTimeReplayer",
    "Driver",
    "EnvironmentSteps",
    "NumberOfEpisodes",
    "OffPolicyDriver",
    "OnPolicyDriver",
    "OneTimeReplayer",
    "Replayer",
    "StepMetric",
    "SyncOffPolicyDriver",
    "UniformReplayer",
    "make",
    "make_replayer",
    "standard_metrics",
]
