"""Drivers: who steps the environments, who learns, and what stands between; no equations."""

from rl_trainers.drivers.async_off_policy import AsyncDriver, AsyncOffPolicyDriver
from rl_trainers.drivers.choosing import BY_NAME, make
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
from rl_trainers.drivers.ray_workers import RayDriver
from rl_trainers.drivers.replayers import (
    CycleOneTimeReplayer,
    OneTimeReplayer,
    Replayer,
    UniformReplayer,
    make_replayer,
)

__all__ = [
    "BY_NAME",
    "AsyncDriver",
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
    "RayDriver",
    "Replayer",
    "StepMetric",
    "SyncOffPolicyDriver",
    "UniformReplayer",
    "make",
    "make_replayer",
    "standard_metrics",
]
