"""Value targets against tables worked out by hand and against plain per-episode recursions."""

import hypothesis
import hypothesis.strategies as st
import jax.numpy as jnp
import numpy as np
import pytest

from rl_trainers import advantages
from rl_trainers.types import EnvInfo, TimeStep


def make_steps(reward, terminated=None, truncated=None, mask=None, discount_mask=None):
    """Steps of one environment, ``[T, 1]``."""
    reward = np.asarray(reward)
    zeros = np.zeros(reward.shape, bool)

    def col(x, default):
        return jnp.asarray(default if x is None else np.asarray(x))[:, None]

    return TimeStep(
        observation=None,
        action=None,
        reward=jnp.asarray(reward)[:, None],
        terminated=col(terminated, zeros).astype(bool),
        truncated=col(truncated, zeros).astype(bool),
        mask=col(mask, ~zeros).astype(jnp.float32),
        env_info=EnvInfo(1.0, col(discount_mask, ~zeros).astype(jnp.float32)),
    )


def targets(steps, values, gamma, lambda_):
    values = jnp.asarray(values, jnp.float32)[:, None]
    return np.asarray(advantages.lambda_returns(steps, values, gamma, lambda_))[:, 0]


@pytest.mark.parametrize("dtype", [np.int32, np.uint8, np.float32, bool])
def test_integer_rewards_do_not_truncate_returns(dtype):
    steps = make_steps(np.ones(3, dtype), terminated=[0, 0, 1])
    np.testing.assert_allclose(targets(steps, [0] * 4, 0.9, 1.0), [2.71, 1.9, 1.0], rtol=1e-6)


def test_time_limit_bootstraps_and_termination_does_not():
    # Reward 1 for ever, gamma .9, so V = 10: all advantages are 0 under a time limit.
    reward, end = [1] * 10, [0] * 9 + [1]
    values = [10.0] * 11
    cut = targets(make_steps(reward, truncated=end), values, 0.9, 0.95)
    np.testing.assert_allclose(cut, [10.0] * 10, atol=1e-5)
    died = targets(make_steps(reward, terminated=end), values, 0.9, 0.95)
    assert died[-1] - 10 == pytest.approx(-9.0, abs=1e-5)


def test_the_next_episode_does_not_leak_into_a_truncated_one():
    first = [1] * 10
    end = [0] * 9 + [1] + [0] * 4
    mask = [1] * 10 + [0] + [1] * 3
    values = [10.0] * 15
    for later in (0, 1000):
        steps = make_steps([*first, 0, later, later, later], truncated=end, mask=mask)
        got = targets(steps, values, 0.9, 0.95)[:10]
        np.testing.assert_allclose(got, [10.0] * 10, atol=1e-5)


@pytest.mark.parametrize("lambda_", [0.0, 0.95])
def test_a_cut_slice_bootstraps_from_its_next_row(lambda_):
    # Reward 1, gamma .99, V 5: r + gamma V = 5.95 at the last real row, whatever follows.
    steps = make_steps([1, 1, 1, 0, 0], mask=[1, 1, 1, 0, 0])
    assert targets(steps, [5.0] * 6, 0.99, lambda_)[2] == pytest.approx(5.95)


def test_monte_carlo_adds_the_value_of_what_follows_a_cut():
    steps = make_steps([1, 1, 1])
    got = targets(steps, [5.0] * 4, 0.99, 1.0)
    np.testing.assert_allclose(got, [7.8216, 6.8905, 5.95], atol=1e-4)


def test_terminal_advantage_keeps_the_baseline():
    steps = make_steps([1], terminated=[1])
    assert targets(steps, [20.0, 33.0], 0.9, 0.95)[0] - 20 == pytest.approx(-19.0)


def test_discount_mask_lets_time_pass_only_where_it_is_set():
    steps = make_steps([0, 0, 1], discount_mask=[0, 0, 1], terminated=[0, 0, 1])
    np.testing.assert_allclose(targets(steps, [0] * 4, 0.9, 1.0), [1, 1, 1])
    steps = make_steps([0, 0, 1] * 2, discount_mask=[0, 0, 1] * 2, terminated=[0] * 5 + [1])
    got = targets(steps, [0] * 7, 0.5, 1.0)
    np.testing.assert_allclose(got, [1.5, 1.5, 1.5, 1, 1, 1])


def test_one_step_default_is_not_zero():
    # A rollout of one row per environment has the one-step target r + gamma V'.
    steps = make_steps([2.0])
    assert targets(steps, [0.0, 10.0], 0.5, 0.95)[0] == pytest.approx(7.0)


def gae_of_one_episode(reward, values, bootstrap, gamma, lambda_):
    """Schulman et al. 2016, eq. 16, backwards over one episode."""
    advantage, out = 0.0, []
    following = bootstrap
    for r, v in zip(reward[::-1], values[::-1], strict=True):
        delta = r + gamma * following - v
        advantage = delta + gamma * lambda_ * advantage
        out.append(advantage)
        following = v
    return out[::-1]


