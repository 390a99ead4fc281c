"""The driver of a trainer, by name."""

from __future__ import annotations

import difflib
import functools
import os
from collections.abc import Callable
from typing import Any

import gin
import numpy as np

from rl_trainers import trainer as trainer_lib
from rl_trainers.drivers.async_off_policy import AsyncDriver, AsyncOffPolicyDriver
from rl_trainers.drivers.driver import Driver
from rl_trainers.drivers.ray_workers import RayDriver
from rl_trainers.envs.native import DeviceEnv
from rl_trainers.trainer import RLTrainer

_OWN_LOOP = ("on_policy", "sync")
BY_NAME = {"async": AsyncOffPolicyDriver, "ray": RayDriver}
"""The drivers that stand for a name."""

_NAMES = (*_OWN_LOOP, *BY_NAME)


def make(trainer: RLTrainer, driver: Any) -> Any:
    """Makes the driver of a trainer.

    Args:
        trainer: what learns.
        driver: a name or a function, see :class:`rl_trainers.trainer.RLTrainer`.

    Returns:
        A driver whose ``collect`` gives the rows of an epoch, ``[T, num_envs]``; ``None`` where the trainer's
        own loop is that driver.

    Raises:
        ValueError: there is no such driver, it makes no sense for the trainer, or it collects another number
            of rows than an epoch has.
    """
    if not (callable(driver) or driver in _NAMES):
        near = difflib.get_close_matches(str(driver).lower(), _NAMES, 1, 0.0)[0]
        raise ValueError(f"driver={driver!r} is none of {_NAMES}; nearest valid value: {near!r}")
    has_own_loop = driver in _OWN_LOOP
    reason = trainer.why_not(driver) if has_own_loop else _why_no_collector(trainer)
    if reason:
        raise ValueError(f"driver={driver!r}: {reason}")
    if has_own_loop:
        return None
    made = _filled(driver, trainer)(algorithm=trainer)
    try:
        if not isinstance(made, AsyncDriver):
            raise ValueError(
                f"driver={driver!r} makes a {type(made).__name__}, which does not collect beside the trainer "
                "as AsyncOffPolicyDriver and RayDriver do; nearest valid value: 'sync'"
            )
        _check_rows(trainer, made)
    except ValueError:
        if isinstance(made, Driver):
            made.close()
        raise
    return made


def _why_no_collector(trainer: RLTrainer) -> str:
    """Why no driver can collect a trainer's epochs beside it; empty if one can."""
    if isinstance(trainer.task.env, DeviceEnv):
        return (
            "the environments are in JAX, and whole epochs are compiled without a driver; nearest valid "
            "value: None"
        )
    if trainer.n_interactions_per_epoch is None:
        return (
            "it hands over unrolls of fixed length, and epochs are counted in trajectories: give "
            "n_interactions_per_epoch; nearest valid value: None"
        )
    if trainer.offline or trainer.only_eval:
        return "offline and only_eval collect nothing to train on; nearest valid value: None"
    return ""


def _filled(driver: Any, trainer: RLTrainer) -> Callable:
    """A driver whose every learn batch is an epoch; what the caller and gin files say is left."""
    driver = functools.partial(BY_NAME[driver] if isinstance(driver, str) else driver)
    cls, given = driver.func, driver.keywords
    is_ours = isinstance(cls, type) and issubclass(cls, tuple(BY_NAME.values()))
    if not is_ours or driver.args or given.keys() & {"envs", "env", "env_f"}:
        return driver
    is_ray, num_envs = issubclass(cls, RayDriver), trainer.task.env.num_envs
    count = "num_workers" if is_ray else "num_envs"
    default = max(_divisors(num_envs, os.cpu_count() or 1)) if is_ray else num_envs
    n = given.get(count) or _bound(cls, count) or default
    if num_envs % n:
        near = min(_divisors(num_envs, num_envs), key=lambda d: abs(d - n))
        raise ValueError(
            f"{cls.__name__}.{count}={n} must divide the task's num_envs={num_envs}; nearest valid value: "
            f"{near}"
        )
    seed = trainer.task.seed
    if trainer.current_epoch:  # another beginning after every restart
        seed = int(np.random.SeedSequence([seed, trainer.current_epoch]).generate_state(1)[0])
    length = (trainer.n_interactions_per_epoch or 0) // num_envs
    defaults = {count: n, "env_batch_size": num_envs // n, "learn_queue_cap": n, "unroll_length": length}
    free = {k: v for k, v in {**defaults, "seed": seed}.items() if _bound(cls, k) is None}
    return functools.partial(cls, **{**free, **given})


def _divisors(number: int, most: int) -> list[int]:
    return [d for d in range(1, min(number, most) + 1) if number % d == 0]


def _bound(cls: Any, name: str) -> Any:
    """What a gin file binds, or ``None``; the value that a macro stands for."""
    try:
        value = gin.query_parameter(f"{cls.__name__}.{name}")
    except ValueError:
        return None
    is_macro = isinstance(value, gin.config.ConfigurableReference) and value.evaluate
    return value.scoped_configurable_fn() if is_macro else value


def _check_rows(trainer: RLTrainer, driver: Any) -> None:
    (length, columns), num_envs = driver.shape, trainer.task.env.num_envs
    if columns != num_envs:
        raise ValueError(
            f"driver: learn batches have {columns} columns, learn_queue_cap times the environments of a "
            f"batch, and the task has num_envs={num_envs}; the two must be equal"
        )
    if length * columns != trainer.n_interactions_per_epoch:
        raise ValueError(
            f"n_interactions_per_epoch={trainer.n_interactions_per_epoch}, but the driver hands over "
            f"unroll_length={length} times {columns} rows; leave unroll_length out, or nearest valid value: "
            f"{length * columns}"
        )


trainer_lib.DRIVERS["make"] = make
