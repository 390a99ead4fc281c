"""Environments that are pure JAX functions, so that they run inside compiled programs.

:func:`make_jax_env` takes gymnax and brax environments by name, and anybody's pair of functions. What steps
many of them side by side, resets them and keeps the rows is :func:`rl_trainers.rollout.unroll_scan`.
"""

from __future__ import annotations

import difflib
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import gymnasium
import jax
import jax.numpy as jnp
import numpy as np
from gymnasium import spaces

from rl_trainers.types import EnvInfo, PyTree

_EXTRA = "needs the extra 'jax-envs': pip install 'rl_trainers[jax-envs]'"
_FOREVER = int(np.iinfo(np.int32).max)
_BRAX_STEPS = 1000


class JaxEnv(NamedTuple):
    """One environment as pure functions; they are mapped over ``B`` of them from outside.

    Attributes:
        reset: ``key -> (state, observation [*obs])``.
        step: ``(state, action [*act], key) -> (state, observation [*obs], reward, terminated, truncated,
            info)``, the last observation of an episode included; it never resets. ``info`` may have
            ``control_mask`` and ``discount_mask``, see :class:`rl_trainers.types.EnvInfo`.
        observation_space: a gymnasium space.
        action_space: a gymnasium space.
        name: for logs and messages.
        time_limit: decisions after which an episode is truncated, besides what ``step`` truncates; ``None``
            for no limit. It is counted by who steps the environment.
    """

    reset: Callable[[Any], tuple[PyTree, PyTree]]
    step: Callable[[PyTree, PyTree, Any], tuple[PyTree, PyTree, Any, Any, Any, dict]]
    observation_space: gymnasium.Space
    action_space: gymnasium.Space
    name: str = "JaxEnv"
    time_limit: int | None = None


def is_jax_env(env: Any) -> bool:
    """Whether ``env`` is something that :func:`make_jax_env` takes."""
    if isinstance(env, str):
        return env.split(":")[0] in _SUITES
    return isinstance(env, JaxEnv) or _is_fields(env) or _is_gymnax(env)


def _is_fields(env: Any) -> bool:
    return (
        isinstance(env, tuple) and len(env) >= 4 and all(isinstance(x, gymnasium.Space) for x in env[2:4])
    )


def _is_gymnax(env: Any) -> bool:
    return isinstance(env, tuple) and len(env) == 2 and hasattr(env[0], "step_env")


def make_jax_env(env: Any, time_limit: int | None = None) -> JaxEnv:
    """Makes an environment whose records have fixed shapes and dtypes.

    Args:
        env: ``'gymnax:CartPole-v1'``, ``'brax:ant'`` (extra ``jax-envs``), a :class:`JaxEnv`, what
            ``gymnax.make`` returns, or the fields of a :class:`JaxEnv` as a tuple ``(reset, step,
            observation_space, action_space)``.
        time_limit: decisions after which an episode is truncated; ``None`` for the environment's own limit.

    Raises:
        ImportError: the library is not installed; names the extra.
        TypeError: ``env`` is none of these.
        ValueError: there is no such environment, or what its functions return does not fit.
    """
    if time_limit is not None and time_limit < 1:
        raise ValueError(f"time_limit: must be >= 1 or None, got {time_limit}; the nearest is 1")
    if isinstance(env, str):
        suite, _, name = env.partition(":")
        if suite not in _SUITES:
            near = difflib.get_close_matches(suite, _SUITES, 1, 0.0)[0]
            raise ValueError(f"env: {env!r} names no suite of JAX environments; the nearest is '{near}:'")
        made = _SUITES[suite](name)
    elif isinstance(env, JaxEnv):
        made = env
    elif _is_gymnax(env):
        made = from_gymnax(*env)
    elif _is_fields(env):
        made = JaxEnv(*env)
    else:
        raise TypeError(
            f"env: expected 'gymnax:ID', 'brax:NAME', a JaxEnv or a tuple (reset, step, observation_space, "
            f"action_space), got {env!r}"
        )
    made = _settled(made)
    return made if time_limit is None else made._replace(time_limit=time_limit)


