"""Trains PPO with a network of your own, written in Flax linen.

Run it with ``python examples/own_model.py``.
"""

from typing import Any

import flax.linen as nn
import jax

from rl_trainers import PPOJoint, RLTask


class ResidualPolicyAndValue(nn.Module):
    """Observations ``[rows, *obs]`` to ``(dist_inputs [rows, D], value [rows])``.

    A trainer calls its ``joint_model`` as ``joint_model(policy_distribution=..., mode=...)`` and leaves
    out the arguments that it does not take; so a module's class is a factory as it stands.
    """

    policy_distribution: Any
    width: int = 64

    @nn.compact
    def __call__(self, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Two residual layers under a policy head and a value head."""
        x = nn.Dense(self.width)(x)
        for _ in range(2):
            x = x + nn.Dense(self.width)(nn.silu(nn.LayerNorm()(x)))
        small = nn.initializers.normal(0.01)  # begin with a policy that tries everything
        dist_inputs = nn.Dense(self.policy_distribution.n_inputs, kernel_init=small)(x)
        return dist_inputs, nn.Dense(1)(x)[:, 0]


def main(n_epochs: int = 30, n_episodes: int = 20) -> float:
    trainer = PPOJoint(
        RLTask("CartPole-v1", num_envs=8),
        joint_model=ResidualPolicyAndValue,  # functools.partial(..., width=128) sets its own arguments
        lr_schedule=1e-3,
    )
    trainer.run(n_epochs, progress=True)
    episodes = trainer.evaluate(n_episodes)
    print(f"return of {n_episodes} greedy episodes: {episodes.returns.mean():.1f}")
    trainer.close()
    return episodes.returns.mean()


if __name__ == "__main__":
    main()
