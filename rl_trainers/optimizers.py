"""Optimizers under Trax's names and with Trax's defaults, as thin factories over optax; lr schedules.

A trainer takes ``optimizer`` in one of two forms:

* a factory, such as :func:`Adam`, ``optax.adam`` or ``functools.partial(optax.adamw, weight_decay=1e-4)``.
  It is called with the learning rate of the trainer's ``lr_schedule`` as an argument of the compiled
  step, so a new learning rate compiles nothing again.
* a finished ``optax.GradientTransformation``, used as it is; then ``lr_schedule`` must not be given.
"""

from __future__ import annotations

import difflib
import inspect
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import gin
import numpy as np
import optax

Schedule = Callable[[Any], Any]
"""Optimizer step (int or i32 array) to learning rate."""


class Optimizer(NamedTuple):
    """An optax transformation that wants its gradients clipped by global norm first.

    The clip value is kept apart from the transformation, so that it is an argument of the compiled step
    and the norms before and after can be reported.

    Attributes:
        init: as in ``optax.GradientTransformation``.
        update: likewise.
        clip_grad_norm: largest global norm that gradients enter with, ``inf`` for any.
    """

    init: Callable
    update: Callable
    clip_grad_norm: float = math.inf


def _optimizer(direction, learning_rate, weight_decay_rate=0.0, clip_grad_norm=None) -> Optimizer:
    """New w = (1 - weight_decay_rate) w - learning_rate * direction, Trax's order of things."""
    parts = [direction, optax.scale(-learning_rate)]
    if weight_decay_rate:
        parts.append(optax.add_decayed_weights(-weight_decay_rate))
    chain = optax.chain(*parts)
    return Optimizer(chain.init, chain.update, clip_grad_norm or math.inf)


@gin.configurable(module="rl_trainers.optimizers")
def Adam(
    learning_rate: float = 1e-4,
    weight_decay_rate: float = 1e-5,
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-5,
    clip_grad_norm: float | None = None,
) -> Optimizer:
    """Adam (Kingma and Ba 2015, https://arxiv.org/abs/1412.6980).

    Args:
        learning_rate: step size; a trainer with an ``lr_schedule`` supplies its own.
        weight_decay_rate: share by which weights shrink in each step, whatever the learning rate.
        b1: decay of the first moment.
        b2: decay of the second moment.
        eps: added to the root of the second moment.
        clip_grad_norm: gradients are scaled down to this global norm before the moments.
    """
    direction = optax.scale_by_adam(b1, b2, eps)
    return _optimizer(direction, learning_rate, weight_decay_rate, clip_grad_norm)


DEFAULT_LEARNING_RATE = 1e-3
"""What trainers use that are given neither an optimizer nor a schedule."""


def default(learning_rate: float) -> Optimizer:
    """The optimizer of trainers that are given none: Adam, no decay, gradients clipped at norm 0.5."""
    # Not Adam itself, so that bindings of Adam change nothing where Adam was not asked for.
    return _optimizer(optax.scale_by_adam(eps=1e-5), learning_rate, clip_grad_norm=0.5)


@gin.configurable(module="rl_trainers.optimizers")
def RMSProp(
    learning_rate: float = 1e-3,
    gamma: float = 0.9,
    eps: float = 1e-8,
    clip_grad_norm: float | None = None,
) -> Optimizer:
    """RMSProp with accumulators that start at one, as Trax has it.

    Args:
        learning_rate: step size; a trainer with an ``lr_schedule`` supplies its own.
        gamma: decay of the second moment.
        eps: added to the root of the second moment.
        clip_grad_norm: gradients are scaled down to this global norm first.
    """
    direction = optax.scale_by_rms(gamma, eps, initial_scale=1.0, eps_in_sqrt=False)
    return _optimizer(direction, learning_rate, clip_grad_norm=clip_grad_norm)


@gin.configurable(module="rl_trainers.optimizers")
def Momentum(
    learning_rate: float = 0.01,
    mass: float = 0.9,
    weight_decay_rate: float = 1e-5,
    nesterov: bool = True,
    clip_grad_norm: float | None = None,
) -> Optimizer:
    """Stochastic gradient descent with momentum.

    Args:
        learning_rate: step size; a trainer with an ``lr_schedule`` supplies its own.
        mass: decay of the velocity.
        weight_decay_rate: share by which weights shrink in each step, whatever the learning rate.
        nesterov: look ahead along the velocity.
        clip_grad_norm: gradients are scaled down to this global norm first.
    """
    direction = optax.trace(mass, nesterov)
    return _optimizer(direction, learning_rate, weight_decay_rate, clip_grad_norm)