# Suites.


def from_gymnax(env: Any, params: Any = None) -> JaxEnv:
    """A gymnax environment with its last observations, and its ends told apart.

    ``step_env`` and ``reset_env`` are used in place of gymnax's own ``step``, which resets and so loses the
    last observation of an episode. gymnax has one ``done``: an end that is there with
    ``max_steps_in_episode`` out of reach too is a termination, any other a truncation. So tasks that end by
    their clock alone, such as its bandits and Pendulum, are truncated.

    Args:
        env: an id or an environment.
        params: its parameters; ``None`` for the default ones.

    Raises:
        ImportError: gymnax is not installed.
        ValueError: there is no such id; names the nearest.
    """
    if isinstance(env, str):
        try:
            import gymnax
        except ImportError as error:
            raise ImportError(f"env: 'gymnax:{env}' {_EXTRA}") from error
        _check_known("gymnax", env, gymnax.registered_envs)
        env, default = gymnax.make(env)
        params = default if params is None else params
    params = env.default_params if params is None else params
    endless = params
    if hasattr(params, "max_steps_in_episode"):
        endless = params.replace(max_steps_in_episode=_FOREVER)

    def reset(key):
        observation, state = env.reset_env(key, params)
        return state, observation

    def step(state, action, key):
        # Nearly everything in the second call is the same, and compiled once.
        observation, following, reward, done, _ = env.step_env(key, state, action, params)
        terminated = env.step_env(key, state, action, endless)[3]
        return following, observation, reward, terminated, done & ~terminated, {}

    observation_space = _from_gymnax_space(env.observation_space(params))
    return JaxEnv(reset, step, observation_space, _from_gymnax_space(env.action_space(params)), env.name)


def from_brax(env: Any, time_limit: int | None = _BRAX_STEPS) -> JaxEnv:
    """A brax environment; its ``done`` is a termination.

    Args:
        env: a name or an environment without wrappers.
        time_limit: decisions after which an episode is truncated; 1000 is brax's own.

    Raises:
        ImportError: brax is not installed.
        ValueError: there is no such name; names the nearest.
    """
    name = env if isinstance(env, str) else type(env).__name__
    if isinstance(env, str):
        try:
            from brax import envs
        except ImportError as error:
            raise ImportError(f"env: 'brax:{env}' {_EXTRA}") from error
        _check_known("brax", env, list(envs._envs))
        env = envs.get_environment(env)

    def reset(key):
        state = env.reset(key)
        return state, state.obs

    def step(state, action, key):
        following = env.step(state, action)
        done = following.done > 0
        return following, following.obs, following.reward, done, jnp.zeros_like(done), {}

    observation = jax.eval_shape(reset, jax.random.PRNGKey(0))[1]
    action_space = spaces.Box(-1.0, 1.0, (env.action_size,), np.float32)
    return JaxEnv(reset, step, _unbounded(observation), action_space, name, time_limit)


_SUITES: dict[str, Callable[[Any], JaxEnv]] = {"gymnax": from_gymnax, "brax": from_brax}


def _check_known(suite: str, name: str, known: list[str]) -> None:
    if name not in known:
        near = difflib.get_close_matches(name, known, 1, 0.0)[0]
        raise ValueError(f"env: {suite} has no environment {name!r}; the nearest is {suite + ':' + near!r}")


def _from_gymnax_space(space: Any) -> gymnasium.Space:
    """The gymnasium space of a gymnax one; its classes are known by their names and attributes."""
    kind = type(space).__name__
    if kind == "Discrete":
        return spaces.Discrete(int(space.n))
    if kind == "Box":
        dtype = jax.dtypes.canonicalize_dtype(space.dtype)
        if dtype != np.dtype(space.dtype):  # a 64-bit type that JAX does not give
            dtype = np.dtype(np.float32)
        low, high = (np.broadcast_to(np.asarray(x), space.shape) for x in (space.low, space.high))
        return spaces.Box(low.astype(dtype), high.astype(dtype), tuple(space.shape), dtype.type)
    if kind == "Dict":
        return spaces.Dict({name: _from_gymnax_space(part) for name, part in space.spaces.items()})
    if kind == "Tuple":
        return spaces.Tuple([_from_gymnax_space(part) for part in space.spaces])
    raise ValueError(f"env: a space of gymnax is a {kind}; known are Discrete, Box, Dict and Tuple")


