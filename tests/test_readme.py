"""The README's example and tables say what is so."""

import pathlib
import re

import numpy as np
import pytest

import rl_trainers

ROOT = pathlib.Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
EXAMPLES = re.findall(r"```python\n(.*?)```", README, re.DOTALL)


def test_the_python_example_runs(capsys):
    code = EXAMPLES[0]
    lines = [line for line in code.splitlines() if line and not line.startswith(("import", "from"))]
    assert len(lines) <= 15
    scope = {}
    exec(code.replace("run(50, progress=True)", "run(2, progress=True)"), scope)
    assert "return " in capsys.readouterr().out
    assert scope["action"] in (0, 1)
    assert np.shape(scope["dist_inputs"]) == (2,)
    assert scope["trainer"].current_epoch == 2


def test_the_example_of_jax_environments_runs(capsys):
    pytest.importorskip("gymnax")
    assert len(EXAMPLES) == 2
    scope = {}
    exec(EXAMPLES[1].replace("run(40, progress=True)", "run(2, progress=True)"), scope)
    assert scope["trainer"].compiles_epochs and scope["trainer"].current_epoch == 2
    assert "." in capsys.readouterr().out


def test_every_config_and_trainer_that_is_named_exists_and_the_other_way_round():
    table = README.partition("## Trainers and configs")[2].partition("\n\n")[2].partition("\n\n")[0]
    rows = [row.split("|") for row in table.splitlines()[2:]]
    named = {name for row in rows for name in re.findall(r"`(\w+)`", row[3])}
    there = {path.stem for path in (ROOT / "configs").glob("*.gin")}
    assert named == there
    trainers = [name for row in rows for name in re.findall(r"`(\w+)`", row[1])]
    assert len(trainers) >= 9 and all(hasattr(rl_trainers, name) for name in trainers)
