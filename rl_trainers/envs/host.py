"""Environments that live in Python: ``B`` of them behind one interface with next-step autoreset.

:func:`make_host_env` takes a gymnasium id, an environment object, a factory or a vector
environment; :mod:`rl_trainers.envs.adapters` adds gym before 0.26 and dm_env. The row after an
episode's end is the reset row that :mod:`rl_trainers.types` describes, whatever the environment is.
"""

from __future__ import annotations

import copy
import difflib
import functools
import importlib
import logging
import math
import multiprocessing
import multiprocessing.connection
import operator
import re
import time
import traceback
import zlib
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import gymnasium
import numpy as np
from gymnasium import spaces
from gymnasium.envs.registration import EnvSpec
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv, VectorEnv

from rl_trainers.envs import adapters, snapshot

_log = logging.getLogger("rl_trainers")
_BACKENDS = ("auto", "sync", "vector", "process")
_F32 = np.dtype(np.float32)
_F64 = np.dtype(np.float64)
_CLOSE_SECONDS = 5.0
_ADAPTERS = (adapters.LegacyGymEnv, adapters.DmEnv)


class EnvError(RuntimeError):
    """An environment raised, or its worker process died; the text holds its index and traceback."""


def env_seed(seed: int, index: int) -> int:
    """Seed of the ``index``-th of several streams drawn from ``seed``; below 2**31."""
    return int(np.random.SeedSequence([seed, index]).generate_state(1)[0] >> 1)


class SubEnv(gymnasium.Wrapper):
    """One environment of several: time limit, error text, and its state for a checkpoint.

    The state of the environment is written out where it is plain Python (see
    :mod:`rl_trainers.envs.snapshot`). Where it is not, every episode is reset with a seed of its
    own and its actions are kept, so that the running episode can be replayed; a checksum of all its
    observations and rewards tells whether the replay went the same way. An environment that carries
    hidden state from one episode to the next may differ later all the same.

    Args:
        env: the environment.
        index: its place among the others.
        time_limit: decisions after which an episode is truncated; ``None`` for no limit.
    """

    def __init__(self, env: gymnasium.Env, index: int, time_limit: int | None):
        super().__init__(env)
        self.restore_from: Any = None
        self._index = index
        self._limit = math.inf if time_limit is None else time_limit
        self._seed = 0
        self._episode = 0
        self._length = 0
        self._needs_reset = False
        self._is_plain = True
        self._start: list = []
        self._actions: list = []
        self._checksum = 0

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> tuple[Any, dict]:
        """Starts an episode; with a seed, the first one of that seed's sequence."""
        is_first = seed is not None
        if seed is not None:
            self._seed, self._episode = seed, 0
        else:
            self._episode += 1
            seed = None if self._is_plain else env_seed(self._seed, self._episode)
        if is_first or not self._is_plain:
            self._start = self._layers()
        try:
            observation, info = self.env.reset(seed=seed, options=options)
        except Exception as error:
            raise self._explain(error, "reset") from error
        if is_first:
            self._is_plain = _try_encode(self.env) is not None
        self._length = 0
        self._needs_reset = False
        self._actions = []
        self._checksum = 0 if self._is_plain else _checksum(observation, 0.0, 0)
        return observation, info

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict]:
        """One step; a reset instead if the last one ended an episode and nobody reset since."""
        if self._needs_reset:
            observation, info = self.reset()
            return observation, 0.0, False, False, info
        if not self._is_plain:
            self._actions.append(copy.deepcopy(action))
        try:
            observation, reward, terminated, truncated, info = self.env.step(action)
        except Exception as error:
            raise self._explain(error, f"step {self._length + 1} of its episode") from error
        if not self._is_plain:
            self._checksum = _checksum(observation, reward, self._checksum)
        self._length += 1
        truncated = bool(truncated) or self._length >= self._limit
        self._needs_reset = bool(terminated) or truncated
        return observation, reward, bool(terminated), truncated, info

    def env_name(self) -> str:
        """The id of the environment, or the name of its class."""
        return _name(self.env)

    def take_snapshot(self) -> dict[str, Any]:
        """Returns the state as a nest of JSON values and arrays."""
        plain = self._is_plain
        return {
            "counters": [self._seed, self._episode, self._length, self._needs_reset],
            "state": _try_encode(self.env) if plain else None,
            "start": None if plain else self._start,
            "actions": None if plain else _try_encode(_stack(self._actions)),
            "checksum": self._checksum,
        }

    def apply_snapshot(self) -> bool:
        """Continues from ``restore_from``, set before; False if the episode has to start anew."""
        saved, self.restore_from = self.restore_from, None
        try:
            restored = self._apply(saved)
        except Exception as error:  # whatever it is, a new episode is a way on
            _log.warning("environment %d: %s: %s", self._index, type(error).__name__, error)
            restored = False
        self._seed, self._episode, self._length, self._needs_reset = saved["counters"]
        if not restored:
            _log.warning(
                "environment %d cannot continue its episode where it stood; it starts a new one",
                self._index,
            )
            self._needs_reset = True
        return restored

    def _apply(self, saved: dict[str, Any]) -> bool:
        if saved["state"] is not None:
            snapshot.decode(saved["state"], self.env)
            return True
        if saved["actions"] is None:
            return False
        for layer, pairs in zip(_chain(self.env), saved["start"], strict=True):
            if pairs is not None:
                snapshot.decode_attributes(pairs, layer)
        seed, episode = saved["counters"][:2]
        self._start = saved["start"]
        observation, _ = self.env.reset(seed=env_seed(seed, episode) if episode else seed)
        self._checksum = _checksum(observation, 0.0, 0)
        self._actions = list(snapshot.decode(saved["actions"]))
        for action in self._actions:
            observation, reward, *_ = self.env.step(action)
            self._checksum = _checksum(observation, reward, self._checksum)
        return self._checksum == saved["checksum"]

    def _layers(self) -> list:
        """Attributes of every wrapper that is plain by itself, ``None`` for the others."""
        layers: list = []
        seen = {id(layer) for layer in _chain(self.env)}
        for layer in _chain(self.env):
            try:
                layers.append(snapshot.encode_attributes(layer, seen, skip=("env",)))
            except (snapshot.OpaqueError, RecursionError):
                layers.append(None)
        return layers

    def _explain(self, error: Exception, where: str) -> EnvError:
        text = "".join(traceback.format_exception(error))
        name = type(error).__name__
        return EnvError(f"environment {self._index} raised {name}: {error} (in {where})\n{text}")


