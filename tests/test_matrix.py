"""The suite under other versions: a few tests under one other Triton here, all of it by `make matrix`.

And the program that does it tells what passed from what failed and from what could not be installed.
"""

import os
import re
import sys
import tomllib
from pathlib import Path

import matrix
import pytest
import triton
from matrix import FAILED, NOT_INSTALLABLE, NOT_TRIED, PASSED, QUICK, ROWS, Outcome, Row

ROOT = Path(__file__).parents[1]
HERE = "{}.{}".format(*sys.version_info)
# Every element type, several splits, and what memory may hold: each as a recorded trace, on the interpreter alone.
FEW = [
    f"tests/test_golden.py::test_a_trace_replays_with_every_bit[fast-{name}]"
    for name in ("types-float32", "types-float16", "types-bfloat16", "splits", "poison-halves")
]


def test_another_triton_gives_the_same_bits(tmp_path):
    pytest.importorskip("safetensors")
    other = "3.8.0" if triton.__version__.startswith("3.7.") else "3.7.1"
    reason = matrix.install(
        *(sys.executable, "--target", str(tmp_path), "--no-deps", "--no-compile"),
        *("--retries", "0", "--timeout", "15", f"triton=={other}"),
    )
    if reason:
        pytest.skip(f"triton {other} could not be installed: {reason}")
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    found = matrix.run(sys.executable, "-c", "import triton; print(triton.__version__)", PYTHONPATH=path)
    assert found.stdout.strip() == other
    assert matrix.ran(sys.executable, ROOT, FEW, path=path) == Outcome(PASSED, f"{len(FEW)} passed")


def test_rows_cover_what_the_project_says_it_works_with():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    classified = re.findall(r"Python :: (3\.\d+)", " ".join(project["classifiers"]))
    assert {row.python for row in ROWS} == set(classified)
    needs = dict(re.match(r"(\w+)>=([\d.]+)", need).groups() for need in project["dependencies"])
    for name, versions in (("torch", ["2.11", "2.13"]), ("triton", ["3.6", "3.7", "3.8", "3.9"])):
        tried = {".".join(getattr(row, name).split(".")[:2]) for row in ROWS}
        assert tried == set(versions)
        assert versions[0] == needs[name]
    assert len(set(ROWS)) == len(ROWS)
    assert all((ROOT / name).is_file() for name in QUICK)


def test_page_has_a_line_for_each_row_and_nothing_that_failed():
    text = (ROOT / matrix.PAGE).read_text(encoding="utf-8")
    lines = [line.strip("| ").split(" | ") for line in text.splitlines() if re.match(r"\| \d", line)]
    assert [tuple(line[:4]) for line in lines] == [tuple(row) for row in ROWS]
    assert {line[4] for line in lines} <= {"suite", "quick", ""}
    assert {line[5].partition(":")[0] for line in lines} <= {PASSED, NOT_INSTALLABLE, NOT_TRIED}
    assert text == matrix.page(text, ROWS, "", {})


# The program, on a project of two files.


@pytest.fixture
def project(tmp_path, monkeypatch):
    (tmp_path / "docs").mkdir()
    (tmp_path / "good.py").write_text("def test_good():\n    assert True\n", encoding="utf-8")
    (tmp_path / "bad.py").write_text("def test_bad():\n    assert False, 'no | line\\n'\n", encoding="utf-8")
    (tmp_path / "none.py").write_text("", encoding="utf-8")
    (tmp_path / "broken.py").write_text("import nothing_of_this_name\n", encoding="utf-8")
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")  # these tests need none, and each run starts anew
    return tmp_path


@pytest.mark.parametrize(
    ("files", "verdict", "words"),
    [
        (["good.py"], PASSED, r"1 passed"),
        (["good.py", "bad.py"], FAILED, r"1 failed, 1 passed; bad.py::test_bad"),
        (["none.py"], FAILED, r"no tests ran.*"),
        (["broken.py"], FAILED, r"1 error.*; broken.py"),
        (["absent.py"], FAILED, r"(?s).*absent.py"),
    ],
    ids=lambda value: value[-1] if isinstance(value, list) else "",
)
def test_only_tests_that_ran_and_passed_count(project, files, verdict, words):
    outcome = matrix.ran(sys.executable, project, files)
    assert outcome.verdict == verdict
    assert re.fullmatch(words, outcome.words)


def test_what_cannot_be_installed_has_not_passed(project, monkeypatch, capsys):
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setattr(sys, "argv", ["matrix.py", "--write"])
    rows = [Row("3.99", "2.13.0", "3.9.0", "2.4.*"), Row(HERE, "0.0.0", "3.9.0", "2.4.*")]
    assert matrix.main(project, rows) == 2
    text = (project / matrix.PAGE).read_text(encoding="utf-8")
    assert f"| 3.99 | 2.13.0 | 3.9.0 | 2.4.* | suite | {NOT_INSTALLABLE}: there is no python3.99 |" in text
    assert re.search(rf"^\| {HERE} \| 0.0.0 \|.*\| {NOT_INSTALLABLE}: .*torch==0.0.0", text, flags=re.MULTILINE)
    assert PASSED not in [
        line.split(": ")[-2].split()[-1] for line in capsys.readouterr().out.strip().splitlines()[-2:]
    ]


@pytest.mark.parametrize(
    ("verdicts", "status"),
    [([PASSED, PASSED], 0), ([NOT_INSTALLABLE, PASSED], 2), ([FAILED, NOT_INSTALLABLE], 1)],
)
def test_only_if_all_pass_is_it_well(verdicts, status, project, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["matrix.py", "--only", "triton 3.9"])
    rows = [Row("3.11", str(i), "3.9.0", "2.4.*") for i in range(len(verdicts))]
    monkeypatch.setattr(matrix, "judge", lambda row, *_: Outcome(verdicts[int(row.torch)], ""))
    assert matrix.main(project, [*rows, Row("3.11", "9", "3.8.0", "2.4.*")]) == status


def test_rows_that_are_not_tried_keep_their_lines():
    rows = [Row("3.11", "2.13.0", triton, "2.4.*") for triton in ("3.7.1", "3.8.0", "3.9.0")]
    first = matrix.page("", rows, "suite", {rows[0]: Outcome(PASSED, "9 passed"), rows[1]: Outcome(FAILED, "a | b\nc")})
    second = matrix.page(first, rows, "quick", {rows[1]: Outcome(PASSED, "3 passed")})
    assert [line for line in second.splitlines() if line.startswith("| 3")] == [
        "| 3.11 | 2.13.0 | 3.7.1 | 2.4.* | suite | passed: 9 passed |",
        "| 3.11 | 2.13.0 | 3.8.0 | 2.4.* | quick | passed: 3 passed |",
        "| 3.11 | 2.13.0 | 3.9.0 | 2.4.* |  | not tried: no run yet |",
    ]
    assert "| failed: a \\| b c |" in first