@gin.configurable(module="rl_trainers.optimizers")
def SGD(learning_rate: float = 0.01, clip_grad_norm: float | None = None) -> Optimizer:
    """Stochastic gradient descent.

    Args:
        learning_rate: step size; a trainer with an ``lr_schedule`` supplies its own.
        clip_grad_norm: gradients are scaled down to this global norm first.
    """
    return _optimizer(optax.identity(), learning_rate, clip_grad_norm=clip_grad_norm)


@gin.configurable(module="rl_trainers.optimizers")
def Adafactor(
    learning_rate: float = 0.05,
    factored: bool = True,
    multiply_by_parameter_scale: bool = True,
    decay_rate: float = 0.8,
    clipping_threshold: float | None = 1.0,
    weight_decay_rate: float = 1e-5,
    clip_grad_norm: float | None = None,
) -> Optimizer:
    """Adafactor (Shazeer and Stern 2018, https://arxiv.org/abs/1804.04235), without momentum.

    Args:
        learning_rate: relative step size; a trainer with an ``lr_schedule`` supplies its own.
        factored: keep row and column statistics of matrices only.
        multiply_by_parameter_scale: scale updates by the root mean square of the parameter.
        decay_rate: exponent of the second moment's decay.
        clipping_threshold: largest root mean square of an update, ``None`` for any.
        weight_decay_rate: share by which weights shrink in each step, whatever the learning rate.
        clip_grad_norm: gradients are scaled down to this global norm first.
    """
    parts: list[Any] = [optax.scale_by_factored_rms(factored, decay_rate, epsilon=1e-16)]
    if clipping_threshold is not None:
        parts.append(optax.clip_by_block_rms(clipping_threshold))
    if multiply_by_parameter_scale:
        parts.append(optax.scale_by_param_block_rms())
    return _optimizer(optax.chain(*parts), learning_rate, weight_decay_rate, clip_grad_norm)


def resolve(optimizer: Any, lr_schedule: Any) -> tuple[Optimizer, Schedule]:
    """Turns what a user gives as ``optimizer`` and ``lr_schedule`` into their working forms.

    Args:
        optimizer: a factory or a finished transformation, see the module's docstring; ``None`` for
            :func:`default`.
        lr_schedule: a number, a schedule or a factory of one; ``None`` for a constant
            :data:`DEFAULT_LEARNING_RATE`.

    Raises:
        TypeError: if either is none of these.
        ValueError: if a finished transformation comes with a schedule.
    """
    has_schedule = lr_schedule is not None
    optimizer = resolve_optimizer(default if optimizer is None else optimizer, has_schedule)
    return optimizer, resolve_schedule(lr_schedule if has_schedule else DEFAULT_LEARNING_RATE)


def resolve_optimizer(optimizer: Any, has_schedule: bool) -> Optimizer:
    """Turns what a user gives as ``optimizer`` into one whose learning rate is an argument.

    Args:
        optimizer: a factory or a finished transformation, see the module's docstring.
        has_schedule: whether a learning rate schedule was given as well.

    Returns:
        An :class:`Optimizer`; if its state has ``hyperparams['learning_rate']``, that is to be set before
        each update.

    Raises:
        TypeError: if ``optimizer`` is neither.
        ValueError: if a finished transformation comes with a schedule.
    """
    if hasattr(optimizer, "init") and hasattr(optimizer, "update"):
        if has_schedule:
            raise ValueError(
                "lr_schedule has no effect on a finished optax transformation, which has its own "
                "learning rate: give the factory uncalled (optimizer=optax.adam), or drop lr_schedule"
            )
        clip = getattr(optimizer, "clip_grad_norm", math.inf)
        return Optimizer(optimizer.init, optimizer.update, clip)
    if not callable(optimizer):
        raise TypeError(
            f"optimizer={optimizer!r} is neither an optax transformation nor a factory of one such as "
            "optimizers.Adam or optax.adam"
        )
    clip = getattr(optimizer(learning_rate=1.0), "clip_grad_norm", math.inf)
    injected = optax.inject_hyperparams(lambda learning_rate: optimizer(learning_rate=learning_rate))(
        learning_rate=1.0
    )
    return Optimizer(injected.init, injected.update, clip)