class HostEnv:
    """``B`` environments that are stepped side by side.

    After a step that ended an episode, the next step of that environment is a reset row: its action
    is ignored, its reward is 0, and it returns the first observation of the next episode.

    Attributes:
        num_envs: ``B``.
        observation_space: space of one environment's observation, as it is returned here.
        action_space: space of one environment's action.
        name: id of the environment, or the name of its class.
        restarted: bool ``[B]``, environments whose next step is a reset row because the last
            :meth:`restore` could not continue their episode.
    """

    def __init__(self, venv: VectorEnv, name: str):
        self._venv: Any = venv
        self._space = venv.single_observation_space
        self.num_envs = venv.num_envs
        self.name = name
        self.action_space = venv.single_action_space
        self.observation_space = _returned_space(self._space)
        self.restarted = np.zeros(self.num_envs, np.bool_)
        _check_action_space(self.action_space)
        self._is_process = isinstance(venv, AsyncVectorEnv)
        self._has_sub_envs = isinstance(venv, (_Sync, _Process))
        self._is_box = isinstance(self._space, spaces.Box)
        self._is_float = self._is_box and np.issubdtype(self._space.dtype, np.floating)
        self._action_dtype = getattr(venv.action_space, "dtype", None)
        self._seed = 0
        self._steps = 0
        self._starts = np.zeros(self.num_envs, np.int64)
        self._resets = np.zeros(self.num_envs, np.int64)
        self._ended: np.ndarray | None = None
        self._closed = False

    def reset(self, seed: int) -> Any:
        """Starts all environments.

        Args:
            seed: int >= 0. Environment ``i`` gets a seed derived from ``(seed, i)``, the same in
                every backend; a vector environment not made of single ones gets ``seed``.

        Returns:
            Observation ``[B, *obs]``, numpy.

        Raises:
            ValueError: the seed is negative.
            EnvError: an environment raised.
            FloatingPointError: an observation is NaN or infinite.
        """
        if int(seed) < 0:
            raise ValueError(f"seed: must be >= 0, got {seed}; the nearest valid value is 0")
        self._check_open()
        self._seed = int(seed)
        self._steps = 0
        self._starts[:] = 0
        self._resets[:] = 0
        self._ended = None
        self.restarted = np.zeros(self.num_envs, np.bool_)
        seeds: Any = self._seed
        if self._has_sub_envs:
            seeds = [env_seed(self._seed, i) for i in range(self.num_envs)]
        try:
            observation, _ = self._venv.reset(seed=seeds)
        except Exception as error:
            self._fail(error)
        return self._convert(observation)

    def step(self, action: Any) -> tuple[Any, np.ndarray, np.ndarray, np.ndarray, dict]:
        """Steps all environments once.

        Args:
            action: ``[B, *act]`` in the units of the action space; a pytree for ``Dict`` spaces.

        Returns:
            ``(observation [B, *obs], reward f32 [B], terminated bool [B], truncated bool [B],
            info)``. ``info['control_mask']`` and ``info['discount_mask']`` are f32 ``[B]`` if any
            environment reports them, with ones for those that do not.

        Raises:
            EnvError: an environment raised or its process died; all others are closed.
            FloatingPointError: a reward or observation is NaN or infinite.
        """
        if self._closed:
            self._check_open()
        if self._action_dtype is None:
            action = _cast(self._venv.action_space, action)
        elif type(action) is not np.ndarray or action.dtype is not self._action_dtype:
            action = np.asarray(action, self._action_dtype)
        try:
            observation, reward, terminated, truncated, info = self._venv.step(action)
        except Exception as error:
            self._fail(error)
        self._steps += 1
        if type(reward) is not np.ndarray or reward.dtype is not _F32:
            reward = np.array(reward, np.float32)
            terminated, truncated = np.asarray(terminated), np.asarray(truncated)
        if self._ended is not None:
            self._begin(self._ended, reward)
        if not math.isfinite(np.add.reduce(reward)):
            self._check_finite(reward, "reward")
        done = terminated | truncated
        if np.count_nonzero(done):
            self._ended = done
        if info:
            info = self._masks(info)
        return self._convert(observation), reward, terminated, truncated, info

    def snapshot(self) -> dict[str, np.ndarray] | None:
        """Returns everything that continues the environments exactly in another process.

        Returns:
            ``{'header': u8 [h], 'data': u8 [d]}`` of lengths that vary, or ``None`` for a vector
            environment whose state cannot be read.
        """
        self._check_open()
        if self._has_sub_envs:
            states: Any = list(self._venv.call("take_snapshot"))
        else:
            states = _try_encode(self._venv)
            if states is None:
                return None
        ended = None if self._ended is None else self._ended.tolist()
        counters = [self._seed, self._steps, self._starts, self._resets, ended]
        return snapshot.pack({"counters": counters, "states": states})

    def restore(self, saved: dict[str, np.ndarray]) -> bool:
        """Continues from :meth:`snapshot`.

        Returns:
            True if every environment continues its episode. Where one cannot, the log says so, its
            next step is a reset row, and it is marked in ``restarted``.

        Raises:
            ValueError: the snapshot is of another number or kind of environments.
        """
        tree = snapshot.unpack(saved)
        seed, steps, starts, resets, ended = tree["counters"]
        if len(starts) != self.num_envs:
            raise ValueError(f"num_envs: is {self.num_envs}, but the checkpoint has {len(starts)}")
        self.reset(seed)
        if self._has_sub_envs != isinstance(tree["states"][0], dict):
            raise ValueError("backend: the checkpoint was written with another kind of backend")
        if self._has_sub_envs:
            self._venv.set_attr("restore_from", tree["states"])
            self.restarted = ~np.array(self._venv.call("apply_snapshot"), np.bool_)
        else:
            try:
                snapshot.decode(tree["states"], self._venv)
            except snapshot.OpaqueError as error:
                raise ValueError(f"env: does not fit the checkpoint: {error}") from error
        self._steps, self._starts, self._resets = steps, starts, resets
        self._ended = None if ended is None else np.array(ended, np.bool_)
        if self.restarted.any():
            kept = self._ended if self._ended is not None else np.zeros(self.num_envs, np.bool_)
            self._ended = kept | self.restarted
        return not self.restarted.any()

    def close(self) -> None:
        """Closes all environments and ends their processes within seconds; may be called again."""
        if self._closed:
            return
        self._closed = True
        if self._is_process:
            _end_workers(self._venv)
        else:
            self._venv.close()

    def _begin(self, ended: np.ndarray, reward: np.ndarray) -> None:
        """Bookkeeping of reset rows; not every vector environment gives reward 0 there."""
        reward[ended] = 0.0
        self._starts[ended] = self._steps
        self._resets += ended
        self._ended = None

    def _convert(self, observation: Any) -> Any:
        if not self._is_box:
            return self._convert_nest(self._space, observation, "observation")
        if type(observation) is not np.ndarray:
            observation = np.asarray(observation)
        if observation.dtype is _F64:
            observation = observation.astype(np.float32)
        if self._is_float and not math.isfinite(np.add.reduce(observation, None)):
            self._check_finite(observation, "observation")
        return observation

    def _convert_nest(self, space: gymnasium.Space, value: Any, name: str) -> Any:
        if isinstance(space, spaces.Dict):
            named = space.spaces.items()
            return {k: self._convert_nest(s, value[k], f"{name}[{k!r}]") for k, s in named}
        if isinstance(space, spaces.Tuple):
            parts = enumerate(space.spaces)
            return tuple(self._convert_nest(s, value[i], f"{name}[{i}]") for i, s in parts)
        value = np.asarray(value)
        if value.dtype == np.float64:
            value = value.astype(np.float32)
        if value.dtype.kind == "f":
            self._check_finite(value, name)
        return value

    def _check_finite(self, value: np.ndarray, field: str) -> None:
        finite = np.isfinite(value.reshape(self.num_envs, -1)).all(axis=1)
        if finite.all():
            return
        i = int(np.argmin(finite))
        bad = value[i][~np.isfinite(value[i])].reshape(-1)[0]
        raise FloatingPointError(
            f"environment {i} ({self.name}): {field} is {bad} at its step "
            f"{self._steps - self._resets[i]} (step {self._steps - self._starts[i]} of its episode)"
        )

    def _masks(self, info: dict[str, Any]) -> dict[str, Any]:
        for key in ("control_mask", "discount_mask"):
            if key in info:
                reported = info.get(f"_{key}", True)
                mask = np.where(reported, np.asarray(info[key], np.float32), np.float32(1.0))
                info = {**info, key: mask}
        return info

    def _check_open(self) -> None:
        if self._closed:
            raise RuntimeError(f"the environments of {self.name} are closed")

    def _fail(self, error: Exception) -> NoReturn:
        """Raises what the user should see for an error that came out of the vector environment."""
        if self._closed:
            raise RuntimeError(f"the environments of {self.name} are closed") from error
        if self._is_process and isinstance(error, (EOFError, OSError)):
            time.sleep(0.1)  # a process that is just dying has no exit code yet
            codes = [process.exitcode for process in self._venv.processes]
            dead = [f"{i} (exit code {c})" for i, c in enumerate(codes) if c is not None]
            self.close()
            text = f"the worker process of environment {', '.join(dead)} died: {error!r}"
            raise EnvError(text) from error
        if isinstance(error, EnvError):
            self.close()
        raise error


