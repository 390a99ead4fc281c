"""Trainers of a policy alone: REINFORCE, its smallest example, and expert iteration."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import gin
import jax
import jax.numpy as jnp
import numpy as np

from rl_trainers import advantages, losses, models
from rl_trainers.supervised import Trainer
from rl_trainers.task import RLTask
from rl_trainers.trainer import RLTrainer
from rl_trainers.types import Batch, PyTree, Rollout, TimeStep, TrainState


class PolicyTrainer(RLTrainer):
    """Trains a policy. Abstract: subclasses implement :meth:`policy_inputs` and :meth:`policy_loss`."""

    def __init__(
        self,
        task: RLTask,
        policy_model: Any = None,
        policy_optimizer: Any = None,
        policy_lr_schedule: Any = None,
        policy_batch_size: int | None = 64,
        policy_train_steps_per_epoch: int = 500,
        policy_evals_per_epoch: int = 1,
        policy_eval_steps: int | None = None,
        n_eval_episodes: int = 0,
        only_eval: bool = False,
        max_slice_length: int = 1,
        output_dir: str | None = None,
        **kwargs,
    ):
        """Configures the policy trainer.

        Args:
            task: the environment to train on and its replay.
            policy_model: factory of a model whose output is ``dist_inputs``, called as
                ``policy_model(policy_distribution=..., mode=...)``; ``None`` for
                :class:`rl_trainers.models.Policy` with a body that suits the observations.
            policy_optimizer: see :func:`rl_trainers.optimizers.resolve`.
            policy_lr_schedule: likewise.
            policy_batch_size: slices of a batch; ``None`` for all of an epoch's.
            policy_train_steps_per_epoch: optimizer steps per epoch.
            policy_evals_per_epoch: times per epoch that metrics are taken; changes nothing else.
            policy_eval_steps: steps that each of those averages over; ``None`` for all.
            n_eval_episodes: episodes to evaluate on after each epoch's training.
            only_eval: record nothing and train on the data that the task already has.
            max_slice_length: length of the slices that the model sees.
            output_dir: where metrics and checkpoints go; a run found there is continued.
            **kwargs: the other arguments of :class:`rl_trainers.trainer.RLTrainer`.
        """
        super().__init__(
            task,
            n_eval_episodes=n_eval_episodes,
            only_eval=only_eval,
            max_slice_length=max_slice_length,
            output_dir=output_dir,
            **kwargs,
        )
        self._distribution = task.distribution
        self._policy_trainer = Trainer(
            self._policy_loss,
            policy_optimizer,
            policy_lr_schedule,
            self._inputs(PolicyTrainer, "policy_batches_stream"),
            name="policy",
            trains=("shared", "policy"),
            batch_size=policy_batch_size,
            n_steps=policy_train_steps_per_epoch,
            n_evals=policy_evals_per_epoch,
            n_eval_steps=policy_eval_steps,
        )
        self._build(policy_model or models.default(models.Policy, self.observation_space))

    def _build(self, policy_model: Any) -> None:
        """Makes the models and starts."""
        self._policy_model = models.build(
            policy_model,
            self.observation_space,
            "policy",
            policy_distribution=self._distribution,
            mode="train",
        )
        self._start(self._policy_model.init, [self._policy_trainer], self._policy_model)

    def policy_apply(self, params: PyTree, model_state: PyTree, observation: PyTree) -> jax.Array:
        """``dist_inputs [.., D]`` of the policy for observations ``[.., *obs]``."""
        return self._policy_model.apply(params, model_state, observation)

    def policy_inputs(self, steps: TimeStep) -> tuple[jax.Array, jax.Array]:
        """What each decision is worth; traced.

        Args:
            steps: facts ``[T, B]``.

        Returns:
            ``(advantage f32 [T, B], mask f32 [T, B])``, mask 0 for decisions to leave out.
        """
        raise NotImplementedError

    def policy_loss(
        self, dist_inputs: jax.Array, batch: Batch, hparams: dict
    ) -> tuple[jax.Array, dict]:
        """The loss of one batch; traced.

        Args:
            dist_inputs: f32 ``[N, L, D]``, the model's; ``[1, N, D]`` where slices are single rows.
            batch: rows with what :meth:`policy_inputs` said as ``advantage``.
            hparams: f32 scalars by name.

        Returns:
            ``(loss f32 [], metrics)``; metrics by name, f32 ``[]``, or ``[N, L]`` to be averaged.
        """
        log_prob = self._distribution.log_prob(dist_inputs, batch.action)
        return losses.policy_gradient(log_prob, batch.advantage, batch.mask), {}

    def policy_metrics(self, dist_inputs: jax.Array, batch: Batch) -> dict[str, jax.Array]:
        """Metrics that do not depend on the loss; f32 ``[]``, or ``[N, L]`` to be averaged; traced."""
        dist, mask = self._distribution, batch.mask
        return {
            "policy_entropy": dist.entropy(dist_inputs),
            "advantage_mean": batch.advantage,
            "advantage_std": losses.masked_std(batch.advantage, mask),
            "log_probs_mean": dist.log_prob(dist_inputs, batch.action),
            "preferred_move": losses.preferred_move(dist.mode(dist_inputs), mask),
        }

    def policy_batches_stream(self) -> Iterator[Batch]:
        """The batches ``[N, L]`` that training draws; override it to train on others."""
        return self._stream(self._policy_trainer)

    def make_batch(self, state: TrainState, data: Rollout, hparams: dict) -> Batch:
        """Rows ``[T, B]`` with what :meth:`policy_inputs` makes of them."""
        steps = data.steps
        advantage, mask = self.policy_inputs(steps)
        return Batch(
            observation=steps.observation,
            action=steps.action,
            dist_inputs=steps.dist_inputs,
            advantage=advantage,
            value_target=advantage,
            mask=mask * steps.mask * steps.env_info.control_mask,
        )

    def gather(self, state: TrainState, data: Rollout) -> PyTree:
        """``model_state`` after taking in the observations of ``data``."""
        observation, mask = data.steps.observation, data.steps.mask
        return self._policy_model.gather(state.params, state.model_state, observation, mask)

    def _decisions(
        self, params: PyTree, model_state: PyTree, dist_inputs: jax.Array, batch: Batch, hparams: dict
    ) -> tuple[jax.Array, Batch]:
        """What the loss and the metrics of a batch see, both with axes ``[N, L]``; traced."""
        return dist_inputs, batch

    def _policy_loss(self, params, model_state, batch: Batch, hparams: dict):
        dist_inputs = self._policy_model.apply(params, model_state, batch.observation)
        dist_inputs, batch = self._decisions(params, model_state, dist_inputs, batch, hparams)
        loss, metrics = self.policy_loss(dist_inputs, batch, hparams)
        metrics = {"policy_loss": loss, **self.policy_metrics(dist_inputs, batch), **metrics}
        return loss, losses.masked_means(metrics, batch.mask)


def returns_to_go(steps: TimeStep, gamma: float) -> tuple[jax.Array, jax.Array]:
    """Discounted returns to the end of the episode, where the rows show that end.

    Args:
        steps: ``[T, B]``.
        gamma: discount factor per step.

    Returns:
        ``(return f32 [T, B], known f32 [T, B])``; ``known`` is 0 for decisions of episodes that still run
        after the last row, whose returns nobody knows.
    """
    nothing = jnp.zeros((steps.reward.shape[0] + 1, *steps.reward.shape[1:]))
    returns = advantages.lambda_returns(steps, nothing, gamma, 1.0)
    ends = advantages.lambda_returns(
        steps._replace(reward=steps.done, terminated=steps.done), nothing, 1.0, 1.0
    )
    return returns, (ends > 0).astype(jnp.float32) * steps.mask


@gin.configurable(module="rl_trainers", denylist=["task", "output_dir"])
class PolicyGradient(PolicyTrainer):
    """REINFORCE with the mean return as the baseline, Williams 1992, one optimizer step per epoch."""

    def __init__(
        self,
        task: RLTask,
        model_fn: Any = None,
        optimizer: Any = None,
        lr_schedule: Any = None,
        batch_size: int | None = None,
        n_train_steps_per_epoch: int = 1,
        n_trajectories_per_epoch: int | None = None,
        advantage_normalization: bool = True,
        **kwargs,
    ):
        """Configures REINFORCE.

        Args:
            task: the environment to train on and its replay.
            model_fn: see ``policy_model`` of :class:`PolicyTrainer`, whose other arguments may be given as
                well; the short names here are Trax's.
            optimizer: see ``policy_optimizer``.
            lr_schedule: see ``policy_lr_schedule``.
            batch_size: slices of a batch; ``None`` for all of an epoch's.
            n_train_steps_per_epoch: optimizer steps per epoch.
            n_trajectories_per_epoch: trajectories to collect per epoch; 8 if no count is given.
            advantage_normalization: shift and scale each batch's advantages.
            **kwargs: arguments of :class:`PolicyTrainer`.
        """
        self.advantage_normalization = advantage_normalization
        counts = ("n_interactions_per_epoch", "collect_per_epoch")
        if n_trajectories_per_epoch is None and not any(kwargs.get(name) for name in counts):
            n_trajectories_per_epoch = 8
        short = {
            "policy_model": model_fn,
            "policy_optimizer": optimizer,
            "policy_lr_schedule": lr_schedule,
            "policy_batch_size": batch_size,
            "policy_train_steps_per_epoch": n_train_steps_per_epoch,
        }
        super().__init__(
            task, **{**short, **kwargs}, n_trajectories_per_epoch=n_trajectories_per_epoch
        )

    def policy_inputs(self, steps):
        """Returns to go minus their mean."""
        returns, known = returns_to_go(steps, self.task.gamma)
        return returns - losses.masked_mean(returns, known), known

    def policy_loss(self, dist_inputs, batch, hparams):
        """REINFORCE."""
        if self.advantage_normalization:
            batch = batch._replace(advantage=losses.normalize(batch.advantage, batch.mask))
        return super().policy_loss(dist_inputs, batch, hparams)


@gin.configurable(module="rl_trainers", denylist=["task", "output_dir"])
class ExamplePolicyTrainer(PolicyTrainer):
    """The smallest trainer there can be: log-likelihood weighted by plain returns.

    Read it to write your own: say what a decision is worth, and leave the rest to the base class.
    """

    def __init__(
        self,
        task: RLTask,
        model: Any = None,
        optimizer: Any = None,
        lr_schedule: Any = None,
        batch_size: int = 64,
        train_steps_per_epoch: int = 500,
        collect_per_epoch: int = 50,
        max_slice_length: int = 1,
        output_dir: str | None = None,
        **kwargs,
    ):
        """Configures the example.

        Args:
            task: the environment to train on and its replay.
            model: see ``policy_model`` of :class:`PolicyTrainer`.
            optimizer: see ``policy_optimizer``.
            lr_schedule: see ``policy_lr_schedule``.
            batch_size: slices of a batch.
            train_steps_per_epoch: optimizer steps per epoch.
            collect_per_epoch: trajectories to collect per epoch.
            max_slice_length: length of the slices that the model sees.
            output_dir: where metrics and checkpoints go; a run found there is continued.
            **kwargs: the other arguments of :class:`rl_trainers.trainer.RLTrainer`.
        """
        super().__init__(
            task,
            model,
            optimizer,
            lr_schedule,
            batch_size,
            train_steps_per_epoch,
            n_trajectories_per_epoch=collect_per_epoch,
            max_slice_length=max_slice_length,
            output_dir=output_dir,
            **kwargs,
        )

    def policy_inputs(self, steps):
        """Plain returns to go."""
        return returns_to_go(steps, self.task.gamma)


@gin.configurable(module="rl_trainers", denylist=["task", "output_dir"])
class RWR(PolicyTrainer):
    """Reward-weighted regression, Peters and Schaal 2007, https://doi.org/10.1145/1273496.1273590, eq. 11.

    It is AWR without a value function: weights are min(exp(R / beta), w_max) of the returns to go.
    """

    hyperparameters = ("beta", "w_max")
    on_policy = False

    def __init__(
        self,
        task: RLTask,
        beta: float = 1.0,
        w_max: float = 20.0,
        return_normalization: bool = True,
        **kwargs,
    ):
        """Configures RWR.

        Args:
            task: the environment to train on and its replay.
            beta: temperature of the weights.
            w_max: largest weight.
            return_normalization: shift and scale each batch's returns.
            **kwargs: arguments of :class:`PolicyTrainer`.
        """
        self.beta = beta
        self.w_max = w_max
        self.return_normalization = return_normalization
        super().__init__(task, **kwargs)

    def policy_inputs(self, steps):
        """Plain returns to go."""
        return returns_to_go(steps, self.task.gamma)

    def policy_loss(self, dist_inputs, batch, hparams):
        """Weighted log-likelihood."""
        returns = batch.advantage
        if self.return_normalization:
            returns = losses.normalize(returns, batch.mask)
        weights = losses.awr_weights(returns, hparams["beta"], hparams["w_max"])
        log_prob = self._distribution.log_prob(dist_inputs, batch.action)
        loss = losses.policy_gradient(log_prob, weights, batch.mask)
        return loss, losses.weight_metrics(weights, batch.mask, hparams["w_max"])


@gin.configurable(module="rl_trainers")
def sharpened_network_policy(temperature: float, temperature_multiplier: float = 1.0) -> float:
    """The temperature at which :class:`ExpertIteration` collects.

    Args:
        temperature: what it would be otherwise.
        temperature_multiplier: below 1 the expert is greedier than the policy it teaches.
    """
    return temperature * temperature_multiplier


@gin.configurable(module="rl_trainers", denylist=["task", "output_dir"])
class ExpertIteration(PolicyTrainer):
    """Imitates the best of the trajectories that a sharpened policy collected."""

    on_policy = False

    def __init__(
        self,
        task: RLTask,
        model_fn: Any = None,
        expert_policy_fn: Any = sharpened_network_policy,
        quantile: float = 0.9,
        n_replay_epochs: int = 10,
        n_train_steps_per_epoch: int = 1000,
        filter_buffer_size: int = 256,
        optimizer: Any = None,
        lr_schedule: Any = None,
        batch_size: int = 64,
        n_trajectories_per_epoch: int = 50,
        **kwargs,
    ):
        """Configures expert iteration.

        Args:
            task: the environment to train on and its replay.
            model_fn: see ``policy_model`` of :class:`PolicyTrainer`.
            expert_policy_fn: maps the collecting temperature to the expert's.
            quantile: share of the trajectories that is left out, in [0, 1).
            n_replay_epochs: newest epochs to choose from.
            n_train_steps_per_epoch: optimizer steps per epoch.
            filter_buffer_size: trajectories that are ranked against one another; of ``n`` of them the
                best ``ceil((1 - quantile) n)`` by discounted return are imitated.
            optimizer: see ``policy_optimizer``.
            lr_schedule: see ``policy_lr_schedule``.
            batch_size: slices of a batch.
            n_trajectories_per_epoch: trajectories to collect per epoch.
            **kwargs: arguments of :class:`PolicyTrainer`.

        Raises:
            ValueError: if ``quantile`` lies outside [0, 1).
        """
        if not 0 <= quantile < 1:
            raise ValueError(f"quantile={quantile} must lie in [0, 1); nearest valid value: 0.9")
        self.quantile = quantile
        self.filter_buffer_size = filter_buffer_size
        super().__init__(
            task,
            model_fn,
            optimizer,
            lr_schedule,
            batch_size,
            n_train_steps_per_epoch,
            n_replay_epochs=n_replay_epochs,
            n_trajectories_per_epoch=n_trajectories_per_epoch,
            **kwargs,
        )
        self.collect_temperature = float(expert_policy_fn(1.0))

    def _stored(self) -> Rollout:
        data = super()._stored()
        rng = np.random.default_rng([self.seed, self._epoch])
        chosen = best_trajectories(
            data.steps, self.task.gamma, self.quantile, self.filter_buffer_size, rng
        )
        return data._replace(steps=data.steps._replace(mask=data.steps.mask * chosen))

    def policy_inputs(self, steps):
        """One for every decision that is left."""
        return jnp.ones_like(steps.mask), jnp.ones_like(steps.mask)


def n_best(n: int, quantile: float) -> int:
    """ceil((1 - quantile) n), free of rounding noise: 26 for 256 and 0.9, 3 for 10 and 0.7."""
    return int(np.ceil(np.round((1 - quantile) * n, 9)))


def best_trajectories(
    steps: TimeStep, gamma: float, quantile: float, group_size: int, rng: np.random.Generator
) -> np.ndarray:
    """Marks the trajectories with the highest discounted returns.

    Args:
        steps: host arrays ``[T, B]``.
        gamma: discount factor per step.
        quantile: share that is left out.
        group_size: trajectories are dealt at random into groups of this size, and ranked within them.
        rng: deals.

    Returns:
        f32 ``[T, B]``, 1 for rows of finished trajectories that were chosen.
    """
    passes = (steps.mask > 0) & (np.asarray(steps.env_info.discount_mask) > 0)
    facts = (steps.reward, steps.mask, steps.done, passes)
    columns = jax.tree.map(lambda x: np.swapaxes(x, 0, 1), facts)
    reward, mask, done, passes = (x.reshape(-1) for x in columns)
    first = np.zeros(steps.mask.T.shape, bool)
    first[:, 0] = True
    first = first.reshape(-1)
    begins = (mask > 0) & (first | np.roll((mask == 0) | done, 1))
    if not begins.any():
        return np.zeros(steps.mask.shape, np.float32)
    label = np.cumsum(begins) - 1
    returns = np.zeros(label[-1] + 1)
    finished = np.zeros(label[-1] + 1, bool)
    np.logical_or.at(finished, label[mask > 0], done[mask > 0])
    time = np.cumsum(passes) - passes
    age = time - time[begins][np.maximum(label, 0)]
    np.add.at(returns, label[mask > 0], (reward * gamma**age)[mask > 0])
    chosen = np.zeros(len(returns), bool)
    candidates = rng.permutation(np.flatnonzero(finished))
    for start in range(0, len(candidates), group_size):
        group = candidates[start : start + group_size]
        order = np.argsort(-returns[group], kind="stable")
        chosen[group[order[: n_best(len(group), quantile)]]] = True
    rows = chosen[np.maximum(label, 0)] & (mask > 0)
    return rows.reshape(steps.mask.T.shape).T.astype(np.float32)
