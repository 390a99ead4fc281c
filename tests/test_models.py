"""Models: shapes, what networks see of each space, the normaliser, the adapter for other networks."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gymnasium import spaces

from rl_trainers import models, types
from rl_trainers.distributions import create_distribution
from rl_trainers.models import MLP, AtariCnn, Normalize, Policy, PolicyAndValue, Value, zoo

KEY = jax.random.PRNGKey(0)
BOX = spaces.Box(-np.inf, np.inf, (3,), np.float32)
BODY = functools.partial(MLP, layer_widths=(8,))
TWO = create_distribution(spaces.Discrete(2))
build = functools.partial(models.build, part="policy")


class Seen(nn.Module):
    """Gives back what the network sees of the observation."""

    @nn.compact
    def __call__(self, x, mask=None):
        return jax.tree.map(lambda leaf: leaf + 0.0, x)


def seen(space, observation):
    model = build(Seen(), space)
    params, model_state = model.init(KEY, observation)
    return jax.tree.map(np.asarray, model.apply(params, model_state, observation))


def n_numbers(tree):
    return sum(x.size for x in jax.tree.leaves(tree))


def test_layer_norm_squash_by_hand():
    model = build(models.LayerNormSquash(width=4), BOX)
    params, _ = model.init(KEY, np.zeros((1, 3), np.float32))
    params["policy"]["dense"]["kernel"] = jnp.eye(3, 4)
    params["policy"]["layer_norm"] = {"scale": jnp.full(4, 2.0), "bias": jnp.array([0.0, 0, 0, 1])}
    # Of (1, 2, 3, 0): mean 1.5, variance 1.25.
    got = model.apply(params, {}, np.array([[1.0, 2, 3]]))
    expected = np.tanh(2 * np.array([-0.5, 0.5, 1.5, -1.5]) / np.sqrt(1.25 + 1e-6) + [0, 0, 0, 1])
    np.testing.assert_allclose(got[0], expected, rtol=1e-5)


def test_layer_norm_squash_is_a_normalizer_that_can_be_shared():
    policy = functools.partial(Policy, body=BODY, normalizer=models.LayerNormSquash)
    value = functools.partial(Value, body=BODY)
    pair = models.build_pair(policy, value, BOX, 1, policy_distribution=TWO, mode="train")
    params, _ = pair.init(KEY, np.zeros((1, 3), np.float32))
    assert set(params) == {"shared", "policy", "value"}
    assert n_numbers(params) == (3 * 128 + 3 * 128) + 2 * (128 * 8 + 8) + (8 * 2 + 2) + (8 + 1)


# What networks see.


def test_images_arrive_scaled_once():
    space = spaces.Box(0, 255, (4, 4, 1), np.uint8)
    np.testing.assert_array_equal(seen(space, np.full((2, 4, 4, 1), 255, np.uint8)), 1.0)
    np.testing.assert_allclose(seen(space, np.full((1, 4, 4, 1), 51, np.uint8)), 0.2, rtol=1e-6)


@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.int32])
def test_other_boxes_arrive_unscaled(dtype):
    space = spaces.Box(-300, 300, (2,), dtype)
    got = seen(space, np.array([[255, -7]], dtype))
    assert got.dtype == np.float32
    np.testing.assert_array_equal(got, [[255.0, -7.0]])


def test_discrete_becomes_one_hot_from_its_start():
    got = seen(spaces.Discrete(3, start=-1), np.array([-1, 0, 1]))
    np.testing.assert_array_equal(got, np.eye(3))


def test_multi_discrete_becomes_one_hot_vectors_side_by_side():
    space = spaces.MultiDiscrete([2, 3], start=[0, 5])
    np.testing.assert_array_equal(seen(space, np.array([[1, 5], [0, 7]])), [[0, 1, 1, 0, 0], [1, 0, 0, 0, 1]])


def test_multi_discrete_of_rank_2_is_flattened_row_by_row():
    space = spaces.MultiDiscrete([[2, 2], [2, 3]])
    got = seen(space, np.array([[[0, 1], [1, 2]]]))
    np.testing.assert_array_equal(got, [[1, 0, 0, 1, 0, 1, 0, 0, 1]])


def test_multi_binary_is_a_float_vector():
    got = seen(spaces.MultiBinary((2, 2)), np.array([[[1, 0], [0, 1]]], np.int8))
    assert got.dtype == np.float32
    np.testing.assert_array_equal(got, [[[1, 0], [0, 1]]])


def test_nests_keep_their_structure():
    space = spaces.Dict(
        b=spaces.Discrete(2), a=spaces.Tuple([spaces.Box(0, 255, (1,), np.uint8), spaces.Box(0, 9, (1,))])
    )
    observation = {"a": (np.array([[255]], np.uint8), np.array([[9.0]], np.float32)), "b": np.array([1])}
    got = seen(space, observation)
    np.testing.assert_array_equal(got["b"], [[0, 1]])
    assert isinstance(got["a"], tuple)
    np.testing.assert_array_equal(got["a"][0], [[1.0]])
    np.testing.assert_array_equal(got["a"][1], [[9.0]])


def test_spaces_without_an_array_form_are_refused_by_name():
    with pytest.raises(TypeError, match=r"observation space Text.*has no array form"):
        models.features(spaces.Text(3), np.zeros((1, 3)))


NESTED = spaces.Dict(x=spaces.Box(-1, 1, (2, 2), np.float32), y=spaces.Discrete(4))


@pytest.mark.parametrize(
    "space", [BOX, spaces.Discrete(3, start=-1), NESTED, spaces.Tuple([spaces.Discrete(2), BOX])]
)
@pytest.mark.parametrize("leading", [(), (5,), (4, 5), (2, 3, 4)])
def test_any_leading_axes(space, leading):
    model = build(functools.partial(PolicyAndValue, body=BODY), space, policy_distribution=TWO)
    one = jax.tree.map(np.asarray, space.sample())
    observation = jax.tree.map(lambda x: np.broadcast_to(x, (*leading, *x.shape)), one)
    params, model_state = model.init(KEY, observation)
    dist_inputs, value = model.apply(params, model_state, observation)
    assert dist_inputs.shape == (*leading, 2)
    assert value.shape == leading
    # Equal observations have equal outputs, at whatever place.
    single = model.apply(params, model_state, jax.tree.map(lambda x: x[None], one))
    np.testing.assert_allclose(dist_inputs, np.broadcast_to(single[0][0], (*leading, 2)), atol=1e-6)
    np.testing.assert_allclose(value, np.full(leading, single[1][0]), atol=1e-6)


def test_leading_axes_are_not_mixed_up():
    model = build(functools.partial(Value, body=None), BOX)
    observation = np.arange(2 * 4 * 3, dtype=np.float32).reshape(2, 4, 3)
    params, model_state = model.init(KEY, observation)
    head = params["value"]["head"]
    by_hand = observation @ np.asarray(head["kernel"])[:, 0] + np.asarray(head["bias"])
    np.testing.assert_allclose(model.apply(params, model_state, observation), by_hand, rtol=1e-5)


# The zoo.


def test_mlp_by_hand():
    # Widths (2, 1): relu(x W0 + b0) W1 + b1, without the last activation.
    params = {
        "dense_0": {"kernel": np.float32([[1, -1]]), "bias": np.float32([0, 0])},
        "dense_1": {"kernel": np.float32([[2], [3]]), "bias": np.float32([-10])},
    }
    x = np.float32([[4], [-4]])
    plain = MLP(layer_widths=(2, 1), out_activation=False).apply({"params": params}, x)
    np.testing.assert_allclose(plain, [[8 - 10], [12 - 10]])
    relu = MLP(layer_widths=(2, 1)).apply({"params": params}, x)
    np.testing.assert_allclose(relu, [[0], [2]])


def test_mlp_flattens_or_not():
    x = np.zeros((5, 2, 3), np.float32)
    assert MLP(layer_widths=(8,)).init_with_output(KEY, x)[0].shape == (5, 8)
    assert MLP(layer_widths=(8,), flatten=False).init_with_output(KEY, x)[0].shape == (5, 2, 8)


@pytest.mark.parametrize(
    "size, stride, padding",
    [(8, 4, "VALID"), (4, 2, "SAME"), (3, 1, "VALID"), (5, 2, "SAME"), (2, 3, "VALID")],
)
def test_convolutions_are_those_of_xla(size, stride, padding):
    x = jax.random.normal(KEY, (2, 21, 36, 3))
    conv = zoo._Conv(5, size, stride, padding)
    params = conv.init(KEY, x)
    params["params"]["bias"] += 0.5

    def expected(params, x):
        axes = ("NHWC", "HWIO", "NHWC")
        kernel, bias = params["params"]["kernel"], params["params"]["bias"]
        y = jax.lax.conv_general_dilated(x, kernel, (stride, stride), padding, dimension_numbers=axes)
        return y + bias

    def loss(function):
        return lambda params, x: jnp.sum(jnp.sin(function(params, x)))

    np.testing.assert_allclose(conv.apply(params, x), expected(params, x), rtol=1e-4, atol=1e-5)
    gradients = [jax.jit(jax.grad(loss(f), argnums=(0, 1)))(params, x) for f in (conv.apply, expected)]
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-4), *gradients)


def test_atari_cnn_shapes():
    # 84 -> (84 - 8) / 4 + 1 = 20 -> (20 - 4) / 2 + 1 = 9 -> 7; 7 * 7 * 64 = 3136.
    shapes = jax.eval_shape(
        AtariCnn().init_with_output, KEY, jax.ShapeDtypeStruct((2, 84, 84, 4), np.float32)
    )
    assert shapes[0].shape == (2, 512)
    assert shapes[1]["params"]["Dense_0"]["kernel"].shape == (3136, 512)


def test_default_suits_the_observations():
    image = models.default(PolicyAndValue, spaces.Box(0, 255, (84, 84, 4), np.uint8))
    assert image.keywords["body"] is AtariCnn
    others = spaces.Box(0, 255, (84,), np.uint8), spaces.Box(0, 1, (84, 84, 4), np.float32)
    for space in (BOX, NESTED, *others):
        body = models.default(PolicyAndValue, space).keywords["body"]
        assert isinstance(body(), MLP), space
        assert body().activation is nn.tanh


@pytest.fixture(scope="module")
def joint_and_not():
    made = {}
    for joint in (True, False):
        model = build(functools.partial(PolicyAndValue, body=BODY, joint=joint), BOX, policy_distribution=TWO)
        made[joint] = model.init(KEY, np.zeros((1, 3), np.float32))[0]
    return made


def test_joint_has_one_body_and_not_joint_two(joint_and_not):
    joint, apart = joint_and_not[True], joint_and_not[False]
    assert set(joint) == {"shared", "policy", "value"}
    assert set(apart) == {"policy", "value"}
    # A body of 3 -> 8 has 32 numbers, heads 8 -> 2 and 8 -> 1 have 18 and 9.
    assert n_numbers(joint["shared"]) == 32
    assert n_numbers(joint) == 32 + 18 + 9
    assert n_numbers(apart) == 2 * 32 + 18 + 9
    assert n_numbers(apart["policy"]["body"]) == n_numbers(apart["value"]["body"]) == 32


@pytest.mark.parametrize("network, name, shape", [(Policy, "policy", (5, 2)), (Value, "value", (5,))])
def test_single_networks(network, name, shape):
    model = build(functools.partial(network, body=BODY), BOX, policy_distribution=TWO, mode="train")
    params, model_state = model.init(KEY, np.zeros((1, 3), np.float32))
    assert set(params) == {name} and not model_state
    assert model.apply(params, model_state, np.ones((5, 3), np.float32)).shape == shape


def test_a_policy_without_body_is_its_head():
    model = build(functools.partial(Policy, body=None), BOX, policy_distribution=TWO)
    params, _ = model.init(KEY, np.zeros((1, 3), np.float32))
    assert n_numbers(params) == 3 * 2 + 2


@pytest.mark.parametrize("network", [Policy, PolicyAndValue])
def test_head_init_range_bounds_the_policy_head(network):
    body = functools.partial(MLP, layer_widths=(64,))
    factory = functools.partial(network, body=body, head_init_range=0.003)
    params, _ = build(factory, BOX, policy_distribution=TWO).init(KEY, np.zeros((1, 3), np.float32))
    weights = np.abs(params["policy"]["head"]["kernel"])
    assert weights.max() <= 0.003
    assert weights.max() > 0.002  # 128 uniform draws


def test_policies_start_almost_uniform():
    model = build(functools.partial(PolicyAndValue, body=BODY), BOX, policy_distribution=TWO)
    params, model_state = model.init(KEY, np.zeros((1, 3), np.float32))
    dist_inputs, value = model.apply(params, model_state, np.ones((1, 3), np.float32))
    assert np.abs(dist_inputs).max() < 0.1 < np.abs(value).max()


# Normalize.


def normalizer(**kwargs):
    model = build(Normalize(**kwargs), BOX)
    return (model, *model.init(KEY, np.zeros((1, 3), np.float32)))


def test_statistics_of_ten_batches_are_those_of_all_rows():
    rng = np.random.default_rng(0)
    model, params, state = normalizer()
    taken = []
    for i in range(10):
        x = rng.normal(3 * i, 1 + i, (7, 4, 3)).astype(np.float32)
        mask = (rng.random((7, 4)) < 0.7).astype(np.float32)
        x[mask == 0] = 1e6  # must not matter
        state = model.gather(params, state, x, mask)
        taken.append(x[mask > 0])
    rows = np.concatenate(taken).astype(np.float64)
    got = state["model_state"]
    assert float(got["count"]) == len(rows)
    np.testing.assert_allclose(got["mean"], rows.mean(0), rtol=1e-4)
    np.testing.assert_allclose(got["variance"], rows.var(0), rtol=1e-4)
    # Applied: (x - mean) / (std + epsilon), with another epsilon to see it.
    model = build(Normalize(epsilon=1.0), BOX)
    x = rows[:1].astype(np.float32)
    by_hand = (x - rows.mean(0)) / (rows.std(0) + 1.0)
    np.testing.assert_allclose(model.apply(params, state, x), by_hand, rtol=1e-3, atol=1e-4)


def test_nothing_unmasked_changes_nothing():
    model, params, state = normalizer()
    state = model.gather(params, state, np.ones((2, 3), np.float32), np.ones(2, np.float32))
    after = model.gather(params, state, np.full((2, 3), 9.0, np.float32), np.zeros(2, np.float32))
    for before, now in zip(jax.tree.leaves(state), jax.tree.leaves(after), strict=True):
        np.testing.assert_array_equal(before, now)


def test_outputs_are_clipped():
    # Variance 0 after one row: (x - mean) / epsilon = 1e5 before the clip.
    model, params, state = normalizer()
    state = model.gather(params, state, np.zeros((1, 3), np.float32), np.ones(1, np.float32))
    np.testing.assert_array_equal(
        model.apply(params, state, np.array([[1, -1, 0]], np.float32)), [[10, -10, 0]]
    )
    model, params, _ = normalizer(limit=2.0)
    np.testing.assert_array_equal(model.apply(params, state, np.float32([[1, -1, 0]])), [[2, -2, 0]])


def test_before_any_data_it_is_the_identity_up_to_epsilon():
    model, params, state = normalizer()
    x = np.array([[0.5, -2.0, 3.0]], np.float32)
    np.testing.assert_allclose(model.apply(params, state, x), x, rtol=1e-4)


def test_the_sample_limit_stops_the_statistics():
    model, params, state = normalizer(sample_limit=4)
    ones = np.ones(3, np.float32)
    x = np.array([[0] * 3, [2] * 3, [4] * 3], np.float32)
    for _ in range(2):  # 3 rows, then 6: the second batch still counts
        state = model.gather(params, state, x, ones)
    after = model.gather(params, state, x + 100, ones)
    assert float(state["model_state"]["count"]) == float(after["model_state"]["count"]) == 6
    np.testing.assert_allclose(after["model_state"]["mean"], [2.0] * 3, rtol=1e-6)
    np.testing.assert_allclose(after["model_state"]["variance"], [8 / 3] * 3, rtol=1e-6)


def test_apply_gathers_nothing():
    factory = functools.partial(PolicyAndValue, body=BODY, normalizer=Normalize)
    model = build(factory, BOX, policy_distribution=TWO)
    params, state = model.init(KEY, np.full((4, 3), 7.0, np.float32))
    assert float(state["model_state"]["shared"]["normalize"]["count"]) == 0
    output = model.apply(params, state, np.full((4, 3), 7.0, np.float32))
    assert len(output) == 2  # no statistics beside the outputs
    state = model.gather(params, state, np.full((4, 3), 7.0, np.float32), np.ones(4, np.float32))
    assert float(state["model_state"]["shared"]["normalize"]["count"]) == 4
    # All rows equal the mean, so the network sees zeros.
    zero = build(functools.partial(PolicyAndValue, body=BODY), BOX, policy_distribution=TWO)
    params_of_zero = {**params, "shared": params["shared"]["body"]}
    expected = zero.apply(params_of_zero, {}, np.zeros((4, 3), np.float32))
    got = model.apply(params, state, np.full((4, 3), 7.0, np.float32))
    for x, y in zip(got, expected, strict=True):
        np.testing.assert_allclose(x, y, atol=1e-6)


def test_no_gradient_flows_into_the_statistics():
    factory = functools.partial(Value, body=BODY, normalizer=Normalize)
    params, state = build(factory, BOX).init(KEY, np.zeros((1, 3), np.float32))
    assert set(params) == {"value"}
    assert set(state) == {"model_state"}


# Other networks.


class Mine(nn.Module):
    """A module that knows nothing of this package."""

    @nn.compact
    def __call__(self, x):
        return nn.Dense(2, name="dense")(x)


def test_a_module_of_ones_own_by_factory_or_itself():
    for factory in (Mine, Mine(), lambda: Mine(), lambda **kwargs: Mine()):
        model = build(factory, BOX, policy_distribution=TWO, mode="train")
        params, model_state = model.init(KEY, np.zeros((1, 3), np.float32))
        assert model.apply(params, model_state, np.zeros((4, 5, 3), np.float32)).shape == (4, 5, 2)
        gathered = model.gather(params, model_state, np.zeros((4, 5, 3), np.float32), np.ones((4, 5)))
        assert jax.tree.leaves(gathered) == []


def test_parameters_of_other_networks_go_under_the_part():
    model = models.build(Mine, BOX, "value", n_actions=2)
    x = np.ones((4, 3), np.float32)
    params, model_state = model.init(KEY, x)
    assert set(params) == {"value"} and set(params["value"]) == {"dense"}
    kernel = params["value"]["dense"]["kernel"]
    np.testing.assert_allclose(model.apply(params, model_state, x), x @ kernel, rtol=1e-5)
    # Parameters need not be a dict at all.
    pair = models.build(lambda: (lambda key, x: jnp.ones(3), lambda w, x: x @ w), BOX, "value")
    params, model_state = pair.init(KEY, x)
    np.testing.assert_array_equal(params["value"], np.ones(3))
    np.testing.assert_allclose(pair.apply(params, model_state, x), np.full(4, 3.0))


def test_a_pair_of_functions():
    def init(key, x):
        return {"policy": {"w": jnp.ones((x.shape[-1], 2))}}

    def apply(params, x):
        return x @ params["policy"]["w"]

    model = build(lambda: (init, apply), spaces.Discrete(3))
    params, model_state = model.init(KEY, np.zeros(1, np.int32))
    assert model_state == {}
    got = model.apply(params, model_state, np.zeros((4, 5), np.int32))
    np.testing.assert_array_equal(got, np.ones((4, 5, 2)))


def test_a_model_passes_through_untouched():
    model = models.Model(lambda key, x: ({}, {}), lambda p, s, x: x, lambda p, s, x, m: s)
    assert build(model, BOX) is model
    assert build(lambda: model, BOX) is model


def test_factories_get_only_the_arguments_that_they_take():
    got = {}

    def factory(mode, policy_distribution=None):
        got.update(mode=mode, policy_distribution=policy_distribution)
        return Mine()

    build(factory, BOX, policy_distribution=TWO, mode="train", other=3)
    assert got == {"mode": "train", "policy_distribution": TWO}


def test_other_things_are_refused():
    match = r"returned a int; it should return a flax.linen or flax.nnx module, a Trax layer, a pair"
    with pytest.raises(TypeError, match=match):
        build(lambda: 3, BOX)


DECODER = functools.partial(models.TransformerDecoder, d_model=8, d_ff=8, n_layers=2, n_heads=2)
EPISODE = np.array([[0, 0, 1, 1, 1, 2, 2, 2]], np.int32)


def decoded(observation, episode=EPISODE, body=DECODER):
    space = spaces.Box(-1.0, 1.0, (3,), np.float32)
    network = models.Policy(create_distribution(spaces.Discrete(4)), body)
    model = models.build(network, space, "policy")
    assert model.is_sequence
    params, state = model.init(jax.random.PRNGKey(0), np.zeros((1, 3), np.float32))
    return np.asarray(model.apply(params, state, types.Seen(observation, episode)))


@pytest.mark.parametrize("row", range(8))
def test_a_decoder_sees_earlier_rows_of_the_same_episode_only(row):
    observation = np.random.default_rng(0).normal(size=(1, 8, 3)).astype(np.float32)
    changed = observation.copy()
    changed[0, row] += 1.0
    differs = np.any(decoded(observation) != decoded(changed), axis=-1)[0]
    later = (np.arange(8) >= row) & (EPISODE[0] == EPISODE[0, row])
    assert differs.tolist() == later.tolist()


def test_a_decoder_counts_positions_from_the_start_of_the_episode():
    rows = np.random.default_rng(0).normal(size=(1, 3, 3)).astype(np.float32)
    observation = np.concatenate([rows[:, :2], rows, rows], axis=1)
    output = decoded(observation)[0]
    np.testing.assert_allclose(output[2:5], output[5:8], atol=1e-6)
    assert np.abs(output[0] - output[1]).max() > 1e-4
    same = decoded(np.ones_like(observation))[0]
    assert np.abs(same[2] - same[4]).max() > 1e-4


@pytest.mark.parametrize("vocab_size", [5, None])
def test_a_decoder_embeds_tokens(vocab_size):
    space, distribution = spaces.Discrete(5), create_distribution(spaces.Discrete(4))
    body = functools.partial(DECODER, vocab_size=vocab_size)
    model = models.build(models.Policy(distribution, body), space, "policy")
    params, state = model.init(jax.random.PRNGKey(0), np.zeros(1, np.int64))
    tokens = np.array([[1, 2, 3, 4, 1]])
    output = model.apply(params, state, types.Seen(tokens, np.arange(1, 6, dtype=np.int32)[None]))
    np.testing.assert_array_equal(output[0, 0], output[0, 4])
    assert len(np.unique(np.asarray(output)[0, :, 0])) == 4
    # A Box of one number is a token too.
    box = models.build(
        models.Policy(distribution, functools.partial(DECODER, vocab_size=5)),
        spaces.Box(0, 4, (1,), np.int32),
        "policy",
    )
    if vocab_size:
        seen = types.Seen(tokens[..., None], np.arange(1, 6, dtype=np.int32)[None])
        np.testing.assert_array_equal(box.apply(params, state, seen), output)


@pytest.mark.parametrize(
    "words, arguments",
    [
        ("dropout=0.1.*nearest valid value: 0", {"dropout": 0.1}),
        ("n_heads=3.*d_model=8.*nearest valid value: 2", {"n_heads": 3}),
        ("vocab_size=5.*3 numbers.*nearest valid value: 3", {"vocab_size": 5}),
    ],
)
def test_mistakes_in_a_decoder_are_named(words, arguments):
    with pytest.raises(ValueError, match=words):
        decoded(np.zeros((1, 8, 3), np.float32), body=functools.partial(DECODER, **arguments))


def test_actions_go_in_after_the_body_of_a_sequence_network():
    space, actions = spaces.Box(-1.0, 1.0, (3,), np.float32), spaces.Discrete(4)
    model = models.build(models.Value(DECODER), space, "value", actions)
    params, state = model.init(jax.random.PRNGKey(0), np.zeros((1, 3), np.float32))
    seen = types.Seen(np.ones((1, 8, 3), np.float32), EPISODE)
    values = model.apply(params, state, seen, np.arange(4)[:, None, None].repeat(8, axis=2))
    assert values.shape == (4, 1, 8) and len(np.unique(np.asarray(values)[:, 0, 3])) == 4
    with pytest.raises(ValueError, match="concatenate_actions=True"):
        network = models.Value(DECODER, concatenate_actions=True)
        models.build(network, space, "value", actions).init(jax.random.PRNGKey(0), np.zeros((1, 3)))


@pytest.mark.parametrize("n_outputs", [2, 4])
def test_a_network_with_another_number_of_values_is_refused(n_outputs):
    box = spaces.Box(-1.0, 1.0, (2,), np.float32)
    with pytest.raises(ValueError, match=rf"value_model: .* \(1, {n_outputs}\); nearest .*: \(1, 3\)"):
        models.build(nn.Dense(n_outputs), box, "value", n_actions=3, mode="train")
    models.build(nn.Dense(3), box, "value", n_actions=3, mode="train")


@pytest.mark.parametrize("part", ["value", "shared"])
def test_values_of_another_shape_are_refused(part):
    class Mine(nn.Module):
        """Keeps the last axis of the value."""

        @nn.compact
        def __call__(self, x):
            value = nn.Dense(1)(x)
            return value if part == "value" else (nn.Dense(2)(x), value)

    with pytest.raises(ValueError, match=r"has the shape \(1, 1\); nearest valid shape: \(1,\), one value"):
        models.build(Mine, BOX, part)


def test_values_of_all_actions_begin_near_0():
    model = models.build(models.Quality, BOX, "value", n_actions=3)
    params, state = model.init(KEY, np.zeros((1, 3), np.float32))
    values = model.apply(params, state, np.random.default_rng(0).normal(size=(100, 3)).astype(np.float32))
    assert float(jnp.abs(values).max()) < 0.05


@pytest.mark.parametrize("n_outputs", [1, 2, 4, 5, 16])
def test_a_dense_layer_has_the_output_and_gradients_of_flax(n_outputs):
    x = np.random.default_rng(0).normal(size=(2, 7, 3)).astype(np.float32)

    def loss(params, x, layer):
        return jnp.sum(jnp.sin(layer(n_outputs).apply(params, x)))

    params = nn.Dense(n_outputs).init(KEY, x)
    assert jax.tree.structure(zoo._Dense(n_outputs).init(KEY, x)) == jax.tree.structure(params)
    value, grads = jax.value_and_grad(loss, (0, 1))(params, x, zoo._Dense)
    expected, expected_grads = jax.value_and_grad(loss, (0, 1))(params, x, nn.Dense)
    np.testing.assert_allclose(value, expected, rtol=1e-6)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), grads, expected_grads)


def test_dense_layers_map_over_seeds():
    x = np.random.default_rng(0).normal(size=(6, 3)).astype(np.float32)
    kernels = np.random.default_rng(1).normal(size=(2, 3, 8)).astype(np.float32)
    grads = jax.vmap(jax.grad(lambda kernel: jnp.sum(jnp.square(zoo._product(x, kernel)))))(kernels)
    # d/dW sum (x W)^2 = 2 x' x W.
    np.testing.assert_allclose(grads, 2 * (x.T @ x) @ kernels, rtol=1e-4, atol=1e-4)
