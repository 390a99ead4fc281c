"""Trajectories of one environment as Python objects, and playing them with a Python policy."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np

from rl_trainers import rollout as rollout_lib
from rl_trainers.distributions import create_distribution
from rl_trainers.envs.host import HostEnv, make_host_env
from rl_trainers.rollout import Act, Episodes
from rl_trainers.types import ActorState, EnvInfo, PyTree, Rollout, TimeStep

Policy = Callable[["Trajectory"], tuple[Any, Any]]
"""``trajectory -> (action, dist_inputs)``, both of one step; ``dist_inputs`` may be ``None``."""

# Vector steps between two looks at the clock; bounds the memory that an early stop wastes.
_BLOCK = 128


class Trajectory:
    """A run of steps of one environment that can be extended.

    Args:
        observation: the first observation ``[*obs]``.

    Attributes:
        timesteps: the steps; in each, ``mask`` is 1 where a decision was taken.
        last_observation: what the next action is chosen for.
    """

    def __init__(self, observation: PyTree):
        self.timesteps: list[TimeStep] = []
        self.last_observation = observation

    @classmethod
    def from_np(cls, steps: TimeStep) -> Trajectory:
        """The inverse of :meth:`to_np` with margin 1."""
        rows = [row(steps, t) for t in range(len(steps.mask))]
        trajectory = cls(rows.pop().observation)
        trajectory.timesteps = rows
        return trajectory

    def __len__(self) -> int:
        """Observations, the last one included."""
        return len(self.timesteps) + 1

    @property
    def total_return(self) -> float:
        """Undiscounted sum of rewards."""
        return float(sum(step.reward for step in self.timesteps))

    @property
    def done(self) -> bool:
        """Whether the episode ended with the last step; setting it marks a truncation."""
        return bool(self.timesteps and self.timesteps[-1].done)

    @done.setter
    def done(self, done: bool) -> None:
        if not self.timesteps:
            raise ValueError("done cannot be set: the trajectory has no steps yet.")
        last = self.timesteps[-1]
        self.timesteps[-1] = last._replace(
            terminated=bool(done and last.terminated),
            truncated=bool(done and (last.truncated or not last.terminated)),
        )

    def suffix(self, length: int | None = None) -> Trajectory:
        """The last ``length`` observations and the steps between them; all of them for ``None``."""
        if length is None or length >= len(self):
            return self
        if length < 1:
            raise ValueError(f"length is {length}; it must be at least 1.")
        suffix = Trajectory(self.last_observation)
        suffix.timesteps = self.timesteps[len(self) - length :]
        return suffix

    def extend(
        self,
        new_observation: PyTree,
        mask: float = 1.0,
        *,
        action: PyTree = None,
        reward: float = 0.0,
        done: bool = False,
        terminated: bool = False,
        truncated: bool = False,
        **kwargs: Any,
    ) -> None:
        """Appends a step.

        Args:
            new_observation: ``[*obs]`` what followed.
            mask: 0 if no decision was taken.
            action: ``[*act]``.
            reward: of the step.
            done: stands for ``terminated`` unless ``truncated``.
            terminated: the decision process ended.
            truncated: a limit cut the episode.
            **kwargs: other fields of :class:`TimeStep`: ``dist_inputs``, ``env_info``, ..
        """
        step = TimeStep(
            observation=self.last_observation,
            action=action,
            reward=reward,
            terminated=bool(terminated or (done and not truncated)),
            truncated=bool(truncated),
            mask=mask,
            **kwargs,
        )
        self.timesteps.append(step)
        self.last_observation = new_observation

    def calculate_returns(self, gamma: float) -> None:
        """Fills in ``return_``: G[t] = r[t] + gamma G[t+1], without gamma where no time passes."""
        following = 0.0
        for i, step in reversed(list(enumerate(self.timesteps))):
            discount = gamma if step.env_info.discount_mask > 0 else 1.0
            following = float(step.reward) + discount * following
            self.timesteps[i] = step._replace(return_=np.float32(following))

    def to_np(
        self, margin: int = 1, timestep_to_np: Callable[[TimeStep], TimeStep] | None = None
    ) -> TimeStep:
        """All steps as one record of arrays.

        Args:
            margin: rows to append. They are done, with mask 0; the first holds the last observation, all else
                in them is 0.
            timestep_to_np: applied to the record.

        Returns:
            :class:`TimeStep` with leading axis ``[len - 1 + margin]``. Fields that no step has are ``None``.
        """
        like = self.timesteps[-1] if self.timesteps else TimeStep(None, None, 0.0, False, False, 0.0)
        end = jax.tree.map(np.zeros_like, like)._replace(observation=self.last_observation)
        length = len(self.timesteps) + margin
        steps = jax.tree.map(lambda *xs: padded(np.stack(xs)[:length], length), *self.timesteps, end)
        steps.terminated[len(self.timesteps) :] = True
        steps = steps._replace(
            reward=steps.reward.astype(np.float32),
            mask=steps.mask.astype(np.float32),
            env_info=EnvInfo(*(x.astype(np.float32) for x in steps.env_info)),
        )
        return steps if timestep_to_np is None else timestep_to_np(steps)


class PolicyEnv:
    """Environments with a Python policy: keeps the trajectories that the policy looks at.

    It stands between :func:`rl_trainers.rollout.unroll_host` and the environments, as both its ``act`` and
    its ``env``.

    Args:
        env: the environments.
        policy: called with the running trajectory of each environment that takes a decision.
        distribution: of the actions.
        episode_length: i64 ``[B]``, where the environments stand.
        max_steps: decisions after which a trajectory is cut; ``None`` for no limit.
    """

    def __init__(
        self,
        env: Any,
        policy: Policy,
        distribution: Any,
        episode_length: np.ndarray,
        max_steps: int | None = None,
    ):
        self.num_envs, self.trajectories = env.num_envs, list[Trajectory]()
        self._env, self._policy, self._max_steps = env, policy, max_steps
        self._length = np.array(episode_length)
        inputs = np.zeros(distribution.n_inputs, np.float32)
        self._idle = jax.tree.map(np.asarray, distribution.mode(inputs)), inputs
        self._chosen: list[tuple[Any, Any] | None] = []

    def reset(self, seed: int) -> PyTree:
        """Starts all environments."""
        self.trajectories = []
        self._length[:] = 0
        return self._env.reset(seed)

    def act(self, observation: PyTree, policy_state: PyTree, needs_reset: Any, key: Any) -> tuple:
        """Asks the policy, once per environment that takes a decision."""
        if not self.trajectories:
            self.trajectories = [Trajectory(row(observation, b)) for b in range(self.num_envs)]
        self._chosen = [
            None if resets else self._policy(trajectory)
            for resets, trajectory in zip(needs_reset, self.trajectories, strict=True)
        ]
        actions, inputs = zip(*(chosen or self._idle for chosen in self._chosen), strict=True)
        action = jax.tree.map(
            lambda like, *xs: np.array([np.asarray(x) for x in xs], like.dtype), self._idle[0], *actions
        )
        unknown = np.full_like(self._idle[1], np.nan)
        dist_inputs = np.array([unknown if x is None else np.asarray(x) for x in inputs], np.float32)
        return action, dist_inputs, policy_state, key

    def step(self, action: PyTree) -> tuple:
        """Steps the environments."""
        observation, reward, terminated, truncated, info = self._env.step(action)
        for b, chosen in enumerate(self._chosen):
            after, trajectory = row(observation, b), self.trajectories[b]
            if chosen is not None:
                trajectory.extend(
                    after,
                    action=chosen[0],
                    reward=reward[b],
                    terminated=terminated[b],
                    truncated=truncated[b],
                    dist_inputs=chosen[1],
                    env_info=EnvInfo(*(info[f][b] if f in info else 1.0 for f in EnvInfo._fields)),
                )
                self._length[b] = 0 if trajectory.done else self._length[b] + 1
            is_cut = self._max_steps and self._length[b] and self._length[b] % self._max_steps == 0
            if chosen is None or is_cut:
                self.trajectories[b] = Trajectory(after)
        return observation, reward, terminated, truncated, info


class Until:
    """Tells an unroll when to stop, see :func:`rl_trainers.rollout.unroll_host`.

    Args:
        actor: where the unroll begins.
        max_steps: decisions after which a trajectory is cut; ``None`` for no limit.
        n_trajectories: trajectories to finish, or
        n_interactions: decisions to take, or
        n_first: environments, from the first on, of which each has to finish a trajectory.
    """

    def __init__(
        self,
        actor: ActorState,
        max_steps: int | None,
        n_trajectories: int | None = None,
        n_interactions: int | None = None,
        n_first: int | None = None,
    ):
        self.reached = False
        self._max_steps, self._goals = max_steps, (n_trajectories, n_interactions, n_first)
        self._resets, self._length = actor.needs_reset, np.array(actor.episode_length)
        self._ended, self._decisions = np.zeros(len(self._length), np.int64), 0

    def __call__(self, needs_reset: np.ndarray) -> bool:
        """Takes in one step, bool ``[B]``: the episodes that it ended."""
        decided = ~self._resets
        self._length += decided
        self._decisions += int(np.count_nonzero(decided))
        self._ended += needs_reset
        if self._max_steps is not None:
            self._ended += decided & ~needs_reset & (self._length % self._max_steps == 0)
        self._length[needs_reset] = 0
        self._resets = needs_reset
        n_trajectories, n_interactions, n_first = self._goals
        if n_trajectories is not None:
            self.reached = bool(self._ended.sum() >= n_trajectories)
        elif n_interactions is not None:
            self.reached = self._decisions >= n_interactions
        else:
            self.reached = bool(self._ended[:n_first].all())
        return self.reached


def unroll_until(
    env: Any, act: Act, actor: ActorState, to_env: Callable, until: Until
) -> Iterator[tuple[ActorState, Rollout, Episodes]]:
    """Steps environments, block after block, until ``until`` stops; see :func:`rollout.unroll_host`."""
    while not until.reached:
        actor, rollout, episodes = rollout_lib.unroll_host(env, act, actor, _BLOCK, to_env, until)
        yield actor, rollout, episodes


def play(
    env: Any,
    policy: Policy,
    max_steps: int | None = None,
    last_observation: PyTree = None,
    seed: int = 0,
) -> Trajectory:
    """Plays one trajectory.

    Args:
        env: :class:`rl_trainers.envs.HostEnv` of one environment, or what makes one.
        policy: called with the running trajectory.
        max_steps: decisions at most.
        last_observation: ``[*obs]`` where the environment stands; ``None`` resets it.
        seed: of the reset.

    Raises:
        ValueError: ``env`` has several environments.
    """
    host = env if isinstance(env, HostEnv) else make_host_env(env)
    if host.num_envs != 1:
        raise ValueError(f"env has {host.num_envs} environments; a trajectory is of 1.")
    if last_observation is None:
        observation = host.reset(seed)
    else:
        observation = jax.tree.map(lambda x: np.asarray(x)[None], last_observation)
    distribution = create_distribution(host.action_space)
    actor = rollout_lib.initial_actor(observation, 1, np.zeros(2, np.uint32))
    player = PolicyEnv(host, policy, distribution, actor.episode_length)
    until = Until(actor, max_steps, n_trajectories=1)
    for _ in unroll_until(player, player.act, actor, distribution.to_env, until):
        pass
    return player.trajectories[0]


def row(tree: PyTree, index: int) -> PyTree:
    """Row ``index`` of every array."""
    return jax.tree.map(lambda x: x[index], tree)


def padded(x: np.ndarray, length: int) -> np.ndarray:
    """``x`` with rows of zeros appended up to ``length``."""
    return np.concatenate([x, np.zeros((length - len(x), *x.shape[1:]), x.dtype)])
