"""The loss terms: one equation per function, every mean taken over unmasked entries only.

All arguments are f32 ``[N, L]`` unless said otherwise, all results f32 scalars unless said otherwise.
Losses are to be minimised.
"""

from __future__ import annotations

from collections.abc import Sequence

import chex
import jax
import jax.numpy as jnp
import optax

from rl_trainers.types import PyTree


def masked_mean(x: jax.Array, mask: jax.Array) -> jax.Array:
    """Mean of ``x`` where ``mask`` is 1; 0 if it is 1 nowhere."""
    chex.assert_equal_shape([x, mask])
    return jnp.sum(jnp.where(mask > 0, x * mask, 0.0)) / jnp.maximum(jnp.sum(mask), 1e-8)


def masked_means(metrics: dict[str, jax.Array], mask: jax.Array) -> dict[str, jax.Array]:
    """Takes the masked mean of those entries that are rows, in one reduction, and keeps the others.

    Args:
        metrics: f32 ``[N, L]`` or ``[]`` by name.
        mask: f32 ``[N, L]``.

    Returns:
        f32 ``[]`` by name.
    """
    rows = {name: x for name, x in metrics.items() if jnp.ndim(x) == jnp.ndim(mask)}
    stacked = jnp.where(mask > 0, jnp.stack(list(rows.values())) * mask, 0.0)
    means = jnp.sum(stacked, axis=(1, 2)) / jnp.maximum(jnp.sum(mask), 1e-8)
    return {**metrics, **dict(zip(rows, means, strict=True))}


def masked_std(x: jax.Array, mask: jax.Array) -> jax.Array:
    """Standard deviation (of the population) of ``x`` where ``mask`` is 1; 0 if it is 1 nowhere."""
    centered = jnp.where(mask > 0, x - masked_mean(x, mask), 0.0)
    return jnp.sqrt(masked_mean(jnp.square(centered), mask))


def normalize(x: jax.Array, mask: jax.Array, epsilon: float = 1e-5) -> jax.Array:
    """``(x - mean) / (std + epsilon)`` over unmasked entries; 0 for a constant or single entry."""
    centered = jnp.where(mask > 0, x - masked_mean(x, mask), 0.0)
    return centered / (masked_std(x, mask) + epsilon)


def policy_gradient(log_prob: jax.Array, advantage: jax.Array, mask: jax.Array) -> jax.Array:
    """REINFORCE: -E[log pi(a|s) A] (Williams 1992), no gradient through the advantage."""
    return -masked_mean(log_prob * jax.lax.stop_gradient(advantage), mask)


def probability_ratio(log_prob: jax.Array, old_log_prob: jax.Array) -> jax.Array:
    """pi(a|s) / pi_old(a|s), f32 ``[N, L]``."""
    return jnp.exp(log_prob - jax.lax.stop_gradient(old_log_prob))


def clipped_surrogate(
    ratio: jax.Array, advantage: jax.Array, mask: jax.Array, epsilon: float | jax.Array
) -> jax.Array:
    """PPO: -E[min(rho A, clip(rho, 1 - eps, 1 + eps) A)].

    Schulman et al. 2017, https://arxiv.org/abs/1707.06347, eq. 7.

    Args:
        ratio: rho, from :func:`probability_ratio`.
        advantage: A; no gradient flows through it.
        mask: entries that count.
        epsilon: clip range, > 0.
    """
    advantage = jax.lax.stop_gradient(advantage)
    clipped = jnp.clip(ratio, 1.0 - epsilon, 1.0 + epsilon)
    return -masked_mean(jnp.minimum(ratio * advantage, clipped * advantage), mask)


def surrogate_metrics(
    ratio: jax.Array, advantage: jax.Array, epsilon: float | jax.Array
) -> dict[str, jax.Array]:
    """What :func:`clipped_surrogate` is made of, f32 ``[N, L]`` by Trax's names.

    Args:
        ratio: rho, from :func:`probability_ratio`.
        advantage: A.
        epsilon: clip range.
    """
    return {
        "probs_ratio_mean": ratio,
        "unclipped_objective_mean": ratio * advantage,
        "clipped_objective_mean": jnp.clip(ratio, 1 - epsilon, 1 + epsilon) * advantage,
        "clip_fraction": (jnp.abs(ratio - 1) > epsilon).astype(jnp.float32),
        "approximate_kl_divergence": approximate_kl(ratio),
    }


