"""Modules of ``flax.nnx`` as functions; the library is imported only where one is used."""

from __future__ import annotations

import functools
import importlib
import inspect
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import jax

from rl_trainers.types import PyTree


class Factory(NamedTuple):
    """A network that is made anew from a key.

    Attributes:
        make: ``rngs -> flax.nnx.Module``.
    """

    make: Callable


def is_module(network: Any) -> bool:
    """Whether this is a ``flax.nnx.Module``."""
    nnx: Any = sys.modules.get("flax.nnx")
    return nnx is not None and isinstance(network, nnx.Module)


def signature(factory: Callable) -> inspect.Signature:
    """``inspect.signature``, which for classes of ``flax.nnx`` knows that of the metaclass only."""
    function = factory.func if isinstance(factory, functools.partial) else factory
    nnx: Any = sys.modules.get("flax.nnx")
    if nnx is None or not (inspect.isclass(function) and issubclass(function, nnx.Module)):
        return inspect.signature(factory)
    given = (factory.args, factory.keywords) if isinstance(factory, functools.partial) else ((), {})
    return inspect.signature(functools.partial(function.__init__, None, *given[0], **given[1]))


def functions(network: Any) -> tuple[Callable, Callable, Callable]:
    """``(init, apply, gather)`` of :class:`rl_trainers.models.Model`, for observations ``[R, ..]``.

    ``nnx.Param`` are the parameters, ``nnx.BatchStat`` the statistics: these are used as they are in every
    forward pass and gathered after an epoch, from rows with mask 1.

    Args:
        network: a :class:`Factory`, or a module, whose parameters are then the initial ones for every key.

    Raises:
        TypeError: the module has other variables, or statistics but no argument ``mask``.
    """
    nnx: Any = importlib.import_module("flax.nnx")

    def made(key: jax.Array) -> Any:
        return network.make(nnx.Rngs(jax.random.wrap_key_data(key)))

    def split(module: Any) -> tuple[Any, PyTree, PyTree]:
        graph, params, others = nnx.split(module, nnx.Param, ...)
        return graph, nnx.to_pure_dict(params), nnx.to_pure_dict(others)

    is_factory = isinstance(network, Factory)
    module = nnx.eval_shape(lambda: made(jax.random.PRNGKey(0))) if is_factory else network
    _check(module, nnx)
    graph = split(module)[0]

    def init(key: jax.Array, x: PyTree, **action: Any) -> tuple[PyTree, PyTree]:
        _, params, model_state = split(made(key) if is_factory else network)
        return params, model_state

    def apply(params: PyTree, model_state: PyTree, x: PyTree, **action: Any) -> PyTree:
        merged = nnx.merge(graph, params, model_state)
        merged.eval()
        return merged(x, **action)

    def gather(params: PyTree, model_state: PyTree, x: PyTree, mask: jax.Array, **action: Any) -> PyTree:
        if not model_state:
            return model_state
        merged = nnx.merge(graph, params, model_state)
        merged.train()
        merged(x, mask=mask, **action)
        return nnx.to_pure_dict(nnx.state(merged, nnx.BatchStat))

    return init, apply, gather


def _check(module: Any, nnx: Any) -> None:
    name = type(module).__name__
    leaves = jax.tree.leaves(nnx.state(module), is_leaf=lambda x: isinstance(x, nnx.Variable))
    others = {type(x).__name__ for x in leaves if not isinstance(x, (nnx.Param, nnx.BatchStat))}
    if others:
        raise TypeError(
            f"{name} has the variables {sorted(others)}; a model may have Param and BatchStat. RngKey and "
            "RngCount are of layers that draw random numbers, such as Dropout, which are not supported."
        )
    has_statistics = any(isinstance(x, nnx.BatchStat) for x in leaves)
    if has_statistics and "mask" not in inspect.signature(module.__call__).parameters:
        raise TypeError(
            f"{name} gathers statistics; its __call__ must take an argument mask [R] and pass it on to the "
            "layers that gather, or rows in which no decision was taken would count"
        )
