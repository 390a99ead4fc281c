"""Supervised training: batches, one optimizer step by hand, clipping, schedules, scans."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from rl_trainers import optimizers, supervised
from rl_trainers.losses import masked_mean
from rl_trainers.supervised import Inputs, Trainer, eval_weights
from rl_trainers.types import Batch, TrainState

KEY = jax.random.PRNGKey(0)
shuffled = jax.jit(supervised.shuffled, static_argnums=(2, 3))


def visits(index, keep, n_rows):
    """How often each row is visited, over everything in ``index``."""
    return np.bincount(np.asarray(index).ravel(), np.asarray(keep).ravel(), n_rows)


def rows(n, slope=2.0, mask=None):
    """Rows ``[n, 1]`` with x = 1 .. n and targets ``slope * x``."""
    x = np.arange(1.0, n + 1, dtype=np.float32)[:, None]
    mask = np.ones((n, 1), np.float32) if mask is None else np.asarray(mask, np.float32)[:, None]
    zeros = np.zeros_like(x)
    return Batch(x, zeros, zeros, zeros, slope * x, mask)


def squares(params, model_state, batch, hparams):
    """mean((a + b) x - target)^2 with a in 'policy', b in 'value'."""
    guess = (params["policy"]["a"] + params["value"]["b"]) * batch.observation
    loss = masked_mean(jnp.square(guess - batch.value_target), batch.mask)
    return loss, {"loss": loss, "rows": jnp.sum(batch.mask)}


def new_params():
    return {"policy": {"a": jnp.float32(0.5)}, "value": {"b": jnp.float32(0.5)}}


def new_state(trainer, params=None):
    params = new_params() if params is None else params
    return TrainState(params, {}, {trainer.name: trainer.init(params)}, KEY, jnp.int32(0))


def sgd(n_steps=1, batch_size=None, loss=squares, lr=0.01, **kwargs):
    return Trainer(loss, optimizers.SGD, lr, name="joint", batch_size=batch_size, n_steps=n_steps, **kwargs)


def hparams_of(trainer, step=0):
    return {trainer.name: trainer.hparams(step)}


def fit(trainer, data, valid=None, hparams=None):
    valid = np.ones(len(data.mask), bool) if valid is None else valid
    hparams = hparams_of(trainer) if hparams is None else hparams
    return jax.jit(trainer.fit)(new_state(trainer), data, valid, hparams)


def leaves(state):
    return [np.array(x) for x in jax.tree.leaves(state.params)]


# shuffled


@pytest.mark.parametrize("n_rows, batch_size", [(64, 16), (65, 64), (7, 3), (5, 5), (1, 1)])
def test_each_row_comes_once_in_a_pass(n_rows, batch_size):
    n_batches = -(-n_rows // batch_size)
    index, keep = shuffled(KEY, jnp.ones(n_rows, bool), batch_size, n_batches)
    assert index.shape == keep.shape == (n_batches, batch_size)
    np.testing.assert_array_equal(visits(index, keep, n_rows), np.ones(n_rows))


def test_65_rows_make_batches_of_33_and_32():
    _, keep = shuffled(KEY, jnp.ones(65, bool), 64, 4)
    np.testing.assert_array_equal(keep.sum(1), [33, 32, 33, 32])


def test_visits_are_the_number_of_passes():
    # 3 passes of ceil(10 / 4) = 3 batches; the passes are different permutations.
    index, keep = shuffled(KEY, jnp.ones(10, bool), 4, 9)
    np.testing.assert_array_equal(visits(index, keep, 10), np.full(10, 3))
    passes = [np.asarray(index[i : i + 3])[np.asarray(keep[i : i + 3]) > 0] for i in (0, 3, 6)]
    assert not np.array_equal(passes[0], passes[1])
    assert not np.array_equal(passes[1], passes[2])


def test_invalid_rows_are_never_visited_and_the_others_equally_often():
    # 37 valid rows in batches of 8: ceil(37 / 8) = 5 batches of 8, 8, 7, 7, 7; 10 batches are 2 passes.
    valid = np.zeros(100, bool)
    valid[3:77:2] = True
    index, keep = shuffled(KEY, jnp.asarray(valid), 8, 10)
    np.testing.assert_array_equal(visits(index, keep, 100), 2.0 * valid)
    np.testing.assert_array_equal(keep.sum(1), [8, 8, 7, 7, 7] * 2)


def test_few_valid_rows_make_more_passes_than_there_are_permutations():
    # 2 valid of 100 rows, batch 50: one batch holds both; 4 steps visit each 4 times.
    valid = np.zeros(100, bool)
    valid[[3, 70]] = True
    index, keep = shuffled(KEY, jnp.asarray(valid), 50, 4)
    np.testing.assert_array_equal(visits(index, keep, 100), 4.0 * valid)


def test_no_valid_row_at_all_keeps_shapes_finite():
    index, keep = shuffled(KEY, jnp.zeros(6, bool), 4, 2)
    assert index.shape == keep.shape == (2, 4)
    assert int(index.min()) >= 0 and int(index.max()) < 6


def test_a_cut_pass_differs_by_key():
    first, _ = shuffled(KEY, jnp.ones(50, bool), 10, 2)
    again, _ = shuffled(KEY, jnp.ones(50, bool), 10, 2)
    other, _ = shuffled(jax.random.PRNGKey(1), jnp.ones(50, bool), 10, 2)
    np.testing.assert_array_equal(first, again)
    assert not np.array_equal(first, other)


# blocks


@pytest.mark.parametrize(
    "n_rows, batch_size, num_envs, block",
    [
        (8 * 2048, 64, 8, 1),  # 16,384 rows are single ones
        (64 * 128, 2048, 64, 1),
        (512 * 128, 16384, 512, 4),
        (2048 * 128, 65536, 2048, 16),
        (2048 * 128, 1000, 2048, 8),  # 1000 = 8 * 125
        (2048 * 128, 65536, 1001, 1),
        (2048 * 128, 65535, 2048, 1),
        (1536 * 128, 49152, 1536, 8),  # 16 would leave 12,288 blocks
    ],
)
def test_block_size(n_rows, batch_size, num_envs, block):
    assert supervised.block_size(n_rows, batch_size, num_envs) == block


def seen_rows(monkeypatch, n_rows, batch_size, n_steps, num_envs, valid, min_blocks=1, mask=None):
    """What row numbers ``1 .. R`` a loss sees in each step of a fit, and with which mask."""
    monkeypatch.setattr(supervised, "_MIN_BLOCKS", min_blocks)
    trainer = sgd(n_steps=n_steps, batch_size=batch_size)
    state, batches = trainer._shuffle(new_state(trainer), jnp.asarray(valid), num_envs)
    data = rows(n_rows, mask=mask)
    taken = [supervised._take(data, jax.tree.map(lambda x, i=i: x[i], batches)) for i in range(n_steps)]
    return [(np.ravel(batch.observation).astype(int), np.ravel(batch.mask)) for batch in taken]


def test_blocks_of_neighbours_come_whole_and_once_in_a_pass(monkeypatch):
    # 6 times of 4 environments in batches of 8 rows: blocks of 4 rows, 2 in a batch, 3 batches a pass.
    seen = seen_rows(monkeypatch, 24, 8, 6, 4, np.ones(24, bool))
    for row, mask in seen:
        assert row.shape == (8,)
        np.testing.assert_array_equal(mask, 1)
        np.testing.assert_array_equal(np.diff(row.reshape(2, 4)), 1)
        np.testing.assert_array_equal(row.reshape(2, 4)[:, 0] % 4, 1)
    for one_pass in (seen[:3], seen[3:]):
        np.testing.assert_array_equal(np.sort(np.concatenate([row for row, _ in one_pass])), np.arange(1, 25))


def test_of_a_block_only_its_valid_rows_count(monkeypatch):
    # Blocks 1-4, 5-8, 9-12, 13-16; of the second one row is valid, of the third none: 3 blocks, 2 batches.
    valid = np.array([1] * 4 + [0, 0, 1, 0] + [0] * 4 + [1, 1, 0, 1], bool)
    seen = seen_rows(monkeypatch, 16, 8, 2, 4, valid)
    counted = np.concatenate([row[mask > 0] for row, mask in seen])
    np.testing.assert_array_equal(np.sort(counted), [1, 2, 3, 4, 7, 13, 14, 16])


def test_the_rows_own_mask_counts_within_a_block(monkeypatch):
    mask = np.ones(16)
    mask[[2, 9]] = 0
    seen = seen_rows(monkeypatch, 16, 8, 2, 4, np.ones(16, bool), mask=mask)
    counted = np.concatenate([row[mask > 0] for row, mask in seen])
    np.testing.assert_array_equal(np.sort(counted), [1, 2, 4, 5, 6, 7, 8, 9, 11, 12, 13, 14, 15, 16])


def test_few_rows_are_shuffled_one_by_one_as_without_environments(monkeypatch):
    # 1,024 rows of 8 environments: the row numbers are those of shuffled().
    seen = seen_rows(monkeypatch, 1024, 256, 4, 8, np.ones(1024, bool), min_blocks=1 << 14)
    index, _ = shuffled(jax.random.split(KEY)[1], jnp.ones(1024, bool), 256, 4)
    np.testing.assert_array_equal(np.stack([row - 1 for row, _ in seen]), index)


def test_slices_keep_their_axes_in_blocks(monkeypatch):
    monkeypatch.setattr(supervised, "_MIN_BLOCKS", 1)
    data = rows(8)
    x = np.concatenate([data.observation, -data.observation], axis=1)
    data = Batch(x, x, x, x, x, np.ones((8, 2), np.float32))
    trainer = sgd(n_steps=2, batch_size=4)
    _, batches = trainer._shuffle(new_state(trainer), jnp.ones(8, bool), 2)
    batch = supervised._take(data, jax.tree.map(lambda x: x[0], batches))
    assert batch.observation.shape == batch.mask.shape == (4, 2)
    np.testing.assert_array_equal(batch.observation[:, 0], -batch.observation[:, 1])


def test_blocks_change_no_full_batch(monkeypatch):
    # All rows in one batch: the gradient is the same in whatever order they stand.
    results = []
    for min_blocks in (1, 1 << 14):
        monkeypatch.setattr(supervised, "_MIN_BLOCKS", min_blocks)
        trainer = sgd(n_steps=2, batch_size=None, lr=1e-3)
        fit_blocks = jax.jit(trainer.fit, static_argnums=4)
        state, _ = fit_blocks(new_state(trainer), rows(16), np.ones(16, bool), hparams_of(trainer), 4)
        results.append(leaves(state))
    np.testing.assert_allclose(*results, rtol=1e-6)


# eval_weights


def test_10_steps_and_3_evaluations_make_4_3_3():
    np.testing.assert_allclose(eval_weights(10, 3, None), np.full(10, 0.1), atol=1e-7)
    # The last step of each part: 4, 4 + 3, 4 + 3 + 3.
    np.testing.assert_allclose(eval_weights(10, 3, 1), [0, 0, 0, 1 / 3, 0, 0, 1 / 3, 0, 0, 1 / 3])
    np.testing.assert_allclose(eval_weights(10, 3, 2) * 6, [0, 0, 1, 1, 0, 1, 1, 0, 1, 1], atol=1e-6)


def test_more_eval_steps_than_a_part_has_count_all_of_it():
    np.testing.assert_allclose(eval_weights(4, 2, 100), np.full(4, 0.25))


# update


def test_one_sgd_step_by_hand():
    # x = 1, 2, targets 2, 4, a + b = 1: residuals -1, -2; dL/da = mean(2 r x) = (-2 - 8) / 2 = -5.
    trainer = sgd(lr=0.1)
    mine = {"learning_rate": jnp.float32(0.1), "clip_grad_norm": jnp.float32(np.inf)}
    state, metrics = trainer.update(new_state(trainer), rows(2), mine, {})
    assert float(state.params["policy"]["a"]) == pytest.approx(1.0)
    assert float(state.params["value"]["b"]) == pytest.approx(1.0)
    assert float(metrics["loss"]) == pytest.approx((1 + 4) / 2)
    assert float(metrics["grad_norm"]) == pytest.approx(np.sqrt(50))
    assert int(state.step) == 1


def test_only_the_named_subtrees_train():
    trainer = Trainer(
        squares, optimizers.SGD, 0.1, name="policy", trains=("policy",), batch_size=None, n_steps=3
    )
    state, metrics = fit(trainer, rows(2))
    assert float(state.params["value"]["b"]) == 0.5
    assert float(state.params["policy"]["a"]) != 0.5
    # a alone has to make up for it: a -> 1.5, with d/da = -5 (1.5 - a) per step of .1: .5^3 is left.
    assert float(state.params["policy"]["a"]) == pytest.approx(1.5 - 0.125)


def norm_ten(params, model_state, batch, hparams):
    """Gradient (6, 8), of norm 10."""
    return 6.0 * params["policy"]["a"] + 8.0 * params["value"]["b"], {}


@pytest.mark.parametrize("clip, norm", [(0.5, 0.5), (20.0, 10.0), (np.inf, 10.0)])
def test_a_gradient_of_norm_10_is_clipped(clip, norm):
    trainer = sgd(loss=norm_ten)
    mine = {"learning_rate": jnp.float32(1.0), "clip_grad_norm": jnp.float32(clip)}
    state, metrics = trainer.update(new_state(trainer), rows(2), mine, {})
    assert float(metrics["grad_norm"]) == pytest.approx(10.0)
    assert float(metrics["clipped_grad_norm"]) == pytest.approx(norm)
    # One SGD step of rate 1 moves by the clipped gradient, (.6, .8) of its norm.
    assert float(state.params["policy"]["a"]) == pytest.approx(0.5 - 0.6 * norm)
    assert float(state.params["value"]["b"]) == pytest.approx(0.5 - 0.8 * norm)


def test_the_optimizers_own_clip_norm_is_used():
    def optimizer(learning_rate):
        return optimizers.SGD(learning_rate, clip_grad_norm=0.5)

    trainer = Trainer(norm_ten, optimizer, 1.0, batch_size=None, n_steps=1)
    assert trainer.clip_grad_norm == 0.5
    assert float(trainer.hparams(0)["clip_grad_norm"]) == 0.5


def test_a_zero_gradient_stays_zero():
    def flat(params, model_state, batch, hparams):
        return 0.0 * params["policy"]["a"], {}

    trainer = sgd(loss=flat)
    mine = {"learning_rate": jnp.float32(1.0), "clip_grad_norm": jnp.float32(0.5)}
    state, metrics = trainer.update(new_state(trainer), rows(2), mine, {})
    assert float(metrics["grad_norm"]) == float(metrics["clipped_grad_norm"]) == 0.0
    np.testing.assert_array_equal(leaves(state), [0.5, 0.5])


# fit


def test_learning_rates_are_used_step_by_step():
    trainer = sgd(n_steps=4, batch_size=2)
    zeros = {"joint": {**trainer.hparams(0), "learning_rate": np.zeros(4, np.float32)}}
    state, _ = fit(trainer, rows(4), hparams=zeros)
    np.testing.assert_array_equal(leaves(state), [0.5, 0.5])
    assert int(state.step) == 4
    # Only the last step counts; the gradient of norm_ten does not depend on rows: a = .5 - 6 * .01.
    trainer = sgd(n_steps=4, batch_size=2, loss=norm_ten)
    last = {"joint": {**trainer.hparams(0), "learning_rate": np.float32([0, 0, 0, 0.01])}}
    state, _ = fit(trainer, rows(4), hparams=last)
    assert float(state.params["policy"]["a"]) == pytest.approx(0.44)


def test_hparams_follow_the_schedule_from_the_step_given():
    trainer = Trainer(squares, optimizers.SGD, lambda step: 1.0 / step, batch_size=None, n_steps=3)
    np.testing.assert_allclose(trainer.hparams(0)["learning_rate"], [1, 1 / 2, 1 / 3], rtol=1e-6)
    np.testing.assert_allclose(trainer.hparams(3)["learning_rate"], [1 / 4, 1 / 5, 1 / 6], rtol=1e-6)


def test_changing_learning_rate_and_clip_compiles_nothing():
    trainer = sgd(n_steps=3, batch_size=2)
    compiled = jax.jit(trainer.fit)
    valid, results = np.ones(4, bool), []
    for lr, clip in ((0.1, np.inf), (0.01, 0.5), (0.02, 0.001)):
        trainer.clip_grad_norm = clip
        hparams = hparams_of(trainer)
        hparams["joint"]["learning_rate"] = np.full(3, lr, np.float32)
        state, _ = compiled(new_state(trainer), rows(4), valid, hparams)
        results.append(float(state.params["policy"]["a"]))
    assert compiled._cache_size() == 1
    assert len(set(results)) == 3
    # Three steps of rate .02 along gradients of norm .001, whose two entries are equal.
    assert results[2] == pytest.approx(0.5 + 3 * 0.02 * 0.001 / np.sqrt(2), abs=1e-7)


def test_a_finished_optax_transformation_works():
    trainer = Trainer(norm_ten, optax.sgd(0.25), name="joint", batch_size=None, n_steps=2)
    state, _ = fit(trainer, rows(2))
    # Two steps of .25 along (6, 8), whatever the schedule says.
    np.testing.assert_allclose(leaves(state), [0.5 - 3, 0.5 - 4], atol=1e-5)


def test_one_pass_is_the_same_as_a_loop_over_the_batches():
    trainer = Trainer(squares, optimizers.Adam, 0.1, name="joint", batch_size=4, n_steps=3)
    state, data, valid = new_state(trainer), rows(10), np.ones(10, bool)
    got, metrics = fit(trainer, data)
    key, key_shuffle = jax.random.split(KEY)
    index, keep = shuffled(key_shuffle, valid, 4, 3)
    state = state._replace(key=key)
    mine = {"learning_rate": jnp.float32(0.1), "clip_grad_norm": jnp.float32(np.inf)}
    losses, update = [], jax.jit(trainer.update)
    for i in range(3):
        batch = jax.tree.map(lambda x, i=i: x[np.asarray(index[i])], data)
        batch = batch._replace(mask=batch.mask * np.asarray(keep[i])[:, None])
        state, step_metrics = update(state, batch, mine, {})
        losses.append(float(step_metrics["loss"]))
    np.testing.assert_allclose(leaves(got), leaves(state), rtol=1e-6)
    np.testing.assert_array_equal(got.key, state.key)
    assert float(metrics["loss"]) == pytest.approx(np.mean(losses), rel=1e-6)
    assert float(metrics["rows"]) == pytest.approx(10 / 3)


def test_a_batch_larger_than_the_data_is_all_the_data():
    small = sgd(n_steps=2, batch_size=1000)
    every = sgd(n_steps=2, batch_size=None)
    results = []
    for trainer in (small, every):
        state, metrics = fit(trainer, rows(3))
        results.append(leaves(state))
        assert float(metrics["rows"]) == 3.0
    np.testing.assert_array_equal(*results)


def test_rows_with_junk_that_are_padding_change_nothing():
    trainer = sgd(n_steps=6, batch_size=4)
    clean, junk = rows(8, mask=[1] * 5 + [0] * 3), rows(8, mask=[1] * 5 + [0] * 3)
    junk.observation[5:] = 1e6
    junk.value_target[5:] = -1e6
    valid = clean.mask[:, 0] > 0
    results = [fit(trainer, data, valid) for data in (clean, junk)]
    np.testing.assert_array_equal(*[leaves(state) for state, _ in results])
    for name, value in results[0][1].items():
        assert float(value) == float(results[1][1][name]), name


def test_nothing_valid_moves_nothing():
    trainer = sgd(n_steps=2, batch_size=4)
    data = rows(8, mask=[0] * 8)
    state, metrics = fit(trainer, data, np.zeros(8, bool))
    np.testing.assert_array_equal(leaves(state), [0.5, 0.5])
    assert float(metrics["loss"]) == 0.0


def test_the_number_of_evaluations_changes_no_parameter():
    # One batch of x = 1 .. 4 with mean x^2 = 7.5: the residual shrinks by 1 - .01 * 2 * 2 * 7.5 = .7.
    losses = 7.5 * 0.49 ** np.arange(6)
    expected = {(1, None): losses.mean(), (3, 1): losses[[1, 3, 5]].mean(), (1, 1): losses[5]}
    results = []
    for (n_evals, n_eval_steps), loss in expected.items():
        trainer = sgd(n_steps=6, n_evals=n_evals, n_eval_steps=n_eval_steps)
        state, metrics = fit(trainer, rows(4))
        results.append(leaves(state))
        assert float(metrics["loss"]) == pytest.approx(loss, rel=1e-4)
    np.testing.assert_array_equal(results[0], results[1])
    np.testing.assert_array_equal(results[0], results[2])


def test_fit_consumes_the_key():
    trainer = sgd(n_steps=1, batch_size=2)
    state, _ = fit(trainer, rows(4))
    assert not np.array_equal(state.key, KEY)


# fit_batches and draw


def test_fit_batches_is_the_update_repeated():
    trainer = Trainer(squares, optimizers.Adam, 0.1, name="joint", batch_size=None, n_steps=3)
    batches = [rows(2, slope) for slope in (1.0, 2.0, 3.0)]
    stacked = jax.tree.map(lambda *xs: np.stack(xs), *batches)
    fit_batches = jax.jit(trainer.fit_batches)
    got, metrics = fit_batches(new_state(trainer), stacked, hparams_of(trainer))
    state, losses, update = new_state(trainer), [], jax.jit(trainer.update)
    mine = {"learning_rate": jnp.float32(0.1), "clip_grad_norm": jnp.float32(np.inf)}
    for batch in batches:
        state, step_metrics = update(state, batch, mine, {})
        losses.append(float(step_metrics["loss"]))
    np.testing.assert_allclose(leaves(got), leaves(state), rtol=1e-6)
    assert float(metrics["loss"]) == pytest.approx(np.mean(losses), rel=1e-6)
    assert int(got.step) == 3


def test_draw_takes_n_steps_batches_from_the_stream():
    seen = []

    def stream(n_devices):
        seen.append(n_devices)
        for slope in range(100):
            yield rows(2, slope)

    trainer = sgd(n_steps=3, inputs=Inputs(stream))
    drawn = trainer.draw()
    assert seen == [1]
    np.testing.assert_array_equal(drawn.value_target[:, :, 0], [[0, 0], [1, 2], [2, 4]])


def test_draw_without_inputs_is_refused():
    with pytest.raises(ValueError, match="no inputs"):
        sgd().draw()


# construction


@pytest.mark.parametrize(
    "arguments, message",
    [
        ({"batch_size": 0}, "batch_size=0 must be a whole number of at least 1"),
        ({"n_steps": 0}, "train steps per epoch=0"),
        ({"n_steps": 9, "n_evals": 10}, "evals_per_epoch=10 must lie between 1 and the 9"),
        ({"n_steps": 9, "n_evals": 0}, "evals_per_epoch=0"),
        ({"n_eval_steps": 0}, "eval_steps=0 must be at least 1"),
    ],
)
def test_counts_out_of_range_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        Trainer(squares, **arguments)


def test_a_finished_transformation_with_a_schedule_is_refused():
    with pytest.raises(ValueError, match="lr_schedule has no effect"):
        Trainer(squares, optax.sgd(0.1), 0.1)


def test_1000_steps_compile_as_fast_as_10():
    # One scan: the traced program has the same number of equations.
    sizes = []
    for n_steps in (10, 1000):
        trainer = sgd(n_steps=n_steps, batch_size=2)
        jaxpr = jax.make_jaxpr(trainer.fit)(
            new_state(trainer), rows(4), jnp.ones(4, bool), hparams_of(trainer)
        )
        sizes.append(str(jaxpr).count("\n"))
    assert sizes[1] < 1.2 * sizes[0]
