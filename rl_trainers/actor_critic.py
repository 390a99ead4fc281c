"""Trainers whose value function and policy are learned by two optimizers, value first."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import gin
import jax

from rl_trainers import advantages, losses, models
from rl_trainers.policy_trainer import PolicyTrainer
from rl_trainers.supervised import Trainer
from rl_trainers.task import RLTask
from rl_trainers.trainer import judge
from rl_trainers.types import Batch, PyTree, Rollout, TrainState


class ActorCriticTrainer(PolicyTrainer):
    """Trains a value function, then a policy on its advantages. Abstract: needs :meth:`policy_loss`."""

    def __init__(
        self,
        task: RLTask,
        value_model: Any = None,
        value_optimizer: Any = None,
        value_lr_schedule: Any = None,
        value_batch_size: int | None = 64,
        value_train_steps_per_epoch: int = 500,
        value_evals_per_epoch: int = 1,
        value_eval_steps: int | None = None,
        n_shared_layers: int = 0,
        added_policy_slice_length: int = 0,
        n_replay_epochs: int = 1,
        scale_value_targets: bool = False,
        *,
        advantage_estimator: Callable = advantages.td_lambda,
        advantage_normalization: bool = True,
        advantage_normalization_epsilon: float = 1e-5,
        advantage_normalization_factor: float = 1.0,
        **kwargs,
    ):
        """Configures the actor-critic trainer.

        Args:
            task: the environment to train on and its replay.
            value_model: factory of a model whose output is ``value``, called as ``value_model(mode=...)``;
                ``None`` for :class:`rl_trainers.models.Value` with a body that suits the observations.
            value_optimizer: see :func:`rl_trainers.optimizers.resolve`.
            value_lr_schedule: likewise.
            value_batch_size: slices of a batch; ``None`` for all of an epoch's.
            value_train_steps_per_epoch: optimizer steps of the value function per epoch.
            value_evals_per_epoch: times per epoch that metrics are taken; changes nothing else.
            value_eval_steps: steps that each of those averages over; ``None`` for all.
            n_shared_layers: layers that the two networks share, see
                :func:`rl_trainers.models.build_pair`; both trainers train them, each with its own
                optimizer state.
            added_policy_slice_length: rewards before the value in :func:`rl_trainers.advantages.td_k`;
                other estimators look at whole rollouts whatever it is.
            n_replay_epochs: newest epochs to train on; more than 1 is for off-policy algorithms only.
            scale_value_targets: the network learns values times ``1 - gamma``.
            advantage_estimator: factory of an estimator, see :mod:`rl_trainers.advantages`.
            advantage_normalization: shift and scale each batch's advantages.
            advantage_normalization_epsilon: added to the deviation that they are divided by.
            advantage_normalization_factor: what they are multiplied by afterwards.
            **kwargs: arguments of :class:`rl_trainers.policy_trainer.PolicyTrainer`.
        """
        self._value_model = value_model
        self._n_shared_layers = n_shared_layers
        self._value_scale = 1.0 / (1.0 - task.gamma) if scale_value_targets else 1.0
        self._normalization = (advantage_normalization_epsilon, advantage_normalization_factor)
        self.advantage_normalization = advantage_normalization
        self._estimator = models.call(
            advantage_estimator, gamma=task.gamma, margin=added_policy_slice_length
        )
        self._value_trainer = Trainer(
            self._value_loss,
            value_optimizer,
            value_lr_schedule,
            self._inputs(ActorCriticTrainer, "value_batches_stream"),
            name="value",
            trains=("shared", "value"),
            batch_size=value_batch_size,
            n_steps=value_train_steps_per_epoch,
            n_evals=value_evals_per_epoch,
            n_eval_steps=value_eval_steps,
        )
        super().__init__(task, n_replay_epochs=n_replay_epochs, **kwargs)

    def _build(self, policy_model: Any) -> None:
        pair = models.build_pair(
            policy_model,
            self._value_model or models.default(models.Value, self.observation_space),
            self.observation_space,
            self._n_shared_layers,
            policy_distribution=self._distribution,
            mode="train",
        )

        def apply(params, model_state, observation):
            dist_inputs, value = pair.apply(params, model_state, observation)
            return dist_inputs, value * self._value_scale

        self._model = pair._replace(apply=apply)
        self._policy_model = pair._replace(apply=lambda *arguments: apply(*arguments)[0])
        self._start(pair.init, [self._value_trainer, self._policy_trainer], pair.is_sequence)

    def value_batches_stream(self):
        """The batches ``[N, L]`` that the value function trains on; override it to train on others."""
        return self._stream(self._value_trainer)

    def make_batch(self, state: TrainState, data: Rollout, hparams: dict) -> Batch:
        """Advantages from one pass of the value function over all rows; axes ``[T, B]``."""
        return judge(
            self._model, self._estimator, self._distribution, state, data, self.max_slice_length
        )

    def _value_loss(self, params: PyTree, model_state: PyTree, batch: Batch, hparams: dict):
        _, value = self._model.apply(params, model_state, batch.observation)
        scale, mask = self._value_scale, batch.mask
        loss = losses.value_loss(value / scale, batch.value_target / scale, mask)
        explained = losses.explained_variance(value, batch.value_target, mask)
        metrics = {"value_loss": loss, "value_mean": value, "explained_variance": explained}
        return loss, losses.masked_means(metrics, mask)

    def _policy_loss(self, params: PyTree, model_state: PyTree, batch: Batch, hparams: dict):
        if self.advantage_normalization:
            epsilon, factor = self._normalization
            normalized = losses.normalize(batch.advantage, batch.mask, epsilon)
            batch = batch._replace(advantage=normalized * factor)
        return super()._policy_loss(params, model_state, batch, hparams)

    def _entropy_loss(self, dist_inputs: jax.Array, batch: Batch, hparams: dict) -> jax.Array:
        entropy = losses.masked_mean(self._distribution.entropy(dist_inputs), batch.mask)
        return hparams["entropy_coeff"] * entropy


@gin.configurable(module="rl_trainers", denylist=["task", "output_dir"])
class A2C(ActorCriticTrainer):
    """Advantage actor-critic, Mnih et al. 2016, https://arxiv.org/abs/1602.01783, synchronous.

    The policy takes one optimizer step per epoch unless told otherwise: further ones would not be
    corrected for the change of policy.
    """

    hyperparameters = ("entropy_coeff",)

    def __init__(self, task: RLTask, entropy_coeff: float = 0.01, **kwargs):
        """Configures A2C.

        Args:
            task: the environment to train on and its replay.
            entropy_coeff: weight of the entropy bonus.
            **kwargs: arguments of :class:`ActorCriticTrainer`.
        """
        self.entropy_coeff = entropy_coeff
        one_step = {"policy_train_steps_per_epoch": 1, "policy_batch_size": None}
        super().__init__(task, **{**one_step, **kwargs})

    def policy_loss(self, dist_inputs, batch, hparams):
        """Policy gradient - entropy bonus."""
        log_prob = self._distribution.log_prob(dist_inputs, batch.action)
        entropy_loss = self._entropy_loss(dist_inputs, batch, hparams)
        loss = losses.policy_gradient(log_prob, batch.advantage, batch.mask) - entropy_loss
        return loss, {"entropy_loss": entropy_loss}


@gin.configurable(module="rl_trainers", denylist=["task", "output_dir"])
class PPO(ActorCriticTrainer):
    """Proximal policy optimization, Schulman et al. 2017, https://arxiv.org/abs/1707.06347, eq. 7."""

    hyperparameters = ("epsilon", "entropy_coeff")

    def __init__(self, task: RLTask, epsilon: float = 0.2, entropy_coeff: float = 0.01, **kwargs):
        """Configures PPO.

        Args:
            task: the environment to train on and its replay.
            epsilon: clip range of the probability ratio.
            entropy_coeff: weight of the entropy bonus.
            **kwargs: arguments of :class:`ActorCriticTrainer`.
        """
        self.epsilon = epsilon
        self.entropy_coeff = entropy_coeff
        super().__init__(task, **kwargs)

    def policy_loss(self, dist_inputs, batch, hparams):
        """Clipped surrogate - entropy bonus."""
        dist, epsilon = self._distribution, hparams["epsilon"]
        ratio = losses.probability_ratio(
            dist.log_prob(dist_inputs, batch.action), dist.log_prob(batch.dist_inputs, batch.action)
        )
        entropy_loss = self._entropy_loss(dist_inputs, batch, hparams)
        surrogate = losses.clipped_surrogate(ratio, batch.advantage, batch.mask, epsilon)
        metrics = losses.surrogate_metrics(ratio, batch.advantage, epsilon)
        return surrogate - entropy_loss, {"entropy_loss": entropy_loss, **metrics}