def _unbounded(observation: PyTree) -> gymnasium.Space:
    """The space of observations of which only shapes and dtypes are known."""
    if isinstance(observation, dict):
        return spaces.Dict({name: _unbounded(x) for name, x in observation.items()})
    return spaces.Box(-np.inf, np.inf, observation.shape, observation.dtype)


# Shapes and dtypes.


def _settled(env: JaxEnv) -> JaxEnv:
    """``env`` with states whose dtypes stay as they are, and observations and flags in those they must have.

    Raises:
        ValueError: a shape or structure does not fit.
    """
    key = jax.random.PRNGKey(0)
    example, form = _example(env.observation_space), _example(env.action_space)
    first, seen = jax.eval_shape(env.reset, key)
    _check_storable(env.name, first)
    second, then, reward, *flags, _ = jax.eval_shape(functools.partial(_outcome, env), first, form, key)
    _check_same(env.name, "its state", "after a step", first, second)
    _check_same(env.name, "its observation", "after a reset", example, seen)
    _check_same(env.name, "its observation", "after a step", example, then)
    for name, x in zip(("reward", "terminated", "truncated"), (reward, *flags), strict=True):
        if jnp.shape(x) != ():
            raise ValueError(f"env: the {name} of {env.name} has the shape {jnp.shape(x)}; it must have ()")
    # A counter may start as an int and go on as a float, or as a Python number and go on as an array.
    like = jax.tree.map(lambda a, b: jnp.result_type(a.dtype, b.dtype), first, second)

    def cast(state, observation):
        state = jax.tree.map(jnp.asarray, state, like)
        return state, jax.tree.map(lambda x, y: jnp.asarray(x, y.dtype), observation, example)

    def reset(key):
        return cast(*env.reset(key))

    def step(state, action, key):
        state, observation, reward, terminated, truncated, info = _outcome(env, state, action, key)
        flags = jnp.asarray(terminated, bool), jnp.asarray(truncated, bool)
        return *cast(state, observation), jnp.asarray(reward, jnp.float32), *flags, info

    return env._replace(reset=reset, step=step)


def _outcome(env: JaxEnv, state: PyTree, action: PyTree, key: Any) -> tuple:
    """A step, with nothing in its ``info`` but what is known; traced."""
    outcome = env.step(state, action, key)
    if not (isinstance(outcome, (tuple, list)) and len(outcome) == 6 and isinstance(outcome[5], dict)):
        raise ValueError(
            f"env: step of {env.name} must return (state, observation, reward, terminated, truncated, info), "
            "where info is a dict"
        )
    *others, info = outcome
    return *others, {name: info[name] for name in EnvInfo._fields if name in info}


def _check_storable(env: str, state: PyTree) -> None:
    if any(jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key) for x in jax.tree.leaves(state)):
        raise ValueError(
            f"env: the state of {env} has a typed key, which checkpoints cannot hold; keep "
            "jax.random.key_data of it, or draw from the key that step is given"
        )


def _example(space: gymnasium.Space) -> PyTree:
    """Shapes and dtypes of the members of a space."""
    if isinstance(space, spaces.Dict):
        return {name: _example(part) for name, part in space.spaces.items()}
    if isinstance(space, spaces.Tuple):
        return tuple(_example(part) for part in space.spaces)
    return jax.ShapeDtypeStruct(space.shape, jax.dtypes.canonicalize_dtype(space.dtype))


