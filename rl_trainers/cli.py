"""The command line: ``rl-trainers train | eval | plot``.

A run is described by gin files and bindings. They are checked before any environment is made: names that
do not exist, and bindings that this run would not use, stop it with the nearest valid name.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import difflib
import functools
import inspect
import itertools
import json
import logging
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import flax.linen as nn
import gin
import numpy as np
import optax
from etils import epath

import rl_trainers
from rl_trainers import distributions, drivers, metrics, models
from rl_trainers.envs.native import is_jax_env
from rl_trainers.together import NotOneProgramError, run_together
from rl_trainers.trainer import parameters

_log = logging.getLogger(__name__)
_CONFIG = "config.gin"
_STOPPED = 130  # as shells say of SIGINT
_N_FINAL_EPISODES = 20

for _name in ("tanh", "relu", "gelu", "silu", "elu"):
    gin.external_configurable(getattr(nn, _name), _name, module="flax.linen")
for _name in ("linear_schedule", "cosine_decay_schedule", "warmup_cosine_decay_schedule"):
    gin.external_configurable(getattr(optax, _name), _name, module="optax")
for _name in ("adam", "adamw", "rmsprop", "sgd", "lion"):
    gin.external_configurable(getattr(optax, _name), _name, module="optax")

_IMPLIED = {
    rl_trainers.ActorCriticJointTrainer: (models.PolicyAndValue,),
    rl_trainers.PolicyTrainer: (models.Policy,),
    rl_trainers.ActorCriticTrainer: (models.Value,),
    rl_trainers.ValueTrainer: (models.Quality,),
    models.Value: (models.MLP, models.AtariCnn),
    models.PolicyAndValue: (models.MLP, models.AtariCnn),
    models.Policy: (models.MLP, models.AtariCnn),
    models.Quality: (models.MLP, models.AtariCnn),
    rl_trainers.RLTask: (
        distributions.create_distribution,
        distributions.Gaussian,
        distributions.Categorical,
        distributions.Bernoulli,
    ),
}
"""What is used where a binding is missing, besides the defaults that signatures show."""


@gin.configurable(module="rl_trainers")
def train(
    output_dir: str | None = None,
    trainer: Callable = rl_trainers.PPOJoint,
    n_epochs: int = 100,
    progress: bool = True,
) -> rl_trainers.RLTrainer:
    """Trains until ``n_epochs`` epochs are done, continuing a run found in ``output_dir``.

    Args:
        output_dir: where metrics, checkpoints and the effective configuration go.
        trainer: trainer class, called as ``trainer(task, output_dir=...)``.
        n_epochs: in all, those of an interrupted run included.
        progress: show a progress display.

    Returns:
        The trainer.
    """
    trainer_ = trainer(_task(), output_dir=output_dir)
    if output_dir is not None:
        _write_config(epath.Path(output_dir), trainer_)
    with contextlib.suppress(KeyboardInterrupt):
        trainer_.run(n_epochs, n_epochs_is_total_epochs=True, progress=progress)
    return trainer_


def _task() -> rl_trainers.RLTask:
    return gin.get_configurable(rl_trainers.RLTask)()


def load(output_dir: str) -> rl_trainers.RLTrainer:
    """The trainer of a run that the command line started, with its newest checkpoint.

    Args:
        output_dir: directory of the run; nothing is written there.

    Raises:
        FileNotFoundError: if there is no run in it.
    """
    config = epath.Path(output_dir) / _CONFIG
    if not config.exists():
        raise FileNotFoundError(f"{output_dir} holds no {_CONFIG}; give the output_dir of a training run")
    gin.clear_config()
    gin.parse_config(config.read_text())
    trainer = _bound("train", "trainer", rl_trainers.PPOJoint)(_task(), driver=None)
    if not trainer.restore(output_dir):
        raise FileNotFoundError(f"{output_dir} holds no complete checkpoint yet")
    return trainer


# Checking bindings.


def parse(
    config_files: Sequence[str],
    bindings: Sequence[str],
    allow_unused: bool = False,
    own_config: str | None = None,
) -> None:
    """Parses gin files and bindings and checks every name in them; later ones win.

    Args:
        config_files: paths.
        bindings: lines such as ``'PPOJoint.epsilon = 0.1'``.
        allow_unused: accept bindings that this run does not use.
        own_config: path of what a run that goes on has written, parsed first; it names all that the run used.

    Raises:
        ValueError: for names that do not exist and for bindings without effect; names the nearest valid
            one.
    """
    written: set[tuple] = set()
    files = list(config_files)
    if own_config is not None:
        gin.clear_config()
        gin.parse_config(epath.Path(own_config).read_text(), skip_unknown=True)
        written = {(key, name) for key, values in gin.config._CONFIG.items() for name in values}
        files = [own_config, *files]
    gin.clear_config()
    text = "\n".join([epath.Path(path).read_text() for path in files] + list(bindings))
    try:
        gin.parse_config(text)
    except (ValueError, SyntaxError) as error:
        raise ValueError(_with_nearest(str(error))) from error
    used = _used()
    unused = []
    for (scope, selector), arguments in gin.config._CONFIG.items():
        if selector == "gin.macro":
            continue
        target = _wrapped(selector)
        valid = parameters(target)
        name = selector.rpartition(".")[2]
        for argument in arguments:
            if argument not in valid:
                raise ValueError(
                    f"{name}.{argument}: {name} has no parameter {argument!r}; nearest: "
                    f"{_nearest(argument, valid)!r}"
                )
            known = ((scope, selector), argument) in written
            if not known and not _reaches(scope, selector, used):
                unused.append(f"{scope + '/' if scope else ''}{name}.{argument}")
    if unused and not allow_unused:
        names = sorted({selector.rpartition(".")[2] for _, selector in used})
        first = unused[0].rpartition("/")[2].partition(".")[0]
        raise ValueError(
            f"this run would not use: {', '.join(unused)}{_driver_hint(unused)}. Nearest that it uses: "
            f"{_nearest(first, names)!r}; --allow_unused runs all the same"
        )


def _reaches(scope: str, selector: str, used: set[tuple[str, str]]) -> bool:
    """Whether a binding applies somewhere: bindings hold in their scope and in those within it."""
    return any(
        name == selector and (not scope or f"{inner}/".startswith(f"{scope}/")) for inner, name in used
    )


def _wrapped(selector: str) -> Any:
    return gin.config._REGISTRY[selector].wrapped


def _used() -> set[tuple[str, str]]:
    """``(scope, selector)`` of everything that the configured run can build."""
    entries = [entry for _, entry in gin.config._REGISTRY.items()]
    selectors = {id(entry.wrapped): entry.selector for entry in entries}
    selectors |= {id(entry.wrapper): entry.selector for entry in entries}
    todo = [("", selectors[id(root)]) for root in (train, rl_trainers.RLTask)]
    seen: set[tuple[str, str]] = set()
    while todo:
        scope, selector = todo.pop()
        if (scope, selector) in seen:
            continue
        seen.add((scope, selector))
        target = _wrapped(selector)
        bound: dict[str, Any] = {}
        parts = scope.split("/")
        for level in ["", *("/".join(parts[: i + 1]) for i in range(len(parts)))]:
            bound |= gin.config._CONFIG.get((level, selector), {})
        for value in bound.values():
            todo += [
                ("/".join(filter(None, [scope, *r.scopes])), r.configurable.selector)
                for r in _references(value)
            ]
        driver = [drivers.BY_NAME[x] for x in [bound.get("driver")] if x in list(drivers.BY_NAME)]
        for value in (*_defaults(target, bound), *driver):
            if id(value) in selectors:
                todo.append((scope, selectors[id(value)]))
    return seen


def _references(value: Any) -> Iterator[Any]:
    if isinstance(value, gin.config.ConfigurableReference):
        yield value
        macro = gin.config._CONFIG.get(("/".join(value.scopes), "gin.macro"), {})
        for inner in macro.values():
            yield from _references(inner)
    elif isinstance(value, dict):
        for inner in value.values():
            yield from _references(inner)
    elif isinstance(value, (list, tuple)):
        for inner in value:
            yield from _references(inner)


def _defaults(target: Any, bound: dict[str, Any]) -> Iterator[Any]:
    for base in inspect.getmro(target) if inspect.isclass(target) else [target]:
        function = base.__init__ if inspect.isclass(base) else base
        for p in inspect.signature(inspect.unwrap(function)).parameters.values():
            if p.name not in bound and callable(p.default):
                yield p.default
        yield from _IMPLIED.get(base, ())


def _nearest(name: str, valid: Sequence[str]) -> str:
    return (difflib.get_close_matches(name, valid, 1, 0.0) or ["?"])[0]


def _with_nearest(message: str) -> str:
    """Adds the nearest valid name to gin's message about a name that does not exist."""
    parameter = re.search(r"Configurable '(.+?)' doesn't have a parameter named '(.+?)'", message)
    if parameter:
        name, wrong = parameter.groups()
        valid = parameters(_wrapped(gin.config._REGISTRY.get_match(name).selector))
        return f"{name}.{wrong}: {message.strip()}; nearest: {_nearest(wrong, valid)!r}"
    quoted = message.split("'")[1] if message.count("'") >= 2 else ""
    names = [selector.rpartition(".")[2] for selector, _ in gin.config._REGISTRY.items()]
    if "No configurable matching" not in message or not quoted:
        return message
    return f"{message.strip()}; nearest: {_nearest(quoted.rpartition('.')[2], names)!r}"


