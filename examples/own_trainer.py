"""Trains with an algorithm of your own: say what each decision is worth, and leave the rest.

Run it with ``python examples/own_trainer.py``.
"""

import jax
import jax.numpy as jnp

from rl_trainers import PolicyTrainer, RLTask, losses
from rl_trainers.policy_trainer import returns_to_go
from rl_trainers.types import TimeStep


class ClippedReturns(PolicyTrainer):
    """REINFORCE whose advantages are standard scores of returns, clipped to ``[-limit, limit]``."""

    def __init__(self, task: RLTask, limit: float = 2.0, **kwargs):
        self.limit = limit
        super().__init__(task, **kwargs)

    def policy_inputs(self, steps: TimeStep) -> tuple[jax.Array, jax.Array]:
        """The worth and the mask of every decision, ``[T, B]`` each; compiled, so plain jax.numpy."""
        returns, known = returns_to_go(steps, self.task.gamma)
        scores = losses.normalize(returns, known)
        return jnp.clip(scores, -self.limit, self.limit), known


def main(n_epochs: int = 60, n_episodes: int = 20) -> float:
    trainer = ClippedReturns(
        RLTask("CartPole-v1", num_envs=8),
        n_interactions_per_epoch=2048,
        policy_batch_size=256,
        policy_train_steps_per_epoch=8,  # one pass over the 2048 decisions
        policy_lr_schedule=3e-3,
    )
    trainer.run(n_epochs, progress=True)
    episodes = trainer.evaluate(n_episodes)
    print(f"return of {n_episodes} greedy episodes: {episodes.returns.mean():.1f}")
    trainer.close()
    return episodes.returns.mean()


if __name__ == "__main__":
    main()
