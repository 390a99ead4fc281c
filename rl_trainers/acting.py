"""A trainer's policy as it acts: decisions, one by one, with what they need of earlier rows."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import export

from rl_trainers import rollout, windows
from rl_trainers.envs.native import DeviceEnv
from rl_trainers.models import Model
from rl_trainers.types import EnvInfo, PyTree, Rollout, Seen, TimeStep, TrainState

if TYPE_CHECKING:
    from rl_trainers.trainer import RLTrainer

_log = logging.getLogger(__name__)

# LLVM's third level takes a fifth longer to compile the update and makes it no faster.
compiled = functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 2})


def see(timestep_to_np: Callable[[TimeStep], TimeStep] | None, observation: PyTree) -> PyTree:
    """What models see of observations with any leading axes; ``timestep_to_np`` is that of the task."""
    if timestep_to_np is None:
        return observation
    return timestep_to_np(TimeStep(observation, None, 0.0, False, False, 1.0)).observation


def load(exported: bytes) -> Callable:
    """What :meth:`Acting.export` wrote, compiled at its first call."""
    return compiled(export.deserialize(bytearray(exported)).call)


class Acting:
    """The policy of a trainer as functions of its parameters.

    What a policy remembers between rows, its ``policy_state``, is ``()``, the state of a recurrent model, or,
    for other sequence models, a :class:`rl_trainers.windows.Window`.

    Args:
        trainer: whose policy it is.
        model: the policy's model, or that of policy and value.

    Attributes:
        is_recurrent: whether the model is.
        has_window: whether it is another sequence model.
        first_state: see :class:`rl_trainers.models.Model`.
        decide: compiled: ``(params, model_state, observation, policy_state, needs_reset, key, temperature) ->
            (action, policy_state, key)``.
        decide_fully: likewise, but returns ``(action, dist_inputs, policy_state, key)``, and may be given one
            argument more, the share of rows that sample; the others take the mode.
        dist_inputs: compiled: ``(params, model_state, observation [T, B]) -> f32 [T, B, D]``.
    """

    def __init__(self, trainer: RLTrainer, model: Model):
        self._trainer = trainer
        self._model_step = model.step
        self.is_recurrent = model.step is not None
        self.has_window = model.is_sequence and not self.is_recurrent
        self.first_state = model.first_state
        self.decide_fully = compiled(self._decide_fully)
        self.decide = compiled(self._decide)
        self.dist_inputs = compiled(self._dist_inputs)
        self.begin = compiled(windows.begin)
        self._play = compiled(self._first_episodes, static_argnums=0)

    def nothing(self, num_envs: int) -> PyTree:
        """``policy_state`` before anything was seen, ``[B, ..]``."""
        if self.is_recurrent:
            return jax.tree.map(np.array, windows.states(self.first_state, num_envs))
        if not self.has_window:
            return ()
        trainer = self._trainer
        seen = trainer._see(jax.tree.map(lambda x: np.stack([x] * num_envs), trainer._example))
        return windows.empty(seen, trainer.max_slice_length)

    def see(self, data: Rollout, window: windows.Window | None = None) -> Rollout:
        """What models see of a rollout that has been through ``timestep_to_np``.

        Args:
            data: ``[T, B]``, host arrays or, without a window, traced.
            window: what was remembered before it, for models that have one; its rows come in front.
        """
        if self.has_window:
            return windows.see(data, window)
        return windows.see_recurrent(data, self.first_state) if self.is_recurrent else data

    # One decision; traced.

    def inputs(
        self, params: PyTree, model_state: PyTree, observation: PyTree, policy_state: PyTree, needs_reset: Any
    ) -> tuple[jax.Array, PyTree]:
        """``(dist_inputs f32 [B, D], policy_state)`` for what models see, ``[B, ..]``."""
        if self.has_window:
            window = windows.append(policy_state, observation, needs_reset)
            inputs = self._trainer.policy_apply(params, model_state, window.seen)[:, window.count - 1]
            return inputs, window
        if not self.is_recurrent:
            return self._trainer.policy_apply(params, model_state, observation), policy_state
        row = jax.tree.map(lambda x: x[:, None], (observation, policy_state))
        inputs, state = self.step(params, model_state, Seen(row[0], jnp.ones((len(needs_reset), 1)), row[1]))
        return inputs[:, 0], windows.follow(state, needs_reset, self.first_state)

    def step(self, params: PyTree, model_state: PyTree, seen: Seen) -> tuple[jax.Array, PyTree]:
        """``(dist_inputs f32 [N, S, D], state [N, ..])`` of a recurrent policy for rows ``[N, S]``."""
        assert self._model_step is not None
        output, state = self._model_step(params, model_state, seen)
        return output[0] if isinstance(output, tuple) else output, state

    def acting(
        self, params: PyTree, model_state: PyTree, temperature: Any, epsilon: float | None = None
    ) -> rollout.Act:
        """The policy for the unrolls of JAX environments; ``epsilon`` as in :meth:`snapshot`."""
        temperature = jnp.float32(temperature)
        share = () if epsilon is None else (jnp.float32(epsilon),)

        def act(observation, policy_state, needs_reset, key):
            seen = self._trainer._see(observation)
            rest = policy_state, needs_reset, key, temperature, *share
            return self._decide_fully(params, model_state, seen, *rest)

        return act

    def _decide_fully(
        self, params, model_state, observation, policy_state, needs_reset, key, temperature, share=None
    ):
        key, key_act = jax.random.split(key)
        inputs, policy_state = self.inputs(params, model_state, observation, policy_state, needs_reset)
        distribution = self._trainer.task.distribution
        action = distribution.sample(inputs, key_act, temperature)
        if share is not None:
            samples = jax.random.uniform(jax.random.fold_in(key_act, 0), needs_reset.shape) < share

            def choose(x, mode):
                return jnp.where(samples.reshape(-1, *[1] * (x.ndim - 1)), x, mode)

            action = jax.tree.map(choose, action, distribution.mode(inputs))
        return action, inputs, policy_state, key

    def _decide(self, *arguments):
        action, _, policy_state, key = self._decide_fully(*arguments)
        return action, policy_state, key

    def _dist_inputs(self, params, model_state, observation):
        apply = functools.partial(self._trainer.policy_apply, params, model_state)
        return windows.over_rollout(apply, observation, self._trainer.max_slice_length)

    @functools.cached_property
    def is_traceable(self) -> bool:
        """Whether acting can be part of a compiled loop."""
        task = self._trainer.task
        hook = task.timestep_to_np
        if not isinstance(task.env, DeviceEnv) or self.has_window:
            return False
        if hook is None:
            return True
        ones, no = np.ones(task.env.num_envs, np.float32), np.zeros(task.env.num_envs, bool)
        steps = TimeStep(task.actor.observation, None, ones, no, no, ones, env_info=EnvInfo(ones, ones))
        try:
            jax.eval_shape(hook, steps)
            jax.eval_shape(self._trainer._see, task.actor.observation)
        except Exception as error:  # Whatever it is, the other path shows it if it is a mistake.
            _log.warning(
                "timestep_to_np cannot be compiled, so each vector step costs a call of its own; it must be "
                "made of jax.numpy: %s",
                error,
            )
            return False
        return True

    def play(
        self, state: TrainState, temperature: float, key: Any, num_envs: int, env_seed: int, limit: int
    ) -> tuple[jax.Array, jax.Array]:
        """Plays one episode in each of ``num_envs`` JAX environments made like those for evaluation.

        Args:
            state: whose parameters act.
            temperature: 0 acts greedily, 1 samples.
            key: u32 ``[2]``.
            num_envs: ``B``.
            env_seed: of the environments.
            limit: decisions after which an episode counts as over.

        Returns:
            ``(return f32 [B], length i32 [B])``.
        """
        keys = jax.random.PRNGKey(env_seed), jax.random.fold_in(key, env_seed)
        model = state.params, state.model_state
        return self._play(num_envs, *model, np.float32(temperature), np.int32(limit), keys)

    def _first_episodes(self, num_envs, params, model_state, temperature, limit, keys):
        env: Any = self._trainer.task.eval_env
        key_env, key_act = keys
        actor = rollout.start_scan(env.functions, num_envs, key_env, key_act, self.nothing(num_envs))
        act = self.acting(params, model_state, temperature)
        to_env = self._trainer.task.distribution.to_env
        return rollout.play_scan(env.functions, act, actor, limit, to_env)

    # For environments in Python.

    def actor(self, state: TrainState, temperature: float) -> rollout.Act:
        """The policy for :func:`rl_trainers.rollout.unroll_host`; without ``dist_inputs`` unless recurrent.

        Args:
            state: whose parameters act; they must live as long.
            temperature: 0 acts greedily, 1 samples.
        """
        params, model_state, traced = state.params, state.model_state, _on_device(temperature)

        def act(observation, policy_state, needs_reset, key):
            seen = self._trainer._see(observation)
            action, policy_state, key = self.decide(
                params, model_state, seen, policy_state, needs_reset, key, traced
            )
            return action, None, policy_state, key

        return self.snapshot(state, temperature) if self.is_recurrent else act

    def snapshot(self, state: TrainState, temperature: float, epsilon: float | None = None) -> rollout.Act:
        """The policy with the parameters of ``state``; gives ``dist_inputs`` too.

        Args:
            state: whose parameters act; they must live as long.
            temperature: 0 acts greedily, 1 samples.
            epsilon: share of rows that act so, the others taking the mode; ``None`` for all.
        """
        model, traced = (state.params, state.model_state), _on_device(temperature)
        share = () if epsilon is None else (_on_device(epsilon),)

        def act(observation, policy_state, needs_reset, key):
            seen = self._trainer._see(observation)
            return self.decide_fully(*model, seen, policy_state, needs_reset, key, traced, *share)

        return act

    def export(self, state: TrainState, num_envs: int) -> bytes:
        """Writes :attr:`decide_fully` as StableHLO, which :func:`load` reads where there is no trainer.

        Its first two arguments become one, ``jax.tree.leaves((params, model_state))``.

        Args:
            state: parameters like those that it will be called with.
            num_envs: ``B``.

        Returns:
            A program for CPUs.
        """
        model = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), (state.params, state.model_state)
        )
        leaves, structure = jax.tree.flatten(model)

        def decide(leaves, *rest):
            return self._decide_fully(*jax.tree.unflatten(structure, leaves), *rest)

        seen = self._trainer._see(jax.tree.map(lambda x: np.stack([x] * num_envs), self._trainer._example))
        rest = self.nothing(num_envs), np.zeros(num_envs, bool), np.zeros(2, np.uint32), np.float32(1.0)
        return bytes(export.export(jax.jit(decide), platforms=("cpu",))(leaves, seen, *rest).serialize())

    def after(self, state: TrainState, observations: Sequence[PyTree], key: Any, temperature: float) -> tuple:
        """The decision after the observations of an episode so far.

        Args:
            state: whose parameters act.
            observations: what models see, each ``[1, ..]``; the newest alone is enough without a memory.
            key: u32 ``[2]``.
            temperature: 0 acts greedily, 1 samples.

        Returns:
            ``(action [1, *act], dist_inputs f32 [1, D])``.
        """
        policy_state = self.nothing(1)
        if self.has_window:
            policy_state = windows.of_episode(observations, self._trainer.max_slice_length)
        elif self.is_recurrent and len(observations) > 1:
            policy_state = self._remember(state, observations[:-1])
        no = np.zeros(1, bool)
        action, dist_inputs, *_ = self.decide_fully(
            state.params, state.model_state, observations[-1], policy_state, no, key, np.float32(temperature)
        )
        return action, dist_inputs

    def _remember(self, state: TrainState, observations: Sequence[PyTree]) -> PyTree:
        """The recurrent state after observations, each ``[1, ..]``."""
        policy_state = self.nothing(1)
        step = functools.partial(self.decide_fully, state.params, state.model_state)
        no, key, one = np.zeros(1, bool), np.zeros(2, np.uint32), np.float32(1.0)
        for observation in observations:
            policy_state = step(observation, policy_state, no, key, one)[2]
        return policy_state


@functools.lru_cache
def _on_device(x: float) -> jax.Array:
    """``x`` as f32; given to many calls, it is copied once."""
    return jnp.float32(x)
