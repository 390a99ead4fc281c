"""What drivers that step the environments themselves share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from rl_trainers import rollout as rollout_lib
from rl_trainers.acting import compiled
from rl_trainers.drivers.driver import Driver, Observer, check_algorithm, check_fits
from rl_trainers.drivers.metrics import StepMetric
from rl_trainers.envs.host import HostEnv, make_host_env
from rl_trainers.envs.native import DeviceEnv, is_jax_env
from rl_trainers.supervised import check_counts
from rl_trainers.types import ActorState, PyTree, Rollout


class SteppingDriver(Driver):
    """A driver that steps one batch of environments in the calling thread, and knows where they stand.

    Args:
        env: what :func:`rl_trainers.envs.make_host_env` or :func:`rl_trainers.envs.make_jax_env` takes, of
            which ``env_batch_size`` are made; a :class:`rl_trainers.envs.HostEnv` or
            :class:`rl_trainers.envs.DeviceEnv`, which who made it closes; ``None`` for the environments of
            the algorithm's task, which go on from where they stand and are counted there.
        algorithm: a trainer.
        observers: see :class:`Driver`.
        metrics: likewise.
        use_rollout_state: likewise.
        env_batch_size: ``B``, environments to make of ``env``; 1 by default.
        seed: of environments and actions other than the task's; they begin as those of a task with this seed.
        apart: for no ``env``, make others like the task's, ``env_batch_size`` or as many as it has.
        epsilon: share of rows that sample, the others taking the mode; ``None`` for all.

    Attributes:
        env: what is stepped.
        env_id: i32 ``[B]``, numbers of the environments.

    Raises:
        ValueError: arguments do not fit each other, named in the message.
    """

    def __init__(
        self,
        env: Any,
        algorithm: Any,
        observers: Sequence[Observer],
        metrics: Sequence[StepMetric],
        use_rollout_state: bool | None,
        env_batch_size: int | None,
        seed: int,
        apart: bool = False,
        epsilon: float | None = None,
    ):
        check_algorithm(algorithm)
        task = algorithm.task
        self.env, self._is_owned = _make(env, task, env_batch_size, apart)
        try:
            check_fits(algorithm, self.env)
            super().__init__(algorithm, self.env.num_envs, observers, metrics, use_rollout_state)
        except Exception:
            self._close_owned()
            raise
        self._task = task if self.env is task.env else None
        self.env_id = np.arange(self.env.num_envs, dtype=np.int32)
        self._seed, self._epsilon = seed, epsilon
        self._actor: Any = None
        self._scan: Any = None
        explores = epsilon is None and hasattr(algorithm, "explore")  # which a scan of the policy does not
        if isinstance(self.env, DeviceEnv) and task.timestep_to_np is None and not explores:
            self._scan = compiled(self._scanned, static_argnums=2)

    def close(self) -> None:
        """Closes the environments that the driver has made; again does nothing."""
        self._close_owned()

    def _close_owned(self) -> None:
        if self._is_owned:
            self.env.close()

    def restart(self) -> None:
        """The environments begin anew: called where the next row does not continue the last one."""
        for metric in self._metrics:
            metric.restart(self.env_id)

    def begin(self, time_step: ActorState | None, policy_state: PyTree | None) -> None:
        """Goes to where the next row begins.

        Args:
            time_step: where the environments stand, as a run returned it; environments in JAX are put there.
                ``None``: where they were left, or after a reset.
            policy_state: recurrent state ``[B, ..]``; ``None`` for that of ``time_step``.
        """
        before, actor = self._actor, time_step
        if actor is None:
            actor = self._present() if self._task is not None or before is None else before
        if policy_state is not None:
            actor = actor._replace(policy_state=policy_state)
        elif self.algorithm.is_recurrent and not jax.tree.leaves(actor.policy_state):
            actor = actor._replace(policy_state=self.algorithm.initial_policy_state(self.total_envs))
        if isinstance(self.env, DeviceEnv):
            if not jax.tree.leaves(actor.env_state):
                actor = actor._replace(env_state=self.env.envs)
            self.env.put(actor.env_state, actor.needs_reset, actor.episode_length)
        self._actor = actor
        if before is not None and not _is_same(before, actor):
            self.restart()

    def unroll(self, policy: Any, length: int) -> Rollout:
        """Steps the environments.

        Args:
            policy: see :meth:`policy`.
            length: ``T``, rows.

        Returns:
            Host arrays ``[T, B]``.
        """
        actor, task, to_env = self._actor, self._task, self.algorithm.task.distribution.to_env
        if self._scan is not None:
            self._actor, rollout, endings = self._scan(policy, actor, length)
            rollout = jax.device_get(rollout)
            if task is not None:
                task.actor = actor
                task.count_rows(endings)
                task.went_on(self._actor)
        elif task is not None:
            task.actor = actor
            rollout, _ = task.collect(policy, unroll_length=length)
            self._actor = task.actor
        else:
            self._actor, rollout, _ = rollout_lib.unroll_host(self.env, policy, actor, length, to_env)
        if self._scan is None and isinstance(self.env, DeviceEnv):
            self._actor = self._actor._replace(env_state=self.env.envs)
        return rollout._replace(policy_version=np.int32(self.algorithm.state.step))

    @property
    def time_step(self) -> ActorState:
        """Where the environments stand."""
        return self._actor

    def policy(self) -> Any:
        """The present policy, for :meth:`unroll` until the algorithm trains."""
        if self._scan is not None:
            return self.algorithm.state.params, self.algorithm.state.model_state
        return self.algorithm.actor(epsilon=self._epsilon)

    def _scanned(self, model: tuple, actor: ActorState, length: int) -> tuple:
        act = self.algorithm.acting.acting(*model, 1.0, self._epsilon)
        env: Any = self.env
        to_env = self.algorithm.task.distribution.to_env
        return rollout_lib.unroll_scan(env.functions, act, actor, length, to_env)

    def _present(self) -> ActorState:
        """Where the task's environments stand, or those of the driver after a reset."""
        if self._task is not None:
            return self._task.actor
        # As a task begins.
        env_seed, _, *key = (int(x) for x in np.random.SeedSequence(self._seed).generate_state(4))
        state = self.algorithm.initial_policy_state(self.total_envs)
        observation = self.env.reset(env_seed)
        return rollout_lib.initial_actor(observation, self.total_envs, np.array(key, np.uint32), state)