@hypothesis.settings(max_examples=40, deadline=None)
@hypothesis.given(st.integers(0, 2**31), st.floats(0.5, 1.0), st.floats(0.0, 1.0))
def test_masked_rollouts_equal_per_episode_gae(seed, gamma, lambda_):
    rng = np.random.default_rng(seed)
    length = 40
    reward, values = rng.normal(size=(2, length + 1)).astype(np.float32)
    terminated, truncated = np.zeros((2, length), bool)
    mask = np.ones(length, bool)
    episodes, start, t = [], 0, 0
    while t < length:
        kind = rng.choice(["go", "terminate", "truncate"], p=[0.8, 0.1, 0.1])
        if kind == "go":
            t += 1
            continue
        (terminated if kind == "terminate" else truncated)[t] = True
        episodes.append((start, t + 1, 0.0 if kind == "terminate" else values[t + 1]))
        if t + 1 < length:
            mask[t + 1] = False
        t += 2
        start = t
    if start < length:
        episodes.append((start, length, values[length]))
    steps = make_steps(reward[:length] * mask, terminated, truncated, mask)
    estimate = advantages.gae(gamma, lambda_)
    got = np.asarray(estimate(steps, jnp.asarray(values)[:, None], None))[:, 0] - values[:-1]
    for begin, end, bootstrap in episodes:
        want = gae_of_one_episode(
            reward[begin:end], values[begin:end], bootstrap, gamma, lambda_
        )
        np.testing.assert_allclose(got[begin:end], want, atol=2e-4)


def test_inputs_are_not_changed():
    steps = make_steps(np.ones(3, np.float32))
    before = np.asarray(steps.reward).copy()
    targets(steps, [1.0] * 4, 0.9, 0.5)
    np.testing.assert_array_equal(steps.reward, before)


def estimated(factory, steps, values, rho=None):
    """Targets of one environment."""
    values = jnp.asarray(values, jnp.float32)[:, None]
    rho = jnp.ones_like(values[1:]) if rho is None else jnp.asarray(rho, jnp.float32)[:, None]
    return np.asarray(factory(steps, values, rho))[:, 0]


# Published vectors of another implementation: value v and reward r everywhere, discount .9; an episode
# that goes on, one that is cut after its second step, and one that ends there. The third row is a reset row.
GOES_ON = {}
CUT = {"truncated": [0, 1, 0, 0], "mask": [1, 1, 0, 1]}
ENDS = {"terminated": [0, 1, 0, 0], "mask": [1, 1, 0, 1]}


@pytest.mark.parametrize(
    ("kind", "want"),
    [
        (GOES_ON, [7.5341, 6.149, 4.61, 2.9]),
        (CUT, [4.61, 2.9, None, 2.9]),
        (ENDS, [3.8, 2.0, None, 2.9]),
    ],
)
def test_published_returns(kind, want):
    steps = make_steps([2.0] * 4, **kind)
    for factory in (advantages.monte_carlo(0.9), advantages.vtrace(0.9)):
        got = estimated(factory, steps, [1.0] * 5)
        for g, w in zip(got, want, strict=True):
            assert w is None or g == pytest.approx(w, abs=1e-5)


@pytest.mark.parametrize(
    ("kind", "want"),
    [
        (GOES_ON, [6.0928, 5.488, 4.48, 2.8]),
        (CUT, [4.48, 2.8, None, 2.8]),
        (ENDS, [3.4, 1.0, None, 2.8]),
    ],
)
def test_published_generalised_advantages(kind, want):
    steps = make_steps([3.0] * 4, **kind)
    got = estimated(advantages.gae(0.9, 0.6 / 0.9), steps, [2.0] * 5) - 2.0
    for g, w in zip(got, want, strict=True):
        assert w is None or g == pytest.approx(w, abs=1e-5)


def test_published_vtrace_off_policy():
    steps = make_steps([3.0] * 4, **ENDS)
    got = estimated(advantages.vtrace(0.9), steps, [2.0] * 5, [0.999] * 4)
    np.testing.assert_allclose(got[[0, 1, 3]], [5.695401, 2.999, 4.7972], rtol=1e-5)


def test_vtrace_clips_large_ratios():
    # One step: V + min(rho, 1) (r + gamma V' - V).
    steps = make_steps([3.0])
    for rho, want in ((5.0, 2 + 2.8), (0.5, 2 + 1.4)):
        assert estimated(advantages.vtrace(0.9), steps, [2.0] * 2, [rho])[0] == pytest.approx(want)
    wide = advantages.vtrace(0.9, clip_rho_threshold=2.0)
    assert estimated(wide, steps, [2.0] * 2, [5.0])[0] == pytest.approx(2 + 5.6)


def test_td_k_does_not_look_across_an_end():
    # r = 1, 1, 1 and the end; V = 10, gamma .9, k = 2.
    steps = make_steps([1, 1, 1, 0, 0], terminated=[0, 0, 1, 0, 0], mask=[1, 1, 1, 0, 0])
    got = estimated(advantages.td_k(0.9, margin=2), steps, [10.0] * 6)
    np.testing.assert_allclose(got[:3], [10.0, 1.9, 1.0], rtol=1e-6)


@pytest.mark.parametrize(("margin", "want"), [(0, [5.95] * 3), (1, [5.95] * 3), (3, None)])
def test_td_k_bootstraps_at_a_cut(margin, want):
    # r = 1, V = 5, gamma .99; three steps: 1 + .99 + .9801 + .970299 * 5 = 7.8216, and shorter ones.
    steps = make_steps([1, 1, 1, 0, 0], mask=[1, 1, 1, 0, 0])
    got = estimated(advantages.td_k(0.99, margin=margin), steps, [5.0] * 6)[:3]
    np.testing.assert_allclose(got, want or [7.8216, 6.8905, 5.95], atol=1e-4)


def test_n_step_returns_of_a_truncated_episode():
    # Rewards 1 and the cut, then an episode of rewards 100; gamma .5; the value of what follows is 8.
    steps = make_steps(
        [1, 1, 1, 0, 100, 100], truncated=[0, 0, 1, 0, 0, 0], mask=[1, 1, 1, 0, 1, 1]
    )
    values = [0, 0, 0, 8, 0, 0, 0]
    got = estimated(advantages.td_k(0.5, margin=3), steps, values)[:3]
    np.testing.assert_allclose(got, [1.75 + 0.125 * 8, 1.5 + 0.25 * 8, 1.0 + 0.5 * 8])
