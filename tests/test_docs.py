"""What docs/ shows is what the code does: the examples run, the plan format's columns are the code's."""

import doctest
import importlib
import re
import subprocess
import sys
from pathlib import Path

import pytest

from boundedkv.plan import COLUMNS, ROW_INTS

ROOT = Path(__file__).parents[1]
PAGES = sorted((ROOT / "docs").rglob("*.md"))
FOLDERS = {"common": "boundedkv", "reference": "boundedkv.reference"}
WITH_EXAMPLES = [
    ".".join((package, *path.relative_to(ROOT / folder).with_suffix("").parts))
    for folder, package in FOLDERS.items()
    for path in sorted((ROOT / folder).rglob("*.py"))
    if ">>> " in path.read_text(encoding="utf-8")
]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_examples_of_a_page_run(page):
    assert doctest.testfile(str(page), module_relative=False).failed == 0


BLOCKS = [
    pytest.param(block, id=f"{page.stem}-{number}")
    for page in PAGES
    for number, block in enumerate(
        re.findall(r"^```python\n(.*?)^```$", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    )
]


@pytest.mark.parametrize("block", BLOCKS)
def test_a_block_of_a_page_runs(block, tmp_path):
    done = subprocess.run([sys.executable, "-c", block], cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("name", WITH_EXAMPLES)
def test_the_examples_of_a_docstring_run(name):
    found = doctest.testmod(importlib.import_module(name))
    assert found.attempted > 0
    assert found.failed == 0


def test_the_plan_format_names_every_column_in_order():
    page = (ROOT / "docs" / "plan-format.md").read_text(encoding="utf-8")
    lines = re.findall(r"^\| ([\d, ]+) \| (`.*?`) \|", page, flags=re.MULTILINE)
    numbers = [int(number) for numbers, _ in lines for number in numbers.split(",")]
    names = [name for _, names in lines for name in re.findall(r"`(\w+)`", names)]
    assert numbers == list(range(ROW_INTS))
    assert tuple(names) == COLUMNS


def test_numbers_on_the_numerics_page_are_the_codes():
    from boundedkv import NUMERICS_VERSION, numerics

    page = (ROOT / "docs" / "numerics.md").read_text(encoding="utf-8")
    assert f"Version {NUMERICS_VERSION} " in page
    assert f"position // {numerics.TILE}`" in page
    assert f"position // {numerics.SPLIT}`" in page
    assert f"at least {numerics.MIN_EXPONENT})" in page
    assert f"at least {numerics.MIN_IEEE_EXPONENT})" in page


def test_the_oracle_page_names_every_feature_in_order():
    from boundedkv.testing import FEATURES

    page = (ROOT / "docs" / "oracle.md").read_text(encoding="utf-8")
    assert re.findall(r"^\| `(\w+)` \|", page, flags=re.MULTILINE) == list(FEATURES)


def test_the_oracle_page_has_every_public_name():
    from boundedkv.testing import public

    listed = (ROOT / "docs" / "oracle.md").read_text(encoding="utf-8").partition("## All names\n")[2]
    named = [line.partition(": ")[0] for line in listed.splitlines()]
    assert sorted(re.findall(r"`(\w+)`", " ".join(named))) == sorted(public.__all__)


def test_numbers_on_the_oracle_page_are_the_codes():
    from boundedkv.testing import closeness

    page = (ROOT / "docs" / "oracle.md").read_text(encoding="utf-8")
    assert f"The limit is\n{closeness.FACTOR:g} times the largest of" in page
    assert "- 2^-20, which is what" in page
    assert closeness.LEAST == 2.0**-20
