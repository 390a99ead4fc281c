"""Drivers that train from a replayer, and the one that collects in turns with training."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import gin

from rl_trainers.drivers.driver import Driver, Observer
from rl_trainers.drivers.metrics import StepMetric
from rl_trainers.drivers.replayers import CycleOneTimeReplayer, Replayer, make_replayer
from rl_trainers.drivers.stepping import SteppingDriver, check_transformer, rows_of
from rl_trainers.rollout import concatenate
from rl_trainers.supervised import check_counts
from rl_trainers.types import ActorState, PyTree, Rollout


class OffPolicyDriver(Driver):
    """Keeps what it collects in a replayer, from which :meth:`train` takes it. Abstract.

    Attributes:
        replayer: see :mod:`rl_trainers.drivers.replayers`.
        counter: calls of :meth:`train`, or mini-batches, as these were asked to count.
    """

    replayer: Replayer

    def collect_initially(self, initial_collect_steps: int) -> int:
        """Collects before the first training.

        Args:
            initial_collect_steps: steps at least, of all environments together, with reset rows.

        Returns:
            How many they were.
        """
        raise NotImplementedError

    def train(
        self,
        num_updates: int = 1,
        mini_batch_size: int | None = None,
        mini_batch_length: int | None = None,
        whole_replay_buffer_training: bool = True,
        clear_replay_buffer: bool = True,
        update_counter_every_mini_batch: bool = False,
    ) -> int:
        """Trains on what the replayer gives.

        Sequences ``[T]`` of rows are judged as a whole, and then cut into slices of ``mini_batch_length``.
        Each update visits all slices once, in an order of its own, with an optimizer step for each of
        ``ceil(slices / mini_batch_size)`` mini-batches, whose sizes differ by one at most. A program is
        compiled for every shape of what is replayed: where nothing is cleared, for every call until the
        replayer is full.

        Args:
            num_updates: updates.
            mini_batch_size: slices of a mini-batch; ``None`` for all. Where sequences are drawn, how many:
                they make one mini-batch, and ``None`` is one for each environment.
            mini_batch_length: rows of a slice; ``None`` or 0 for whole sequences. It must divide their length
                except where that changes by itself (``'cycle_one_time'``). Where sequences are drawn, their
                length.
            whole_replay_buffer_training: train on everything that the replayer holds; otherwise draw.
            clear_replay_buffer: forget it afterwards; nothing is forgotten that was drawn.
            update_counter_every_mini_batch: count mini-batches, not calls.

        Returns:
            Rows trained, with reset rows: those of the sequences times ``num_updates``.

        Raises:
            ValueError: an argument does not fit, named in the message.
            RuntimeError: nothing was observed since the last time.
            NotImplementedError: the replayer does not draw.
        """
        check_counts(1, num_updates=num_updates, mini_batch_size=mini_batch_size)
        check_counts(0, mini_batch_length=mini_batch_length)
        length = mini_batch_length or None
        if length == 1 and self.algorithm.is_recurrent and not self.algorithm.use_rollout_state:
            raise ValueError(
                "mini_batch_length: is 1, but without use_rollout_state a recurrent policy begins every "
                "slice anew and learns nothing about earlier rows; the nearest is 2"
            )
        if whole_replay_buffer_training:
            data = self.replayer.replay_all()
            if clear_replay_buffer:
                self.replayer.clear()
        else:
            data = self._draw(mini_batch_size, length)
            mini_batch_size = None
        n_rows, n_columns = data.steps.mask.shape
        length = length or n_rows
        if n_rows % length and not isinstance(self.replayer, CycleOneTimeReplayer):
            nearest = min((d for d in range(1, n_rows + 1) if n_rows % d == 0), key=lambda d: abs(d - length))
            raise ValueError(
                f"mini_batch_length: {length} does not divide the {n_rows} rows of a sequence; the nearest "
                f"is {nearest}"
            )
        self.train_metrics = self.algorithm.train_on(data, num_updates, mini_batch_size, length)
        n_slices = -(-n_rows // length) * n_columns
        n_batches = -(-n_slices // min(mini_batch_size or n_slices, n_slices))
        self.counter += num_updates * n_batches if update_counter_every_mini_batch else 1
        return n_rows * n_columns * num_updates

    def _draw(self, size: int | None, length: int | None) -> Rollout:
        if length is None:
            raise ValueError(
                "mini_batch_length: is None, but whole_replay_buffer_training=False draws sequences of a "
                "length that must be given; the nearest is the unroll_length"
            )
        return self.replayer.replay(size or self.replayer.batch_size, length)


@gin.configurable(module="rl_trainers.drivers")
class SyncOffPolicyDriver(OffPolicyDriver, SteppingDriver):
    """Collects with the present policy and keeps that for :meth:`train`; both in turns.

    The words are those of ALF (https://github.com/HorizonRobotics/alf).

    ::

        driver = SyncOffPolicyDriver(None, trainer, unroll_length=32, exp_replayer="one_time")
        time_step = policy_state = None
        for _ in range(n_iterations):
            time_step, policy_state = driver.run(32 * driver.total_envs, time_step, policy_state)
            driver.train(num_updates=4, mini_batch_size=128, mini_batch_length=1)

    Args:
        env: see :class:`rl_trainers.drivers.stepping.SteppingDriver`.
        algorithm: a trainer.
        unroll_length: rows that observers and metrics get at once.
        exp_replayer: ``'one_time'``, ``'uniform'`` or ``'cycle_one_time'``. It gets all rows of a :meth:`run`
            as one unroll.
        observers: called with every unroll, before the metrics.
        use_rollout_state: see :class:`rl_trainers.drivers.driver.Driver`.
        metrics: as the observers, after the standard ones.
        env_batch_size: environments to make of ``env``; 1 by default.
        seed: of environments and actions that are not the task's, and of what the replayer draws.
        debug_summaries: of ALF, as the next three; changes nothing.
        summarize_grads_and_vars: likewise.
        summarize_action_distributions: likewise.
        train_step_counter: likewise; see ``counter``.
        observation_transformer: of ALF; belongs to the task, see ``timestep_to_np`` of
            :class:`rl_trainers.task.RLTask`.

    Raises:
        ValueError: arguments do not fit each other, named in the message.
    """

    def __init__(
        self,
        env: Any = None,
        algorithm: Any = None,
        unroll_length: int = 8,
        exp_replayer: str = "uniform",
        observers: Sequence[Observer] = (),
        use_rollout_state: bool | None = None,
        metrics: Sequence[StepMetric] = (),
        *,
        env_batch_size: int | None = None,
        seed: int = 0,
        debug_summaries: bool = False,
        summarize_grads_and_vars: bool = False,
        summarize_action_distributions: bool = False,
        train_step_counter: Any = None,
        observation_transformer: Any = None,
    ):
        check_transformer(observation_transformer)
        check_counts(1, unroll_length=unroll_length)
        if hasattr(algorithm, "explore"):
            raise ValueError(
                f"algorithm: {type(algorithm).__name__} acts and learns in turns by itself, from a replay of "
                "its own; make it with driver='sync'"
            )
        super().__init__(env, algorithm, observers, metrics, use_rollout_state, env_batch_size, seed)
        self.unroll_length = unroll_length
        try:
            self.replayer = make_replayer(
                exp_replayer, self.total_envs, unroll_length=unroll_length, seed=seed
            )
        except Exception:
            self.close()
            raise

    def restart(self) -> None:
        """See :class:`SteppingDriver`."""
        super().restart()
        self.replayer.restart(self.env_id)

    def run(
        self, max_num_steps: int, time_step: ActorState | None = None, policy_state: PyTree | None = None
    ) -> tuple[ActorState, PyTree]:
        """Collects; trains nothing.

        Args:
            max_num_steps: steps of all environments together, with reset rows; rounded up to whole rows.
            time_step: what an earlier call returned; ``None`` to go on from where the environments stand.
            policy_state: likewise; ``None`` for that which belongs to ``time_step``.

        Returns:
            ``(time_step, policy_state)``, for the next call. Two runs that follow one another are one that is
            as long as both.

        Raises:
            ValueError: ``max_num_steps`` is less than 1.
            RuntimeError: a replayer that gives every row back once has not given back those of the last run
                (``'cycle_one_time'``).
        """
        n_rows = rows_of(max_num_steps, self.total_envs)
        self.begin(time_step, policy_state)
        policy, unrolls = self.policy(), []
        for first in range(0, n_rows, self.unroll_length):
            unrolls.append(self.unroll(policy, min(self.unroll_length, n_rows - first)))
            self.observe(unrolls[-1], self.env_id)
        collected = concatenate(unrolls)
        if not self.algorithm.use_rollout_state:
            collected = collected._replace(steps=collected.steps._replace(policy_state=()))
        self.replayer.observe(collected, self.env_id)
        return self.time_step, self.time_step.policy_state

    def collect_initially(self, initial_collect_steps: int) -> int:
        """See :meth:`OffPolicyDriver.collect_initially`; in one :meth:`run` of whole unrolls."""
        unroll = self.unroll_length * self.total_envs
        n_steps = rows_of(initial_collect_steps, unroll) * unroll
        self.run(n_steps)
        return n_steps
