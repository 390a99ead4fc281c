"""Many runs of one trainer class in one compiled program: seeds, or numbers such as learning rates."""

from __future__ import annotations

import difflib
import functools
import time
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from rl_trainers.iteration import Carry, Iteration
from rl_trainers.metrics import Progress
from rl_trainers.trainer import Interrupt, RLTrainer, compiled


class NotOneProgramError(ValueError):
    """Trainers whose epochs are different programs."""


def run_together(
    trainers: Sequence[RLTrainer],
    n_epochs: int = 1,
    n_epochs_is_total_epochs: bool = False,
    distinct: Sequence[RLTrainer] | None = None,
    progress: bool = False,
) -> None:
    """Runs epochs of several trainers side by side, and saves them at the end.

    Their epochs are one program, mapped over the trainers. Each keeps its own metrics, checkpoints and
    ``output_dir``, and may be run on alone. :meth:`RLTrainer.stop` of any, or the first Ctrl-C, ends the run
    of all after the running epochs.

    Args:
        trainers: of tasks with JAX environments. They may differ in seeds and in numbers that are arguments
            of the compiled step: learning rates, ``clip_grad_norm`` and the trainer's ``hyperparameters``.
        n_epochs: how many.
        n_epochs_is_total_epochs: count the epochs already done as well.
        distinct: one trainer of each setting, where the others are known to differ from these in seeds alone;
            to compare the program of each trainer takes a second.
        progress: show a progress display of the first trainer.

    Raises:
        ValueError: a trainer does not compile whole epochs; they stand at different epochs; or they differ in
            something else, which is named.

    Example:
        >>> def make(seed):
        ...     return PPOJoint(RLTask('gymnax:CartPole-v1', num_envs=64, seed=seed), seed=seed)
        >>> trainers = [make(seed) for seed in range(16)]
        >>> run_together(trainers, 100, distinct=trainers[:1])
    """
    iterations = _checked(trainers, trainers if distinct is None else distinct)
    first, iteration = trainers[0], iterations[0]
    epochs = compiled(jax.vmap(iteration.epochs, in_axes=(0, None, 0)), donate_argnums=0)
    last = n_epochs if n_epochs_is_total_epochs else first.current_epoch + n_epochs
    watched = any(trainer.n_eval_episodes or trainer.on_epoch for trainer in trainers)
    carry = _stack([each.carry() for each in iterations])
    display = Progress(last) if progress and first.current_epoch < last else None
    for trainer in trainers:
        trainer._stopped = False
    saved_s = time.monotonic()
    with Interrupt(first) as interrupt:
        while first.current_epoch < last and not any(trainer._stopped for trainer in trainers):
            n = 1 if watched else iteration.n_at_once(last - first.current_epoch)
            numbers = _stack([each.numbers(n) for each in iterations])
            start = time.perf_counter()
            carry, reports = epochs(carry, np.int32(n), numbers)
            reports = jax.device_get(reports)
            seconds = (time.perf_counter() - start) / n
            for i, (trainer, own) in enumerate(zip(trainers, _unstack(carry, len(trainers)), strict=True)):
                iterations[i].put_down(own)
                one = jax.tree.map(lambda x: x[i], reports)  # noqa: B023
                records = iterations[i].take_in(one, n, seconds)
                _tell(trainer, records, display if trainer is first else None)
            if time.monotonic() - saved_s > first.checkpoint_interval_s:
                _save(trainers)
                saved_s = time.monotonic()
    if display is not None:
        display.close()
    _save(trainers)
    if interrupt.asked:
        raise KeyboardInterrupt


def _tell(trainer: RLTrainer, records: list[dict], display: Progress | None) -> None:
    for record in records:
        if display is not None:
            display.update(record)
        if trainer.on_epoch is not None:
            trainer.on_epoch(record)


def _save(trainers: Sequence[RLTrainer]) -> None:
    for trainer in trainers:
        trainer.save()


def _checked(trainers: Sequence[RLTrainer], distinct: Sequence[RLTrainer]) -> list[Iteration]:
    """The compiled epochs of trainers that can run together."""
    if not trainers:
        raise ValueError("trainers is empty; give at least one")
    first, iterations = trainers[0], []
    for trainer in trainers:
        if trainer._iteration is None:
            what = f"{type(trainer).__name__} on {trainer.task.env_name}"
            raise ValueError(
                f"{what} does not compile whole epochs, which takes a JAX environment and "
                "n_interactions_per_epoch; run the trainers one by one"
            )
        if trainer.current_epoch != first.current_epoch:
            epochs = first.current_epoch, trainer.current_epoch
            raise ValueError(f"the trainers stand at different epochs, {epochs[0]} and {epochs[1]}")
        iterations.append(trainer._iteration)
    programs = [_program(trainer) for trainer in distinct] if len(distinct) > 1 else []
    for program in programs[1:]:
        if program != programs[0]:
            pair = programs[0].splitlines(), program.splitlines()
            change = [line[1:].strip() for line in difflib.unified_diff(*pair, lineterm="", n=0)][3:5]
            raise NotOneProgramError(
                "the trainers differ in more than seeds and arguments of the compiled step; run them one "
                f"after another. The first difference of their programs: {' | '.join(change)[:300]}"
            )
    return iterations


def _program(trainer: RLTrainer) -> str:
    """What a trainer's epoch computes, with all its constants."""
    assert trainer._iteration is not None
    numbers = jax.tree.map(lambda x: x[0], trainer._iteration.numbers(1))
    return jax.jit(trainer._iteration.epoch).lower(trainer._iteration.carry(), numbers).as_text()


def _stack(trees: list) -> Any:
    return jax.tree.map(lambda *xs: jnp.stack([jnp.asarray(x) for x in xs]), *trees)


@functools.partial(jax.jit, static_argnums=1)
def _unstack(carry: Carry, n: int) -> list[Carry]:
    return [jax.tree.map(lambda x: x[i], carry) for i in range(n)]  # noqa: B023
