"""RLTask: environments, the replay of what was done in them, and the counts.

The words are those of Trax (https://github.com/google/trax, ``trax/rl/task.py``). A *trajectory* is what is
learned from: an episode, or a piece of ``max_steps`` decisions of one.
"""

from __future__ import annotations

import functools
import importlib.util
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

from rl_trainers import datasets
from rl_trainers import replay as replay_lib
from rl_trainers import rollout as rollout_lib
from rl_trainers.distributions import create_distribution
from rl_trainers.envs.host import HostEnv, find_spec, make_eval_env, make_host_env
from rl_trainers.envs.native import DeviceEnv, is_jax_env
from rl_trainers.rollout import Act, Endings, Episodes
from rl_trainers.trajectory import Policy, PolicyEnv, Trajectory, Until, padded, play, unroll_until
from rl_trainers.types import ActorState, EnvInfo, PyTree, Rollout, TimeStep

__all__ = ["Policy", "RLTask", "TimeStepBatch", "Trajectory", "play"]

TimeStepBatch = TimeStep
"""Trax's name of the record."""

_log = logging.getLogger(__name__)

_MOST_EVAL_STEPS = 100_000


@gin.configurable(module="rl_trainers")
class RLTask:
    """Environments, the replay of what was done in them, and the counts.

    Args:
        env: a gymnasium id, a factory ``() -> env``, an environment, or a vector environment, see
            :func:`rl_trainers.envs.make_host_env`; or a JAX environment such as ``'gymnax:CartPole-v1'``, see
            :func:`rl_trainers.envs.make_jax_env`, with which whole epochs are compiled.
        initial_trajectories: trajectories to begin with, as epoch 0: how many to play with random actions
            (Trax plays 1 by default; here 0), a list of :class:`Trajectory`, a dict from epoch to such lists,
            ``'minari:NAME'`` for a data set of Minari on this machine (extra ``minari``), or the path of a
            file that :meth:`save_to_file` wrote.
        gamma: discount factor per step, in [0, 1].
        dm_suite: ``env`` is the bare name of an Atari game such as ``'pong'``; observations are uint8
            ``[84, 84, num_stacked_frames]``, an action lasts 4 frames.
        random_starts: with ``dm_suite``, episodes begin with up to 30 random no-op steps.
        max_steps: decisions after which a trajectory is cut; the episode goes on in the next one. ``None``:
            trajectories are episodes.
        time_limit: decisions after which an episode is truncated; ``None`` means ``max_steps``.
        timestep_to_np: maps a :class:`TimeStep` with any leading axes to what models see, for example with
            other observations. The replay keeps what the environment gave.
        num_stacked_frames: the newest observations to stack into one, along a new first axis (the last one
            with ``dm_suite``). The replay keeps each frame once.
        n_replay_epochs: the newest epochs that the replay keeps.
        num_envs: ``B``, environments to step side by side.
        seed: everything random in the task follows from it.
        backend: see :func:`rl_trainers.envs.make_host_env`.
        action_distribution: maps an action space to the distribution of actions;
            :func:`rl_trainers.distributions.create_distribution` by default.
        capacity: steps that the replay holds at most, the oldest are overwritten; ``None``: as many as
            ``n_replay_epochs`` have.
        eval_env: the environment for evaluation, made like ``env``; by default another one of the same.

    Attributes:
        env: :class:`rl_trainers.envs.HostEnv` with ``num_envs`` environments, or
            :class:`rl_trainers.envs.DeviceEnv`.
        env_name: its id, or the name of its class.
        observation_space: of one environment.
        action_space: of one environment.
        distribution: of the actions.
        actor: :class:`ActorState`, where the environments stand; see :meth:`set_policy_state`.
        replay: :class:`rl_trainers.replay.Replay`, what is stored.
        gamma, max_steps, time_limit, timestep_to_np, seed: as given.
        rng: numpy generator that sampling uses.
        n_initial_interactions: decisions in the initial trajectories.
        n_eval_interactions: decisions taken in evaluations.
        make_more: what :meth:`make_envs` calls; it holds nothing of the task, and can be sent elsewhere.

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
        if num_stacked_frames > 256:
            raise ValueError(f"num_stacked_frames is {num_stacked_frames}; it must be at most 256.")
        _check_at_least(0, seed=seed)
        _check_at_least(num_envs, capacity=capacity)
        self.gamma, self.max_steps, self.seed = gamma, max_steps, seed
        self.time_limit = max_steps if time_limit is None else time_limit
        self.timestep_to_np, self._n_replay_epochs = timestep_to_np, n_replay_epochs
        make: Callable = _make_envs
        if is_jax_env(env):
            _check_plain(dm_suite=dm_suite, num_stacked_frames=num_stacked_frames, backend=backend)
            make = _make_device_envs
        prepare = functools.partial(
            _prepared, dm_suite=dm_suite, random_starts=random_starts, n_frames=num_stacked_frames
        )
        self.env: Any
        self.env, self._make_eval_env, self.make_more = make(
            env, eval_env, prepare, num_envs, self.time_limit, backend
        )
        self.env_name = self.env.name
        self.observation_space = self.env.observation_space
        self.action_space = self.env.action_space
        seeds = np.random.SeedSequence(seed)
        env_seed, self._eval_seed, *key = (int(x) for x in seeds.generate_state(4))
        self.rng = np.random.default_rng(seeds.spawn(1)[0])
        self.actor = rollout_lib.initial_actor(
            self.env.reset(env_seed), self.env.num_envs, np.array(key, np.uint32)
        )
        self._no_policy_state: PyTree = ()
        self.distribution = (action_distribution or create_distribution)(self.action_space)
        self._grows = capacity is None
        axis = -1 if dm_suite and isinstance(env, str) else 0
        self._frames = replay_lib.Frames(num_stacked_frames, axis)
        self.replay = self._empty_replay(1 if capacity is None else max(1, capacity // self.env.num_envs))
        self._n_trajectories = self._n_interactions = 0
        self.n_initial_interactions = self.n_eval_interactions = 0
        self._load_initial(initial_trajectories)

    def _empty_replay(self, rows: int) -> replay_lib.Replay:
        """With the shapes that rollouts have."""
        ones = np.ones(self.env.num_envs, np.float32)
        inputs = np.zeros((self.env.num_envs, self.distribution.n_inputs), np.float32)
        action = jax.eval_shape(self.distribution.sample, inputs, jax.random.PRNGKey(0))
        action = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), action)
        no = np.zeros(self.env.num_envs, bool)
        example = TimeStep(
            self.actor.observation, action, ones, no, no, ones, inputs, env_info=EnvInfo(ones, ones)
        )
        return replay_lib.create(example, rows, self._frames)

    def set_distribution(self, distribution: Any) -> None:
        """Puts another distribution in place of :attr:`distribution`, and stored actions into its form."""
        rows = replay_lib.to_rows(self.replay)
        before, self.distribution = self.distribution, distribution
        steps = rows[0]
        action = jax.tree.map(np.asarray, distribution.from_env(before.to_env(steps.action)))
        inputs = np.full((*steps.mask.shape, distribution.n_inputs), np.nan, np.float32)
        steps = steps._replace(action=action, dist_inputs=inputs)
        self.replay = replay_lib.from_rows((steps, *rows[1:]), self.replay.capacity, self._frames)

    @functools.cached_property
    def eval_env(self) -> HostEnv | DeviceEnv:
        """For evaluation only, without the task's time limit; made at the first use."""
        return self._make_eval_env()

    def make_envs(self, num_envs: int) -> HostEnv | DeviceEnv:
        """More of the same environments, not reset, which the caller closes.

        Args:
            num_envs: how many.
        """
        return self.make_more(num_envs)

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
        env: Any = None,
    ) -> tuple[Rollout, Episodes]:
        """Steps the environments; the replay does not change.

        Args:
            act: chooses the actions.
            unroll_length: vector steps to take; or else
            n_trajectories: trajectories to finish, or
            n_interactions: decisions to take. With ``B`` environments the last vector step may bring up to
                ``B - 1`` more of either.
            env: what to step in place of :attr:`env`, if something stands before it.

        Returns:
            ``(rollout, episodes)``. With ``unroll_length`` the rollout is ``[unroll_length, B]``,
            else it is padded to a power of two.

        Raises:
            ValueError: not exactly one of the three counts is given, or it is less than 1.
        """
        _check_exactly_one(
            unroll_length=unroll_length, n_trajectories=n_trajectories, n_interactions=n_interactions
        )
        counts = unroll_length, n_trajectories, n_interactions
        return self._collect(self.env if env is None else env, act, self.max_steps, *counts)

    def set_policy_state(self, policy_state: PyTree, is_stored: bool = False) -> None:
        """Sets what the policy remembers of each environment, and what it does where it remembers nothing.

        Args:
            policy_state: leading axis ``[B]``; ``()`` if policies have none.
            is_stored: whether the replay keeps that of each row, if it is a recurrent state; rows that are
                there already get this one.
        """
        self._no_policy_state = policy_state
        self.actor = self.actor._replace(policy_state=policy_state)
        kept = rollout_lib.recorded(policy_state) if is_stored else ()
        steps, *others = replay_lib.to_rows(self.replay)
        if not replay_lib.same_structure(kept, steps.policy_state):
            many = jax.tree.map(lambda x: np.broadcast_to(x, (len(steps.mask), *x.shape)), kept)
            rows = (steps._replace(policy_state=many), *others)
            self.replay = replay_lib.from_rows(rows, self.replay.capacity, self._frames)

    def add(self, rollout: Rollout, epoch: int) -> None:
        """Puts a rollout into the replay; epochs older than the newest ``n_replay_epochs`` go.

        Args:
            rollout: host arrays ``[T, B]``; padding at its end is not stored. ``dist_inputs`` are NaN in the
                replay where the rollout has none.
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
        env: Any = None,
    ) -> Episodes:
        """Plays episodes in the evaluation environments; nothing else changes.

        The environments are reset together as often as it takes, and each time only the first episode of
        each counts, so that short episodes are not favoured.

        Args:
            act: chooses the actions.
            n_episodes: how many.
            max_steps: decisions after which an episode counts as over; it may be larger than the task's.
                ``None`` means ``time_limit``, or 100,000 if there is none.
            seed: of the environments; by default the same in every evaluation.
            key: PRNG key u32 ``[2]`` for ``act``; derived from the seed by default.
            policy_state: initial recurrent state ``[B, ..]``.
            env: in place of :attr:`eval_env`.

        Returns:
            Exactly ``n_episodes`` episodes, in the order of the environments.
        """
        _check_at_least(1, n_episodes=n_episodes, max_steps=max_steps)
        env = self.eval_env if env is None else env
        limit = max_steps or self.time_limit or _MOST_EVAL_STEPS
        seeds = np.random.SeedSequence(self._eval_seed if seed is None else seed)
        key = seeds.generate_state(2) if key is None else key
        env_seeds = seeds.spawn(1)[0].generate_state(-(-n_episodes // env.num_envs))
        returns, lengths = np.zeros(n_episodes), np.zeros(n_episodes, np.int64)
        for first, env_seed in zip(range(0, n_episodes, env.num_envs), env_seeds, strict=True):
            actor = rollout_lib.initial_actor(env.reset(int(env_seed)), env.num_envs, key, policy_state)
            place = slice(first, first + env.num_envs)
            runs = np.ones(len(returns[place]), bool)
            until = Until(actor, limit, n_first=len(runs))
            for now, rollout, _ in unroll_until(env, act, actor, self.distribution.to_env, until):
                done = rollout.steps.done[:, : len(runs)]
                counts = runs & (np.cumsum(done, axis=0) == done)
                reward = rollout.steps.reward[:, : len(runs)]
                returns[place] += np.sum(reward, axis=0, where=counts, dtype=np.float64)
                lengths[place] += counts.sum(0)
                runs &= ~done.any(0)
                self.n_eval_interactions += int(np.count_nonzero(rollout.steps.mask))
                key = now.key
        if lengths.max() >= _MOST_EVAL_STEPS and not (max_steps or self.time_limit):
            _log.warning(
                "evaluation: an episode was stopped after %d steps, since nothing ended it; time_limit or "
                "max_steps sets a limit",
                lengths.max(),
            )
        return Episodes(returns, lengths)

    def play_out(
        self,
        play: Callable[[int, int, int], tuple[Any, Any]],
        n_episodes: int,
        max_steps: int | None = None,
        seed: int | None = None,
    ) -> Episodes:
        """:meth:`evaluate` by compiled loops, for JAX environments.

        Args:
            play: ``(B, seed, limit) -> (returns [B], lengths [B])``, plays one episode in each of B
                environments; the limit is in decisions.
            n_episodes: see :meth:`evaluate`.
            max_steps: likewise.
            seed: likewise.
        """
        _check_at_least(1, n_episodes=n_episodes, max_steps=max_steps)
        limit = max_steps or self.time_limit or _MOST_EVAL_STEPS
        seeds = np.random.SeedSequence(self._eval_seed if seed is None else seed)
        num_envs = min(n_episodes, self.env.num_envs)
        env_seeds = seeds.generate_state(-(-n_episodes // num_envs)) >> 1
        rounds = [jax.device_get(play(num_envs, int(env_seed), limit)) for env_seed in env_seeds]
        returns, lengths = (np.concatenate(x)[:n_episodes] for x in zip(*rounds, strict=True))
        self.n_eval_interactions += int(sum(x.sum() for _, x in rounds))
        return Episodes(returns.astype(np.float64), lengths.astype(np.int64))

    def device_actor(self) -> ActorState:
        """Where JAX environments stand, for a compiled loop that may consume it and calls :meth:`went_on`."""
        return self.actor._replace(env_state=self.env.envs)

    def went_on(self, actor: ActorState) -> None:
        """Takes over where a compiled loop left the environments; the replay does not change."""
        self.env.put(actor.env_state, actor.needs_reset, actor.episode_length)
        self.actor = actor._replace(
            env_state=(),
            needs_reset=np.array(actor.needs_reset),
            episode_return=np.array(actor.episode_return, np.float64),
            episode_length=np.array(actor.episode_length, np.int64),
        )

    def count(self, n_interactions: int, n_trajectories: int) -> None:
        """Counts what a compiled loop did."""
        self._n_interactions += n_interactions
        self._n_trajectories += n_trajectories

    def count_rows(self, endings: Endings) -> Episodes:
        """Counts the rows that a compiled loop added; before :meth:`went_on`.

        Args:
            endings: ``[T, B]``, of all rows since :attr:`actor`.

        Returns:
            The episodes that ended.
        """
        done = np.asarray(endings.mask)
        mask = 1.0 - np.concatenate([np.asarray(self.actor.needs_reset)[None], done[:-1]])
        steps = TimeStep(None, None, 0.0, done, np.zeros_like(done), mask)
        self._count(steps, np.asarray(self.actor.episode_length), self.max_steps)
        return endings.episodes()

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
        player = PolicyEnv(env, policy, self.distribution, self.actor.episode_length, max_steps)
        counts = None, n_trajectories, n_interactions
        if not only_eval:
            self._forget(epoch_id)
            rollout, episodes = self._collect(player, player.act, max_steps, *counts)
            self._store(rollout, epoch_id, max_steps)
            # These steps were not the policy's own.
            self.actor = self.actor._replace(policy_state=self._no_policy_state)
        elif n_trajectories is not None:
            episodes = self.evaluate(player.act, n_trajectories, max_steps, env=player)
        else:
            observation = player.reset(self._eval_seed)
            actor = rollout_lib.initial_actor(observation, env.num_envs, self.actor.key)
            _, rollout, episodes = self._unroll(player, player.act, actor, max_steps, *counts)
            self.n_eval_interactions += int(np.count_nonzero(rollout.steps.mask))
        return float(np.mean(episodes.returns)) if len(episodes.returns) else float("nan")

    def _collect(
        self, env: Any, act: Act, max_steps: int | None, *counts: int | None
    ) -> tuple[Rollout, Episodes]:
        before = self.actor
        self.actor, rollout, episodes = self._unroll(env, act, before, max_steps, *counts)
        self._count(rollout.steps, before.episode_length, max_steps)
        return rollout, episodes

    def _count(self, steps: TimeStep, length: np.ndarray, max_steps: int | None) -> None:
        """Counts rows ``[T, B]`` before which ``length [B]`` decisions were taken in the running episodes."""
        decided = steps.mask > 0
        after = replay_lib.positions(steps, length, max_steps)[1:]
        self._n_trajectories += int(np.count_nonzero(decided & (after == 0)))
        self._n_interactions += int(np.count_nonzero(decided))

    def _unroll(
        self, env: Any, act: Act, actor: ActorState, max_steps: int | None, *counts: int | None
    ) -> tuple[ActorState, Rollout, Episodes]:
        """Unrolls until one of the counts of :meth:`collect` is reached."""
        unroll_length, n_trajectories, n_interactions = counts
        to_env = self.distribution.to_env
        if unroll_length is not None:
            return rollout_lib.unroll_host(env, act, actor, unroll_length, to_env)
        until = Until(actor, max_steps, n_trajectories, n_interactions)
        actors, rollouts, episodes = zip(*unroll_until(env, act, actor, to_env, until), strict=True)
        rollout = rollout_lib.concatenate(list(rollouts))
        rollout = rollout_lib.pad(rollout, rollout_lib.bucket(len(rollout.steps.mask)))
        return actors[-1], rollout, jax.tree.map(lambda *xs: np.concatenate(xs), *episodes)

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
        return {
            epoch: [Trajectory.from_np(steps) for steps in replay_lib.trajectories(self.replay, epoch)]
            for epoch in replay_lib.epoch_ids(self.replay)
        }

    def n_trajectories(self) -> int:
        """Trajectories that were finished, initial ones included."""
        return self._n_trajectories

    def n_interactions(self) -> int:
        """Decisions taken for training; initial and evaluation ones have counters of their own."""
        return self._n_interactions

    def reserve(self, rows: int) -> None:
        """Makes room for ``rows`` vector steps beyond those stored, so that :meth:`replayed` keeps its shape.

        Does nothing to a replay whose ``capacity`` was given.
        """
        if self._grows:
            capacity = max(self.replay.capacity, self.replay.size + rows)
            self.replay = replay_lib.from_rows(replay_lib.to_rows(self.replay), capacity, self._frames)

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
            max_slice_length: rows of a slice at most, margin included; ``None``: whole trajectories.
            min_slice_length: rows of a slice at least; shorter ones are left out.
            margin: rows that may lie after the end of the trajectory.
            sample_trajectories_uniformly: trajectories are equally likely; otherwise slices are.
            trajectory_stream_preprocessing_fn: maps the stream of :class:`Trajectory` that slices are taken
                from to another one.
        """
        batches = self.trajectory_batch_stream(
            1,
            epochs,
            max_slice_length,
            min_slice_length,
            margin,
            sample_trajectories_uniformly,
            trajectory_stream_preprocessing_fn,
        )
        for steps in batches:
            end = int(np.count_nonzero(steps.mask)) + margin
            yield jax.tree.map(lambda x, end=end: x[0, :end], steps)

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
        least = min_slice_length or 0
        if trajectory_stream_preprocessing_fn is not None:
            drawn = self._trajectory_stream(epochs, max_slice_length, margin, sample_trajectories_uniformly)
            wanted = trajectory_stream_preprocessing_fn(drawn)
            slices = (self._random_slice(trajectory, max_slice_length, margin) for trajectory in wanted)
            slices = (steps for steps in slices if len(steps.mask) >= least)
            while len(batch := list(itertools.islice(slices, batch_size))) == batch_size:
                yield self._to_np(_batch(batch, max_slice_length))
            return
        while True:
            wanted, length = self.resolve_epochs(epochs), max_slice_length
            if length is None:
                longest = replay_lib.segments(self.replay, wanted).length.max(initial=1)
                length = rollout_lib.bucket(int(longest) + margin)
            steps = replay_lib.sample_slices(
                self.rng,
                self.replay,
                batch_size,
                length,
                margin,
                epochs=wanted,
                per_trajectory=sample_trajectories_uniformly,
                min_slice_length=least,
            ).steps
            if max_slice_length is None:
                length = rollout_lib.bucket(int(steps.mask.sum(1).max()) + margin)
            yield self._to_np(jax.tree.map(lambda x, end=length: x[:, :end], steps))

    def _to_np(self, steps: TimeStep) -> TimeStep:
        return steps if self.timestep_to_np is None else self.timestep_to_np(steps)

    def _trajectory_stream(
        self, epochs: Sequence[int] | None, length: int | None, margin: int, uniform: bool
    ) -> Iterator[Trajectory]:
        """Draws trajectories, each as often as it has slices unless ``uniform``."""
        while True:
            found = replay_lib.segments(self.replay, self.resolve_epochs(epochs))
            if not len(found.length):
                raise ValueError(f"no decision is stored in the epochs {epochs}.")
            weights = np.ones(len(found.length))
            if length is not None and not uniform:
                weights = np.maximum(1.0, found.length + margin - length + 1)
            drawn = self.rng.choice(len(weights), 100, p=weights / weights.sum())
            for place in zip(*(x[drawn] for x in found), strict=True):
                yield Trajectory.from_np(replay_lib.trajectory(self.replay, *place))

    def _random_slice(self, trajectory: Trajectory, max_length: int | None, margin: int) -> TimeStep:
        steps = trajectory.to_np(margin)
        length = max_length or len(steps.mask)
        n_starts = max(1, len(steps.mask) - length + 1)
        start = int(self.rng.integers(min(n_starts, len(trajectory) - 1)))
        return jax.tree.map(lambda x: x[start : start + length], steps)

    def _forget(self, epoch: int) -> None:
        """Removes the epochs that are too old once ``epoch`` is the newest."""
        replay, oldest = self.replay, epoch - self._n_replay_epochs + 1
        if replay.size and replay.epoch[replay.rows(np.array(0))] < oldest:
            self.replay = replay_lib.remove(replay, replay.epoch < oldest)

    def _store(self, rollout: Rollout, epoch: int, max_steps: int | None) -> None:
        self.replay = replay_lib.add(
            self.replay, rollout, epoch, gamma=self.gamma, max_steps=max_steps, grow=self._grows
        )

    def _load_initial(self, initial: Any) -> None:
        if isinstance(initial, str) and initial.startswith("minari:"):
            self._load_minari(initial.removeprefix("minari:"))
        elif isinstance(initial, (str, os.PathLike)):
            self._load(_read_npz(initial))
        elif isinstance(initial, (Mapping, Sequence)):
            by_epoch = initial if isinstance(initial, Mapping) else {0: initial}
            self._load_steps({e: [t.to_np() for t in ts if len(t) > 1] for e, ts in by_epoch.items()})
        else:
            _check_at_least(0, initial_trajectories=initial)
            if initial:
                act = _random_act(self.distribution, self.env.num_envs)
                rollout, _ = self._collect(self.env, act, self.max_steps, None, initial, None)
                self._store(rollout, 0, self.max_steps)
                self.n_initial_interactions, self._n_interactions = self._n_interactions, 0

    def _load_minari(self, name: str) -> None:
        dataset = datasets.load_minari(name)
        if dataset.action_space != self.action_space:
            raise ValueError(
                f"initial_trajectories: the actions of {name} are {dataset.action_space}; those of the "
                f"environment are {self.action_space}."
            )
        episodes = list(datasets.minari_episodes(dataset, self.distribution))
        pair = episodes[0].observation, self.actor.observation
        shapes = [jax.tree.map(lambda x: x.shape[1:], tree) for tree in pair]
        if shapes[0] != shapes[1]:
            raise ValueError(
                f"initial_trajectories: the observations of {name} have the shape {shapes[0]}; those of the "
                f"environment have {shapes[1]}."
            )
        self._load_steps({0: episodes})

    def _load(self, arrays: Mapping[str, np.ndarray], start_epoch: int = 0) -> None:
        """Adds the trajectories of a file."""
        rows = _unflatten("replay", self.replay[:4], arrays, 2)
        stored = replay_lib.from_rows(rows, len(rows[2]), self._frames)
        epochs = [epoch for epoch in replay_lib.epoch_ids(stored) if epoch >= start_epoch]
        self._load_steps({epoch: list(replay_lib.trajectories(stored, epoch)) for epoch in epochs})

    def _load_steps(self, by_epoch: Mapping[int, Sequence[TimeStep]]) -> None:
        """Adds trajectories ``[S + 1, ..]`` whose last row has mask 0."""
        for epoch, steps in sorted(by_epoch.items()):
            if steps:
                rollout = replay_lib.pack(steps, self.env.num_envs, self._frames)
                replay_lib.end_running(self.replay)
                self._store(rollout, epoch, None)
                self._n_trajectories += len(steps)
                self.n_initial_interactions += int(np.count_nonzero(rollout.steps.mask))
        replay_lib.end_running(self.replay)

    # Files and checkpoints.

    def save_to_file(self, path: str | os.PathLike[str]) -> None:
        """Writes trajectories, ``max_steps``, ``gamma`` and counts as ``.npz``, atomically."""
        arrays = _flatten("replay", replay_lib.to_rows(self.replay))
        arrays["counts"] = np.array([self._n_trajectories, self._n_interactions])
        arrays["settings"] = np.array([self.max_steps or 0, self.gamma])
        target = epath.Path(path)
        written = target.with_name(target.name + ".tmp")
        written.write_bytes(_to_npz(arrays))
        written.replace(target)

    def init_from_file(self, path: str | os.PathLike[str]) -> None:
        """Takes over what :meth:`save_to_file` wrote; the environments and their limit stay."""
        arrays = _read_npz(path)
        max_steps, gamma = arrays["settings"]
        self.max_steps, self.gamma = int(max_steps) or None, float(gamma)
        self.replay = self._empty_replay(self.replay.capacity)
        self._load(arrays)
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
        self._load(_read_npz(epath.Path(initial_trajectories_path) / dictionary_file), start_epoch_to_load)

    def state_dict(self) -> dict[str, np.ndarray]:
        """Everything that continues the task: environments, actor, replay, counts, generator.

        Returns:
            Arrays by name; always the same names, with lengths that vary.
        """
        counts = [self._n_trajectories, self._n_interactions]
        counts += [self.n_initial_interactions, self.n_eval_interactions, self.replay.capacity]
        return {
            "counts": np.array(counts),
            "rng": _to_bytes(json.dumps(self.rng.bit_generator.state).encode()),
            "env": _to_bytes(_to_npz(self.env.snapshot() or {})),
            **_flatten("actor", self.actor),
            **_flatten("replay", replay_lib.to_rows(self.replay)),
        }

    def load_state_dict(self, state: Mapping[str, np.ndarray]) -> None:
        """Continues from :meth:`state_dict`.

        An environment whose state cannot be restored starts a new episode, and the log says so.

        Raises:
            ValueError: the state is of another environment, ``num_envs`` or model.
        """
        actor = _unflatten("actor", self.actor, state, 1)
        num_envs = self.env.num_envs
        if len(actor.needs_reset) != num_envs:
            raise ValueError(f"num_envs is {num_envs}; the state has {len(actor.needs_reset)}.")
        self._n_trajectories, self._n_interactions, *others = (int(x) for x in state["counts"])
        self.n_initial_interactions, self.n_eval_interactions, capacity = others
        rows = _unflatten("replay", self.replay[:4], state, 2)
        self.replay = replay_lib.from_rows(rows, capacity, self._frames)
        self.rng.bit_generator.state = json.loads(state["rng"].tobytes())
        snapshot = _from_npz(state["env"].tobytes())
        if snapshot:
            self.env.restore(snapshot)
            restarted = self.env.restarted
            self.actor = actor._replace(
                needs_reset=actor.needs_reset | restarted,
                episode_return=np.where(restarted, 0.0, actor.episode_return),
                episode_length=np.where(restarted, 0, actor.episode_length),
            )
        else:
            _log.warning("env: %s keeps its state to itself; all episodes restart", self.env.name)
            restarted = np.ones(num_envs, bool)
            seed = np.random.SeedSequence([self._eval_seed, self._n_interactions]).generate_state(1)[0]
            first = self.env.reset(int(seed))
            self.actor = rollout_lib.initial_actor(first, num_envs, actor.key, self._no_policy_state)
        replay_lib.end_running(self.replay, restarted)


