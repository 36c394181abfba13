"""What `make gpu` does, rehearsed without one: nothing but torch, triton, numpy, pytest and hypothesis is needed.

What it says on a GPU, only a GPU can tell.
"""

import os
import subprocess
import sys
from pathlib import Path

import benchmark
import gpu
import pytest
import torch
from benchmark import DEFAULT, GATHERED, IEEE, MASKED, TINY, WAYS, Line, Timing, table

from boundedkv import selftest

ROOT = Path(__file__).parents[1]
TYPES = ("float32", "bfloat16")

# As if the extras were not installed, and pytest's own plugins neither.
BARE = """
import sys
for name in "rich matplotlib safetensors xdist execnet PIL".split():
    sys.modules[name] = None
import torch
torch.cuda.is_available = lambda: {gpu}
import pytest
sys.exit(pytest.main(["-m", "gpu", "--collect-only", "-q", "-p", "no:cacheprovider", "-p", "no:xdist"]))
"""


@pytest.mark.parametrize("gpu", [False, True], ids=["without", "with"])
def test_a_bare_environment_collects(gpu):
    """With a GPU the tests of both backends are gpu tests too, but not those that build on the CPU."""
    environment = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "TRITON_INTERPRET": "0" if gpu else "1"}
    command = [sys.executable, "-c", BARE.format(gpu=gpu)]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    files = {line.partition("::")[0] for line in done.stdout.splitlines() if "::" in line}
    assert "tests/test_graphs.py" in files
    assert ("tests/test_scenarios_ring.py" in files) == gpu
    assert "tests/test_transfer.py" not in files
    assert "tests/test_traces.py" not in files  # safetensors


# The benchmark.


@pytest.mark.parametrize("step", TINY, ids=lambda step: step.name)
def test_all_ways_read_the_same_keys(step):
    """Near is enough: what one key more or less does is a hundred times as large."""
    for way in (DEFAULT, IEEE):  # the first call: each writes its span, and a second one reads that
        calls = benchmark.ways(step, torch.float32, torch.device("cpu"))
        expected = calls[MASKED]()
        torch.testing.assert_close(calls[GATHERED](), expected, atol=1e-6, rtol=0.0)
        torch.testing.assert_close(calls[way]().transpose(1, 2), expected, atol=1e-3, rtol=0.0)


def test_the_table_says_what_was_timed():
    timings = {way: Timing((1e-7 * n, 3e-7 * n, 2e-7 * n), waited=way == IEEE) for n, way in enumerate(WAYS, start=1)}
    step = benchmark.Step("decode", requests=2, tokens=1, retained=9, heads=3, head_dim=8)
    assert Line(step, "bfloat16", timings).read == 2 * (9 + 1) * 3 * (8 + 8) * 2
    titles, row = (text.split("  ") for text in table([Line(step, "bfloat16", timings)]).splitlines())
    cells = dict(zip(*([cell.strip() for cell in line if cell.strip()] for line in (titles, row)), strict=True))
    assert cells == {
        **{"step": "decode", "B": "2", "T": "1", "kept": "9", "D": "8", "pool": "bfloat16"},
        **{"default us": "0.2", "ieee us": "0.4*", "gathered us": "0.6", "masked us": "0.8", "bare us": "1.0"},
        **{"default GB/s": "10", "ieee GB/s": "5"},
        **{"default/gathered": "0.33", "default/masked": "0.25", "default/bare": "0.20", "ieee/masked": "0.50"},
    }


# The program.


def test_rehearsal(monkeypatch, capsys):
    """Every part as on a GPU, but for the self test, which the suite runs anyway."""
    monkeypatch.setattr(gpu, "SELF_TEST", "import boundedkv, sys; print('tried', *sys.argv[1:])")
    assert gpu.main(["--device", "cpu"]) == 0
    out = capsys.readouterr().out
    assert all(f"tried cpu {i} {gpu.SELF_TESTS}\n" in out for i in range(gpu.SELF_TESTS))
    assert "tests marked gpu passed" in out
    assert " skipped" in out
    rows = [line.split() for line in out[out.index("benchmark passed") :].splitlines()]
    kinds = [(row[0], row[5]) for row in rows if row and row[0] in {step.name for step in TINY}]
    assert kinds == [(step.name, kind) for step in TINY for kind in TYPES]


def test_the_self_test_is_spread_without_a_gap(monkeypatch):
    """Each process tries its share of the families, in the order of the list."""
    stub = "selftest.self_test = lambda device: selftest.SelfTestReport(device, 1, tuple(selftest.FAMILIES), 0)\n"
    monkeypatch.setattr(gpu, "SELF_TEST", gpu.SELF_TEST.replace("report =", f"{stub}report ="))
    told = [part.text.partition("says: ")[2].strip() for part in gpu.run_self_test("cpu", 100)]
    families = list(selftest.FAMILIES)
    assert told == [" ".join(families[i :: gpu.SELF_TESTS]) for i in range(gpu.SELF_TESTS)]


@pytest.mark.parametrize("fails", [gpu.SELF_TEST, "--collect-only", "--device", "@"])
def test_a_part_that_fails_is_told_and_the_others_run(fails, monkeypatch, capsys):
    def python(device, limit, *arguments):
        seen.append(arguments)
        failed = any(argument.startswith(fails) for argument in arguments)
        return gpu.Part(int(failed), "tests/test_a.py::test_b\nits end")

    seen = []
    monkeypatch.setattr(gpu, "python", python)
    assert gpu.main(["--device", "cpu"]) == 1
    assert len(seen) == 1 + gpu.SELF_TESTS + 2 + 2
    assert capsys.readouterr().out.count("FAILED") == 1


def test_without_a_gpu_nothing_is_tried(monkeypatch, capsys):
    monkeypatch.setattr(gpu, "ABOUT", f"import torch\ntorch.cuda.is_available = lambda: False\n{gpu.ABOUT}")
    assert gpu.main([]) == 1
    assert capsys.readouterr().out.split() == "torch sees no GPU".split()


def test_no_test_at_all_is_a_failure(monkeypatch):
    monkeypatch.setattr(gpu, "python", lambda *arguments: gpu.Part(0, "nothing collected"))
    assert gpu.main(["--device", "cpu"]) == 1


def test_a_part_without_an_end_is_stopped():
    part = gpu.python("cpu", 2, "-c", "print('begun', flush=True)\nwhile True: pass")
    assert part.status != 0
    assert part.text.splitlines() == ["begun", "", "stopped after 2 s"]
