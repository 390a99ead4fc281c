"""Losses against values worked out by hand."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rl_trainers import losses


def column(*values):
    return jnp.asarray(values, jnp.float32)[:, None]


ONES = column(1, 1, 1, 1)


def test_masked_mean_and_std_ignore_masked_entries():
    x, mask = column(1, 3, 100), column(1, 1, 0)
    assert float(losses.masked_mean(x, mask)) == pytest.approx(2.0)
    assert float(losses.masked_std(x, mask)) == pytest.approx(1.0)


def test_everything_masked_gives_zero_loss_and_zero_gradient():
    def loss(log_prob):
        return losses.policy_gradient(log_prob, column(1, 2), column(0, 0))

    value, grad = jax.value_and_grad(loss)(column(-1, -2))
    assert float(value) == 0.0
    np.testing.assert_array_equal(grad, np.zeros((2, 1)))


@pytest.mark.parametrize("x", [column(3.0), column(5, 5, 5)])
def test_normalize_of_single_or_constant_entries_is_zero(x):
    np.testing.assert_array_equal(losses.normalize(x, jnp.ones_like(x)), jnp.zeros_like(x))


def test_normalize_by_hand():
    # Mean 2, deviation 1; the masked 100 takes no part.
    got = losses.normalize(column(1, 3, 100), column(1, 1, 0), epsilon=0.0)
    np.testing.assert_allclose(got, column(-1, 1, 0), atol=1e-6)


def test_policy_gradient_by_hand():
    # -(ln .5 * 2 + ln .25 * -1) / 2
    got = losses.policy_gradient(jnp.log(column(0.5, 0.25)), column(2, -1), column(1, 1))
    assert float(got) == pytest.approx(-(np.log(0.5) * 2 - np.log(0.25)) / 2)


def test_clipped_surrogate_by_hand():
    # Ratios 1.5, .5 with advantages of both signs, epsilon .2:
    # min(1.5, 1.2) = 1.2; min(-1.5, -1.2) = -1.5; min(.5, .8) = .5; min(-.5, -.8) = -.8
    ratio, advantage = column(1.5, 1.5, 0.5, 0.5), column(1, -1, 1, -1)
    got = losses.clipped_surrogate(ratio, advantage, ONES, 0.2)
    assert float(got) == pytest.approx(-(1.2 - 1.5 + 0.5 - 0.8) / 4)


def test_clipped_surrogate_has_no_gradient_where_the_clip_is_active():
    grad = jax.grad(lambda r: losses.clipped_surrogate(r, column(1, -1, 1, -1), ONES, 0.2))(
        column(1.5, 1.5, 0.5, 0.5)
    )
    np.testing.assert_allclose(grad, column(0, 0.25, -0.25, 0), atol=1e-6)


def test_value_loss_is_the_mean_square_without_a_half():
    got = losses.value_loss(column(1, 2, 9), column(3, 2, 0), column(1, 1, 0))
    assert float(got) == pytest.approx(2.0)


def test_awr_weights_by_hand():
    got = losses.awr_weights(column(0, 1, 2, 1000), beta=1.0, w_max=5.0)
    np.testing.assert_allclose(got, column(1, np.e, 5, 5), rtol=1e-6)
    np.testing.assert_allclose(
        losses.awr_weights(column(1.0), beta=0.5, w_max=20.0), column(np.exp(2)), rtol=1e-6
    )


def test_threshold_weights_by_hand():
    x = column(*range(1, 11))
    got = losses.threshold_weights(x, jnp.ones_like(x), ((70, 1.0, 0.0), (90, 4.0, 0.0)))
    np.testing.assert_array_equal(got, column(0, 0, 0, 0, 0, 0, 0, 1, 1, 5))


def test_threshold_weights_minimum():
    x = column(-3, -2, -1)
    got = losses.threshold_weights(x, jnp.ones_like(x), ((50, 1.0, 0.0),))
    np.testing.assert_array_equal(got, column(0, 0, 0))


def test_approximate_kl_is_not_negative():
    # Log ratios 1 and -1, whose mean is 0: (e - 1 - 1 + 1/e - 1 + 1) / 2 = .5431
    ratio = jnp.exp(column(1, -1))
    got = losses.approximate_kl(ratio)
    np.testing.assert_allclose(got, column(np.e - 2, 1 / np.e), rtol=1e-5)
    assert float(got.mean()) == pytest.approx(0.5431, abs=1e-4)
    np.testing.assert_array_equal(losses.approximate_kl(column(1, 1)), column(0, 0))


@pytest.mark.parametrize(
    ("value", "target", "expected"),
    [
        ((1, 2, 3), (1, 2, 3), 1.0),
        ((2, 2, 2), (1, 2, 3), 0.0),
        ((5, 5, 5), (5, 5, 5), 1.0),
        ((1, 2, 3), (5, 5, 5), 0.0),
        ((1, 2, 4), (1, 2, 3), 2 / 3),
    ],
)
def test_explained_variance(value, target, expected):
    # Last row: residuals 0, 0, -1 have variance 2/9, the targets 2/3.
    got = losses.explained_variance(column(*value), column(*target), column(1, 1, 1))
    assert float(got) == pytest.approx(expected, abs=1e-6)


def test_weight_metrics():
    got = losses.weight_metrics(column(1, 3, 20, 99), column(1, 1, 1, 0), 20.0)
    assert float(got["awr_weight_mean"]) == pytest.approx(8.0)
    assert float(got["awr_weight_min"]) == 1.0
    assert float(got["awr_weight_max"]) == 20.0
    assert float(got["awr_weight_clipped"]) == pytest.approx(1 / 3)


LOSSES = {
    "masked_mean": lambda x, y, m: losses.masked_mean(x, m),
    "masked_std": lambda x, y, m: losses.masked_std(x, m),
    "normalize": lambda x, y, m: jnp.sum(jnp.square(losses.normalize(x, m)) * m * y),
    "policy_gradient": lambda x, y, m: losses.policy_gradient(x, y, m),
    "clipped": lambda x, y, m: losses.clipped_surrogate(jnp.exp(x), y, m, 0.2),
    "value": lambda x, y, m: losses.value_loss(x, y, m),
    "thresholds": lambda x, y, m: jnp.sum(x * losses.threshold_weights(y, m, ((50, 1.0, -9.0),))),
    "means": lambda x, y, m: sum(losses.masked_means({"x": x * y, "y": y, "c": x.sum() * 0}, m).values()),
    "explained_variance": lambda x, y, m: losses.explained_variance(x, y, m),
}


@pytest.mark.parametrize("name", LOSSES)
def test_masked_rows_change_neither_value_nor_gradient(name):
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(2, 5, 1)).astype(np.float32)
    mask = np.ones((5, 1), np.float32)
    junk = np.full((3, 1), 1e3, np.float32)
    value, grad = jax.value_and_grad(LOSSES[name])(x, y, mask)
    padded = [np.concatenate([a, j]) for a, j in ((x, junk * 0 + 7), (y, junk), (mask, 0 * junk))]
    padded_value, padded_grad = jax.value_and_grad(LOSSES[name])(*padded)
    np.testing.assert_allclose(padded_value, value, atol=1e-6)
    np.testing.assert_allclose(padded_grad[:5], grad, atol=1e-6)
    np.testing.assert_allclose(padded_grad[5:], 0 * junk, atol=1e-6)
