"""Trainers whose value function and policy are learned by two optimizers, value first."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Sequence
from typing import Any

import gin
import gymnasium as gym
import jax
import jax.numpy as jnp
import numpy as np

from rl_trainers import advantages, losses, models, windows
from rl_trainers.policy_trainer import PolicyTrainer
from rl_trainers.supervised import Trainer
from rl_trainers.task import RLTask
from rl_trainers.trainer import all_observations, behaviour, judge, to_rows
from rl_trainers.types import Batch, PyTree, Rollout, TrainState

_log = logging.getLogger(__name__)


class ActorCriticTrainer(PolicyTrainer):
    """Trains a value function, then a policy on its advantages. Abstract: needs :meth:`policy_loss`.

    With ``q_value`` the value function is Q(s, a), and the value of a state is F_j Q(s, a_j) over actions
    a_j of the distribution mu that acted (of the policy that learns where mu is not stored). The estimators
    then work as they do with V: a one-step target is r + gamma F_j Q(s', a'_j). With ``offline``, where mu
    is unknown, targets are made of the actions that were taken, r + gamma Q(s', a'), and advantages are
    taken over F_j Q(s, a_j) of the policy that learns.
    """

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
        q_value: bool = False,
        q_value_aggregate: str = "logsumexp",
        q_value_aggregate_max: bool | None = None,
        q_value_temperature: float = 1.0,
        q_value_n_samples: int = 1,
        q_value_normalization: str | None = None,
        all_actions: bool = False,
        vocab_size: int | None = None,
        target_sync: int | None = None,
        on_policy: bool | None = None,
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
            q_value: learn values of actions.
            q_value_aggregate: F, see :func:`rl_trainers.losses.aggregate_values`.
            q_value_aggregate_max: old spelling, true for ``'max'`` and false for ``'mean'``.
            q_value_temperature: tau of F.
            q_value_n_samples: how many a_j there are.
            q_value_normalization: ``'std'`` or ``'abs'`` for a temperature relative to the spread of the
                values, see :func:`rl_trainers.losses.value_spread`.
            all_actions: take every action of a ``Discrete`` space for a_j, weighted by its probability; as
                in Trax, ``q_value_n_samples`` equal to the number of actions means the same.
            vocab_size: number of actions; the space says so itself, and it must agree.
            target_sync: optimizer steps of the value function between copies of its parameters, from
                which value targets are computed; the targets are renewed with each copy, which makes it
                the schedule of Trax's ``LoopAWR``. ``None``: all targets of an epoch are computed at its
                start.
            on_policy: old argument; what the class does, and it must agree.
            **kwargs: arguments of :class:`rl_trainers.policy_trainer.PolicyTrainer`.

        Raises:
            ValueError: if arguments contradict one another or are out of range.
        """
        self.q_value = q_value
        self.q_value_aggregate = _aggregate(q_value_aggregate, q_value_aggregate_max)
        self.q_value_temperature = q_value_temperature
        self.q_value_n_samples = q_value_n_samples
        self.q_value_normalization = q_value_normalization or None
        _check_choice("q_value_normalization", self.q_value_normalization, (None, "std", "abs"))
        if q_value_temperature <= 0:
            raise ValueError(f"q_value_temperature={q_value_temperature} must be positive, such as 1.0")
        if q_value_n_samples < 1:
            raise ValueError(f"q_value_n_samples={q_value_n_samples} must be at least 1")
        every = _takes_all(all_actions, q_value_n_samples, vocab_size, task.action_space)
        self.all_actions = q_value and every
        if target_sync is not None and self._inputs(ActorCriticTrainer, "value_batches_stream"):
            raise ValueError(
                f"target_sync={target_sync} has no effect on the batches of an overridden "
                "value_batches_stream; nearest valid value: None"
            )
        self.target_sync = target_sync
        self._n_parts = _parts(target_sync, value_train_steps_per_epoch)
        if on_policy is False and self.on_policy or on_policy and n_replay_epochs > 1:
            raise ValueError(
                f"on_policy={on_policy} contradicts {type(self).__name__} with n_replay_epochs="
                f"{n_replay_epochs}; nearest valid value: {not on_policy}"
            )
        self._value_factory = value_model
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

    @property
    def bears_lag(self) -> bool:
        """See :class:`RLTrainer`."""
        return not self.on_policy or advantages.corrects_lag(self._estimator)

    def _build(self, policy_model: Any) -> None:
        pair = models.build_pair(
            policy_model,
            self._value_factory or models.default(models.Value, self.observation_space),
            self.observation_space,
            self._n_shared_layers,
            self.task.action_space if self.q_value else None,
            policy_distribution=self._distribution,
            mode="train",
        )

        def apply(*arguments):
            dist_inputs, value = pair.apply(*arguments)
            return dist_inputs, value * self._value_scale

        self._model = pair._replace(apply=apply)
        self._policy_model = pair._replace(apply=lambda *arguments: pair.apply(*arguments)[0])
        self._start(pair.init, [self._value_trainer, self._policy_trainer], pair)

    def _targets(self, params: PyTree) -> PyTree:
        parts = () if self.target_sync is None else ("shared", "value")
        # Copies, since training consumes the buffers of both.
        return {part: jax.tree.map(jnp.copy, params[part]) for part in parts if part in params}

    def _value(self, *arguments: PyTree) -> jax.Array:
        """Values f32 ``[K.., ..]`` for ``(params, model_state, observation)`` and, with Q, ``action``."""
        return self._model.apply(*arguments)[1]

    def value_batches_stream(self):
        """The batches ``[N, L]`` that the value function trains on; override it to train on others."""
        return self._stream(self._value_trainer)

    def make_batch(self, state: TrainState, data: Rollout, hparams: dict) -> Batch:
        """Advantages from one pass of the value function over all rows; axes ``[T, B]``."""
        return self._judge(state, state.params, data)

    def _judge(self, state: TrainState, value_params: PyTree, data: Rollout) -> Batch:
        observations = all_observations(data)
        policy = functools.partial(self._policy_model.apply, state.params, state.model_state)
        dist_inputs = windows.over_rollout(policy, observations, self.max_slice_length)
        model = value_params, state.model_state
        if not self.q_value:
            value = functools.partial(self._value, *model)
            values = windows.over_rollout(value, observations, self.max_slice_length)
            return judge(self._estimator, self._distribution, data, dist_inputs, values)
        # The first three keys of this split are those of the next training.
        key = jax.random.fold_in(jax.random.split(state.key, 4)[3], state.step)
        steps = data.steps
        acted = dist_inputs if self.offline else behaviour(steps, dist_inputs)
        actions, weights = self._actions(acted, key)
        q = self._values_of(model, observations, actions)
        mask = jnp.concatenate([steps.mask, jnp.ones_like(steps.mask[:1])])
        spread = losses.value_spread(q, weights, mask, self.q_value_normalization)
        how, temperature = self.q_value_aggregate, self.q_value_temperature
        values = losses.aggregate_values(q / spread, weights, how, temperature) * spread
        if not self.offline:
            return judge(self._estimator, self._distribution, data, dist_inputs, values)
        action = jax.tree.map(lambda x: x[None], steps.action)
        stored = self._values_of(model, steps.observation, action)[0]
        stored = jnp.where(steps.mask > 0, stored, values[:-1])
        followed = jnp.concatenate([stored, values[-1:]])
        batch = judge(self._estimator, self._distribution, data, dist_inputs, followed)
        return batch._replace(advantage=batch.value_target - values[:-1])

    def _values_of(self, model: tuple, observations: PyTree, actions: PyTree) -> jax.Array:
        """Values f32 ``[K, T, B]`` of actions ``[K, T, B, *act]`` in a rollout."""

        def value(observation, actions):
            actions = jax.tree.map(lambda x: jnp.moveaxis(x, 2, 0), actions)
            return jnp.moveaxis(self._value(*model, observation, actions), 0, 2)

        last = jax.tree.map(lambda x: jnp.moveaxis(x, 0, 2), actions)
        values = windows.over_rollout(value, observations, self.max_slice_length, last)
        return jnp.moveaxis(values, 2, 0)

    def _actions(self, dist_inputs: jax.Array, key: jax.Array) -> tuple[PyTree, jax.Array]:
        """Actions of the distributions ``[.., D]`` to average over, and their weights.

        Returns:
            ``(actions [K, .., *act], weights f32 [K, ..])``; the weights sum to 1 over K.
        """
        leading = dist_inputs.shape[:-1]
        if self.all_actions:
            space: Any = self.task.action_space
            actions = jnp.arange(space.n) + int(space.start)
            actions = jnp.broadcast_to(actions.reshape(-1, *[1] * len(leading)), (space.n, *leading))
            return actions, jnp.exp(self._distribution.log_prob(dist_inputs, actions))
        k = self.q_value_n_samples
        actions = self._distribution.sample(jnp.broadcast_to(dist_inputs, (k, *dist_inputs.shape)), key)
        return actions, jnp.full((k, *leading), 1.0 / k)

    def hparams(self, after: int = 0) -> dict[str, Any]:
        """See :meth:`rl_trainers.trainer.RLTrainer.hparams`."""
        step = (self._epoch + after) * self._value_trainer.n_steps
        return {**super().hparams(after), "value_step": np.int32(step)}

    def _fit(self, trainer: Trainer, state: TrainState, data: Rollout, hparams: dict):
        if self.target_sync is None or trainer.name != "value":
            return super()._fit(trainer, state, data, hparams)

        def rows(state, first):
            due = (hparams["value_step"] + first) % self.target_sync == 0
            now = {part: state.params[part] for part in state.target_params}
            target = jax.tree.map(lambda a, b: jnp.where(due, a, b), now, state.target_params)
            batch = self._judge(state, {**state.params, **target}, data)
            return state._replace(target_params=target), to_rows(batch, self.max_slice_length)

        valid = self._rows(state, data, hparams)[1]
        return trainer.fit_parts(state, rows, valid, hparams, self._n_parts)

    def _value_loss(self, params: PyTree, model_state: PyTree, batch: Batch, hparams: dict):
        action = (batch.action,) if self.q_value else ()
        value = self._value(params, model_state, batch.observation, *action)
        scale, mask = self._value_scale, batch.mask
        loss = losses.value_loss(value / scale, batch.value_target / scale, mask)
        explained = losses.explained_variance(value, batch.value_target, mask)
        metrics = {"value_loss": loss, "value_mean": value, "explained_variance": explained}
        return loss, losses.masked_means(metrics, mask)

    def _decisions(self, params, model_state, dist_inputs, batch: Batch, hparams: dict):
        if not self.advantage_normalization:
            return dist_inputs, batch
        epsilon, factor = self._normalization
        normalized = losses.normalize(batch.advantage, batch.mask, epsilon)
        return dist_inputs, batch._replace(advantage=normalized * factor)

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
    bears_lag = True

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


