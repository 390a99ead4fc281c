"""Models from factories: one network, and a policy and a value network with layers in common."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import gymnasium as gym
import jax
import numpy as np

from rl_trainers.models.adapters import Model, adapt, call
from rl_trainers.models.zoo import MLP, AtariCnn, Policy, PolicyAndValue, Value


def build(
    factory: Any,
    observation_space: gym.Space,
    part: str,
    action_space: gym.Space | None = None,
    **kwargs,
) -> Model:
    """Calls a model factory and adapts what it returns.

    Args:
        factory: see :mod:`rl_trainers.models`; a :class:`Model` or linen module is taken as it is.
        observation_space: of one environment.
        part: where parameters go, see :func:`rl_trainers.models.adapters.adapt`.
        action_space: of one environment, for models of the value of actions.
        **kwargs: offered to the factory: ``policy_distribution``, ``mode``, ...

    Returns:
        A :class:`Model` over observations with any leading axes.

    Raises:
        TypeError: if the factory returns something that is no network.
    """
    network = factory if isinstance(factory, (nn.Module, Model)) else call(factory, **kwargs)
    if isinstance(network, Model):
        return network
    return adapt(network, observation_space, part, action_space)


def build_pair(
    policy: Any,
    value: Any,
    observation_space: gym.Space,
    n_shared_layers: int,
    action_space: gym.Space | None = None,
    **kwargs,
) -> Model:
    """A joint model of a policy and a value network.

    Args:
        policy: factory of the policy network.
        value: factory of the value network.
        observation_space: of one environment.
        n_shared_layers: how many of the layers normaliser (if there is one), body and head the two share,
            from below; the shared ones are the policy's.
        action_space: of one environment, if the value is one of actions.
        **kwargs: offered to the factories.

    Returns:
        A :class:`Model` whose output is ``(dist_inputs, value)``; values of actions are ``None`` where no
        action is given.

    Raises:
        ValueError: if ``n_shared_layers`` is out of range, or positive for networks that are not
            :class:`Policy` and :class:`Value`.
    """
    if n_shared_layers:
        network = _shared(policy, value, n_shared_layers, action_space is not None, **kwargs)
        return build(network, observation_space, "shared", action_space)
    one = build(policy, observation_space, "policy", **kwargs)
    other = build(value, observation_space, "value", action_space, **kwargs)

    def init(key, observation):
        keys = jax.random.split(key)
        params, state = one.init(keys[0], observation)
        value_params, value_state = other.init(keys[1], observation)
        return {**params, **value_params}, {"policy": state, "value": value_state}

    def apply(params, model_state, observation, *action):
        dist_inputs = one.apply(params, model_state["policy"], observation)
        if action_space is not None and not action:
            return dist_inputs, None
        return dist_inputs, other.apply(params, model_state["value"], observation, *action)

    def gather(params, model_state, *arguments):
        return {
            name: model.gather(params, model_state[name], *arguments)
            for name, model in (("policy", one), ("value", other))
        }

    return Model(init, apply, gather)


def _shared(
    policy: Any, value: Any, n_shared_layers: int, takes_actions: bool, **kwargs
) -> PolicyAndValue:
    made = [
        network if isinstance(network, nn.Module) else call(network, **kwargs)
        for network in (policy, value)
    ]
    if not (isinstance(made[0], Policy) and isinstance(made[1], Value)):
        raise ValueError(
            f"n_shared_layers={n_shared_layers} needs networks made by models.Policy and models.Value, and "
            f"these are {type(made[0]).__name__} and {type(made[1]).__name__}; nearest valid value: 0"
        )
    most = 1 + (made[0].normalizer is not None)
    if not 0 < n_shared_layers <= most:
        raise ValueError(
            f"n_shared_layers={n_shared_layers} must lie between 0 and {most}, the policy's layers under "
            "its head"
        )
    inject = made[1].inject_actions_n_layers, made[1].inject_actions_dim
    return PolicyAndValue(
        kwargs["policy_distribution"],
        made[0].body,
        made[0].normalizer,
        joint=n_shared_layers == most,
        head_init_range=made[0].head_init_range,
        value_body=made[1].body,
        value_head_init_range=made[1].head_init_range,
        inject_actions=(*inject, made[1].multiplicative_action_injection) if takes_actions else None,
    )


def default(network: Callable, observation_space: gym.Space) -> Callable:
    """A factory of ``network`` with a body that suits the observations.

    That is :class:`AtariCnn` for images (uint8, three axes, 36 pixels or more a side), else an
    :class:`MLP` with tanh; policy and value then have one each, which learns faster where bodies are cheap.
    """
    is_image = (
        isinstance(observation_space, gym.spaces.Box)
        and observation_space.dtype == np.uint8
        and len(observation_space.shape) == 3
        and min(observation_space.shape[:2]) >= 36
    )
    if is_image:
        return functools.partial(network, body=AtariCnn)
    apart = {"joint": False} if network is PolicyAndValue else {}
    return functools.partial(network, body=functools.partial(MLP, activation=nn.tanh), **apart)
