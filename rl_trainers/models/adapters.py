"""The record of functions that a network is for the trainers, and how networks of other kinds become one."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import flax.linen as nn
import gymnasium as gym
import jax
import jax.numpy as jnp
import numpy as np
from gymnasium.vector.utils import create_empty_array

from rl_trainers.models import nnx_modules, trax_layers
from rl_trainers.types import PyTree, Seen


class Model(NamedTuple):
    """A network as pure functions over observations with any leading axes ``[..]``.

    Attributes:
        init: ``(key, observation [.., *obs]) -> (params, model_state)``.
        apply: ``(params, model_state, observation [.., *obs]) -> output``: ``dist_inputs [.., D]`` of a
            policy, ``value [..]`` of a value network, the pair of both of a joint one. Models of the value
            of actions take ``action [K.., .., *act]`` as one argument more and return ``value [K.., ..]``;
            a pair with such a one returns ``None`` in its place if no action is given.
        gather: ``(params, model_state, observation, mask [..]) -> model_state`` takes the unmasked
            observations into the statistics.
        is_sequence: whether what it says of a row depends on the rows before. It is then given
            :class:`rl_trainers.types.Seen` with leading axes ``[N, S]``: ``N`` runs of ``S`` rows, each
            in time order.
        step: of a recurrent model, ``(params, model_state, seen [N, S]) -> (output, state [N, ..])``, with
            the state after the last row; ``None`` for others.
        first_state: of a recurrent model, the state ``[..]`` of one run before the first row of an episode;
            ``()`` for others.
    """

    init: Callable
    apply: Callable
    gather: Callable
    is_sequence: bool = False
    step: Callable | None = None
    first_state: PyTree = ()


def features(space: gym.Space, observation: PyTree) -> PyTree:
    """Makes observations floats, as the module's docstring says.

    Args:
        space: the observation space.
        observation: ``[R, *obs]``.

    Returns:
        f32 leaves ``[R, ..]``, in the structure of the space.

    Raises:
        TypeError: for spaces that have no array form.
    """
    if isinstance(space, gym.spaces.Dict):
        return {name: features(sub, observation[name]) for name, sub in space.spaces.items()}
    if isinstance(space, gym.spaces.Tuple):
        return tuple(features(sub, o) for sub, o in zip(space.spaces, observation, strict=True))
    x = jnp.asarray(observation)
    if isinstance(space, gym.spaces.Discrete):
        return jax.nn.one_hot(x - int(space.start), int(space.n))
    if isinstance(space, gym.spaces.MultiDiscrete):
        sizes = np.asarray(space.nvec).ravel()
        starts = np.asarray(space.start).ravel()
        flat = x.reshape(x.shape[0], -1)
        columns = [jax.nn.one_hot(flat[:, i] - starts[i], int(n)) for i, n in enumerate(sizes)]
        return jnp.concatenate(columns, axis=-1)
    if isinstance(space, (gym.spaces.Box, gym.spaces.MultiBinary)):
        return x.astype(jnp.float32) / 255.0 if x.dtype == jnp.uint8 else x.astype(jnp.float32)
    raise TypeError(
        f"observation space {space!r} has no array form; the spaces that have one are Box, Discrete, "
        "MultiDiscrete, MultiBinary, and Dict and Tuple of these"
    )


def _leading(space: gym.Space, observation: PyTree) -> tuple[int, ...]:
    while isinstance(space, (gym.spaces.Dict, gym.spaces.Tuple)):
        name: Any = next(iter(space.spaces)) if isinstance(space, gym.spaces.Dict) else 0
        space, observation = space.spaces[name], observation[name]
    shape = jnp.shape(observation)
    return shape[: len(shape) - len(space.shape or ())]


def call(factory: Callable, **kwargs) -> Any:
    """Calls a factory with those of ``kwargs`` that it takes."""
    parameters = nnx_modules.signature(factory).parameters.values()
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        return factory(**kwargs)
    return factory(**{p.name: kwargs[p.name] for p in parameters if p.name in kwargs})


def made(factory: Any, **kwargs) -> Any:
    """What :func:`adapt` takes: the network that a model factory returns, or ``factory`` if it is one itself.

    A factory with an argument ``rngs``, as modules of ``flax.nnx`` have, is called when parameters are
    initialised.
    """
    is_own = isinstance(factory, (nn.Module, Model)) or nnx_modules.is_module(factory)
    if is_own or (trax_layers.is_layer(factory) and not inspect.isclass(factory)):
        return factory
    if "rngs" in nnx_modules.signature(factory).parameters:
        return nnx_modules.Factory(lambda rngs: call(factory, rngs=rngs, **kwargs))
    return call(factory, **kwargs)


def adapt(
    network: Any, observation_space: gym.Space, part: str, action_space: gym.Space | None = None
) -> Model:
    """Makes a network a :class:`Model` with its parameters under ``part``.

    Args:
        network: a linen or nnx module, a Trax layer, or a pair ``(init, apply)`` of functions
            ``(key, x [R, ..]) -> params`` and ``(params, x [R, ..]) -> output``. Modules that gather
            statistics are called with a keyword ``mask [R]`` for that. Networks of the value of actions are
            called with a keyword ``action [K, R, A]`` and return ``[K, R]``. Modules that have an attribute
            ``sequence`` which is true are called with a keyword ``episode i32 [N, S]``, which tells that the
            ``R = N S`` rows are ``N`` runs of ``S`` neighbours and to which episode each row belongs; an
            output may depend on the rows of its run that are not later and belong to the same episode, and
            on no others. Those that have variables in the collection ``'carry'``, leading axes ``[N, S]``,
            are recurrent: the collection holds what was remembered before each row, which they take for the
            first row of each run and of each episode in it, and, where it is mutable, ``[N, 1]`` what they
            remember after the last row.
        observation_space: of one environment.
        part: where parameters go that are not a dict with the keys ``'shared'``, ``'policy'`` and
            ``'value'`` already.
        action_space: of one environment, for networks of the value of actions.

    Raises:
        TypeError: if it is something else.
    """
    if trax_layers.is_layer(network):
        network = trax_layers.functions(network, is_policy=part == "policy")
    if isinstance(network, nn.Module):
        inner = _linen(network)
    elif isinstance(network, nnx_modules.Factory) or nnx_modules.is_module(network):
        inner = Model(*nnx_modules.functions(network))
    elif isinstance(network, tuple) and len(network) == 2:
        inner = _functions(*network)
    else:
        raise TypeError(
            f"the model factory returned a {type(network).__name__}; it should return a flax.linen or "
            "flax.nnx module, a Trax layer, a pair (init, apply) or a Model"
        )
    is_sequence = bool(getattr(network, "sequence", False))
    if is_sequence:
        inner = _recurrent(inner, observation_space)
    model = _over_any_axes(inner, observation_space, action_space, is_sequence)
    return _in_parts(model, observation_space, part)


def _linen(module: nn.Module) -> Model:
    def init(key, x, **action):
        variables = dict(module.init(key, x, **action))
        variables.pop("carry", None)
        return variables.pop("params", {}), variables

    def apply(params, model_state, x, carry=None, **action):
        variables = {"params": params, **model_state, **_carried(carry)}
        return module.apply(variables, x, **action)

    def gather(params, model_state, x, mask, carry=None, **action):
        if not model_state:
            return model_state
        variables = {"params": params, **model_state, **_carried(carry)}
        return module.apply(variables, x, mask=mask, mutable=list(model_state), **action)[1]

    def step(params, model_state, x, carry, **action):
        variables = {"params": params, **model_state, **_carried(carry)}
        output, changed = module.apply(variables, x, mutable=["carry"], **action)
        return output, jax.tree.map(lambda x: x[:, 0], changed["carry"])

    def carry(key, x, **action):
        return dict(module.init(key, x, **action)).get("carry", ())

    return Model(init, apply, gather, step=step, first_state=carry)


def _carried(carry: PyTree) -> dict:
    return {} if carry is None else {"carry": carry}


def _recurrent(inner: Model, space: gym.Space) -> Model:
    """A sequence network with its first state, if it is recurrent."""
    if not callable(inner.first_state):
        return inner._replace(step=None, first_state=())
    x = features(space, create_empty_array(space, 1))
    episode = np.ones((1, 1), np.int32)
    carry = jax.eval_shape(functools.partial(inner.first_state, episode=episode), jax.random.PRNGKey(0), x)
    state = jax.tree.map(lambda leaf: np.zeros(leaf.shape[2:], leaf.dtype), carry)
    return inner._replace(step=inner.step if jax.tree.leaves(state) else None, first_state=state)


def _functions(init: Callable, apply: Callable) -> Model:
    return Model(
        lambda key, x, **action: (init(key, x, **action), {}),
        lambda params, model_state, x, **action: apply(params, x, **action),
        lambda params, model_state, x, mask, **action: model_state,
    )


def _in_parts(inner: Model, space: gym.Space, part: str) -> Model:
    """Puts parameters under ``part`` unless they have their parts already."""
    example = create_empty_array(space, 1)
    params, _ = jax.eval_shape(inner.init, jax.random.PRNGKey(0), example)
    if isinstance(params, Mapping) and set(params) <= {"shared", "policy", "value"}:
        return inner

    def init(key, observation):
        params, model_state = inner.init(key, observation)
        return {part: params}, model_state

    inner_step: Any = inner.step
    return inner._replace(
        init=init,
        apply=lambda params, *arguments: inner.apply(params[part], *arguments),
        gather=lambda params, *arguments: inner.gather(params[part], *arguments),
        step=inner_step and (lambda params, *arguments: inner_step(params[part], *arguments)),
    )


def _over_any_axes(
    inner: Model, space: gym.Space, action_space: gym.Space | None, is_sequence: bool
) -> Model:
    def example(x):
        if action_space is None:
            return {}
        n_rows = len(jax.tree.leaves(x)[0])
        return {"action": jnp.zeros_like(_actions(action_space, n_rows, None))}

    def rows(observation):
        """The leading axes, features with these axes made one, and what sequence networks are told."""
        seen = observation if isinstance(observation, Seen) else Seen(observation, None)
        leading, x = _rows(space, seen.observation)
        if not is_sequence:
            return leading, x, {}
        alone = seen.episode is None
        told = {"episode": jnp.ones((*leading, 1), jnp.int32) if alone else seen.episode}
        if inner.step is None:
            return leading, x, told
        is_known = bool(jax.tree.leaves(seen.state))
        runs = told["episode"].shape
        first = jax.tree.map(lambda s: jnp.broadcast_to(s, (*runs, *s.shape)), inner.first_state)
        return leading, x, {**told, "carry": seen.state if is_known else first}

    def init(key, observation):
        _, x, told = rows(observation)
        told.pop("carry", None)
        return inner.init(key, x, **example(x), **told)

    inner_step: Any = inner.step

    def step(params, model_state, observation):
        leading, x, told = rows(observation)
        output, state = inner_step(params, model_state, x, **told, **example(x))
        if action_space is not None:  # what is remembered depends on no action, and a value does
            output = (output[0], None) if isinstance(output, tuple) else None
        return jax.tree.map(lambda y: y.reshape(*leading, *y.shape[1:]), output), state

    def apply(params, model_state, observation, action=None):
        leading, x, told = rows(observation)
        if action_space is None or action is None:
            output = inner.apply(params, model_state, x, **told)
            return jax.tree.map(lambda y: y.reshape(*leading, *y.shape[1:]), output)
        n_rows = len(jax.tree.leaves(x)[0])
        features_ = _actions(action_space, n_rows, action)
        output = inner.apply(params, model_state, x, action=features_, **told)
        if not isinstance(output, tuple):
            return output.reshape(_leading(action_space, action))
        dist_inputs, values = output
        dist_inputs = dist_inputs.reshape(*leading, *dist_inputs.shape[1:])
        return dist_inputs, values.reshape(_leading(action_space, action))

    def gather(params, model_state, observation, mask):
        _, x, told = rows(observation)
        return inner.gather(params, model_state, x, mask.reshape(-1), **example(x), **told)

    is_recurrent = is_sequence and inner.step is not None
    first_state = inner.first_state if is_recurrent else ()
    return Model(init, apply, gather, is_sequence, step if is_recurrent else None, first_state)


def _rows(space: gym.Space, x: PyTree) -> tuple[tuple[int, ...], PyTree]:
    """The leading axes, and features with these axes made one."""
    leading = _leading(space, x)
    rows = jax.tree.map(lambda a: jnp.reshape(a, (-1, *jnp.shape(a)[len(leading) :])), x)
    return leading, features(space, rows)


def _actions(space: gym.Space, n_rows: int, action: PyTree) -> jax.Array:
    """Features f32 ``[K, R, A]`` of actions ``[K.., .., *act]``; of any action if ``None``."""
    if action is None:
        action = create_empty_array(space, n_rows)
    _, x = _rows(space, action)
    flat = [leaf.reshape(leaf.shape[0], -1) for leaf in jax.tree.leaves(x)]
    return jnp.concatenate(flat, axis=-1).reshape(-1, n_rows, sum(leaf.shape[1] for leaf in flat))
