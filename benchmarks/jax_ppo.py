"""PPO on gymnax's CartPole-v1: rl_trainers against rejax and a random policy, in the same session.

Each run is a process of its own; the sides take turns at each number of environments. Prints one JSON line
per run, and one per number of environments with medians and ratios, pair by pair. A random policy in one
compiled scan is what the environments alone allow.

    python benchmarks/jax_ppo.py --num_envs 64 512 2048 --peer_python VENV/bin/python

The peer's interpreter needs ``rejax`` with ``gymnax<1`` and nothing of ours.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
UNROLL = 128
ROWS_PER_CALL = 1 << 17
SIDES = ("ours", "peer", "limit")
FIGURES = ("env_steps_per_s", "cpu_us_per_env_step", "compile_s", "start_to_first_update_s", "peak_rss_mib")

Advance = Callable[[], int]
"""Trains (or plays) a few iterations, waits for them, and returns the environment steps that they took."""


def ours(num_envs: int) -> Advance:
    """PPO of rl_trainers; compiles nothing yet."""
    import flax.linen as nn

    from rl_trainers import PPOJoint, RLTask, advantages, models

    body = functools.partial(models.MLP, layer_widths=(64, 64), activation=nn.tanh)
    trainer = PPOJoint(
        RLTask("gymnax:CartPole-v1", num_envs=num_envs, gamma=0.99),
        joint_model=functools.partial(models.PolicyAndValue, body=body, joint=False),
        lr_schedule=2.5e-4,
        n_interactions_per_epoch=num_envs * UNROLL,
        batch_size=num_envs * UNROLL // 4,
        train_steps_per_epoch=16,
        epsilon=0.2,
        entropy_coeff=0.01,
        value_loss_coeff=0.5,
        advantage_estimator=functools.partial(advantages.gae, lambda_=0.95),
    )

    def advance() -> int:
        before = trainer.task.n_interactions()
        trainer.run(_per_call(num_envs))
        return trainer.task.n_interactions() - before

    return advance


def peer(num_envs: int) -> Advance:
    """PPO of rejax with the settings of :func:`ours`; compiles nothing yet."""
    import jax
    from rejax import PPO

    algorithm = PPO.create(
        env="CartPole-v1",
        agent_kwargs={"activation": "tanh", "hidden_layer_sizes": (64, 64)},
        num_envs=num_envs,
        num_steps=UNROLL,
        num_epochs=4,
        num_minibatches=4,
        learning_rate=2.5e-4,
        gamma=0.99,
        gae_lambda=0.95,
        clip_eps=0.2,
        ent_coef=0.01,
        vf_coef=0.5,
        max_grad_norm=0.5,
        total_timesteps=1 << 30,
        eval_freq=1 << 30,
    )
    n_iterations = _per_call(num_envs)
    state = jax.jit(algorithm.init_state)(jax.random.PRNGKey(0))

    @functools.partial(jax.jit, donate_argnums=0)
    def iterations(state):
        return jax.lax.scan(lambda s, _: (algorithm.train_iteration(s), None), state, length=n_iterations)[0]

    def advance() -> int:
        nonlocal state
        state = jax.block_until_ready(iterations(state))
        return n_iterations * UNROLL * num_envs

    return advance


def limit(num_envs: int) -> Advance:
    """A random policy in one compiled scan over the same environments, with the package's own unroll."""
    import jax

    from rl_trainers import rollout
    from rl_trainers.envs.native import make_jax_env

    env = make_jax_env("gymnax:CartPole-v1")
    key_env, key = jax.random.split(jax.random.PRNGKey(0))
    actor = rollout.start_scan(env, num_envs, key_env, key)
    length = 8 * UNROLL * _per_call(num_envs)

    def act(observation, policy_state, needs_reset, key):
        key, key_act = jax.random.split(key)
        action = jax.random.randint(key_act, (num_envs,), 0, env.action_space.n)
        return action, None, policy_state, key

    @functools.partial(jax.jit, donate_argnums=0)
    def unroll(actor):
        actor, data, _ = rollout.unroll_scan(env, act, actor, length)
        return actor, data.steps.mask.sum(), data.steps.reward.sum()

    def advance() -> int:
        nonlocal actor
        actor, decisions, _ = unroll(actor)
        return int(decisions)

    return advance


