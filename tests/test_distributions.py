"""Distributions: densities, entropies and mappings against numbers worked out by hand."""

import gin
import gymnasium
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gymnasium import spaces

from rl_trainers.distributions import (
    Bernoulli,
    Categorical,
    Gaussian,
    Product,
    create_distribution,
)

KEY = jax.random.PRNGKey(0)
INPUTS_KEY = jax.random.PRNGKey(1)
GAUSSIAN_ENTROPY = 1.4189385  # 1/2 ln(2 pi e), of a Gaussian with std 1


@pytest.fixture(autouse=True)
def _no_gin_left_over():
    yield
    gin.clear_config()


def mixed_space():
    return spaces.Dict(
        button=spaces.MultiBinary(2),
        move=spaces.Tuple([spaces.Discrete(3, start=-1), spaces.Box(-2, 2, (2,), np.float32)]),
    )


SPACES = [
    (spaces.Discrete(4), 4),
    (spaces.Discrete(3, start=-1), 3),
    (spaces.MultiDiscrete([5, 5]), 10),
    (spaces.MultiDiscrete([2, 3, 4]), 9),
    (spaces.MultiDiscrete([[2, 3], [4, 5]], start=[[0, 1], [-2, 3]]), 14),
    (spaces.MultiBinary(3), 3),
    (spaces.MultiBinary((2, 3)), 6),
    (spaces.Box(-1, 1, (), np.float32), 1),
    (spaces.Box(-1, 1, (4, 5), np.float32), 20),
    (spaces.Box(-np.inf, np.inf, (2,), np.float64), 2),
    (spaces.Box(-1, 1, (2,), np.float16), 2),
    (mixed_space(), 2 + 3 + 2),
]
ONE_OF_EACH_KIND = [SPACES[i] for i in (1, 4, 6, 8, 11)]


@pytest.mark.parametrize(('space', 'n_inputs'), SPACES, ids=str)
def test_every_space_samples_its_own_actions_over_any_leading_axes(space, n_inputs):
    d = create_distribution(space)
    assert d.n_inputs == n_inputs
    inputs = jax.random.normal(INPUTS_KEY, (2, 3, n_inputs))

    @jax.jit
    def everything(inputs):
        action = d.sample(inputs, KEY)
        return action, d.log_prob(inputs, action), d.entropy(inputs), d.kl(inputs, inputs)

    action, log_prob, entropy, kl = everything(inputs)
    for result in (log_prob, entropy, kl):
        assert result.shape == (2, 3) and result.dtype == jnp.float32
        assert np.isfinite(result).all()
    np.testing.assert_allclose(kl, 0, atol=1e-6)
    one = jax.jit(d.log_prob)(inputs[1, 2], row(action, (1, 2)))
    np.testing.assert_allclose(one, log_prob[1, 2], rtol=1e-5)
    env_action = d.to_env(jax.tree.map(np.asarray, action))
    assert all(space.contains(row(env_action, (i, j))) for i in range(2) for j in range(3))
    stored = d.from_env(env_action)
    assert jax.tree.structure(stored) == jax.tree.structure(action)
    for have, want in zip(jax.tree.leaves(stored), jax.tree.leaves(action), strict=True):
        assert have.dtype == want.dtype


def row(action, index):
    """One action out of a batch, as arrays of the same dtype."""
    return jax.tree.map(lambda leaf: np.asarray(np.asarray(leaf)[index]), action)


@pytest.mark.parametrize(('space', 'n_inputs'), ONE_OF_EACH_KIND, ids=str)
def test_temperature_zero_is_the_mode_and_may_be_traced(space, n_inputs):
    d = create_distribution(space)
    inputs = jax.random.normal(INPUTS_KEY, (50, n_inputs))
    sample = jax.jit(d.sample)
    cold, warm = (sample(inputs, KEY, jnp.float32(t)) for t in (0, 1))
    jax.tree.map(np.testing.assert_array_equal, cold, jax.jit(d.mode)(inputs))
    assert any((a != b).any() for a, b in
               zip(jax.tree.leaves(warm), jax.tree.leaves(cold), strict=True))


