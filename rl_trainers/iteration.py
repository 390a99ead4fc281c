"""Whole epochs as one compiled program, for JAX environments: unroll, keep, learn, gather.

The parts are those that epochs over environments in Python have too; only the loop around them is here.
"""

from __future__ import annotations

import functools
import math
import time
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from rl_trainers import replay, rollout, sharding
from rl_trainers.acting import compiled
from rl_trainers.envs.native import DeviceEnv, Envs
from rl_trainers.rollout import Endings
from rl_trainers.types import ActorState, PyTree, Rollout, TrainState

if TYPE_CHECKING:
    from rl_trainers.trainer import RLTrainer

MOST_EPOCHS = 32
"""Epochs of one call at most."""

_CALL_S = 0.2

N_LATEST = 100
"""Newest returns that a :class:`Report` names."""


class Kept(NamedTuple):
    """Rows to train on, the oldest first.

    Attributes:
        rollout: ``[C, B]``; rows that are not filled, or too old, have mask 0.
        epoch: i32 ``[C]``.
    """

    rollout: Rollout
    epoch: Any


class Carry(NamedTuple):
    """What an epoch begins with.

    Attributes:
        state: parameters and what belongs to them.
        actor: where the environments stand.
        kept: :class:`Kept`; ``()`` for on-policy trainers.
    """

    state: TrainState
    actor: ActorState
    kept: Any = ()


class Report(NamedTuple):
    """What an epoch brought.

    Attributes:
        metrics: f32 ``[]`` by name.
        n_interactions: i32 ``[]``, decisions taken.
        n_trajectories: i32 ``[]``, trajectories finished.
        n_episodes: i32 ``[]``, episodes that ended.
        return_sum: f32 ``[]``, of those.
        length_sum: f32 ``[]``, likewise.
        latest: f32 ``[100]``, the newest of their returns, the newest first; NaN fills up.
        is_finite: bool ``[]``, whether all rewards and observations are.
    """

    metrics: dict[str, Any]
    n_interactions: Any
    n_trajectories: Any
    n_episodes: Any
    return_sum: Any
    length_sum: Any
    latest: Any
    is_finite: Any


def report(metrics: dict, steps: Any, endings: Endings, max_steps: int | None) -> Report:
    """Counts an unroll ``[T, B]``; traced.

    Args:
        metrics: of the training that followed it.
        steps: facts.
        endings: the episodes that ended.
        max_steps: decisions after which a trajectory is cut while its episode goes on; ``None``: never.
    """
    decided, ended = steps.mask > 0, endings.mask
    n_episodes = jnp.sum(ended)
    cut = jnp.int32(0)
    if max_steps is not None:
        cut = jnp.sum(decided & ~ended & (endings.lengths % max_steps == 0))
    index = jnp.nonzero(ended.reshape(-1)[::-1], size=N_LATEST, fill_value=-1)[0]
    latest = endings.returns.reshape(-1)[::-1][index]
    return Report(
        metrics=metrics,
        n_interactions=jnp.sum(decided),
        n_trajectories=n_episodes + cut,
        n_episodes=n_episodes,
        return_sum=jnp.sum(jnp.where(ended, endings.returns, 0.0)),
        length_sum=jnp.sum(jnp.where(ended, endings.lengths, 0).astype(jnp.float32)),
        latest=jnp.where(index >= 0, latest, jnp.nan),
        is_finite=rollout.all_finite(steps),
    )


def keep_stored(data: Rollout, epoch: np.ndarray, size: int) -> Kept:
    """What a replay on the host holds, as :class:`Kept`.

    Args:
        data: host arrays ``[C, B]``, stored rows first, see :func:`rl_trainers.replay.ordered`.
        epoch: i32 ``[size]``.
        size: rows stored.
    """
    capacity = len(data.steps.mask)
    steps = data.steps._replace(return_=None)
    if size:
        # A row without a decision holds the successor of the last one.
        end = jax.tree.map(lambda x: np.zeros_like(x[:1]), steps)
        end = end._replace(observation=jax.tree.map(lambda x: x[None], data.last_observation))
        steps = jax.tree.map(lambda x, y: np.concatenate([x[size:], x[:size], y]), steps, end)
        epoch = np.concatenate([np.full(capacity - size, -1), epoch, epoch[-1:]])
    else:
        epoch = np.full(capacity, -1)
    return Kept(data._replace(steps=steps, policy_version=np.int32(0)), epoch.astype(np.int32))