def _check_same(env: str, what: str, when: str, expected: PyTree, given: PyTree) -> None:
    shapes = [jax.tree.map(lambda x: x.shape, tree) for tree in (expected, given)]
    if shapes[0] != shapes[1]:
        raise ValueError(f"env: {env}: {what} has the shape {shapes[1]} {when}, expected {shapes[0]}")


# Stepping them.


class Envs(NamedTuple):
    """``B`` environments.

    Attributes:
        state: leading axis ``[B]``.
        key: u32 ``[2]``, what the environments draw comes from; acting has its own.
    """

    state: PyTree
    key: Any


def reset(env: JaxEnv, num_envs: int, key: Any) -> tuple[Envs, PyTree]:
    """Starts ``B`` environments; traced or not.

    Args:
        env: what :func:`make_jax_env` returns.
        num_envs: ``B``.
        key: u32 ``[2]``, for all that the environments draw from now on.

    Returns:
        ``(envs, observation [B, *obs])``.
    """
    key, key_reset = jax.random.split(key)
    # Compiled, since a reset may be hundreds of small operations.
    state, observation = jax.jit(jax.vmap(env.reset))(jax.random.split(key_reset, num_envs))
    return Envs(state, key), observation


def step_or_reset(env: JaxEnv, envs: Envs, needs_reset: Any, length: Any, action: PyTree) -> tuple:
    """One row: environments that need it are reset, which ignores the action and pays nothing; traced.

    Args:
        env: what :func:`make_jax_env` returns.
        envs: where the environments stand.
        needs_reset: bool ``[B]``.
        length: i32 ``[B]``, decisions taken in the running episodes.
        action: ``[B, *act]`` in the units of the action space.

    Returns:
        ``(envs, observation [B, *obs], reward f32 [B], terminated bool [B], truncated bool [B], info)``;
        ``info`` has f32 ``[B]`` for every field of :class:`rl_trainers.types.EnvInfo`.
    """
    key_env, key = jax.random.split(envs.key)
    keys = jax.random.split(key, len(needs_reset))
    stepped = jax.vmap(env.step)(envs.state, action, keys)
    state, observation, reward, terminated, truncated, info = stepped
    # An environment takes one of the two ways, so that each key is used once.
    first = jax.vmap(env.reset)(keys)

    def choose(x, y):
        return jnp.where(needs_reset.reshape(-1, *[1] * (x.ndim - 1)), x, y)

    state, observation = jax.tree.map(choose, first, (state, observation))
    if env.time_limit is not None:
        truncated = truncated | (length + 1 >= env.time_limit)
    ones = jnp.ones(len(needs_reset), jnp.float32)
    masks = {n: choose(ones, info[n].astype(jnp.float32)) if n in info else ones for n in EnvInfo._fields}
    reward = choose(jnp.zeros_like(ones), reward)
    return (
        Envs(state, key_env),
        observation,
        reward,
        terminated & ~needs_reset,
        truncated & ~needs_reset,
        masks,
    )


