"""Plant small faults in copies of the code, one at a time, and see which tests notice: `tests/mutants.py --help`.

The faults are listed in tests/faults/, with the tests that are tried first. A fault survives only if the whole suite
passes with it; then it needs a test, or a reason why it changes nothing.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
FAULTS = Path("tests", "faults")
PAGE = Path("docs", "mutants.md")
# The first asks whether the faults still apply to the code, so it would notice every one of them; the others are long,
# and look at other versions and at a benchmark.
NOT_TRIED = ("tests/test_mutants.py", "tests/test_matrix.py", "tests/test_gpu.py")
UNCOPIED = (".*", "build", "dist", "venv", "*.egg-info", "__pycache__", "site", "out")

CAUGHT, SURVIVED, EQUIVALENT = "caught", "survived", "equivalent"
NOT_EQUIVALENT = "not equivalent"  # said to be, and a test notices it
BROKEN = "broken"  # the tests do not even start: a fault that shows nothing
ENDLESS = "no end"  # stopped at the time limit


class Edit(NamedTuple):
    """A text that occurs once in a file, and what stands there instead."""

    file: str
    old: str
    new: str


class Fault(NamedTuple):
    """What is wrong, and who should notice: files or tests of tests/, in the order to try."""

    name: str
    kind: str
    edits: tuple[Edit, ...]
    tests: tuple[str, ...]
    equivalent: str = ""

    @property
    def files(self) -> str:
        return ", ".join(dict.fromkeys(edit.file for edit in self.edits))


class Verdict(NamedTuple):
    """What came of a fault, and the test that says so."""

    outcome: str
    by: str = ""


def load(root: Path) -> list[Fault]:
    """Every fault of the list, in order."""
    faults = []
    for path in sorted((root / FAULTS).glob("*.toml")):
        for entry in tomllib.loads(path.read_text(encoding="utf-8"))["fault"]:
            edits = tuple(
                Edit(**edit) for edit in ({name: entry.pop(name) for name in Edit._fields}, *entry.pop("also", ()))
            )
            tests = tuple(f"tests/{name}" for name in entry.pop("tests"))
            faults.append(Fault(edits=edits, tests=tests, **entry))
    return faults


def stale(root: Path, fault: Fault) -> str:
    """Why a fault cannot be planted; empty if it can."""
    for file, old, _ in fault.edits:
        times = (root / file).read_text(encoding="utf-8").count(old)
        if times != 1:
            return f"{fault.name!r} no longer applies: its text occurs {times} times in {file}, but should once"
    return ""


@contextmanager
def copied(root: Path) -> Iterator[Path]:
    """A copy of the tree with its package laid out, as long as the context lasts."""
    with tempfile.TemporaryDirectory(prefix="mutant-") as folder:
        copy = Path(folder).resolve() / "copy"
        shutil.copytree(root, copy, ignore=shutil.ignore_patterns(*UNCOPIED))
        subprocess.run(["make", "--silent", "tree"], cwd=copy, check=True)
        yield copy


def plant(copy: Path, fault: Fault) -> None:
    for file, old, new in fault.edits:
        path = copy / file
        path.write_text(path.read_text(encoding="utf-8").replace(old, new), encoding="utf-8")


def python(copy: Path, limit: float | None, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run Python in a copy, with the copy's package."""
    environment = {**os.environ, "PYTHONPATH": str(copy / "build" / "tree"), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, *arguments]
    return subprocess.run(command, cwd=copy, env=environment, capture_output=True, text=True, timeout=limit)


def first_failure(copy: Path, tests: Sequence[str], limit: float) -> Verdict:
    """Run tests until one fails."""
    try:
        done = python(copy, limit, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *tests)
    except subprocess.TimeoutExpired:
        return Verdict(ENDLESS, f"after {limit:.0f} s")
    told = re.search(r"^(?:FAILED|ERROR) (.+?)(?: - .*)?$", done.stdout, flags=re.MULTILINE)
    crashed = re.search(r"(tests/\w+\.py)\", line \d+ in (test_\w+)", done.stderr)
    if done.returncode == 0:
        return Verdict(SURVIVED)
    if done.returncode == 1 and told:
        return Verdict(CAUGHT, told[1])
    if done.returncode < 0 and crashed:  # on the CPU an address that is nobody's ends the process
        return Verdict(CAUGHT, f"{crashed[1]}::{crashed[2]}")
    return Verdict(BROKEN, told[1] if told else (done.stderr or done.stdout).strip()[-300:])


def judge(fault: Fault, root: Path, limit: float) -> Verdict:
    """Plant a fault and try its tests; where they pass, all others."""
    with copied(root) as copy:
        plant(copy, fault)
        verdict = first_failure(copy, fault.tests, limit)
        if fault.equivalent:
            return Verdict(NOT_EQUIVALENT, verdict.by) if verdict.outcome != SURVIVED else Verdict(EQUIVALENT)
        if verdict.outcome != SURVIVED:
            return verdict
        tried = [f"--deselect={test}" if "::" in test else f"--ignore={test}" for test in (*fault.tests, *NOT_TRIED)]
        return first_failure(copy, ["tests", *tried], limit)