@pytest.mark.parametrize(('space', 'n_inputs'), ONE_OF_EACH_KIND, ids=str)
def test_entropy_and_kl_agree_with_samples(space, n_inputs):
    d = create_distribution(space)
    inputs_p, inputs_q = jax.random.normal(INPUTS_KEY, (2, n_inputs)) * 0.7

    @jax.jit
    def draw(inputs_p, inputs_q):
        action = d.sample(jnp.broadcast_to(inputs_p, (40_000, n_inputs)), KEY)
        log_p, log_q = d.log_prob(inputs_p[None], action), d.log_prob(inputs_q[None], action)
        exact = d.entropy(inputs_p), d.kl(inputs_p, inputs_q)
        return (-log_p, log_p - log_q), exact

    for estimate, exact in zip(*draw(inputs_p, inputs_q), strict=True):
        error = np.std(estimate) / np.sqrt(len(estimate))
        assert abs(np.mean(estimate) - exact) < 4 * error + 1e-5


# Categorical


def test_categorical_numbers():
    d = Categorical(2)
    assert d.entropy(jnp.zeros(2)) == pytest.approx(0.6931, abs=1e-4)
    assert d.entropy(jnp.array([0, np.log(3)])) == pytest.approx(0.5623, abs=1e-4)
    assert d.entropy(jnp.array([2.0, 0.0])) == pytest.approx(0.3653, abs=1e-4)
    assert Categorical(4).entropy(jnp.zeros(4)) == pytest.approx(1.3863, abs=1e-4)
    assert d.log_prob(jnp.array([0, np.log(3)]), np.array(1)) == pytest.approx(np.log(0.75))
    # p = (1/2, 1/2), q = (1/4, 3/4): 1/2 ln 2 + 1/2 ln(2/3)
    assert d.kl(jnp.zeros(2), jnp.array([0, np.log(3)])) == pytest.approx(0.143841, abs=1e-5)


def test_multi_discrete_entropy_is_a_sum_over_its_choices():
    assert Categorical(5, (2,)).entropy(jnp.zeros(10)) == pytest.approx(3.2189, abs=1e-4)
    uneven = create_distribution(spaces.MultiDiscrete([2, 3, 4]))
    assert uneven.entropy(jnp.zeros(9)) == pytest.approx(np.log(24), abs=1e-5)


def test_unequal_sizes_sum_three_log_probs_of_their_own_inputs():
    d = create_distribution(spaces.MultiDiscrete([2, 3, 4]))
    probs = [[0.1, 0.9], [0.2, 0.3, 0.5], [0.4, 0.3, 0.2, 0.1]]
    inputs = jnp.log(jnp.array(sum(probs, [])))
    assert d.log_prob(inputs, np.array([1, 0, 2])) == pytest.approx(np.log(0.9 * 0.2 * 0.2))
    np.testing.assert_array_equal(d.mode(inputs), [1, 2, 0])
    gradient = jax.grad(d.log_prob)(inputs, np.array([1, 0, 2]))
    np.testing.assert_allclose(
        gradient, [-0.1, 0.1, 0.8, -0.3, -0.5, -0.4, -0.3, 0.8, -0.1], atol=1e-6)
    assert np.isfinite(jax.grad(d.entropy)(inputs)).all()


def test_equal_and_unequal_layouts_agree():
    equal, as_array = Categorical(3, (2, 2)), Categorical(np.full((2, 2), 3))
    inputs = jax.random.normal(INPUTS_KEY, (7, 12))
    action = equal.sample(inputs, KEY)
    np.testing.assert_array_equal(action, as_array.sample(inputs, KEY))
    # The mode of element (1, 0) is read from inputs 6, 7 and 8.
    np.testing.assert_array_equal(equal.mode(inputs)[:, 1, 0], jnp.argmax(inputs[:, 6:9], -1))


def test_sample_frequencies_follow_the_temperature():
    inputs = jnp.broadcast_to(jnp.array([0.0, np.log(3)]), (20_000, 2))
    d = Categorical(2)
    assert d.sample(inputs, KEY).mean() == pytest.approx(0.75, abs=0.012)
    # logits / T for T = 2: 3 ** .5 to 1
    assert d.sample(inputs, KEY, 2.0).mean() == pytest.approx(0.6340, abs=0.014)