@gin.configurable(module="rl_trainers", denylist=["task", "output_dir"])
class AWR(ActorCriticTrainer):
    """Advantage-weighted regression, Peng et al. 2019, https://arxiv.org/abs/1910.00177, off-policy."""

    hyperparameters = ("beta", "w_max")
    on_policy = False

    def __init__(
        self,
        task: RLTask,
        beta: float = 1.0,
        w_max: float = 20.0,
        thresholds: Sequence[tuple[float, float, float]] | None = None,
        n_replay_epochs: int = 10,
        **kwargs,
    ):
        """Configures AWR.

        Args:
            task: the environment to train on and its replay.
            beta: temperature of the weights.
            w_max: largest weight.
            thresholds: weigh by percentiles instead, see
                :func:`rl_trainers.losses.threshold_weights`.
            n_replay_epochs: newest epochs to train on.
            **kwargs: arguments of :class:`ActorCriticTrainer`.
        """
        self.beta = beta
        self.w_max = w_max
        self.thresholds = thresholds
        super().__init__(task, n_replay_epochs=n_replay_epochs, **kwargs)

    def policy_loss(self, dist_inputs, batch, hparams):
        """Weighted log-likelihood."""
        weights = losses.regression_weights(batch.advantage, batch.mask, hparams, self.thresholds)
        log_prob = self._distribution.log_prob(dist_inputs, batch.action)
        loss = losses.policy_gradient(log_prob, weights, batch.mask)
        return loss, losses.weight_metrics(weights, batch.mask, hparams["w_max"])
