"""The epoch loop that all trainers share: collect, train, evaluate, write, checkpoint.

A trainer class is a list of supervised trainers and a :meth:`RLTrainer.make_batch`; the loop below and
:meth:`RLTrainer.learn` are the same for all.
"""

from __future__ import annotations

import copy
import difflib
import functools
import inspect
import logging
import math
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from numbers import Integral
from typing import Any

import gymnasium as gym
import jax
import jax.numpy as jnp
import numpy as np

from rl_trainers import checkpoint, metrics, models, rollout, windows
from rl_trainers.acting import Acting, compiled, see
from rl_trainers.advantages import Estimator
from rl_trainers.envs.native import DeviceEnv
from rl_trainers.iteration import N_LATEST, Iteration, share
from rl_trainers.losses import probability_ratio
from rl_trainers.supervised import Inputs, Trainer, shuffled
from rl_trainers.task import RLTask, Trajectory
from rl_trainers.types import Batch, PyTree, Rollout, Seen, TimeStep, TrainState

_log = logging.getLogger(__name__)

_ELSEWHERE = {
    "learning_rate": ("lr_schedule", "policy_lr_schedule", "value_lr_schedule"),
    "lr": ("lr_schedule", "policy_lr_schedule", "value_lr_schedule"),
    "policy_kwargs": ("joint_model", "policy_model", "value_model"),
    "policy": ("joint_model", "policy_model", "value_model"),
    "net_arch": ("joint_model", "policy_body", "policy_model", "value_body"),
    "n_steps": ("n_interactions_per_epoch",),
    "n_epochs": ("train_steps_per_epoch", "policy_train_steps_per_epoch"),
    "gradient_steps": ("train_steps_per_epoch", "value_train_steps_per_epoch"),
    "clip_range": ("epsilon",),
    "ent_coef": ("entropy_coeff",),
    "vf_coef": ("value_loss_coeff",),
    "gae_lambda": ("advantage_estimator",),
    "tau": ("target_tau",),
    "buffer_size": ("replay_capacity",),
    "learning_starts": ("initial_collect_steps",),
    "exploration_fraction": ("exploration_rate",),
    "target_update_interval": ("sync_freq", "target_sync"),
    "tensorboard_log": ("output_dir",),
}
"""What the arguments of stable-baselines3 are called here; the first that a trainer has is named."""

_ASIDE = 2**30

DRIVERS: dict[str, Callable] = {}
"""``'make'``: what makes a trainer's driver; :mod:`rl_trainers.drivers` puts it here."""