@pytest.mark.parametrize('kind', ['random', 'sampled', 'greedy'])
def test_discrete_with_a_start_only_ever_acts_within_it(kind):
    space = spaces.Discrete(3, start=-1)
    space.seed(0)
    d = create_distribution(space)
    inputs = jax.random.normal(INPUTS_KEY, (1000, 3))
    stored = {
        'random': lambda: d.from_env(np.array([space.sample() for _ in range(1000)])),
        'sampled': lambda: d.sample(inputs, KEY),
        'greedy': lambda: d.mode(inputs),
    }[kind]()
    seen = d.to_env(np.asarray(stored))
    assert set(seen.tolist()) == {-1, 0, 1}
    assert seen.dtype == space.dtype and space.contains(seen[0])
    # The first category, -1, reads the first input.
    log_prob = d.log_prob(jnp.array([5.0, 0.0, 0.0]), np.array(-1))
    assert log_prob == pytest.approx(-0.013386, abs=1e-5)


def test_discrete_to_env_is_the_same_object_if_the_dtype_fits():
    d = create_distribution(spaces.Discrete(3))
    wide, narrow = np.array([1, 2]), np.array([1, 2], np.int32)
    assert d.to_env(wide) is wide
    assert d.from_env(narrow) is narrow
    assert d.to_env(narrow).dtype == np.int64
    assert isinstance(d.to_env(jnp.array([1, 2])), jax.Array)


def test_rows_without_a_decision_have_finite_log_probs_and_gradients():
    d = create_distribution(spaces.Discrete(3, start=1))
    inputs = jnp.array([[1.0, 2.0, 3.0]])
    padding = np.array([0])
    np.testing.assert_allclose(d.log_prob(inputs, padding), d.log_prob(inputs, np.array([1])))
    gradient = jax.grad(lambda x: (0 * jnp.exp(d.log_prob(x, padding))).sum())(inputs)
    np.testing.assert_array_equal(gradient, np.zeros((1, 3)))


# Bernoulli


def test_bernoulli_numbers():
    d = Bernoulli((2,))
    inputs = jnp.array([0.0, np.log(3)])
    assert d.log_prob(inputs, np.array([0, 1], np.int8)) == pytest.approx(np.log(0.5 * 0.75))
    assert d.entropy(inputs) == pytest.approx(0.6931 + 0.5623, abs=1e-4)
    assert d.kl(jnp.zeros(2), inputs) == pytest.approx(0.143841, abs=1e-5)
    np.testing.assert_array_equal(d.mode(inputs), [0, 1])
    rate = d.sample(jnp.broadcast_to(inputs, (20_000, 2)), KEY).mean(0)
    np.testing.assert_allclose(rate, [0.5, 0.75], atol=0.014)
    assert np.isfinite(d.log_prob(jnp.array([80.0, -80.0]), np.array([0, 1])))


# Gaussian


@pytest.mark.parametrize(('std', 'entropy'), [(0.4, 0.5026), (1.0, 1.4189), (2.0, 2.1121)])
def test_gaussian_entropy(std, entropy):
    assert Gaussian((1,), std).entropy(jnp.zeros(1)) == pytest.approx(entropy, abs=1e-4)
    assert Gaussian((3, 2), std).entropy(jnp.zeros(6)) == pytest.approx(6 * entropy, abs=1e-3)


def test_gaussian_numbers():
    d = Gaussian((2,), 2.0)
    # -1/2 (1^2 + 0) - 2 ln 2 - ln(2 pi)
    assert d.log_prob(jnp.array([1.0, -1.0]), np.array([3.0, -1.0])) == pytest.approx(-3.724171)
    assert d.kl(jnp.zeros(2), jnp.array([2.0, 0.0])) == pytest.approx(0.5)
    sample = d.sample(jnp.broadcast_to(jnp.array([1.0, -1.0]), (20_000, 2)), KEY, 0.5)
    np.testing.assert_allclose(sample.mean(0), [1, -1], atol=0.03)
    np.testing.assert_allclose(sample.std(0), [1, 1], atol=0.03)


@pytest.mark.parametrize('learn_std', [None, 'shared', 'separate'])
@pytest.mark.parametrize('std', [0.4, 1.0, 2.0])
def test_std_at_zero_output_is_the_configured_one(std, learn_std):
    d = Gaussian((3,), std, learn_std)
    assert d.n_inputs == {None: 3, 'shared': 4, 'separate': 6}[learn_std]
    # The density at the mean tells the std.
    log_prob = d.log_prob(jnp.zeros(d.n_inputs), np.zeros(3))
    assert np.exp(-log_prob / 3) / np.sqrt(2 * np.pi) == pytest.approx(std, abs=1e-6)


