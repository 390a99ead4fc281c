"""RLTask: environments, the replay of what was done in them, and the counts.

The words are those of Trax (https://github.com/google/trax, ``trax/rl/task.py``). A *trajectory* is
what is learned from: an episode, or a piece of ``max_steps`` decisions of one.
"""

from __future__ import annotations

import functools
import io
import itertools
import json
import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import gin
import gymnasium
import jax
import numpy as np
from etils import epath
from gymnasium.wrappers import AtariPreprocessing, FrameStackObservation, TransformObservation

from rl_trainers import replay as replay_lib
from rl_trainers import rollout as rollout_lib
from rl_trainers.distributions import create_distribution
from rl_trainers.envs.host import HostEnv, find_spec, make_eval_env, make_host_env
from rl_trainers.rollout import Act, Episodes
from rl_trainers.types import ActorState, EnvInfo, PyTree, Rollout, TimeStep

TimeStepBatch = TimeStep
"""Trax's name of the record."""

Policy = Callable[["Trajectory"], tuple[Any, Any]]
"""``trajectory -> (action, dist_inputs)``, both of one step; ``dist_inputs`` may be ``None``."""

_log = logging.getLogger(__name__)

# Vector steps between two looks at the clock; bounds the memory that an early stop wastes.
_BLOCK = 128
_MAX_TRIES = 100
_ACTOR_FIELDS = ("needs_reset", "key", "episode_return", "episode_length")


class Trajectory:
    """A run of steps of one environment that can be extended.

    Args:
        observation: the first observation ``[*obs]``.
    """

    def __init__(self, observation: PyTree):
        self._timesteps: list[TimeStep] = []
        self._last_observation = observation

    def __len__(self) -> int:
        """Observations, the last one included."""
        return len(self._timesteps) + 1

    def __repr__(self) -> str:
        return f"Trajectory({self._timesteps}, last_observation={self._last_observation})"

    @property
    def timesteps(self) -> list[TimeStep]:
        """The steps; in each, ``mask`` is 1 where a decision was taken."""
        return self._timesteps

    @property
    def last_observation(self) -> PyTree:
        """What the next action is chosen for."""
        return self._last_observation

    @property
    def total_return(self) -> float:
        """Undiscounted sum of rewards."""
        return float(sum(step.reward for step in self._timesteps))

    @property
    def done(self) -> bool:
        """Whether the episode ended with the last step; setting it marks a truncation."""
        return bool(self._timesteps and self._timesteps[-1].done)

    @done.setter
    def done(self, done: bool) -> None:
        if not self._timesteps:
            raise ValueError("done cannot be set: the trajectory has no steps yet.")
        last = self._timesteps[-1]
        self._timesteps[-1] = last._replace(
            terminated=bool(done and last.terminated),
            truncated=bool(done and (last.truncated or not last.terminated)),
        )

    def suffix(self, length: int | None = None) -> Trajectory:
        """The last ``length`` observations and the steps between them; all of them for ``None``."""
        if length is None or length >= len(self):
            return self
        if length < 1:
            raise ValueError(f"length is {length}; it must be at least 1.")
        suffix = Trajectory(self._last_observation)
        suffix._timesteps = self._timesteps[len(self) - length :]
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
            observation=self._last_observation,
            action=action,
            reward=reward,
            terminated=bool(terminated or (done and not truncated)),
            truncated=bool(truncated),
            mask=mask,
            **kwargs,
        )
        self._timesteps.append(step)
        self._last_observation = new_observation

    def calculate_returns(self, gamma: float) -> None:
        """Fills in ``return_``: G[t] = r[t] + gamma G[t+1], without gamma where no time passes."""
        following = 0.0
        for i in reversed(range(len(self._timesteps))):
            step = self._timesteps[i]
            discount = gamma if step.env_info.discount_mask > 0 else 1.0
            following = float(step.reward) + discount * following
            self._timesteps[i] = step._replace(return_=np.float32(following))

    def to_np(
        self, margin: int = 1, timestep_to_np: Callable[[TimeStep], TimeStep] | None = None
    ) -> TimeStep:
        """All steps as one record of arrays.

        Args:
            margin: rows to append. They are done, with mask 0; the first holds the last
                observation, all else in them is 0.
            timestep_to_np: applied to the record.

        Returns:
            :class:`TimeStep` with leading axis ``[len - 1 + margin]``. Fields that no step has are
            ``None``.
        """
        n = len(self._timesteps)
        observations = [step.observation for step in self._timesteps] + [self._last_observation]
        rest = [step._replace(observation=None) for step in self._timesteps] or [
            TimeStep(None, None, 0.0, False, False, 0.0)
        ]
        steps = jax.tree.map(lambda *xs: _padded(np.stack(xs)[:n], n + margin), *rest)
        terminated = steps.terminated.astype(bool)
        terminated[n:] = True
        steps = steps._replace(
            observation=jax.tree.map(
                lambda *xs: _padded(np.stack(xs)[: n + min(margin, 1)], n + margin), *observations
            ),
            reward=steps.reward.astype(np.float32),
            mask=steps.mask.astype(np.float32),
            terminated=terminated,
            env_info=EnvInfo(*(x.astype(np.float32) for x in steps.env_info)),
        )
        return steps if timestep_to_np is None else timestep_to_np(steps)