def _per_call(num_envs: int) -> int:
    """Iterations of one compiled call: as many steps at every number of environments."""
    return max(1, ROWS_PER_CALL // (UNROLL * num_envs))


def measure(advance: Advance, started: float, seconds: float, clock=time.time) -> dict[str, Any]:
    """The figures of one run.

    Args:
        advance: see :data:`Advance`; its first call compiles.
        started: ``time.time()`` when the process was started.
        seconds: how long to measure, after the second call.
        clock: gives the time in seconds.

    Returns:
        ``env_steps_per_s`` is over all calls from the third on.
    """
    begin = clock()
    advance()
    first = clock()
    advance()
    steady, cpu, env_steps = clock(), time.process_time(), 0
    second_s = steady - first
    while clock() - steady < seconds or not env_steps:
        env_steps += advance()
    wall_s, cpu_s = clock() - steady, time.process_time() - cpu
    scale = 2**20 if sys.platform == "darwin" else 2**10
    return {
        "env_steps": env_steps,
        "env_steps_per_s": round(env_steps / wall_s),
        "cpu_us_per_env_step": round(1e6 * cpu_s / env_steps, 2),
        "compile_s": round(max(0.0, first - begin - second_s), 2),
        "start_to_first_update_s": round(first - started, 2),
        "peak_rss_mib": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / scale),
    }


def summarize(runs: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """Medians of each side, and the ratios ours / other of the runs with the same ``repeat``.

    Args:
        runs: what the sides reported at one number of environments, with ``side`` and ``repeat``.
    """
    by_side: dict[str, dict[int, dict[str, Any]]] = {}
    for run in runs:
        by_side.setdefault(run["side"], {})[run["repeat"]] = run
    summary: dict[str, Any] = {"summary": True}
    for side, of_side in by_side.items():
        summary[side] = {f: statistics.median(run[f] for run in of_side.values()) for f in FIGURES}
    mine = by_side.get("ours", {})
    for side in ("peer", "limit"):
        both = [(mine[i], run) for i, run in by_side.get(side, {}).items() if i in mine]
        if not both:
            continue
        ratios = summary[f"ours_over_{side}"] = {}
        for figure in FIGURES:
            pairs = [round(a[figure] / b[figure], 3) for a, b in both if b[figure]]
            if pairs:
                ratios[figure] = {"median": round(statistics.median(pairs), 3), "pairs": pairs}
    return summary


def _run(side: str, num_envs: int, options: argparse.Namespace) -> dict[str, Any]:
    """Starts a run as a process of its own, without a compilation cache, and returns what it reports."""
    environment = {k: v for k, v in os.environ.items() if k != "JAX_COMPILATION_CACHE_DIR"}
    environment["JAX_ENABLE_COMPILATION_CACHE"] = "false"
    python = options.peer_python if side == "peer" else sys.executable
    if side != "peer":
        environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), environment.get("PYTHONPATH", "")])
    arguments = ["--worker", side, "--num_envs", str(num_envs), "--seconds", str(options.seconds)]
    command = [python, __file__, *arguments, "--started", repr(time.time())]
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True)
    if done.returncode:
        raise SystemExit(f"the run of {side} with {num_envs} environments failed with {done.returncode}")
    return json.loads(done.stdout.splitlines()[-1])


def _check_peer(python: str) -> None:
    if subprocess.run([python, "-c", "import rejax"], capture_output=True).returncode:
        raise SystemExit(
            f"{python} cannot import rejax: name an interpreter that can with --peer_python, or leave the "
            "peer out with --sides ours limit"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--num_envs", type=int, nargs="+", default=[64, 512, 2048])
    parser.add_argument("--repeats", type=int, default=3, help="runs of each side")
    parser.add_argument("--seconds", type=float, default=5.0, help="measured in each run")
    parser.add_argument("--sides", nargs="+", choices=SIDES, default=list(SIDES))
    parser.add_argument("--peer_python", default=sys.executable, help="has rejax and gymnax<1")
    parser.add_argument("--worker", choices=SIDES, help=argparse.SUPPRESS)
    parser.add_argument("--started", type=float, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        make = {"ours": ours, "peer": peer, "limit": limit}[options.worker]
        print(json.dumps(measure(make(options.num_envs[0]), options.started, options.seconds)))
        return
    if "peer" in options.sides:
        _check_peer(options.peer_python)
    machine = {"cores": os.cpu_count(), "machine": platform.machine(), "python": platform.python_version()}
    for num_envs in options.num_envs:
        runs = []
        for repeat in range(options.repeats):
            for side in options.sides:
                context = {"num_envs": num_envs, "side": side, "repeat": repeat}
                load = {"load_1min": round(os.getloadavg()[0], 2)}
                runs.append({**context, **_run(side, num_envs, options), **load})
                print(json.dumps(runs[-1]), flush=True)
        print(json.dumps({**summarize(runs), "num_envs": num_envs, **machine}), flush=True)


if __name__ == "__main__":
    main()
