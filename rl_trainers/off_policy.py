"""The loop of trainers that learn from single steps drawn at random, while they act.

An epoch's optimizer steps are spread evenly over its vector steps. For each vector step there is one
compiled call, :meth:`OffPolicyTrainer.advance`: it stores what happened, draws, learns, and acts. With JAX
environments a whole epoch is one compiled call, :meth:`OffPolicyTrainer.run_rows`, of the same parts.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from rl_trainers import advantages, models, optimizers, replay, ring, rollout
from rl_trainers.supervised import Trainer, check_counts
from rl_trainers.task import RLTask
from rl_trainers.trainer import RLTrainer, all_observations, compiled
from rl_trainers.types import ActorState, Batch, EnvInfo, PyTree, Rollout, TimeStep, TrainState


class Event(NamedTuple):
    """What one vector step brought, and what to act with.

    Attributes:
        facts: f32 ``[B, 6]``, see :func:`rl_trainers.ring.pack`.
        action: ``[B, *act]`` as sampled.
        observation: ``[B, *obs]`` what followed, and what the next action is for.
        key: u32 ``[2]``, to act with.
        row: i32 ``[]``, which of the :class:`Draws` the next action may come from.
        update: i32 ``[]``, optimizer steps taken before in this epoch.
    """

    facts: Any
    action: PyTree
    observation: PyTree
    key: Any
    row: Any
    update: Any


class Draws(NamedTuple):
    """Random actions for many vector steps, drawn at once because one at a time costs more.

    Attributes:
        at_random: bool ``[T, B]``, where to take them instead of the policy's.
        action: ``[T, B, *act]``.
    """

    at_random: jax.Array
    action: PyTree


class OffPolicyTrainer(RLTrainer):
    """Acts and learns in turn, with a replay on the device and target parameters. Abstract.

    Subclasses implement :meth:`policy_apply`, :meth:`make_batch` and :meth:`gather`, all traced.
    """

    on_policy = False
    bears_lag = True
    _one_device = "trainers that learn while they act have replay and learning on one device"
    _saved_parts = ("train", "task", "loop", "replay")

    def __init__(
        self,
        task: RLTask,
        batch_size: int = 64,
        train_steps_per_epoch: int | None = None,
        target_sync: int = 1,
        target_tau: float = 1.0,
        n_step: int = 1,
        advantage_estimator: Callable = advantages.td_k,
        *,
        n_trajectories_per_epoch: int | None = None,
        n_interactions_per_epoch: int | None = None,
        n_replay_epochs: int | None = None,
        replay_capacity: int = 100_000,
        initial_collect_steps: int = 100,
        exploration_rate: Any = 0.0,
        exploration_interval: str = "epoch",
        **kwargs,
    ):
        """Configures the loop.

        Args:
            task: the environment to train on; its initial trajectories go into the replay.
            batch_size: ``N``, steps in a batch.
            train_steps_per_epoch: optimizer steps per epoch; ``None`` for one per vector step, or 500 if the
                epoch is counted in trajectories. Those come after the collection.
            target_sync: optimizer steps between two updates of the target parameters.
            target_tau: share of the current parameters in an update of the target parameters, in (0, 1].
            n_step: rewards before the value of what follows.
            advantage_estimator: factory of an estimator over ``n_step`` rows, see
                :mod:`rl_trainers.advantages`.
            n_trajectories_per_epoch: trajectories to collect per epoch.
            n_interactions_per_epoch: vector rows times environments to collect per epoch; 1000 if neither of
                the two is given.
            n_replay_epochs: the replay holds as many epochs of ``n_interactions_per_epoch``.
            replay_capacity: decisions that the replay holds, if ``n_replay_epochs`` is not given.
            initial_collect_steps: decisions to take at random before learning begins; initial trajectories
                count.
            exploration_rate: share of random actions, a number or a schedule as for learning rates.
            exploration_interval: ``'epoch'`` or ``'step'``, what the schedule counts: epochs or decisions,
                both from 1.
            **kwargs: the other arguments of :class:`rl_trainers.trainer.RLTrainer`.

        Raises:
            ValueError: if arguments contradict one another or are out of range.
        """
        num_envs = task.env.num_envs
        collected = (n_trajectories_per_epoch, n_interactions_per_epoch, kwargs.get("collect_per_epoch"))
        if all(count is None for count in collected):
            n_interactions_per_epoch = -(-1000 // num_envs) * num_envs
        super().__init__(
            task,
            n_trajectories_per_epoch=n_trajectories_per_epoch,
            n_interactions_per_epoch=n_interactions_per_epoch,
            **kwargs,
        )
        if self.max_slice_length != 1:
            raise ValueError(
                f"max_slice_length={self.max_slice_length}: {type(self).__name__} learns from single steps; "
                "nearest valid value: 1"
            )
        if self.only_eval and not task.replay.size:
            raise ValueError(
                "only_eval=True: there is nothing to train on: give the task initial_trajectories; nearest "
                "valid value: False"
            )
        check_counts(1, batch_size=batch_size, train_steps_per_epoch=train_steps_per_epoch)
        check_counts(1, target_sync=target_sync, n_step=n_step, n_replay_epochs=n_replay_epochs)
        check_counts(0, initial_collect_steps=initial_collect_steps)
        if not 0 < target_tau <= 1:
            raise ValueError(f"target_tau={target_tau} must lie in (0, 1]; nearest valid value: 1")
        if exploration_interval not in ("epoch", "step"):
            raise ValueError(f"exploration_interval={exploration_interval!r} must be 'epoch' or 'step'")
        self._exploration = optimizers.resolve_schedule(exploration_rate)
        first_rate = float(optimizers.learning_rates(self._exploration, 0, 1)[0])
        if not 0 <= first_rate <= 1:
            raise ValueError(
                f"exploration_rate={exploration_rate} begins with {first_rate} and must lie in [0, 1]; "
                f"nearest valid value: {float(first_rate > 1)}"
            )
        # What timestep_to_np makes of observations is stored as it is.
        self._frames = task.replay.frames if task.timestep_to_np is None else replay.Frames()
        # As many rows as a run and the stack of its first observation need.
        least = n_step + self._frames.depth - 1
        check_counts(least * num_envs, replay_capacity=replay_capacity)
        self._n_rows = (self.n_interactions_per_epoch or 0) // num_envs
        if n_replay_epochs is not None and self._n_rows:
            replay_capacity = n_replay_epochs * self._n_rows * num_envs
        self.batch_size = batch_size
        self.train_steps_per_epoch = train_steps_per_epoch or self._n_rows or 500
        self.n_step = n_step
        self.target_sync = target_sync
        self.target_tau = target_tau
        self.initial_collect_steps = max(initial_collect_steps, n_step * num_envs)
        self._explores_by_epoch = exploration_interval == "epoch"
        self._estimator = models.call(advantage_estimator, gamma=task.gamma, margin=n_step)
        self._metric_names: list[str] = []
        self._ring = self._initial_ring(max(replay_capacity // num_envs, least))
        self._known = task.actor.observation
        self._n_updates = 0

    def _initial_ring(self, capacity: int) -> ring.Ring:
        """What the task has stored, and then the environments' present observations."""
        data, size = self._see_rows(self.task.replayed()), self.task.replay.size
        after = jax.tree.map(lambda x: np.zeros_like(x[:1]), data.steps)
        last = jax.tree.map(lambda x: x[None], data.last_observation)
        steps = jax.tree.map(
            lambda *x: np.concatenate(x), data.steps, after._replace(observation=last)
        )
        # One row more, without a decision, holds the successor of the last one.
        steps = jax.tree.map(lambda x: x[: size + 1 if size else 0], steps)
        steps = steps._replace(dist_inputs=None, return_=None, policy_state=())
        return ring.create(steps, self._see(self.task.actor.observation), capacity, self._frames)

    # What subclasses use; traced.

    def td_target(self, data: Rollout, values: jax.Array) -> jax.Array:
        """Value targets of the first rows.

        Args:
            data: facts ``[n_step, N]``.
            values: f32 ``[n_step, N]`` of the successors of the rows.

        Returns:
            f32 ``[N]``.
        """
        values = jnp.concatenate([jnp.zeros_like(values[:1]), values])
        return self._estimator(data.steps, values, jnp.ones_like(data.steps.mask))[0]

    def successors(self, data: Rollout) -> PyTree:
        """The observations ``[T, B, *obs]`` after each row."""
        return jax.tree.map(lambda x: x[1:], all_observations(data))

    # The compiled functions.

    def advance(
        self,
        n_updates: int,
        state: TrainState,
        memory: ring.Ring,
        totals: jax.Array,
        event: Event,
        draws: Draws,
        hparams: dict,
    ) -> tuple[ring.Ring, TrainState, jax.Array, PyTree, jax.Array]:
        """Stores what happened, draws and learns, and acts.

        Args:
            n_updates: optimizer steps to take; static.
            state: consumed.
            memory: consumed.
            totals: consumed; see :meth:`learn_steps`.
            event: what happened.
            draws: random actions.
            hparams: see :meth:`hparams`.

        Returns:
            ``(memory, state, totals, action [B, *act], key)``. The replay comes first because XLA looks at
            results in their order: if it met the reads before the write, it would copy the replay.
        """
        memory = ring.add(memory, event.action, event.facts, event.observation, self._frames)
        state, totals = self.learn_steps(n_updates, state, memory, totals, event.update, hparams)
        action, key = self.explore(state, event, draws)
        return memory, state, totals, action, key

    def learn_steps(
        self,
        n_updates: Any,
        state: TrainState,
        memory: ring.Ring,
        totals: jax.Array,
        update: jax.Array,
        hparams: dict,
    ) -> tuple[TrainState, jax.Array]:
        """Draws and learns.

        Args:
            n_updates: optimizer steps to take; static, or i32 ``[]``.
            state: consumed.
            memory: what to draw from.
            totals: consumed; sums of weighted metrics over the epoch and of the weights, f32 ``[M + 1]``.
            update: i32 ``[]``, steps taken before in this epoch.
            hparams: see :meth:`hparams`.

        Returns:
            ``(state, totals)``.
        """

        def step(i, carry):
            state, totals = carry
            data = ring.sample(hparams["bits"][i], memory, self.n_step, self._frames)
            numbers = {**hparams, "update": i, "key": hparams["keys"][i]}
            state, metrics = self.learn_step(state, data, numbers)
            self._metric_names = list(metrics)
            values = jnp.stack([*metrics.values(), jnp.float32(1.0)])
            return state, totals + hparams["eval_weights"][i] * values

        if isinstance(n_updates, int) and n_updates < 2:
            # A loop would copy the state at its start and end.
            return step(update, (state, totals)) if n_updates else (state, totals)
        return jax.lax.fori_loop(update, update + n_updates, step, (state, totals))

    def learn_step(
        self, state: TrainState, data: Rollout, hparams: dict
    ) -> tuple[TrainState, dict]:
        """One optimizer step of every supervised trainer, then one of the target parameters.

        Args:
            state: consumed.
            data: facts ``[n_step, N]``.
            hparams: see :meth:`hparams`; and ``key``, and ``update`` i32, the steps before in this epoch.

        Returns:
            ``(state, metrics)``, metrics f32 scalars.
        """
        key_batch, key_loss = jax.random.split(hparams["key"])
        batch = self.make_batch(state, data, {**hparams, "key": key_batch})
        metrics: dict[str, jax.Array] = {}
        for trainer in self._trainers:
            numbers = {**hparams, "key": key_loss, **metrics}
            state, result = self.take_step(trainer, state, batch, numbers)
            metrics.update(result)
        return self._sync(state, hparams), metrics

    def take_step(
        self, trainer: Trainer, state: TrainState, batch: Batch, hparams: dict
    ) -> tuple[TrainState, dict]:
        """One optimizer step of one supervised trainer; ``hparams`` has the metrics of those before it."""
        mine = hparams[trainer.name]
        mine = {**mine, "learning_rate": mine["learning_rate"][hparams["update"]]}
        return trainer.update(state, batch, mine, hparams)

    def _sync(self, state: TrainState, hparams: dict) -> TrainState:
        old = state.target_params
        new = {name: state.params[name] for name in old}
        if self.target_tau < 1:
            new = optax.incremental_update(new, old, self.target_tau)
        if self.target_sync > 1:
            count = hparams["updates_before"] + hparams["update"] + 1
            new = optax.periodic_update(new, old, count, self.target_sync)
        return state._replace(target_params=new)

    def explore(
        self, state: TrainState, event: Event, draws: Draws
    ) -> tuple[PyTree, jax.Array]:
        """Acts at the collecting temperature, or at random where the draws say so.

        Returns:
            ``(action [B, *act], key)``.
        """
        key, distribution = event.key, self.task.distribution
        inputs = self.policy_apply(state.params, state.model_state, event.observation)
        if self.collect_temperature:
            key, key_act = jax.random.split(key)
            chosen = distribution.sample(inputs, key_act, self.collect_temperature)
        else:
            chosen = distribution.mode(inputs)

        at_random = draws.at_random[event.row]

        def select(x, y):
            return jnp.where(at_random.reshape(-1, *[1] * (y.ndim - 1)), x[event.row], y)

        return jax.tree.map(select, draws.action, chosen), key

    def explore_alone(
        self, params: PyTree, model_state: PyTree, observation: PyTree, key: jax.Array, rate: Any
    ) -> tuple[PyTree, jax.Array]:
        """:meth:`explore` with draws of its own, at a share ``rate`` f32 ``[]`` of random actions."""
        draws, key = self.draw(key, rate[None], len(jax.tree.leaves(observation)[0]))
        state = self.state._replace(params=params, model_state=model_state)
        return self.explore(state, Event(None, None, observation, key, 0, None), draws)

    def actor(self, temperature: float = 1.0, epsilon: float | None = None) -> rollout.Act:
        """The present policy as it explores, with parameters of its own; for drivers.

        Args:
            temperature: with any other than 1 nothing is explored, see
                :meth:`rl_trainers.trainer.RLTrainer.actor`.
            epsilon: likewise, with any; ``None``: the share of random actions is the next epoch's mean.
        """
        if temperature != 1.0 or epsilon is not None:
            return super().actor(temperature, epsilon)
        params, model_state = jax.tree.map(jnp.copy, (self.state.params, self.state.model_state))
        rate = jnp.float32(self.exploration_rates().mean())

        def act(observation, policy_state, needs_reset, key):
            action, key = self._explore_alone(params, model_state, self._see(observation), key, rate)
            return action, None, policy_state, key

        return act

    def train_on(self, data: Rollout, *arguments: Any, **settings: Any) -> dict[str, float]:
        """Not for these trainers, which draw steps one by one while target parameters follow.

        Raises:
            NotImplementedError: always.
        """
        raise NotImplementedError(
            f"{type(self).__name__} draws its own batches from a replay of its own, and is not trained on "
            "rows that it is given; make it with driver='async', or run it alone"
        )

    def why_not(self, driver: str) -> str:
        """See :class:`rl_trainers.trainer.RLTrainer`."""
        if driver in ("async", "lock_step") and self._frames.depth > 1:
            return (
                f"num_stacked_frames={self._frames.depth}: frames are stored once and stacked again, for "
                "which rows must follow one another; nearest valid value: 'sync'"
            )
        return super().why_not(driver)

    def draw_batches(self, key: jax.Array) -> tuple[dict[str, jax.Array], jax.Array]:
        """Randomness for an epoch's optimizer steps, drawn at once because one at a time costs more.

        Returns:
            ``({'bits': u32 [n_steps, N], 'keys': u32 [n_steps, 2]}, key)``, to be put among the ``hparams``.
        """
        key, key_bits, key_steps = jax.random.split(key, 3)
        n_steps = self.train_steps_per_epoch
        bits = jax.random.bits(key_bits, (n_steps, self.batch_size), jnp.uint32)
        return {"bits": bits, "keys": jax.random.split(key_steps, n_steps)}, key

    def draw(
        self, key: jax.Array, rates: jax.Array, num_envs: int | None = None
    ) -> tuple[Draws, jax.Array]:
        """Draws actions for vector steps with given shares of random ones, f32 ``[T]``; and a new key."""
        key, key_choice, key_action = jax.random.split(key, 3)
        shape = len(rates), num_envs or self.task.env.num_envs
        at_random = jax.random.uniform(key_choice, shape) < rates[:, None]
        inputs = jnp.zeros((*shape, self.task.distribution.n_inputs))
        return Draws(at_random, self.task.distribution.sample(inputs, key_action)), key

    def run_rows(
        self, state: TrainState, memory: ring.Ring, actor: ActorState, hparams: dict
    ) -> tuple[ring.Ring, TrainState, jax.Array, ActorState, rollout.Endings, Rollout | None, jax.Array]:
        """A whole epoch in JAX environments: acts, steps them, stores what happened, and learns, in turn.

        Args:
            state: consumed.
            memory: consumed.
            actor: where the environments stand, with their state.
            hparams: see :meth:`hparams`; and ``rates`` f32 ``[T]`` and ``n_updates`` i32 ``[T]``.

        Returns:
            ``(memory, state, totals, actor, endings, data, is_finite)``: as in :meth:`advance` and
            :func:`rl_trainers.rollout.unroll_scan`, what models see of the rows ``[T, B]`` if their
            statistics are to take it in, and whether all rewards and observations were finite.
        """
        drawn, key = self.draw_batches(state.key)
        draws, key_act = self.draw(actor.key, hparams["rates"])
        hparams = {**hparams, **drawn}
        hook = self.task.timestep_to_np or (lambda steps: steps)
        env, to_env = self.task.env.functions, self.task.distribution.to_env

        def row(carry, i):
            memory, state, totals, actor, update = carry
            act = functools.partial(self._act_in_row, state, draws, i)
            actor, (steps, endings) = rollout.row_scan(env, act, actor, to_env)
            is_finite = rollout.all_finite(steps)
            action, steps = steps.action, hook(steps)
            following = self._see(actor.observation)
            memory = ring.add(memory, action, ring.pack(steps, jnp), following, self._frames)
            n_updates = hparams["n_updates"][i]
            state, totals = self.learn_steps(n_updates, state, memory, totals, update, hparams)
            seen = steps if jax.tree.leaves(state.model_state) else None
            return (memory, state, totals, actor, update + n_updates), (endings, seen, is_finite)

        totals = jnp.zeros(len(self._metric_names) + 1)
        start = memory, state._replace(key=key), totals, actor._replace(key=key_act), jnp.int32(0)
        end, (endings, steps, is_finite) = jax.lax.scan(row, start, jnp.arange(self._n_rows))
        memory, state, totals, actor, _ = end
        data = None if steps is None else Rollout(steps, self._see(actor.observation))
        return memory, state, totals, actor, endings, data, jnp.all(is_finite)

    def _act_in_row(
        self,
        state: TrainState,
        draws: Draws,
        row: Any,
        observation: PyTree,
        policy_state: PyTree,
        needs_reset: Any,
        key: Any,
    ) -> tuple:
        """:meth:`explore` as a :data:`rl_trainers.rollout.Act`."""
        event = Event(None, None, self._see(observation), key, row, None)
        action, key = self.explore(state, event, draws)
        return action, None, policy_state, key

    # The loop.

    def _start(
        self,
        init: Callable[[jax.Array, PyTree], tuple[PyTree, PyTree]],
        trainers: list[Trainer],
        model: models.Model,
    ) -> None:
        if model.is_sequence:
            raise ValueError(
                f"{type(self).__name__} draws single steps, and a sequence network needs those before them; "
                "AWR and ExpertIteration can use one"
            )
        self._advance = compiled(self.advance, static_argnums=0, donate_argnums=(1, 2, 3))
        self._learn_steps = compiled(self.learn_steps, static_argnums=0, donate_argnums=(1, 3))
        self._explore = compiled(self.explore)
        self._run_rows = compiled(self.run_rows, donate_argnums=(0, 1))
        self._draw = compiled(self.draw)
        self._draw_batches = compiled(self.draw_batches)
        self._store_unroll = compiled(self.store_unroll, donate_argnums=0)
        self._explore_alone = compiled(self.explore_alone)
        super()._start(init, trainers, model)
        counted = bool(self._n_rows) and not (self.offline or self.only_eval)
        self._on_device = counted and self.acting.is_traceable
        drawn, _ = jax.eval_shape(self.draw_batches, self.state.key)
        arguments = self.state, self._ring, np.zeros(()), np.int32(0), {**self.hparams(), **drawn}
        jax.eval_shape(functools.partial(self.learn_steps, 1), *arguments)

    def hparams(self, after: int = 0) -> dict[str, Any]:
        """See :meth:`rl_trainers.trainer.RLTrainer.hparams`; for the next epoch."""
        values: dict[str, Any] = {name: np.float32(getattr(self, name)) for name in self.hyperparameters}
        for trainer in self._trainers:
            values[trainer.name] = trainer.hparams(self._n_updates)
        values["updates_before"] = np.int32(self._n_updates)
        values["eval_weights"] = self._trainers[0].eval_weights
        return values

    def means(self, totals: Any) -> dict[str, float]:
        """Mean metrics, see :meth:`learn_steps`; NaN without any optimizer step."""
        *sums, weight = np.asarray(totals, np.float64)
        means = np.array(sums) / (weight or np.nan)
        return dict(zip(self._metric_names, means.tolist(), strict=True))

    def _collect_and_train(self) -> tuple[rollout.Episodes, Rollout | None, dict[str, float]]:
        start = time.perf_counter()
        if not self._epoch and self.task.replay.size and jax.tree.leaves(self.state.model_state):
            self.state = self.state._replace(model_state=self._gather(self.state, self._stored()))
        self._take_up()
        if self._driver is not None:
            return self._learn_beside(start)
        if self._on_device:
            return self._run_on_device(start)
        learner = _Learner(self)
        data: Rollout | None = None
        if self.offline:
            episodes = rollout.NO_EPISODES
        elif self.only_eval:
            episodes = self.evaluate(self.n_trajectories_per_epoch or 1, temperature=1.0)
        elif self._n_rows:
            data, episodes = self.task.collect(learner.act, unroll_length=self._n_rows, env=learner)
        else:
            n = self.n_trajectories_per_epoch
            data, episodes = self.task.collect(learner.act, n_trajectories=n, env=learner)
        metrics = learner.finish()
        self._known = self.task.actor.observation
        seconds = time.perf_counter() - start
        seen = None if data is None else self._see_rollout(data)
        record = {"collect_s": learner.env_s, "train_s": seconds - learner.env_s}
        return episodes, seen, {**record, "exploration_rate": float(learner.rates.mean()), **metrics}

    def _learn_beside(self, start: float) -> tuple[rollout.Episodes, Rollout, dict[str, float]]:
        """What the rest of :meth:`_collect_and_train` does, while a driver steps the environments."""
        driver: Any = self._driver
        rate = float(self.exploration_rates().mean())
        if driver.is_running and self.n_random_left():  # nothing is learned yet, but the rate may fall
            driver.publish(anew=True)
        data, episodes = self._drive()
        collected = time.perf_counter()
        data = data._replace(steps=data.steps._replace(policy_state=(), dist_inputs=None))
        seen = self._see_rows(data)
        self._ring = self._store_unroll(self._ring, seen)
        learner = _Learner(self)
        # The epoch's rows have been counted: what is left now decides about the next one.
        metrics = self.means(np.zeros(len(self._metric_names) + 1))
        if not self.n_random_left():
            metrics = learner.finish()
        now = time.perf_counter()
        record = {"collect_s": collected - start, "train_s": now - collected, "exploration_rate": rate}
        return episodes, seen, {**record, **metrics}

    def store_unroll(self, memory: ring.Ring, data: Rollout) -> ring.Ring:
        """Stores an unroll that may be of other environments than the rows before it; traced.

        A row without a decision comes behind it, which holds the successor of the last one.

        Args:
            memory: consumed.
            data: what models see, ``[T, B]``.
        """
        steps = data.steps
        first = jax.tree.map(lambda x: x[0], steps.observation)
        memory = ring.restart(memory, first, self._frames)
        following = self.successors(data)

        def row(memory, x):
            action, facts, following = x
            return ring.add(memory, action, facts, following, self._frames), None

        memory, _ = jax.lax.scan(row, memory, (steps.action, ring.pack(steps, jnp), following))
        nothing = jax.tree.map(lambda x: jnp.zeros_like(x[0]), (steps.action, ring.pack(steps, jnp)))
        action, facts = nothing
        return ring.add(memory, action, facts, data.last_observation, self._frames)

    def _run_on_device(self, start: float) -> tuple[rollout.Episodes, Rollout | None, dict[str, float]]:
        """What the rest of :meth:`_collect_and_train` does, in one compiled call."""
        actor, hparams = self._arguments()
        self._ring, self.state, totals, actor, endings, data, is_finite = self._run_rows(
            self.state, self._ring, actor, hparams
        )
        self._check_finite(is_finite)
        self._n_updates += int(hparams["n_updates"].sum())
        episodes = self.task.count_rows(endings)
        self.task.went_on(actor)
        self._known = self.task.actor.observation
        metrics = self.means(totals)
        record = {"collect_s": 0.0, "train_s": time.perf_counter() - start}
        return episodes, data, {**record, "exploration_rate": float(hparams["rates"].mean()), **metrics}

    def _arguments(self) -> tuple[ActorState, dict]:
        """The last two arguments of :meth:`run_rows`."""
        n_updates = self.updates_by_row().astype(np.int32)
        numbers = {**self.hparams(), "rates": self.exploration_rates(), "n_updates": n_updates}
        return self.task.device_actor(), numbers

    def exploration_rates(self) -> np.ndarray:
        """Share of random actions at each vector step of the next epoch, f32 ``[T]``.

        An epoch that is counted in trajectories has 1000 of them, which come round again.
        """
        rows, num_envs = self._n_rows or 1000, self.task.env.num_envs
        if self._explores_by_epoch:
            rates = np.repeat(optimizers.learning_rates(self._exploration, self._epoch, 1), rows)
        else:
            before = self.task.n_interactions()
            rates = optimizers.learning_rates(self._exploration, before, rows * num_envs)[::num_envs]
        return np.where(np.arange(rows) < self._n_random_rows(), np.float32(1.0), rates)

    def updates_by_row(self) -> np.ndarray:
        """Optimizer steps after each vector step of the next epoch, i64 ``[T]``; ``T`` as in the rates."""
        rows = np.arange(-1, self._n_rows or 1000)
        taken = np.diff(self.updates_after(rows)) if self._n_rows else np.zeros_like(rows[1:])
        return np.where(rows[1:] < self._n_random_rows(), 0, taken)

    def _n_random_rows(self) -> int:
        """Vector steps of the next epoch in which all actions are random."""
        return -(-self.n_random_left() // self.task.env.num_envs)

    def n_random_left(self) -> int:
        """Decisions that are still to be taken at random before learning begins."""
        known = self.task.n_initial_interactions + self.task.n_interactions()
        return max(0, self.initial_collect_steps - known)

    def updates_after(self, row: Any) -> Any:
        """Optimizer steps that the epoch has after its vector step ``row``, counted from 0."""
        return (row + 1) * self.train_steps_per_epoch // self._n_rows if self._n_rows else 0

    # Saving and continuing.

    def state_dict(self) -> dict[str, Any]:
        """Everything that continues the run: arrays and numbers only."""
        rows = jax.tree.leaves(ring.to_rows(self._ring))
        stored = {f"ring_{i}": x for i, x in enumerate(rows)}
        return {**super().state_dict(), "replay": {"n_updates": np.int64(self._n_updates), **stored}}

    def load_state_dict(self, tree: dict[str, Any]) -> None:
        """Continues from what :meth:`state_dict` returned."""
        super().load_state_dict(tree)
        self._n_updates = int(tree["replay"]["n_updates"])
        like, structure = jax.tree.flatten(self._ring[:4])
        leaves = [np.asarray(tree["replay"][f"ring_{i}"]) for i in range(len(like))]
        made = ring.from_rows(jax.tree.unflatten(structure, leaves), self._ring.capacity)
        self._ring, self._known = made, None
        self._take_up()

    def _take_up(self) -> None:
        """Makes the replay go on from where the task stands, if something else stepped the environments."""
        observation = self.task.actor.observation
        if observation is not self._known:
            self._ring = ring.restart(self._ring, self._see(observation), self._frames)
            self._known = observation


class _Learner:
    """Stands between ``unroll_host`` and the environments, as its ``act`` and as its ``env``.

    It learns whenever it is asked for an action. The trainer's state is replaced at every call, so that
    an exception in an environment loses nothing.

    Attributes:
        rates: f32 ``[T]``, share of random actions at each vector step.
        env_s: seconds spent in the environments.
    """

    def __init__(self, trainer: OffPolicyTrainer):
        task = trainer.task
        self._trainer, self._env, self._hook = trainer, task.env, task.timestep_to_np
        drawn, key = trainer._draw_batches(trainer.state.key)
        trainer.state = trainer.state._replace(key=key)
        self._hparams = {**jax.device_put(trainer.hparams()), **drawn}
        self._totals = jnp.zeros(len(trainer._metric_names) + 1)
        self.env_s = 0.0
        self.rates = trainer.exploration_rates()
        self._n_updates = trainer.updates_by_row().tolist()
        self._row, self._update = 0, 0
        self._observation: PyTree = None
        self._action: PyTree = None
        self._outcome: tuple | None = None

    def act(self, observation: PyTree, policy_state: PyTree, needs_reset: Any, key: Any) -> tuple:
        """Learns from what happened since the last call, and chooses actions."""
        if self._row % len(self.rates) == 0:
            self._draws, key = self._trainer._draw(key, self.rates)
        key = self._next(observation, key)
        self._observation, self._mask = observation, ~needs_reset
        self._row += 1
        return self._action, None, policy_state, key

    def step(self, action: PyTree) -> tuple:
        """Steps the environments."""
        start = time.perf_counter()
        self._outcome = self._env.step(action)
        self.env_s += time.perf_counter() - start
        return self._outcome

    def finish(self) -> dict[str, float]:
        """Learns from the last step too, and takes the epoch's other optimizer steps; mean metrics."""
        trainer = self._trainer
        if self._outcome is not None:
            # The action that comes with it is not taken: the next epoch chooses anew.
            self._next(self._outcome[0], trainer.task.actor.key)
        if self._outcome is None or not (trainer._n_rows or trainer.n_random_left()):
            n_updates, update = trainer.train_steps_per_epoch, np.int32(0)
            trainer.state, self._totals = trainer._learn_steps(
                n_updates, trainer.state, trainer._ring, self._totals, update, self._hparams
            )
            trainer._n_updates += n_updates
        return trainer.means(self._totals)

    def _next(self, observation: PyTree, key: Any) -> Any:
        """Chooses the next action, and learns from the last one if there was one; returns a new key."""
        trainer, seen = self._trainer, self._trainer._see(observation)
        row, update = np.int32(self._row % len(self.rates)), np.int32(self._update)
        if self._outcome is None:
            event = Event(None, None, seen, key, row, update)
            self._action, key = trainer._explore(trainer.state, event, self._draws)
            return key
        n_updates = self._n_updates[(self._row - 1) % len(self.rates)]
        event = Event(self._facts(), self._action, seen, key, row, update)
        trainer._ring, trainer.state, self._totals, self._action, key = trainer._advance(
            n_updates, trainer.state, trainer._ring, self._totals, event, self._draws, self._hparams
        )
        self._update += n_updates
        trainer._n_updates += n_updates
        return key

    def _facts(self) -> np.ndarray:
        _, reward, terminated, truncated, info = self._outcome  # type: ignore[misc]
        # Filled column by column, which takes a tenth of the time of ring.pack.
        facts = np.ones((len(reward), 6), np.float32)
        facts[:, 0], facts[:, 1] = reward * self._mask, terminated
        facts[:, 2], facts[:, 3] = truncated, self._mask
        for column, name in enumerate(EnvInfo._fields, 4):
            if name in info:
                facts[:, column] = info[name]
        if self._hook is None:
            return facts
        reward, _, _, mask, *masks = facts.T
        steps = TimeStep(
            self._observation, None, reward, terminated, truncated, mask, env_info=EnvInfo(*masks)
        )
        return ring.pack(self._hook(steps))