class _Sync(SyncVectorEnv):
    """A sequential vector environment of :class:`SubEnv`."""


class _Process(AsyncVectorEnv):
    """A vector environment of :class:`SubEnv` in worker processes."""

    def __init__(self, fns: Sequence[Callable[[], SubEnv]], context: str):
        try:
            super().__init__(fns, context=context)
        except Exception:
            if hasattr(self, "processes"):
                _end_workers(self)
            raise

    def _raise_if_errors(self, successes: Any) -> None:
        """Raises a worker's error with its index and traceback; the base class drops both."""
        failed = len(successes) - sum(successes)
        if failed == 0:
            return
        errors = [self.error_queue.get(timeout=_CLOSE_SECONDS) for _ in range(failed)]
        index, kind, value, trace = min(errors, key=operator.itemgetter(0))
        if kind is EnvError:
            raise value
        raise EnvError(f"environment {index} raised {kind.__name__}: {value}\n{trace}")


def make_host_env(
    env: Any, num_envs: int = 1, *, time_limit: int | None = None, backend: str = "auto"
) -> HostEnv:
    """Makes ``num_envs`` environments.

    Args:
        env: a gymnasium id (``'module:Id-v0'`` imports the module first; ids that are gone stand
            for their newest version), a factory ``() -> env`` or a list of ``num_envs`` of them,
            one environment object (gymnasium, gym before 0.26, dm_env), or a gymnasium vector
            environment. A ``SyncVectorEnv`` may have any autoreset mode, because its environments
            are taken out and reset here; others must have ``NEXT_STEP``.
        num_envs: how many; an object counts as one.
        time_limit: decisions after which an episode is truncated.
        backend: ``'sync'`` steps one after another, ``'process'`` gives each its own process,
            ``'vector'`` uses the vector version that an id names, ``'auto'`` the vector version if
            there is one, else ``'sync'``. Processes are started afresh, so a script that uses them
            needs ``if __name__ == '__main__':``.

    Raises:
        TypeError: ``env`` is none of these.
        ValueError: an argument does not fit, named in the message.
    """
    _check_arguments(num_envs, time_limit, backend)
    if isinstance(env, VectorEnv):
        return _from_vector(env, num_envs, time_limit, backend)
    if isinstance(env, (str, EnvSpec)):
        spec = find_spec(env) if isinstance(env, str) else env
        limited = time_limit is None or spec.max_episode_steps is not None
        if backend == "vector" and (spec.vector_entry_point is None or not limited):
            lack = "has no vector version" if limited else "takes no time_limit as a vector"
            raise ValueError(f"backend: {spec.id} {lack}; use 'sync' or 'process'")
        if backend in ("auto", "vector") and spec.vector_entry_point and limited:
            return _from_entry_point(spec, num_envs, time_limit)
        return _from_factory(spec, num_envs, time_limit, backend, spec.id)
    _check_backend(backend, "a factory or an object")
    if _is_object(env):
        if num_envs != 1 or backend == "process":
            raise ValueError(
                f"env: one environment object cannot be num_envs={num_envs}, backend={backend!r}; "
                "pass a factory () -> env, or use num_envs=1, backend='sync'"
            )
        return _from_objects([adapters.as_gymnasium(env)], time_limit, _name(env))
    if isinstance(env, (list, tuple)) and env and all(callable(make) for make in env):
        if num_envs not in (1, len(env)):
            raise ValueError(f"num_envs: is {num_envs}, but env has {len(env)} factories")
        num_envs = len(env)
    elif not callable(env):
        raise TypeError(f"env: expected an id, an environment or a factory, got {type(env)}")
    return _from_factory(env, num_envs, time_limit, backend, None)