class _PolicyEnv:
    """Environments with a Python policy: keeps the trajectories that the policy looks at.

    It stands between :func:`rl_trainers.rollout.unroll_host` and the environments, as both its
    ``act`` and its ``env``.
    """

    def __init__(
        self,
        env: HostEnv,
        policy: Policy,
        max_steps: int | None,
        distribution: Any,
        episode_length: np.ndarray,
    ):
        self.num_envs = env.num_envs
        self._env, self._policy, self._max_steps = env, policy, max_steps
        inputs = np.zeros(distribution.n_inputs, np.float32)
        self._idle = jax.tree.map(np.asarray, distribution.mode(inputs))
        self._actions: list[PyTree] = []
        self._dist_inputs: list[Any] = []
        self._resets = np.zeros(env.num_envs, bool)
        self._length = np.array(episode_length)
        self.trajectories: list[Trajectory] = []

    def reset(self, seed: int) -> PyTree:
        """Starts all environments."""
        self.trajectories = []
        self._length[:] = 0
        return self._env.reset(seed)

    def act(self, observation: PyTree, policy_state: PyTree, needs_reset: Any, key: Any) -> tuple:
        """Asks the policy, once per environment that takes a decision."""
        if not self.trajectories:
            self.trajectories = [Trajectory(_row(observation, b)) for b in range(self.num_envs)]
        chosen = [
            (self._idle, None) if needs_reset[b] else self._policy(self.trajectories[b])
            for b in range(self.num_envs)
        ]
        self._actions = [action for action, _ in chosen]
        given = [x for _, x in chosen if x is not None]
        zeros = np.zeros_like(np.asarray(given[0])) if given else None
        self._dist_inputs = [zeros if x is None else np.asarray(x) for _, x in chosen]
        self._resets = np.asarray(needs_reset)
        action = jax.tree.map(
            lambda like, *xs: np.stack([np.asarray(x) for x in xs]).astype(like.dtype),
            self._idle,
            *self._actions,
        )
        dist_inputs = np.stack(self._dist_inputs).astype(np.float32) if given else None
        return action, dist_inputs, policy_state, key

    def step(self, action: PyTree) -> tuple:
        """Steps the environments."""
        observation, reward, terminated, truncated, info = self._env.step(action)
        for b in range(self.num_envs):
            after = _row(observation, b)
            if self._resets[b]:
                self.trajectories[b] = Trajectory(after)
                continue
            trajectory = self.trajectories[b]
            trajectory.extend(
                after,
                action=self._actions[b],
                reward=reward[b],
                terminated=terminated[b],
                truncated=truncated[b],
                dist_inputs=self._dist_inputs[b],
                env_info=EnvInfo(*(info[f][b] if f in info else 1.0 for f in EnvInfo._fields)),
            )
            self._length[b] = 0 if trajectory.done else self._length[b] + 1
            if self._max_steps and self._length[b] and self._length[b] % self._max_steps == 0:
                self.trajectories[b] = Trajectory(after)
        return observation, reward, terminated, truncated, info


class _Until:
    """Tells an unroll when to stop: after so many trajectories or decisions."""

    def __init__(
        self,
        actor: ActorState,
        max_steps: int | None,
        n_trajectories: int | None,
        n_interactions: int | None,
    ):
        self._resets, self._max_steps = actor.needs_reset, max_steps
        self._length = np.array(actor.episode_length)
        self._trajectories, self._interactions = n_trajectories, n_interactions
        self.reached = False

    def __call__(self, needs_reset: np.ndarray) -> bool:
        decided = ~self._resets
        self._length += decided
        if self._trajectories is not None:
            ended = needs_reset
            if self._max_steps is not None:
                ended = ended | (decided & (self._length % self._max_steps == 0))
            self._trajectories -= int(np.count_nonzero(ended))
            self.reached = self._trajectories <= 0
        if self._interactions is not None:
            self._interactions -= int(np.count_nonzero(decided))
            self.reached = self._interactions <= 0
        self._length[needs_reset] = 0
        self._resets = needs_reset
        return self.reached


class _FirstEpisodes:
    """Stops an unroll once the first ``count`` environments ended their first episode."""

    def __init__(self, count: int, limit: int | None):
        self._limit, self.rows, self.reached = limit, 0, False
        self._over = np.zeros(count, bool)
        self._counted = np.zeros(count, bool)
        self.episodes = Episodes(np.zeros(count), np.zeros(count, np.int64))

    def __call__(self, needs_reset: np.ndarray) -> bool:
        self.rows += 1
        self._over |= needs_reset[: len(self._over)]
        self.reached = bool(self._over.all()) or self.rows == self._limit
        return self.reached

    def take(self, steps: TimeStep) -> None:
        """Counts the rows ``[T, B]`` of what was unrolled since."""
        done = steps.done[:, : len(self._over)]
        earlier = np.cumsum(done, axis=0) - done
        counts = (earlier == 0) & ~self._counted
        returns, lengths = self.episodes
        returns += np.sum(steps.reward[:, : len(returns)], axis=0, where=counts, dtype=np.float64)
        lengths += counts.sum(0)
        self._counted = self._over.copy()


class _RandomAct:
    """An :data:`Act` that draws from the distribution at inputs 0, whose density is then known.

    That is uniform in finite spaces and the Gaussian of the configured ``std`` in a ``Box``.
    """

    def __init__(self, distribution: Any, num_envs: int):
        self._inputs = np.zeros((_BLOCK, num_envs, distribution.n_inputs), np.float32)
        self._sample = jax.jit(distribution.sample)
        self._rows: list[PyTree] = []

    def __call__(
        self, observation: PyTree, policy_state: PyTree, needs_reset: Any, key: Any
    ) -> tuple:
        if not self._rows:
            key, key_act = jax.random.split(key)
            drawn = jax.tree.map(np.asarray, self._sample(self._inputs, key_act))
            self._rows = [_row(drawn, t) for t in range(_BLOCK)]
        return self._rows.pop(), self._inputs[0], policy_state, key