class RLTrainer:
    """Alternates between collecting data with the current policy and training on it. Abstract.

    Subclasses call ``super().__init__``, build their models and supervised trainers, and end their
    constructor with :meth:`_start`. They implement :meth:`policy_apply`, :meth:`make_batch` and
    :meth:`gather`, which are traced.
    """

    hyperparameters: tuple[str, ...] = ()
    """Names of the attributes that losses receive as arguments of the compiled step."""

    on_policy = True
    """Whether only the newest epoch's data may be trained on."""

    bears_lag: Any = False
    """Whether data of a policy some updates old may be learned from."""

    collect_temperature = 1.0
    """Temperature at which training data are collected."""

    _saved_parts: tuple[str, ...] = ("train", "task", "loop")
    _one_device = ""
    _stopped = False

    def __init__(
        self,
        task: RLTask,
        n_trajectories_per_epoch: int | None = None,
        n_interactions_per_epoch: int | None = None,
        n_eval_episodes: int = 0,
        eval_steps: Sequence[int | None] | None = None,
        eval_temperatures: Sequence[float] = (0.0,),
        only_eval: bool = False,
        output_dir: str | None = None,
        *,
        n_replay_epochs: int = 1,
        max_slice_length: int = 1,
        use_rollout_state: bool = True,
        offline: bool = False,
        seed: int = 0,
        n_devices: int | None = None,
        driver: Any = None,
        collect_per_epoch: int | None = None,
        checkpoint_interval_s: float = 30.0,
        on_epoch: Callable[[dict], None] | None = None,
        on_eval: Callable[[dict], None] | None = None,
        **unknown,
    ):
        """Configures the loop.

        Args:
            task: the environment to train on and its replay.
            n_trajectories_per_epoch: trajectories to collect per epoch.
            n_interactions_per_epoch: vector rows times environments to collect per epoch. At most one of
                the two may be given; with neither it is 2048, and at least 32 rows.
            n_eval_episodes: episodes to evaluate on after each epoch's training; 0 for none.
            eval_steps: step limits to evaluate with, ``None`` for the task's own.
            eval_temperatures: temperatures to evaluate at; 0 acts greedily.
            only_eval: collect on the evaluation environment and record nothing, so that training sees
                only data that the task already has.
            output_dir: where metrics and checkpoints go; a run found there is continued.
            n_replay_epochs: newest epochs to train on; more than 1 is for off-policy algorithms only.
            max_slice_length: ``L`` of the batches; a sequence model sees at least the last ``L`` rows of its
                episode, see :mod:`rl_trainers.windows`.
            use_rollout_state: train slices of a recurrent model from the state that it was in when their
                first row was collected, which is stored; else from that of the first row of an episode.
            offline: train on the data that the task already has and take no step of an environment but in
                evaluations; for off-policy algorithms only.
            seed: of parameters and training. Environments and actions are seeded by the task.
            n_devices: devices that share JAX environments and batches equally, with the result of one;
                ``None`` for all of the process, but for one where epochs are not compiled as a whole.
            driver: who steps the environments, see :mod:`rl_trainers.drivers`: ``'on_policy'`` or ``'sync'``,
                this loop itself; ``'async'``, threads that go on while this process learns; ``'ray'``,
                processes on one or many machines; or a function that makes a driver, called with
                ``algorithm``, such as ``functools.partial(AsyncOffPolicyDriver, num_envs=4)``. ``None`` for
                this loop.
            collect_per_epoch: old name of ``n_trajectories_per_epoch``.
            checkpoint_interval_s: least seconds between two checkpoints; :meth:`run` always ends with one.
            on_epoch: called with the record of each epoch.
            on_eval: called with the record of each evaluation.
            **unknown: none are known.

        Raises:
            TypeError: for an argument that does not exist; names the nearest that does.
            ValueError: if arguments contradict one another or are out of range.
        """
        for name in unknown:
            raise _unknown(type(self), name)
        if not isinstance(task, RLTask):
            raise TypeError(f"task={task!r} must be an RLTask, such as RLTask({task!r})")
        if n_trajectories_per_epoch is None:
            n_trajectories_per_epoch = collect_per_epoch
        elif collect_per_epoch is not None:
            raise ValueError("collect_per_epoch is the old name of n_trajectories_per_epoch: give one")
        if n_trajectories_per_epoch is not None and n_interactions_per_epoch is not None:
            raise ValueError(
                f"n_trajectories_per_epoch={n_trajectories_per_epoch} and n_interactions_per_epoch="
                f"{n_interactions_per_epoch} exclude one another: give one"
            )
        if n_trajectories_per_epoch is None and n_interactions_per_epoch is None:
            least = 32 * task.env.num_envs  # so that many environments are still looked at for a while
            n_interactions_per_epoch = _nearest_multiple(max(2048, least), task.env.num_envs)
        if n_interactions_per_epoch is not None:
            _check_multiple("n_interactions_per_epoch", n_interactions_per_epoch, task.env.num_envs)
        if max_slice_length < 1:
            raise ValueError(f"max_slice_length={max_slice_length} must be at least 1")
        if self.on_policy and n_replay_epochs != 1:
            raise ValueError(
                f"n_replay_epochs={n_replay_epochs}: {type(self).__name__} is on-policy and can train on "
                "the newest epoch only; nearest valid value: 1"
            )
        if offline and (self.on_policy or not task.replay.size):
            why = (
                f"{type(self).__name__} is on-policy and trains on what it collects itself"
                if self.on_policy
                else "there is nothing to train on: give the task initial_trajectories"
            )
            raise ValueError(f"offline=True: {why}; nearest valid value: False")
        self.task = task
        self._n_replay_epochs = n_replay_epochs
        self.n_trajectories_per_epoch = n_trajectories_per_epoch
        self.n_interactions_per_epoch = n_interactions_per_epoch
        self.n_eval_episodes = n_eval_episodes
        self.eval_steps = _listed("eval_steps", [None] if eval_steps is None else eval_steps)
        self.eval_temperatures = _listed("eval_temperatures", eval_temperatures)
        self.only_eval = only_eval
        self.offline = offline
        self.output_dir = output_dir
        self.max_slice_length, self.use_rollout_state = max_slice_length, use_rollout_state
        self.seed, self.n_devices, self._driver_name, self._driver = seed, n_devices, driver, None
        self.checkpoint_interval_s = checkpoint_interval_s
        self.on_epoch = on_epoch
        self.on_eval = on_eval
        self.observation_space = self._seen_space()
        task.set_n_replay_epochs(n_replay_epochs)
        if n_interactions_per_epoch is not None and not self.on_policy and not offline:
            task.reserve(n_replay_epochs * (n_interactions_per_epoch // task.env.num_envs))
        self._epoch = 0
        self._wall_s = 0.0
        self._avg_returns: list[float] = []
        self._eval_returns: dict[str, list[float]] = {}
        self._recent: deque[float] = deque(maxlen=N_LATEST)
        self._saved_epoch = -1
        self._writer: metrics.MetricsWriter | None = None
        self._lock: Any = None
        self._learners: dict[tuple, tuple[RLTrainer, Callable]] = {}

    # What models see.

    def _see(self, observation: PyTree) -> PyTree:
        """``task.timestep_to_np`` applied to observations with any leading axes."""
        return see(self.task.timestep_to_np, observation)

    def _see_rollout(self, data: Rollout, window: windows.Window | None = None) -> Rollout:
        """What models see of a rollout; with a window, with its rows in front."""
        data = self._see_rows(data)
        if not self.use_rollout_state:
            data = data._replace(steps=data.steps._replace(policy_state=()))
        return self.acting.see(data, window)

    def _seen_space(self) -> gym.Space:
        observation = self.task.actor.observation
        seen = self._see(observation)
        if jax.tree.map(_kind, seen) == jax.tree.map(_kind, observation):
            return self.task.observation_space
        return _space_of(seen)

    # What subclasses supply; traced.

    def policy_apply(self, params: PyTree, model_state: PyTree, observation: PyTree) -> jax.Array:
        """``dist_inputs [.., D]`` of the policy for observations ``[.., *obs]``."""
        raise NotImplementedError

    def make_batch(self, state: TrainState, data: Rollout, hparams: dict) -> Batch:
        """Judges facts: the rows of ``data`` with advantages and value targets, axes ``[T, B]``."""
        raise NotImplementedError

    def gather(self, state: TrainState, data: Rollout) -> PyTree:
        """``model_state`` after taking in the observations of ``data``."""
        raise NotImplementedError

    def _see_rows(self, data: Rollout) -> Rollout:
        """``task.timestep_to_np`` applied to a rollout."""
        hook = self.task.timestep_to_np
        if hook is None:
            return data
        return data._replace(steps=hook(data.steps), last_observation=self._see(data.last_observation))

    def initial_policy_state(self, num_envs: int | None = None) -> PyTree:
        """What a policy remembers before the first row, ``[B, ..]``; ``()`` if policies remember nothing.

        Args:
            num_envs: ``B``; ``None`` for the task's.
        """
        return self.acting.nothing(self.task.env.num_envs if num_envs is None else num_envs)

    # The compiled functions.

    def learn(
        self,
        state: TrainState,
        data: Rollout,
        hparams: dict,
        drawn: dict[str, Batch] | None = None,
    ) -> tuple[TrainState, dict]:
        """One epoch's training: every supervised trainer in turn.

        Args:
            state: consumed.
            data: facts ``[T, B]``.
            hparams: see :meth:`hparams`.
            drawn: stacked batches ``[n_steps, N, L]`` by the name of the trainer that takes them instead,
                because a subclass overrides its stream.

        Returns:
            ``(state, metrics)``, metrics f32 scalars.
        """
        metrics = {}
        for trainer in self._trainers:
            if drawn and trainer.name in drawn:
                state, trainer_metrics = trainer.fit_batches(state, drawn[trainer.name], hparams)
            else:
                state, trainer_metrics = self._fit(trainer, state, data, hparams)
            metrics.update(trainer_metrics)
        # Streams draw with what follows from this key; the next epoch's shall draw anew.
        return state._replace(key=jax.random.split(state.key)[0]) if drawn else state, metrics

    def _fit(
        self, trainer: Trainer, state: TrainState, data: Rollout, hparams: dict
    ) -> tuple[TrainState, dict]:
        """One epoch's training of one supervised trainer."""
        rows, valid = self._rows(state, data, hparams)
        return trainer.fit(state, rows, valid, hparams, data.steps.mask.shape[1])

    def _inputs(self, base: type, stream: str) -> Inputs | None:
        """Inputs that draw from the method ``stream``, if a subclass of ``base`` overrides it."""
        if getattr(type(self), stream) is getattr(base, stream):
            return None
        return Inputs(lambda n_devices: getattr(self, stream)())

    def _stream(self, trainer: Trainer) -> Iterator[Batch]:
        """The batches that ``trainer`` trains on, one by one, without end."""
        stream_key = jax.random.fold_in(self.state.key, _ASIDE)
        while True:
            rows, valid = self._make_rows(self.state, self._stored(), self.hparams())
            key, stream_key = jax.random.split(stream_key)
            size = min(trainer.batch_size or valid.shape[0], valid.shape[0])
            # As many as all rows would make, so that nothing compiles anew while a replay fills up.
            index, keep = shuffled(key, valid, size, -(-valid.shape[0] // size))
            for i in range(-(-int(valid.sum()) // size)):
                batch = jax.tree.map(lambda x: np.asarray(x[index[i]]), rows)  # noqa: B023
                yield batch._replace(mask=batch.mask * np.asarray(keep[i])[:, None])

    def _rows(self, state: TrainState, data: Rollout, hparams: dict) -> tuple[Batch, jax.Array]:
        rows = to_rows(self.make_batch(state, data, hparams), self.max_slice_length)
        return rows, jnp.any(rows.mask > 0, axis=1)

    def _start(
        self,
        init: Callable[[jax.Array, PyTree], tuple[PyTree, PyTree]],
        trainers: list[Trainer],
        model: models.Model,
    ) -> None:
        """Initialises parameters, compiles nothing yet, and continues a run found in ``output_dir``.

        Args:
            init: ``(key, observation [1, *obs]) -> (params, model_state)``.
            trainers: in the order in which they train.
            model: of the policy, or of policy and value.

        Raises:
            ValueError: if sequence models are to see single rows.
        """
        if model.is_sequence and self.max_slice_length == 1:
            raise ValueError(
                "max_slice_length=1: the model is a sequence network, which learns nothing about earlier "
                "rows from slices of 1; nearest valid value: 2"
            )
        self.acting = Acting(self, model)
        self._trainers = trainers
        key_params, key_train = jax.random.split(jax.random.PRNGKey(self.seed))
        self._example = jax.tree.map(lambda x: np.asarray(x)[0], self.task.actor.observation)
        example = self._see(jax.tree.map(lambda x: x[None], self._example))
        # It runs once, so that compiling it is all it costs.
        quickly = {"xla_backend_optimization_level": 0}
        params, model_state = jax.jit(init, compiler_options=quickly)(key_params, example)
        opt_state = {trainer.name: trainer.init(params) for trainer in trainers}
        self.state = TrainState(
            params, model_state, opt_state, key_train, jnp.int32(0), self._targets(params)
        )
        self.task.set_policy_state(self.initial_policy_state(), self.use_rollout_state)
        self._learn = compiled(self.learn, donate_argnums=0)
        self._gather = compiled(self.gather)
        self._make_rows = compiled(self._rows)
        self._iteration: Iteration | None = None
        if self._iterates():
            self._iteration = Iteration(self, self._n_replay_epochs)
            self._saved_parts = (*self._saved_parts, "kept") if not self.on_policy else self._saved_parts
        self.n_devices = share(self, self.n_devices)
        # fold_in of a small number would give a key that splitting gives too.
        self._policy_key = jax.random.fold_in(key_train, _ASIDE)
        if self.output_dir is not None:
            self._resume(self.output_dir)
        if self._driver_name is not None:
            self._driver = DRIVERS["make"](self, self._driver_name)

    def _targets(self, params: PyTree) -> PyTree:
        """The first ``target_params``, copies of those of ``params`` that lag behind; none here."""
        return ()

    def hparams(self, after: int = 0) -> dict[str, Any]:
        """Numbers of an epoch that are arguments of the compiled step.

        Args:
            after: epochs between now and that one.
        """
        values: dict[str, Any] = {
            name: np.float32(getattr(self, name)) for name in self.hyperparameters
        }
        for trainer in self._trainers:
            values[trainer.name] = trainer.hparams((self._epoch + after) * trainer.n_steps)
        return values

    def why_not(self, driver: str) -> str:
        """Why a driver makes no sense for this trainer; empty if it does.

        Args:
            driver: ``'on_policy'``, ``'sync'`` or ``'async'``, of which ``'ray'`` is one too, or
                ``'lock_step'``, one whose rows are those of the newest policy.
        """
        name = type(self).__name__
        if driver == "on_policy":
            if not self.on_policy:
                return f"{name} learns from what older policies did too; nearest valid value: 'sync'"
            if any(trainer.n_steps > 1 or trainer.batch_size for trainer in self._trainers):
                return (
                    "it takes one optimizer step on all rows of each unroll; with batch sizes of None and 1 "
                    f"train step per epoch {name} does so; nearest valid value: 'sync'"
                )
        if driver == "async" and not self.bears_lag:
            return (
                f"{name} takes all rows for those of the newest policy; with an actor-critic, "
                "advantage_estimator=advantages.vtrace corrects for older ones; nearest valid value: 'sync'"
            )
        return ""

    def _iterates(self) -> bool:
        """Whether epochs are compiled as a whole, see :mod:`rl_trainers.iteration`."""
        cls = type(self)
        own_loop = any(
            getattr(cls, name) is not getattr(RLTrainer, name)
            for name in ("_collect_and_train", "_collect", "_stored", "train_epoch")
        )
        streams = any(trainer.inputs for trainer in self._trainers)
        counted = self.n_interactions_per_epoch is not None and not (self.offline or self.only_eval)
        return counted and not own_loop and not streams and self.acting.is_traceable

    # The loop.

    @property
    def compiles_epochs(self) -> bool:
        """Whether whole epochs are one program, see :mod:`rl_trainers.iteration`."""
        return self._iteration is not None

    @property
    def current_epoch(self) -> int:
        """Epochs done."""
        return self._epoch

    @property
    def avg_returns(self) -> list[float]:
        """Mean return of the episodes that ended in each epoch's collection; NaN where none did."""
        return self._avg_returns

    @property
    def eval_returns(self) -> dict[str, list[float]]:
        """Mean evaluation returns by epoch, by the keys of :func:`metrics.eval_key`."""
        return self._eval_returns

    def run(
        self, n_epochs: int = 1, n_epochs_is_total_epochs: bool = False, progress: bool = False
    ) -> None:
        """Runs epochs, and saves at the end.

        With an ``output_dir`` or compiled epochs, the first Ctrl-C ends the run after the running epoch,
        which is saved; the second one ends it at once.

        Args:
            n_epochs: how many.
            n_epochs_is_total_epochs: count the epochs already done as well, so that an interrupted run
                does only the rest.
            progress: show a progress display.
        """
        if not isinstance(n_epochs, Integral) or n_epochs < 0:
            raise ValueError(f"n_epochs={n_epochs} must be a whole number of at least 0")
        last = n_epochs if n_epochs_is_total_epochs else self._epoch + n_epochs
        self._stopped = False
        display = metrics.Progress(last) if progress and self._epoch < last else None
        with Interrupt(self) as interrupt:
            try:
                self._run_epochs(last, display)
            finally:
                if display is not None:
                    display.close()
            self.save()
        if interrupt.asked:
            raise KeyboardInterrupt

    def _run_epochs(self, last: int, display: metrics.Progress | None) -> None:
        saved_s = time.monotonic()
        while self._epoch < last and not self._stopped:
            if self._iteration is None:
                records = [self._run_epoch()]
            else:
                records = self._iteration.run(last - self._epoch)
            for record in records:
                if display is not None:
                    display.update(record)
                if self.on_epoch is not None:
                    self.on_epoch(record)
            if time.monotonic() - saved_s > self.checkpoint_interval_s:
                self.save()
                saved_s = time.monotonic()

    def stop(self) -> None:
        """Makes :meth:`run` return after the running epoch."""
        self._stopped = True

    def _run_epoch(self) -> dict[str, float]:
        start = time.perf_counter()
        episodes, fresh, result = self._collect_and_train()
        if fresh is not None and jax.tree.leaves(self.state.model_state):
            self.state = self.state._replace(model_state=self._gather(self.state, fresh))
        counts = {
            "avg_return": _mean(episodes.returns),
            "avg_length": _mean(episodes.lengths),
            "n_trajectories": len(episodes.returns),
        }
        if self._driver is not None:
            lags = {"policy_lag": _mean(self._driver.lags), "most_policy_lag": max(self._driver.lags)}
            result = {**result, **lags, "n_dropped": self._driver.n_dropped}
        return self._finish_epoch(start, counts, episodes.returns, result)

    def _check_finite(self, is_finite: Any) -> None:
        if not is_finite:
            raise FloatingPointError(
                f"{self.task.env_name}: a reward or observation was NaN or infinite in epoch "
                f"{self._epoch + 1}, and the parameters are spoilt; the last checkpoint is from before"
            )

    def _finish_epoch(
        self, start: float, counts: dict[str, float], returns: Any, result: dict[str, float]
    ) -> dict[str, float]:
        """Counts an epoch that began at ``start``, evaluates, and writes its record."""
        self._epoch += 1
        self._recent.extend(returns)
        self._avg_returns.append(counts["avg_return"])
        evaluation = self._evaluate_epoch()
        self._wall_s += time.perf_counter() - start
        env_steps = self.task.n_interactions()
        record = {
            "epoch": self._epoch,
            "env_steps": env_steps,
            "wall_s": self._wall_s,
            "steps_per_s": env_steps / self._wall_s,
            "avg_return": counts["avg_return"],
            "recent_return": _mean(self._recent),
            "avg_length": counts["avg_length"],
            "n_trajectories": counts["n_trajectories"],
            "compilations": metrics.compilations().programs,
            "compile_s": metrics.compilations().seconds,
            **evaluation,
            **result,
        }
        if self._writer is not None:
            self._writer.write(record)
        return record

    def _collect_and_train(self) -> tuple[rollout.Episodes, Rollout | None, dict[str, float]]:
        """One epoch's collection and training.

        Returns:
            ``(episodes, fresh, record)``: the episodes that ended, what the models' statistics have not
            taken in yet, and the seconds and metrics for the epoch's record.
        """
        start = time.perf_counter()
        data, fresh, episodes = self._collect()
        collected = time.perf_counter()
        result = self.train_epoch(data)
        seconds = {"collect_s": collected - start, "train_s": time.perf_counter() - collected}
        return episodes, fresh, {**seconds, **result}

    def _collect(self) -> tuple[Rollout, Rollout | None, rollout.Episodes]:
        """Steps the environments with the current policy and stores what happened.

        Returns:
            ``(data, fresh, episodes)``: what to train on, and what the models' statistics have not taken
            in yet.
        """
        if self.only_eval:
            data = self._stored()
            episodes = self.evaluate(self.n_trajectories_per_epoch or 1, temperature=1.0)
            return data, None if self._epoch else data, episodes
        if self.offline:
            data = self._stored()
            return data, None if self._epoch else data, rollout.NO_EPISODES
        if self._driver is not None:
            return self._store(*self._drive())
        window = None
        if self.acting.has_window:
            window = self.acting.begin(self.task.actor.policy_state)
            self.task.actor = self.task.actor._replace(policy_state=window)
        # One call for the distributions of all rows is faster; each row's own is what other drivers record.
        acting = self.acting.actor if self._driver_name is None else self.acting.snapshot
        act = acting(self.state, self.collect_temperature)
        if self.n_interactions_per_epoch is not None:
            unroll_length = self.n_interactions_per_epoch // self.task.env.num_envs
            data, episodes = self.task.collect(act, unroll_length=unroll_length)
        else:
            data, episodes = self.task.collect(
                act, n_trajectories=self.n_trajectories_per_epoch
            )
        return self._store(data._replace(policy_version=np.asarray(self.state.step)), episodes, window)

    def _drive(self) -> tuple[Rollout, rollout.Episodes]:
        """An epoch's rows from the driver, and the episodes that ended in them."""
        driver: Any = self._driver
        if not driver.is_running:
            driver.start()
        data, _ = driver.collect()
        self.task.count(int(np.count_nonzero(data.steps.mask)), len(driver.episodes.returns))
        return data, driver.episodes

    def _store(
        self, data: Rollout, episodes: rollout.Episodes, window: windows.Window | None = None
    ) -> tuple[Rollout, Rollout | None, rollout.Episodes]:
        """Stores an epoch's rows; returns what :meth:`_collect` does."""
        seen = self._see_rollout(data, window)
        dist_inputs = data.steps.dist_inputs
        if dist_inputs is None:
            model = self.state.params, self.state.model_state
            dist_inputs = np.asarray(self.acting.dist_inputs(*model, seen.steps.observation))
            seen, data = (
                x._replace(steps=x.steps._replace(dist_inputs=dist_inputs[-len(x.steps.mask) :]))
                for x in (seen, data)
            )
        self.task.add(data, self._epoch + 1)
        if self.on_policy:
            return seen, seen, episodes
        stored = self._stored()
        return stored, seen if self._epoch else stored, episodes

    def _stored(self) -> Rollout:
        """The replay as models see it, host arrays ``[T, B]``."""
        return self._see_rollout(self.task.replayed())

    def train_epoch(self, data: Rollout) -> dict[str, float]:
        """Trains for one epoch.

        Args:
            data: facts ``[T, B]``.

        Returns:
            The metrics of the supervised trainers.
        """
        drawn = {trainer.name: trainer.draw() for trainer in self._trainers if trainer.inputs}
        self.state, result = self._learn(self.state, data, self.hparams(), drawn)
        return {name: float(value) for name, value in result.items()}

    # For drivers.

    @property
    def is_recurrent(self) -> bool:
        """Whether the policy has a recurrent state."""
        return self.acting.is_recurrent

    def actor(self, temperature: float = 1.0, epsilon: float | None = None) -> rollout.Act:
        """The present policy, with parameters of its own, so that training does not disturb it.

        Args:
            temperature: 0 acts greedily, 1 samples from the policy.
            epsilon: share of rows in [0, 1] that act so, the others taking the mode; ``None`` for all.

        Returns:
            A function that gives ``dist_inputs`` too, and may be called by several threads.
        """
        copies = jax.tree.map(jnp.copy, (self.state.params, self.state.model_state))
        params, model_state = copies
        state = self.state._replace(params=params, model_state=model_state)
        return self.acting.snapshot(state, temperature, epsilon)

    def train_on(
        self,
        data: Rollout,
        n_passes: int = 1,
        batch_size: int | None = None,
        slice_length: int | None = None,
    ) -> dict[str, float]:
        """Judges rows as a whole and trains every supervised trainer on them.

        Args:
            data: facts ``[T, B]``, host arrays with ``dist_inputs``; rows of a recurrent policy with
                ``policy_state``.
            n_passes: passes over the rows.
            batch_size: slices of a batch; ``None`` for all.
            slice_length: rows of a slice; ``None`` for ``max_slice_length``.

        Returns:
            The metrics of the supervised trainers.
        """
        length = slice_length or self.max_slice_length
        n_slices = -(-data.steps.mask.shape[0] // length) * data.steps.mask.shape[1]
        size = min(batch_size or n_slices, n_slices)
        learner, learn = self._learner(length, size, n_passes * -(-n_slices // size), n_passes)
        # All supervised trainers have taken the same number of steps.
        step = int(self.state.step) // len(self._trainers)
        numbers = self.hparams()
        for own, other in zip(self._trainers, learner._trainers, strict=True):
            other.clip_grad_norm = own.clip_grad_norm
            numbers[own.name] = other.hparams(step)
        seen = self._see_rollout(data)
        self.state, metrics = learn(self.state, seen, numbers)
        if jax.tree.leaves(self.state.model_state):
            self.state = self.state._replace(model_state=self._gather(self.state, seen))
        return {name: float(value) for name, value in metrics.items()}

    def _learner(
        self, length: int, batch_size: int, n_steps: int, n_passes: int
    ) -> tuple[RLTrainer, Callable]:
        """A copy of the trainer with other counts, and its compiled :meth:`learn`."""
        counts = length, batch_size, n_steps, n_passes
        if counts not in self._learners:
            other = copy.copy(self)
            other.max_slice_length = length
            other._trainers = [trainer.sized(*counts[1:]) for trainer in self._trainers]
            self._learners[counts] = other, compiled(other.learn, donate_argnums=0)
        return self._learners[counts]

    def evaluate(
        self, n_episodes: int = 20, temperature: float = 0.0, max_steps: int | None = None
    ) -> rollout.Episodes:
        """Plays whole episodes on environments of their own; changes nothing about training.

        Args:
            n_episodes: how many.
            temperature: 0 acts greedily, 1 samples from the policy.
            max_steps: step limit of the episodes; ``None`` for the task's own.

        Returns:
            Returns and lengths of the episodes.
        """
        seed = self.seed + self._epoch
        key = jax.random.fold_in(jax.random.PRNGKey(self.seed), _ASIDE + self._epoch)
        eval_env = self.task.eval_env  # made here, since it cannot be made while a program is traced
        if self.acting.is_traceable:
            play = functools.partial(self.acting.play, self.state, temperature, key)
            return self.task.play_out(play, n_episodes, max_steps, seed)
        return self.task.evaluate(
            self.acting.actor(self.state, temperature),
            n_episodes,
            max_steps=max_steps,
            seed=seed,
            key=key,
            policy_state=self.initial_policy_state(eval_env.num_envs),
        )

    def _evaluate_epoch(self) -> dict[str, float]:
        result: dict[str, float] = {}
        if not self.n_eval_episodes:
            return result
        for max_steps in self.eval_steps:
            for temperature in self.eval_temperatures:
                episodes = self.evaluate(self.n_eval_episodes, temperature, max_steps)
                key = metrics.eval_key(temperature, max_steps or self.task.max_steps or 0)
                result[key] = _mean(episodes.returns)
                result.setdefault("eval_return", result[key])
                self._eval_returns.setdefault(key, []).append(result[key])
        if self.on_eval is not None:
            self.on_eval({"epoch": self._epoch, **result})
        return result

    def policy(self, trajectory: Any, temperature: float = 1.0) -> tuple[PyTree, np.ndarray]:
        """Chooses an action for the last observation of a trajectory.

        Args:
            trajectory: a :class:`rl_trainers.task.Trajectory`, or one observation ``[*obs]``.
            temperature: 0 acts greedily, 1 samples from the policy.

        Returns:
            ``(action [*act], dist_inputs f32 [D])``; ``task.distribution.to_env`` maps the action to what
            the environment takes.
        """
        earlier: list = []
        if isinstance(trajectory, Trajectory):
            has_memory = self.acting.has_window or self.acting.is_recurrent
            earlier = [step.observation for step in trajectory.timesteps] if has_memory else []
            trajectory = trajectory.last_observation
        rows = [self._checked(x) for x in [*earlier, trajectory]]
        self._policy_key, key_act = jax.random.split(self._policy_key)
        decided = self.acting.after(self.state, rows, key_act, temperature)
        return jax.tree.map(lambda x: np.asarray(x)[0], decided)

    def _checked(self, observation: PyTree) -> PyTree:
        """What models see of one observation ``[*obs]``, ``[1, ..]``."""
        observation = jax.tree.map(
            lambda example, x: np.asarray(x, example.dtype), self._example, observation
        )
        shapes = [jax.tree.map(np.shape, tree) for tree in (self._example, observation)]
        if shapes[0] != shapes[1]:
            raise ValueError(f"the observation has the shape {shapes[1]}, expected {shapes[0]}")
        return self._see(jax.tree.map(lambda x: x[None], observation))

    # Saving and continuing.

    def state_dict(self) -> dict[str, Any]:
        """Everything that continues the run: arrays and numbers only."""
        loop = {
            "epoch": np.int64(self._epoch),
            "wall_s": np.float64(self._wall_s),
            "avg_returns": np.asarray(self._avg_returns, np.float64),
            "recent": np.asarray(self._recent, np.float64),
            **{f"eval_returns/{k}": np.asarray(v) for k, v in self._eval_returns.items()},
        }
        # Copies, since the next epoch consumes the buffers of the state.
        train = jax.tree.map(np.array, self.state)
        tree = {"train": train, "task": self.task.state_dict(), "loop": loop}
        if self._iteration is not None and "kept" in self._saved_parts:
            tree["kept"] = self._iteration.state_dict()
        return tree

    def load_state_dict(self, tree: dict[str, Any]) -> None:
        """Continues from what :meth:`state_dict` returned."""
        self.state = jax.tree.map(jnp.array, tree["train"])
        self.task.load_state_dict(tree["task"])
        if self._iteration is not None and "kept" in self._saved_parts:
            self._iteration.load_state_dict(tree["kept"])
        loop = tree["loop"]
        self._epoch = int(loop["epoch"])
        self._wall_s = float(loop["wall_s"])
        self._avg_returns = [float(x) for x in loop["avg_returns"]]
        self._recent = deque((float(x) for x in loop["recent"]), maxlen=N_LATEST)
        self._eval_returns = {
            name.removeprefix("eval_returns/"): [float(x) for x in values]
            for name, values in loop.items()
            if name.startswith("eval_returns/")
        }

    def save(self) -> None:
        """Writes a checkpoint into ``output_dir``, if there is one and the newest epoch is not saved."""
        if self.output_dir is None or self._saved_epoch == self._epoch:
            return
        checkpoint.save(self.output_dir, self._epoch, self.state_dict())
        self._saved_epoch = self._epoch

    def restore(self, directory: str) -> bool:
        """Continues from the newest checkpoint in ``directory``.

        Returns:
            Whether there was one.

        Raises:
            ValueError: if the checkpoint does not fit this trainer, for example because its networks have
                other shapes.
        """
        target = {**dict.fromkeys(self._saved_parts, checkpoint.ANY), "train": self.state}
        found = checkpoint.restore(directory, target)
        if found is None:
            return False
        self.load_state_dict(found[1])
        return True

    def _resume(self, output_dir: str) -> None:
        self._lock = checkpoint.lock(output_dir)
        checkpoint.remove_leftovers(output_dir)
        if self.restore(output_dir):
            self._saved_epoch = self._epoch
        self._writer = metrics.MetricsWriter(output_dir, resume_epoch=self._epoch)

    def write_text(self, name: str, text: str) -> None:
        """Writes a text to TensorBoard, if there is an ``output_dir``."""
        if self._writer is not None:
            self._writer.write_text(name, text, self.task.n_interactions())

    def close(self) -> None:
        """Stops the driver, and closes the environments and the metrics files."""
        if self._driver is not None:
            self._driver.close()
        self.task.close()
        if self._writer is not None:
            self._writer.close()
        if self._lock is not None:
            self._lock.close()


class Interrupt:
    """Lets the first Ctrl-C end a run after the running epoch.

    It acts where there is an ``output_dir`` to save to, and where compiled calls consume what the trainer
    holds, which would be lost with them.
    """

    def __init__(self, trainer: RLTrainer):
        self.asked = False
        self._trainer = trainer
        in_main_thread = threading.current_thread() is threading.main_thread()
        is_ignored = signal.getsignal(signal.SIGINT) is signal.SIG_IGN
        waits = trainer.output_dir is not None or isinstance(trainer.task.env, DeviceEnv)
        self._acts = waits and in_main_thread and not is_ignored

    def __enter__(self) -> Interrupt:
        if self._acts:
            self._previous = signal.signal(signal.SIGINT, self._ask)
        return self

    def __exit__(self, *_: object) -> None:
        if self._acts:
            signal.signal(signal.SIGINT, self._previous)

    def _ask(self, *_: object) -> None:
        signal.signal(signal.SIGINT, self._previous)
        self.asked = True
        self._trainer.stop()


def parameters(target: Any) -> list[str]:
    """Names of the arguments of a function or class, with those that ``**kwargs`` passes on to bases."""
    found: dict[str, None] = {}
    for base in inspect.getmro(target) if inspect.isclass(target) else [target]:
        function = base.__init__ if inspect.isclass(base) else base
        all_ = inspect.signature(inspect.unwrap(function)).parameters.values()
        found.update(dict.fromkeys(p.name for p in all_ if "KEYWORD_ONLY" in p.kind.name))
        found.update(dict.fromkeys(p.name for p in all_ if "OR_KEYWORD" in p.kind.name))
        if base is RLTrainer or not any(p.kind is p.VAR_KEYWORD for p in all_):
            break
    found.pop("self", None)
    return list(found)


def all_observations(data: Rollout) -> PyTree:
    """The observations of all rows and the last one, ``[T + 1, B, *obs]``."""
    pairs = data.steps.observation, data.last_observation
    return jax.tree.map(lambda x, last: jnp.concatenate([x, last[None]]), *pairs)


def behaviour(steps: TimeStep, dist_inputs: jax.Array) -> jax.Array:
    """The distribution that acted, f32 ``[T + 1, B, D]``.

    Args:
        steps: ``[T, B]``.
        dist_inputs: f32 ``[T + 1, B, D]`` of the policy that learns, which stands in where nobody acted
            (reset rows, the last observation) or nobody knows who did (NaN).
    """
    acted = (steps.mask > 0)[..., None] & jnp.isfinite(steps.dist_inputs)
    known = jnp.where(acted, steps.dist_inputs, dist_inputs[:-1])
    return jnp.concatenate([known, dist_inputs[-1:]])


def judge(
    estimator: Estimator, distribution: Any, data: Rollout, dist_inputs: jax.Array, values: jax.Array
) -> Batch:
    """Facts with advantages and value targets.

    Args:
        estimator: see :mod:`rl_trainers.advantages`.
        distribution: of the actions.
        data: facts ``[T, B]``.
        dist_inputs: f32 ``[T + 1, B, D]`` of the policy that learns, see :func:`all_observations`.
        values: f32 ``[T + 1, B]``.

    Returns:
        A batch with axes ``[T, B]``.
    """
    steps = data.steps
    acted = behaviour(steps, dist_inputs)[:-1]
    rho = probability_ratio(
        distribution.log_prob(dist_inputs[:-1], steps.action),
        distribution.log_prob(acted, steps.action),
    )
    # An action without effect says nothing about the policy that is to be judged.
    rho = jnp.where(steps.env_info.control_mask > 0, rho, 1.0)
    target = estimator(steps, values, rho)
    return Batch(
        observation=steps.observation,
        action=steps.action,
        dist_inputs=acted,
        advantage=target - values[:-1],
        value_target=target,
        mask=steps.mask * steps.env_info.control_mask,
    )


def to_rows(batch: Batch, length: int) -> Batch:
    """Cuts ``[T, B, ..]`` into slices of neighbouring rows ``[N, L, ..]``, ``N = ceil(T / L) B``.

    Slices that a sequence model with a window sees are ``[N, 2 L, ..]``, with the rows before them in front,
    masked.

    Args:
        batch: leading axes ``[T, B]``.
        length: ``L``; if it does not divide ``T`` the last slices are filled up with masked rows.
    """
    if not isinstance(batch.observation, Seen) or jax.tree.leaves(batch.observation.state):
        return windows.blocks(batch, length)
    rows = windows.blocks_and_before(batch, length)
    return rows._replace(mask=rows.mask.at[:, :length].set(0.0))


def _kind(x: Any) -> tuple:
    return np.shape(x)[1:], np.asarray(x).dtype


def _space_of(observation: PyTree) -> gym.Space:
    """The space of observations ``[B, *obs]`` that only an example of is known."""
    if isinstance(observation, dict):
        return gym.spaces.Dict({name: _space_of(x) for name, x in observation.items()})
    if isinstance(observation, tuple):
        return gym.spaces.Tuple([_space_of(x) for x in observation])
    shape, dtype = _kind(observation)
    limits = np.iinfo(dtype) if dtype.kind in "iu" else None
    low, high = (limits.min, limits.max) if limits else (-np.inf, np.inf)
    if dtype.kind == "b":
        low, high = False, True
    return gym.spaces.Box(low, high, shape, dtype.type)


def _mean(values: Any) -> float:
    return float(np.mean(values)) if len(values) else math.nan


def _unknown(cls: type, name: str) -> TypeError:
    valid = parameters(cls)
    close = difflib.get_close_matches(name, valid, 1, 0.0)
    near = next(iter([x for x in _ELSEWHERE.get(name, ()) if x in valid] + close))
    return TypeError(f"{cls.__name__} has no argument {name!r}; nearest: {near!r}")


def _listed(argument: str, values: Any) -> list:
    if isinstance(values, Sequence):
        return list(values)
    raise TypeError(f"{argument}={values!r} must be a sequence; nearest valid value: {[values]!r}")


def _nearest_multiple(count: int, divisor: int) -> int:
    return max(1, round(count / divisor)) * divisor


def _check_multiple(argument: str, count: int, num_envs: int) -> None:
    if count < 1 or count % num_envs:
        raise ValueError(
            f"{argument}={count} must be a positive multiple of num_envs={num_envs}; nearest valid value: "
            f"{_nearest_multiple(count, num_envs)}"
        )