def _make_envs(
    env: Any, eval_env: Any, prepare: Callable, num_envs: int, time_limit: int | None, backend: str
) -> tuple[HostEnv, Callable[[], HostEnv], Callable[[int], HostEnv]]:
    """The environments, what makes those for evaluation, and what makes more."""
    source = prepare(env)
    made = make_host_env(source, num_envs, time_limit=time_limit, backend=backend)
    more = functools.partial(make_eval_env, source, time_limit=time_limit, backend=backend)
    if eval_env is None:
        return made, functools.partial(make_eval_env, source, made.num_envs, backend=backend), more
    return made, functools.partial(make_host_env, prepare(eval_env), num_envs, backend=backend), more


def _make_device_envs(
    env: Any, eval_env: Any, prepare: Callable, num_envs: int, time_limit: int | None, backend: str
) -> tuple[DeviceEnv, Callable[[], DeviceEnv], Callable[[int], DeviceEnv]]:
    """The same for JAX environments."""
    made = DeviceEnv(env, num_envs, time_limit)
    more = functools.partial(DeviceEnv, env, time_limit=time_limit)
    return made, functools.partial(DeviceEnv, env if eval_env is None else eval_env, num_envs), more


def _check_plain(**arguments: Any) -> None:
    """Refuses what is for environments in Python only."""
    defaults = {"dm_suite": False, "num_stacked_frames": 1, "backend": "auto"}
    for name, value in arguments.items():
        if value != defaults[name]:
            raise ValueError(
                f"{name}={value!r} is for environments in Python, and env is a JAX environment; nearest "
                f"valid value: {defaults[name]!r}"
            )


