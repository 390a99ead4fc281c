"""The replayers, on rows that carry the number of their environment and their place in its stream."""

import collections

import jax.numpy as jnp
import numpy as np
import pytest

from rl_trainers.advantages import lambda_returns
from rl_trainers.drivers import CycleOneTimeReplayer, OneTimeReplayer, UniformReplayer, make_replayer
from rl_trainers.types import EnvInfo, Rollout, TimeStep

EPISODE = 3  # decisions; row i of a stream is a reset row where i % 4 == 3


def rows(env, i, length):
    """Rows ``i ..`` of the streams of ``env [B]``: their observations are ``[env, i]``, their rewards i."""
    env, i = np.asarray(env), np.asarray(i) + np.arange(length + 1)[:, None]
    observation = np.stack(np.broadcast_arrays(env, i), -1)
    i = observation[:-1, :, 1]
    place = i % (EPISODE + 1)
    decides = (place < EPISODE).astype(np.float32)
    steps = TimeStep(
        observation=observation[:-1],
        action=10 * i,
        reward=i * decides,
        terminated=place == EPISODE - 1,
        truncated=np.zeros(i.shape, bool),
        mask=decides,
        dist_inputs=np.float32(i)[..., None],
        policy_state=(-i[..., None],),
    )
    return Rollout(steps, observation[-1], 7)


def check_rows(data):
    """Every row that takes part is one of its environment's stream, and the next one succeeds it."""
    steps = data.steps
    env, i = steps.observation[..., 0], steps.observation[..., 1]
    assert (env == env[0]).all()
    label = np.where(steps.mask > 0, i, 0)
    np.testing.assert_array_equal(steps.reward, label)
    np.testing.assert_array_equal(steps.action, 10 * i)
    np.testing.assert_array_equal(steps.dist_inputs[..., 0], i)
    np.testing.assert_array_equal(steps.policy_state[0][..., 0], -i)
    np.testing.assert_array_equal(steps.terminated, (i % 4 == 2) & (steps.mask > 0))
    following = np.concatenate([i[1:], data.last_observation[None, :, 1]])
    assert ((following == i + 1) | (steps.mask == 0)).all()


def labels(data):
    """Places of the rows and of the successor of the last one, a list for each column."""
    all_rows = np.concatenate([data.steps.observation, data.last_observation[None]])
    return all_rows[..., 1].T.tolist()


def decisions(data):
    """How often each ``(env, i)`` can be trained."""
    return collections.Counter(map(tuple, data.steps.observation[data.steps.mask > 0].tolist()))


# One time.


def test_one_time_gives_the_newest_rollout_as_it_is_and_once():
    replayer = OneTimeReplayer()
    replayer.observe(rows([0, 1], 0, 2), np.arange(2))
    newest = rows([4, 4, 2], [3, 9, 6], 6)  # two unrolls of environment 4
    replayer.observe(newest, np.array([4, 4, 2]))
    assert (replayer.batch_size, replayer.total_size) == (3, 18)
    data = replayer.replay_all()
    assert data is newest and data.last_observation.tolist() == [[4, 9], [4, 15], [2, 12]]
    with pytest.raises(RuntimeError, match="one_time: nothing was observed since"):
        replayer.replay_all()
    assert (replayer.batch_size, replayer.total_size) == (3, 0)


def test_one_time_forgets_when_cleared():
    replayer = OneTimeReplayer()
    with pytest.raises(RuntimeError, match="batch_size is not known before the first observe"):
        _ = replayer.batch_size
    replayer.observe(rows([0], 0, 2), np.arange(1))
    replayer.clear()
    with pytest.raises(RuntimeError, match="nothing was observed"):
        replayer.replay_all()


# Uniform.


@pytest.mark.parametrize("length", [1, 2, 3, 4, 5, 11])
def test_uniform_holds_the_newest_rows_in_order_at_every_fill_and_after_it_wraps(length):
    replayer, capacity = UniformReplayer(2, max_length=4), 4
    for i in range(0, 12 * length, length):
        replayer.observe(rows([0, 1], [i, i + 100], length), np.arange(2))
        data, end = replayer.replay_all(), i + length
        held = min(end, capacity)
        assert labels(data) == [list(range(end - held + k, end + k + 1)) for k in (0, 100)]
        assert replayer.total_size == 2 * held and data.policy_version == 7
        check_rows(data)


