"""The learning tests of ALF's drivers, with its budgets and thresholds; one seed each, minutes.

Budgets and thresholds are those of ``on_policy_driver_test.py``, ``off_policy_driver_test.py`` and
``ppo_algorithm_test.py`` in https://github.com/HorizonRobotics/alf, whose losses have no entropy bonus and
weigh the value loss with 1. ALF counts an episode's length in observations.
"""

import functools

import numpy as np
import optax
import pytest

from rl_trainers import DDPG, SAC, A2CJoint, PPOJoint, RLTask, advantages, models
from rl_trainers.distributions import create_distribution
from rl_trainers.drivers import AsyncOffPolicyDriver, OnPolicyDriver, SyncOffPolicyDriver
from rl_trainers.envs import probe, probe_jax

LINEAR = functools.partial(models.PolicyAndValue, body=None)
LSTM = functools.partial(models.LSTM, hidden_size=4)
RECURRENT = functools.partial(models.PolicyAndValue, body=LSTM, joint=False)
GAUSSIAN = functools.partial(create_distribution, std=0.5, learn_std="separate")


def made(algorithm, env, num_envs, seed, network=LINEAR, distribution=None, **settings):
    task = RLTask(env, num_envs=num_envs, seed=seed, gamma=1.0, action_distribution=distribution)
    ours = {"entropy_coeff": 0.0, "value_loss_coeff": 1.0, "optimizer": optax.adam, "seed": seed}
    return algorithm(task, joint_model=network, **ours | settings)


def first_rewards(trainer, n_rows, epsilon=0.1):
    """Rewards of the first decisions after a reset of environments of their own, f32 ``[n_rows, B]``.

    Discrete policies are sampled from, which is harder than ALF's share of 0.1: a policy that has learned
    nothing may by chance have the right mode.
    """
    seen = []
    driver = OnPolicyDriver(
        None,
        trainer,
        [lambda rollout, env_id: seen.append(rollout.steps.reward)],
        training=False,
        epsilon_greedy=epsilon,
    )
    driver.run(n_rows * driver.total_envs)
    return np.concatenate(seen)


def actor_critic_policy(seed):
    trainer = made(A2CJoint, probe_jax.fixed_length_policy(13), 100, seed, lr_schedule=0.1)
    OnPolicyDriver(None, trainer, train_interval=1).run(1300 * 100)
    return first_rewards(trainer, 4, epsilon=1).mean()


def actor_critic_continuous(seed):
    env = probe_jax.fixed_length_policy(13, continuous=True)
    trainer = made(A2CJoint, env, 100, seed, distribution=GAUSSIAN, lr_schedule=0.01)
    OnPolicyDriver(None, trainer, train_interval=1).run(1300 * 100)
    return first_rewards(trainer, 4).mean()


def actor_critic_rnn(seed):
    settings = {"network": RECURRENT, "lr_schedule": 0.01, "max_slice_length": 8}
    trainer = made(A2CJoint, probe_jax.fixed_length_memory(5, 3), 100, seed, **settings)
    OnPolicyDriver(None, trainer, train_interval=8).run(2000 * 100)
    return first_rewards(trainer, 4, epsilon=1)[-1].mean()


def actor_critic_value(seed):
    one_step = functools.partial(advantages.td_lambda, lambda_=0.0)
    settings = {"optimizer": optax.sgd, "lr_schedule": 0.5, "advantage_estimator": one_step}
    trainer = made(A2CJoint, probe_jax.fixed_length(13), 1, seed, **settings)
    OnPolicyDriver(None, trainer, train_interval=13).run(100 * 13)
    params, model_state = trainer.state.params, trainer.state.model_state
    return float(trainer._model.apply(params, model_state, np.ones((1, 1), np.float32))[1][0])


def ppo_policy(seed):
    trainer = made(PPOJoint, probe_jax.fixed_length_policy(13), 100, seed, lr_schedule=0.1)
    driver = SyncOffPolicyDriver(None, trainer, unroll_length=13)
    for _ in range(20):
        driver.run(13 * 100)
        driver.train(num_updates=4, mini_batch_size=25)
    return first_rewards(trainer, 4, epsilon=1).mean()


def ppo_rnn(seed):
    env = probe_jax.fixed_length_memory(5, 3, continuous=True)
    settings = {"network": RECURRENT, "lr_schedule": 1e-3, "max_slice_length": 8}
    trainer = made(PPOJoint, env, 128, seed, distribution=GAUSSIAN, **settings)
    driver = SyncOffPolicyDriver(None, trainer, unroll_length=16, use_rollout_state=True)
    for _ in range(500):
        driver.run(16 * 128)
        driver.train(mini_batch_size=128, mini_batch_length=8, whole_replay_buffer_training=False)
    return first_rewards(trainer, 4)[-1].mean()


def off_policy(algorithm, seed, **settings):
    """500 times 4 rows of 128 environments, and an optimizer step on 256 of their decisions."""
    env = probe_jax.fixed_length_policy(12, continuous=True)
    small = functools.partial(models.MLP, layer_widths=(16, 16))
    trainer = algorithm(
        RLTask(env, num_envs=128, seed=seed, gamma=1.0),
        n_interactions_per_epoch=4 * 128,
        initial_collect_steps=5 * 12 * 128,
        batch_size=256,
        train_steps_per_epoch=1,
        policy_body=small,
        value_body=small,
        seed=seed,
        driver="sync",
        **settings,
    )
    trainer.run(15 + 500)
    return trainer.evaluate(128).returns.mean() / 11


def sac(seed):
    settings = {"policy_lr_schedule": 5e-3, "value_lr_schedule": 5e-3, "temperature_lr_schedule": 0.1}
    return off_policy(SAC, seed, **settings)


def ddpg(seed):
    return off_policy(DDPG, seed, policy_lr_schedule=5e-3, value_lr_schedule=0.1)


def ppo_rnn_async(seed):
    env = functools.partial(probe.FixedLengthMemory, 5, 3, continuous=True)
    settings = {"network": RECURRENT, "lr_schedule": 1e-3, "max_slice_length": 8}
    trainer = made(PPOJoint, [env] * 128, 128, seed, distribution=GAUSSIAN, **settings)
    driver = AsyncOffPolicyDriver(
        algorithm=trainer, num_envs=1, unroll_length=8, use_rollout_state=True, seed=seed
    )
    driver.start()
    try:
        for _ in range(1000):
            driver.run_async()
            driver.train(mini_batch_length=8)
    finally:
        driver.close()
    return first_rewards(trainer, 4)[-1].mean()


THRESHOLDS = [
    (actor_critic_policy, 1, 0.01),
    (actor_critic_continuous, 1, 0.05),
    (actor_critic_rnn, 1, 0.05),
    (actor_critic_value, 12, 0.1),
    (ppo_policy, 1, 0.1),
    (ppo_rnn, 1, 0.2),
    (ppo_rnn_async, 1, 0.2),
    (sac, 1, 0.2),
    (ddpg, 1, 0.2),
]


@pytest.mark.slow
@pytest.mark.parametrize(("learn", "expected", "tolerance"), THRESHOLDS)
def test_what_alf_learns_is_learned(learn, expected, tolerance):
    assert learn(0) == pytest.approx(expected, abs=tolerance)
