"""Environments in Python (:mod:`.host`), in JAX (:mod:`.native`), of data (:mod:`.sequence`), tiny ones."""

from rl_trainers.envs.host import EnvError, HostEnv, make_eval_env, make_host_env
from rl_trainers.envs.native import DeviceEnv, GymView, JaxEnv, make_jax_env
from rl_trainers.envs.probe import Memory
from rl_trainers.envs.sequence import SequenceDataEnv, copy_stream

__all__ = [
    "DeviceEnv",
    "EnvError",
    "GymView",
    "HostEnv",
    "JaxEnv",
    "Memory",
    "SequenceDataEnv",
    "copy_stream",
    "make_eval_env",
    "make_host_env",
    "make_jax_env",
]