def _driver_hint(unused: Sequence[str]) -> str:
    names = {cls.__name__: name for name, cls in drivers.BY_NAME.items()}
    needed = {names[x.partition(".")[0]] for x in unused if x.partition(".")[0] in names}
    return "".join(f" (which needs --driver {name})" for name in sorted(needed))


def _bound(configurable: str, parameter: str, default: Any) -> Any:
    try:
        value = gin.query_parameter(f"{configurable}.{parameter}")
    except ValueError:
        return default
    return value.configurable.wrapper if hasattr(value, "configurable") else value


# Running.


def _write_config(directory: epath.Path, trainer: rl_trainers.RLTrainer) -> None:
    """Keeps the effective configuration; says what changed since the run was last continued."""
    text = gin.operative_config_str()
    path = directory / _CONFIG
    if path.exists():
        old, new = path.read_text().splitlines(), text.splitlines()
        changes = list(difflib.unified_diff(old, new, lineterm="", n=0))[2:]
        for line in changes:
            if line[:2] != "@@" and not line[1:].startswith("train.n_epochs"):
                _log.warning("the configuration has changed: %s", line)
    directory.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    trainer.write_text("gin_config", text)


def _train(arguments: argparse.Namespace) -> int:
    if arguments.n_seeds is not None or arguments.sweep:
        return _train_many(arguments)
    bindings = list(arguments.config)
    config = epath.Path(arguments.output_dir) / _CONFIG
    files = list(arguments.config_file)
    own = str(config) if not files and config.exists() else None
    if arguments.seed is not None:
        bindings += [f"seed = {arguments.seed}", "RLTask.seed = %seed"]
    if not (files or own or bindings):
        raise FileNotFoundError(f"{arguments.output_dir} holds no run yet: give --config_file")
    _parse_seeded(files, bindings, arguments, own)
    trainer = train(arguments.output_dir)
    n_epochs = _bound("train", "n_epochs", 100)
    if trainer.current_epoch < n_epochs:
        print(f"\nstopped after epoch {trainer.current_epoch} of {n_epochs}")
        print(f"continue         {_command()} train --output_dir {arguments.output_dir}")
        code = _STOPPED
    else:
        _report(trainer, arguments.output_dir)
        code = 0
    trainer.close()
    return code


