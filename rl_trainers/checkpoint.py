"""One state tree to disk and back, committed atomically, without pickle.

A checkpoint is a directory ``<directory>/checkpoints/<step>`` that Orbax wrote: one array per leaf
of the tree, under the leaf's path (``train/params/policy/kernel``). Orbax writes beside the final
name and renames at the end, so a directory with the final name is complete. Nothing of the tree's
structure is stored: :func:`restore` takes it from a ``target``, which is how named tuples, ``()``
and ``None`` survive.

One process writes into a directory; others may read it at any time.
"""

from __future__ import annotations

import difflib
import os
from typing import IO, Any

import jax
import jax.numpy as jnp
import numpy as np
from etils import epath

from rl_trainers.types import PyTree

try:
    import fcntl
except ImportError:  # not a POSIX system
    fcntl = None  # type: ignore[assignment]

_MAX_REPORTED = 5


class _Any:
    """The type of :data:`ANY`."""

    def __repr__(self) -> str:
        return "checkpoint.ANY"


ANY = _Any()
"""A leaf of a target that takes whatever was saved at its path: an array of any shape and dtype,
or, where a subtree was saved, a dict from the rest of the path to the array."""


def save(directory: str | os.PathLike[str], step: int, tree: PyTree, *, keep: int = 2) -> None:
    """Writes a checkpoint and returns when it is committed; then removes old ones.

    Saving the same step again replaces it; the old one stays readable until the new one is
    committed.

    Args:
        directory: the run's directory, local or a bucket path.
        step: number of the checkpoint, not below the newest one there.
        tree: nest of dicts, lists, tuples and named tuples; its leaves are NumPy arrays, JAX arrays
            (fully addressable from this process) and Python numbers.
        keep: how many of the newest checkpoints stay, >= 1.

    Raises:
        ValueError: for a negative step, a step below the newest one, ``keep < 1``, two leaves
            with the same path, or a tree without a number in it.
        TypeError: for a leaf that is neither an array of numbers nor a number.
        OSError: if the checkpoint could not be written; what was there before is still usable.
    """
    if step < 0:
        raise ValueError(f"step is {step}; it must be at least 0.")
    if keep < 1:
        raise ValueError(f"keep is {keep}; it must be at least 1.")
    root = _root(directory)
    newest = latest_step(directory)
    if newest is not None and step < newest:
        raise ValueError(
            f"step is {step}, but {root} already holds step {newest}: another run wrote there. "
            f"Continue from {newest}, or give another directory."
        )
    leaves = _to_leaves(tree)
    remove_leftovers(directory)
    root.mkdir(parents=True, exist_ok=True)
    final = root / str(step)
    if final.exists():
        final.rename(_aside(final))
    try:
        _write(final, leaves)
    except Exception as error:
        remove_leftovers(directory)
        left = latest_step(directory)
        state = "there is none before it" if left is None else f"the one of step {left} is complete"
        raise OSError(
            f"The checkpoint of step {step} could not be written to {root} ({state}): {error}"
        ) from error
    _remove_old(root, keep)
    remove_leftovers(directory)


def restore(directory: str | os.PathLike[str], target: PyTree = ANY) -> tuple[int, PyTree] | None:
    """Reads the newest complete checkpoint.

    Args:
        directory: the run's directory, as given to :func:`save`.
        target: a tree of the structure that was saved. Every leaf is replaced by what was saved at
            its path, in the kind that the target has there: a JAX array (with its sharding), a
            NumPy array or a Python number. Shape and dtype must be equal, but for leaves that are
            :data:`ANY`. Left out, the result is a dict from path to NumPy array.

    Returns:
        ``(step, tree)``, or ``None`` if there is no checkpoint.

    Raises:
        ValueError: if the saved tree and the target differ; names the paths, shapes and dtypes.
    """
    committed = _committed(_root(directory))
    if not committed:
        return None
    step = max(committed)
    try:
        stored = _read(committed[step])
    except Exception as error:
        raise ValueError(
            f"The checkpoint {committed[step]} cannot be read ({type(error).__name__}: {str(error)[:200]}); "
            "remove that folder to continue from the one before it, if there is one."
        ) from error
    paths, treedef = jax.tree_util.tree_flatten_with_path(target)
    faults: list[str] = []
    leaves = [_fit(_name(path), leaf, stored, faults) for path, leaf in paths]
    faults += [f"{name} was saved but is not expected" for name in stored]
    if faults:
        shown = faults[:_MAX_REPORTED]
        shown += [f"and {len(faults) - len(shown)} more"] if len(faults) > len(shown) else []
        raise ValueError(
            f"The checkpoint {committed[step]} does not fit this configuration: " + "; ".join(shown)
        )
    return step, jax.tree_util.tree_unflatten(treedef, leaves)


def lock(directory: str | os.PathLike[str]) -> IO | None:
    """Claims a run's directory for this process, until the file that is returned is closed.

    Returns:
        The open lock file; ``None`` where the file system is not local or knows no locks.

    Raises:
        ValueError: if another process has claimed it.
    """
    path = epath.Path(directory) / ".lock"
    if fcntl is None or "://" in str(directory):
        return None
    path.parent.mkdir(parents=True, exist_ok=True)
    file = open(path, "w")
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        file.close()
        raise ValueError(
            f"another process is training into {directory}; wait for it, or give another output_dir"
        ) from error
    return file