def make_eval_env(
    env: Any, num_envs: int = 1, *, time_limit: int | None = None, backend: str = "auto"
) -> HostEnv:
    """Makes environments of their own for evaluation, from what :func:`make_host_env` was given.

    Ids and factories are used again. An object is rebuilt from its spec, else copied; ``num_envs``
    of them are then stepped one after another, whatever ``backend`` says.

    Raises:
        ValueError: the object can neither be rebuilt nor copied, or the factory returns the same
            object again.
    """
    make = functools.partial(make_host_env, num_envs=num_envs, time_limit=time_limit)
    if isinstance(env, (str, EnvSpec)):
        return make(env, backend=backend)
    if isinstance(env, (SyncVectorEnv, AsyncVectorEnv)):
        built = [env.env_fns[i % len(env.env_fns)]() for i in range(num_envs)]
        if any(b.unwrapped is e.unwrapped for b in built for e in getattr(env, "envs", ())):
            built = [_rebuild(b) for b in built]
        return _from_objects(built, time_limit, _name(env))
    if isinstance(env, VectorEnv):
        if num_envs != env.num_envs:
            raise ValueError(f"num_envs: {num_envs}, but a copy of env has {env.num_envs}")
        return make(_copy(env))
    if isinstance(env, (list, tuple)):
        return make([env[i % len(env)] for i in range(num_envs)], backend=backend)
    if not _is_object(env):
        host = make(env, backend=backend)
        _check_makes_new(env, host)
        return host
    return _from_objects([_rebuild(env) for _ in range(num_envs)], time_limit, _name(env))