def keep(kept: Kept, data: Rollout, epoch: Any, n_replay_epochs: int) -> Kept:
    """Takes in an epoch's rows ``[T, B]`` and lets go of the oldest; traced.

    Where something else has stepped the environments in between, the newest row kept has lost its successor,
    and becomes that of the row before it.

    Args:
        kept: consumed.
        data: facts.
        epoch: i32 ``[]``.
        n_replay_epochs: newest epochs whose rows count.
    """
    before = kept.rollout.steps
    length = min(len(data.steps.mask), len(before.mask))
    goes_on = _same(kept.rollout.last_observation, jax.tree.map(lambda x: x[0], data.steps.observation))
    before = before._replace(mask=jnp.asarray(before.mask).at[-1].multiply(goes_on))
    steps = jax.tree.map(lambda old, new: jnp.concatenate([old[length:], new[-length:]]), before, data.steps)
    epochs = jnp.concatenate([kept.epoch[length:], jnp.full(length, epoch, jnp.int32)])
    wanted = (epochs > epoch - n_replay_epochs).astype(jnp.float32)
    steps = steps._replace(mask=steps.mask * wanted[:, None])
    return Kept(Rollout(steps, data.last_observation, kept.rollout.policy_version), epochs)


def oldest_first(rollout: Rollout) -> Rollout:
    """Puts rows in front that hold nothing, or are too old, behind the others; traced.

    The state of a recurrent model is recorded for the row that comes first, and would otherwise be that of a
    first row after those.

    Args:
        rollout: ``[C, B]`` of :class:`Kept`.
    """
    n_rows = len(rollout.steps.mask)
    start = jnp.argmax(jnp.any(rollout.steps.mask > 0, axis=1))
    steps = jax.tree.map(lambda x: jnp.roll(x, -start, axis=0), rollout.steps)
    pair = steps.observation, rollout.last_observation
    observation = jax.tree.map(lambda x, last: x.at[n_rows - start].set(last, mode="drop"), *pair)
    return rollout._replace(steps=steps._replace(observation=observation))


def resized(kept: Kept, capacity: int) -> Kept:
    """The newest ``capacity`` rows of host arrays, or empty ones in front of all of them."""
    n_new = max(0, capacity - len(kept.epoch))

    def fit(x):
        return np.concatenate([np.zeros_like(x, shape=(n_new, *x.shape[1:])), x[-capacity:]])

    steps = jax.tree.map(fit, kept.rollout.steps)
    epoch = np.where(np.arange(capacity) < n_new, np.int32(-1), fit(kept.epoch))
    return Kept(kept.rollout._replace(steps=steps), epoch)


def _same(first: PyTree, second: PyTree) -> jax.Array:
    """Whether observations ``[B, *obs]`` are equal, bool ``[B]``."""
    pairs = zip(jax.tree.leaves(first), jax.tree.leaves(second), strict=True)
    equal = [jnp.all((x == y).reshape(len(x), -1), axis=1) for x, y in pairs]
    return jnp.all(jnp.stack(equal), axis=0)


