"""Executes the notebooks as a reader would, from a copy."""

import base64
import io
import os
import shutil
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient
from PIL import Image, ImageSequence

_ROOT = Path(__file__).resolve().parents[1]
_NOTEBOOKS = sorted((_ROOT / "notebooks").glob("*.ipynb"))


def _execute(path: Path, directory: Path) -> nbformat.NotebookNode:
    copy = Path(shutil.copy(path, directory))
    notebook = nbformat.read(copy, as_version=4)
    resources = {"metadata": {"path": str(directory)}}
    client = NotebookClient(notebook, timeout=300, kernel_name="python3", resources=resources)
    search_path = os.pathsep.join([str(_ROOT), os.environ.get("PYTHONPATH", "")])
    environment = {"PYTHONPATH": search_path, "TMPDIR": str(directory), "MPLBACKEND": ""}
    client.execute(env={**os.environ, **environment})
    return notebook


def _outputs(notebook: nbformat.NotebookNode, mime: str) -> list:
    outputs = [out for cell in notebook.cells for out in cell.get("outputs", ())]
    return [out.data[mime] for out in outputs if mime in out.get("data", {})]


def _seconds(gif: bytes) -> float:
    frames = ImageSequence.Iterator(Image.open(io.BytesIO(gif)))
    return sum(frame.info["duration"] for frame in frames) / 1000


def test_there_are_notebooks():
    assert _ROOT / "notebooks" / "first_run.ipynb" in _NOTEBOOKS


@pytest.mark.parametrize("path", _NOTEBOOKS, ids=lambda path: path.stem)
def test_the_repository_keeps_no_outputs(path):
    code = [c for c in nbformat.read(path, as_version=4).cells if c.cell_type == "code"]
    assert code
    assert all(not cell.outputs and cell.execution_count is None for cell in code)


@pytest.mark.slow
@pytest.mark.parametrize("path", _NOTEBOOKS, ids=lambda path: path.stem)
def test_runs_from_top_to_bottom_and_shows_animations(path, tmp_path):
    notebook = _execute(path, tmp_path)  # raises on an error in a cell
    assert len(nbformat.writes(notebook)) < 2**20
    assert _outputs(notebook, "image/png")
    animations = [base64.b64decode(data) for data in _outputs(notebook, "image/gif")]
    seconds = [_seconds(data) for data in animations]
    # 240 steps of 20 ms where the pole stands to the end; untrained, it falls much sooner.
    assert len(seconds) == 2
    assert seconds[0] < 1.5
    assert seconds[1] == pytest.approx(4.8)