def find_spec(env_id: str) -> EnvSpec:
    """Returns the spec of a registered id; ids of older versions stand for the newest one.

    Raises:
        ValueError: there is no such id; the message names the nearest one.
    """
    module, _, plain = env_id.rpartition(":")
    if module:
        importlib.import_module(module)
    try:
        spec = gymnasium.spec(plain)
        if getattr(spec.entry_point, "__name__", "") != "_raise_mujoco_py_error":
            return spec
    except gymnasium.error.Error:
        pass
    newest = _newest(plain.removeprefix("DM-"))
    if newest is not None:
        _log.warning("env: %s is not available any more; using %s", env_id, newest)
        return gymnasium.spec(newest)
    if _register_atari() and plain in gymnasium.registry:
        return gymnasium.spec(plain)
    near = difflib.get_close_matches(plain, list(gymnasium.registry), 1, 0.0)
    raise ValueError(f"env: no environment {env_id!r} is registered; the nearest is {near[0]!r}")


def _newest(env_id: str) -> str | None:
    """The registered id of the same name with the highest version."""
    name = re.sub(r"-v\d+$", "", env_id)
    versions = [s.version or 0 for s in gymnasium.registry.values() if _base(s) == name]
    return f"{name}-v{max(versions)}" if versions else None


def _base(spec: EnvSpec) -> str:
    return f"{spec.namespace}/{spec.name}" if spec.namespace else spec.name


