"""The tutorials run with either backend, print the same with both, and what is committed is what they print."""

import re
from pathlib import Path

import pytest

pytest.importorskip("nbclient")
pytest.importorskip("ipykernel")
pytest.importorskip("matplotlib")

import nbformat

from tutorials import TUTORIALS, execute, ran_with

# Sizes that make a run short. The committed outputs are those of the full ones, so they are not compared.
SHORTER = {"6-streaming-llm": "TRAINING_STEPS, STREAM_LENGTH, STREAMS = 20, 100, 1"}

# There the oracle, which is the reference, judges a kernel of the reader's own, whatever BACKEND is.
JUDGED = {"4-write-the-kernel", "7-judge-your-own"}

# How many calls of `attend` each backend had, counted from inside the notebook's own process.
COUNTING = """
import boundedkv.reference as _reference, boundedkv.fast as _fast
_attends = dict.fromkeys(("reference", "fast"), 0)
def _counted(name, attend):
    def counted(*arguments, **options):
        _attends[name] += 1
        return attend(*arguments, **options)
    return counted
for _name, _manager in (("reference", _reference.ReferenceManager), ("fast", _fast.FastManager)):
    _manager._attend = _counted(_name, _manager._attend)
"""
COUNTED = "print('attends:', _attends['reference'], _attends['fast'])"
INTERPRETED = "import os\nos.environ['TRITON_INTERPRET'] = '1'  # their tensors are on the CPU, GPU or not\n"


def printed(notebook):
    """What each cell of code printed, or showed as text."""
    return [
        "".join(
            output.text if output.output_type == "stream" else output.get("data", {}).get("text/plain", "")
            for output in cell.outputs
            if output.get("name") != "stderr" and "image/svg+xml" not in output.get("data", {})
        )
        for cell in notebook.cells
        if cell.cell_type == "code"
    ]


def run(path, backend):
    """Execute a notebook with one backend; returns what its own cells printed, and both counts of attends."""
    before = f"{INTERPRETED}BACKEND = {backend!r}\n{SHORTER.get(path.stem, '')}\n{COUNTING}"
    told = printed(execute(path, before=before, after=COUNTED))
    counts = re.fullmatch(r"attends: (\d+) (\d+)\n", told.pop())
    del told[1]
    return told, {"reference": int(counts[1]), "fast": int(counts[2])}


@pytest.mark.parametrize("path", TUTORIALS, ids=lambda path: path.stem)
def test_a_tutorial_says_the_same_with_both_backends(path):
    told, calls = {}, {}
    for backend in ("reference", "fast"):
        told[backend], calls[backend] = run(path, backend)
    switched = calls["fast"]["fast"]
    assert switched > 0, "BACKEND chooses nothing"
    assert calls["reference"] == {"reference": calls["fast"]["reference"] + switched, "fast": 0}
    assert calls["fast"]["reference"] == 0 or path.stem in JUDGED, "something does not take its backend from BACKEND"
    assert told["fast"] == told["reference"]
    committed = nbformat.read(path, as_version=4)
    then, now = committed.metadata["ran_with"], ran_with()
    alike = then == now if path.stem in JUDGED else then["torch"] == now["torch"]  # only the oracle draws examples
    if path.stem not in SHORTER and alike:
        assert told["reference"] == printed(committed), f"python tests/tutorials.py {path.name}"


@pytest.mark.parametrize("path", TUTORIALS, ids=lambda path: path.stem)
def test_a_tutorial_is_committed_as_it_ran(path):
    notebook = nbformat.read(path, as_version=4)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1))
    assert code[0].source.startswith('BACKEND = "reference"')
    assert not [output for cell in code for output in cell.outputs if output.output_type == "error"]
    assert notebook.cells[0].source.startswith(f"# {path.stem[0]}. ")


def test_there_are_seven():
    assert [path.stem[0] for path in TUTORIALS] == list("1234567")
    assert all(path.parent == Path(__file__).parents[1] / "tutorials" for path in TUTORIALS)
