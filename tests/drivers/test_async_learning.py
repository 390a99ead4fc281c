"""The asynchronous driver with trainers."""

import functools

import flax.linen as nn
import jax
import numpy as np
import pytest

from rl_trainers import PPOJoint, RLTask, advantages, models
from rl_trainers.drivers import AsyncOffPolicyDriver
from rl_trainers.rollout import unroll_host

BODIES = {
    "mlp": functools.partial(models.MLP, layer_widths=(8,)),
    "gru": functools.partial(models.GRU, hidden_size=8),
    "transformer": functools.partial(models.TransformerDecoder, d_model=8, n_layers=1),
}


def trainer(num_envs, body):
    task = RLTask("CartPole-v1", num_envs=num_envs, seed=3, backend="sync", time_limit=20)
    model = functools.partial(models.PolicyAndValue, body=BODIES[body], head_init_range=1.0)
    rows = 16 * num_envs
    return PPOJoint(
        task,
        joint_model=model,
        max_slice_length=8,
        n_interactions_per_epoch=rows,
        batch_size=rows,
        train_steps_per_epoch=1,
    )


@pytest.mark.parametrize("body", ["mlp", "gru"])
def test_learning_in_lock_step_is_learning_in_turns(body):
    one, other = trainer(6, body), trainer(2, body)
    actor = one.task.actor
    driver = AsyncOffPolicyDriver(
        algorithm=other, num_envs=3, unroll_length=16, lock_step=True, seed=3, use_rollout_state=True
    )
    driver.start()
    try:
        for _ in range(4):
            to_env = one.task.distribution.to_env
            actor, data, _ = unroll_host(one.task.env, one.actor(), actor, 16, to_env)
            one.train_on(data, 2, 4)
            assert driver.run_async() == 6 * 16
            other.train_on(driver.replayer.replay_all(), 2, 4)
    finally:
        driver.close()
    assert int(one.state.step) == 4 * 2 * 3  # 12 slices of 8 rows, in batches of 4
    jax.tree.map(np.testing.assert_array_equal, one.state, other.state)


@pytest.mark.parametrize("body", ["mlp", "gru"])
def test_what_was_said_in_batches_of_environments_is_said_again_in_training(body):
    algorithm = trainer(2, body)
    driver = AsyncOffPolicyDriver(
        algorithm=algorithm,
        num_envs=5,
        unroll_length=16,
        num_actor_queues=2,
        actor_queue_cap=2,
        learn_queue_cap=3,
    )
    driver.start()
    try:
        rollouts = [driver.collect()[0] for _ in range(6)]
    finally:
        driver.close()
    for rollout in rollouts:
        assert rollout.steps.dist_inputs.std() > 1e-3
        seen = algorithm._see_rollout(rollout)
        batch, _ = algorithm._make_rows(algorithm.state, seen, algorithm.hparams())
        dist_inputs, _ = algorithm._model.apply(algorithm.state.params, {}, batch.observation)
        kept = np.asarray(batch.mask) > 0
        assert kept.sum() == rollout.steps.mask.sum()
        log_prob = algorithm.task.distribution.log_prob
        again, recorded = (log_prob(x, batch.action) for x in (dist_inputs, batch.dist_inputs))
        np.testing.assert_allclose(again[kept], recorded[kept], atol=1e-5)


def test_models_with_a_window_are_refused():
    algorithm = trainer(2, "transformer")
    with pytest.raises(ValueError, match="algorithm: its model sees a window.*models.GRU"):
        AsyncOffPolicyDriver(algorithm=algorithm)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_ppo_with_vtrace_learns_cartpole(seed):
    body = functools.partial(models.MLP, layer_widths=(64, 64), activation=nn.tanh)
    algorithm = PPOJoint(
        RLTask("CartPole-v1", num_envs=2, seed=seed),
        joint_model=functools.partial(models.PolicyAndValue, body=body, joint=False),
        advantage_estimator=functools.partial(advantages.vtrace, lambda_=0.95),
        lr_schedule=1e-3,
        n_interactions_per_epoch=64,
        entropy_coeff=0.01,
        seed=seed,
    )
    driver = AsyncOffPolicyDriver(
        algorithm=algorithm,
        num_envs=8,
        num_actor_queues=2,
        actor_queue_cap=2,
        learn_queue_cap=4,
        unroll_length=64,
        seed=seed,
    )
    driver.start()
    try:
        for _ in range(400):
            driver.run_async()
            algorithm.train_on(driver.replayer.replay_all(), 4, 128)
    finally:
        driver.close()
    assert algorithm.evaluate(20).returns.mean() >= 475
    assert sum(driver.unrolls.lags.values()) == 1600
