"""Supervised training of parts of the parameters: one loss, one optimizer, one learning rate schedule.

This is the only module that takes gradients.
"""

from __future__ import annotations

import copy
import functools
import math
from collections.abc import Callable, Iterator
from numbers import Integral, Real
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from rl_trainers import optimizers
from rl_trainers.types import PyTree, TrainState

_MIN_BLOCKS = 1 << 14

Loss = Callable[[PyTree, PyTree, Any, dict], tuple[jax.Array, dict]]
"""``(params, model_state, batch, hparams) -> (loss f32 [], metrics of f32 [])``, traced.

``hparams['key']`` is a PRNG key u32 ``[2]`` of this step, for losses that draw.
"""


def check_counts(least: int, **arguments: Any) -> None:
    """Refuses arguments that are neither ``None`` nor whole numbers of at least ``least``.

    Raises:
        ValueError: names the argument, its value and the nearest valid one.
    """
    for name, value in arguments.items():
        if value is not None and (not isinstance(value, Integral) or value < least):
            near = max(least, round(float(value))) if isinstance(value, Real) else least
            raise ValueError(
                f"{name}={value!r} must be a whole number of at least {least}; nearest valid value: {near}"
            )


class Inputs(NamedTuple):
    """Where a trainer's batches come from.

    Attributes:
        train_stream: ``n_devices -> generator of batches``; the number of devices is 1.
    """

    train_stream: Callable[[int], Iterator]