def baseline(faults: Sequence[Fault], root: Path, limit: float) -> str:
    """What is wrong without a fault: then nothing that a test says of a fault counts. Empty if nothing is."""
    with copied(root) as copy:
        where = python(copy, limit, "-c", "import boundedkv; print(boundedkv.__file__)").stdout.strip()
        if not Path(where).is_relative_to(copy):
            return f"the tests would import {where or 'nothing'} instead of the copy in {copy}"
        verdict = first_failure(copy, list(dict.fromkeys(test for fault in faults for test in fault.tests)), limit)
        return "" if verdict.outcome == SURVIVED else f"without a fault the tests fail: {verdict.outcome} {verdict.by}"


def judged(fault: Fault, root: Path, limit: float) -> tuple[Fault, Verdict]:
    started = time.monotonic()
    verdict = judge(fault, root, limit)
    took = time.monotonic() - started
    print(f"{verdict.outcome:14} {fault.name:70} {took:5.0f} s  {verdict.by or fault.equivalent}", flush=True)
    return fault, verdict


INTRODUCTION = """# Planted faults

A suite that passes shows little until it has been seen to fail. `make mutants` plants each of these faults in a copy of
the code, one at a time, and runs tests until one fails: first those that should notice, then all others. It takes
half an hour or more, so it is no part of `make test`. The faults are listed in `tests/faults/`; this page is written by
`tests/mutants.py --write`.

A fault in one backend alone shows in any comparison with the other that reaches it. One in both at once, or in what
they share, does not: a definition, a bound or a result known by hand has to tell. Faults of the kind "fusion" show in
what the compilers make of the kernels, and most of them nowhere else on a machine without a GPU.
"""


def line(fault: Fault, verdict: Verdict) -> str:
    """A fault's line of the page. Without the test's parameters: they are for who runs it."""
    test = verdict.by.partition("[")[0]
    found = fault.equivalent or (f"`{test}`" if verdict.outcome == CAUGHT else f"{verdict.outcome} {test}")
    return f"| {fault.name} | {fault.files} | {fault.kind} | {found} |"


def page(old: str, faults: Sequence[Fault], verdicts: dict[Fault, Verdict]) -> str:
    """The page about all faults, from what it was before: those that were not tried this time keep their lines.

    Raises:
        KeyError: one was never tried.
    """
    lines = {row.split(" | ")[0].removeprefix("| "): row for row in old.splitlines() if row.startswith("| ")}
    lines |= {fault.name: line(fault, verdict) for fault, verdict in verdicts.items()}
    text = INTRODUCTION
    for title, last, equivalent in (("Faults", "caught by", False), ("Changes that change nothing", "why", True)):
        rows = [lines[fault.name] for fault in faults if bool(fault.equivalent) == equivalent]
        head = f"| {'change' if equivalent else 'fault'} | in | kind | {last} |\n|---|---|---|---|"
        text += "\n".join([f"\n## {title}\n", head, *rows, ""])
    return text


def main(root: Path = ROOT) -> int:
    """Try the chosen faults; 0 if each is caught or changes nothing."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", metavar="TEXT", help="faults with this in their name, kind or files")
    parser.add_argument("--jobs", type=int, default=1, help="how many at a time (default: 1)")
    parser.add_argument(
        "--limit", type=float, default=3600, metavar="S", help="seconds for one run of tests (default: 3600)"
    )
    parser.add_argument(
        "--write", action="store_true", help=f"write {PAGE}; faults that are not tried keep their lines"
    )
    options = parser.parse_args()
    faults = load(root)
    chosen = [fault for fault in faults if options.only in f"{fault.name} {fault.kind} {fault.files}"]
    problems = list(filter(None, (stale(root, fault) for fault in chosen)))
    if not problems and chosen:
        print(f"{len(chosen)} faults; first their tests without any", flush=True)
        problems = list(filter(None, [baseline(chosen, root, options.limit)]))
    if problems or not chosen:
        print(*(problems or [f"no fault has {options.only!r} in it"]), sep="\n")
        return 1
    with ThreadPoolExecutor(options.jobs) as pool:
        verdicts = dict(pool.map(partial(judged, root=root, limit=options.limit), chosen))
    if options.write:
        old = (root / PAGE).read_text(encoding="utf-8") if (root / PAGE).exists() else ""
        (root / PAGE).write_text(page(old, faults, verdicts), encoding="utf-8")
    counts = Counter(verdict.outcome for verdict in verdicts.values())
    print(", ".join(f"{count} {outcome}" for outcome, count in counts.most_common()))
    for fault, verdict in verdicts.items():
        if verdict.outcome not in (CAUGHT, EQUIVALENT):
            print(f"  {verdict.outcome}: {fault.name} ({fault.files}) {verdict.by}")
    return 0 if counts.keys() <= {CAUGHT, EQUIVALENT} else 1


if __name__ == "__main__":
    sys.exit(main())
