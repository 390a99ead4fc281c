"""One step of each optimizer by its formula; schedules by hand."""

import jax.numpy as jnp
import numpy as np
import optax
import pytest

from rl_trainers import optimizers

W, G, LR = np.float32(2.0), np.float32(0.5), 0.1


def one_step(optimizer):
    state = optimizer.init(jnp.asarray(W))
    updates, _ = optimizer.update(jnp.asarray(G), state, jnp.asarray(W))
    return float(optax.apply_updates(jnp.asarray(W), updates))


def test_adam_first_step_moves_by_the_learning_rate():
    # m / sqrt(v) is g / |g| after bias correction, up to eps; weights decay apart from it.
    want = W * (1 - 1e-5) - LR * G / (np.sqrt(G * G) + 1e-5)
    assert one_step(optimizers.Adam(LR)) == pytest.approx(want, abs=1e-6)


def test_rmsprop_accumulators_start_at_one():
    want = W - LR * G / (np.sqrt(0.9 * 1.0 + 0.1 * G * G) + 1e-8)
    assert one_step(optimizers.RMSProp(LR)) == pytest.approx(want, abs=1e-6)


def test_momentum_with_nesterov():
    # Velocity g, looked ahead: .9 g + g.
    want = W * (1 - 1e-5) - LR * 1.9 * G
    assert one_step(optimizers.Momentum(LR)) == pytest.approx(want, abs=1e-6)
    want = W * (1 - 1e-5) - LR * G
    assert one_step(optimizers.Momentum(LR, nesterov=False)) == pytest.approx(want, abs=1e-6)


def test_sgd():
    assert one_step(optimizers.SGD(LR)) == pytest.approx(W - LR * G)


def test_adafactor_is_relative_to_the_parameter():
    # First step: g / |g| = 1, scaled by the parameter's root mean square.
    want = W * (1 - 1e-5) - LR * W
    assert one_step(optimizers.Adafactor(LR)) == pytest.approx(want, abs=1e-5)


def test_weight_decay_does_not_depend_on_the_learning_rate():
    optimizer, _ = optimizers.resolve(optimizers.Adam, 0.5)
    state = optimizer.init(jnp.asarray(W))
    state = state._replace(hyperparams={"learning_rate": jnp.float32(0.0)})
    updates, _ = optimizer.update(jnp.asarray(G), state, jnp.asarray(W))
    assert float(updates) == pytest.approx(-W * 1e-5, rel=1e-4)


@pytest.mark.parametrize(
    ("settings", "step", "want"),
    [
        ({}, 200, 0.0025),
        ({}, 400, 0.005),
        ({}, 1600, 0.1 / 40),
        ({"factors": "constant", "constant": 0.3}, 77, 0.3),
        ({"factors": "constant * linear_warmup", "warmup_steps": 10}, 5, 0.05),
        (
            {
                "factors": "constant * decay_every",
                "constant": 1.0,
                "decay_factor": 0.995,
                "steps_per_decay": 1,
                "minimum": 0.1,
            },
            1,
            0.995,
        ),
        (
            {
                "factors": "constant * decay_every",
                "constant": 1.0,
                "decay_factor": 0.995,
                "steps_per_decay": 1,
                "minimum": 0.1,
            },
            10_000,
            0.1,
        ),
        ({"factors": "constant * rsqrt_normalized_decay"}, 1600, 0.05),
        ({"factors": "two_constants"}, 9_999, 0.1),
        ({"factors": "two_constants"}, 10_000, 0.01),
        ({"factors": "constant * cosine_decay", "warmup_steps": 0}, 50_000, 0.05),
        ({"factors": "constant * linear_decay", "steps_per_cycle": 100}, 25, 0.075),
        ({"factors": "constant * linear_decay", "steps_per_cycle": 100}, 200, 0.0),
    ],
)
def test_multifactor(settings, step, want):
    assert float(optimizers.multifactor(**settings)(step)) == pytest.approx(want, rel=1e-6)


def test_unknown_factor_names_the_nearest():
    with pytest.raises(ValueError, match="'linear_warmup'"):
        optimizers.multifactor("constant * linear_warmpu")


def test_learning_rates_of_the_coming_steps():
    schedule = optimizers.multifactor("constant * linear_warmup", constant=1.0, warmup_steps=10)
    got = optimizers.learning_rates(schedule, 3, 4)
    np.testing.assert_allclose(got, [0.4, 0.5, 0.6, 0.7], rtol=1e-6)
    got = optimizers.learning_rates(lambda step: 0.1 if step < 2 else 0.2, 0, 3)
    np.testing.assert_allclose(got, [0.1, 0.2, 0.2], rtol=1e-6)
    got = optimizers.learning_rates(optax.linear_schedule(1.0, 0.0, 10), 0, 2)
    np.testing.assert_allclose(got, [0.9, 0.8], rtol=1e-6)


def test_forms_of_a_schedule():
    for form in (0.25, lambda step: 0.25, lambda: lambda step: 0.25):
        assert optimizers.resolve_schedule(form)(7) == pytest.approx(0.25)
    with pytest.raises(TypeError, match="lr_schedule='fast'"):
        optimizers.resolve_schedule("fast")


def test_forms_of_an_optimizer():
    finished, _ = optimizers.resolve(optax.sgd(0.5), None)
    assert one_step(finished) == pytest.approx(W - 0.5 * G)
    with pytest.raises(ValueError, match="lr_schedule has no effect"):
        optimizers.resolve(optax.sgd(0.5), 0.1)
    with pytest.raises(TypeError, match="optimizer='adam'"):
        optimizers.resolve("adam", None)
    assert optimizers.resolve(None, None)[0].clip_grad_norm == 0.5
