"""Off-policy actor-critic trainers with critics of actions: SAC, and its relatives DDPG and TD3."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from numbers import Real
from typing import Any

import flax.linen as nn
import gin
import gymnasium as gym
import jax
import jax.numpy as jnp

from rl_trainers import losses, models
from rl_trainers.distributions import Deterministic, Distribution, create_distribution
from rl_trainers.off_policy import OffPolicyTrainer
from rl_trainers.supervised import Loss, Trainer, check_counts
from rl_trainers.task import RLTask
from rl_trainers.types import Batch, PyTree, Rollout, TrainState

_BODY = functools.partial(models.MLP, layer_widths=(256, 256), activation=nn.relu)


class QActorCriticTrainer(OffPolicyTrainer):
    """Critics learn from targets of target critics, the policy from the critics. Abstract.

    Subclasses implement :meth:`decide`, and may have a temperature.
    """

    def __init__(
        self,
        task: RLTask,
        policy_model: Any = None,
        policy_optimizer: Any = None,
        policy_lr_schedule: Any = 3e-4,
        value_model: Any = None,
        value_optimizer: Any = None,
        value_lr_schedule: Any = 3e-4,
        batch_size: int = 256,
        train_steps_per_epoch: int | None = None,
        target_tau: float = 0.005,
        *,
        policy_body: Any = None,
        value_body: Any = None,
        n_critics: int = 2,
        policy_delay: int = 1,
        distribution: Distribution | None = None,
        **kwargs,
    ):
        """Configures the trainer.

        Args:
            task: the environment to train on.
            policy_model: factory of a model whose output is ``dist_inputs``, called as
                ``policy_model(policy_distribution=..., mode=...)``; ``None`` for
                :class:`rl_trainers.models.Policy` on ``policy_body``.
            policy_optimizer: see :func:`rl_trainers.optimizers.resolve`.
            policy_lr_schedule: likewise.
            value_model: factory of each critic, called as ``value_model(n_actions=..., mode=...)``; ``None``
                for :class:`rl_trainers.models.Value` of an action in a ``Box``, and for
                :class:`rl_trainers.models.Quality` of all actions of a ``Discrete`` space, on ``value_body``.
            value_optimizer: see :func:`rl_trainers.optimizers.resolve`.
            value_lr_schedule: likewise.
            batch_size: steps of a batch.
            train_steps_per_epoch: optimizer steps per epoch, spread evenly over its vector steps; ``None``
                for one per vector step.
            target_tau: share of the current parameters in each update of the target parameters.
            policy_body: factory of the body under the policy, if ``policy_model`` is not given; ``None`` for
                two layers of 256.
            value_body: likewise of the critics.
            n_critics: critics, the smallest of which counts.
            policy_delay: optimizer steps of the critics for one of the policy.
            distribution: of the actions; replaces the task's.
            **kwargs: the other arguments of :class:`rl_trainers.off_policy.OffPolicyTrainer`.

        Raises:
            TypeError: if the action space is not one that the trainer can do.
            ValueError: if arguments contradict one another or are out of range.
        """
        check_counts(1, n_critics=n_critics, policy_delay=policy_delay)
        if distribution is not None:
            task.set_distribution(distribution)
        super().__init__(task, batch_size, train_steps_per_epoch, target_tau=target_tau, **kwargs)
        space = task.action_space
        self._discrete = isinstance(space, gym.spaces.Discrete)
        self._first_action = int(getattr(space, "start", 0)) if self._discrete else 0
        self._policy_delay = policy_delay
        self._policy = models.build(
            policy_model or functools.partial(models.Policy, body=policy_body or _BODY),
            self.observation_space,
            "policy",
            policy_distribution=task.distribution,
            mode="train",
        )
        self._critics = self._build_critics(value_model, value_body or _BODY, n_critics)
        trainers = [
            self._trainer("value", self._value_loss, value_optimizer, value_lr_schedule),
            self._trainer("policy", self._policy_loss, policy_optimizer, policy_lr_schedule),
        ]
        sequences = [model for model in (self._policy, self._critics[0]) if model.is_sequence]
        self._start(self._init, [*trainers, *self._more_trainers()], (*sequences, self._policy)[0])
        if n_critics > 1 and _are_equal(self.state.params["value"]["0"], self.state.params["value"]["1"]):
            raise ValueError(
                f"n_critics={n_critics}: value_model gives each critic the same parameters, so all would "
                "stay the same, as with an nnx module made before (a factory that takes rngs is right); "
                "nearest valid value: 1"
            )

    def _trainer(self, part: str, loss: Loss, optimizer: Any, lr_schedule: Any) -> Trainer:
        size, n_steps = self.batch_size, self.train_steps_per_epoch
        return Trainer(
            loss, optimizer, lr_schedule, name=part, trains=(part,), batch_size=size, n_steps=n_steps
        )

    def _build_critics(self, value_model: Any, body: Any, n_critics: int) -> list[models.Model]:
        """Independent critics with parameters ``params['value'][i]``."""
        space, build = self.task.action_space, models.build
        if isinstance(space, gym.spaces.Discrete):
            model = value_model or functools.partial(models.Quality, body=body)
            made = build(model, self.observation_space, "value", mode="train", n_actions=int(space.n))
        else:
            model = value_model or functools.partial(models.Value, body=body, concatenate_actions=True)
            made = build(model, self.observation_space, "value", space, mode="train")
        return [made] * n_critics

    def _targets(self, params: PyTree) -> PyTree:
        return {"value": jax.tree.map(jnp.copy, params["value"])}

    def _more_trainers(self) -> Sequence[Trainer]:
        return ()

    def _more_params(self) -> dict[str, PyTree]:
        return {}

    def _init(self, key: jax.Array, observation: PyTree) -> tuple[PyTree, PyTree]:
        key, *keys = jax.random.split(key, len(self._critics) + 1)
        policy, policy_state = self._policy.init(key, observation)
        made = [critic.init(k, observation) for critic, k in zip(self._critics, keys, strict=True)]
        values = {str(i): params["value"] for i, (params, _) in enumerate(made)}
        params = {**policy, "value": values, **self._more_params()}
        return params, {"policy": policy_state, "value": made[0][1]}

    # What the trainers share; traced.

    def policy_apply(self, params: PyTree, model_state: PyTree, observation: PyTree) -> jax.Array:
        """``dist_inputs [.., D]`` of the policy for observations ``[.., *obs]``."""
        return self._policy.apply(params, model_state["policy"], observation)

    def gather(self, state: TrainState, data: Rollout) -> PyTree:
        """``model_state`` after taking in the observations of ``data``."""
        seen = data.steps.observation, data.steps.mask
        params, model_state = state.params, state.model_state
        critic = {"value": params["value"]["0"]}
        return {
            "policy": self._policy.gather(params, model_state["policy"], *seen),
            "value": self._critics[0].gather(critic, model_state["value"], *seen),
        }

    def q_values(
        self, params: PyTree, model_state: PyTree, observation: PyTree, action: PyTree
    ) -> jax.Array:
        """What the critics say of actions.

        Args:
            params: with the critics' under ``'value'``.
            model_state: statistics of all models.
            observation: ``[.., *obs]``.
            action: ``[K, .., *act]``; of a ``Discrete`` space ``None`` means all, ``K = A``.

        Returns:
            f32 ``[n_critics, K, ..]``.
        """
        arguments = (observation,) if self._discrete else (observation, action)
        values = jnp.stack(
            [
                critic.apply({"value": params["value"][str(i)]}, model_state["value"], *arguments)
                for i, critic in enumerate(self._critics)
            ]
        )
        if not self._discrete:
            return values
        if action is None:
            return jnp.moveaxis(values, -1, 1)
        index = jnp.broadcast_to(action - self._first_action, (len(values), *action.shape))
        return jnp.take_along_axis(values[:, None], index[..., None], axis=-1)[..., 0]

    def decide(
        self, dist_inputs: jax.Array, key: jax.Array, for_target: bool
    ) -> tuple[PyTree, jax.Array, jax.Array]:
        """The actions that stand for a policy in an expectation; traced.

        Args:
            dist_inputs: f32 ``[.., D]``.
            key: u32 ``[2]``; consumed.
            for_target: whether it is for the critics' targets.

        Returns:
            ``(action [K, .., *act], log_prob [K, ..], weight [K, ..])``, weights with sum 1 over ``K``; the
            action is ``None`` for all of a ``Discrete`` space.
        """
        raise NotImplementedError

    def alpha(self, params: PyTree) -> jax.Array:
        """The temperature, a weight of the entropy, f32 ``[]``."""
        return jnp.zeros(())

    def make_batch(self, state: TrainState, data: Rollout, hparams: dict) -> Batch:
        """The first rows ``[N, 1]`` of ``data [n_step, N]`` and their targets."""
        observation, model_state = self.successors(data), state.model_state
        params = {**state.params, **state.target_params}
        dist_inputs = self.policy_apply(params, model_state, observation)
        action, log_prob, weight = self.decide(dist_inputs, hparams["key"], True)
        q = jnp.min(self.q_values(params, model_state, observation, action), axis=0)
        value = losses.soft_value(q, log_prob, weight, self.alpha(state.params))
        first = jax.tree.map(lambda x: x[0][:, None], data.steps)
        target = self.td_target(data, value)[:, None]
        mask = first.mask * first.env_info.control_mask
        return Batch(first.observation, first.action, (), (), target, mask)

    def _value_loss(self, params: PyTree, model_state: PyTree, batch: Batch, hparams: dict):
        action = jax.tree.map(lambda x: x[None], batch.action)
        q = self.q_values(params, model_state, batch.observation, action)[:, 0]
        errors = [losses.value_loss(value, batch.value_target, batch.mask) for value in q]
        return sum(errors), {
            "value_loss": sum(errors) / len(errors),
            "value_mean": losses.masked_mean(q[0], batch.mask),
        }

    def _policy_loss(self, params: PyTree, model_state: PyTree, batch: Batch, hparams: dict):
        dist_inputs = self.policy_apply(params, model_state, batch.observation)
        action, log_prob, weight = self.decide(dist_inputs, hparams["key"], False)
        q = jnp.min(self.q_values(params, model_state, batch.observation, action), axis=0)
        alpha = jax.lax.stop_gradient(self.alpha(params))
        loss = -losses.masked_mean(losses.soft_value(q, log_prob, weight, alpha), batch.mask)
        entropy = -losses.masked_mean(jnp.sum(weight * log_prob, axis=0), batch.mask)
        return loss, {"policy_loss": loss, "policy_entropy": entropy}

    def take_step(self, trainer, state, batch, hparams):
        """As in the base class, but for a policy that waits for its critics."""
        if trainer.name != "policy" or self._policy_delay == 1:
            return super().take_step(trainer, state, batch, hparams)
        step = functools.partial(super().take_step, trainer, batch=batch, hparams=hparams)
        zero = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(step, state=state)[1])
        count = hparams["updates_before"] + hparams["update"] + 1
        return jax.lax.cond(
            count % self._policy_delay == 0, lambda s: step(state=s), lambda s: (s, zero), state
        )


@gin.configurable(module="rl_trainers", denylist=["task", "output_dir"])
class SAC(QActorCriticTrainer):
    """Soft actor-critic, Haarnoja et al. 2018, https://arxiv.org/abs/1812.05905.

    For ``Discrete`` actions expectations are exact (Christodoulou 2019, https://arxiv.org/abs/1910.07207).
    """

    def __init__(
        self,
        task: RLTask,
        entropy_coeff: float | None = None,
        target_entropy: float | None = None,
        temperature_lr_schedule: Any = 3e-4,
        **kwargs,
    ):
        """Configures SAC.

        Args:
            task: the environment to train on. Actions of a ``Box`` are squashed, with a learned deviation.
            entropy_coeff: the temperature, a weight of the entropy; ``None`` to learn it.
            target_entropy: the entropy that a learned temperature keeps up, in nats; ``None`` for minus the
                number of action dimensions of a ``Box`` with bounds -1 and 1, and for half of that of the
                uniform policy in a ``Discrete`` space.
            temperature_lr_schedule: see :func:`rl_trainers.optimizers.resolve`.
            **kwargs: arguments of :class:`QActorCriticTrainer`.

        Raises:
            TypeError: if actions are neither ``Discrete`` nor of a bounded ``Box``.
            ValueError: if a number is out of range.
        """
        _check_numbers(-math.inf, target_entropy=target_entropy)
        _check_numbers(0.0, entropy_coeff=entropy_coeff)
        space = task.action_space
        if isinstance(space, gym.spaces.Discrete):
            distribution, default = None, 0.5 * math.log(space.n)
        else:
            space = _bounded(self, space)
            distribution = create_distribution(space, learn_std="separate", bounds="squash")
            default = -float(math.prod(space.shape))
        self._target_entropy = default if target_entropy is None else target_entropy
        self._entropy_coeff = entropy_coeff
        self._temperature_lr_schedule = temperature_lr_schedule
        super().__init__(task, distribution=distribution, **kwargs)

    def _more_params(self):
        return {} if self._entropy_coeff is not None else {"temperature": jnp.zeros(())}

    def _more_trainers(self):
        schedule = self._temperature_lr_schedule
        learned = self._trainer("temperature", self._temperature_loss, None, schedule)
        return [learned] if self._entropy_coeff is None else []

    def alpha(self, params):
        """The temperature."""
        coeff = self._entropy_coeff
        return jnp.exp(params["temperature"]) if coeff is None else jnp.float32(coeff)

    def decide(self, dist_inputs, key, for_target):
        """One sample of a ``Box``, all actions of a ``Discrete`` space."""
        if self._discrete:
            log_prob = jnp.moveaxis(jax.nn.log_softmax(dist_inputs), -1, 0)
            return None, log_prob, jnp.exp(log_prob)
        action, log_prob = self.task.distribution.sample_and_log_prob(dist_inputs, key)
        return action[None], log_prob[None], jnp.ones_like(log_prob)[None]

    def _temperature_loss(self, params, model_state, batch, hparams):
        loss = losses.temperature_loss(
            params["temperature"], hparams["policy_entropy"], self._target_entropy
        )
        return loss, {"alpha": self.alpha(params)}


@gin.configurable(module="rl_trainers", denylist=["task", "output_dir"])
class DDPG(QActorCriticTrainer):
    """Deep deterministic policy gradient, Lillicrap et al. 2016, https://arxiv.org/abs/1509.02971."""

    def __init__(
        self,
        task: RLTask,
        exploration_std: float = 0.1,
        n_critics: int = 1,
        policy_delay: int = 1,
        target_std: float = 0.0,
        target_limit: float = 0.5,
        **kwargs,
    ):
        """Configures DDPG.

        Args:
            task: the environment to train on; its actions must be of a bounded ``Box``.
            exploration_std: deviation of the noise of collected actions, where the bounds are -1 and 1.
            n_critics: critics, the smallest of which counts.
            policy_delay: optimizer steps of the critics for one of the policy.
            target_std: deviation of the noise of actions in targets, likewise.
            target_limit: largest size of that noise.
            **kwargs: arguments of :class:`QActorCriticTrainer`.

        Raises:
            TypeError: if actions are not of a bounded ``Box``.
            ValueError: if a number is out of range.
        """
        _check_numbers(0.0, exploration_std=exploration_std, target_std=target_std, target_limit=target_limit)
        self._target_noise = target_std, target_limit
        space = _bounded(self, task.action_space)
        distribution = Deterministic(
            space.shape, exploration_std, low=space.low, high=space.high, bounds="squash", dtype=space.dtype
        )
        super().__init__(
            task, distribution=distribution, n_critics=n_critics, policy_delay=policy_delay, **kwargs
        )

    def _targets(self, params):
        return jax.tree.map(jnp.copy, {name: params[name] for name in ("policy", "value")})

    def draw(self, key, rates, num_envs=None):
        """As in the base class, but random actions are uniform: the noise to explore by stays near 0."""
        draws, key = super().draw(key, rates, num_envs)
        key, key_action = jax.random.split(key)
        action = jax.random.uniform(key_action, draws.action.shape, minval=-1.0, maxval=1.0)
        return draws._replace(action=action), key

    def decide(self, dist_inputs, key, for_target):
        """The policy's one action, with clipped noise in targets (TD3, eq. 14)."""
        action = self.task.distribution.mode(dist_inputs)
        std, limit = self._target_noise
        if for_target and std:
            noise = jnp.clip(std * jax.random.normal(key, action.shape), -limit, limit)
            action = jnp.clip(action + noise, -1.0, 1.0)
        ones = jnp.ones(dist_inputs.shape[:-1])[None]
        return action[None], jnp.zeros_like(ones), ones


@gin.configurable(module="rl_trainers", denylist=["task", "output_dir"])
class TD3(DDPG):
    """Twin delayed DDPG, Fujimoto et al. 2018, https://arxiv.org/abs/1802.09477."""

    def __init__(
        self,
        task: RLTask,
        n_critics: int = 2,
        policy_delay: int = 2,
        target_std: float = 0.2,
        **kwargs,
    ):
        """Configures TD3.

        Args:
            task: the environment to train on; its actions must be of a bounded ``Box``.
            n_critics: critics, the smallest of which counts.
            policy_delay: optimizer steps of the critics for one of the policy.
            target_std: deviation of the noise of actions in targets, where the bounds are -1 and 1.
            **kwargs: arguments of :class:`DDPG`.
        """
        super().__init__(
            task, n_critics=n_critics, policy_delay=policy_delay, target_std=target_std, **kwargs
        )


def _are_equal(one: PyTree, other: PyTree) -> bool:
    return all(jax.tree.leaves(jax.tree.map(jnp.array_equal, one, other)))


def _check_numbers(least: float, **arguments: Any) -> None:
    for name, value in arguments.items():
        if value is not None and not (isinstance(value, Real) and least <= float(value) < math.inf):
            wanted = "a finite number" if least < 0 else f"a finite number of at least {least}"
            near = None if not isinstance(value, Real) else max(least, 0.0)
            raise ValueError(f"{name}={value!r} must be {wanted}; nearest valid value: {near}")


def _bounded(trainer: Any, space: gym.Space) -> gym.spaces.Box:
    """The space, if it is one whose actions can be squashed."""
    if isinstance(space, gym.spaces.Box) and space.is_bounded():
        return space
    raise TypeError(f"{type(trainer).__name__} needs actions of a bounded Box, and this space is {space}")