class Iteration:
    """The epochs of a trainer.

    Args:
        trainer: one of a task with JAX environments, whose epochs are counted in interactions.
        n_replay_epochs: see :func:`keep`.

    Attributes:
        kept: :class:`Kept`, what is there to train on; ``()`` for on-policy trainers.
        epochs_per_call: epochs that take about a fifth of a second, once that is known.
    """

    def __init__(self, trainer: RLTrainer, n_replay_epochs: int):
        self._trainer, self._n_replay_epochs = trainer, n_replay_epochs
        task = trainer.task
        self._env, self._to_env = task.env.functions, task.distribution.to_env
        self._unroll_length = (trainer.n_interactions_per_epoch or 0) // task.env.num_envs
        self.kept: Any = self._first_kept()
        self.epochs_per_call = 1
        self._knows_seconds = False
        self.place({})

    def place(self, shardings: dict[str, Any]) -> None:
        """Says where arguments and results of the compiled epochs lie."""
        self._epochs = compiled(self.epochs, donate_argnums=0, **shardings)

    def _first_kept(self) -> Any:
        """What the task has stored at the start of a run, for trainers that learn from it."""
        stored: replay.Replay = self._trainer.task.replay
        if self._trainer.on_policy:
            return ()
        epoch = stored.epoch[stored.rows(np.arange(stored.size))]
        return keep_stored(self._trainer.task.replayed(), epoch, stored.size)

    def state_dict(self) -> dict[str, np.ndarray]:
        """What is kept, by name."""
        return {f"kept_{i}": np.array(x) for i, x in enumerate(jax.tree.leaves(self.kept))}

    def load_state_dict(self, tree: dict[str, np.ndarray]) -> None:
        """Continues from what :meth:`state_dict` returned."""
        like, structure = jax.tree.flatten(self.kept)
        kept = jax.tree.unflatten(structure, [np.array(tree[f"kept_{i}"]) for i in range(len(like))])
        self.kept = jax.tree.map(jnp.array, resized(kept, len(self.kept.epoch)))

    # The parts of a call, which trainers that are run together share.

    def run(self, n_left: int) -> list[dict[str, float]]:
        """Runs as many epochs as take about a fifth of a second, up to ``n_left``; their records."""
        n = self.n_at_once(n_left)
        start = time.perf_counter()
        carry, reports = self._epochs(self.carry(), np.int32(n), self.numbers(n))
        self.put_down(carry)
        reports = jax.device_get(reports)
        return self.take_in(reports, n, (time.perf_counter() - start) / n)

    def n_at_once(self, n_left: int) -> int:
        """Epochs of the next call."""
        watched = self._trainer.n_eval_episodes or self._trainer.on_epoch is not None
        return 1 if watched else min(n_left, self.epochs_per_call)

    def carry(self) -> Carry:
        """What the next call begins with, and consumes."""
        return Carry(self._trainer.state, self._trainer.task.device_actor(), self.kept)

    def put_down(self, carry: Carry) -> None:
        """Takes over what a call ended with."""
        self._trainer.state, actor, self.kept = carry
        self._trainer.task.went_on(actor)

    def numbers(self, n: int) -> dict:
        """What :meth:`epochs` takes as ``hparams`` for ``n`` epochs."""
        now = self._trainer.current_epoch + 1
        epochs = np.arange(now, now + n, dtype=np.int32)
        return stacked([{**self._trainer.hparams(i), "epoch": epoch} for i, epoch in enumerate(epochs)])

    def take_in(self, reports: Report, n: int, seconds: float) -> list[dict[str, float]]:
        """Counts the epochs of a call, ``seconds`` each; their records."""
        if self._knows_seconds:
            self.epochs_per_call = min(MOST_EPOCHS, max(1, int(_CALL_S / seconds)))
        self._knows_seconds = True
        return [self._count(jax.tree.map(lambda x: x[i], reports), seconds) for i in range(n)]  # noqa: B023

    def _count(self, report: Report, seconds: float) -> dict[str, float]:
        trainer, n_episodes = self._trainer, int(report.n_episodes)
        trainer._check_finite(report.is_finite)
        trainer.task.count(int(report.n_interactions), int(report.n_trajectories))
        counts = {
            "avg_return": float(report.return_sum) / n_episodes if n_episodes else math.nan,
            "avg_length": float(report.length_sum) / n_episodes if n_episodes else math.nan,
            "n_trajectories": n_episodes,
        }
        result = {name: float(value) for name, value in report.metrics.items()}
        latest = report.latest[np.isfinite(report.latest)][::-1]
        began = time.perf_counter() - seconds
        return trainer._finish_epoch(began, counts, latest, {"epoch_s": seconds, **result})

    # What is compiled.

    def epoch(self, carry: Carry, hparams: dict) -> tuple[Carry, Report]:
        """One epoch; traced.

        Args:
            carry: consumed.
            hparams: see :meth:`rl_trainers.trainer.RLTrainer.hparams`, and ``epoch`` i32, counted from 1.
        """
        trainer, (state, actor, kept) = self._trainer, carry
        act = trainer.acting.acting(state.params, state.model_state, trainer.collect_temperature)
        actor, data, endings = rollout.unroll_scan(
            self._env, act, actor, self._unroll_length, self._to_env
        )
        if not trainer.use_rollout_state:  # which the replay does not keep either
            data = data._replace(steps=data.steps._replace(policy_state=()))
        seen = trained = trainer._see_rollout(data._replace(policy_version=state.step))
        if not trainer.on_policy:
            kept = keep(kept, data, hparams["epoch"], self._n_replay_epochs)
            rows = oldest_first(kept.rollout) if trainer.is_recurrent else kept.rollout
            trained = trainer._see_rollout(rows)
        state, metrics = trainer.learn(state, trained, hparams)
        state = state._replace(model_state=self._gather(state, seen, trained, hparams["epoch"]))
        counts = report(metrics, data.steps, endings, trainer.task.max_steps)
        return Carry(state, actor, kept), counts

    def _gather(self, state: TrainState, seen: Rollout, trained: Rollout, epoch: Any) -> PyTree:
        """The models' statistics; the first epoch takes in what was stored before it too."""
        gather = self._trainer.gather
        if self._trainer.on_policy or not jax.tree.leaves(state.model_state):
            return gather(state, seen)
        return jax.lax.cond(epoch == 1, lambda: gather(state, trained), lambda: gather(state, seen))

    def epochs(self, carry: Carry, n: Any, hparams: PyTree) -> tuple[Carry, Report]:
        """Several epochs; traced.

        Args:
            carry: consumed.
            n: i32 ``[]``, how many; up to :data:`MOST_EPOCHS`.
            hparams: with a leading axis of that length.

        Returns:
            ``(carry, report)``; the report has the same leading axis, of which the first ``n`` count.
        """

        def step(i, x):
            carry, reports = x
            carry, one = self.epoch(carry, jax.tree.map(lambda h: h[i], hparams))
            return carry, jax.tree.map(lambda all_, new: all_.at[i].set(new), reports, one)

        shapes = jax.eval_shape(self.epoch, carry, jax.tree.map(lambda h: h[0], hparams))[1]
        reports = jax.tree.map(lambda x: jnp.zeros((MOST_EPOCHS, *x.shape), x.dtype), shapes)
        return jax.lax.fori_loop(0, n, step, (carry, reports))


