"""What a run tells: a JSON-lines file, TensorBoard events, a progress display, and learning curves.

``metrics.jsonl`` has one line per epoch, with the keys ``epoch``, ``env_steps``, ``wall_s``,
``steps_per_s``, ``avg_return``, ``eval_return`` and one per metric of a loss. TensorBoard gets the
same numbers under Trax's tag names, over environment steps.
"""

from __future__ import annotations

import json
import math
import re
import sys
import time
from collections.abc import Mapping, Sequence
from os import PathLike
from typing import Any, NamedTuple, TextIO

import jax
import numpy as np
from etils import epath

_FILE = "metrics.jsonl"

_TAGS = {
    "avg_return": "rl/avg_return",
    "eval_return": "rl/eval_return",
    "env_steps": "rl/n_interactions",
    "steps_per_s": "rl/n_interactions_per_second",
    "n_trajectories": "rl/n_trajectories",
    "epoch": "rl/epoch",
    "collect_s": "timing/collect",
    "train_s": "timing/train",
    "wall_s": "timing/wall",
    "compilations": "timing/compilations",
    "compile_s": "timing/compile",
}


_LABELS = {
    "avg_return": "mean return of an epoch's episodes",
    "recent_return": "mean return of the last 100 episodes",
    "eval_return": "mean return of greedy episodes",
}


class Compilations(NamedTuple):
    """How many programs this process has compiled, and the seconds that took."""

    programs: int
    seconds: float


_compilations = Compilations(0, 0.0)


def _on_duration(event: str, duration_secs: float, **_: str | int) -> None:
    global _compilations
    if event == "/jax/core/compile/backend_compile_duration":
        _compilations = Compilations(_compilations.programs + 1, _compilations.seconds + duration_secs)


jax.monitoring.register_event_duration_secs_listener(_on_duration)


def compilations() -> Compilations:
    """What was compiled, or read from the compilation cache, since this module was imported."""
    return _compilations


def eval_key(temperature: float, steps: int) -> str:
    """Returns the key, in Trax's spelling, of an evaluation at one temperature and length."""
    return f"avg_return_temperature{temperature:.2f}_steps{steps}"


def tag(key: str) -> str:
    """Returns the TensorBoard tag of a record's key."""
    if key.startswith("avg_return_temperature"):
        return f"rl/{key}"
    return _TAGS.get(key, f"metrics/{key}")


class MetricsWriter:
    """Appends records to ``metrics.jsonl`` and to TensorBoard events in ``rl/`` of a run."""

    def __init__(self, output_dir: str | PathLike[str], resume_epoch: int = 0) -> None:
        """Opens the files, and drops what was written after the epoch that the run continues from.

        Args:
            output_dir: the run's directory; made if it is not there.
            resume_epoch: the last epoch that counts, that of the restored checkpoint; 0 for a run
                from the start. Later lines, and a half-written last one, are removed from the file;
                TensorBoard is told to forget the same steps.
        """
        directory = epath.Path(output_dir)
        directory.mkdir(parents=True, exist_ok=True)
        path = directory / _FILE
        kept = [line for line in _read_lines(path) if line.get("epoch", 0) <= resume_epoch]
        if path.exists():
            fresh = path.with_name(_FILE + ".tmp")
            fresh.write_text("".join(json.dumps(line) + "\n" for line in kept))
            fresh.replace(path)
        last_step = max((line.get("env_steps", 0) for line in kept), default=-1)
        self._file = path.open("a")
        self._events = _event_writer(directory / "rl", resume_epoch, last_step + 1)

    def write(self, record: Mapping[str, Any]) -> None:
        """Appends one record.

        Args:
            record: scalars by name (Python, NumPy or JAX numbers); ``env_steps`` is the axis in
                TensorBoard. NaN and infinity become ``null`` and are left out of TensorBoard.
        """
        from tensorboardX.proto.summary_pb2 import Summary

        values = {key: _plain(value) for key, value in record.items()}
        self._file.write(json.dumps(values) + "\n")
        self._file.flush()
        # One event for all of them: twenty calls of add_scalar would cost a millisecond.
        summary = Summary(
            value=[
                Summary.Value(tag=tag(key), simple_value=value)
                for key, value in values.items()
                if value is not None
            ]
        )
        self._events.file_writer.add_summary(summary, int(values.get("env_steps") or 0))

    def write_text(self, name: str, text: str, env_steps: int = 0) -> None:
        """Writes a text, such as ``gin_config``, to TensorBoard as it stands."""
        block = "\n".join("    " + line for line in text.splitlines())
        self._events.add_text(name, block, env_steps)

    def close(self) -> None:
        """Flushes and closes both files; a second call does nothing."""
        self._file.close()
        self._events.close()


