"""The planted faults still fit the code, the page tells of each, and the program that tries them can tell their fates.

The faults themselves are tried by `make mutants`, which takes too long to be a test.
"""

import re
import shutil
import sys
from pathlib import Path

import mutants
import pytest

ROOT = Path(__file__).parents[1]
LIST = mutants.load(ROOT)
KINDS = {"sign", "off by one", "mask", "order", "fusion", "division", "rounding", "constant"}


@pytest.mark.parametrize("fault", LIST, ids=lambda fault: fault.name)
def test_fault_still_applies(fault):
    assert mutants.stale(ROOT, fault) == ""
    assert all(old != new for _, old, new in fault.edits)
    assert all((ROOT / test.partition("::")[0]).is_file() for test in fault.tests)


def test_list_is_wide_and_its_names_tell_faults_apart():
    assert len(LIST) >= 75
    assert {fault.kind for fault in LIST} == KINDS
    assert len({fault.name for fault in LIST}) == len(LIST)
    assert not [fault.name for fault in LIST if "|" in f"{fault.name}{fault.equivalent}"]
    touched = {edit.file for fault in LIST for edit in fault.edits}
    written = [path for folder in ("reference", "fast") for path in (ROOT / folder).glob("[!_]*.py")]
    assert {path.relative_to(ROOT).as_posix() for path in written} - touched == {"fast/runtime.py"}
    at_once = [fault for fault in LIST if {"reference", "fast"} <= {Path(edit.file).parts[0] for edit in fault.edits}]
    assert len(at_once) >= 10


def test_page_has_a_line_for_each_fault_and_names_tests_that_exist():
    text = (ROOT / mutants.PAGE).read_text(encoding="utf-8")
    lines = [
        line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("| ") and " | in | " not in line
    ]
    found = {tuple(told): last for *told, last in lines}
    assert found.keys() == {(fault.name, fault.files, fault.kind) for fault in LIST}
    for fault in LIST:
        last = found[fault.name, fault.files, fault.kind]
        if fault.equivalent:
            assert last == fault.equivalent
        else:
            file, test = re.fullmatch(r"`(.*)::(.*)`", last).groups()
            assert f"def {test}(" in (ROOT / file).read_text(encoding="utf-8"), f"{file} has no {test}"


# The program, on a project of one line.

ONE = "def one():\n    return 1\n"
LENGTH = """
from boundedkv.number import one
def test_length():
    assert len(str(one())) == 1
"""
VALUE = """
from boundedkv.number import one
def test_value():
    assert one() == 1
"""
# Fault -> its texts, why it is said to change nothing, the outcome and by whom.
FATES = {
    "to two": ("return 1", "return 2", "", "caught", "tests/test_value.py::test_value"),
    "to ten": ("return 1", "return 10", "", "caught", "tests/test_length.py::test_length"),
    "to one": ("return 1", "return 1  # still", "", "survived", ""),
    "to its sign": ("return 1", "return +1", "plus one is one", "equivalent", "plus one is one"),
    "to a false claim": ("return 1", "return 10", "it is not", "not equivalent", "tests/test_length.py::test_length"),
    "to a crash": ("return 1", "import os; os.abort()", "", "caught", "tests/test_length.py::test_length"),
    "to nothing": ("def one", "def none", "", "broken", "tests/test_length.py"),
}


@pytest.fixture
def project(tmp_path, monkeypatch):
    """A package of one function, two tests, and no fault yet; and its list of faults as a function of their names."""
    if shutil.which("make") is None:
        pytest.skip("copies are laid out by make, which is not installed")
    files = {
        "common/__init__.py": "",
        "common/number.py": ONE,
        "reference/__init__.py": "",
        "fast/__init__.py": "",
        "tests/test_length.py": LENGTH,
        "tests/test_value.py": VALUE,
        "tests/test_mutants.py": "def test_that_always_fails():\n    assert False\n",
        "docs/mutants.md": "",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text, encoding="utf-8")
    shutil.copy(ROOT / "Makefile", tmp_path)
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")  # these tests need none, and each run starts anew
    (tmp_path / "tests" / "faults").mkdir()

    def run(names, *arguments):
        entries = [
            f'[[fault]]\nname = {name!r}\nkind = "constant"\nfile = "common/number.py"\ntests = ["test_length.py"]\n'
            f"old = {FATES[name][0]!r}\nnew = {FATES[name][1]!r}\nequivalent = {FATES[name][2]!r}\n"
            for name in names
        ]
        (tmp_path / "tests" / "faults" / "all.toml").write_text("\n".join(entries), encoding="utf-8")
        monkeypatch.setattr(sys, "argv", ["mutants.py", *arguments])
        return mutants.main(tmp_path)

    run.root = tmp_path
    return run


def test_each_fate_is_told(project, capsys):
    assert project(FATES) == 1
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    for name, (*_, outcome, by) in FATES.items():
        assert any(re.fullmatch(rf"{outcome} {name} \d+ s ?{re.escape(by)}", line) for line in lines), (name, lines)
    assert "3 caught, 1 survived, 1 equivalent, 1 not equivalent, 1 broken" in lines


def test_only_what_is_caught_or_equivalent_is_well(project, capsys):
    assert project(["to two", "to its sign"], "--jobs", "2") == 0
    assert "1 caught, 1 equivalent" in capsys.readouterr().out
    assert project(["to one"]) == 1


def test_the_page_keeps_the_lines_of_faults_that_are_not_tried(project, capsys):
    project(["to two", "to ten"], "--write")
    path = project.root / "docs" / "mutants.md"
    path.write_text(path.read_text(encoding="utf-8").replace("test_value`", "test_else`"), encoding="utf-8")
    project(["to ten", "to two", "to its sign"], "--only", "sign", "--write")
    rows = [row for row in path.read_text(encoding="utf-8").splitlines() if row.startswith("| to")]
    assert rows == [
        "| to ten | common/number.py | constant | `tests/test_length.py::test_length` |",
        "| to two | common/number.py | constant | `tests/test_value.py::test_else` |",
        "| to its sign | common/number.py | constant | plus one is one |",
    ]


def test_nothing_counts_where_the_code_has_moved_or_the_tests_fail_as_they_are(project, capsys):
    (project.root / "common" / "number.py").write_text(ONE.replace("return 1", "return 1 + 0"), encoding="utf-8")
    assert project(["to two", "to its sign"]) == 0
    (project.root / "common" / "number.py").write_text(ONE * 2, encoding="utf-8")
    assert project(["to two"]) == 1
    assert "'to two' no longer applies: its text occurs 2 times in common/number.py" in capsys.readouterr().out
    (project.root / "common" / "number.py").write_text(ONE, encoding="utf-8")
    (project.root / "tests" / "test_length.py").write_text(LENGTH.replace("== 1", "== 2"), encoding="utf-8")
    assert project(["to two"]) == 1
    assert "without a fault the tests fail: caught tests/test_length.py::test_length" in capsys.readouterr().out


def test_a_test_without_an_end_is_stopped(project, capsys):
    (project.root / "tests" / "test_value.py").write_text("def test_value():\n    while True: pass", encoding="utf-8")
    assert project(["to one"], "--limit", "3") == 1
    assert "no end: to one (common/number.py) after 3 s" in capsys.readouterr().out