def share(trainer: RLTrainer, n_devices: int | None) -> int:
    """Shares the work of a trainer among devices, as equally as the environments; how many it were.

    Args:
        trainer: whose compiled epochs, if it has any, know it then.
        n_devices: ``None`` for all, but for one where epochs are not compiled as a whole.

    Raises:
        ValueError: if counts do not divide, or several devices cannot be used.
    """
    mesh = sharding.make_mesh(n_devices, _why_one_device(trainer))
    if mesh is None:
        return 1
    sharding.check_divides(mesh, "num_envs", trainer.task.env.num_envs)
    for each in trainer._trainers:
        name = f"the {each.name} trainer's batch_size"
        sharding.check_divides(mesh, name, each.batch_size or mesh.size)
        each.spread = functools.partial(sharding.spread, mesh)
    every, carry = sharding.everywhere(mesh), shardings(mesh, trainer.on_policy)
    assert trainer._iteration is not None
    trainer._iteration.place({"in_shardings": (carry, every, every), "out_shardings": (carry, every)})
    return mesh.size


def _why_one_device(trainer: RLTrainer) -> str:
    """Why several devices cannot be used; empty if they can."""
    env = trainer.task.env
    if not isinstance(env, DeviceEnv):
        return "environments in Python are stepped one vector step at a time"
    if trainer._one_device or trainer._iteration is not None:
        return trainer._one_device or ("" if env.num_envs > 1 else "there is one environment")
    return (
        "epochs are not compiled as a whole, which takes n_interactions_per_epoch, networks that see "
        "single rows, a timestep_to_np of JAX functions, no stream of one's own, and neither offline nor "
        "only_eval"
    )


def shardings(mesh: Mesh, on_policy: bool) -> Any:
    """Where the arrays of a :class:`Carry` lie: every device has its environments, and all of the rest."""
    every: Any = sharding.everywhere(mesh)
    envs: Any = sharding.along(mesh, 0)
    rows: Any = sharding.along(mesh, 1)
    kept = every if on_policy else Kept(Rollout(rows, envs, every), every)
    return Carry(every, ActorState(Envs(envs, every), envs, envs, envs, every, envs, envs), kept)


def stacked(hparams: list[dict]) -> dict:
    """Numbers of successive epochs, with a leading axis of :data:`MOST_EPOCHS`; the last fill up."""
    filled = hparams + hparams[-1:] * (MOST_EPOCHS - len(hparams))
    return jax.tree.map(lambda *xs: np.stack(xs), *filled)