def _parse_seeded(
    files: Sequence[str], bindings: Sequence[str], arguments: argparse.Namespace, own: str | None = None
) -> None:
    """:func:`parse`, where ``bindings`` may have a macro ``seed`` that the trainer takes too."""
    for name in ("num_workers", "address"):
        value = getattr(arguments, name, None)
        if value is not None:
            if arguments.driver not in (None, "ray"):
                raise ValueError(f"--{name}={value} is for Ray; nearest valid value of --driver: ray")
            bindings = [*bindings, f"RayDriver.{name} = {value!r}"]
    if getattr(arguments, "driver", None) is not None:
        parse(files, bindings, True, own)
        name = _bound("train", "trainer", rl_trainers.PPOJoint).__name__
        bindings = [*bindings, f"{name}.driver = {arguments.driver!r}"]
    parse(files, bindings, arguments.allow_unused, own)
    if any(binding.startswith("seed = ") for binding in bindings):
        trainer_name = _bound("train", "trainer", rl_trainers.PPOJoint).__name__
        gin.parse_config([f"{trainer_name}.seed = %seed"], skip_unknown=False)


# Many runs.


class Member(NamedTuple):
    """One of many runs.

    Attributes:
        name: of its directory.
        bindings: what it has beside the configuration.
        seed: of the environments and of training.
    """

    name: str
    bindings: list[str]
    seed: int