class Progress:
    """One line about a run: drawn in place on a terminal, printed now and then elsewhere.

    Use as a context manager, so that the terminal is put right whatever happens.
    """

    def __init__(
        self,
        total_epochs: int | None,
        total_steps: int | None = None,
        stream: TextIO | None = None,
    ) -> None:
        """Starts the display.

        Args:
            total_epochs: the epoch that the run ends with; the bar follows it.
            total_steps: the environment steps that it ends with; the bar follows them where
                ``total_epochs`` is ``None``.
            stream: where to write; standard output if left out.

        Raises:
            ValueError: if neither total is given, or one is below 1.
        """
        totals = [total for total in (total_epochs, total_steps) if total is not None]
        if not totals or min(totals) < 1:
            raise ValueError(
                f"total_epochs is {total_epochs} and total_steps is {total_steps}; "
                "one must be given, and be at least 1."
            )
        self._total_epochs = total_epochs
        self._total_steps = total_steps
        self._stream = sys.stdout if stream is None else stream
        self._start = time.perf_counter()
        self._first: tuple[float, float] | None = None
        self._record: dict[str, Any] = {}
        self._drawn: Mapping[str, Any] | None = None
        self._next_draw = 0.0
        self._bar = _make_bar(self._stream) if self._stream.isatty() else None
        self._period = 0.1 if self._bar else 2.0

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def update(self, record: Mapping[str, Any]) -> None:
        """Takes a record as :class:`MetricsWriter` does; draws it if enough time has passed.

        The return shown is ``recent_return``, else ``avg_return``, else ``eval_return``; where all are
        missing or NaN, it is the last that was known.
        """
        names = ("recent_return", "avg_return", "eval_return")
        values = (record[name] for name in names if name in record)
        known = next((value for value in values if value == value), None)
        last = self._record.get("avg_return")
        self._record = {**record, "avg_return": last if known is None else known}
        now = time.perf_counter()
        if self._first is None:  # compilation is over, so that this tells the pace
            self._first = (now, self.fraction)
        if now >= self._next_draw:
            self._next_draw = now + self._period
            self._draw()

    def close(self) -> None:
        """Draws the last record, if it was not, and gives the terminal back."""
        if self._drawn is not self._record and self._record:
            self._draw()
        if self._bar:
            self._bar.stop()

    @property
    def fraction(self) -> float:
        """The part of the run that is done, from 0 to exactly 1."""
        if self._total_epochs is not None:
            return min(1.0, self._record.get("epoch", 0) / self._total_epochs)
        assert self._total_steps is not None
        return min(1.0, self._record.get("env_steps", 0) / self._total_steps)

    def _draw(self) -> None:
        self._drawn = self._record
        text = self._text()
        if self._bar:
            self._bar.update(self._bar.task_ids[0], completed=self.fraction, text=text)
            self._bar.refresh()
        else:
            print(text, file=self._stream, flush=True)

    def _text(self) -> str:
        record = self._record
        of_epochs = f"/{self._total_epochs}" if self._total_epochs else ""
        of_steps = f"/{self._total_steps:,}" if self._total_steps else ""
        parts = [
            # Rounded down, so that 100 % is said of a finished run alone.
            f"{math.floor(100 * self.fraction)} %",
            f"epoch {record.get('epoch', 0)}{of_epochs}",
            f"{int(record.get('env_steps', 0)):,}{of_steps} steps",
        ]
        if record.get("steps_per_s") is not None:
            parts.append(f"{record['steps_per_s']:,.0f}/s")
        if record["avg_return"] is not None:
            parts.append(f"return {record['avg_return']:.1f}")
        parts.append(self._time_left())
        return " · ".join(parts)

    def _time_left(self) -> str:
        now = time.perf_counter()
        if self.fraction == 1.0:
            return f"took {_duration(now - self._start)}"
        since, fraction = self._first or (now, 0.0)
        done = self.fraction - fraction
        return f"{_duration((now - since) * (1 - self.fraction) / done)} left" if done > 0 else "starting"


def read_curve(output_dir: str | PathLike[str]) -> dict[str, np.ndarray]:
    """Reads ``metrics.jsonl`` of a run, finished or not.

    Returns:
        f64 ``[lines]`` by key; NaN where a line has no number for it.

    Raises:
        FileNotFoundError: if the run has no such file.
    """
    path = epath.Path(output_dir) / _FILE
    if not path.exists():
        raise FileNotFoundError(f"There is no {path}; give the output directory of a run.")
    lines = _read_lines(path)
    keys = dict.fromkeys(key for line in lines for key in line)
    return {
        key: np.array([_number(line.get(key)) for line in lines], dtype=np.float64) for key in keys
    }


