"""Trainers whose policy and value function are learned by one optimizer from one loss."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import gin
import jax
import jax.numpy as jnp

from rl_trainers import advantages, losses, models, windows
from rl_trainers.supervised import Trainer
from rl_trainers.task import RLTask
from rl_trainers.trainer import RLTrainer, all_observations, judge
from rl_trainers.types import Batch, PyTree, Rollout, TrainState

_log = logging.getLogger(__name__)


class ActorCriticJointTrainer(RLTrainer):
    """Trains policy and value together. Abstract: subclasses implement :meth:`joint_loss`."""

    hyperparameters: tuple[str, ...] = ("value_loss_coeff",)
    default_passes = 10
    """Passes over an epoch's rows if ``train_steps_per_epoch`` is not given."""

    def __init__(
        self,
        task: RLTask,
        joint_model: Any = None,
        optimizer: Any = None,
        lr_schedule: Any = None,
        batch_size: int | None = 64,
        train_steps_per_epoch: int | None = None,
        supervised_evals_per_epoch: int = 1,
        supervised_eval_steps: int | None = None,
        n_trajectories_per_epoch: int | None = None,
        max_slice_length: int = 1,
        normalize_advantages: bool = True,
        output_dir: str | None = None,
        n_replay_epochs: int = 1,
        *,
        value_loss_coeff: float = 0.1,
        advantage_estimator: Callable = advantages.td_lambda,
        **kwargs,
    ):
        """Configures the joint trainer.

        Args:
            task: the environment to train on and its replay.
            joint_model: factory of a model whose output is ``(dist_inputs, value)``, called as
                ``joint_model(policy_distribution=..., mode=...)``; ``None`` for
                :class:`rl_trainers.models.PolicyAndValue` with a body that suits the observations.
            optimizer: see :func:`rl_trainers.optimizers.resolve`.
            lr_schedule: likewise.
            batch_size: slices of a batch; ``None`` for all of an epoch's.
            train_steps_per_epoch: optimizer steps per epoch; ``None`` for ``default_passes`` over an
                epoch's rows, or 500 if the epoch is counted in trajectories.
            supervised_evals_per_epoch: times per epoch that metrics are taken; changes nothing else.
            supervised_eval_steps: steps that each of those averages over; ``None`` for all.
            n_trajectories_per_epoch: trajectories to collect per epoch; see :class:`RLTrainer`.
            max_slice_length: length of the slices that the model sees.
            normalize_advantages: shift and scale each batch's advantages to mean 0 and deviation 1.
            output_dir: where metrics and checkpoints go; a run found there is continued.
            n_replay_epochs: newest epochs to train on; more than 1 is for off-policy algorithms only.
            value_loss_coeff: weight of the value loss.
            advantage_estimator: factory of an estimator, see :mod:`rl_trainers.advantages`.
            **kwargs: the other arguments of :class:`rl_trainers.trainer.RLTrainer`.
        """
        super().__init__(
            task,
            n_trajectories_per_epoch,
            output_dir=output_dir,
            max_slice_length=max_slice_length,
            n_replay_epochs=n_replay_epochs,
            **kwargs,
        )
        self.value_loss_coeff = value_loss_coeff
        self.normalize_advantages = normalize_advantages
        self._estimator = advantage_estimator(task.gamma)
        self._distribution = task.distribution
        self._model = models.build(
            joint_model or models.default(models.PolicyAndValue, self.observation_space),
            self.observation_space,
            "shared",
            policy_distribution=task.distribution,
            mode="train",
        )
        self._trainer = Trainer(
            self._loss,
            optimizer,
            lr_schedule,
            self._inputs(ActorCriticJointTrainer, "batches_stream"),
            name="joint",
            batch_size=batch_size,
            n_steps=self._train_steps(train_steps_per_epoch, batch_size),
            n_evals=supervised_evals_per_epoch,
            n_eval_steps=supervised_eval_steps,
        )
        self._start(self._model.init, [self._trainer], self._model)

    @property
    def bears_lag(self) -> bool:
        """See :class:`RLTrainer`."""
        return not self.on_policy or advantages.corrects_lag(self._estimator)

    def policy_apply(self, params: PyTree, model_state: PyTree, observation: PyTree) -> jax.Array:
        """``dist_inputs [.., D]`` of the policy for observations ``[.., *obs]``."""
        return self._model.apply(params, model_state, observation)[0]

    def make_batch(self, state: TrainState, data: Rollout, hparams: dict) -> Batch:
        """Advantages from one pass of the value function over all rows; axes ``[T, B]``."""
        model = functools.partial(self._model.apply, state.params, state.model_state)
        judged = windows.over_rollout(model, all_observations(data), self.max_slice_length)
        return judge(self._estimator, self._distribution, data, *judged)

    def gather(self, state: TrainState, data: Rollout) -> PyTree:
        """``model_state`` after taking in the observations of ``data``."""
        steps = data.steps
        return self._model.gather(state.params, state.model_state, steps.observation, steps.mask)

    def batches_stream(self) -> Iterator[Batch]:
        """The batches ``[N, L]`` that training draws; override it to train on others."""
        return self._stream(self._trainer)

    def joint_loss(
        self, dist_inputs: jax.Array, value: jax.Array, batch: Batch, hparams: dict
    ) -> tuple[jax.Array, dict]:
        """The loss of one batch; traced.

        Args:
            dist_inputs: f32 ``[N, L, D]``, the model's; ``[1, N, D]`` where slices are single rows.
            value: f32 ``[N, L]``, the model's; likewise.
            batch: with normalised advantages, if that is asked for.
            hparams: f32 scalars by name.

        Returns:
            ``(loss f32 [], metrics)``; metrics by name, f32 ``[]``, or ``[N, L]`` to be averaged.
        """
        raise NotImplementedError

    def _loss(self, params, model_state, batch: Batch, hparams: dict) -> tuple[jax.Array, dict]:
        dist_inputs, value = self._model.apply(params, model_state, batch.observation)
        mask = batch.mask
        if self.normalize_advantages:
            batch = batch._replace(advantage=losses.normalize(batch.advantage, mask))
        loss, metrics = self.joint_loss(dist_inputs, value, batch, hparams)
        log_prob = self._distribution.log_prob(dist_inputs, batch.action)
        common = {
            "joint_loss": loss,
            "advantage_mean": batch.advantage,
            "advantage_norm": jnp.linalg.norm(batch.advantage * mask),
            "value_loss": jnp.square(value - batch.value_target),
            "explained_variance": losses.explained_variance(value, batch.value_target, mask),
            "log_probs_mean": log_prob,
            "preferred_move": losses.preferred_move(self._distribution.mode(dist_inputs), mask),
        }
        return loss, losses.masked_means({**common, **metrics}, mask)

    def _train_steps(self, train_steps_per_epoch: int | None, batch_size: int | None) -> int:
        """Steps that make ``default_passes`` over an epoch's rows, if the user did not say."""
        if train_steps_per_epoch is not None:
            return train_steps_per_epoch
        if self.n_interactions_per_epoch is None:
            return 500
        envs = self.task.env.num_envs
        rows = -(-(self.n_interactions_per_epoch // envs) // self.max_slice_length) * envs
        return self.default_passes * -(-rows // (batch_size or rows))


@gin.configurable(module="rl_trainers", denylist=["task", "output_dir"])
class PPOJoint(ActorCriticJointTrainer):
    """Proximal policy optimization, Schulman et al. 2017, https://arxiv.org/abs/1707.06347, eq. 9."""

    hyperparameters = ("value_loss_coeff", "epsilon", "entropy_coeff")
    bears_lag = True

    def __init__(
        self,
        task: RLTask,
        epsilon: float = 0.2,
        value_loss_coeff: float = 0.1,
        entropy_coeff: float = 0.01,
        **kwargs,
    ):
        """Configures PPO.

        Args:
            task: the environment to train on and its replay.
            epsilon: clip range of the probability ratio.
            value_loss_coeff: weight of the value loss.
            entropy_coeff: weight of the entropy bonus.
            **kwargs: arguments of :class:`ActorCriticJointTrainer`.
        """
        self.epsilon = epsilon
        self.entropy_coeff = entropy_coeff
        super().__init__(task, value_loss_coeff=value_loss_coeff, **kwargs)

    def joint_loss(self, dist_inputs, value, batch, hparams):
        """Clipped surrogate + value loss - entropy bonus."""
        dist, mask, epsilon = self._distribution, batch.mask, hparams["epsilon"]
        ratio = losses.probability_ratio(
            dist.log_prob(dist_inputs, batch.action), dist.log_prob(batch.dist_inputs, batch.action)
        )
        surrogate = losses.clipped_surrogate(ratio, batch.advantage, mask, epsilon)
        value_loss = losses.value_loss(value, batch.value_target, mask)
        entropy = losses.masked_mean(dist.entropy(dist_inputs), mask)
        entropy_loss = hparams["entropy_coeff"] * entropy
        loss = surrogate + hparams["value_loss_coeff"] * value_loss - entropy_loss
        return loss, {
            "entropy": entropy,
            "entropy_loss": entropy_loss,
            "ppo_objective_mean": -surrogate,
            **losses.surrogate_metrics(ratio, batch.advantage, epsilon),
        }


@gin.configurable(module="rl_trainers", denylist=["task", "output_dir"])
class A2CJoint(ActorCriticJointTrainer):
    """Advantage actor-critic, Mnih et al. 2016, https://arxiv.org/abs/1602.01783, synchronous."""

    hyperparameters = ("value_loss_coeff", "entropy_coeff")
    default_passes = 1

    def __init__(
        self,
        task: RLTask,
        value_loss_coeff: float = 0.1,
        entropy_coeff: float = 0.01,
        **kwargs,
    ):
        """Configures A2C.

        Args:
            task: the environment to train on and its replay.
            value_loss_coeff: weight of the value loss.
            entropy_coeff: weight of the entropy bonus.
            **kwargs: arguments of :class:`ActorCriticJointTrainer`.
        """
        self.entropy_coeff = entropy_coeff
        super().__init__(task, value_loss_coeff=value_loss_coeff, **kwargs)
        one_pass = self._train_steps(None, self._trainer.batch_size)
        if self.n_interactions_per_epoch is not None and self._trainer.n_steps > one_pass:
            _log.warning(
                "train_steps_per_epoch=%d: A2CJoint trains several times on each row without correcting for "
                "the change of policy; %d steps make one pass",
                self._trainer.n_steps,
                one_pass,
            )

    def joint_loss(self, dist_inputs, value, batch, hparams):
        """Policy gradient + value loss - entropy bonus."""
        dist, mask = self._distribution, batch.mask
        log_prob = dist.log_prob(dist_inputs, batch.action)
        objective = -losses.policy_gradient(log_prob, batch.advantage, mask)
        value_loss = losses.value_loss(value, batch.value_target, mask)
        entropy = losses.masked_mean(dist.entropy(dist_inputs), mask)
        entropy_loss = hparams["entropy_coeff"] * entropy
        loss = hparams["value_loss_coeff"] * value_loss - objective - entropy_loss
        old_log_prob = dist.log_prob(batch.dist_inputs, batch.action)
        ratio = losses.probability_ratio(log_prob, old_log_prob)
        return loss, {
            "entropy": entropy,
            "entropy_loss": entropy_loss,
            "a2c_objective_mean": objective,
            "approximate_kl_divergence": losses.approximate_kl(ratio),
        }


@gin.configurable(module="rl_trainers", denylist=["task", "output_dir"])
class AWRJoint(ActorCriticJointTrainer):
    """Advantage-weighted regression, Peng et al. 2019, https://arxiv.org/abs/1910.00177, off-policy."""

    hyperparameters = ("value_loss_coeff", "beta", "w_max")
    on_policy = False

    def __init__(
        self,
        task: RLTask,
        value_loss_coeff: float = 0.1,
        beta: float = 1.0,
        w_max: float = 20.0,
        thresholds: Sequence[tuple[float, float, float]] | None = None,
        n_replay_epochs: int = 10,
        **kwargs,
    ):
        """Configures AWR.

        Args:
            task: the environment to train on and its replay.
            value_loss_coeff: weight of the value loss.
            beta: temperature of the weights.
            w_max: largest weight.
            thresholds: weigh by percentiles instead, see
                :func:`rl_trainers.losses.threshold_weights`.
            n_replay_epochs: newest epochs to train on.
            **kwargs: arguments of :class:`ActorCriticJointTrainer`.
        """
        self.beta = beta
        self.w_max = w_max
        self.thresholds = thresholds
        super().__init__(
            task, value_loss_coeff=value_loss_coeff, n_replay_epochs=n_replay_epochs, **kwargs
        )

    def joint_loss(self, dist_inputs, value, batch, hparams):
        """Weighted log-likelihood + value loss."""
        mask = batch.mask
        weights = losses.regression_weights(batch.advantage, mask, hparams, self.thresholds)
        log_prob = self._distribution.log_prob(dist_inputs, batch.action)
        value_loss = losses.value_loss(value, batch.value_target, mask)
        loss = losses.policy_gradient(log_prob, weights, mask)
        loss += hparams["value_loss_coeff"] * value_loss
        return loss, losses.weight_metrics(weights, mask, hparams["w_max"])
