"""Models from factories: one network, and a policy and a value network with layers in common."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import gymnasium as gym
import jax
import numpy as np

from rl_trainers.models import trax_layers
from rl_trainers.models.adapters import Model, adapt, made
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
    network = made(factory, **kwargs)
    if isinstance(network, Model):
        return network
    return adapt(network, observation_space, part, action_space)


def build_pair(
    policy: Any, value: Any, observation_space: gym.Space, n_shared_layers: int, **kwargs
) -> Model:
    """A joint model of a policy and a value network.

    Args:
        policy: factory of the policy network.
        value: factory of the value network.
        observation_space: of one environment.
        n_shared_layers: how many of the layers normaliser (if there is one), body and head the two share,
            from below; the shared ones are the policy's.
        **kwargs: offered to the factories.

    Returns:
        A :class:`Model` whose output is ``(dist_inputs, value)``.

    Raises:
        ValueError: if ``n_shared_layers`` is out of range, or positive for networks that are not
            :class:`Policy` and :class:`Value` or Serial layers of Trax, whose sublayers it then counts.
    """
    if n_shared_layers:
        policy, value = (made(factory, **kwargs) for factory in (policy, value))
        is_trax = trax_layers.is_layer(policy) and trax_layers.is_layer(value)
        network = (trax_layers.shared if is_trax else _shared)(policy, value, n_shared_layers)
        return adapt(network, observation_space, "shared")
    one = build(policy, observation_space, "policy", **kwargs)
    other = build(value, observation_space, "value", **kwargs)

    def init(key, observation):
        keys = jax.random.split(key)
        params, state = one.init(keys[0], observation)
        value_params, value_state = other.init(keys[1], observation)
        return {**params, **value_params}, {"policy": state, "value": value_state}

    def both(call, params, model_state, *arguments):
        return tuple(
            getattr(model, call)(params, model_state[name], *arguments)
            for name, model in (("policy", one), ("value", other))
        )

    def gather(params, model_state, *arguments):
        states = both("gather", params, model_state, *arguments)
        return dict(zip(("policy", "value"), states, strict=True))

    is_sequence = one.is_sequence or other.is_sequence
    return Model(init, functools.partial(both, "apply"), gather, is_sequence)


def _shared(policy: Any, value: Any, n_shared_layers: int) -> PolicyAndValue:
    if not (isinstance(policy, Policy) and isinstance(value, Value)):
        raise ValueError(
            f"n_shared_layers={n_shared_layers} needs networks made by models.Policy and models.Value, or "
            f"two Serial layers of Trax; these are {type(policy).__name__} and {type(value).__name__}; "
            "nearest valid value: 0"
        )
    most = 1 + (policy.normalizer is not None)
    if not 0 < n_shared_layers <= most:
        raise ValueError(
            f"n_shared_layers={n_shared_layers} must lie between 0 and {most}, the policy's layers under "
            "its head"
        )
    return PolicyAndValue(
        policy.policy_distribution,
        policy.body,
        policy.normalizer,
        joint=n_shared_layers == most,
        head_init_range=policy.head_init_range,
        value_body=value.body,
        value_head_init_range=value.head_init_range,
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
