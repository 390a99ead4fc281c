"""Trains PPO on Pendulum-v1, whose action is a torque in [-2, 2]; takes about a minute.

Run it with ``python examples/continuous_actions.py``.
"""

import functools

import flax.linen as nn

from rl_trainers import PPOJoint, RLTask, create_distribution, models


def main(n_epochs: int = 150, n_episodes: int = 20) -> float:
    task = RLTask(
        "Pendulum-v1",
        gamma=0.9,
        num_envs=8,
        # A Gaussian whose deviation is learned; actions are clipped on their way to the environment.
        action_distribution=functools.partial(create_distribution, std=1.0, learn_std="shared"),
    )
    trainer = PPOJoint(
        task,
        joint_model=functools.partial(
            models.PolicyAndValue,
            body=functools.partial(models.MLP, activation=nn.tanh),
            joint=False,
            normalizer=models.Normalize,
        ),
        n_interactions_per_epoch=2048,
        batch_size=256,
        lr_schedule=1e-3,
        value_loss_coeff=0.5,
        entropy_coeff=0.0,
    )
    trainer.run(n_epochs, progress=True)
    episodes = trainer.evaluate(n_episodes)
    print(f"return of {n_episodes} greedy episodes: {episodes.returns.mean():.1f} (best: about -150)")
    trainer.close()
    return episodes.returns.mean()


if __name__ == "__main__":
    main()