def plot_curves(
    dirs: Sequence[str | PathLike[str]], out: str | PathLike[str], key: str = "avg_return"
) -> None:
    """Draws learning curves over environment steps into a picture.

    Runs whose ``config.gin`` differ in the seed alone are drawn as one group: each run thin, and
    the interquartile mean with its 95 % bootstrap interval (Agarwal et al. 2021) thick.

    Args:
        dirs: output directories of runs.
        out: the picture's file; its ending gives the format.
        key: what to draw, a key of :func:`read_curve`.

    Raises:
        ValueError: if ``dirs`` is empty, or a run has no number under ``key``.
    """
    if not dirs:
        raise ValueError("dirs is empty; give at least one output directory.")
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for i, group in enumerate(_group_by_config(dirs)):
        curves = [_curve(directory, key) for directory in group]
        color = f"C{i}"
        alone = len(group) == 1
        for steps, values in curves:
            axes.plot(
                steps, values, color=color, lw=1.6 if alone else 0.7, alpha=1 if alone else 0.4
            )
        if alone:
            axes.lines[-1].set_label(group[0].name)
        else:
            steps, middle, low, high = _iqm(curves)
            label = f"{group[0].name} and {len(group) - 1} more, IQM"
            axes.plot(steps, middle, color=color, lw=2.2, label=label)
            axes.fill_between(steps, low, high, color=color, alpha=0.2, lw=0)
    axes.set_xlabel("environment steps")
    name = _LABELS.get(key, key.replace("_", " "))
    axes.set_ylabel(name)
    axes.set_title(f"{name[0].upper()}{name[1:]}")
    axes.grid(alpha=0.3)
    axes.xaxis.set_major_formatter("{x:,.0f}")
    axes.legend()
    figure.savefig(epath.Path(out), dpi=120)


def interquartile_mean(values: Sequence[float]) -> float:
    """The mean of the middle half (Agarwal et al. 2021, https://arxiv.org/abs/2108.13264)."""
    from rliable.metrics import aggregate_iqm

    return float(aggregate_iqm(np.asarray(values, np.float64)))


def _read_lines(path: epath.Path) -> list[dict[str, Any]]:
    """The records of a file; a last line that a killed process left unfinished is dropped."""
    if not path.exists():
        return []
    *whole, _ = path.read_text().split("\n")
    return [json.loads(line) for line in whole]


def _plain(value: Any) -> int | float | None:
    number = value if isinstance(value, (bool, int, float)) else np.asarray(value).item()
    return number if math.isfinite(number) else None


def _number(value: Any) -> float:
    return math.nan if value is None else value


def _event_writer(directory: epath.Path, epoch: int, purge_step: int) -> Any:
    from tensorboardX import SummaryWriter

    old = directory.exists() and any(directory.iterdir())
    return SummaryWriter(
        str(directory),
        purge_step=purge_step if old else None,
        # File names have the second in them, which a quick restart may share.
        filename_suffix=f".{epoch}.{time.time_ns()}" if old else "",
    )


def _make_bar(stream: TextIO) -> Any:
    from rich.console import Console
    from rich.progress import BarColumn, TextColumn
    from rich.progress import Progress as Bar
    from rich.table import Column

    bar = Bar(
        BarColumn(bar_width=10),
        TextColumn("{task.fields[text]}", markup=False, table_column=Column(no_wrap=True)),
        console=Console(file=stream),
        auto_refresh=False,
    )
    bar.add_task("", total=1.0, text="starting")
    bar.start()
    return bar


def _duration(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    hours = f"{minutes // 60}:" if minutes >= 60 else ""
    return f"{hours}{minutes % 60:02d}:{seconds:02d}"


def _group_by_config(dirs: Sequence[str | PathLike[str]]) -> list[list[epath.Path]]:
    groups: dict[str, list[epath.Path]] = {}
    for directory in map(epath.Path, dirs):
        config = directory / "config.gin"
        lines = config.read_text().splitlines() if config.exists() else [str(directory)]
        same = "\n".join(line for line in lines if not re.match(r"\s*([\w./]*\.)?seed\s*=", line))
        groups.setdefault(same, []).append(directory)
    # Of two or three runs each is told apart; an interquartile mean begins to say something at four.
    parts = ([group] if len(group) > 3 else [[each] for each in group] for group in groups.values())
    return [group for part in parts for group in part]


def _curve(directory: epath.Path, key: str) -> tuple[np.ndarray, np.ndarray]:
    """Environment steps and values of a run, f64 ``[n]`` each, where there is a value."""
    curve = read_curve(directory)
    values = curve.get(key, np.empty(0))
    known = np.isfinite(values)
    if not known.any():
        raise ValueError(f"key is {key!r}, but {directory} has no number for it, only {[*curve]}.")
    return curve["env_steps"][known], values[known]


def _iqm(curves: Sequence[tuple[np.ndarray, np.ndarray]]) -> tuple[np.ndarray, ...]:
    """Steps, interquartile mean and its 95 % interval where runs overlap; f64 ``[50]`` each."""
    steps = np.linspace(max(s[0] for s, _ in curves), min(s[-1] for s, _ in curves), 50)
    scores = np.stack([np.interp(steps, s, values) for s, values in curves])
    # rliable's own bootstrap draws from NumPy's global generator.
    draws = np.random.default_rng(0).integers(len(curves), size=(200, len(curves)))
    drawn = [[interquartile_mean(column) for column in scores[runs].T] for runs in draws]
    low, high = np.percentile(drawn, [2.5, 97.5], axis=0)
    return steps, np.array([interquartile_mean(column) for column in scores.T]), low, high