def members(sweeps: Sequence[str], first_seed: int, n_seeds: int) -> list[Member]:
    """Every combination of the values to try, with every seed.

    Args:
        sweeps: bindings to lists of numbers, such as ``'PPOJoint.epsilon = [0.1, 0.2]'``.
        first_seed: the others follow.
        n_seeds: how many.

    Raises:
        ValueError: a binding is not to a list of different numbers, or ``n_seeds`` is not positive.
    """
    if n_seeds < 1:
        raise ValueError(f"n_seeds={n_seeds} must be at least 1")
    axes = []
    for sweep in sweeps:
        name, _, text = sweep.partition("=")
        name = name.strip()
        try:
            values = ast.literal_eval(text.strip())
        except (ValueError, SyntaxError):
            values = None
        numbers = isinstance(values, (list, tuple)) and all(isinstance(x, (int, float)) for x in values)
        if not numbers or not values:
            raise ValueError(f"--sweep {sweep!r} must bind a list of numbers, such as 'A.b = [0.1, 0.2]'")
        if len(set(values)) < len(values):
            raise ValueError(f"--sweep {sweep!r} names a number twice, and each has one directory")
        axes.append([(f"{name.rpartition('.')[2]}_{x!r}", f"{name} = {x!r}") for x in values])
    found = []
    for setting in itertools.product(*axes):
        for seed in range(first_seed, first_seed + n_seeds):
            name = "-".join([*(part for part, _ in setting), f"seed_{seed}"])
            found.append(Member(name, [binding for _, binding in setting], seed))
    return found


def _train_many(arguments: argparse.Namespace) -> int:
    """Trains all members in one program if their epochs are compiled, else in processes."""
    all_ = members(arguments.sweep, arguments.seed or 0, arguments.n_seeds or 1)
    root = epath.Path(arguments.output_dir)
    base = list(arguments.config_file), list(arguments.config)
    _parse_seeded(base[0], [*base[1], *all_[0].bindings], arguments)
    trainers = _compiled_members(arguments, all_) if is_jax_env(_bound("RLTask", "env", "")) else []
    if not (trainers and _run_compiled(all_, trainers)):
        with ThreadPoolExecutor(arguments.workers) as pool:
            list(pool.map(functools.partial(_train_member, arguments), all_))
    elif trainers[0].current_epoch < _bound("train", "n_epochs", 100):
        print(f"\nstopped after epoch {trainers[0].current_epoch}; the same command goes on")
        return _STOPPED
    _report_many(root, [member.name for member in all_])
    return 0


