"""Trainers of a value function alone: Q-learning."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import gin
import gymnasium as gym
import jax
import jax.numpy as jnp

from rl_trainers import advantages, losses, models, optimizers
from rl_trainers.off_policy import OffPolicyTrainer
from rl_trainers.supervised import Trainer, check_counts
from rl_trainers.task import RLTask
from rl_trainers.types import Batch, PyTree, Rollout, TrainState

EXPLORATION = functools.partial(
    optimizers.multifactor,
    factors="constant * linear_decay",
    constant=1.0,
    steps_per_cycle=10,
    minimum=0.05,
)
"""The share of random actions falls from .9 in the first epoch to .05 in the tenth."""


_OTHER_NAMES = {
    "batch_size": "value_batch_size",
    "train_steps_per_epoch": "value_train_steps_per_epoch",
    "target_sync": "sync_freq",
}


class ValueTrainer(OffPolicyTrainer):
    """Trains the values of the actions of a ``Discrete`` space. Abstract: needs :meth:`successor_values`."""

    collect_temperature = 0.0

    def __init__(
        self,
        task: RLTask,
        value_model: Any = None,
        value_body: Any = None,
        value_optimizer: Any = None,
        value_lr_schedule: Any = None,
        value_batch_size: int = 64,
        value_train_steps_per_epoch: int | None = None,
        value_evals_per_epoch: int = 1,
        value_eval_steps: int | None = None,
        exploration_rate: Any = EXPLORATION,
        n_eval_episodes: int = 0,
        only_eval: bool = False,
        n_replay_epochs: int | None = None,
        max_slice_length: int | None = None,
        sync_freq: int = 1000,
        scale_value_targets: bool = True,
        output_dir: str | None = None,
        *,
        n_step: int = 1,
        **kwargs,
    ):
        """Configures the value trainer.

        Args:
            task: the environment to train on; its actions must be ``Discrete``.
            value_model: factory of a model whose output is the value of each action ``[.., A]``, called as
                ``value_model(n_actions=..., mode=...)``; ``None`` for :class:`rl_trainers.models.Quality`
                with a body that suits the observations.
            value_body: factory of that body, if ``value_model`` is not given.
            value_optimizer: see :func:`rl_trainers.optimizers.resolve`.
            value_lr_schedule: likewise.
            value_batch_size: steps of a batch.
            value_train_steps_per_epoch: optimizer steps per epoch, spread evenly over its vector steps;
                ``None`` for one per vector step.
            value_evals_per_epoch: times per epoch that metrics are taken; changes nothing else.
            value_eval_steps: steps that each of those averages over; ``None`` for all.
            exploration_rate: share of random actions, a number or a schedule; see ``exploration_interval``
                of :class:`rl_trainers.off_policy.OffPolicyTrainer`.
            n_eval_episodes: episodes to evaluate on after each epoch's training.
            only_eval: record nothing and train on the data that the task already has.
            n_replay_epochs: newest epochs that the replay holds; ``None`` for ``replay_capacity`` decisions.
            max_slice_length: Trax's way to say ``n_step``, which is one less.
            sync_freq: optimizer steps between two copies of the parameters to the target network.
            scale_value_targets: the network learns values times ``1 - gamma``.
            output_dir: where metrics and checkpoints go; a run found there is continued.
            n_step: rewards before the value of what follows.
            **kwargs: the other arguments of :class:`rl_trainers.off_policy.OffPolicyTrainer`.

        Raises:
            TypeError: if actions are not ``Discrete``.
            ValueError: if arguments contradict one another or are out of range.
        """
        check_counts(1, value_batch_size=value_batch_size, sync_freq=sync_freq)
        check_counts(1, value_train_steps_per_epoch=value_train_steps_per_epoch)
        check_counts(1, max_slice_length=max_slice_length)
        for name, ours in _OTHER_NAMES.items():
            if name in kwargs:
                raise TypeError(f"{type(self).__name__} has no argument {name!r}; nearest: {ours!r}")
        space = task.action_space
        if not isinstance(space, gym.spaces.Discrete):
            raise TypeError(f"{type(self).__name__} needs a Discrete action space, and this one is {space}")
        if max_slice_length is not None:
            n_step = max(1, max_slice_length - 1)
        super().__init__(
            task,
            value_batch_size,
            value_train_steps_per_epoch,
            target_sync=sync_freq,
            n_step=n_step,
            n_replay_epochs=n_replay_epochs,
            exploration_rate=exploration_rate,
            n_eval_episodes=n_eval_episodes,
            only_eval=only_eval,
            output_dir=output_dir,
            **kwargs,
        )
        self._start_action = int(space.start)
        self._scale = 1.0 / (1.0 - task.gamma) if scale_value_targets and task.gamma < 1 else 1.0
        default = models.default(models.Quality, self.observation_space)
        if value_body is not None:
            default = functools.partial(models.Quality, body=value_body)
        self._model = models.build(
            value_model or default, self.observation_space, "value", n_actions=int(space.n), mode="train"
        )
        trainer = Trainer(
            self._value_loss,
            value_optimizer,
            value_lr_schedule,
            name="value",
            batch_size=value_batch_size,
            n_steps=self.train_steps_per_epoch,
            n_evals=value_evals_per_epoch,
            n_eval_steps=value_eval_steps,
        )
        self._start(self._model.init, [trainer], self._model)

    def _targets(self, params: PyTree) -> PyTree:
        return jax.tree.map(jnp.copy, params)

    def q_values(self, params: PyTree, model_state: PyTree, observation: PyTree) -> jax.Array:
        """f32 ``[.., A]`` for observations ``[.., *obs]``; traced."""
        return self._model.apply(params, model_state, observation) * self._scale

    def policy_apply(self, params: PyTree, model_state: PyTree, observation: PyTree) -> jax.Array:
        """The values of the actions, f32 ``[.., A]``, whose mode is the greedy action."""
        return self.q_values(params, model_state, observation)

    def gather(self, state: TrainState, data: Rollout) -> PyTree:
        """``model_state`` after taking in the observations of ``data``."""
        steps = data.steps
        return self._model.gather(state.params, state.model_state, steps.observation, steps.mask)

    def successor_values(self, state: TrainState, observation: PyTree) -> jax.Array:
        """What it is worth to be somewhere; traced.

        Args:
            state: parameters, and those of the target network.
            observation: ``[.., *obs]``.

        Returns:
            f32 ``[..]``.
        """
        raise NotImplementedError

    def make_batch(self, state: TrainState, data: Rollout, hparams: dict) -> Batch:
        """The first rows ``[N, 1]`` of ``data [n_step, N]`` and their targets."""
        target = self.td_target(data, self.successor_values(state, self.successors(data)))
        first = jax.tree.map(lambda x: x[0][:, None], data.steps)
        mask = first.mask * first.env_info.control_mask
        return Batch(first.observation, first.action, (), (), target[:, None], mask)

    def value_loss(self, value: jax.Array, target: jax.Array, mask: jax.Array) -> jax.Array:
        """The loss of values against targets, all f32 ``[N, 1]``; traced."""
        return losses.value_loss(value, target, mask)

    def _value_loss(self, params: PyTree, model_state: PyTree, batch: Batch, hparams: dict):
        q = self.q_values(params, model_state, batch.observation)
        index = (batch.action - self._start_action).astype(jnp.int32)
        value = jnp.take_along_axis(q, index[..., None], axis=-1)[..., 0]
        scale, mask = self._scale, batch.mask
        loss = self.value_loss(value / scale, batch.value_target / scale, mask)
        metrics = {"value_loss": loss, "value_mean": value, "returns_mean": batch.value_target}
        return loss, losses.masked_means(metrics, mask)


@gin.configurable(module="rl_trainers", denylist=["task", "output_dir"])
class DQN(ValueTrainer):
    """Deep Q-learning, Mnih et al. 2015, https://doi.org/10.1038/nature14236."""

    def __init__(
        self,
        task: RLTask,
        advantage_estimator: Callable = advantages.td_k,
        smoothl1loss: bool = True,
        double_dqn: bool = False,
        **kwargs,
    ):
        """Configures DQN.

        Args:
            task: the environment to train on; its actions must be ``Discrete``.
            advantage_estimator: factory of an estimator over ``n_step`` rows, see
                :mod:`rl_trainers.advantages`.
            smoothl1loss: Huber's loss instead of the square.
            double_dqn: the online network chooses the action that the target network values.
            **kwargs: arguments of :class:`ValueTrainer`.
        """
        self.smoothl1loss = smoothl1loss
        self.double_dqn = double_dqn
        super().__init__(task, advantage_estimator=advantage_estimator, **kwargs)

    def successor_values(self, state, observation):
        """The target network's value of the greedy action."""
        q = self.q_values(state.target_params, state.model_state, observation)
        if not self.double_dqn:
            return losses.greedy_value(q, q)
        online = self.q_values(state.params, state.model_state, observation)
        return losses.greedy_value(q, online)

    def value_loss(self, value, target, mask):
        """Huber's loss or the square."""
        loss = losses.huber_loss if self.smoothl1loss else losses.value_loss
        return loss(value, target, mask)
