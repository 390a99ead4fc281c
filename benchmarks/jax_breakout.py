"""PPO on MinAtar's Breakout: return of rl_trainers and of rejax after equal numbers of steps.

The same settings on both sides; after each part of the run the policy plays 128 episodes as it acts in
training. Each side is a process of its own. Prints one JSON line per side.

    python benchmarks/jax_breakout.py --steps 10000000 --peer_python VENV/bin/python

The peer's interpreter needs ``rejax`` with ``gymnax<1`` and nothing of ours.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
NUM_ENVS, UNROLL, N_EPISODES = 64, 128, 128
ROWS = NUM_ENVS * UNROLL


def ours(seed: int, steps: int, parts: int, learning_rate: float) -> dict[str, Any]:
    """Trains and evaluates rl_trainers."""
    import flax.linen as nn

    from rl_trainers import PPOJoint, RLTask, advantages, models

    body = functools.partial(models.MLP, layer_widths=(64, 64), activation=nn.relu)
    trainer = PPOJoint(
        RLTask("gymnax:Breakout-MinAtar", num_envs=NUM_ENVS, gamma=0.99, seed=seed),
        joint_model=functools.partial(models.PolicyAndValue, body=body, joint=False),
        lr_schedule=learning_rate,
        n_interactions_per_epoch=ROWS,
        batch_size=ROWS // 8,
        train_steps_per_epoch=32,
        value_loss_coeff=0.5,
        advantage_estimator=functools.partial(advantages.gae, lambda_=0.95),
        seed=seed,
    )
    returns, seconds = [], 0.0
    for _ in range(parts):
        begin = time.perf_counter()
        trainer.run(steps // ROWS // parts)
        seconds += time.perf_counter() - begin
        returns.append(float(trainer.evaluate(N_EPISODES, temperature=1.0).returns.mean()))
    return {"env_steps": trainer.task.n_interactions(), "train_s": seconds, "returns": returns}


def peer(seed: int, steps: int, parts: int, learning_rate: float) -> dict[str, Any]:
    """The same with rejax."""
    import jax
    from rejax import PPO
    from rejax.evaluate import evaluate

    algorithm = PPO.create(
        env="Breakout-MinAtar",
        agent_kwargs={"activation": "relu", "hidden_layer_sizes": (64, 64)},
        num_envs=NUM_ENVS,
        num_steps=UNROLL,
        num_epochs=4,
        num_minibatches=8,
        learning_rate=learning_rate,
        gamma=0.99,
        gae_lambda=0.95,
        clip_eps=0.2,
        ent_coef=0.01,
        vf_coef=0.5,
        max_grad_norm=0.5,
        total_timesteps=1 << 30,
        eval_freq=1 << 30,
    )
    n_iterations = steps // ROWS // parts
    state = jax.jit(algorithm.init_state)(jax.random.PRNGKey(seed))

    @functools.partial(jax.jit, donate_argnums=0)
    def train(state):
        return jax.lax.scan(lambda s, _: (algorithm.train_iteration(s), None), state, length=n_iterations)[0]

    @jax.jit
    def play(state, key):
        act = algorithm.make_act(state)
        return evaluate(act, key, algorithm.env, algorithm.env_params, N_EPISODES, 10_000)[1].mean()

    returns, seconds = [], 0.0
    for part in range(parts):
        begin = time.perf_counter()
        state = jax.block_until_ready(train(state))
        seconds += time.perf_counter() - begin
        returns.append(float(play(state, jax.random.PRNGKey(part))))
    return {"env_steps": n_iterations * ROWS * parts, "train_s": seconds, "returns": returns}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=10_000_000)
    parser.add_argument("--parts", type=int, default=5, help="evaluations")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--learning_rate", type=float, default=2.5e-3)
    parser.add_argument("--sides", nargs="+", choices=("ours", "peer"), default=["ours", "peer"])
    parser.add_argument("--peer_python", default=sys.executable, help="has rejax and gymnax<1")
    parser.add_argument("--worker", choices=("ours", "peer"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        side = {"ours": ours, "peer": peer}[options.worker]
        figures = side(options.seed, options.steps, options.parts, options.learning_rate)
        figures["returns"] = [round(x, 2) for x in figures["returns"]]
        setting = {"side": options.worker, "seed": options.seed, "learning_rate": options.learning_rate}
        print(json.dumps({**setting, **figures}))
        return
    for side_name in options.sides:
        environment = dict(os.environ)
        if side_name == "ours":
            environment["PYTHONPATH"] = str(ROOT)
        python = options.peer_python if side_name == "peer" else sys.executable
        numbers = ["--seed", str(options.seed), "--steps", str(options.steps), "--parts", str(options.parts)]
        numbers += ["--learning_rate", str(options.learning_rate)]
        subprocess.run([python, __file__, "--worker", side_name, *numbers], env=environment, check=True)


if __name__ == "__main__":
    main()
