"""Trains PPO on CartPole-v1 for a few seconds, then plays 20 greedy episodes.

Run it with ``python examples/train_cartpole.py``.
"""

from rl_trainers import PPOJoint, RLTask


def main(n_epochs: int = 30, n_episodes: int = 20) -> float:
    task = RLTask("CartPole-v1", num_envs=8)
    trainer = PPOJoint(task, lr_schedule=1e-3)
    trainer.run(n_epochs, progress=True)
    episodes = trainer.evaluate(n_episodes)
    print(f"return of {n_episodes} greedy episodes: {episodes.returns.mean():.1f}")
    trainer.close()
    return episodes.returns.mean()


if __name__ == "__main__":
    main()
