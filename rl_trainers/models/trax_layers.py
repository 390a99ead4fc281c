"""Layers of Trax (https://github.com/google/trax) as pairs of functions; Trax itself is not imported.

A layer is called with ``[R, 1, *obs]``, the axes batch and time of Trax; the leaves of nested observations
come as one vector. Layers assign their own attributes while they compute, so every trace works on a copy.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from rl_trainers.types import PyTree

Functions = tuple[Callable, Callable]
"""``init (key, x [R, ..]) -> params`` and ``apply (params, x [R, ..]) -> output``."""


def is_layer(network: Any) -> bool:
    """Whether this is an object with the functions of a ``trax.layers.Layer``."""
    return all(hasattr(network, name) for name in ("pure_fn", "init", "sublayers", "n_in"))


def functions(layer: Any, is_policy: bool) -> Functions:
    """A layer as functions; its weights, as tuples, are the parameters.

    Args:
        layer: with one input. One output of a policy is ``dist_inputs [R, D]``; one of another network is
            ``[R, W]``, or ``[R]`` where ``W`` is 1; two outputs are both of these.
        is_policy: whether a single output is a policy's.

    Raises:
        ValueError: the layer takes more than the observation.
    """
    if layer.n_in != 1:
        raise ValueError(
            f"the Trax layer {layer.name} takes {layer.n_in} inputs; it should take 1, the observation, so "
            "that inject_actions, for example, must be False"
        )

    def init(key: jax.Array, x: PyTree) -> PyTree:
        x = _batch_and_time(x)
        weights, state = copy.deepcopy(layer).init(jax.ShapeDtypeStruct(x.shape, x.dtype), rng=key)
        if jax.tree.leaves(state):
            raise ValueError(
                f"the Trax layer {layer.name} keeps state (as Normalize, BatchNorm and Dropout do), which is "
                "not supported; rl_trainers.models.Normalize is, on linen networks"
            )
        return _tuples(weights)

    def apply(weights: PyTree, x: PyTree) -> PyTree:
        x, n_rows = _batch_and_time(x), len(jax.tree.leaves(x)[0])
        empty = jax.tree.map(lambda x: x, layer.state)
        outputs, _ = copy.deepcopy(layer).pure_fn(x, weights, empty, jax.random.PRNGKey(0))
        if layer.n_out == 1:
            return _columns(outputs, n_rows, is_policy)
        dist_inputs, value = outputs
        return _columns(dist_inputs, n_rows, True), _columns(value, n_rows, False)

    return init, apply


def shared(policy: Any, value: Any, n_shared_layers: int) -> Functions:
    """Two ``trax.layers.Serial`` with their first sublayers in common, which are the policy's.

    Args:
        policy: a ``Serial``, such as ``trax.models.Policy`` returns.
        value: likewise.
        n_shared_layers: top-level sublayers to share.

    Returns:
        Functions whose parameters are ``{'shared', 'policy', 'value'}`` and whose output is
        ``(dist_inputs, value)``.

    Raises:
        ValueError: the two do not begin with so many sublayers of the same shapes, or have no others.
    """
    most = min(len(policy.sublayers), len(value.sublayers)) - 1
    if not 0 < n_shared_layers <= most:
        raise ValueError(
            f"n_shared_layers={n_shared_layers} must lie between 0 and {most}; the policy's sublayers are "
            f"{[x.name for x in policy.sublayers]}, the value network's {[x.name for x in value.sublayers]}"
        )
    (policy_init, policy_apply), (value_init, value_apply) = functions(policy, True), functions(value, False)

    def init(key: jax.Array, x: PyTree) -> PyTree:
        keys = jax.random.split(key)
        one, other = policy_init(keys[0], x), value_init(keys[1], x)
        common = one[:n_shared_layers]
        shapes = [jax.tree.map(jnp.shape, weights[:n_shared_layers]) for weights in (one, other)]
        if shapes[0] != shapes[1]:
            raise ValueError(
                f"n_shared_layers={n_shared_layers}: the first sublayers of the policy have weights of the "
                f"shapes {shapes[0]}, those of the value network {shapes[1]}; nearest valid value: 0"
            )
        return {"shared": common, "policy": one[n_shared_layers:], "value": other[n_shared_layers:]}

    def apply(params: PyTree, x: PyTree) -> PyTree:
        common = tuple(params["shared"])
        dist_inputs = policy_apply((*common, *params["policy"]), x)
        return dist_inputs, value_apply((*common, *params["value"]), x)

    return init, apply


def _batch_and_time(x: PyTree) -> jax.Array:
    leaves = jax.tree.leaves(x)
    if len(leaves) > 1:
        leaves = [jnp.concatenate([leaf.reshape(leaf.shape[0], -1) for leaf in leaves], axis=-1)]
    return leaves[0][:, None]


def _columns(y: jax.Array, n_rows: int, is_policy: bool) -> jax.Array:
    y = y.reshape(n_rows, -1)
    return y[:, 0] if y.shape[1] == 1 and not is_policy else y


def _tuples(weights: PyTree) -> PyTree:
    return tuple(map(_tuples, weights)) if isinstance(weights, (list, tuple)) else weights