def rows_of(max_num_steps: int, num_envs: int) -> int:
    """Rows of ``num_envs`` environments that are at least ``max_num_steps`` steps."""
    if max_num_steps < 1:
        raise ValueError(f"max_num_steps: must be >= 1, got {max_num_steps}; the nearest is {num_envs}")
    return -(-max_num_steps // num_envs)


def check_transformer(observation_transformer: Any) -> None:
    """Refuses ALF's observation transformers, whose place is the task."""
    if observation_transformer:
        raise ValueError(
            f"observation_transformer: {observation_transformer!r} belongs to the task, so that acting, "
            "training and evaluation see the same: RLTask(timestep_to_np=...)"
        )


def _is_same(first: ActorState, second: ActorState) -> bool:
    """Whether the environments stand at the same place, as far as their observations show."""
    pairs = [jax.tree.leaves((x.observation, x.needs_reset, x.episode_length)) for x in (first, second)]
    return all(np.array_equal(x, y) for x, y in zip(*pairs, strict=True))


def _make(env: Any, task: Any, size: int | None, apart: bool) -> tuple[HostEnv | DeviceEnv, bool]:
    """The environments, and whether they are made here."""
    check_counts(1, env_batch_size=size)
    if env is None and apart:
        return task.make_envs(size or task.env.num_envs), True
    if env is None or isinstance(env, (HostEnv, DeviceEnv)):
        env = task.env if env is None else env
        if size not in (None, env.num_envs):
            raise ValueError(f"env_batch_size: is {size}, but env has {env.num_envs}; leave it out")
        return env, False
    if is_jax_env(env):
        return DeviceEnv(env, size or 1), True
    return make_host_env(env, size or 1), True