def _register_atari() -> bool:
    try:
        gymnasium.register_envs(importlib.import_module("ale_py"))
    except ImportError:
        return False
    return True


def _check_arguments(num_envs: int, time_limit: int | None, backend: str) -> None:
    if num_envs < 1:
        raise ValueError(f"num_envs: must be >= 1, got {num_envs}; the nearest valid value is 1")
    if time_limit is not None and time_limit < 1:
        raise ValueError(f"time_limit: must be >= 1 or None, got {time_limit}; the nearest is 1")
    if backend not in _BACKENDS:
        near = difflib.get_close_matches(str(backend), _BACKENDS, 1, 0.0)[0]
        raise ValueError(f"backend: {backend!r} is none of {_BACKENDS}; the nearest is {near!r}")


def _check_backend(backend: str, what: str) -> None:
    if backend == "vector":
        raise ValueError(f"backend: 'vector' needs an id, env is {what}; use 'sync' or 'process'")


def _from_factory(
    source: Any, num_envs: int, time_limit: int | None, backend: str, name: str | None
) -> HostEnv:
    sources = source if isinstance(source, (list, tuple)) else [source] * num_envs
    fns = [functools.partial(_build, each, i, time_limit) for i, each in enumerate(sources)]
    if backend == "process":
        # Workers start from a clean process: forking one in which JAX runs threads can deadlock.
        methods = multiprocessing.get_all_start_methods()
        context = "forkserver" if "forkserver" in methods else "spawn"
        multiprocessing.get_context(context).set_forkserver_preload(["__main__", __name__])
        try:
            venv: Any = _Process(fns, context=context)
        except (EOFError, OSError) as error:
            raise EnvError(
                "a worker process died while it made its environment; is the script guarded by "
                f"if __name__ == '__main__'? ({error!r})"
            ) from error
        return HostEnv(venv, name or venv.call("env_name")[0])
    sync = _Sync(fns)
    if len({id(sub.unwrapped) for sub in sync.envs}) != num_envs:
        raise ValueError("env: the factory returned the same object twice; it must make new ones")
    return HostEnv(sync, name or _name(sync.envs[0]))