def _run_compiled(all_: Sequence[Member], trainers: Sequence[rl_trainers.RLTrainer]) -> bool:
    """Runs and closes the trainers; false if they are not one program, and then they have not run."""
    newest = max(trainer.current_epoch for trainer in trainers)
    distinct = dict(zip((tuple(member.bindings) for member in all_), trainers, strict=True))
    n_epochs, progress = _bound("train", "n_epochs", 100), _bound("train", "progress", True)
    try:
        for trainer in trainers:  # one that was killed while it saved has to catch up
            trainer.run(newest, n_epochs_is_total_epochs=True)
        run_together(trainers, n_epochs, True, list(distinct.values()), progress)
    except KeyboardInterrupt:
        pass
    except NotOneProgramError:
        return False
    finally:
        for trainer in trainers:
            trainer.close()
    return True


def _compiled_members(
    arguments: argparse.Namespace, all_: Sequence[Member]
) -> list[rl_trainers.RLTrainer]:
    """The trainers of the members; none if their epochs are not compiled as a whole."""
    trainers: list[rl_trainers.RLTrainer] = []
    for member in all_:
        seeded = [*member.bindings, f"seed = {member.seed}", "RLTask.seed = %seed"]
        _parse_seeded(arguments.config_file, [*arguments.config, *seeded], arguments)
        directory = epath.Path(arguments.output_dir) / member.name
        make = _bound("train", "trainer", rl_trainers.PPOJoint)
        trainers.append(make(_task(), output_dir=str(directory)))
        if not trainers[0].compiles_epochs:
            trainers[0].close()
            return []
        _write_config(directory, trainers[-1])
    return trainers


def _train_member(arguments: argparse.Namespace, member: Member) -> None:
    """Trains one member in a process of its own, with one thread for its numerics if others run beside it."""
    command = [sys.executable, "-m", "rl_trainers.cli", "train", "--seed", str(member.seed)]
    command += ["--output_dir", str(epath.Path(arguments.output_dir) / member.name)]
    command += [word for path in arguments.config_file for word in ("--config_file", path)]
    bindings = [*arguments.config, *member.bindings, "train.progress = False"]
    command += [word for binding in bindings for word in ("--config", binding)]
    command += ["--allow_unused"] * arguments.allow_unused
    for name in ("driver", "num_workers", "address"):
        value = getattr(arguments, name)
        command += [] if value is None else [f"--{name}", str(value)]
    environment = dict(os.environ)
    if arguments.workers > 1:
        environment["XLA_FLAGS"] = environment.get("XLA_FLAGS", "") + " --xla_cpu_multi_thread_eigen=false"
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise ValueError(f"{member.name} failed: {done.stderr.strip().splitlines()[-1]}")


def _report_many(root: epath.Path, names: Sequence[str]) -> None:
    groups: dict[str, list[float]] = {}
    for name in names:
        value = metrics.read_curve(root / name)["recent_return"][-1]
        groups.setdefault(name.rpartition("seed_")[0].rstrip("-"), []).append(value)
    print("\nmean return of the last 100 training episodes")
    for setting, values in groups.items():
        iqm = metrics.interquartile_mean(values)
        of = f"{len(values)} seeds" if len(values) > 1 else "1 seed"
        print(f"{setting:<16} interquartile mean {iqm:.1f} of {of}, worst {min(values):.1f}")
    picture = root / "curves.png"
    metrics.plot_curves([root / name for name in names], picture, "recent_return")
    print(f"learning curves  {picture}\nevaluate one     {_command()} eval {root / names[0]}")


def _command() -> str:
    """How this program was called, in the shortest form that works again."""
    called = sys.argv[0]
    if os.path.basename(called) != "rl-trainers":
        return "python -m rl_trainers.cli"
    on_path = shutil.which("rl-trainers")
    if on_path is not None and os.path.samefile(on_path, called):
        return "rl-trainers"
    return os.path.relpath(called)


