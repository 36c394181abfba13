"""Run the tests with other versions of Python, PyTorch, Triton and numpy: `python tests/matrix.py --help`.

Each Python with each PyTorch gets a virtual environment under build/matrix/, which stays; Triton and numpy are
exchanged in it. pip resolves from whatever index it is set up with. A row that cannot be installed has not passed.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
ENVIRONMENTS = Path("build", "matrix")
PAGE = Path("docs", "versions.md")

PASSED, FAILED, NOT_INSTALLABLE = "passed", "failed", "not installable here"
NOT_TRIED = "not tried"

# Each file meets the interpreter or what differs between PyTorch's versions; the golden traces hold every kind of bit.
QUICK = tuple(
    f"tests/test_{name}.py"
    for name in "house selftest golden graphs rounding order differential surroundings transfer session".split()
)


class Row(NamedTuple):
    """One set of versions, as pip takes them after `==`."""

    python: str
    torch: str
    triton: str
    numpy: str

    @property
    def title(self) -> str:
        """How the row is called: `--only` looks for a part of this."""
        return " ".join(f"{name} {version}" for name, version in self._asdict().items())


# PyTorch for GPUs asks for one Triton: 2.11 for 3.6, 2.13 for 3.7. Triton 3.6's interpreter needs numpy before 2.4.
ROWS = (
    Row("3.11", "2.13.0", "3.9.0", "2.4.*"),
    Row("3.11", "2.13.0", "3.8.0", "2.4.*"),
    Row("3.11", "2.13.0", "3.7.1", "2.4.*"),
    Row("3.11", "2.13.0", "3.6.0", "2.3.*"),
    Row("3.12", "2.11.0", "3.6.0", "2.3.*"),
    Row("3.13", "2.13.0", "3.7.1", "2.5.*"),
)


class Outcome(NamedTuple):
    """What came of a row, and in words why or how much."""

    verdict: str
    words: str


def run(*command: str, cwd: Path | None = None, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, cwd=cwd, env={**os.environ, **environment}, capture_output=True, text=True)


def python_of(version: str) -> str | None:
    """A Python of this version: the one that runs this, or one on the PATH."""
    for name in (sys.executable, f"python{version}"):
        try:
            done = run(name, "-c", "import sys; print('%d.%d' % sys.version_info[:2])")
        except FileNotFoundError:
            continue
        if done.stdout.strip() == version:
            return name
    return None


def install(python: str, *what: str) -> str:
    """Install with pip; why that failed, in pip's words, or empty."""
    done = run(python, "-m", "pip", "--disable-pip-version-check", "install", "--quiet", *what)
    if done.returncode == 0:
        return ""
    told = re.findall(r"^ERROR: (?!ResolutionImpossible)(.+)$", done.stderr, flags=re.MULTILINE)
    told = told or done.stderr.strip().splitlines()
    return told[-1] if told else f"pip ended with {done.returncode}"


def set_up(row: Row, root: Path) -> tuple[str, str]:
    """The row's environment, made or taken over: its Python, and why there is none, or empty."""
    folder = root / ENVIRONMENTS / f"python{row.python}-torch{row.torch}"
    python = str(folder / "bin" / "python")
    if not (folder / "installed").exists():
        made_by = python_of(row.python)
        if made_by is None:
            return "", f"there is no python{row.python}"
        done = run(made_by, "-m", "venv", "--clear", str(folder))
        if done.returncode:
            return "", (done.stderr or done.stdout).strip().splitlines()[-1]
        for what in ([f"torch=={row.torch}"], ["--editable", f"{root}[test]"]):
            if reason := install(python, *what):
                return "", reason
        (folder / "installed").touch()
    # A PyTorch for GPUs asks for a Triton of its own; pip warns of another and installs it.
    return python, install(python, f"triton=={row.triton}", f"numpy=={row.numpy}")


def ran(python: str, root: Path, tests: Sequence[str], workers: int = 0, path: str = "") -> Outcome:
    """Run tests with a Python; `path` is what it finds before what is installed, as in PYTHONPATH."""
    spread = ["-n", str(workers)] if workers else []
    command = [python, "-m", "pytest", "-q", "-p", "no:cacheprovider", *spread, *tests]
    done = run(*command, cwd=root, OMP_NUM_THREADS="1", PYTHONPATH=path)
    told = re.findall(r"^(?:FAILED|ERROR) (.+?)(?: - .*)?$", done.stdout, flags=re.MULTILINE)
    summary = re.findall(
        r"^(?:=+ )?(\d+ (?:passed|failed|skipped|error).*?)(?: in .*)?$", done.stdout, flags=re.MULTILINE
    )
    if done.returncode == 0:
        return Outcome(PASSED, summary[-1])
    ended = summary[-1] if summary else (done.stderr or done.stdout).strip()[-300:] or f"ended with {done.returncode}"
    return Outcome(FAILED, "; ".join([ended, *told]))