def value_loss(value: jax.Array, target: jax.Array, mask: jax.Array) -> jax.Array:
    """Mean squared error E[(V - target)^2], without a factor 1/2, no gradient through the target."""
    return masked_mean(jnp.square(value - jax.lax.stop_gradient(target)), mask)


def aggregate_values(
    q: jax.Array, weights: jax.Array, how: str, temperature: float | jax.Array = 1.0
) -> jax.Array:
    """The value of a state from values of its actions, f32 ``[..]``; no factor but ``weights``.

    ``'mean'``: sum_j w_j Q_j. ``'max'``: max_j Q_j over actions of positive weight. ``'softmax'``:
    sum_j p_j Q_j with p_j ~ w_j exp(Q_j / tau). ``'logsumexp'``: tau log sum_j w_j exp(Q_j / tau), the
    soft maximum. The last two go to the mean for tau -> infinity and to the maximum for tau -> 0.
    QWR, Kozakowski et al. 2021, https://arxiv.org/abs/2102.06782, section 3.3.

    Args:
        q: f32 ``[K, ..]``.
        weights: f32 ``[K, ..]``, sum 1 over K: 1/K for samples, the probabilities for all actions.
        how: one of the four.
        temperature: tau > 0.
    """
    chex.assert_equal_shape([q, weights])
    if how == "mean":
        return jnp.sum(weights * q, 0)
    if how == "max":
        return jnp.max(jnp.where(weights > 0, q, -jnp.inf), 0)
    scaled = q / temperature + jnp.log(weights)
    if how == "softmax":
        return jnp.sum(jax.nn.softmax(scaled, 0) * q, 0)
    return temperature * jax.nn.logsumexp(scaled, 0)


def value_spread(q: jax.Array, weights: jax.Array, mask: jax.Array, how: str | None) -> jax.Array:
    """How far values of actions lie apart, over all states and actions, f32 ``[]``; at least 1e-6.

    ``'std'``: standard deviation; ``'abs'``: mean absolute deviation; ``None``: 1. Aggregating ``q / spread``
    and multiplying the result by ``spread`` adapts the temperature to the scale of the returns, as in Trax.

    Args:
        q: f32 ``[K, N, L]``.
        weights: f32 ``[K, N, L]``, sum 1 over K.
        mask: f32 ``[N, L]``.
        how: ``'std'``, ``'abs'`` or ``None``.
    """
    if how is None:
        return jnp.float32(1.0)
    weights = weights * mask
    if how == "std":
        return jnp.maximum(masked_std(q, weights), 1e-6)
    return jnp.maximum(masked_mean(jnp.abs(q - masked_mean(q, weights)), weights), 1e-6)


def awr_weights(
    advantage: jax.Array, beta: float | jax.Array, w_max: float | jax.Array
) -> jax.Array:
    """min(exp(A / beta), w_max), f32 ``[N, L]``.

    Peng et al. 2019, https://arxiv.org/abs/1910.00177, algorithm 1 and section 4 (weight clipping).
    """
    return jnp.minimum(jnp.exp(jnp.minimum(advantage / beta, 80.0)), w_max)


def threshold_weights(
    advantage: jax.Array, mask: jax.Array, thresholds: Sequence[tuple[float, float, float]]
) -> jax.Array:
    """Sum of weights of the percentiles that each advantage reaches, f32 ``[N, L]``.

    Args:
        advantage: A.
        mask: entries that the percentiles are taken over.
        thresholds: ``(percentile, weight, minimum)`` triples; ``weight`` is added wherever
            ``A >= max(percentile of A, minimum)``.
    """
    known = jnp.where(mask > 0, advantage, jnp.nan)
    weights = jnp.zeros_like(advantage)
    for percentile, weight, minimum in thresholds:
        bar = jnp.maximum(jnp.nanpercentile(known, percentile), minimum)
        weights += jnp.where(advantage >= bar, weight, 0.0)
    return jnp.where(mask > 0, weights, 0.0)


def regression_weights(
    advantage: jax.Array,
    mask: jax.Array,
    hparams: dict,
    thresholds: Sequence[tuple[float, float, float]] | None,
) -> jax.Array:
    """:func:`threshold_weights` if there are thresholds, else :func:`awr_weights`.

    Args:
        advantage: A.
        mask: entries that percentiles are taken over.
        hparams: ``beta`` and ``w_max``.
        thresholds: see :func:`threshold_weights`; ``None`` for exponential weights.
    """
    if thresholds is None:
        return awr_weights(advantage, hparams["beta"], hparams["w_max"])
    return threshold_weights(advantage, mask, thresholds)


