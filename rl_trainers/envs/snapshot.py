"""State of Python environments as arrays: what can be written out is, the rest is named opaque.

A value is turned into a nest of lists with numpy arrays as leaves (:func:`encode`), the nest into
two byte arrays (:func:`pack`), and back. Numbers, strings, containers, arrays, random generators
and objects made of these are state. Spaces, specs, classes and functions do not change while an
environment runs and are left as they are. Anything else, such as a physics engine, is opaque.

State outside the object (module globals, class attributes, the global generators) is not seen.
"""

from __future__ import annotations

import collections
import json
import random
import types
from typing import Any

import gymnasium
import numpy as np
from gymnasium.envs.registration import EnvSpec

_PLAIN = (type(None), bool, int, float, str)
_CONSTANT = (gymnasium.Space, EnvSpec, type, types.ModuleType, types.BuiltinFunctionType)
_SEQUENCES: dict[type, str] = {list: "list", tuple: "tuple", set: "set", collections.deque: "deque"}
# Constructor arguments that gymnasium wrappers record; they never change.
_SKIPPED = ("_saved_kwargs", "_cached_spec")
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
    if kind in _SEQUENCES:
        maxlen = value.maxlen if kind is collections.deque else None
        return [_SEQUENCES[kind], [encode(item, seen) for item in value], maxlen]
    if kind in (dict, collections.OrderedDict):
        return ["dict", [[encode(k, seen), encode(v, seen)] for k, v in value.items()]]
    if id(value) in seen or isinstance(value, _CONSTANT) or _is_constant_function(value, seen):
        return ["constant"]
    seen.add(id(value))
    if kind is np.random.Generator:
        return ["generator", encode(value.bit_generator.state)]
    if kind is np.random.RandomState:
        return ["random_state", encode(value.get_state(legacy=False))]
    if kind is random.Random:
        return ["random", encode(value.getstate())]
    if not _is_pure_python(kind) or not hasattr(value, "__dict__"):
        raise OpaqueError(f"a {kind.__name__} holds state that cannot be read")
    return ["object", kind.__qualname__, encode_attributes(value, seen)]


def encode_attributes(owner: Any, seen: set[int], skip: tuple[str, ...] = ()) -> list:
    """Encodes an object's attributes as ``[[name, node], ...]``, without those in ``skip``."""
    skip = skip + _SKIPPED
    return [[k, encode(v, seen)] for k, v in vars(owner).items() if k not in skip]


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
        return _fill(rest[0], current)
    if tag == "scalar":
        return rest[0][()]
    if tag in _SEQUENCES.values():
        present = list(current) if type(current) in (list, tuple) else []
        present += [_MISSING] * (len(rest[0]) - len(present))
        items = [decode(item, now) for item, now in zip(rest[0], present, strict=False)]
        if tag == "deque":
            return collections.deque(items, maxlen=rest[1])
        return {"list": list, "tuple": tuple, "set": set}[tag](items)
    if tag == "dict":
        known = current if isinstance(current, dict) else {}
        pairs = [(decode(k), v) for k, v in rest[0]]
        return {k: decode(v, known.get(k, _MISSING)) for k, v in pairs}
    if tag == "constant":
        if current is _MISSING:
            raise OpaqueError("an object that was there when the state was written is missing")
        return current
    if tag == "object":
        if type(current).__qualname__ != rest[0]:
            raise OpaqueError(f"state of a {rest[0]} does not fit a {type(current).__qualname__}")
        decode_attributes(rest[1], current)
        return current
    return _decode_random(tag, decode(rest[0]), current)


def decode_attributes(pairs: list, owner: Any) -> None:
    """Writes ``[[name, node], ...]`` into the attributes of an object."""
    attributes = vars(owner)
    for name, node in pairs:
        attributes[name] = decode(node, attributes.get(name, _MISSING))


def pack(tree: Any) -> dict[str, np.ndarray]:
    """Writes a nest of dicts, lists, JSON values and arrays into two u8 arrays.

    Returns:
        ``{'header': u8 [h], 'data': u8 [d]}``: JSON text, and the bytes of all arrays.
    """
    chunks: list[bytes] = []
    offset = 0

    def reference(value: Any) -> dict[str, Any]:
        nonlocal offset
        chunks.append(value.tobytes())
        found = {"dtype": value.dtype.str, "shape": value.shape, "offset": offset}
        offset += value.nbytes
        return found

    header = json.dumps(tree, default=reference).encode()
    return {
        "header": np.frombuffer(header, np.uint8).copy(),
        "data": np.frombuffer(b"".join(chunks), np.uint8).copy(),
    }


def unpack(packed: dict[str, np.ndarray]) -> Any:
    """Inverse of :func:`pack`."""
    data = np.asarray(packed["data"], np.uint8).tobytes()

    def array(found: dict[str, Any]) -> Any:
        if "dtype" not in found:
            return found
        dtype, shape = np.dtype(found["dtype"]), tuple(found["shape"])
        count = int(np.prod(shape, dtype=np.int64))
        flat = np.frombuffer(data, dtype, count, found["offset"]) if count else np.zeros(0, dtype)
        return flat.reshape(shape).copy()

    header = np.asarray(packed["header"], np.uint8).tobytes()
    return json.loads(header, object_hook=array)


def _fill(saved: np.ndarray, current: Any) -> np.ndarray:
    """Writes into the present array if it fits, so that views of it stay views of it."""
    fits = isinstance(current, np.ndarray) and current.flags.writeable
    if fits and current.shape == saved.shape and current.dtype == saved.dtype:
        np.copyto(current, saved)
        return current
    return saved.copy()


def _decode_random(tag: str, state: Any, current: Any) -> Any:
    if tag == "generator" and isinstance(current, np.random.Generator):
        current.bit_generator.state = state
    elif tag == "random_state" and isinstance(current, np.random.RandomState):
        current.set_state(state)
    elif tag == "random" and isinstance(current, random.Random):
        current.setstate(state)
    else:
        raise OpaqueError(f"state of a {tag} does not fit a {type(current).__name__}")
    return current


def _is_pure_python(kind: type) -> bool:
    """Whether all state of an instance lies in its ``__dict__``: no base written in C, no slots."""
    return all(
        base is object or (base.__flags__ & _HEAP_TYPE and base.__basicsize__ <= 32)
        for base in kind.__mro__
    )


def _is_constant_function(value: Any, seen: set[int]) -> bool:
    """Functions are constant unless they close over state that is not written elsewhere."""
    if isinstance(value, types.MethodType):
        return id(value.__self__) in seen
    if not isinstance(value, types.FunctionType):
        return False
    cells = [cell.cell_contents for cell in value.__closure__ or ()]
    return all(isinstance(c, _CONSTANT) or type(c) in _PLAIN or id(c) in seen for c in cells)