def judge(row: Row, root: Path, files: Sequence[str], workers: int) -> Outcome:
    """Install a row and run its tests."""
    python, reason = set_up(row, root)
    return Outcome(NOT_INSTALLABLE, reason) if reason else ran(python, root, files, workers)


INTRODUCTION = """# Versions

Which versions of Python, PyTorch, Triton and numpy the tests were run with, on a machine without a GPU: kernels run in
Triton's interpreter. `make matrix` runs every row; this page is written by `tests/matrix.py --write`.

The ranges that `pyproject.toml` states rest on these rows, not on every combination. A row that was not installable has
not passed. "suite" is every test, "quick" the files that `tests/matrix.py` names as such.

| Python | PyTorch | Triton | numpy | tests | came out |
|---|---|---|---|---|---|
"""

EXCEPTIONS = """
## Exceptions

- Triton 3.6 and numpy 2.4 or newer: the *interpreter* of that Triton does not work there, and the fast backend says so
  when a manager is built there. Compiled kernels do not go through numpy.
- PyTorch built for GPUs asks pip for one version of Triton: 2.11 for 3.6, 2.13 for 3.7. The rows that pair them
  otherwise exchange Triton afterwards, over pip's warning, or have a PyTorch built for CPUs, which asks for none.
"""


def line(row: Row, kind: str, outcome: Outcome) -> str:
    """A row's line of the page."""
    words = outcome.words.replace("|", "\\|").replace("\n", " ")
    return f"| {' | '.join(row)} | {kind} | {outcome.verdict}: {words} |"


def page(old: str, rows: Sequence[Row], kind: str, outcomes: dict[Row, Outcome]) -> str:
    """The page about all rows, from what it was before: those that were not tried this time keep their lines."""
    lines = {tuple(text.strip("| ").split(" | ")[:4]): text for text in old.splitlines() if text.startswith("| ")}
    lines |= {tuple(row): line(row, kind, outcome) for row, outcome in outcomes.items()}
    not_yet = Outcome(NOT_TRIED, "no run yet")
    return INTRODUCTION + "".join(f"{lines.get(tuple(row), line(row, '', not_yet))}\n" for row in rows) + EXCEPTIONS


def main(root: Path = ROOT, rows: Sequence[Row] = ROWS) -> int:
    """Try the chosen rows; 0 if all passed, 1 if one failed, 2 if one could not be installed and none failed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="run a few files of tests instead of all")
    parser.add_argument("--only", default="", metavar="TEXT", help="rows with this in their versions: 'triton 3.6'")
    parser.add_argument("-n", type=int, default=0, metavar="N", help="workers for the tests (default: none)")
    parser.add_argument("--write", action="store_true", help=f"write {PAGE}; rows that are not tried keep their lines")
    options = parser.parse_args()
    chosen = [row for row in rows if options.only in row.title]
    if not chosen:
        parser.error(f"no row has {options.only!r} in it: {'; '.join(row.title for row in rows)}")
    outcomes = {}
    for row in chosen:
        started = time.monotonic()
        outcomes[row] = judge(row, root, QUICK if options.quick else (), options.n)
        print(f"{row.title}: {outcomes[row].verdict} after {time.monotonic() - started:.0f} s", flush=True)
    if options.write:
        old = (root / PAGE).read_text(encoding="utf-8") if (root / PAGE).exists() else ""
        text = page(old, rows, "quick" if options.quick else "suite", outcomes)
        (root / PAGE).write_text(text, encoding="utf-8")
    print()
    for row, outcome in outcomes.items():
        print(f"{row.title:55} {outcome.verdict}: {outcome.words}")
    verdicts = {outcome.verdict for outcome in outcomes.values()}
    return 1 if FAILED in verdicts else 2 if NOT_INSTALLABLE in verdicts else 0


if __name__ == "__main__":
    sys.exit(main())