def _random_act(distribution: Any, num_envs: int) -> Act:
    """Draws from the distribution at inputs 0, whose density is then known.

    That is uniform in finite spaces and the Gaussian of the configured ``std`` in a ``Box``.
    """
    inputs = np.zeros((num_envs, distribution.n_inputs), np.float32)

    @jax.jit
    def draw(key: Any) -> tuple[PyTree, Any]:
        key, key_act = jax.random.split(key)
        return distribution.sample(inputs, key_act), key

    def act(observation: PyTree, policy_state: PyTree, needs_reset: Any, key: Any) -> tuple:
        action, key = draw(key)
        return action, inputs, policy_state, key

    return act


def _batch(slices: list[TimeStep], length: int | None) -> TimeStep:
    """Stacks slices ``[l]`` to ``[N, L]``; see :meth:`RLTask.trajectory_batch_stream`."""
    lengths = np.array([len(steps.mask) for steps in slices])
    end = length or rollout_lib.bucket(int(lengths.max()))
    steps = jax.tree.map(lambda *xs: np.stack([padded(x, end) for x in xs]), *slices)
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


def _unflatten(name: str, like: PyTree, arrays: Mapping[str, np.ndarray], n_axes: int) -> PyTree:
    """The inverse of :func:`_flatten`, in the structure of ``like``; the first axes may be longer."""
    expected, structure = jax.tree.flatten(like)
    count = sum(key.rpartition("_")[0] == name for key in arrays)
    if count != len(expected):
        raise ValueError(f"{name} has {count} arrays in what was saved; this task has {len(expected)}.")
    leaves = [np.array(arrays[f"{name}_{i}"]) for i in range(count)]
    for x, y in zip(leaves, expected, strict=True):
        if x.shape[n_axes:] != np.shape(y)[n_axes:]:
            raise ValueError(f"{name} was saved with shape {x.shape}; this task has {np.shape(y)}.")
    return jax.tree.unflatten(structure, leaves)


