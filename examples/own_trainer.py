"""Trains with an algorithm of your own: say what a decision is worth and what the loss is.

Collecting, batches, optimizer steps, evaluation, metrics and checkpoints come with the base class.
Run it with ``python examples/own_trainer.py``.
"""

from rl_trainers import PolicyTrainer, RLTask, losses
from rl_trainers.policy_trainer import returns_to_go


class ClippedReturns(PolicyTrainer):
    """PPO without a critic: the standard score of a decision's return stands for its advantage.

    The two methods are compiled, so they are plain jax.numpy.
    """

    def __init__(self, task: RLTask, epsilon: float = 0.2, **kwargs):
        self.epsilon = epsilon
        super().__init__(task, **kwargs)

    def policy_inputs(self, steps):
        """Worth and mask of each decision, ``[T, B]``; 0 masks those whose return is not known yet."""
        returns, known = returns_to_go(steps, self.task.gamma)
        return losses.normalize(returns, known), known

    def policy_loss(self, dist_inputs, batch, hparams):
        """The loss of a batch ``[N, L]``; metrics of your own, which are averaged over it."""
        distribution = self.task.distribution
        ratio = losses.probability_ratio(
            distribution.log_prob(dist_inputs, batch.action),
            distribution.log_prob(batch.dist_inputs, batch.action),
        )
        loss = losses.clipped_surrogate(ratio, batch.advantage, batch.mask, self.epsilon)
        return loss, {"approximate_kl": losses.approximate_kl(ratio)}


def main(n_epochs: int = 25, n_episodes: int = 20) -> float:
    trainer = ClippedReturns(
        RLTask("CartPole-v1", num_envs=8),
        n_interactions_per_epoch=4096,
        policy_batch_size=256,
        policy_train_steps_per_epoch=64,
        policy_lr_schedule=1e-3,
    )
    trainer.run(n_epochs, progress=True)
    episodes = trainer.evaluate(n_episodes)
    print(f"return of {n_episodes} greedy episodes: {episodes.returns.mean():.1f}")
    trainer.close()
    return episodes.returns.mean()


if __name__ == "__main__":
    main()