_FACTORS: dict[str, Callable[[Any, dict], Any]] = {
    "constant": lambda step, a: a["constant"],
    "two_constants": lambda step, a: np.where(
        step < a["second_constant_step"], a["constant"], a["second_constant"]
    ),
    "linear_warmup": lambda step, a: np.minimum(1.0, step / a["warmup_steps"]),
    "rsqrt_decay": lambda step, a: 1 / np.sqrt(np.maximum(step, a["warmup_steps"])),
    "rsqrt_normalized_decay": lambda step, a: np.sqrt(
        a["warmup_steps"] / np.maximum(step, a["warmup_steps"])
    ),
    "decay_every": lambda step, a: a["decay_factor"] ** (step // a["steps_per_decay"]),
    "cosine_decay": lambda step, a: (
        0.5
        + 0.5
        * np.cos(np.pi * (np.maximum(0.0, step - a["warmup_steps"]) / a["steps_per_cycle"] % 1.0))
    ),
    "linear_decay": lambda step, a: np.maximum(0.0, 1.0 - step / a["steps_per_cycle"]),
}


@gin.configurable(module="rl_trainers.optimizers")
def multifactor(
    factors: str = "constant * linear_warmup * rsqrt_decay",
    constant: float = 0.1,
    warmup_steps: int = 400,
    decay_factor: float = 0.5,
    steps_per_decay: int = 20000,
    steps_per_cycle: int = 100000,
    second_constant: float = 0.01,
    second_constant_step: int = 10000,
    minimum: float = 0.0,
) -> Schedule:
    """A learning rate schedule that is a product of factors.

    Args:
        factors: names joined by ``*``, of ``constant``; ``two_constants`` (``constant``, and
            ``second_constant`` from ``second_constant_step`` on); ``linear_warmup`` (from 0 to 1 over
            ``warmup_steps``); ``rsqrt_decay`` (1 / sqrt(max(step, warmup_steps)));
            ``rsqrt_normalized_decay`` (the same, 1 at the end of the warm-up); ``decay_every``
            (``decay_factor`` to the number of whole ``steps_per_decay``); ``cosine_decay`` (from 1 to 0
            over ``steps_per_cycle`` after the warm-up, again and again); ``linear_decay`` (from 1 to 0
            over ``steps_per_cycle``, then 0).
        constant: value of ``constant``.
        warmup_steps: optimizer steps of the warm-up.
        decay_factor: see ``decay_every``.
        steps_per_decay: see ``decay_every``.
        steps_per_cycle: see ``cosine_decay`` and ``linear_decay``.
        second_constant: see ``two_constants``.
        second_constant_step: see ``two_constants``.
        minimum: the schedule never falls below this.

    Returns:
        A function from the optimizer step (1 for the first; a number or an array) to the learning rate.

    Raises:
        ValueError: if a factor has an unknown name.
    """
    settings = dict(locals())
    names = [name.strip() for name in factors.split("*")]
    for name in names:
        if name not in _FACTORS:
            near = difflib.get_close_matches(name, _FACTORS, 1, 0.0)[0]
            raise ValueError(f"factors={factors!r} has the unknown factor {name!r}; nearest: {near!r}")

    def schedule(step):
        step = np.asarray(step, np.float64)
        rate = np.ones_like(step)
        for name in names:
            rate = rate * _FACTORS[name](step, settings)
        return np.maximum(rate, minimum)

    return schedule


def resolve_schedule(lr_schedule: Any) -> Schedule:
    """Turns what a user gives as ``lr_schedule`` into a function of the step.

    Args:
        lr_schedule: a number; a function with one required argument, the step (such as an optax
            schedule); or a factory of such a function (such as :func:`multifactor`).

    Raises:
        TypeError: if it is none of them.
    """
    if isinstance(lr_schedule, (int, float)):
        return optax.constant_schedule(float(lr_schedule))
    if not callable(lr_schedule):
        raise TypeError(
            f"lr_schedule={lr_schedule!r} is neither a number nor a schedule such as multifactor"
        )
    required = [
        p
        for p in inspect.signature(lr_schedule).parameters.values()
        if p.default is p.empty and p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
    ]
    return lr_schedule if len(required) == 1 else lr_schedule()


def learning_rates(schedule: Schedule, step: int, n_steps: int) -> np.ndarray:
    """Learning rates of the next optimizer steps, f32 ``[n_steps]``.

    Args:
        schedule: function of the step.
        step: optimizer steps taken so far.
        n_steps: how many come.
    """
    steps = np.arange(step + 1, step + n_steps + 1)
    try:
        rates = np.asarray(schedule(steps), np.float32)
    except (TypeError, ValueError):  # a user's schedule may branch on a single step
        rates = np.asarray([float(schedule(int(s))) for s in steps], np.float32)
    return np.broadcast_to(rates, (n_steps,))