def test_learned_std_reads_the_inputs_after_the_means():
    x = float(np.log(np.expm1(3.0)) - np.log(np.expm1(1.0)))  # softplus gives a std of 3
    shared = Gaussian((2,), 1.0, 'shared').entropy(jnp.array([9.0, 9.0, x]))
    assert shared == pytest.approx(2 * (GAUSSIAN_ENTROPY + np.log(3)), abs=1e-5)
    separate = Gaussian((2,), 1.0, 'separate')
    sample = separate.sample(jnp.broadcast_to(jnp.array([5.0, 7.0, 0.0, x]), (20_000, 4)), KEY)
    np.testing.assert_allclose(sample.mean(0), [5, 7], atol=0.1)
    np.testing.assert_allclose(sample.std(0), [1, 3], rtol=0.03)


def test_a_collapsed_learned_std_stays_finite():
    d = Gaussian((1,), 1.0, 'shared')
    value, gradient = jax.value_and_grad(d.log_prob)(jnp.array([0.0, -1e4]), np.ones(1))
    assert np.isfinite(value) and np.isfinite(gradient).all()


@pytest.mark.parametrize('dtype', [np.float16, np.float32, np.float64])
def test_clip_keeps_the_env_within_its_bounds_and_its_dtype(dtype):
    # 0.1 is not a float: f32(0.1) lies above the f64 bound.
    low, high = np.array([-0.1, -np.inf, 0], dtype), np.array([0.1, 1, np.inf], dtype)
    space = spaces.Box(low, high, dtype=dtype)
    d = create_distribution(space)
    action = np.float32([[-7, -7, -7], [0.1, 0.5, 7], [7, 7, 7]])
    seen = d.to_env(action)
    assert all(space.contains(a) for a in seen)
    np.testing.assert_array_equal(seen[:, 1:], dtype([[-7, 0], [0.5, 7], [1, 7]]))
    np.testing.assert_array_equal(seen[[0, 2], 0], [low[0], high[0]])
    on_device = jax.jit(d.to_env)(jnp.asarray(action))
    np.testing.assert_allclose(on_device, seen, rtol=1e-6)
    assert d.from_env(action) is action


def test_unbounded_actions_pass_unchanged():
    d = create_distribution(spaces.Box(-np.inf, np.inf, (2,), np.float32))
    action = np.float32([1e9, -1e9])
    assert d.to_env(action) is action


@pytest.mark.parametrize('bounds', ['clip', 'squash'])
def test_the_first_ratio_is_one_with_a_wide_std(bounds):
    space = spaces.Box(-1, 1, (2,), np.float32)
    d = create_distribution(space, std=2.0, bounds=bounds)
    inputs = jax.random.normal(INPUTS_KEY, (2000, 2))
    stored = d.sample(inputs, KEY)
    seen = d.to_env(np.asarray(stored))
    assert all(space.contains(a) for a in seen)
    assert (np.abs(seen) > 0.95).mean() > 0.3
    before = d.log_prob(inputs, stored)
    ratio = jnp.exp(jax.jit(d.log_prob)(inputs, np.asarray(stored)) - before)
    assert np.abs(ratio - 1).max() < 1e-5
    if bounds == 'clip':
        assert (np.abs(np.asarray(stored)) > 1).mean() > 0.3
        assert np.abs(d.log_prob(inputs, seen) - before).max() > 1  # not of the clipped action


# Squashed Gaussian


def squashed(low=-1.0, high=1.0, shape=(), **kwargs):
    return Gaussian(shape, low=low, high=high, bounds='squash', **kwargs)


def test_squash_maps_unequal_bounds_exactly():
    space = spaces.Box(np.float32([0, -3]), np.float32([10, 1]))
    d = create_distribution(space, bounds='squash')
    ends = np.float32([[0, 0], [1, 1], [-1, -1]])
    np.testing.assert_array_equal(d.to_env(ends), [[5, -1], [10, 1], [0, -3]])
    space.seed(0)
    warm_up = np.stack([space.sample() for _ in range(1000)])
    policy = d.to_env(np.asarray(d.sample(jax.random.normal(INPUTS_KEY, (1000, 2)), KEY)))
    for seen in (warm_up, policy):
        stored = d.from_env(seen)
        assert stored.dtype == np.float32 and np.abs(stored).max() <= 1
        np.testing.assert_allclose(d.to_env(stored), seen, atol=1e-6)
        np.testing.assert_allclose(d.from_env(jnp.asarray(seen)), stored, atol=1e-6)