@gin.configurable(module="rl_trainers", denylist=["task", "output_dir"])
class SamplingAWR(ActorCriticTrainer):
    """Q-value weighted regression, Kozakowski et al. 2021, https://arxiv.org/abs/2102.06782, eq. 5.

    Each state of a batch weighs actions a_j that are drawn anew from the distribution that acted, by
    A_j = Q(s, a_j) - mean_j Q(s, a_j). With ``offline``, where that distribution is unknown, it weighs the
    stored action, and a_j come from the policy that learns, as in critic regularised regression (Wang et al.
    2020, https://arxiv.org/abs/2006.15134, eq. 3).
    """

    hyperparameters = ("beta", "w_max")
    on_policy = False

    def __init__(
        self,
        task: RLTask,
        beta: float = 1.0,
        w_max: float = 20.0,
        thresholds: Sequence[tuple[float, float, float]] | None = None,
        reweight: bool = False,
        n_replay_epochs: int = 10,
        q_value: bool = True,
        q_value_n_samples: int | None = None,
        **kwargs,
    ):
        """Configures sampling AWR.

        Args:
            task: the environment to train on and its replay.
            beta: temperature of the weights.
            w_max: largest weight.
            thresholds: weigh by percentiles instead, see
                :func:`rl_trainers.losses.threshold_weights`.
            reweight: count actions as often as the policy that learns takes them, not the one that acted.
            n_replay_epochs: newest epochs to train on.
            q_value: always true.
            q_value_n_samples: how many a_j there are; ``None`` for all actions of a ``Discrete`` space and 8
                samples in others.
            **kwargs: arguments of :class:`ActorCriticTrainer`.
        """
        if not q_value:
            raise ValueError("q_value=False: SamplingAWR needs values of actions; nearest valid value: True")
        self.beta = beta
        self.w_max = w_max
        self.thresholds = thresholds
        self.reweight = reweight
        if q_value_n_samples is None:
            q_value_n_samples = getattr(task.action_space, "n", 8)
        if q_value_n_samples == 1 and not kwargs.get("offline") and not kwargs.get("all_actions"):
            raise ValueError(
                "q_value_n_samples=1: one action has no advantage over the mean of itself; nearest valid "
                "value: 2"
            )
        super().__init__(
            task,
            n_replay_epochs=n_replay_epochs,
            q_value=True,
            q_value_n_samples=int(q_value_n_samples),
            **kwargs,
        )

    def _decisions(self, params, model_state, dist_inputs, batch, hparams):
        model = params, model_state, batch.observation
        acted = dist_inputs if self.offline else batch.dist_inputs
        actions, weights = self._actions(acted, hparams["key"])
        q = self._value(*model, actions)
        baseline = losses.aggregate_values(q, weights, "mean")
        if self.offline:
            advantage = self._value(*model, batch.action) - baseline
        else:
            advantage = _join(q - baseline)
            mask = _join(weights * batch.mask)
            dist_inputs, acted = (_join(jnp.repeat(x[None], len(q), 0)) for x in (dist_inputs, acted))
            actions = jax.tree.map(_join, actions)
            batch = batch._replace(action=actions, dist_inputs=acted, mask=mask)
        batch = batch._replace(advantage=jax.lax.stop_gradient(advantage))
        return super()._decisions(params, model_state, dist_inputs, batch, hparams)

    def policy_loss(self, dist_inputs, batch, hparams):
        """Weighted log-likelihood of the actions a_j, averaged over j."""
        weights = losses.regression_weights(batch.advantage, batch.mask, hparams, self.thresholds)
        log_prob = self._distribution.log_prob(dist_inputs, batch.action)
        mask = batch.mask
        if self.reweight:
            old_log_prob = self._distribution.log_prob(batch.dist_inputs, batch.action)
            mask = mask * jax.lax.stop_gradient(losses.probability_ratio(log_prob, old_log_prob))
        loss = losses.policy_gradient(log_prob, weights, mask)
        return loss, losses.weight_metrics(weights, batch.mask, hparams["w_max"])