@gin.configurable(module="rl_trainers")
class RLTask:
    """Environments, the replay of what was done in them, and the counts.

    Args:
        env: a gymnasium id, a factory ``() -> env``, an environment, or a vector environment; see
            :func:`rl_trainers.envs.make_host_env`.
        initial_trajectories: trajectories to begin with, as epoch 0: how many to play with random
            actions (Trax plays 1 by default; here 0), a list of :class:`Trajectory`, a dict from
            epoch to such lists, or the path of a file that :meth:`save_to_file` wrote.
        gamma: discount factor per step, in [0, 1].
        dm_suite: ``env`` is the bare name of an Atari game such as ``'pong'``; observations are
            uint8 ``[84, 84, num_stacked_frames]``, an action lasts 4 frames.
        random_starts: with ``dm_suite``, episodes begin with up to 30 random no-op steps.
        max_steps: decisions after which a trajectory is cut; the episode goes on in the next one.
            ``None``: trajectories are episodes.
        time_limit: decisions after which an episode is truncated; ``None`` means ``max_steps``.
        timestep_to_np: maps a :class:`TimeStep` with any leading axes to what models see, for
            example with other observations. The replay keeps what the environment gave.
        num_stacked_frames: the newest observations to stack into one, along a new first axis (the
            last one with ``dm_suite``).
        n_replay_epochs: the newest epochs that the replay keeps.
        num_envs: ``B``, environments to step side by side.
        seed: everything random in the task follows from it.
        backend: see :func:`rl_trainers.envs.make_host_env`.
        action_distribution: maps an action space to the distribution of actions;
            :func:`rl_trainers.distributions.create_distribution` by default.
        capacity: steps that the replay holds at most, the oldest are overwritten; ``None``: as many
            as ``n_replay_epochs`` have.
        eval_env: the environment for evaluation, made like ``env``; by default another one of the
            same.

    Attributes:
        env: :class:`rl_trainers.envs.HostEnv` with ``num_envs`` environments.
        env_name: its id, or the name of its class.
        observation_space: of one environment.
        action_space: of one environment.
        distribution: of the actions.
        actor: :class:`ActorState`, where the environments stand; a trainer sets its
            ``policy_state``.
        replay: :class:`rl_trainers.replay.Replay`, what is stored.
        gamma, max_steps, time_limit, timestep_to_np: as given.
        rng: numpy generator that sampling uses.
        n_initial_interactions: decisions in the initial trajectories.
        n_eval_interactions: decisions taken in evaluations.

    Raises:
        TypeError, ValueError: an argument does not fit; the message names it.
    """

    def __init__(
        self,
        env: Any,
        initial_trajectories: Any = 0,
        gamma: float = 0.99,
        dm_suite: bool = False,
        random_starts: bool = True,
        max_steps: int | None = None,
        time_limit: int | None = None,
        timestep_to_np: Callable[[TimeStep], TimeStep] | None = None,
        num_stacked_frames: int = 1,
        n_replay_epochs: int = 1,
        *,
        num_envs: int = 1,
        seed: int = 0,
        backend: str = "auto",
        action_distribution: Callable[[gymnasium.Space], Any] | None = None,
        capacity: int | None = None,
        eval_env: Any = None,
    ):
        if not 0 <= gamma <= 1:
            raise ValueError(f"gamma is {gamma}; it must be in [0, 1]: {min(max(gamma, 0), 1)}?")
        _check_at_least(1, max_steps=max_steps, time_limit=time_limit, num_envs=num_envs)
        _check_at_least(1, n_replay_epochs=n_replay_epochs, num_stacked_frames=num_stacked_frames)
        _check_at_least(0, seed=seed)
        _check_at_least(num_envs, capacity=capacity)
        self.gamma, self.max_steps = gamma, max_steps
        self.time_limit = max_steps if time_limit is None else time_limit
        self.timestep_to_np, self._n_replay_epochs = timestep_to_np, n_replay_epochs
        prepare = functools.partial(
            _prepared, dm_suite=dm_suite, random_starts=random_starts, n_frames=num_stacked_frames
        )
        source = prepare(env)
        self.env = make_host_env(source, num_envs, time_limit=self.time_limit, backend=backend)
        self._make_eval_env = (
            functools.partial(make_eval_env, source, self.env.num_envs, backend=backend)
            if eval_env is None
            else functools.partial(make_host_env, prepare(eval_env), num_envs, backend=backend)
        )
        self.env_name = self.env.name
        self.observation_space = self.env.observation_space
        self.action_space = self.env.action_space
        seeds = np.random.SeedSequence(seed)
        env_seed, self._eval_seed, *key = (int(x) for x in seeds.generate_state(4))
        self.rng = np.random.default_rng(seeds.spawn(1)[0])
        observation = self.env.reset(env_seed)
        self.actor = rollout_lib.initial_actor(
            observation, self.env.num_envs, np.array(key, np.uint32)
        )
        self.distribution = (action_distribution or create_distribution)(self.action_space)
        self._grows = capacity is None
        rows = 1 if capacity is None else max(1, capacity // self.env.num_envs)
        self.replay = replay_lib.create(self._example(self.distribution.n_inputs), rows)
        self._n_trajectories = self._n_interactions = 0
        self.n_initial_interactions = self.n_eval_interactions = 0
        self._load_initial(initial_trajectories)

    def _example(self, n_inputs: int) -> TimeStep:
        """A row ``[B, ..]`` in the shapes that rollouts have."""
        num_envs = self.env.num_envs
        inputs = np.zeros((num_envs, self.distribution.n_inputs), np.float32)
        action = jax.eval_shape(self.distribution.sample, inputs, jax.random.PRNGKey(0))
        zeros, ones = np.zeros(num_envs, np.float32), np.ones(num_envs, np.float32)
        return TimeStep(
            observation=self.actor.observation,
            action=jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), action),
            reward=zeros,
            terminated=zeros.astype(bool),
            truncated=zeros.astype(bool),
            mask=zeros,
            dist_inputs=np.zeros((num_envs, n_inputs), np.float32),
            env_info=EnvInfo(ones, ones),
        )

    @functools.cached_property
    def eval_env(self) -> HostEnv:
        """For evaluation only, without the task's time limit; made at the first use."""
        return self._make_eval_env()

    def close(self) -> None:
        """Closes all environments."""
        self.env.close()
        if "eval_env" in self.__dict__:
            self.eval_env.close()

    # Acting.

    def collect(
        self,
        act: Act,
        unroll_length: int | None = None,
        n_trajectories: int | None = None,
        n_interactions: int | None = None,
    ) -> tuple[Rollout, Episodes]:
        """Steps the environments; the replay does not change.

        Args:
            act: chooses the actions.
            unroll_length: vector steps to take; or else
            n_trajectories: trajectories to finish, or
            n_interactions: decisions to take. With ``B`` environments the last vector step may
                bring up to ``B - 1`` more of either.

        Returns:
            ``(rollout, episodes)``. With ``unroll_length`` the rollout is ``[unroll_length, B]``,
            else it is padded to a power of two.

        Raises:
            ValueError: not exactly one of the three counts is given, or it is less than 1.
        """
        _check_exactly_one(
            unroll_length=unroll_length,
            n_trajectories=n_trajectories,
            n_interactions=n_interactions,
        )
        if unroll_length is None:
            until = _Until(self.actor, self.max_steps, n_trajectories, n_interactions)
            rollout, episodes = self._collect(self.env, act, self.max_steps, until)
            return rollout_lib.pad(rollout, rollout_lib.bucket(len(rollout.steps.mask))), episodes
        return self._collect(self.env, act, self.max_steps, unroll_length)

    def add(self, rollout: Rollout, epoch: int) -> None:
        """Puts a rollout into the replay; epochs older than the newest ``n_replay_epochs`` go.

        Args:
            rollout: host arrays ``[T, B]``; padding at its end is not stored. ``dist_inputs`` are
                NaN in the replay where the rollout has none.
            epoch: at least 0.
        """
        self._forget(epoch)
        self._store(rollout, epoch, self.max_steps)

    def evaluate(
        self,
        act: Act,
        n_episodes: int,
        max_steps: int | None = None,
        seed: int | None = None,
        key: Any = None,
        policy_state: PyTree = (),
    ) -> Episodes:
        """Plays episodes in the evaluation environments; nothing else changes.

        The environments are reset together as often as it takes, and each time only the first
        episode of each counts, so that short episodes are not favoured.

        Args:
            act: chooses the actions.
            n_episodes: how many.
            max_steps: decisions after which an episode counts as over; it may be larger than the
                task's. ``None`` means ``time_limit``.
            seed: of the environments; by default the same in every evaluation.
            key: PRNG key u32 ``[2]`` for ``act``; derived from the seed by default.
            policy_state: initial recurrent state ``[B, ..]``.

        Returns:
            Exactly ``n_episodes`` episodes, in the order of the environments.
        """
        _check_at_least(1, n_episodes=n_episodes, max_steps=max_steps)
        limit = self.time_limit if max_steps is None else max_steps
        return self._evaluate(self.eval_env, act, n_episodes, limit, seed, key, policy_state)

    def collect_trajectories(
        self,
        policy: Policy,
        n_trajectories: int | None = None,
        n_interactions: int | None = None,
        only_eval: bool = False,
        max_steps: int | None = None,
        epoch_id: int = 1,
    ) -> float:
        """Plays with a Python policy, as Trax does; :meth:`collect` is faster.

        Args:
            policy: called with the running :class:`Trajectory`.
            n_trajectories: trajectories to finish, or
            n_interactions: decisions to take.
            only_eval: play in the evaluation environments, and store nothing.
            max_steps: in place of the task's.
            epoch_id: under which the trajectories are stored.

        Returns:
            Mean undiscounted return of the episodes that ended; NaN if none did.

        Raises:
            ValueError: not exactly one of the two counts is given, or it is less than 1.
        """
        _check_exactly_one(n_trajectories=n_trajectories, n_interactions=n_interactions)
        max_steps = self.max_steps if max_steps is None else max_steps
        env = self.eval_env if only_eval else self.env
        player = _PolicyEnv(env, policy, max_steps, self.distribution, self.actor.episode_length)
        if only_eval and n_trajectories is not None:
            limit = self.time_limit if max_steps is None else max_steps
            episodes = self._evaluate(player, player.act, n_trajectories, limit)
        elif only_eval:
            observation = player.reset(self._eval_seed)
            actor = rollout_lib.initial_actor(observation, env.num_envs, self.actor.key)
            until = _Until(actor, max_steps, None, n_interactions)
            _, rollout, episodes = self._unroll(player, player.act, actor, until)
            self.n_eval_interactions += int(np.count_nonzero(rollout.steps.mask))
        else:
            self._forget(epoch_id)
            until = _Until(self.actor, max_steps, n_trajectories, n_interactions)
            rollout, episodes = self._collect(player, player.act, max_steps, until)
            self._store(rollout, epoch_id, max_steps)
        return float(np.mean(episodes.returns)) if len(episodes.returns) else float("nan")

    def _collect(
        self, env: Any, act: Act, max_steps: int | None, length: int | _Until
    ) -> tuple[Rollout, Episodes]:
        before = self.actor
        if isinstance(length, _Until):
            self.actor, rollout, episodes = self._unroll(env, act, before, length)
        else:
            self.actor, rollout, episodes = rollout_lib.unroll_host(
                env, act, before, length, self.distribution.to_env
            )
        ends, _ = replay_lib.trajectory_ends(rollout.steps, before.episode_length, max_steps)
        self._n_trajectories += int(np.count_nonzero(ends))
        self._n_interactions += int(np.count_nonzero(rollout.steps.mask))
        return rollout, episodes

    def _unroll(
        self, env: Any, act: Act, actor: ActorState, until: _Until
    ) -> tuple[ActorState, Rollout, Episodes]:
        rollouts, episodes = [], []
        while not until.reached:
            actor, rollout, ended = rollout_lib.unroll_host(
                env, act, actor, _BLOCK, self.distribution.to_env, until
            )
            rollouts.append(rollout)
            episodes.append(ended)
        ended = Episodes(*(np.concatenate(xs) for xs in zip(*episodes, strict=True)))
        return actor, rollout_lib.concatenate(rollouts), ended

    def _evaluate(
        self,
        env: Any,
        act: Act,
        n_episodes: int,
        limit: int | None,
        seed: int | None = None,
        key: Any = None,
        policy_state: PyTree = (),
    ) -> Episodes:
        seeds = np.random.SeedSequence(self._eval_seed if seed is None else seed)
        key = seeds.generate_state(2) if key is None else key
        rounds = []
        n_rounds = -(-n_episodes // env.num_envs)
        for i, env_seed in enumerate(seeds.spawn(1)[0].generate_state(n_rounds)):
            observation = env.reset(int(env_seed))
            actor = rollout_lib.initial_actor(observation, env.num_envs, key, policy_state)
            first = _FirstEpisodes(min(env.num_envs, n_episodes - i * env.num_envs), limit)
            while not first.reached:
                length = _BLOCK if limit is None else min(_BLOCK, limit - first.rows)
                actor, rollout, _ = rollout_lib.unroll_host(
                    env, act, actor, length, self.distribution.to_env, first
                )
                first.take(rollout.steps)
                self.n_eval_interactions += int(np.count_nonzero(rollout.steps.mask))
            rounds.append(first.episodes)
            key = actor.key
        return Episodes(*(np.concatenate(xs) for xs in zip(*rounds, strict=True)))

    # The replay.

    def replayed(self, epochs: Sequence[int] | None = None) -> Rollout:
        """Everything stored, as one rollout; see :func:`rl_trainers.replay.ordered`.

        Args:
            epochs: the epochs wanted, see :meth:`resolve_epochs`; the rows of others have mask 0.
        """
        return replay_lib.ordered(self.replay, self.resolve_epochs(epochs))

    @property
    def trajectories(self) -> dict[int, list[Trajectory]]:
        """What is stored, by epoch, built at every call; trajectories also end with the epoch."""
        stored = {}
        for epoch in replay_lib.epoch_ids(self.replay):
            found = replay_lib.segments(self.replay, [epoch])
            stored[epoch] = [self._trajectory(*place) for place in zip(*found, strict=True)]
        return stored

    def n_trajectories(self) -> int:
        """Trajectories that were finished, initial ones included."""
        return self._n_trajectories

    def n_interactions(self) -> int:
        """Decisions taken for training; initial and evaluation ones have counters of their own."""
        return self._n_interactions

    def set_n_replay_epochs(self, n_replay_epochs: int) -> None:
        """Changes how many of the newest epochs the replay keeps."""
        _check_at_least(1, n_replay_epochs=n_replay_epochs)
        self._n_replay_epochs = n_replay_epochs
        stored = replay_lib.epoch_ids(self.replay)
        if stored:
            self._forget(stored[-1])

    def remove_epoch(self, epoch: int) -> None:
        """Removes an epoch from the replay."""
        self.replay = replay_lib.remove(self.replay, self.replay.epoch == epoch)

    def resolve_epochs(self, epochs: Sequence[int] | None) -> list[int] | None:
        """Negative numbers count from the newest stored epoch, -1; ``None`` means all."""
        if epochs is None:
            return None
        stored = replay_lib.epoch_ids(self.replay)
        return [stored[e] if e < 0 else e for e in epochs if e >= -len(stored)]

    def trajectory_slice_stream(
        self,
        epochs: Sequence[int] | None = None,
        max_slice_length: int | None = None,
        min_slice_length: int | None = None,
        margin: int = 0,
        sample_trajectories_uniformly: bool = False,
        trajectory_stream_preprocessing_fn: Callable | None = None,
    ) -> Iterator[TimeStep]:
        """Yields random slices ``[l]`` of trajectories, for ever; follows what is added meanwhile.

        Args:
            epochs: the epochs wanted, see :meth:`resolve_epochs`.
            max_slice_length: rows of a slice at most, margin included; ``None``: whole
                trajectories.
            min_slice_length: rows of a slice at least; shorter ones are left out.
            margin: rows that may lie after the end of the trajectory.
            sample_trajectories_uniformly: trajectories are equally likely; otherwise slices are.
            trajectory_stream_preprocessing_fn: maps the stream of :class:`Trajectory` that slices
                are taken from to another one.
        """
        length, least = max_slice_length, min_slice_length
        uniform = sample_trajectories_uniformly
        if trajectory_stream_preprocessing_fn is not None:
            drawn = self._trajectory_stream(epochs, length, margin, uniform)
            for trajectory in trajectory_stream_preprocessing_fn(drawn):
                steps = trajectory.to_np(margin)
                n_starts = max(1, len(steps.mask) - (length or len(steps.mask)) + 1)
                start = int(self.rng.integers(min(n_starts, len(trajectory) - 1)))
                steps = jax.tree.map(lambda x, at=start: x[at:][:length], steps)
                if len(steps.mask) >= (least or 0):
                    yield self._to_np(steps)
            return
        while True:
            steps, rows = self._draw_slices(1, epochs, length, least, margin, uniform)
            yield self._to_np(jax.tree.map(lambda x, end=rows[0]: x[0, :end], steps))

    def trajectory_batch_stream(
        self,
        batch_size: int,
        epochs: Sequence[int] | None = None,
        max_slice_length: int | None = None,
        min_slice_length: int | None = None,
        margin: int = 0,
        sample_trajectories_uniformly: bool = False,
        trajectory_stream_preprocessing_fn: Callable | None = None,
    ) -> Iterator[TimeStep]:
        """Yields batches ``[batch_size, L]`` of slices, see :meth:`trajectory_slice_stream`.

        ``L`` is ``max_slice_length``, or for whole trajectories the power of two that holds the
        longest of the batch. Padding has mask 0 and is done.
        """
        if trajectory_stream_preprocessing_fn is not None:
            slices = self.trajectory_slice_stream(
                epochs,
                max_slice_length,
                min_slice_length,
                margin,
                sample_trajectories_uniformly,
                trajectory_stream_preprocessing_fn,
            )
            while True:
                yield _batch(list(itertools.islice(slices, batch_size)), max_slice_length)
        while True:
            steps, rows = self._draw_slices(
                batch_size,
                epochs,
                max_slice_length,
                min_slice_length,
                margin,
                sample_trajectories_uniformly,
            )
            end = max_slice_length or rollout_lib.bucket(int(rows.max()))
            yield self._to_np(jax.tree.map(lambda x, end=end: x[:, :end], steps))

    def _to_np(self, steps: TimeStep) -> TimeStep:
        return steps if self.timestep_to_np is None else self.timestep_to_np(steps)

    def _draw_slices(
        self,
        n: int,
        epochs: Sequence[int] | None,
        max_length: int | None,
        min_length: int | None,
        margin: int,
        uniform: bool,
    ) -> tuple[TimeStep, np.ndarray]:
        """``(steps [n, L], rows i64 [n])``; rows of a slice that are not padding."""
        epochs = self.resolve_epochs(epochs)
        length = max_length
        if length is None:
            longest = replay_lib.segments(self.replay, epochs).length.max(initial=1)
            length = rollout_lib.bucket(int(longest) + margin)
        drawn, missing = [], n
        for _ in range(_MAX_TRIES):
            steps = replay_lib.sample_slices(
                self.rng, self.replay, missing, length, margin,
                epochs=epochs, per_trajectory=uniform,
            ).steps  # fmt: skip
            rows = np.minimum(steps.mask.sum(1, dtype=np.int64) + margin, length)
            keep = np.flatnonzero(rows >= (min_length or 0))
            drawn.append((jax.tree.map(lambda x, keep=keep: x[keep], steps), rows[keep]))
            missing -= len(keep)
            if not missing:
                return jax.tree.map(lambda *xs: np.concatenate(xs), *drawn)
        raise ValueError(
            f"min_slice_length is {min_length}; hardly any of the trajectories stored is as long "
            f"(the longest of {n} drawn slices has {rows.max()} rows)."
        )

    def _trajectory_stream(
        self, epochs: Sequence[int] | None, length: int | None, margin: int, uniform: bool
    ) -> Iterator[Trajectory]:
        while True:
            found = replay_lib.segments(self.replay, self.resolve_epochs(epochs))
            if not len(found.length):
                raise ValueError(f"no decision is stored in the epochs {epochs}.")
            weights = np.ones(len(found.length))
            if length is not None and not uniform:
                weights = np.maximum(1.0, found.length + margin - length + 1)
            drawn = self.rng.choice(len(weights), _BLOCK, p=weights / weights.sum())
            for age, column, n in zip(*(x[drawn] for x in found), strict=True):
                yield self._trajectory(age, column, n)

    def _trajectory(self, age: int, column: int, length: int) -> Trajectory:
        place = np.array([age]), np.array([column])
        copied = replay_lib.gather(self.replay, *place, int(length))
        trajectory = Trajectory(_row(copied.last_observation, 0))
        steps = _row(copied.steps, 0)
        trajectory._timesteps = [_row(steps, t) for t in range(length)]
        return trajectory

    def _forget(self, epoch: int) -> None:
        """Removes the epochs that are too old once ``epoch`` is the newest."""
        replay, oldest = self.replay, epoch - self._n_replay_epochs + 1
        if replay.size and replay.epoch[replay.rows(np.array(0))] < oldest:
            self.replay = replay_lib.remove(replay, replay.epoch < oldest)

    def _store(self, rollout: Rollout, epoch: int, max_steps: int | None) -> None:
        rollout = rollout._replace(steps=self._completed(rollout.steps))
        n_inputs = rollout.steps.dist_inputs.shape[-1]
        if not self.replay.size and n_inputs != self._n_inputs():
            self.replay = replay_lib.create(self._example(n_inputs), self.replay.capacity)
        self.replay = replay_lib.add(
            self.replay, rollout, epoch, gamma=self.gamma, max_steps=max_steps, grow=self._grows
        )

    def _completed(self, steps: TimeStep) -> TimeStep:
        """Steps in the structure that the replay has."""
        dist_inputs = steps.dist_inputs
        if dist_inputs is None:
            shape = (*np.shape(steps.mask), self._n_inputs())
            dist_inputs = np.full(shape, np.nan, np.float32)
        return steps._replace(dist_inputs=dist_inputs, policy_state=(), return_=None)

    def _load_initial(self, initial: Any) -> None:
        if isinstance(initial, (str, os.PathLike)):
            self._load(_read_npz(epath.Path(initial)), 0)
        elif isinstance(initial, (Mapping, Sequence)):
            by_epoch = initial if isinstance(initial, Mapping) else {0: initial}
            self._load_steps(
                {e: [t.to_np() for t in ts if len(t) > 1] for e, ts in by_epoch.items()}
            )
        else:
            _check_at_least(0, initial_trajectories=initial)
            if initial:
                act = _RandomAct(self.distribution, self.env.num_envs)
                until = _Until(self.actor, self.max_steps, initial, None)
                rollout, _ = self._collect(self.env, act, self.max_steps, until)
                self._store(rollout, 0, self.max_steps)
                self.n_initial_interactions, self._n_interactions = self._n_interactions, 0

    def _load_steps(self, by_epoch: Mapping[int, list[TimeStep]]) -> None:
        """Stores trajectories ``[S + 1, ..]`` whose last row has mask 0."""
        for epoch in sorted(by_epoch):
            steps = [self._completed(x) for x in by_epoch[epoch]]
            if steps:
                rollout = replay_lib.pack(steps, self.env.num_envs)
                self._store(rollout, epoch, None)
                self.replay = replay_lib.cut(self.replay, grow=self._grows)
                self._n_trajectories += len(steps)
                self.n_initial_interactions += int(np.count_nonzero(rollout.steps.mask))

    # Files and checkpoints.

    def save_to_file(self, path: str | os.PathLike[str]) -> None:
        """Writes trajectories, ``max_steps``, ``gamma`` and counts as ``.npz``, atomically."""
        arrays = self._replay_state()
        arrays["counts"] = np.array([self._n_trajectories, self._n_interactions])
        arrays["settings"] = np.array([self.max_steps or 0, self.gamma])
        target = epath.Path(path)
        written = target.with_name(target.name + ".tmp")
        written.write_bytes(_to_npz(arrays))
        written.replace(target)

    def init_from_file(self, path: str | os.PathLike[str]) -> None:
        """Takes over what :meth:`save_to_file` wrote; the environments and their limit stay."""
        arrays = _read_npz(epath.Path(path))
        max_steps, gamma = arrays["settings"]
        self.max_steps, self.gamma = int(max_steps) or None, float(gamma)
        self.replay = replay_lib.create(self._example(self._n_inputs()), self.replay.capacity)
        self._load(arrays, 0)
        self._n_trajectories, self._n_interactions = (int(x) for x in arrays["counts"])

    def load_initial_trajectories_from_path(
        self,
        initial_trajectories_path: str | os.PathLike[str],
        dictionary_file: str = "trajectories.npz",
        start_epoch_to_load: int = 0,
    ) -> None:
        """Adds the stored trajectories of the epochs from ``start_epoch_to_load`` on.

        Args:
            initial_trajectories_path: directory of the file.
            dictionary_file: name of a file that :meth:`save_to_file` wrote.
            start_epoch_to_load: the first epoch to load.
        """
        path = epath.Path(initial_trajectories_path) / dictionary_file
        self._load(_read_npz(path), start_epoch_to_load)

    def _load(self, arrays: Mapping[str, np.ndarray], start_epoch: int) -> None:
        stored = self._to_replay(arrays)
        by_epoch = {}
        for epoch in replay_lib.epoch_ids(stored):
            if epoch >= start_epoch:
                places = zip(*replay_lib.segments(stored, [epoch]), strict=True)
                by_epoch[epoch] = [
                    _row(
                        replay_lib.gather(stored, age[None], column[None], n + 1, [epoch]).steps, 0
                    )
                    for age, column, n in places
                ]
        self._load_steps(by_epoch)

    def state_dict(self) -> dict[str, np.ndarray]:
        """Everything that continues the task: environments, actor, replay, counts, generator.

        Returns:
            Arrays by name; always the same names, with lengths that vary.
        """
        actor = self.actor
        return {
            "key": np.asarray(actor.key),
            "needs_reset": np.array(actor.needs_reset),
            "episode_return": np.array(actor.episode_return),
            "episode_length": np.array(actor.episode_length),
            "counts": np.array(self._counts()),
            "rng": _to_bytes(json.dumps(self.rng.bit_generator.state).encode()),
            "env": _to_bytes(_to_npz(self.env.snapshot() or {})),
            **_flatten("observation", actor.observation),
            **_flatten("policy_state", actor.policy_state),
            **{f"replay_{name}": x for name, x in self._replay_state().items()},
        }

    def load_state_dict(self, state: Mapping[str, np.ndarray]) -> None:
        """Continues from :meth:`state_dict`.

        An environment whose state cannot be restored starts a new episode, and the log says so.

        Raises:
            ValueError: the state is of another environment, ``num_envs`` or model.
        """
        if len(state["needs_reset"]) != self.env.num_envs:
            raise ValueError(
                f"num_envs is {self.env.num_envs}; the state has {len(state['needs_reset'])}."
            )
        self.replay = self._to_replay(
            {k.removeprefix("replay_"): x for k, x in state.items() if k.startswith("replay_")}
        )
        self._n_trajectories, self._n_interactions, *others = (int(x) for x in state["counts"])
        self.n_initial_interactions, self.n_eval_interactions = others
        self.rng.bit_generator.state = json.loads(state["rng"].tobytes())
        actor = ActorState(
            env_state=(),
            observation=_unflatten("observation", self.actor.observation, state),
            policy_state=_unflatten("policy_state", self.actor.policy_state, state),
            **{name: np.array(state[name]) for name in _ACTOR_FIELDS},
        )
        snapshot = _from_npz(state["env"].tobytes())
        if snapshot:
            self.env.restore(snapshot)
            restarted = self.env.restarted
        else:
            _log.warning("env: %s keeps its state to itself; all episodes restart", self.env.name)
            seed = np.random.SeedSequence([self._eval_seed, self._n_interactions])
            first = self.env.reset(int(seed.generate_state(1)[0]))
            actor = rollout_lib.initial_actor(first, self.env.num_envs, actor.key)
            actor = actor._replace(policy_state=self.actor.policy_state)
            self.replay = replay_lib.cut(self.replay, grow=self._grows)
            restarted = np.zeros(self.env.num_envs, bool)
        self.actor = actor._replace(
            needs_reset=actor.needs_reset | restarted,
            episode_return=np.where(restarted, 0.0, actor.episode_return),
            episode_length=np.where(restarted, 0, actor.episode_length),
        )
        self.replay = self.replay._replace(
            n_open=np.where(restarted, 0, self.replay.n_open),
            n_ended=self.replay.n_ended + restarted.astype(np.int32),
        )

    def _counts(self) -> list[int]:
        counts = [self._n_trajectories, self._n_interactions]
        return [*counts, self.n_initial_interactions, self.n_eval_interactions]

    def _n_inputs(self) -> int:
        return self.replay.steps.dist_inputs.shape[-1]

    def _replay_state(self) -> dict[str, np.ndarray]:
        replay = self.replay
        rows = replay.rows(np.arange(replay.size + 1))
        return {
            "trajectory_id": replay.trajectory_id[rows],
            "epoch": replay.epoch[rows],
            "n_open": replay.n_open,
            "n_ended": replay.n_ended,
            "capacity": np.array(replay.capacity),
            **_flatten("steps", jax.tree.map(lambda x: x[rows], replay.steps)),
        }

    def _to_replay(self, arrays: Mapping[str, np.ndarray]) -> replay_lib.Replay:
        size = len(arrays["epoch"]) - 1
        free = int(arrays["capacity"]) - size

        def extended(x: np.ndarray) -> np.ndarray:
            return np.concatenate([x, np.zeros((free, *x.shape[1:]), x.dtype)])

        steps = _unflatten("steps", self.replay.steps, arrays)
        return replay_lib.Replay(
            steps=jax.tree.map(extended, steps),
            trajectory_id=extended(arrays["trajectory_id"]),
            epoch=extended(arrays["epoch"]),
            insert=size,
            size=size,
            n_open=np.array(arrays["n_open"]),
            n_ended=np.array(arrays["n_ended"]),
        )


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
    player = _PolicyEnv(host, policy, None, distribution, actor.episode_length)
    until = _Until(actor, max_steps, 1, None)
    while not until.reached:
        actor, _, _ = rollout_lib.unroll_host(
            player, player.act, actor, _BLOCK, distribution.to_env, until
        )
    return player.trajectories[0]


def _row(tree: PyTree, index: int) -> PyTree:
    return jax.tree.map(lambda x: x[index], tree)


def _padded(x: np.ndarray, length: int) -> np.ndarray:
    return np.concatenate([x, np.zeros((length - len(x), *x.shape[1:]), x.dtype)])


def _batch(slices: list[TimeStep], length: int | None) -> TimeStep:
    """Stacks slices ``[l]`` to ``[N, L]``; see :meth:`RLTask.trajectory_batch_stream`."""
    longest = max(len(steps.mask) for steps in slices)
    end = length or rollout_lib.bucket(longest)
    steps = jax.tree.map(lambda *xs: np.stack([_padded(x, end) for x in xs]), *slices)
    lengths = np.array([len(steps.mask) for steps in slices])
    return steps._replace(terminated=steps.terminated | (np.arange(end) >= lengths[:, None]))


def _check_at_least(least: int, **arguments: int | None) -> None:
    for name, value in arguments.items():
        if value is not None and value < least:
            raise ValueError(f"{name} is {value}; it must be at least {least}.")


def _check_exactly_one(**counts: int | None) -> None:
    if sum(value is not None for value in counts.values()) != 1:
        given = ", ".join(f"{name}={value}" for name, value in counts.items())
        raise ValueError(f"exactly one of these must be given: {given}.")
    _check_at_least(1, **counts)


def _flatten(name: str, tree: PyTree) -> dict[str, np.ndarray]:
    return {f"{name}_{i}": np.asarray(x) for i, x in enumerate(jax.tree.leaves(tree))}


def _unflatten(name: str, like: PyTree, arrays: Mapping[str, np.ndarray]) -> PyTree:
    """The inverse of :func:`_flatten`, in the structure of ``like``."""
    expected, structure = jax.tree.flatten(like)
    count = sum(key.rpartition("_")[0] == name for key in arrays)
    if count != len(expected):
        raise ValueError(
            f"{name} has {count} arrays in what was saved; this task has {len(expected)}."
        )
    leaves = [np.array(arrays[f"{name}_{i}"]) for i in range(count)]
    for x, y in zip(leaves, expected, strict=True):
        if x.shape[2:] != y.shape[2:]:
            raise ValueError(f"{name} was saved with shape {x.shape}; this task has {y.shape}.")
    return jax.tree.unflatten(structure, leaves)


def _to_npz(arrays: Mapping[str, np.ndarray]) -> bytes:
    file = io.BytesIO()
    np.savez(file, **arrays)  # type: ignore[arg-type]
    return file.getvalue()


def _from_npz(data: bytes) -> dict[str, np.ndarray]:
    with np.load(io.BytesIO(data), allow_pickle=False) as arrays:
        return dict(arrays)


def _read_npz(path: epath.Path) -> dict[str, np.ndarray]:
    if not path.exists():
        raise ValueError(f"there is no file of trajectories at {path}.")
    return _from_npz(path.read_bytes())


def _to_bytes(data: bytes) -> np.ndarray:
    return np.frombuffer(data, np.uint8)


def _prepared(env: Any, *, dm_suite: bool, random_starts: bool, n_frames: int) -> Any:
    """What :func:`make_host_env` takes, with Atari preprocessing and stacked frames added."""
    if dm_suite and isinstance(env, str):
        return functools.partial(_make_atari, env, random_starts, n_frames)
    if n_frames == 1:
        return env
    if isinstance(env, gymnasium.Env):
        return FrameStackObservation(env, n_frames)
    if isinstance(env, str) or callable(env):
        return functools.partial(_make_stacked, env, n_frames)
    raise ValueError(
        f"num_stacked_frames is {n_frames}, which needs an id, a factory or a gymnasium.Env; env "
        f"is a {type(env).__name__}. With 1 it can be used."
    )


def _make_stacked(env: Any, n_frames: int) -> gymnasium.Env:
    made = (
        gymnasium.make(find_spec(env), disable_env_checker=True) if isinstance(env, str) else env()
    )
    return FrameStackObservation(made, n_frames)


def _make_atari(game: str, random_starts: bool, n_frames: int) -> gymnasium.Env:
    name = "".join(word.capitalize() for word in game.split("_"))
    spec = find_spec(game if "/" in game else f"ALE/{name}-v5")
    env = gymnasium.make(spec, disable_env_checker=True, frameskip=1)
    env = AtariPreprocessing(env, noop_max=30 if random_starts else 0)
    stacked = FrameStackObservation(env, n_frames)
    space = gymnasium.spaces.Box(0, 255, (84, 84, n_frames), np.uint8)
    return TransformObservation(
        stacked, functools.partial(np.moveaxis, source=0, destination=-1), space
    )
