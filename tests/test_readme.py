"""The README's example and tables say what is so."""

import pathlib
import re

import numpy as np

import rl_trainers

ROOT = pathlib.Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_the_python_example_runs(capsys):
    (code,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    lines = [line for line in code.splitlines() if line and not line.startswith(("import", "from"))]
    assert len(lines) <= 15
    scope = {}
    exec(code.replace("run(50, progress=True)", "run(2, progress=True)"), scope)
    assert "return " in capsys.readouterr().out
    assert scope["action"] in (0, 1)
    assert np.shape(scope["dist_inputs"]) == (2,)
    assert scope["trainer"].current_epoch == 2


def test_every_config_and_trainer_that_is_named_exists_and_the_other_way_round():
    rows = re.findall(r"^\| `\w+` \|.*$", README, re.MULTILINE)
    named = set(re.findall(r"`([a-z0-9]+_\w+)`", "".join(rows)))
    there = {path.stem for path in (ROOT / "configs").glob("*.gin")}
    assert named == there
    for name in re.findall(r"^\| `(\w+)` \|", README, re.MULTILINE):
        assert hasattr(rl_trainers, name)
