"""Layered reinforcement learning trainers in JAX.

>>> from rl_trainers import PPOJoint, RLTask
>>> PPOJoint(RLTask('CartPole-v1', num_envs=8)).run(50)
"""

import os
from pathlib import Path

import jax


def _configure_jax() -> None:
    """Process-wide settings of JAX that users can override by JAX's own environment variables.

    On a CPU a call per environment step is faster without a hand-over to another thread; and compiled
    programs are kept for the next process.
    """
    if "JAX_CPU_ENABLE_ASYNC_DISPATCH" not in os.environ:
        jax.config.update("jax_cpu_enable_async_dispatch", False)
    cache = getattr(jax.config, "jax_compilation_cache_dir", None)
    if "JAX_COMPILATION_CACHE_DIR" not in os.environ and cache is None:
        root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        jax.config.update("jax_compilation_cache_dir", str(root / "rl_trainers" / "jax"))
    if "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS" not in os.environ:
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.05)


_configure_jax()

from rl_trainers import advantages, drivers, losses, models, optimizers  # noqa: E402
from rl_trainers.actor_critic import (  # noqa: E402
    A2C,
    AWR,
    PPO,
    QWR,
    ActorCriticTrainer,
    SamplingAWR,
)
from rl_trainers.distributions import create_distribution  # noqa: E402
from rl_trainers.joint import (  # noqa: E402
    A2CJoint,
    ActorCriticJointTrainer,
    AWRJoint,
    PPOJoint,
)
from rl_trainers.policy_trainer import (  # noqa: E402
    RWR,
    ExamplePolicyTrainer,
    ExpertIteration,
    PolicyGradient,
    PolicyTrainer,
)
from rl_trainers.sac import DDPG, SAC, TD3  # noqa: E402
from rl_trainers.task import RLTask  # noqa: E402
from rl_trainers.together import run_together  # noqa: E402
from rl_trainers.trainer import RLTrainer  # noqa: E402
from rl_trainers.value_trainer import DQN, ValueTrainer  # noqa: E402

__all__ = [
    "A2C",
    "AWR",
    "A2CJoint",
    "AWRJoint",
    "ActorCriticJointTrainer",
    "ActorCriticTrainer",
    "DDPG",
    "DQN",
    "ExamplePolicyTrainer",
    "ExpertIteration",
    "PPO",
    "PPOJoint",
    "QWR",
    "RWR",
    "SamplingAWR",
    "PolicyGradient",
    "PolicyTrainer",
    "RLTask",
    "RLTrainer",
    "SAC",
    "TD3",
    "ValueTrainer",
    "advantages",
    "create_distribution",
    "drivers",
    "losses",
    "models",
    "optimizers",
    "run_together",
]