def approximate_kl(ratio: jax.Array) -> jax.Array:
    """``rho - 1 - log rho``, whose mean estimates KL(pi_old || pi); never negative; f32 ``[N, L]``.

    Schulman 2020, http://joschu.net/blog/kl-approx.html (estimator k3).
    """
    return ratio - 1.0 - jnp.log(ratio)


def explained_variance(value: jax.Array, target: jax.Array, mask: jax.Array) -> jax.Array:
    """1 - Var(target - V) / Var(target): 1 for a perfect critic, 0 for a constant one.

    If the targets are constant it is 1 for an exact fit and 0 otherwise; never NaN.
    """
    both = {"residual": target - value, "target": target}
    means = masked_means(both, mask)
    squares = {name: jnp.square(x - means[name]) for name, x in both.items()}
    residual, variance = masked_means(squares, mask).values()
    constant = jnp.where(residual < 1e-12, 1.0, 0.0)
    return jnp.where(variance < 1e-12, constant, 1.0 - residual / jnp.maximum(variance, 1e-12))


def weight_metrics(weights: jax.Array, mask: jax.Array, w_max: float | jax.Array) -> dict:
    """How weights spread: ``awr_weight_{mean, std, min, max}`` and the share that stands at ``w_max``."""
    return {
        "awr_weight_mean": masked_mean(weights, mask),
        "awr_weight_std": masked_std(weights, mask),
        "awr_weight_min": jnp.min(jnp.where(mask > 0, weights, jnp.inf)),
        "awr_weight_max": jnp.max(jnp.where(mask > 0, weights, 0.0)),
        "awr_weight_clipped": masked_mean((weights >= w_max).astype(jnp.float32), mask),
    }


def preferred_move(mode: PyTree, mask: jax.Array) -> jax.Array:
    """The greedy action, averaged over its dimensions, f32 ``[N, L]``.

    Args:
        mode: ``[N, L, *act]``.
        mask: f32 ``[N, L]``.
    """
    leaves = [x.reshape(*mask.shape, -1).astype(jnp.float32) for x in jax.tree.leaves(mode)]
    return jnp.concatenate(leaves, -1).mean(-1)


def huber_loss(value: jax.Array, target: jax.Array, mask: jax.Array) -> jax.Array:
    """E[h(V - target)], h(x) = x^2 / 2 within [-1, 1] and |x| - 1/2 outside; no gradient through the target.

    Huber 1964, https://doi.org/10.1214/aoms/1177703732, eq. 3.5, as in Mnih et al. 2015.
    """
    return masked_mean(optax.huber_loss(value, jax.lax.stop_gradient(target)), mask)


def greedy_value(q: jax.Array, q_choice: jax.Array) -> jax.Array:
    """Q(s, argmax_a Q'(s, a)), f32 ``[..]``.

    With Q' = Q it is the maximum; with Q' of other parameters, double Q-learning (van Hasselt et al. 2016,
    https://arxiv.org/abs/1509.06461, eq. 4).

    Args:
        q: f32 ``[.., A]``, what values the choice.
        q_choice: f32 ``[.., A]``, what chooses.
    """
    choice = jnp.argmax(q_choice, axis=-1, keepdims=True)
    return jnp.take_along_axis(q, choice, axis=-1)[..., 0]


def soft_value(q: jax.Array, log_prob: jax.Array, weight: jax.Array, alpha: jax.Array) -> jax.Array:
    """E_a[Q(s, a) - alpha log pi(a|s)], f32 ``[N, L]``.

    Haarnoja et al. 2018, https://arxiv.org/abs/1801.01290, eq. 3; with alpha 0, the plain expectation.

    Args:
        q: f32 ``[K, N, L]`` of ``K`` actions.
        log_prob: f32 ``[K, N, L]``.
        weight: f32 ``[K, N, L]``, the share of each action, sum 1 over ``K``.
        alpha: f32 ``[]``, the temperature.
    """
    return jnp.sum(weight * (q - alpha * log_prob), axis=0)


def temperature_loss(
    log_alpha: jax.Array, entropy: jax.Array, target_entropy: float | jax.Array
) -> jax.Array:
    """log(alpha) (H - H_target), f32 ``[]``: alpha rises while the entropy H is below its target.

    Haarnoja et al. 2018, https://arxiv.org/abs/1812.05905, eq. 18, with log(alpha) in place of alpha.
    """
    return log_alpha * jax.lax.stop_gradient(entropy - target_entropy)
