"""Environments that live in Python (:mod:`.host`), and tiny ones for tests (:mod:`.probe`)."""

from rl_trainers.envs.host import EnvError, HostEnv, make_eval_env, make_host_env

__all__ = ["EnvError", "HostEnv", "make_eval_env", "make_host_env"]
