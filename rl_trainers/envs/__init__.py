"""Environments that live in Python (:mod:`.host`), made of data (:mod:`.sequence`), tiny (:mod:`.probe`)."""

from rl_trainers.envs.host import EnvError, HostEnv, make_eval_env, make_host_env
from rl_trainers.envs.probe import Memory
from rl_trainers.envs.sequence import SequenceDataEnv, copy_stream

__all__ = [
    "EnvError",
    "HostEnv",
    "Memory",
    "SequenceDataEnv",
    "copy_stream",
    "make_eval_env",
    "make_host_env",
]