class DeviceEnv:
    """``B`` JAX environments with the interface of :class:`rl_trainers.envs.HostEnv`.

    A call of :meth:`step` costs a dispatch; compiled loops take :attr:`functions` and :attr:`envs` and give
    back what they made of them by :meth:`put`.

    Args:
        env: see :func:`make_jax_env`.
        num_envs: ``B``.
        time_limit: likewise.

    Attributes:
        functions: the :class:`JaxEnv`.
        envs: :class:`Envs`, where the environments stand.
        num_envs, name, observation_space, action_space: as in ``HostEnv``.
        restarted: bool ``[B]``, all false: episodes go on after :meth:`restore`.
    """

    def __init__(self, env: Any, num_envs: int, time_limit: int | None = None):
        self.functions = make_jax_env(env, time_limit)
        self.num_envs, self.name = num_envs, self.functions.name
        self.observation_space = self.functions.observation_space
        self.action_space = self.functions.action_space
        self.restarted = np.zeros(num_envs, bool)
        self.envs: Any = None  # until the first reset
        self._step = jax.jit(functools.partial(step_or_reset, self.functions))
        self._needs_reset, self._length = np.zeros(num_envs, bool), np.zeros(num_envs, np.int32)

    def reset(self, seed: int) -> PyTree:
        """Starts all environments.

        Args:
            seed: int >= 0.

        Returns:
            Observation ``[B, *obs]``, numpy.
        """
        self.envs, observation = reset(self.functions, self.num_envs, jax.random.PRNGKey(seed))
        self._needs_reset = np.zeros_like(self._needs_reset)
        self._length = np.zeros_like(self._length)
        return _to_host(observation)

    def step(self, action: PyTree) -> tuple[PyTree, np.ndarray, np.ndarray, np.ndarray, dict]:
        """Steps all environments once, see :meth:`rl_trainers.envs.HostEnv.step`."""
        self.envs, *outcome = self._step(self.envs, self._needs_reset, self._length, action)
        observation, reward, terminated, truncated, info = jax.tree.map(np.array, tuple(outcome))
        self._length = np.where(self._needs_reset, 0, self._length + 1)
        self._needs_reset = terminated | truncated
        self._length[self._needs_reset] = 0
        return observation, reward, terminated, truncated, info

    def put(self, envs: Envs, needs_reset: Any, length: Any) -> None:
        """Goes on from where a compiled loop has left the environments."""
        self.envs, self._needs_reset = envs, np.asarray(needs_reset)
        self._length = np.array(length, np.int32)

    def snapshot(self) -> dict[str, np.ndarray]:
        """Everything that continues the environments exactly in another process."""
        leaves = jax.tree.leaves((self.envs, self._needs_reset, self._length))
        return {f"envs_{i}": np.array(x) for i, x in enumerate(leaves)}

    def restore(self, saved: dict[str, np.ndarray]) -> bool:
        """Continues from :meth:`snapshot`.

        Raises:
            ValueError: the snapshot is of another environment or another number of them.
        """
        start = functools.partial(reset, self.functions, self.num_envs)
        envs, _ = jax.eval_shape(start, jax.random.PRNGKey(0))
        like, structure = jax.tree.flatten((envs, self._needs_reset, self._length))
        names = [f"envs_{i}" for i in range(len(like))]
        leaves = [saved[name] for name in names if name in saved]
        if [x.shape for x in leaves] != [x.shape for x in like]:
            raise ValueError(f"env: the checkpoint is not of {self.num_envs} environments {self.name}")
        self.put(*jax.tree.unflatten(structure, [jnp.array(x) for x in leaves]))
        return True

    def close(self) -> None:
        """Nothing is open."""


# A view from outside.


class GymView(gymnasium.Env):
    """A :class:`JaxEnv` as a ``gymnasium.Env``, for tests and for drawing; a call of it costs a dispatch.

    Args:
        env: see :func:`make_jax_env`.

    Attributes:
        state: the environment's state, for what draws it.
    """

    def __init__(self, env: Any):
        self.env = env = make_jax_env(env)
        self.observation_space, self.action_space = env.observation_space, env.action_space
        self._reset, self._step = jax.jit(env.reset), jax.jit(env.step)
        self._key: Any = None
        self.state: PyTree = None
        self._length = 0

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> tuple[Any, dict]:
        """Starts an episode; with a seed, the first one that follows from it, and else the next one."""
        super().reset(seed=seed)
        if seed is not None or self._key is None:
            self._key = jax.random.PRNGKey(self.np_random.integers(2**31) if seed is None else seed)
        self.state, observation = self._reset(self._next_key())
        self._length = 0
        return _to_host(observation), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict]:
        """One step."""
        self.state, observation, reward, terminated, truncated, info = self._step(
            self.state, action, self._next_key()
        )
        self._length += 1
        limit = self.env.time_limit
        truncated = bool(truncated) or (limit is not None and self._length >= limit)
        return _to_host(observation), float(reward), bool(terminated), truncated, _to_host(info)

    def _next_key(self) -> Any:
        self._key, key = jax.random.split(self._key)
        return key


def _to_host(tree: PyTree) -> PyTree:
    return jax.tree.map(np.asarray, tree)
