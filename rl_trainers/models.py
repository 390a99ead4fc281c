"""Networks: a small Flax linen zoo, and the adapter that makes any network a :class:`Model`.

This is the only module that knows a network library. A trainer is given a *factory*, which it calls as
``factory(policy_distribution=..., mode=...)`` (arguments that the factory does not take are left out) and
which returns a linen module, a pair ``(init, apply)`` of functions, or a :class:`Model`.

Networks see observations with exactly one leading axis. Before that every leaf of the observation is made
a float: images (uint8) are divided by 255, here and nowhere else; ``Discrete`` and ``MultiDiscrete``
become one-hot vectors; ``Dict`` and ``Tuple`` keep their structure.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import flax.linen as nn
import gin
import gymnasium as gym
import jax
import jax.numpy as jnp
import numpy as np
from gymnasium.vector.utils import create_empty_array

from rl_trainers.types import PyTree

_HIDDEN = nn.initializers.variance_scaling(2.0, "fan_in", "uniform")


class Model(NamedTuple):
    """A network as pure functions over observations with any leading axes ``[..]``.

    Attributes:
        init: ``(key, observation [.., *obs]) -> (params, model_state)``.
        apply: ``(params, model_state, observation [.., *obs]) -> output``: ``dist_inputs [.., D]`` of a
            policy, ``value [..]`` of a value network, the pair of both of a joint one.
        gather: ``(params, model_state, observation, mask [..]) -> model_state`` takes the unmasked
            observations into the statistics.
    """

    init: Callable
    apply: Callable
    gather: Callable


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


def build(factory: Any, observation_space: gym.Space, part: str, **kwargs) -> Model:
    """Calls a model factory and adapts what it returns.

    Args:
        factory: see the module's docstring; a :class:`Model` or linen module is taken as it is.
        observation_space: of one environment.
        part: where parameters go that are not a dict with the keys ``'shared'``, ``'policy'`` and
            ``'value'`` already.
        **kwargs: offered to the factory: ``policy_distribution``, ``mode``, ...

    Returns:
        A :class:`Model` over observations with any leading axes, with parameters under those keys.

    Raises:
        TypeError: if the factory returns something else.
    """
    network = factory if isinstance(factory, (nn.Module, Model)) else call(factory, **kwargs)
    if isinstance(network, Model):
        return network
    if isinstance(network, nn.Module):
        inner = _linen(network)
    elif isinstance(network, tuple) and len(network) == 2:
        init, apply = network
        inner = Model(
            lambda key, x: (init(key, x), {}),
            lambda params, model_state, x: apply(params, x),
            lambda params, model_state, x, mask: model_state,
        )
    else:
        raise TypeError(
            f"the model factory {factory!r} returned a {type(network).__name__}; it should return a "
            "flax.linen module, a pair (init, apply) or a Model"
        )
    return _in_parts(_over_any_axes(inner, observation_space), observation_space, part)


def call(factory: Callable, **kwargs) -> Any:
    """Calls a factory with those of ``kwargs`` that it takes."""
    parameters = inspect.signature(factory).parameters.values()
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        return factory(**kwargs)
    return factory(**{p.name: kwargs[p.name] for p in parameters if p.name in kwargs})


def _linen(module: nn.Module) -> Model:
    def init(key, x):
        variables = dict(module.init(key, x))
        return variables.pop("params", {}), variables

    def gather(params, model_state, x, mask):
        if not model_state:
            return model_state
        _, model_state = module.apply(
            {"params": params, **model_state}, x, mask, mutable=list(model_state)
        )
        return model_state

    return Model(init, lambda params, state, x: module.apply({"params": params, **state}, x), gather)


def _in_parts(inner: Model, space: gym.Space, part: str) -> Model:
    """Puts parameters under ``part`` unless they have their parts already."""
    example = create_empty_array(space, 1)
    params, _ = jax.eval_shape(inner.init, jax.random.PRNGKey(0), example)
    if isinstance(params, Mapping) and set(params) <= {"shared", "policy", "value"}:
        return inner

    def init(key, observation):
        params, model_state = inner.init(key, observation)
        return {part: params}, model_state

    return Model(
        init,
        lambda params, *arguments: inner.apply(params[part], *arguments),
        lambda params, *arguments: inner.gather(params[part], *arguments),
    )


def _over_any_axes(inner: Model, space: gym.Space) -> Model:
    def rows(observation):
        leading = _leading(space, observation)
        return leading, features(
            space,
            jax.tree.map(lambda x: jnp.reshape(x, (-1, *jnp.shape(x)[len(leading) :])), observation),
        )

    def init(key, observation):
        return inner.init(key, rows(observation)[1])

    def apply(params, model_state, observation):
        leading, x = rows(observation)
        output = inner.apply(params, model_state, x)
        return jax.tree.map(lambda y: y.reshape(*leading, *y.shape[1:]), output)

    def gather(params, model_state, observation, mask):
        return inner.gather(params, model_state, rows(observation)[1], mask.reshape(-1))

    return Model(init, apply, gather)


def _concatenate(x: PyTree, flatten: bool = True) -> jax.Array:
    leaves = jax.tree.leaves(x)
    if len(leaves) == 1 and not flatten:
        return leaves[0]
    return jnp.concatenate([leaf.reshape(leaf.shape[0], -1) for leaf in leaves], axis=-1)


def _symmetric_uniform(scale: float) -> Callable:
    return lambda key, shape, dtype=jnp.float32: jax.random.uniform(key, shape, dtype, -scale, scale)


@gin.configurable(module="rl_trainers.models")
class MLP(nn.Module):
    """Dense layers over the concatenated leaves of the observation, ``[R, ..] -> [R, layer_widths[-1]]``.

    Attributes:
        layer_widths: units of each layer.
        activation: applied between layers.
        out_activation: whether it is applied after the last layer too.
        flatten: whether a single array of higher rank is flattened first.
    """

    layer_widths: Sequence[int] = (64, 64)
    activation: Callable = nn.relu
    out_activation: bool = True
    flatten: bool = True

    @nn.compact
    def __call__(self, x):
        """Features ``[R, layer_widths[-1]]``."""
        x = _concatenate(x, self.flatten)
        for i, width in enumerate(self.layer_widths):
            x = nn.Dense(width, kernel_init=_HIDDEN, name=f"dense_{i}")(x)
            if self.out_activation or i + 1 < len(self.layer_widths):
                x = self.activation(x)
        return x


@gin.configurable(module="rl_trainers.models")
class AtariCnn(nn.Module):
    """The network of Mnih et al. 2015 (https://doi.org/10.1038/nature14236), ``[R, H, W, C] -> [R, F]``.

    Attributes:
        hidden_sizes: filters of the 8x8/4, 4x4/2 and 3x3/1 convolutions.
        output_size: ``F``.
        padding: of the convolutions.
    """

    hidden_sizes: Sequence[int] = (32, 64, 64)
    output_size: int = 512
    padding: str = "VALID"

    @nn.compact
    def __call__(self, x):
        """Features ``[R, F]``."""
        for features_, size, stride in zip(self.hidden_sizes, (8, 4, 3), (4, 2, 1), strict=True):
            x = nn.Conv(features_, (size, size), stride, self.padding, kernel_init=_HIDDEN)(x)
            x = nn.relu(x)
        x = x.reshape(x.shape[0], -1)
        return nn.relu(nn.Dense(self.output_size, kernel_init=_HIDDEN)(x))


@gin.configurable(module="rl_trainers.models")
class Normalize(nn.Module):
    """Shifts and scales observations to mean 0 and variance 1 by running statistics, ``[R, ..]``.

    Statistics change only when the trainer gathers them, after an epoch's training; so all forward passes
    of an epoch use the same ones. Chan et al. 1979, "Updating formulae ... for computing sample variances".

    Attributes:
        sample_limit: rows after which the statistics stay as they are.
        epsilon: added to the standard deviation.
        limit: outputs are clipped to ``[-limit, limit]``.
    """

    sample_limit: float = math.inf
    epsilon: float = 1e-5
    limit: float = 10.0

    @nn.compact
    def __call__(self, x, mask=None):
        """Normalised observations; gathers those with ``mask [R]`` 1 where the statistics are mutable."""
        x = _concatenate(x, flatten=False)
        count = self.variable("model_state", "count", jnp.zeros, ())
        mean = self.variable("model_state", "mean", jnp.zeros, x.shape[1:])
        variance = self.variable("model_state", "variance", jnp.ones, x.shape[1:])
        if mask is not None and self.is_mutable_collection("model_state"):
            weight = mask.reshape(-1, *[1] * (x.ndim - 1))
            rows = jnp.sum(mask)
            new_mean = jnp.sum(x * weight, 0) / jnp.maximum(rows, 1)
            new_variance = jnp.sum(jnp.square(x - new_mean) * weight, 0) / jnp.maximum(rows, 1)
            total = count.value + rows
            share = jnp.where(count.value < self.sample_limit, rows / jnp.maximum(total, 1), 0.0)
            delta = new_mean - mean.value
            variance.value += share * (
                new_variance - variance.value + (1 - share) * jnp.square(delta)
            )
            mean.value += share * delta
            count.value = jnp.where(share > 0, total, count.value)
        x = (x - mean.value) / (jnp.sqrt(variance.value) + self.epsilon)
        return jnp.clip(x, -self.limit, self.limit)


class _Head(nn.Module):
    """An optional body, and a dense layer on top of it."""

    body: nn.Module | None
    n_outputs: int
    init: Callable

    @nn.compact
    def __call__(self, x):
        """Outputs ``[R, n_outputs]``."""
        if self.body is not None:
            x = self.body(x)
        x = _concatenate(x)
        return nn.Dense(self.n_outputs, kernel_init=self.init, name="head")(x)


def _head(body, n_outputs: int, head_init_range: float | None, scale: float) -> _Head:
    """A head whose outputs start small (``scale`` of the usual size), or uniform in a given range."""
    init = (
        nn.initializers.variance_scaling(scale**2, "fan_in", "uniform")
        if head_init_range is None
        else _symmetric_uniform(head_init_range)
    )
    return _Head(body, n_outputs, init)


@gin.configurable(module="rl_trainers.models", denylist=["policy_distribution"])
class Policy(nn.Module):
    """A policy network, ``[R, *obs] -> dist_inputs [R, D]``.

    Attributes:
        policy_distribution: gives ``D``.
        body: factory of the module under the head.
        normalizer: factory of a module such as :class:`Normalize`, or ``None``.
        head_init_range: bound of the head's initial weights; ``None`` for small ones.
    """

    policy_distribution: Any
    body: Callable | None = MLP
    normalizer: Callable | None = None
    head_init_range: float | None = None

    def setup(self):
        """Makes the submodules."""
        self.normalize = self.normalizer and call(self.normalizer, mode="train")
        body = self.body and call(self.body, mode="train")
        self.policy = _head(body, self.policy_distribution.n_inputs, self.head_init_range, 0.01)

    def __call__(self, x, mask=None):
        """``dist_inputs [R, D]``."""
        x = x if self.normalize is None else self.normalize(x, mask)
        return self.policy(x)


@gin.configurable(module="rl_trainers.models")
class Value(nn.Module):
    """A value network, ``[R, *obs] -> value [R]``.

    Attributes:
        body: factory of the module under the head.
        normalizer: factory of a module such as :class:`Normalize`, or ``None``.
        head_init_range: bound of the head's initial weights; ``None`` for the usual ones.
    """

    body: Callable | None = MLP
    normalizer: Callable | None = None
    head_init_range: float | None = None

    def setup(self):
        """Makes the submodules."""
        self.normalize = self.normalizer and call(self.normalizer, mode="train")
        self.value = _head(self.body and call(self.body, mode="train"), 1, self.head_init_range, 1.0)

    def __call__(self, x, mask=None):
        """``value [R]``."""
        x = x if self.normalize is None else self.normalize(x, mask)
        return self.value(x)[..., 0]


@gin.configurable(module="rl_trainers.models", denylist=["policy_distribution"])
class PolicyAndValue(nn.Module):
    """A policy and a value network, ``[R, *obs] -> (dist_inputs [R, D], value [R])``.

    Its parameters are ``{'shared', 'policy', 'value'}``; ``'shared'`` is missing if ``joint`` is false.

    Attributes:
        policy_distribution: gives ``D``.
        body: factory of the module under the heads.
        normalizer: factory of a module such as :class:`Normalize`, or ``None``.
        joint: whether both heads stand on one body; if not, each has a body of its own.
        head_init_range: bound of the policy head's initial weights; ``None`` for small ones.
        value_body: factory of the value network's own body, if it is another one.
        value_head_init_range: bound of the value head's initial weights; ``None`` for the usual ones.
    """

    policy_distribution: Any
    body: Callable | None = MLP
    normalizer: Callable | None = None
    joint: bool = True
    head_init_range: float | None = None
    value_body: Callable | None = None
    value_head_init_range: float | None = None

    def setup(self):
        """Makes the submodules."""
        self.normalize = self.normalizer and call(self.normalizer, mode="train")
        bodies = [self.body] if self.joint else [self.body, self.value_body or self.body]
        made = [body and call(body, mode="train") for body in bodies]
        self.shared = made[0] if self.joint else None
        policy_body, value_body = (None, None) if self.joint else made
        n_inputs = self.policy_distribution.n_inputs
        self.policy = _head(policy_body, n_inputs, self.head_init_range, 0.01)
        self.value = _head(value_body, 1, self.value_head_init_range, 1.0)

    def __call__(self, x, mask=None):
        """``(dist_inputs [R, D], value [R])``."""
        x = x if self.normalize is None else self.normalize(x, mask)
        x = x if self.shared is None else self.shared(x)
        return self.policy(x), self.value(x)[..., 0]


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
            :class:`Policy` and :class:`Value`.
    """
    if n_shared_layers:
        return build(_shared(policy, value, n_shared_layers, **kwargs), observation_space, "shared")
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

    return Model(init, functools.partial(both, "apply"), gather)


def _shared(policy: Any, value: Any, n_shared_layers: int, **kwargs) -> PolicyAndValue:
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
    return PolicyAndValue(
        kwargs["policy_distribution"],
        made[0].body,
        made[0].normalizer,
        joint=n_shared_layers == most,
        head_init_range=made[0].head_init_range,
        value_body=made[1].body,
        value_head_init_range=made[1].head_init_range,
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