def _report(trainer: rl_trainers.RLTrainer, output_dir: str) -> None:
    episodes = trainer.evaluate(_N_FINAL_EPISODES)
    picture = "none, since no episode has ended"
    if np.isfinite(trainer.avg_returns).any():
        picture = str(epath.Path(output_dir) / "curves.png")
        metrics.plot_curves([output_dir], picture, "recent_return")
    print(
        f"\n{_N_FINAL_EPISODES} greedy episodes: return {np.mean(episodes.returns):.1f} "
        f"± {np.std(episodes.returns):.1f}\n"
        f"learning curve   {picture}\n"
        f"TensorBoard      {output_dir}/rl (pip install tensorboard; tensorboard --logdir {output_dir})\n"
        f"checkpoint       {output_dir}/checkpoints (epoch {trainer.current_epoch})\n"
        f"evaluate again   {_command()} eval {output_dir}\n"
        f"train on         {_command()} train --output_dir {output_dir} "
        f"--config 'train.n_epochs = {2 * trainer.current_epoch}'"
    )


def _eval(arguments: argparse.Namespace) -> int:
    trainer = load(arguments.output_dir)
    episodes = trainer.evaluate(arguments.n_episodes, arguments.temperature)
    trainer.close()
    result = {
        "epoch": trainer.current_epoch,
        "n_episodes": len(episodes.returns),
        "return_mean": float(np.mean(episodes.returns)),
        "return_std": float(np.std(episodes.returns)),
        "length_mean": float(np.mean(episodes.lengths)),
        "returns": [float(x) for x in episodes.returns],
    }
    if arguments.json:
        print(json.dumps(result))
    else:
        print(
            f"epoch {result['epoch']}, {result['n_episodes']} episodes: return "
            f"{result['return_mean']:.1f} ± {result['return_std']:.1f}, length "
            f"{result['length_mean']:.1f}"
        )
    return 0


def _plot(arguments: argparse.Namespace) -> int:
    metrics.plot_curves(arguments.output_dirs, arguments.out, arguments.key)
    print(arguments.out)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="rl-trainers", description="Reinforcement learning in JAX.")
    commands = parser.add_subparsers(dest="command", required=True)
    sub = commands.add_parser("train", help="train, or continue a run")
    sub.add_argument("--config_file", action="append", default=[], help="gin file; may be repeated")
    sub.add_argument("--config", action="append", default=[], help="gin binding; may be repeated")
    sub.add_argument("--output_dir", required=True, help="where everything about the run goes")
    sub.add_argument("--seed", type=int, help="of the environments and of training")
    sub.add_argument("--n_seeds", type=int, help="train this many, from --seed (0) on, in OUTPUT_DIR/seed_..")
    sub.add_argument(
        "--sweep", action="append", default=[], help="a binding to a list of numbers to try; may be repeated"
    )
    sub.add_argument("--workers", type=int, default=1, help="of many runs on Python environments, at a time")
    sub.add_argument(
        "--driver", choices=("on_policy", "sync", "async", "ray"), help="who steps the environments"
    )
    sub.add_argument("--num_workers", type=int, help="of Ray; by default one per CPU")
    sub.add_argument("--address", help="of a Ray cluster, such as auto; without it Ray starts here")
    sub.add_argument("--allow_unused", action="store_true", help="accept bindings without effect")
    sub.set_defaults(run=_train)
    sub = commands.add_parser("eval", help="evaluate a run's newest checkpoint")
    sub.add_argument("output_dir")
    sub.add_argument("--n_episodes", type=int, default=20)
    sub.add_argument("--temperature", type=float, default=0.0, help="0 acts greedily")
    sub.add_argument("--json", action="store_true", help="print one JSON object")
    sub.set_defaults(run=_eval)
    sub = commands.add_parser("plot", help="draw learning curves")
    sub.add_argument("output_dirs", nargs="+")
    sub.add_argument("--out", default="curves.png")
    sub.add_argument("--key", default="avg_return", help="a key of metrics.jsonl")
    sub.set_defaults(run=_plot)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line.

    Args:
        argv: arguments; those of the process by default.

    Returns:
        The exit code: 0; 2 for a mistake in the arguments or the configuration; 130 for a run that Ctrl-C
        stopped early.
    """
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s: %(message)s")
    arguments = _parser().parse_args(argv)
    try:
        return arguments.run(arguments)
    except (ValueError, TypeError, FileNotFoundError) as error:
        print(f"rl-trainers: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