def _from_objects(envs: list, time_limit: int | None, name: str) -> HostEnv:
    fns = [functools.partial(SubEnv, env, i, time_limit) for i, env in enumerate(envs)]
    return HostEnv(_Sync(fns), name)


def _is_object(env: Any) -> bool:
    return not isinstance(env, type) and hasattr(env, "step") and hasattr(env, "reset")


def _check_makes_new(factory: Callable[[], Any], host: HostEnv) -> None:
    """Refuses a factory that returns one and the same object: evaluation would disturb training."""
    again = factory()
    known: list[Any] = [sub.unwrapped for sub in getattr(host._venv, "envs", ())]
    known += [getattr(e, "env", e) for e in known]
    if any(getattr(again, "unwrapped", again) is other for other in known):
        raise ValueError("env: the factory returned the same object twice; it must make new ones")
    if hasattr(again, "close"):
        again.close()


def _build(source: Any, index: int, time_limit: int | None) -> SubEnv:
    if isinstance(source, EnvSpec):
        return SubEnv(gymnasium.make(source, disable_env_checker=True), index, time_limit)
    return SubEnv(adapters.as_gymnasium(source()), index, time_limit)


def _from_entry_point(spec: EnvSpec, num_envs: int, time_limit: int | None) -> HostEnv:
    arguments: dict[str, Any] = {}
    if time_limit is not None and spec.max_episode_steps is not None:
        arguments["max_episode_steps"] = min(time_limit, spec.max_episode_steps)
    mode = gymnasium.VectorizeMode.VECTOR_ENTRY_POINT
    venv = gymnasium.make_vec(spec, num_envs, vectorization_mode=mode, **arguments)
    _check_autoreset(venv)
    return HostEnv(venv, spec.id)


def _from_vector(env: VectorEnv, num_envs: int, time_limit: int | None, backend: str) -> HostEnv:
    if num_envs not in (1, env.num_envs):
        raise ValueError(f"num_envs: is {num_envs}, but env has {env.num_envs} environments")
    if backend == "process":
        raise ValueError("backend: 'process' needs an id or a factory, env is a vector environment")
    if isinstance(env, SyncVectorEnv):
        return _from_objects(env.envs, time_limit, _name(env))
    _check_autoreset(env)
    if time_limit is not None:
        raise ValueError(
            f"time_limit: {type(env).__name__} cannot be limited to {time_limit} steps from "
            "outside; pass an id or a factory, or limit it where it is made"
        )
    return HostEnv(env, _name(env))


def _check_autoreset(env: VectorEnv) -> None:
    mode = env.metadata.get("autoreset_mode")
    if mode != AutoresetMode.NEXT_STEP:
        raise ValueError(
            f"env: {type(env).__name__} has autoreset mode {mode}, which loses the last "
            "observation of an episode or stops; make it with autoreset_mode="
            "AutoresetMode.NEXT_STEP (and name that in metadata['autoreset_mode'])"
        )


def _rebuild(env: Any) -> Any:
    """A new environment like ``env``: from its spec, else a copy."""
    spec = getattr(env, "spec", None)
    if isinstance(env, gymnasium.Env) and spec is not None:
        try:
            return gymnasium.make(spec, disable_env_checker=True)
        except Exception as error:
            _log.info("env: cannot be made from its spec (%s); copying it", error)
    return adapters.as_gymnasium(_copy(env))


def _copy(env: Any) -> Any:
    try:
        return copy.deepcopy(env)
    except Exception as error:
        raise ValueError(
            f"env: evaluation needs an environment of its own, but {type(env).__name__} cannot be "
            f"copied ({type(error).__name__}: {error}); pass a factory () -> env instead"
        ) from error


def _name(env: Any) -> str:
    """The id of an environment, or the name of its class."""
    if isinstance(env, SyncVectorEnv):
        return _name(env.envs[0])
    spec = getattr(env, "spec", None)
    if spec is not None and hasattr(spec, "id"):
        return spec.id
    inner = getattr(env, "unwrapped", env)
    if isinstance(inner, _ADAPTERS):
        inner = inner.env
    return type(inner).__name__