@pytest.mark.parametrize('dtype', [np.float16, np.float32, np.float64])
def test_squash_hits_awkward_bounds_exactly(dtype):
    huge = np.finfo(dtype).max
    low, high = np.array([0.1, -huge, 2], dtype), np.array([0.7, huge, 2], dtype)
    d = squashed(low, high, (3,), dtype=dtype)
    np.testing.assert_array_equal(d.to_env(np.ones(3, np.float32)), high)
    np.testing.assert_array_equal(d.to_env(-np.ones(3, np.float32)), low)
    assert d.to_env(np.ones(3, np.float32)).dtype == dtype
    np.testing.assert_array_equal(d.from_env(high), [1, 1, 0])  # a range of one point has no ends
    np.testing.assert_array_equal(d.from_env(low), [-1, -1, 0])


def test_squash_density_by_hand_and_integrates_to_one():
    d = squashed()
    # a = tanh(.5) = .4621172 from N(.2, 1): -.045 - .9189385 - ln(1 - .2135523)
    a = np.float32(0.4621172)
    assert d.log_prob(jnp.array([0.2]), a) == pytest.approx(-0.723709, abs=1e-5)
    grid = np.linspace(-1, 1, 20_001)[1:-1]
    density = np.exp(d.log_prob(jnp.full((len(grid), 1), 0.2), grid))
    assert density.sum() * (grid[1] - grid[0]) == pytest.approx(1, abs=1e-3)
    assert d.mode(jnp.array([0.5])) == pytest.approx(0.4621172)


def test_squash_is_finite_at_the_ends():
    d = squashed(shape=(2,), std=0.5)
    inputs = jnp.array([20.0, -20.0])
    action = d.sample(inputs, KEY)
    np.testing.assert_array_equal(action, [1, -1])
    value, gradient = jax.value_and_grad(d.log_prob)(inputs, action)
    assert np.isfinite(value) and np.isfinite(gradient).all()
    value, gradient = jax.value_and_grad(d.entropy)(inputs)
    assert np.isfinite(value) and np.isfinite(gradient).all()


def test_squash_entropy_numbers():
    # Worked out by a fine Riemann sum of H[N] + E log(1 - tanh(u)^2).
    assert squashed(std=0.4).entropy(jnp.zeros(1)) == pytest.approx(0.353366, abs=1e-4)
    assert squashed(std=1.0).entropy(jnp.zeros(1)) == pytest.approx(0.669804, abs=1e-4)
    assert squashed(std=1.0).entropy(jnp.ones(1)) == pytest.approx(0.092600, abs=1e-4)
    assert squashed(std=2.0).entropy(jnp.ones(1)) == pytest.approx(-0.359710, abs=1e-3)


def test_squash_kl_is_that_of_the_gaussians():
    assert squashed(std=2.0).kl(jnp.zeros(1), jnp.full(1, 2.0)) == pytest.approx(0.5)


@pytest.mark.parametrize(
    ('d', 'inputs'),
    [
        (Categorical(2), [2.0, 0.0]),
        (Bernoulli(), [2.0]),
        (Gaussian((1,), 0.5, 'shared'), [0.3, 0.0]),
        (squashed(std=0.3, learn_std='shared'), [0.8, 0.0]),
        (squashed(std=0.5), [1.5]),
    ],
    ids=str,
)
def test_a_step_along_the_entropy_gradient_raises_entropy(d, inputs):
    inputs = jnp.array(inputs)
    gradient = jax.grad(d.entropy)(inputs)
    assert np.abs(gradient).max() > 1e-2
    assert d.entropy(inputs + 0.01 * gradient) > d.entropy(inputs) + 1e-6


# Dict and Tuple


