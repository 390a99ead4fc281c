"""Models from factories: one network, and a policy and a value network with layers in common."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import gymnasium as gym
import jax
import numpy as np
from gymnasium.vector.utils import create_empty_array

from rl_trainers.models import trax_layers
from rl_trainers.models.adapters import Model, adapt, made
from rl_trainers.models.zoo import MLP, AtariCnn, Policy, PolicyAndValue, Value
from rl_trainers.types import PyTree, Seen


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
        ValueError: if the values that a network returns have another shape than they should.
    """
    network = made(factory, **kwargs)
    is_model = isinstance(network, Model)
    model = network if is_model else adapt(network, observation_space, part, action_space)
    if "n_actions" in kwargs:
        _check_values(model, observation_space, (1, kwargs["n_actions"]), "a value of each action")
    elif action_space is None and part in ("value", "shared"):
        _check_values(model, observation_space, (1,), "one value")
    return model


def _check_values(
    model: Model, observation_space: gym.Space, shape: tuple[int, ...], what: str
) -> None:
    observation = create_empty_array(observation_space, 1)
    variables = jax.eval_shape(model.init, jax.random.PRNGKey(0), observation)
    output = jax.eval_shape(model.apply, *variables, observation)
    value = output[1] if isinstance(output, tuple) and len(output) == 2 else output
    if getattr(value, "shape", None) != shape:
        raise ValueError(
            f"value_model: its output for one observation has the shape {getattr(value, 'shape', None)}; "
            f"nearest valid shape: {shape}, {what}"
        )


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
            :class:`Policy` and :class:`Value` or Serial layers of Trax, whose sublayers it then counts.
    """
    if n_shared_layers:
        policy, value = (made(factory, **kwargs) for factory in (policy, value))
        takes_actions = action_space is not None
        if trax_layers.is_layer(policy) and trax_layers.is_layer(value) and not takes_actions:
            network: Any = trax_layers.shared(policy, value, n_shared_layers)
        else:
            network = _shared(policy, value, n_shared_layers, takes_actions)
        return adapt(network, observation_space, "shared", action_space)
    one = build(policy, observation_space, "policy", **kwargs)
    other = build(value, observation_space, "value", action_space, **kwargs)

    def init(key, observation):
        keys = jax.random.split(key)
        params, state = one.init(keys[0], observation)
        value_params, value_state = other.init(keys[1], observation)
        return {**params, **value_params}, {"policy": state, "value": value_state}

    def apply(params, model_state, observation, *action):
        dist_inputs = one.apply(params, model_state["policy"], _own(observation, "policy"))
        if action_space is not None and not action:
            return dist_inputs, None
        return dist_inputs, other.apply(params, model_state["value"], _own(observation, "value"), *action)

    def gather(params, model_state, observation, mask):
        return {
            name: model.gather(params, model_state[name], _own(observation, name), mask)
            for name, model in (("policy", one), ("value", other))
        }

    def step(params, model_state, seen):
        pairs: dict = {}
        for name, model in (("policy", one), ("value", other)):
            arguments = params, model_state[name], _own(seen, name)
            pairs[name] = model.step(*arguments) if model.step else (model.apply(*arguments), ())
        outputs, states = zip(*pairs.values(), strict=True)
        return outputs, dict(zip(pairs, states, strict=True))

    if one.step is None and other.step is None:
        return Model(init, apply, gather, one.is_sequence or other.is_sequence)
    for model in (one, other):
        if model.is_sequence and model.step is None:
            raise ValueError(
                "policy_model, value_model: one is recurrent, the other a sequence network with a window of "
                "rows; beside a recurrent one use a recurrent one or one of single rows"
            )
    first_state = {"policy": one.first_state, "value": other.first_state}
    return Model(init, apply, gather, True, step, first_state)


def _own(observation: PyTree, name: str) -> PyTree:
    """What one network of a pair sees: of the recurrent state, its own."""
    if isinstance(observation, Seen) and isinstance(observation.state, dict):
        return observation._replace(state=observation.state.get(name, ()))
    return observation


def _shared(
    policy: Any, value: Any, n_shared_layers: int, takes_actions: bool
) -> PolicyAndValue:
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
    inject = value.inject_actions_n_layers, value.inject_actions_dim
    return PolicyAndValue(
        policy.policy_distribution,
        policy.body,
        policy.normalizer,
        joint=n_shared_layers == most,
        head_init_range=policy.head_init_range,
        value_body=value.body,
        value_head_init_range=value.head_init_range,
        inject_actions=(*inject, value.multiplicative_action_injection) if takes_actions else None,
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
