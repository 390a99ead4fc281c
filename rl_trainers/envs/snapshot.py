"""State of Python environments as arrays: what can be written out is, the rest is named opaque.

A value is turned into a nest of lists with numpy arrays as leaves (:func:`encode`), the nest into two byte
arrays (:func:`pack`), and back. Numbers, strings, containers, arrays, random generators and objects made of
these are state. Spaces, specs, classes and functions do not change while an environment runs and are left
as they are. Anything else, such as a physics engine, is opaque.

State outside the object (module globals, class attributes, the global generators) is not seen.
"""

from __future__ import annotations

import collections
import io
import json
import math
import random
import types
from collections.abc import Callable
from typing import Any

import gymnasium
import numpy as np
from gymnasium.envs.registration import EnvSpec

_PLAIN = (type(None), bool, int, float, str)
_CONSTANT = (gymnasium.Space, EnvSpec, type, types.ModuleType, types.BuiltinFunctionType)
_SEQUENCES = {kind.__name__: kind for kind in (list, tuple, set, collections.deque)}
# How the state of a random generator is read and written.
_GENERATORS: dict[type, tuple[Callable, Callable]] = {
    np.random.Generator: (
        lambda generator: generator.bit_generator.state,
        lambda generator, state: setattr(generator.bit_generator, "state", state),
    ),
    np.random.RandomState: (lambda g: g.get_state(legacy=False), np.random.RandomState.set_state),
    random.Random: (random.Random.getstate, random.Random.setstate),
}
_HEAP_TYPE = 1 << 9
_MISSING = object()


class OpaqueError(TypeError):
    """The value holds state that cannot be read or does not fit the object it is written to."""


def encode(value: Any, seen: set[int] | None = None) -> list:
    """Copies a value into a nest of lists whose leaves are JSON values and numpy arrays.

    Args:
        value: any Python value.
        seen: ids of the objects on the way, so that an object is written once.

    Raises:
        OpaqueError: part of the value cannot be written.
    """
    seen = set() if seen is None else seen
    kind = type(value)
    if kind in _PLAIN:
        return ["value", value]
    if kind is np.ndarray and not value.dtype.hasobject:
        return ["array", value.copy()]
    if isinstance(value, np.generic):
        return ["scalar", np.asarray(value)]
    if kind in _SEQUENCES.values():
        return [kind.__name__, [encode(item, seen) for item in value], getattr(value, "maxlen", None)]
    if kind in (dict, collections.OrderedDict):
        return ["dict", [[encode(k, seen), encode(v, seen)] for k, v in value.items()]]
    is_function = kind is types.FunctionType and value.__closure__ is None
    is_method = kind is types.MethodType and id(value.__self__) in seen
    if id(value) in seen or isinstance(value, _CONSTANT) or is_function or is_method:
        return ["constant"]
    seen.add(id(value))
    if kind in _GENERATORS:
        return ["object", kind.__qualname__, encode(_GENERATORS[kind][0](value))]
    if not _is_pure_python(kind) or not hasattr(value, "__dict__"):
        raise OpaqueError(f"a {kind.__name__} holds state that cannot be read")
    return ["object", kind.__qualname__, encode(vars(value), seen)]


def try_encode(value: Any, seen: set[int] | None = None) -> list | None:
    """Returns :func:`encode` of the value, or ``None`` if part of it cannot be written."""
    try:
        return encode(value, seen)
    except (OpaqueError, RecursionError):
        return None


def decode(node: list, current: Any = _MISSING) -> Any:
    """Rebuilds a value from its node; objects, generators and arrays are filled in place.

    Args:
        node: result of :func:`encode`.
        current: the value that now stands where the result will, if there is one.

    Raises:
        OpaqueError: ``current`` is not the kind of object that was encoded.
    """
    tag, *rest = node
    if tag == "value":
        return rest[0]
    if tag == "array":
        saved = rest[0]
        fits = isinstance(current, np.ndarray) and current.flags.writeable
        if not fits or (current.shape, current.dtype) != (saved.shape, saved.dtype):
            return saved.copy()
        np.copyto(current, saved)  # so that views of it stay views of it
        return current
    if tag == "scalar":
        return rest[0][()]
    if tag in _SEQUENCES:
        present = list(current) if type(current) in (list, tuple) else []
        present += [_MISSING] * (len(rest[0]) - len(present))
        items = [decode(item, now) for item, now in zip(rest[0], present, strict=False)]
        return collections.deque(items, rest[1]) if tag == "deque" else _SEQUENCES[tag](items)
    if tag == "dict":
        known = current if isinstance(current, dict) else {}
        pairs = [(decode(k), v) for k, v in rest[0]]
        return {k: decode(v, known.get(k, _MISSING)) for k, v in pairs}
    if current is _MISSING:
        raise OpaqueError("an object that was there when the state was written is missing")
    if tag == "constant":
        return current
    name, state = rest
    if type(current).__qualname__ != name:
        raise OpaqueError(f"state of a {name} does not fit a {type(current).__qualname__}")
    if type(current) in _GENERATORS:
        _GENERATORS[type(current)][1](current, decode(state))
    else:
        vars(current).update(decode(state, vars(current)))
    return current


def pack(tree: Any) -> dict[str, np.ndarray]:
    """Writes a nest of dicts, lists, JSON values and arrays into two u8 arrays.

    Returns:
        ``{'header': u8 [h], 'data': u8 [d]}``: JSON text, and the bytes of all arrays in its order.
    """
    chunks: list[bytes] = []

    def reference(array: Any) -> dict[str, Any]:
        chunks.append(array.tobytes())
        return {"dtype": array.dtype.str, "shape": array.shape}

    header = json.dumps(tree, default=reference).encode()
    parts = {"header": header, "data": b"".join(chunks)}
    return {name: np.frombuffer(part, np.uint8).copy() for name, part in parts.items()}


def unpack(packed: dict[str, np.ndarray]) -> Any:
    """Inverse of :func:`pack`."""
    header, data = (np.asarray(packed[name], np.uint8).tobytes() for name in ("header", "data"))
    stream = io.BytesIO(data)

    def array(found: dict[str, Any]) -> Any:
        if "dtype" not in found:
            return found
        dtype, shape = np.dtype(found["dtype"]), found["shape"]
        return np.ndarray(shape, dtype, stream.read(dtype.itemsize * math.prod(shape))).copy()

    return json.loads(header, object_hook=array)


def _is_pure_python(kind: type) -> bool:
    """Whether all state of an instance lies in its ``__dict__``: no base written in C, no slots."""
    return all(
        base is object or (base.__flags__ & _HEAP_TYPE and base.__basicsize__ <= 32) for base in kind.__mro__
    )