def latest_step(directory: str | os.PathLike[str]) -> int | None:
    """Returns the step of the newest complete checkpoint, ``None`` if there is none."""
    return max(_committed(_root(directory)), default=None)


def remove_leftovers(directory: str | os.PathLike[str]) -> list[str]:
    """Removes what a killed save left; for the process that writes there, at its start.

    Returns:
        The names of what was removed.
    """
    root = _root(directory)
    if not root.exists():
        return []
    committed = {path.name for path in _committed(root).values()}
    leftovers = [
        path
        for path in root.iterdir()
        if path.name not in committed
        and (".orbax-checkpoint-tmp" in path.name or path.suffix in (".aside", ".removed"))
    ]
    for path in leftovers:
        path.rmtree()
    return [path.name for path in leftovers]


def _root(directory: str | os.PathLike[str]) -> epath.Path:
    path = epath.Path(directory)
    if "://" not in os.fspath(path):
        path = path.expanduser().resolve()
    return path / "checkpoints"


def _aside(path: epath.Path) -> epath.Path:
    return path.with_name(path.name + ".aside")


def _committed(root: epath.Path) -> dict[int, epath.Path]:
    """Complete checkpoints by step; one that was set aside counts while it has no successor."""
    if not root.exists():
        return {}
    import orbax.checkpoint as ocp  # Here, since it costs a third of a second to import.

    found: dict[int, epath.Path] = {}
    for path in root.iterdir():
        stem = path.name.removesuffix(".aside")
        if not stem.isdecimal():
            continue
        if stem == path.name and ocp.utils.is_checkpoint_finalized(path):
            found[int(stem)] = path
        elif stem != path.name:
            found.setdefault(int(stem), path)
    return found


def _remove_old(root: epath.Path, keep: int) -> None:
    committed = _committed(root)
    for step in sorted(committed)[:-keep]:
        # Removing a directory takes many steps, so that it first loses the name of a checkpoint.
        committed[step].rename(root / f"{step}.removed").rmtree()


def _name(path: Any) -> str:
    return jax.tree_util.keystr(path, simple=True, separator="/")


def _to_leaves(tree: PyTree) -> dict[str, np.ndarray]:
    leaves: dict[str, np.ndarray] = {}
    for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]:
        name = _name(path)
        if isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            raise TypeError(f"{name} is a typed PRNG key; save jax.random.key_data of it.")
        value = np.asarray(leaf)
        if value.dtype.kind in "OSUMm":
            raise TypeError(f"{name} is a {type(leaf).__name__}; a leaf must be numbers.")
        if name in leaves:
            raise ValueError(f"Two leaves of the tree have the path {name}.")
        leaves[name] = value
    if not any(value.size for value in leaves.values()):
        raise ValueError("tree holds no numbers; there is nothing to save.")
    return leaves


def _checkpointer() -> Any:
    import orbax.checkpoint as ocp

    return ocp.Checkpointer(ocp.PyTreeCheckpointHandler(use_ocdbt=True, use_zarr3=True))


def _write(path: epath.Path, leaves: dict[str, np.ndarray]) -> None:
    import orbax.checkpoint as ocp

    # Orbax stores no array without elements; their shapes travel as metadata.
    empty = {k: [list(v.shape), v.dtype.name] for k, v in leaves.items() if v.size == 0}
    full = {k: v for k, v in leaves.items() if v.size}
    with _checkpointer() as checkpointer:
        checkpointer.save(path, args=ocp.args.PyTreeSave(full, custom_metadata={"empty": empty}))


def _read(path: epath.Path) -> dict[str, np.ndarray]:
    with _checkpointer() as checkpointer:
        leaves = {name: np.asarray(value) for name, value in checkpointer.restore(path).items()}
        empty = checkpointer.metadata(path).item_metadata.custom_metadata["empty"]
    leaves.update(
        (name, np.zeros(shape, jnp.dtype(dtype))) for name, (shape, dtype) in empty.items()
    )
    return leaves


def _fit(name: str, leaf: Any, stored: dict[str, np.ndarray], faults: list[str]) -> Any:
    """Takes what belongs to one leaf of the target out of ``stored``; appends to ``faults``."""
    if isinstance(leaf, _Any) and name not in stored:
        prefix = f"{name}/" if name else ""
        below = [key for key in stored if key.startswith(prefix)]
        return {key.removeprefix(prefix): stored.pop(key) for key in below}
    if name not in stored:
        near = difflib.get_close_matches(name, stored, n=1)
        faults.append(f"{name} was not saved" + (f" (the nearest is {near[0]})" if near else ""))
        return leaf
    value = stored.pop(name)
    if isinstance(leaf, _Any):
        return value
    if isinstance(leaf, (bool, int, float, complex)):
        if value.shape == () and value.dtype.kind == np.asarray(leaf).dtype.kind:
            return value.item()
        faults.append(f"{name} was saved as {_describe(value)}, expected a {type(leaf).__name__}")
        return leaf
    if value.shape != leaf.shape or value.dtype != leaf.dtype:
        faults.append(f"{name} was saved as {_describe(value)}, expected {_describe(leaf)}")
        return leaf
    if not isinstance(leaf, jax.Array):
        return value
    if len(leaf.sharding.device_set) > 1:
        return jax.device_put(value, leaf.sharding)
    return jnp.array(value)


def _describe(value: Any) -> str:
    return f"{value.dtype}{list(value.shape)}"
