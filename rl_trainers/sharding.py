"""Several devices: which they are, and what lies where.

An epoch over JAX environments is one pure program with global semantics: its means, permutations and
statistics are those of all rows, wherever the rows lie. So it is enough to say that every device holds the
rows of its share of the environments and all of the parameters; XLA does the rest.
"""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from rl_trainers.supervised import check_counts
from rl_trainers.types import PyTree

_AXIS = "envs"


def make_mesh(n_devices: int | None, reason: str) -> Mesh | None:
    """The devices to use; ``None`` for one.

    Args:
        n_devices: how many; ``None`` for all of the process if more than one can be used.
        reason: why not more than one can be used; empty if they can.

    Raises:
        ValueError: there are fewer, or more than one cannot be used; says why.
    """
    check_counts(1, n_devices=n_devices)
    devices = jax.local_devices()
    if n_devices is None:
        n_devices = 1 if reason else len(devices)
    if n_devices > 1 and reason:
        raise ValueError(f"n_devices={n_devices}: {reason}; nearest valid value: 1")
    if n_devices > len(devices):
        raise ValueError(
            f"n_devices={n_devices}: this process has {len(devices)}; nearest valid value: {len(devices)}"
        )
    return Mesh(np.array(devices[:n_devices]), (_AXIS,)) if n_devices > 1 else None


def check_divides(mesh: Mesh, argument: str, count: int) -> None:
    """Refuses a count of rows that the devices cannot share equally.

    Raises:
        ValueError: names the argument, its value and the nearest valid one.
    """
    if count % mesh.size:
        near = max(1, round(count / mesh.size)) * mesh.size
        raise ValueError(
            f"{argument}={count} must be a multiple of n_devices={mesh.size}; nearest valid value: {near} "
            "(or n_devices=1)"
        )


def everywhere(mesh: Mesh) -> NamedSharding:
    """Of arrays that every device holds."""
    return NamedSharding(mesh, PartitionSpec())


def along(mesh: Mesh, axis: int) -> NamedSharding:
    """Of arrays of which every device holds a part along ``axis``."""
    return NamedSharding(mesh, PartitionSpec(*[None] * axis, _AXIS))


def spread(mesh: Mesh, batch: PyTree) -> Any:
    """Gives every device a part of a batch ``[N, L]`` or ``[1, N]``, so that each takes its own gradients.

    Traced.
    """
    return jax.lax.with_sharding_constraint(batch, along(mesh, int(len(batch.mask) == 1)))