def _to_npz(arrays: Mapping[str, np.ndarray]) -> bytes:
    file = io.BytesIO()
    np.savez(file, **arrays)  # type: ignore[arg-type]
    return file.getvalue()


def _from_npz(data: bytes) -> dict[str, np.ndarray]:
    with np.load(io.BytesIO(data), allow_pickle=False) as arrays:
        return dict(arrays)


def _read_npz(file: str | os.PathLike[str]) -> dict[str, np.ndarray]:
    path = epath.Path(file)
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
    made = gymnasium.make(find_spec(env), disable_env_checker=True) if isinstance(env, str) else env()
    return FrameStackObservation(made, n_frames)


def _make_atari(game: str, random_starts: bool, n_frames: int) -> gymnasium.Env:
    if importlib.util.find_spec("cv2") is None:
        raise ImportError("dm_suite: Atari games need the extra 'atari': pip install 'rl_trainers[atari]'")
    name = "".join(word.capitalize() for word in game.split("_"))
    spec = find_spec(game if "/" in game else f"ALE/{name}-v5")
    env = gymnasium.make(spec, disable_env_checker=True, frameskip=1)
    env = AtariPreprocessing(env, noop_max=30 if random_starts else 0)
    stacked = FrameStackObservation(env, n_frames)
    space = gymnasium.spaces.Box(0, 255, (84, 84, n_frames), np.uint8)
    return TransformObservation(stacked, functools.partial(np.moveaxis, source=0, destination=-1), space)
