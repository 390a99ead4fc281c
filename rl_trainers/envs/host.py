"""Environments that live in Python: ``B`` of them behind one interface with next-step autoreset.

:func:`make_host_env` takes a gymnasium id, an environment object, a factory or a vector environment;
:mod:`rl_trainers.envs.adapters` adds gym before 0.26 and dm_env. The row after an episode's end is the
reset row that :mod:`rl_trainers.types` describes, whatever the environment is.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import difflib
import functools
import importlib
import logging
import math
import multiprocessing
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces
from gymnasium.envs import registration
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv, VectorEnv

from rl_trainers.envs import adapters, snapshot
from rl_trainers.envs.sub_env import EnvError, SubEnv, env_name, env_seed

_log = logging.getLogger("rl_trainers")
_BACKENDS = ("auto", "sync", "vector", "process")
_SPACES = (spaces.Box, spaces.Discrete, spaces.MultiDiscrete, spaces.MultiBinary)
_F64 = np.dtype(np.float64)
_CLOSE_SECONDS = 5.0


# Making environments.


def make_host_env(
    env: Any, num_envs: int = 1, *, time_limit: int | None = None, backend: str = "auto"
) -> HostEnv:
    """Makes ``num_envs`` environments.

    Args:
        env: a gymnasium id (``'module:Id-v0'`` imports the module first; ids that are gone stand for their
            newest version), a factory ``() -> env`` or a list of ``num_envs`` of them, one environment
            object (gymnasium, gym before 0.26, dm_env), or a gymnasium vector environment. A
            ``SyncVectorEnv`` may have any autoreset mode, because its environments are taken out and reset
            here; others must have ``NEXT_STEP``.
        num_envs: how many; an object counts as one.
        time_limit: decisions after which an episode is truncated.
        backend: ``'sync'`` steps one after another, ``'process'`` gives each its own process, ``'vector'``
            uses the vector version that an id names, ``'auto'`` the vector version if there is one, else
            ``'sync'``. Processes are started afresh, so a script that uses them needs ``if __name__ ==
            '__main__':``.

    Raises:
        TypeError: ``env`` is none of these.
        ValueError: an argument does not fit, named in the message.
    """
    if num_envs < 1:
        raise ValueError(f"num_envs: must be >= 1, got {num_envs}; the nearest valid value is 1")
    if time_limit is not None and time_limit < 1:
        raise ValueError(f"time_limit: must be >= 1 or None, got {time_limit}; the nearest is 1")
    if backend not in _BACKENDS:
        near = difflib.get_close_matches(str(backend), _BACKENDS, 1, 0.0)[0]
        raise ValueError(f"backend: {backend!r} is none of {_BACKENDS}; the nearest is {near!r}")
    if isinstance(env, VectorEnv):
        return _from_vector(env, num_envs, time_limit, backend)
    if isinstance(env, str):
        return _from_spec(find_spec(env), num_envs, time_limit, backend)
    if backend == "vector":
        raise ValueError("backend: 'vector' needs an id, env is a factory or an object; use 'sync'")
    if is_object(env):
        if num_envs != 1 or backend == "process":
            raise ValueError(
                f"env: one environment object cannot be num_envs={num_envs}, backend={backend!r}; "
                "pass a factory () -> env, or use num_envs=1, backend='sync'"
            )
        return _from_factories([lambda: env], time_limit)
    factories = [env] * num_envs if callable(env) else env
    if not isinstance(factories, (list, tuple)) or not factories or not all(map(callable, factories)):
        raise TypeError(f"env: expected an id, an environment or a factory, got {type(env)}")
    if num_envs not in (1, len(factories)):
        raise ValueError(f"num_envs: is {num_envs}, but env has {len(factories)} factories")
    return _from_factories(factories, time_limit, backend)


def make_eval_env(
    env: Any, num_envs: int = 1, *, time_limit: int | None = None, backend: str = "auto"
) -> HostEnv:
    """Makes environments of their own for evaluation, from what :func:`make_host_env` was given.

    Ids and factories are used again. An object is rebuilt from its spec, else copied, and stepped with
    backend ``'sync'``.

    Raises:
        ValueError: the object cannot be rebuilt or copied, or the factory returns the same one again.
    """
    if isinstance(env, (SyncVectorEnv, AsyncVectorEnv)):
        env = env.env_fns
    elif isinstance(env, VectorEnv):
        env = _rebuild(env) if num_envs == env.num_envs else _resize(env, num_envs)
    elif is_object(env):
        return _from_factories([functools.partial(_rebuild, env)] * num_envs, time_limit)
    if isinstance(env, Sequence) and not isinstance(env, str):
        env = [env[i % len(env)] for i in range(num_envs)]
    host = make_host_env(env, num_envs, time_limit=time_limit, backend=backend)
    make = env[0] if isinstance(env, list) else env
    if callable(make) and isinstance(host._venv, SyncVectorEnv):
        again = adapters.as_gymnasium(make())
        _check_distinct([*host._venv.envs, again])
        again.close()
    return host


def find_spec(env_id: str) -> registration.EnvSpec:
    """Returns the spec of a registered id; ids of older versions stand for the newest one.

    Raises:
        ValueError: there is no such id; the message names the nearest one.
    """
    module, _, plain = env_id.rpartition(":")
    if module:
        try:
            importlib.import_module(module)
        except ModuleNotFoundError as error:
            raise ValueError(
                f"env: {env_id!r} names neither a module to import before ({error}) nor a suite of JAX "
                "environments, such as 'gymnax:' or 'brax:'"
            ) from error
    if plain not in gymnasium.registry:
        with contextlib.suppress(ImportError):
            importlib.import_module("ale_py")  # registers the Atari games
    spec = gymnasium.registry.get(plain)
    if spec is not None and getattr(spec.entry_point, "__name__", "") != "_raise_mujoco_py_error":
        return spec
    with contextlib.suppress(gymnasium.error.Error):
        space, name, asked = registration.parse_env_id(plain.removeprefix("DM-"))
        version = registration.find_highest_version(space, name)
        if version is not None and (asked or 0) < version:
            newest = registration.get_env_id(space, name, version)
            _log.warning("env: %s is not available any more; using %s", env_id, newest)
            return gymnasium.registry[newest]
    near = difflib.get_close_matches(plain, list(gymnasium.registry), 1, 0.0)
    hint = "; Atari games need the extra 'atari'" if plain.startswith("ALE/") else ""
    raise ValueError(f"env: no environment {env_id!r} is registered; the nearest is {near[0]!r}{hint}")


def _from_spec(spec: registration.EnvSpec, num_envs: int, time_limit: int | None, backend: str) -> HostEnv:
    is_vector = bool(spec.vector_entry_point and (time_limit is None or spec.max_episode_steps))
    if backend == "vector" and not is_vector:
        takes = "" if time_limit is None else " that takes a time_limit"
        raise ValueError(f"backend: {spec.id} has no vector version{takes}; use 'sync' or 'process'")
    if is_vector and backend in ("auto", "vector"):
        limits: dict[str, Any] = {}
        if time_limit and spec.max_episode_steps:
            limits["max_episode_steps"] = min(time_limit, spec.max_episode_steps)
        mode = gymnasium.VectorizeMode.VECTOR_ENTRY_POINT
        venv = gymnasium.make_vec(spec, num_envs, vectorization_mode=mode, **limits)
        # An assertion that every action is valid costs a sixth of a CartPole step; to_env vouches for it.
        venv.action_space.contains = lambda x: True  # type: ignore[method-assign]
        return _from_vector(venv, num_envs, None, backend)
    make = functools.partial(gymnasium.make, spec, disable_env_checker=True)
    return _from_factories([make] * num_envs, time_limit, backend)


def _from_vector(env: VectorEnv, num_envs: int, time_limit: int | None, backend: str) -> HostEnv:
    if num_envs not in (1, env.num_envs):
        raise ValueError(f"num_envs: is {num_envs}, but env has {env.num_envs} environments")
    if backend == "process":
        raise ValueError("backend: 'process' needs an id or a factory, env is a vector environment")
    if isinstance(env, SyncVectorEnv):
        return _from_factories([functools.partial(lambda e: e, each) for each in env.envs], time_limit)
    mode = env.metadata.get("autoreset_mode")
    if mode != AutoresetMode.NEXT_STEP:
        raise ValueError(
            f"env: {type(env).__name__} has autoreset mode {mode}, which loses the last observation of an "
            "episode or stops; make it with autoreset_mode=AutoresetMode.NEXT_STEP (and name that in "
            "metadata['autoreset_mode'])"
        )
    if time_limit is not None:
        raise ValueError(
            f"time_limit: {type(env).__name__} cannot be limited to {time_limit} steps from "
            "outside; pass an id or a factory, or limit it where it is made"
        )
    return HostEnv(env, env_name(env))


def _from_factories(
    factories: Sequence[Callable[[], Any]], time_limit: int | None, backend: str = "sync"
) -> HostEnv:
    fns = [functools.partial(SubEnv, make, i, time_limit) for i, make in enumerate(factories)]
    if backend != "process":
        sync = SyncVectorEnv(fns)
        _check_distinct(sync.envs)
        return HostEnv(sync, sync.get_attr("name")[0], is_kept=True)
    # Workers start from a clean process: forking one in which JAX runs threads can deadlock.
    context = "spawn" if sys.platform == "win32" else "forkserver"
    multiprocessing.get_context(context).set_forkserver_preload(["__main__", __name__])
    try:
        venv = AsyncVectorEnv(fns, context=context)
        return HostEnv(venv, venv.get_attr("name")[0], is_kept=True)
    except (EOFError, OSError) as error:
        raise EnvError(
            "a worker process died while it made its environment; is the script guarded by "
            f"if __name__ == '__main__'? ({error!r})"
        ) from error


def is_object(env: Any) -> bool:
    """Whether it is an environment itself, not an id or something that makes one."""
    return not isinstance(env, type) and hasattr(env, "step") and hasattr(env, "reset")


def _check_distinct(envs: Sequence[gymnasium.Env]) -> None:
    """Refuses a factory that returns one and the same object: evaluation would disturb training."""
    if len({id(env.unwrapped) for env in envs}) != len(envs):
        raise ValueError("env: the factory returned the same object twice; it must make new ones")


def _rebuild(env: Any) -> Any:
    """A new environment like ``env``: from its spec, else a copy."""
    try:
        if isinstance(env, gymnasium.Env) and env.spec is not None:
            return gymnasium.make(env.spec, disable_env_checker=True)
    except Exception as error:
        _log.info("env: cannot be made from its spec (%s); copying it", error)
    try:
        return copy.deepcopy(env)
    except Exception as error:
        raise ValueError(
            f"env: evaluation needs an environment of its own, but {type(env).__name__} cannot be "
            f"copied ({type(error).__name__}: {error}); pass a factory () -> env instead"
        ) from error


def _resize(env: VectorEnv, num_envs: int) -> VectorEnv:
    """A new vector environment like ``env`` of another size, from its spec."""
    if env.spec is None:
        raise ValueError(
            f"num_envs: {num_envs}, but env is a {type(env).__name__} of {env.num_envs} without a spec; "
            f"nearest valid value: {env.num_envs}, or give an id or a factory () -> env in its place"
        )
    kwargs = {**env.spec.kwargs, "num_envs": num_envs}
    return gymnasium.make_vec(dataclasses.replace(env.spec, kwargs=kwargs))


# Stepping them.


class HostEnv:
    """``B`` environments that are stepped side by side.

    After a step that ended an episode, the next step of that environment is a reset row: its action is
    ignored, its reward is 0, and it returns the first observation of the next episode.

    Attributes:
        num_envs: ``B``.
        observation_space: space of one environment's observation, as it is returned here.
        action_space: space of one environment's action.
        name: id of the environment, or the name of its class.
        restarted: bool ``[B]``, environments whose next step is a reset row because the last
            :meth:`restore` could not continue their episode.
    """

    def __init__(self, venv: VectorEnv, name: str, is_kept: bool = False):
        self._venv: Any = venv
        self._is_kept = is_kept  # made of SubEnv, which can be asked for its state
        self.num_envs = venv.num_envs
        self.name = name
        self.action_space = venv.single_action_space
        _returned_space(self.action_space, "action_space")
        self.observation_space = _returned_space(venv.single_observation_space, "observation_space")
        self._action_dtype = getattr(venv.action_space, "dtype", None)
        self._count_from_zero()

    def _count_from_zero(self) -> None:
        self._steps = 0  # of each environment, with its reset rows
        self._starts = np.zeros(self.num_envs, np.int64)  # of the running episodes, in steps
        self._resets = np.zeros(self.num_envs, np.int64)
        self._ended: np.ndarray = np.zeros(self.num_envs, np.bool_)  # whose next row is a reset row
        self.restarted = np.zeros(self.num_envs, np.bool_)

    def reset(self, seed: int, first_env_id: int = 0) -> Any:
        """Starts all environments.

        Args:
            seed: int >= 0. Environment ``i`` gets a seed derived from ``(seed, first_env_id + i)``, the same
                in every backend; a vector environment not made of single ones gets ``seed``, or one derived
                from ``(seed, first_env_id)`` where that is not 0.
            first_env_id: number of the first environment, where several batches of them share a seed.

        Returns:
            Observation ``[B, *obs]``, numpy.

        Raises:
            ValueError: the seed is negative.
            EnvError: an environment raised.
            FloatingPointError: an observation is NaN or infinite.
        """
        if seed < 0:
            raise ValueError(f"seed: must be >= 0, got {seed}; the nearest valid value is 0")
        self._check_open()
        self._count_from_zero()
        seeds: Any = env_seed(int(seed), first_env_id) if first_env_id else int(seed)
        if self._is_kept:
            seeds = [env_seed(int(seed), first_env_id + i) for i in range(self.num_envs)]
        try:
            observation, _ = self._venv.reset(seed=seeds)
        except Exception as error:
            self._close_after(error)
            raise
        return self._convert(observation)

    def step(self, action: Any) -> tuple[Any, np.ndarray, np.ndarray, np.ndarray, dict]:
        """Steps all environments once.

        Args:
            action: ``[B, *act]`` in the units of the action space; a pytree for ``Dict`` spaces.

        Returns:
            ``(observation [B, *obs], reward f32 [B], terminated bool [B], truncated bool [B], info)``.
            ``info['control_mask']`` and ``info['discount_mask']`` are f32 ``[B]`` if any environment
            reports them, with ones for those that do not.

        Raises:
            EnvError: an environment raised or its process died; all others are closed.
            FloatingPointError: a reward or observation is NaN or infinite.
        """
        self._check_open()
        if self._action_dtype is None:
            action = _cast(self._venv.action_space, action)
        else:
            action = np.asarray(action, self._action_dtype)
        try:
            observation, reward, terminated, truncated, info = self._venv.step(action)
        except Exception as error:
            self._close_after(error)
            raise
        self._steps += 1
        reward = np.array(reward, np.float32)
        if np.count_nonzero(self._ended):  # reset rows; not every vector environment pays 0 there
            reward[self._ended] = 0.0
            self._starts[self._ended] = self._steps
            self._resets += self._ended
        if not math.isfinite(np.add.reduce(reward)):
            self._check_finite(reward, "reward")
        self._ended = np.logical_or(terminated, truncated)
        if info:
            info = _fill_masks(info)
        return self._convert(observation), reward, np.array(terminated), np.array(truncated), info

    def snapshot(self) -> dict[str, np.ndarray] | None:
        """Returns everything that continues the environments exactly in another process.

        Returns:
            ``{'header': u8 [h], 'data': u8 [d]}`` of lengths that vary, or ``None`` for a vector
            environment whose state cannot be read.
        """
        self._check_open()
        venv = self._venv
        states = venv.call("take_snapshot") if self._is_kept else snapshot.try_encode(venv)
        counters = [self._steps, self._starts, self._resets, self._ended]
        return None if states is None else snapshot.pack({"counters": counters, "states": states})

    def restore(self, saved: dict[str, np.ndarray]) -> bool:
        """Continues from :meth:`snapshot`.

        Returns:
            True if every environment continues its episode. Where one cannot, the log says so, its next
            step is a reset row, and it is marked in ``restarted``.

        Raises:
            ValueError: the snapshot is of another number or kind of environments.
        """
        if "header" not in saved:
            raise ValueError(f"env: is {self.name} in Python, but the checkpoint is of JAX environments")
        tree = snapshot.unpack(saved)
        steps, starts, resets, ended = tree["counters"]
        if len(starts) != self.num_envs:
            raise ValueError(f"num_envs: is {self.num_envs}, but the checkpoint has {len(starts)}")
        if self._is_kept != isinstance(tree["states"][0], dict):
            raise ValueError("backend: the checkpoint was written with another kind of backend")
        self.reset(0)
        if self._is_kept:
            self.restarted = ~np.array(self._venv.call("apply_snapshot", tree["states"]), np.bool_)
        else:
            try:
                snapshot.decode(tree["states"], self._venv)
            except snapshot.OpaqueError as error:
                raise ValueError(f"env: does not fit the checkpoint: {error}") from error
        self._steps, self._starts, self._resets = steps, starts, resets
        self._ended = ended | self.restarted
        return not self.restarted.any()

    def close(self) -> None:
        """Closes all environments and ends their processes within seconds; may be called again."""
        if self._venv.closed:
            return
        if isinstance(self._venv, AsyncVectorEnv):
            _end_workers(self._venv)
        else:
            self._venv.close()
        self._venv.closed = True

    def _convert(self, value: Any, name: str = "observation") -> Any:
        """New numpy leaves with float64 made float32, and all of them finite."""
        if isinstance(value, dict):
            return {k: self._convert(v, f"{name}[{k!r}]") for k, v in value.items()}
        if isinstance(value, tuple):
            return tuple(self._convert(v, f"{name}[{i}]") for i, v in enumerate(value))
        # A vector environment may return the same buffer at every step; what is returned here is kept.
        value = np.array(value)
        if value.dtype is _F64:
            value = value.astype(np.float32)
        if value.dtype.kind == "f" and not math.isfinite(np.add.reduce(value, None)):
            self._check_finite(value, name)
        return value

    def _check_finite(self, value: np.ndarray, field: str) -> None:
        finite = np.isfinite(value.reshape(self.num_envs, -1)).all(axis=1)
        if finite.all():  # only the sum, by which the caller looked, is too large
            return
        i = int(np.argmin(finite))
        bad = value[i][~np.isfinite(value[i])].reshape(-1)[0]
        raise FloatingPointError(
            f"environment {i} ({self.name}): {field} is {bad} at its step "
            f"{self._steps - self._resets[i]} (step {self._steps - self._starts[i]} of its episode)"
        )

    def _check_open(self) -> None:
        if self._venv.closed:
            raise RuntimeError(f"the environments of {self.name} are closed")

    def _close_after(self, error: Exception) -> None:
        """Closes what is left after an environment failed; names the process that died, if any."""
        dead = []
        is_process = isinstance(self._venv, AsyncVectorEnv)
        if is_process and isinstance(error, (EOFError, OSError)):
            time.sleep(0.1)  # a process that is just dying has no exit code yet
            codes = [process.exitcode for process in self._venv.processes]
            dead = [f"{i} (exit code {c})" for i, c in enumerate(codes) if c is not None]
        if is_process or isinstance(error, EnvError):
            self.close()
        if dead:
            raise EnvError(f"the worker process of environment {', '.join(dead)} died: {error!r}") from error


def _returned_space(space: gymnasium.Space, name: str) -> gymnasium.Space:
    """The space of what :class:`HostEnv` returns, where float64 becomes float32."""
    if isinstance(space, spaces.Dict):
        return spaces.Dict({k: _returned_space(s, f"{name}[{k!r}]") for k, s in space.spaces.items()})
    if isinstance(space, spaces.Tuple):
        return spaces.Tuple([_returned_space(s, f"{name}[{i}]") for i, s in enumerate(space.spaces)])
    if not isinstance(space, _SPACES):
        raise ValueError(
            f"env: {name} is a {type(space).__name__}; supported are Box, Discrete, MultiDiscrete, "
            "MultiBinary, and Dict and Tuple of these"
        )
    if isinstance(space, spaces.Box) and space.dtype == np.float64:
        return spaces.Box(space.low.astype(np.float32), space.high.astype(np.float32), dtype=np.float32)
    return space


def _cast(space: gymnasium.Space, action: Any) -> Any:
    """A batch of actions with the dtypes of a batched ``Dict`` or ``Tuple`` space."""
    if isinstance(space, spaces.Dict):
        return {k: _cast(s, action[k]) for k, s in space.spaces.items()}
    if isinstance(space, spaces.Tuple):
        return tuple(_cast(s, action[i]) for i, s in enumerate(space.spaces))
    return np.asarray(action, space.dtype)


def _fill_masks(info: dict[str, Any]) -> dict[str, Any]:
    """Ones in the masks of the environments that report none."""
    for key in {"control_mask", "discount_mask"} & info.keys():
        mask = np.where(info.get(f"_{key}", True), info[key], 1.0)
        info = {**info, key: mask.astype(np.float32)}
    return info


def _end_workers(venv: AsyncVectorEnv) -> None:
    """Asks worker processes to close their environments, and ends those that do not in time."""
    for pipe in venv.parent_pipes:
        with contextlib.suppress(OSError, AttributeError):  # the pipe to a failed worker is None
            pipe.send(("close", None))
    deadline = time.monotonic() + _CLOSE_SECONDS
    for process in venv.processes:
        process.join(max(0.0, deadline - time.monotonic()))
        process.kill()
        process.join()
    for pipe in venv.parent_pipes:
        with contextlib.suppress(AttributeError):
            pipe.close()
