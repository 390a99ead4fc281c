"""Value targets from rewards and value estimates, with ends of episodes done right.

Every estimator is a factory ``(gamma, ...) -> estimate(steps, values, rho)``, so that a gin file can bind its
settings and a trainer supplies ``gamma``. An advantage is always ``target - value``.

One rule covers terminations, time limits, slices that are cut, reset rows and padding:
``discount = gamma * (1 - terminated)`` says how much of the successor's value counts, and the trace is
cut (the target bootstraps from the successor's value alone) wherever the next row does not continue the
episode.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import chex
import gin
import jax
import jax.numpy as jnp
import rlax

from rl_trainers.types import TimeStep

Estimator = Callable[[TimeStep, jax.Array, jax.Array], jax.Array]
"""``(steps [T, B], values f32 [T + 1, B], rho f32 [T, B]) -> value targets f32 [T, B]``.

``rho`` is the probability of each action under the policy that learns over that under the one that acted.
"""


def discounts(steps: TimeStep, gamma: float) -> jax.Array:
    """How much the value of each row's successor counts.

    Args:
        steps: ``[T, B]``.
        gamma: discount factor per step, in [0, 1].

    Returns:
        f32 ``[T, B]``: 0 after a termination, 1 where ``discount_mask`` is 0 (no time passes), ``gamma``
        elsewhere.
    """
    discount_mask = jnp.asarray(steps.env_info.discount_mask, jnp.float32)
    per_step = jnp.where(discount_mask > 0, gamma, 1.0)
    return per_step * (1.0 - steps.terminated.astype(jnp.float32))


def continues(steps: TimeStep) -> jax.Array:
    """f32 ``[T, B]``, 1 where the next row is a decision of the same episode.

    The row after the last one is not known to be anything else, so the last row counts as continuing;
    its target bootstraps from the last value in any case.
    """
    following = jnp.concatenate([steps.mask[1:], jnp.ones_like(steps.mask[:1])])
    return (1.0 - steps.done.astype(jnp.float32)) * steps.mask * following


def lambda_returns(
    steps: TimeStep, values: jax.Array, gamma: float, lambda_: float | jax.Array
) -> jax.Array:
    """Lambda-returns G[t] = r[t] + d[t] ((1 - l[t]) V[t+1] + l[t] G[t+1]), with l[t] = 0 at ends and cuts.

    Sutton and Barto, Reinforcement Learning (2018), eq. 12.18; minus the value it is generalised
    advantage estimation (Schulman et al. 2016, https://arxiv.org/abs/1506.02438, eq. 16).

    Args:
        steps: ``[T, B]``; rewards of any dtype.
        values: f32 ``[T + 1, B]``, estimates for every row's observation and for the last observation.
        gamma: discount factor per step.
        lambda_: mixing parameter in [0, 1], a scalar or f32 ``[T, B]``.

    Returns:
        f32 ``[T, B]``; entries of rows with mask 0 mean nothing.
    """
    chex.assert_rank([steps.reward, values], [2, 2])
    chex.assert_equal(values.shape[0], steps.reward.shape[0] + 1)
    rewards = jnp.asarray(steps.reward, jnp.float32)
    return jax.vmap(rlax.lambda_returns, in_axes=1, out_axes=1)(
        rewards, discounts(steps, gamma), values[1:], lambda_ * continues(steps)
    )


@gin.configurable(module="rl_trainers.advantages", denylist=["gamma"])
def td_lambda(gamma: float, lambda_: float = 0.95) -> Estimator:
    """Lambda-returns that bootstrap at time limits and cuts; see :func:`lambda_returns`.

    Args:
        gamma: discount factor per step.
        lambda_: 0 gives one-step temporal differences, 1 gives Monte Carlo returns.
    """
    return lambda steps, values, rho: lambda_returns(steps, values, gamma, lambda_)


@gin.configurable(module="rl_trainers.advantages", denylist=["gamma"])
def gae(gamma: float, lambda_: float = 0.95) -> Estimator:
    """Targets whose advantages are generalised advantage estimates.

    GAE(lambda) equals TD(lambda) minus the value for every input (Schulman et al. 2016, eq. 16), so this
    is :func:`td_lambda` with a ``lambda_`` of its own.

    Args:
        gamma: discount factor per step.
        lambda_: mixing parameter in [0, 1].
    """
    return lambda steps, values, rho: lambda_returns(steps, values, gamma, lambda_)


@gin.configurable(module="rl_trainers.advantages", denylist=["gamma"])
def monte_carlo(gamma: float) -> Estimator:
    """Discounted returns to the end of the episode; a cut adds the discounted value of what follows.

    Args:
        gamma: discount factor per step.
    """
    return lambda steps, values, rho: lambda_returns(steps, values, gamma, 1.0)


@gin.configurable(module="rl_trainers.advantages", denylist=["gamma", "margin"])
def td_k(gamma: float, margin: int = 1) -> Estimator:
    """``margin`` rewards, then the value of what follows; fewer rewards at an end or a cut.

    Sutton and Barto, Reinforcement Learning (2018), eq. 7.9.

    Args:
        gamma: discount factor per step.
        margin: rewards before the value, the ``n`` of n-step returns; trainers pass
            ``added_policy_slice_length``, and 0 means 1.
    """

    def estimate(steps, values, rho):
        column = functools.partial(rlax.n_step_bootstrapped_returns, n=max(1, margin))
        rewards = jnp.asarray(steps.reward, jnp.float32)
        # Where the trace is cut, the sum stops and the successor's value stands for the rest.
        inputs = (rewards, discounts(steps, gamma), values[1:], continues(steps))
        return jax.vmap(lambda r, d, v, c: column(r, d, v, lambda_t=c), 1, 1)(*inputs)

    return estimate


@gin.configurable(module="rl_trainers.advantages", denylist=["gamma"])
def vtrace(
    gamma: float, lambda_: float = 1.0, clip_rho_threshold: float = 1.0
) -> Estimator:
    """Targets for the policy that learns, from data of another one.

    Espeholt et al. 2018, https://arxiv.org/abs/1802.01561, eq. 1. With equal policies it is
    :func:`td_lambda`.

    Args:
        gamma: discount factor per step.
        lambda_: mixing parameter in [0, 1].
        clip_rho_threshold: largest weight of a temporal difference.
    """

    def estimate(steps, values, rho):
        rewards = jnp.asarray(steps.reward, jnp.float32)
        column = functools.partial(
            rlax.vtrace, clip_rho_threshold=clip_rho_threshold, stop_target_gradients=False
        )
        inputs = (values[:-1], values[1:], rewards, discounts(steps, gamma), rho)
        errors = jax.vmap(column, in_axes=1, out_axes=1)(*inputs, lambda_ * continues(steps))
        return values[:-1] + errors

    estimate.corrects_lag = True  # type: ignore[attr-defined]
    return estimate


def corrects_lag(estimator: Estimator) -> bool:
    """Whether advantages are right for data of an older policy than the one that learns."""
    return getattr(estimator, "corrects_lag", False)
