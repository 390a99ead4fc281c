"""The array records that every part of rl_trainers passes on, and the glossary of their axes.

Axes, as they are named in every docstring:

====== =====================================================================
``T``  length of an unroll: vector steps between two visits of the learner
``B``  environments stepped side by side
``N``  rows of a training batch
``L``  length of a slice within a batch; 1 for feed-forward models
``D``  numbers that parametrise an action distribution (``dist_inputs``)
*obs*  shape of one observation; *act* shape of one action
====== =====================================================================

A record holds facts or parameters; estimates (values, advantages) are computed from it where they are
needed. Observations and actions may be pytrees (``Dict`` and ``Tuple`` spaces): every leaf then has the
leading axes given here.

**End of an episode.** When a step ends an episode, the next row of that environment is its *reset row*:
its action is ignored, its reward is 0, its ``mask`` is 0 and its observation is the last observation of
the episode that ended. So ``observation[t + 1]`` is always the true successor of row ``t``. This is
Gymnasium's next-step autoreset, ALF's ``LAST`` step and Trax's margin row.
"""

from __future__ import annotations

from typing import Any, NamedTuple

PyTree = Any
"""A nest of tuples, dicts and arrays."""


class EnvInfo(NamedTuple):
    """Per-step facts that sequence environments report in their ``info``; both default to ones.

    Attributes:
        control_mask: f32, 1 where the action had an effect on the environment.
        discount_mask: f32, 1 where time passes, so that the discount applies.
    """

    control_mask: Any = 1.0
    discount_mask: Any = 1.0


class Seen(NamedTuple):
    """What a sequence or recurrent model sees of a row; all other models see the observation alone.

    Attributes:
        observation: ``[.., *obs]``.
        episode: i32, number of the episode that the row belongs to, from 1 on and rising with time; 0
            where there is no row.
        state: recurrent state before the row, of which a recurrent model takes those of the first row it is
            given and of the first one of each episode; ``()`` for other models.
    """

    observation: PyTree
    episode: Any
    state: PyTree = ()


class TimeStep(NamedTuple):
    """Facts of one step; ``[T, B]`` leading axes in a rollout, ``[N, L]`` in a batch.

    Attributes:
        observation: ``[.., *obs]`` what the agent saw before it acted.
        action: ``[.., *act]`` as sampled, before it was clipped for the environment.
        reward: f32, as the environment gave it.
        terminated: bool, the decision process ended with this step.
        truncated: bool, a limit cut the episode after this step; the next row's observation is its
            true successor.
        mask: f32, 0 where no decision was taken (reset row, padding).
        dist_inputs: f32 ``[.., D]`` of the distribution that the action was sampled from.
        policy_state: recurrent state before this step, ``()`` if there is none.
        env_info: :class:`EnvInfo`.
        return_: f32, discounted return from this step to the end of the trajectory, where whole
            trajectories are known; ``None`` elsewhere.
    """

    observation: PyTree
    action: PyTree
    reward: Any
    terminated: Any
    truncated: Any
    mask: Any
    dist_inputs: Any = None
    policy_state: PyTree = ()
    env_info: EnvInfo = EnvInfo()
    return_: Any = None

    @property
    def done(self) -> Any:
        """bool, whether the episode ended with this step, for either reason."""
        return self.terminated | self.truncated


class Rollout(NamedTuple):
    """What ``B`` environments did in ``T`` steps.

    Attributes:
        steps: :class:`TimeStep` with leading axes ``[T, B]``.
        last_observation: ``[B, *obs]`` the successor of row ``T - 1``.
        policy_version: i32 ``[]``, optimizer steps taken by the parameters that acted.
    """

    steps: TimeStep
    last_observation: PyTree
    policy_version: Any = 0


class Batch(NamedTuple):
    """What a loss sees, and nothing else; leading axes ``[N, L]``.

    Batches of single rows, whose ``L`` would be 1, come as ``[1, N]``.

    Attributes:
        observation: ``[N, L, *obs]``.
        action: ``[N, L, *act]``.
        dist_inputs: f32 ``[N, L, D]`` of the behaviour policy.
        advantage: f32 ``[N, L]``.
        value_target: f32 ``[N, L]``.
        mask: f32 ``[N, L]``, 0 for rows that take no part.
        policy_state: recurrent state before the slice, leading axis ``[N]``; ``()`` if none.
    """

    observation: PyTree
    action: PyTree
    dist_inputs: Any
    advantage: Any
    value_target: Any
    mask: Any
    policy_state: PyTree = ()


class TrainState(NamedTuple):
    """Everything that learning changes.

    Attributes:
        params: one dict with the keys ``'shared'``, ``'policy'``, ``'value'`` (those that exist).
        model_state: statistics that models gather, such as a normaliser's.
        opt_state: optimizer state by the name of the supervised trainer.
        key: PRNG key, u32 ``[2]``.
        step: i32, optimizer steps taken = policy version.
        target_params: a copy of parameters that lags behind, ``()`` if none.
    """

    params: PyTree
    model_state: PyTree
    opt_state: PyTree
    key: Any
    step: Any
    target_params: PyTree = ()


class ActorState(NamedTuple):
    """Everything that acting changes; leading axis ``[B]``.

    Attributes:
        env_state: state of functional environments; ``()`` for host environments, which keep their own.
        observation: ``[B, *obs]`` what the next action will be chosen for.
        policy_state: recurrent state, ``()`` if none.
        needs_reset: bool ``[B]``, the next step is a reset row.
        key: PRNG key, u32 ``[2]``.
        episode_return: f32 ``[B]``, sum of rewards of the running episode.
        episode_length: i32 ``[B]``, decisions taken in the running episode.
    """

    env_state: PyTree
    observation: PyTree
    policy_state: PyTree
    needs_reset: Any
    key: Any
    episode_return: Any
    episode_length: Any