def test_product_sums_its_parts_and_keeps_their_structure():
    d = create_distribution(mixed_space())
    inputs = jnp.array([0.0, np.log(3), 0.0, 0.0, 0.0, 1.0, -1.0])
    action = {
        'button': np.array([1, 1], np.int8),
        'move': (np.array(-1), np.array([1.0, -1.0], np.float32)),
    }
    want = np.log(0.5 * 0.75) + np.log(1 / 3) - np.log(2 * np.pi)
    assert d.log_prob(inputs, action) == pytest.approx(want, abs=1e-5)
    entropy = 0.6931472 + 0.5623351 + np.log(3) + 2 * GAUSSIAN_ENTROPY
    assert d.entropy(inputs) == pytest.approx(entropy, abs=1e-5)
    far = {**action, 'move': (np.array(1), np.array([9.0, 0.0], np.float32))}
    np.testing.assert_array_equal(d.to_env(far)['move'][1], [2, 0])
    assert mixed_space().contains(d.to_env(far))


def test_parts_of_a_product_do_not_share_noise():
    d = Product([Gaussian(), Gaussian()])
    a, b = d.sample(jnp.zeros((5000, 2)), KEY)
    assert abs(np.corrcoef(a, b)[0, 1]) < 0.05


# Construction


@pytest.mark.parametrize(
    ('space', 'name'),
    [
        (spaces.Text(5), 'Text'),
        (spaces.Sequence(spaces.Discrete(2)), 'Sequence'),
        (spaces.Graph(spaces.Discrete(2), None), 'Graph'),
        (spaces.Box(0, 255, (2,), np.uint8), 'Box with integers; use MultiDiscrete'),
        (spaces.Dict(a=spaces.Discrete(2), b=spaces.Text(5)), 'Text'),
    ],
    ids=str,
)
def test_unsupported_spaces_are_refused_by_name(space, name):
    with pytest.raises(TypeError, match=f'no action distribution for {name}'):
        create_distribution(space)


@pytest.mark.parametrize(
    ('build', 'message'),
    [
        (lambda: Categorical(0), 'n_categories=0 must be at least 1'),
        (lambda: Categorical([2, 3], (3,)), r'shape=\(3,\) must be \(2,\)'),
        (lambda: Categorical(3, start=2**31 - 2), 'start=2147483646'),
        (lambda: Bernoulli((0,)), r'shape=\(0,\) must have at least one'),
        (lambda: Gaussian((0,)), r'shape=\(0,\) must have at least one'),
        (lambda: Gaussian(std=0.0), 'std=0.0 must be finite and greater than 0'),
        (lambda: Gaussian(std=1e-7, learn_std='shared'), 'std=1e-07 .* greater than 1e-06'),
        (lambda: Gaussian(learn_std='both'), "learn_std='both' must be None, 'shared'"),
        (lambda: Gaussian(bounds='tanh'), "bounds='tanh' must be 'clip' or 'squash'"),
        (lambda: squashed(high=np.inf), "bounds='squash' needs finite bounds in every dim"),
        (lambda: Product({}), r'parts=\{\} must name at least one'),
        (lambda: Categorical(3).mode(jnp.zeros((2, 4))), r'\(2, 4\); the last axis must be 3'),
    ],
)
def test_wrong_arguments_are_named(build, message):
    with pytest.raises(ValueError, match=message):
        build()


def test_gin_reaches_the_parts_of_create_distribution():
    space = spaces.Box(-1, 1, (2,), np.float32)
    gin.parse_config("Gaussian.std = 0.4\nGaussian.learn_std = 'separate'")
    d = create_distribution(space)
    assert d.n_inputs == 4
    assert d.entropy(jnp.zeros(4)) == pytest.approx(2 * 0.5026, abs=1e-3)
    assert create_distribution(space, std=1.0).entropy(jnp.zeros(4)) == pytest.approx(
        2 * GAUSSIAN_ENTROPY, abs=1e-4)
    gin.parse_config("create_distribution.bounds = 'squash'")
    assert np.abs(create_distribution(spaces.Tuple([space])).mode(jnp.full(4, 9.0))[0]).max() <= 1


def test_a_gymnasium_env_accepts_every_action():
    env = gymnasium.make('Pendulum-v1')
    d = create_distribution(env.action_space, std=5.0)
    env.reset(seed=0)
    for action in np.asarray(d.sample(jnp.zeros((20, 1)), KEY)):
        sent = d.to_env(action)
        assert env.action_space.contains(sent)
        env.step(sent)