def _returned_space(space: gymnasium.Space, name: str = "observation_space") -> gymnasium.Space:
    """The space of what :class:`HostEnv` returns: float64 becomes float32."""
    if isinstance(space, spaces.Dict):
        named = space.spaces.items()
        return spaces.Dict({k: _returned_space(s, f"{name}[{k!r}]") for k, s in named})
    if isinstance(space, spaces.Tuple):
        parts = enumerate(space.spaces)
        return spaces.Tuple([_returned_space(s, f"{name}[{i}]") for i, s in parts])
    if isinstance(space, spaces.Box) and space.dtype == np.float64:
        low, high = space.low.astype(np.float32), space.high.astype(np.float32)
        return spaces.Box(low, high, dtype=np.float32)
    _check_leaf(space, name)
    return space


def _check_action_space(space: gymnasium.Space, name: str = "action_space") -> None:
    if isinstance(space, spaces.Dict):
        for key, child in space.spaces.items():
            _check_action_space(child, f"{name}[{key!r}]")
    elif isinstance(space, spaces.Tuple):
        for i, child in enumerate(space.spaces):
            _check_action_space(child, f"{name}[{i}]")
    else:
        _check_leaf(space, name)


def _check_leaf(space: gymnasium.Space, name: str) -> None:
    known = (spaces.Box, spaces.Discrete, spaces.MultiDiscrete, spaces.MultiBinary)
    if not isinstance(space, known):
        raise ValueError(
            f"env: {name} is a {type(space).__name__}; supported are Box, Discrete, MultiDiscrete, "
            "MultiBinary, and Dict and Tuple of these"
        )


def _cast(space: gymnasium.Space, action: Any) -> Any:
    """A batch of actions with the dtypes of a batched ``Dict`` or ``Tuple`` space."""
    if isinstance(space, spaces.Dict):
        return {k: _cast(s, action[k]) for k, s in space.spaces.items()}
    if isinstance(space, spaces.Tuple):
        return tuple(_cast(s, action[i]) for i, s in enumerate(space.spaces))
    return np.asarray(action, space.dtype)


def _chain(env: gymnasium.Env) -> list:
    """The environment and everything it wraps, outermost first."""
    chain = [env]
    while isinstance(chain[-1], gymnasium.Wrapper):
        chain.append(chain[-1].env)
    return chain


def _try_encode(value: Any) -> list | None:
    try:
        return snapshot.encode(value)
    except (snapshot.OpaqueError, RecursionError):
        return None


def _stack(actions: list) -> Any:
    """One array for a list of arrays or numpy scalars; other lists as they are."""
    if actions and all(isinstance(a, (np.ndarray, np.generic)) for a in actions):
        return np.stack(actions)
    return actions


def _checksum(observation: Any, reward: Any, start: int) -> int:
    """Checksum of a nest of arrays and a number, chained to that of the steps before."""
    if isinstance(observation, dict):
        observation = tuple(observation.values())
    if isinstance(observation, tuple):
        for part in observation:
            start = _checksum(part, 0.0, start)
        observation = ()
    start = zlib.crc32(np.asarray(observation).tobytes(), start)
    return zlib.crc32(np.float64(reward).tobytes(), start)


def _end_workers(venv: Any) -> None:
    """Asks worker processes to close their environments, and ends those that do not in time."""
    pipes = [pipe for pipe in venv.parent_pipes if pipe is not None and not pipe.closed]
    deadline = time.monotonic() + _CLOSE_SECONDS
    for pipe in pipes:
        try:
            pipe.send(("close", None))
        except OSError:
            continue
    waiting: dict[Any, None] = dict.fromkeys(pipes)
    while waiting and time.monotonic() < deadline:
        # A worker may be stuck in sending a result that nobody has read yet.
        ready: list[Any] = multiprocessing.connection.wait(list(waiting), timeout=0.2)
        for pipe in ready:
            try:
                pipe.recv_bytes()
            except (EOFError, OSError):
                del waiting[pipe]
    for process in venv.processes:
        process.join(max(0.0, deadline - time.monotonic()))
        if process.is_alive():
            process.terminate()
            process.join(1.0)
        if process.is_alive():
            process.kill()
            process.join()
    for pipe in pipes:
        pipe.close()
    venv.closed = True