QWR = SamplingAWR


def _join(x: jax.Array) -> jax.Array:
    """``[K, N, ..] -> [K N, ..]``."""
    return x.reshape(-1, *x.shape[2:])


def _check_choice(argument: str, value: Any, choices: tuple) -> None:
    if value not in choices:
        raise ValueError(f"{argument}={value!r} must be one of {choices}")


def _aggregate(how: str, is_max: bool | None) -> str:
    """``q_value_aggregate`` from itself and the older ``q_value_aggregate_max``."""
    _check_choice("q_value_aggregate", how, ("mean", "max", "softmax", "logsumexp"))
    if is_max is None:
        return how
    meant = "max" if is_max else "mean"
    _log.info("q_value_aggregate_max=%s is the old spelling of q_value_aggregate=%r", is_max, meant)
    if how not in ("logsumexp", meant):
        raise ValueError(f"q_value_aggregate_max={is_max} contradicts q_value_aggregate={how!r}: give one")
    return meant


def _takes_all(
    all_actions: bool, n_samples: int, vocab_size: int | None, action_space: gym.Space
) -> bool:
    """Whether values are averaged over all actions instead of samples."""
    n = int(action_space.n) if isinstance(action_space, gym.spaces.Discrete) else None
    if vocab_size not in (None, n):
        raise ValueError(
            f"vocab_size={vocab_size} must be the number of actions of {action_space}; nearest valid value: "
            f"{n}"
        )
    if all_actions and n is None:
        raise ValueError(
            f"all_actions=True needs a Discrete action space, and this one is {action_space}; nearest valid "
            "value: False"
        )
    return all_actions or n_samples == n


def _parts(target_sync: int | None, n_steps: int) -> int:
    """Into how many parts an epoch's value steps are cut."""
    if target_sync is None:
        return 1
    near = [k for k in range(1, n_steps + 1) if n_steps % k == 0]
    near.append(max(1, round(target_sync / n_steps)) * n_steps)
    if target_sync not in near:
        raise ValueError(
            f"target_sync={target_sync} must divide value_train_steps_per_epoch={n_steps} or be a multiple "
            f"of it; nearest valid value: {min(near, key=lambda k: abs(k - target_sync))}"
        )
    return max(1, n_steps // target_sync)
