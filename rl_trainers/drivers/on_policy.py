"""The on-policy driver: unroll, train once on what was unrolled, and again."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import gin
import jax

from rl_trainers.drivers.driver import Observer
from rl_trainers.drivers.metrics import StepMetric
from rl_trainers.drivers.stepping import SteppingDriver, check_transformer, rows_of
from rl_trainers.types import ActorState, PyTree, Rollout

_EPSILON = 0.1


@gin.configurable(module="rl_trainers.drivers")
class OnPolicyDriver(SteppingDriver):
    """Unrolls a policy, and trains it with one optimizer step on the rows, which are then forgotten.

    The words are those of ALF (https://github.com/HorizonRobotics/alf). Parameters are the same within an
    unroll and new with the next one. Through a recurrent policy the gradient goes over all of an unroll, and
    not across its beginning, to which the state is carried.

    What becomes of the last row depends on ``final_step_mode``, with ``n = train_interval``:

    ==================== ================== ===================== ============================================
    mode                 rows of an unroll  rows that are trained value at the end
    ==================== ================== ===================== ============================================
    ``FINAL_STEP_REDO``  ``n``              all                   of the observation after the last row, with
                                                                  which the next unroll begins
    ``FINAL_STEP_SKIP``  ``n + 1``          all but the last      of the last row's observation
    ``FINAL_STEP_NO``    ``n``              all but the last      of the last row's observation
    ==================== ================== ===================== ============================================

    ::

        driver = OnPolicyDriver(None, trainer, train_interval=8)
        time_step, policy_state, steps = driver.run(10_000)
        time_step, policy_state, steps = driver.run(10_000, time_step, policy_state)  # goes on

    Args:
        env: see :class:`rl_trainers.drivers.stepping.SteppingDriver`. Without training, ``None`` stands for
            environments of its own like the task's, which playing thus does not disturb.
        algorithm: a trainer, on-policy if it is to be trained.
        observers: called with every unroll, before the metrics.
        metrics: likewise, after the standard ones.
        use_rollout_state: see :class:`rl_trainers.drivers.driver.Driver`; a recurrent policy is trained from
            the states that it had.
        training: whether to train; without, :meth:`run` only plays.
        greedy_predict: play the mode of the policy's distribution, but for ``epsilon_greedy`` of the rows.
        epsilon_greedy: share of rows in [0, 1] that are sampled when playing, drawn for each row. ``None`` is
            1, or with ``greedy_predict`` 0.1.
        train_interval: ``n``, see above; without training, most rows of an unroll.
        final_step_mode: one of the three.
        env_batch_size: environments to make of ``env``; 1 by default.
        seed: of environments and actions that are not the task's.
        debug_summaries: of ALF, as the next three; changes nothing.
        summarize_grads_and_vars: likewise.
        summarize_action_distributions: likewise.
        train_step_counter: likewise; see ``counter``.
        observation_transformer: of ALF; belongs to the task, see ``timestep_to_np`` of
            :class:`rl_trainers.task.RLTask`.

    Attributes:
        counter: unrolls that were trained.

    Raises:
        ValueError: arguments do not fit each other, named in the message.
    """

    FINAL_STEP_REDO, FINAL_STEP_SKIP, FINAL_STEP_NO = 0, 1, 2

    def __init__(
        self,
        env: Any = None,
        algorithm: Any = None,
        observers: Sequence[Observer] = (),
        metrics: Sequence[StepMetric] = (),
        use_rollout_state: bool | None = None,
        training: bool = True,
        greedy_predict: bool = False,
        epsilon_greedy: float | None = None,
        train_interval: int = 20,
        final_step_mode: int = FINAL_STEP_REDO,
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
        self._check_interval(training, train_interval, final_step_mode)
        epsilon = _epsilon(training, greedy_predict, epsilon_greedy)
        if algorithm is not None:
            (_check_trains if training else _check_has_mode)(algorithm, epsilon)
        super().__init__(
            env,
            algorithm,
            observers,
            metrics,
            use_rollout_state,
            env_batch_size,
            seed,
            apart=not training,
            epsilon=epsilon,
        )
        self.training = training
        self.train_interval, self.final_step_mode = train_interval, final_step_mode

    def _check_interval(self, training: bool, interval: int, mode: int) -> None:
        if mode not in (self.FINAL_STEP_REDO, self.FINAL_STEP_SKIP, self.FINAL_STEP_NO):
            raise ValueError(
                f"final_step_mode: must be 0 (FINAL_STEP_REDO), 1 (FINAL_STEP_SKIP) or 2 (FINAL_STEP_NO), "
                f"got {mode!r}; the nearest is {2 * (isinstance(mode, int) and mode > 0)}"
            )
        least = 2 if training and mode == self.FINAL_STEP_NO else 1
        if interval < least:
            why = ", of which FINAL_STEP_NO trains all but the last" if least == 2 else ""
            raise ValueError(
                f"train_interval: must be at least {least} rows{why}, got {interval}; the nearest is {least}"
            )

    @property
    def steps_per_unroll(self) -> int:
        """Steps of an iteration of training, of all environments together, with reset rows."""
        return (self.train_interval + (self.final_step_mode == self.FINAL_STEP_SKIP)) * self.total_envs

    def run(
        self, max_num_steps: int, time_step: ActorState | None = None, policy_state: PyTree | None = None
    ) -> tuple:
        """Trains, or plays.

        Args:
            max_num_steps: steps of all environments together, with reset rows; rounded up to whole unrolls
                when training, and to whole rows when playing.
            time_step: what an earlier call returned; ``None`` to go on from where the environments stand.
            policy_state: likewise; ``None`` for that which belongs to ``time_step``.

        Returns:
            ``(time_step, policy_state, steps)`` when training, with the number of steps after rounding;
            ``(time_step, policy_state)`` when playing. Two runs that follow one another are one that is as
            long as both.

        Raises:
            ValueError: ``max_num_steps`` is less than 1.
        """
        n_rows = rows_of(max_num_steps, self.total_envs)
        self.begin(time_step, policy_state)
        if not self.training:
            policy = self.policy()
            for first in range(0, n_rows, self.train_interval):
                rollout = self.unroll(policy, min(self.train_interval, n_rows - first))
                self.observe(rollout, self.env_id)
            return self.time_step, self.time_step.policy_state
        n_iterations = rows_of(max_num_steps, self.steps_per_unroll)
        for _ in range(n_iterations):
            rollout = self.unroll(self.policy(), self.steps_per_unroll // self.total_envs)
            self.observe(rollout, self.env_id)
            if self.final_step_mode != self.FINAL_STEP_REDO:
                rollout = _without_last(rollout)
            length = len(rollout.steps.mask) if self.algorithm.is_recurrent else 1
            self.train_metrics = self.algorithm.train_on(rollout, slice_length=length)
            self.counter += 1
        return self.time_step, self.time_step.policy_state, n_iterations * self.steps_per_unroll


def _without_last(rollout: Rollout) -> Rollout:
    """The rows ``[T - 1, B]``, which end with the observation of the last one."""
    steps = jax.tree.map(lambda x: x[:-1], rollout.steps)
    last = jax.tree.map(lambda x: x[-1], rollout.steps.observation)
    return rollout._replace(steps=steps, last_observation=last)


def _epsilon(training: bool, greedy_predict: bool, epsilon_greedy: float | None) -> float | None:
    if epsilon_greedy is not None and not 0 <= epsilon_greedy <= 1:
        nearest = min(max(epsilon_greedy, 0), 1)
        raise ValueError(f"epsilon_greedy: must lie in 0..1, got {epsilon_greedy}; the nearest is {nearest}")
    if training and greedy_predict:
        raise ValueError("greedy_predict: True is for training=False; what is trained on is sampled")
    if training and epsilon_greedy not in (None, 1):
        raise ValueError(
            f"epsilon_greedy: {epsilon_greedy} is for training=False; what is trained on is sampled: 1"
        )
    if epsilon_greedy is None and greedy_predict:
        return _EPSILON
    return None if epsilon_greedy == 1 else epsilon_greedy


def _check_trains(algorithm: Any, epsilon: float | None) -> None:
    if not algorithm.on_policy:
        way = "make it with driver='sync'" if hasattr(algorithm, "explore") else "use SyncOffPolicyDriver"
        raise ValueError(
            f"algorithm: {type(algorithm).__name__} learns from a replay; {way}, or training=False"
        )
    if algorithm.is_recurrent and not algorithm.use_rollout_state:
        raise ValueError(
            "use_rollout_state: is False in the algorithm, but on-policy training begins with the state that "
            "the recurrent policy had; make the algorithm with use_rollout_state=True"
        )


def _check_has_mode(algorithm: Any, epsilon: float | None) -> None:
    distribution = algorithm.task.distribution
    if epsilon is None:
        return
    try:
        jax.eval_shape(distribution.mode, jax.ShapeDtypeStruct((1, distribution.n_inputs), "float32"))
    except (AttributeError, NotImplementedError) as error:
        raise ValueError(
            f"epsilon_greedy: {epsilon} takes the mode of {distribution!r}, which has none ({error!r}); the "
            "nearest is 1, which always samples"
        ) from error