def test_uniform_holds_what_every_environment_did_under_its_number():
    replayer = UniformReplayer(3, max_length=5)
    replayer.observe(rows([2, 0], 0, 3), np.array([2, 0]))
    replayer.observe(rows([1], 0, 4), np.array([1]))
    # Two unrolls of environment 2 at once, which follow one another, around one of environment 1.
    replayer.observe(rows([2, 1, 2], [3, 4, 5], 2), np.array([2, 1, 2]))
    assert replayer.total_size == 3 + 5 + 5
    with pytest.raises(ValueError, match="environment 0 holds 3 rows and environment 1 holds 5"):
        replayer.replay_all()
    data = replayer.replay(300, 3)
    check_rows(data)
    seen = collections.defaultdict(set)
    for column in data.steps.observation.swapaxes(0, 1):
        seen[column[0, 0]].add(column[0, 1])
    assert seen == {0: {0}, 1: {1, 2, 3}, 2: {2, 3, 4}}
    assert replayer.batch_size == 3


@pytest.mark.parametrize("n", [3, 4, 8, 10, 13, 128])
def test_uniform_draws_as_many_of_each_environment_but_for_the_rest(n):
    replayer = UniformReplayer(4, max_length=6)
    replayer.observe(rows(range(4), 0, 9), np.arange(4))
    for _ in range(20):
        data = replayer.replay(n, 2)
        assert data.steps.mask.shape == (2, n)
        counts = np.bincount(data.steps.observation[0, :, 0], minlength=4)
        assert sorted(counts) == [n // 4] * (4 - n % 4) + [n // 4 + 1] * (n % 4)
        check_rows(data)


@pytest.mark.parametrize("filled", [6, 10, 23])
def test_uniform_draws_all_starts_equally_often(filled):
    """Chi-square with 7 degrees of freedom at most; its 0.999 quantile is 24.3 there."""
    replayer = UniformReplayer(2, max_length=10, seed=3)
    for i in range(filled):
        replayer.observe(rows([0, 1], i, 1), np.arange(2))
    held = min(filled, 10)
    starts = held - 3 + 1
    data = replayer.replay(2 * 1000 * starts, 3)
    check_rows(data)
    first = data.steps.observation[0]
    for env in (0, 1):
        counts = np.bincount(first[first[:, 0] == env, 1] - (filled - held), minlength=starts)
        assert len(counts) == starts and counts.sum() == 1000 * starts
        assert ((counts - 1000.0) ** 2 / 1000).sum() < 24.3


def test_uniform_needs_enough_rows_of_every_environment():
    replayer = UniformReplayer(2)
    with pytest.raises(RuntimeError, match="uniform: nothing was observed"):
        replayer.replay_all()
    replayer.observe(rows([0, 1], 0, 3), np.arange(2))
    replayer.observe(rows([0], 3, 3), np.arange(1))
    assert replayer.replay(2, 3).steps.mask.shape == (3, 2)
    with pytest.raises(ValueError, match="environment 1 holds 3 rows, which is less than length=4"):
        replayer.replay(2, 4)
    with pytest.raises(ValueError, match="n=0 must be a whole number of at least 1"):
        replayer.replay(0, 3)


def test_uniform_asks_its_arguments_at_each_call_and_gives_nothing_from_before_a_clear():
    replayer = UniformReplayer(2, max_length=8)
    replayer.observe(rows([0, 1], 0, 8), np.arange(2))
    shapes = [replayer.replay(n, length).steps.mask.shape for n, length in [(2, 3), (5, 1), (1, 8)]]
    assert shapes == [(3, 2), (1, 5), (8, 1)]
    replayer.clear()
    assert replayer.total_size == 0
    with pytest.raises(RuntimeError, match="nothing was observed of environment 0 yet; collect more"):
        replayer.replay(1, 1)
    replayer.observe(rows([0, 1], 8, 3), np.arange(2))
    assert labels(replayer.replay_all()) == [[8, 9, 10, 11]] * 2  # no cut: nothing is stored before it
    assert replayer.replay(100, 1).steps.observation[..., 1].min() == 8


def test_uniform_repeats_its_draws_with_its_seed():
    def draws(seed):
        replayer = UniformReplayer(2, seed=seed)
        replayer.observe(rows([0, 1], 0, 50), np.arange(2))
        return [labels(replayer.replay(9, 3)) for _ in range(2)]

    assert draws(1) == draws(1) == draws(np.random.default_rng(1)) != draws(2)
    assert draws(1)[0] != draws(1)[1]


@pytest.mark.parametrize("told", [False, True])
def test_nothing_bootstraps_across_a_break(told):
    replayer = UniformReplayer(2, max_length=8)
    replayer.observe(rows([0, 1], 0, 2), np.arange(2))
    if told:
        replayer.restart(np.array([0]))
    # Environment 0 begins anew at another row, or at the row that looks as if it went on.
    replayer.observe(rows([0], 2 if told else 40, 3), np.array([0]))
    replayer.observe(rows([1], 2, 4), np.array([1]))
    data = replayer.replay_all()
    start = 2 if told else 40
    assert labels(data) == [[0, 1, 2, start, start + 1, start + 2, start + 3], [0, 1, 2, 3, 4, 5, 6]]
    assert data.steps.mask[:, 0].tolist()[:4] == [1, 1, 0, 1]
    values = jnp.float32([[1000.0, 5], [2000, 5], [3000, 5], [4000, 5], [5000, 5], [6000, 5], [7000, 5]])
    targets = lambda_returns(data.steps, values, 0.5, 1.0)[:2, 0]
    # Row 1: reward 1 and half of the value of row 2; row 0: reward 0 and half of that.
    np.testing.assert_allclose(targets, [0.5 * (1 + 1500), 1 + 1500])
    replayer.observe(rows([0, 1], [start + 3, 6], 1), np.arange(2))  # goes on: one cut is enough
    assert labels(replayer.replay_all())[0] == [0, 1, 2, start, start + 1, start + 2, start + 3, start + 4]


def test_a_break_right_after_an_episode_keeps_its_end():
    replayer = UniformReplayer(1)
    replayer.observe(rows([0], 0, 3), np.array([0]))  # row 2 terminates
    replayer.observe(rows([0], 40, 1), np.array([0]))
    data = replayer.replay_all()
    assert labels(data) == [[0, 1, 2, 3, 40, 41]]
    assert data.steps.mask[:, 0].tolist() == [1, 1, 1, 0, 1]
    assert data.steps.terminated[:, 0].tolist() == [False, False, True, False, False]
    assert data.steps.reward[:, 0].tolist() == [0, 1, 2, 0, 40]


def test_leaves_keep_their_dtypes_and_trees_their_structure():
    def data(i):
        image = np.full((2, 1, 4, 4, 3), i, np.uint8)
        steps = TimeStep(
            observation={"image": image, "x": np.full((2, 1), i, np.float32)},
            action=(np.full((2, 1), i, np.int32), np.zeros((2, 1, 2), np.float32)),
            reward=np.zeros((2, 1), np.float32),
            terminated=np.zeros((2, 1), bool),
            truncated=np.zeros((2, 1), bool),
            mask=np.ones((2, 1), np.float32),
        )
        return Rollout(steps, {"image": image[0], "x": np.full(1, i, np.float32)})

    for replayer in (UniformReplayer(1), CycleOneTimeReplayer(1, unroll_length=2)):
        replayer.observe(data(3), np.array([0]))
        out = replayer.replay_all()
        assert out.steps.observation["image"].dtype == out.last_observation["image"].dtype == np.uint8
        assert out.steps.action[0].dtype == np.int32 and out.steps.terminated.dtype == bool
        assert out.steps.dist_inputs is None and out.steps.policy_state == ()
        assert out.steps.mask.dtype == np.float32
        np.testing.assert_array_equal(out.steps.env_info.discount_mask, np.ones_like(out.steps.mask))
        with pytest.raises(ValueError, match="rollout: is "):
            replayer.observe(
                data(3)._replace(steps=data(3).steps._replace(policy_state=np.zeros((2, 1)))), [0]
            )
        wider = data(3).steps._replace(action=(np.zeros((2, 1, 9)), np.zeros((2, 1, 2))))
        with pytest.raises(ValueError, match=r"has rows of shape \(9,\), the replayer holds \(\)"):
            replayer.observe(data(3)._replace(steps=wider), [0])


def test_what_came_out_is_not_changed_by_what_comes_in():
    for replayer in (UniformReplayer(1, max_length=3), CycleOneTimeReplayer(1, unroll_length=3)):
        replayer.observe(rows([0], 0, 3), np.array([0]))
        data = replayer.replay_all()
        before = labels(data)
        for i in range(3, 30, 3):
            replayer.observe(rows([0], i, 3), np.array([0]))
            replayer.replay_all()
        assert labels(data) == before
        check_rows(data)


# Cycle.


@pytest.mark.parametrize("length", [2, 3, 8])
def test_cycle_gives_every_step_once_over_five_unrolls(length):
    replayer = CycleOneTimeReplayer(3, unroll_length=length)
    trained, at = collections.Counter(), 0
    for unroll in range(5):
        replayer.observe(rows(range(3), at, length), np.arange(3))
        data = replayer.replay_all()
        check_rows(data)
        first = max(0, at - 1)  # the newest row of the unroll before
        at += length
        assert labels(data) == [list(range(first, at))] * 3  # with the successor
        assert data.steps.mask.shape == (length - 1 if unroll == 0 else length, 3)
        trained += decisions(data)
        replayer.clear()
    assert trained == {(env, i): 1 for env in range(3) for i in range(at - 1) if i % 4 != 3}


def test_cycle_gives_every_step_once_when_environments_are_of_unequal_speed():
    """Three unrolls of length 4 at a time, of four environments; one may come twice."""
    replayer = CycleOneTimeReplayer(4, num_envs=4, unroll_length=4, learn_queue_cap=2)
    trained, at = collections.Counter(), np.zeros(4, int)
    lengths = []
    for env_id in [[0, 0, 1], [1, 0, 2], [2, 2, 2], [0, 1, 2], [3, 0, 3], [0, 1, 2], [3, 1, 3]]:
        starts = []
        for env in env_id:
            starts.append(at[env])
            at[env] += 4
        replayer.observe(rows(env_id, starts, 4), np.array(env_id))
        data = replayer.replay_all()
        check_rows(data)
        distinct = list(dict.fromkeys(env_id))
        assert data.last_observation.tolist() == [[env, at[env] - 1] for env in distinct]
        assert replayer.batch_size == len(distinct)
        lengths.append(len(data.steps.mask))
        trained += decisions(data)
    # First unrolls give one row less: 2 * 4 - 1, then 4 (as 1 and 0 were there before), and so on.
    assert lengths == [7, 4, 12, 4, 7, 4, 8]
    assert at.tolist() == [24, 20, 24, 16]
    assert trained == {(env, i): 1 for env in range(4) for i in range(at[env] - 1) if i % 4 != 3}


def test_cycle_pads_behind_with_the_last_observation():
    replayer = CycleOneTimeReplayer(2, unroll_length=3)
    replayer.observe(rows([0], 0, 3), np.array([0]))
    replayer.replay_all()
    replayer.observe(rows([1, 0], [0, 3], 3), np.array([1, 0]))
    data = replayer.replay_all()
    assert labels(data) == [[0, 1, 2, 2], [2, 3, 4, 5]]
    assert data.steps.mask.T.tolist() == [[1, 1, 0], [1, 0, 1]]  # row 3 is a reset row
    assert data.steps.terminated.T.tolist() == [[False, False, False], [True, False, False]]
    assert data.steps.reward.T.tolist() == [[0, 1, 0], [2, 0, 4]]


def test_cycle_with_unrolls_of_one_row_trains_a_row_late():
    replayer = CycleOneTimeReplayer(1, unroll_length=1)
    outs = []
    for i in range(4):
        replayer.observe(rows([0], i, 1), np.array([0]))
        outs.append(replayer.replay_all())
    assert [labels(data) for data in outs] == [[[0, 0]], [[0, 1]], [[1, 2]], [[2, 3]]]
    assert [data.steps.mask.tolist() for data in outs] == [[[0]], [[1]], [[1]], [[1]]]


@pytest.mark.parametrize("told", [False, True])
def test_cycle_trains_the_row_before_a_break_with_its_own_successor(told):
    replayer = CycleOneTimeReplayer(2, unroll_length=2)
    replayer.observe(rows([0, 1], 0, 2), np.arange(2))
    replayer.replay_all()
    if told:
        replayer.restart([1])
    replayer.observe(rows([0, 1], [2, 2 if told else 40], 2), np.arange(2))
    data = replayer.replay_all()
    assert labels(data) == [[1, 2, 3, 3], [1, 2, 2, 3] if told else [1, 2, 40, 41]]
    assert data.steps.mask.T.tolist() == [[1, 1, 0], [1, 0, 1]]
    values = jnp.float32(100 * np.arange(8).reshape(4, 2))
    assert lambda_returns(data.steps, values, 1.0, 1.0)[0, 1] == 1 + 300


def test_cycle_wants_observe_and_replay_all_in_turn_and_is_not_cleared():
    replayer = CycleOneTimeReplayer(1, unroll_length=4)
    with pytest.raises(RuntimeError, match="batch_size is not known"):
        _ = replayer.batch_size
    with pytest.raises(RuntimeError, match="cycle_one_time: nothing was observed"):
        replayer.replay_all()
    replayer.observe(rows([0], 0, 4), np.array([0]))
    with pytest.raises(RuntimeError, match="cycle_one_time: observed twice"):
        replayer.observe(rows([0], 4, 4), np.array([0]))
    replayer.clear()
    assert labels(replayer.replay_all()) == [[0, 1, 2, 3]] and replayer.total_size == 1
    replayer.clear()
    with pytest.raises(RuntimeError, match="cycle_one_time: nothing was observed"):
        replayer.replay_all()
    replayer.observe(rows([0], 4, 4), np.array([0]))
    assert labels(replayer.replay_all()) == [[3, 4, 5, 6, 7]]


# All of them.


@pytest.mark.parametrize("name", ["one_time", "uniform", "cycle_one_time"])
def test_all_take_the_unrolls_of_either_driver(name):
    """A sync driver's whole batch and an async driver's joined unrolls are the same thing."""
    replayer = make_replayer(name, total_envs=4, num_envs=2, unroll_length=5, learn_queue_cap=2)
    for i in (0, 5):
        replayer.observe(rows(range(4), i, 5), np.arange(4))
        check_rows(replayer.replay_all())
    replayer.observe(rows([2, 3, 2, 3], [10, 10, 15, 15], 5), np.array([2, 3, 2, 3]))
    if name != "uniform":
        check_rows(replayer.replay_all())


@pytest.mark.parametrize("name", ["one_time", "cycle_one_time"])
def test_only_uniform_samples(name):
    replayer = make_replayer(name, 1, unroll_length=4)
    replayer.observe(rows([0], 0, 4), np.array([0]))
    with pytest.raises(NotImplementedError, match="does not sample.*exp_replayer='uniform'"):
        replayer.replay(1, 1)


def test_numbers_that_fit_no_column_or_environment_are_refused():
    for name in ("one_time", "uniform", "cycle_one_time"):
        with pytest.raises(ValueError, match=r"env_id: has the shape \(3,\), the rollout has 2 columns"):
            make_replayer(name, 2).observe(rows([0, 1], 0, 2), np.arange(3))
    for name in ("uniform", "cycle_one_time"):
        with pytest.raises(ValueError, match=r"env_id: must be 0\.\.1, got \[1, 2\]"):
            make_replayer(name, 2).observe(rows([1, 2], 0, 2), np.array([1, 2]))


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda: make_replayer("unifrom", 1), "exp_replayer: 'unifrom' is none of .* nearest is 'uniform'"),
        (lambda: make_replayer("onetime", 1), "the nearest is 'one_time'"),
        (lambda: make_replayer("uniform", 0), "total_envs=0 must be a whole number of at least 1"),
        (lambda: UniformReplayer(1, max_length=0), "max_length=0 must be a whole number of at least 1"),
        (lambda: CycleOneTimeReplayer(4, num_envs=0), "num_envs=0 must be a whole number of at least 1"),
        (lambda: CycleOneTimeReplayer(4, unroll_length=0), "unroll_length=0 must be a whole"),
        (lambda: CycleOneTimeReplayer(4, learn_queue_cap=-1), "learn_queue_cap=-1 must be a whole"),
        (
            lambda: CycleOneTimeReplayer(12, num_envs=4, learn_queue_cap=3),
            "num_envs: 4 must be a multiple of learn_queue_cap=3; the nearest is 3",
        ),
        (
            lambda: CycleOneTimeReplayer(7, num_envs=2),
            "total_envs: 7 must be a multiple of num_envs=2; the nearest is 8",
        ),
    ],
)
def test_what_does_not_fit_is_refused_with_the_nearest(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_masks_of_control_and_time_go_with_their_rows():
    data = rows([0], 0, 4)
    marked = data.steps._replace(env_info=EnvInfo(data.steps.mask, np.float32([[1], [0], [1], [1]])))
    replayer = UniformReplayer(1)
    replayer.observe(data._replace(steps=marked), [0])
    out = replayer.replay_all().steps.env_info
    assert out.discount_mask.tolist() == [[1], [0], [1], [1]]
    assert out.control_mask.tolist() == [[1], [1], [1], [0]]