class Trainer:
    """Trains the subtrees ``trains`` of the parameters on batches.

    All methods but :meth:`draw` and :meth:`hparams` are pure functions, to be traced.
    """

    def __init__(
        self,
        loss_fn: Loss,
        optimizer: Any = None,
        lr_schedule: Any = None,
        inputs: Inputs | None = None,
        *,
        name: str = "policy",
        trains: tuple[str, ...] = ("shared", "policy", "value"),
        batch_size: int | None = 64,
        n_steps: int = 500,
        n_evals: int = 1,
        n_eval_steps: int | None = None,
    ):
        """Configures the trainer.

        Args:
            loss_fn: see :data:`Loss`.
            optimizer: see :func:`rl_trainers.optimizers.resolve`.
            lr_schedule: likewise.
            inputs: where :meth:`draw` takes batches from.
            name: key of the optimizer state in :class:`TrainState`.
            trains: keys of ``TrainState.params`` that are trained; the others are left as they are.
            batch_size: rows of a batch; ``None`` for all there are.
            n_steps: optimizer steps per epoch.
            n_evals: times per epoch that metrics are taken; changes nothing else.
            n_eval_steps: steps at the end of each of those parts whose metrics are averaged; ``None`` for
                all of them.

        Raises:
            ValueError: if a count is not positive, or there are more evaluations than steps.
        """
        check_counts(1, **{"batch_size": batch_size, "train steps per epoch": n_steps})
        if not 1 <= n_evals <= n_steps:
            raise ValueError(
                f"evals_per_epoch={n_evals} must lie between 1 and the {n_steps} training steps of an epoch"
            )
        if n_eval_steps is not None and n_eval_steps < 1:
            raise ValueError(f"eval_steps={n_eval_steps} must be at least 1")
        self.name = name
        self.batch_size = batch_size
        self.n_steps = n_steps
        self.inputs = inputs
        self._loss_fn = loss_fn
        self._per_pass: int | None = None
        self.spread: Callable[[Any], Any] = lambda batch: batch  # where the rows of a batch lie
        self._trains = trains
        self._optimizer, self._schedule = optimizers.resolve(optimizer, lr_schedule)
        self.eval_weights = eval_weights(n_steps, n_evals, n_eval_steps)
        self.clip_grad_norm = self._optimizer.clip_grad_norm

    def sized(self, batch_size: int, n_steps: int, n_passes: int) -> Trainer:
        """The same trainer with other counts, whose metrics are means over all steps.

        Its ``n_steps`` are ``n_passes`` over the valid rows, however few of the rows these are.
        """
        other = copy.copy(self)
        other.batch_size, other.n_steps = batch_size, n_steps
        other._per_pass = n_steps // n_passes
        other.eval_weights = eval_weights(n_steps, 1, None)
        return other

    def _split(self, params: PyTree) -> tuple[PyTree, PyTree]:
        mine = {name: tree for name, tree in params.items() if name in self._trains}
        return mine, {name: tree for name, tree in params.items() if name not in self._trains}

    def init(self, params: PyTree) -> PyTree:
        """The optimizer state for ``params``."""
        return self._optimizer.init(self._split(params)[0])

    def hparams(self, step: int) -> dict[str, Any]:
        """Numbers of the next epoch that are arguments of the compiled step.

        Args:
            step: steps that this trainer has taken.

        Returns:
            ``{'learning_rate': f32 [n_steps], 'clip_grad_norm': f32 []}``.
        """
        rates = optimizers.learning_rates(self._schedule, step, self.n_steps)
        return {"learning_rate": rates, "clip_grad_norm": np.float32(self.clip_grad_norm)}

    def update(
        self, state: TrainState, batch: Any, mine: dict, hparams: dict
    ) -> tuple[TrainState, dict]:
        """Takes one optimizer step.

        Args:
            state: parameters and optimizer state.
            batch: what the loss takes, usually a :class:`rl_trainers.types.Batch` ``[N, L]``.
            mine: ``learning_rate`` and ``clip_grad_norm``, f32 scalars.
            hparams: numbers for the loss.

        Returns:
            ``(state, metrics)``; the metrics of the loss, ``grad_norm`` as it came, and
            ``clipped_grad_norm`` as it entered the optimizer.
        """
        batch = self.spread(batch)
        trained, fixed = self._split(state.params)

        def loss_fn(trained):
            return self._loss_fn({**fixed, **trained}, state.model_state, batch, hparams)

        grads, metrics = jax.grad(loss_fn, has_aux=True)(trained)
        norm = optax.tree.norm(grads)
        scale = jnp.minimum(1.0, mine["clip_grad_norm"] / jnp.maximum(norm, 1e-12))
        grads = jax.tree.map(lambda g: g * scale, grads)
        opt_state = state.opt_state[self.name]
        if "learning_rate" in getattr(opt_state, "hyperparams", {}):
            injected = {**opt_state.hyperparams, "learning_rate": mine["learning_rate"]}
            opt_state = opt_state._replace(hyperparams=injected)
        updates, opt_state = self._optimizer.update(grads, opt_state, trained)
        trained = optax.apply_updates(trained, updates)
        metrics = {**metrics, "grad_norm": norm, "clipped_grad_norm": norm * scale}
        state = state._replace(
            params={**fixed, **trained},
            opt_state={**state.opt_state, self.name: opt_state},
            step=state.step + 1,
        )
        return state, metrics

    def fit(
        self, state: TrainState, rows: Any, valid: jax.Array, hparams: dict, num_envs: int = 1
    ) -> tuple[TrainState, dict]:
        """Takes ``n_steps`` optimizer steps over shuffled rows, in one scan.

        The rows are visited in one random permutation after another, each cut into batches of at most
        ``batch_size`` rows whose sizes differ by at most one; a batch that is not full is filled up with
        masked rows. Where there are many rows, blocks of neighbours are permuted, see :func:`block_size`.

        Args:
            state: consumed.
            rows: record with leading axes ``[R, L]`` that has a field ``mask``, such as a ``Batch``.
            valid: bool ``[R]``, rows to visit; of a block that has one, the others are masked.
            hparams: numbers for the loss, and this trainer's own under its name.
            num_envs: ``num_envs`` rows in turn are of different environments.

        Returns:
            ``(state, metrics)``, metrics as ``eval_steps`` and ``evals_per_epoch`` ask for them.
        """
        state, batches = self._shuffle(state, valid, num_envs)
        steps = self._steps(batches, hparams)
        return self._scan(state, functools.partial(_take, rows), steps, hparams)

    def fit_parts(
        self, state: TrainState, judge: Callable, valid: jax.Array, hparams: dict, n_parts: int
    ) -> tuple[TrainState, dict]:
        """Like :meth:`fit`, with the rows judged anew before each of ``n_parts`` equal parts of the steps.

        Args:
            state: consumed.
            judge: ``(state, first step of the part i32 []) -> (state, rows)``, traced.
            valid: bool ``[R]``, rows to visit.
            hparams: see :meth:`fit`.
            n_parts: divides ``n_steps``.
        """
        state, batches = self._shuffle(state, valid)
        parts = (jnp.arange(0, self.n_steps, self.n_steps // n_parts), self._steps(batches, hparams))
        parts = jax.tree.map(lambda x: x.reshape(n_parts, -1, *x.shape[1:]), parts)

        def part(state, x):
            first, steps = x
            state, rows = judge(state, first[0])
            return self._scan(state, functools.partial(_take, rows), steps, hparams)

        state, metrics = jax.lax.scan(part, state, parts)
        return state, jax.tree.map(lambda m: jnp.sum(m, 0), metrics)

    def fit_batches(
        self, state: TrainState, batches: Any, hparams: dict
    ) -> tuple[TrainState, dict]:
        """Takes one optimizer step per batch, in one scan.

        Args:
            state: consumed.
            batches: records stacked along a leading axis ``[n_steps]``, see :meth:`draw`.
            hparams: numbers for the loss, and this trainer's own under its name.

        Returns:
            ``(state, metrics)`` as :meth:`fit`.
        """
        return self._scan(state, lambda batch: batch, self._steps(batches, hparams), hparams)

    def _shuffle(
        self, state: TrainState, valid: jax.Array, num_envs: int = 1
    ) -> tuple[TrainState, tuple]:
        """See :func:`shuffled`; of blocks of rows."""
        key, key_shuffle = jax.random.split(state.key)
        n_rows = valid.shape[0]
        batch_size = min(self.batch_size or n_rows, n_rows)
        block = block_size(n_rows, batch_size, num_envs)
        visited = jnp.any(valid.reshape(-1, block), axis=1)
        index, keep = shuffled(key_shuffle, visited, batch_size // block, self.n_steps, self._per_pass)
        return state._replace(key=key), (index, keep[..., None] * valid.reshape(-1, block)[index])

    def _steps(self, batches: Any, hparams: dict) -> tuple:
        """What each step takes: its batch, its learning rate, its weight in the metrics."""
        return batches, hparams[self.name]["learning_rate"], jnp.asarray(self.eval_weights)

    def _scan(
        self, state: TrainState, take: Callable[[Any], Any], steps: tuple, hparams: dict
    ) -> tuple[TrainState, dict]:
        """Takes one optimizer step on ``take(x)`` for each of ``steps``."""
        mine = hparams[self.name]
        # The first two keys of this split are those of the next shuffle.
        key_loss = jax.random.split(state.key, 3)[2]

        def step(state, x):
            x, rate, weight = x
            drawn = {**hparams, "key": jax.random.fold_in(key_loss, state.step)}
            state, metrics = self.update(state, take(x), {**mine, "learning_rate": rate}, drawn)
            return state, jax.tree.map(lambda m: m * weight, metrics)

        state, metrics = jax.lax.scan(step, state, steps)
        return state, jax.tree.map(lambda m: jnp.sum(m, 0), metrics)

    def draw(self) -> Any:
        """Takes ``n_steps`` batches from ``inputs`` and stacks them along a new leading axis."""
        if self.inputs is None:
            raise ValueError("this trainer was given no inputs to draw batches from")
        stream = self.inputs.train_stream(1)
        batches = [next(stream) for _ in range(self.n_steps)]
        return jax.tree.map(lambda *leaves: np.stack(leaves), *batches)


def _take(rows: Any, batch: tuple[jax.Array, jax.Array]) -> Any:
    """A batch ``[N, L]`` of ``rows [R, L]``; ``[1, N]`` if L is 1.

    Args:
        rows: record that has a field ``mask``.
        batch: ``(index i32 [N / block], keep f32 [N / block, block])``, numbers of blocks and what counts.
    """
    index, keep = batch
    # XLA's loops over the rows of an array that is one wide take many times longer.
    is_single = rows.mask.shape[1] == 1

    def take(x):
        shape = (1, -1, *x.shape[2:]) if is_single else (keep.size, *x.shape[1:])
        return x.reshape(-1, keep.shape[1], *x.shape[1:])[index].reshape(shape)

    taken = jax.tree.map(take, rows)
    return taken._replace(mask=taken.mask * keep.reshape((1, -1) if is_single else (-1, 1)))


def block_size(n_rows: int, batch_size: int, num_envs: int) -> int:
    """How many neighbouring rows are shuffled as one: a power of two.

    A shuffle of single rows costs a quarter of the update where there are many. Neighbours are rows of
    different environments at the same time, which have little to do with one another; the largest block is
    taken that divides environments and batch and leaves ``_MIN_BLOCKS`` blocks, so that a batch is still made
    of many, and small runs shuffle row by row.

    Args:
        n_rows: ``R``.
        batch_size: rows of a batch.
        num_envs: rows in turn that are of different environments; divides ``n_rows``.
    """
    block = math.gcd(n_rows, num_envs, batch_size)
    block &= -block
    while block > 1 and n_rows // block < _MIN_BLOCKS:
        block //= 2
    return block


def shuffled(
    key: jax.Array, valid: jax.Array, batch_size: int, n_steps: int, per_pass: Any = None
) -> tuple[jax.Array, jax.Array]:
    """Row numbers of ``n_steps`` batches: permutations of the valid rows, cut into equal batches.

    Args:
        key: u32 ``[2]``; consumed.
        valid: bool ``[R]``.
        batch_size: rows of a batch.
        n_steps: batches.
        per_pass: batches of a pass, enough for all rows, or one for each valid row if there are fewer;
            ``None`` for ``ceil(valid rows / batch_size)``.

    Returns:
        ``(index i32 [n_steps, batch_size], keep f32 [n_steps, batch_size])``; entries with ``keep`` 0 fill
        up. Every valid row comes exactly once in each pass.
    """
    n_rows = valid.shape[0]
    count = jnp.maximum(jnp.sum(valid), 1)
    order = permutations(key, valid, -(-n_steps // -(-n_rows // batch_size)))
    n_passes = order.shape[0]
    per_pass = -(-count // batch_size) if per_pass is None else jnp.minimum(per_pass, count)
    step = jnp.arange(n_steps)
    part = step % per_pass
    small, larger = count // per_pass, count % per_pass
    start = part * small + jnp.minimum(part, larger)
    size = small + (part < larger)
    offset = jnp.arange(batch_size)
    position = jnp.minimum(start[:, None] + offset, n_rows - 1)
    # Fewer valid rows make more passes than there are permutations; then they come round again.
    index = order[(step // per_pass % n_passes)[:, None], position]
    return index, (offset < size[:, None]).astype(jnp.float32)


def permutations(key: jax.Array, valid: jax.Array, n: int) -> jax.Array:
    """Random orders of all rows in which the valid ones stand in front, i32 ``[n, R]``.

    Args:
        key: u32 ``[2]``; consumed.
        valid: bool ``[R]``.
        n: how many orders.
    """
    n_rows = valid.shape[0]
    bits = jax.random.bits(key, (n, n_rows), jnp.uint32) >> 1
    bits = jnp.where(valid, bits, bits | jnp.uint32(1 << 31))
    width = (n_rows - 1).bit_length()
    if width > 15:
        return jnp.argsort(bits, axis=-1).astype(jnp.int32)
    # Sorting numbers costs a tenth of sorting pairs; 16 random bits or more are left above the row number.
    tagged = bits >> width << width | jnp.arange(n_rows, dtype=jnp.uint32)
    return (jnp.sort(tagged, axis=-1, stable=False) & ((1 << width) - 1)).astype(jnp.int32)


def eval_weights(n_steps: int, n_evals: int, n_eval_steps: int | None) -> np.ndarray:
    """Weight of each training step in an epoch's metrics, f32 ``[n_steps]``, sum 1.

    The steps are cut into ``n_evals`` parts of equal size (sizes differ by at most one: 10 steps and 3
    evaluations make 4 + 3 + 3), and the last ``n_eval_steps`` of each part count.
    """
    weights = np.zeros(n_steps, np.float32)
    for part in np.array_split(np.arange(n_steps), n_evals):
        weights[part[-(n_eval_steps or len(part)) :]] = 1.0
    return weights / weights.sum()
