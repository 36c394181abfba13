"""What docs/ shows is what the code does: every block runs or is compared, figures and tables are drawn anew."""

import doctest
import importlib
import json
import re
import tomllib
from collections import Counter
from pathlib import Path

import pytest
import torch
from pages import PAGES, ROOT, blocks, name_of, outside_blocks

from boundedkv.plan import COLUMNS

FOLDERS = {"common": "boundedkv", "reference": "boundedkv.reference"}
WITH_EXAMPLES = [
    ".".join((package, *path.relative_to(ROOT / folder).with_suffix("").parts))
    for folder, package in FOLDERS.items()
    for path in sorted((ROOT / folder).rglob("*.py"))
    if ">>> " in path.read_text(encoding="utf-8")
]
RUN = [page for page in PAGES if any(block.kind in ("python", "pycon") for block in blocks(page))]
# Kind of block -> what sees to it that it is right.
KINDS = {
    "python": "test_the_examples_of_a_page_run",
    "pycon": "test_the_examples_of_a_page_run",
    "sh": "tests/test_commands.py",
    "json": "test_data_on_a_page_is_well_formed",
    "toml": "test_data_on_a_page_is_well_formed",
    "source": "test_code_that_a_page_names_exists",
    "py": "tests/test_gallery.py",
    "text": "nothing: it is printed or drawn",
}


def run_example(block, namespace):
    """A `pycon` block as a doctest, in a namespace that it shares."""
    runner = doctest.DocTestRunner(verbose=False)
    test = doctest.DocTestParser().get_doctest(block.text, {}, block.page, block.page, block.line - 1)
    assert test.examples, f"{block.page}, line {block.line}: a pycon block without an example"
    test.globs = namespace
    told = []
    runner.run(test, out=told.append, clear_globs=False)
    assert runner.failures == 0, "".join(told)


@pytest.mark.parametrize("page", RUN, ids=name_of)
def test_the_examples_of_a_page_run(page, tmp_path, monkeypatch):
    """Its blocks one after another, as a reader would paste them, in an empty folder."""
    monkeypatch.chdir(tmp_path)
    namespace = {"__name__": "__main__"}
    torch.manual_seed(0)
    for block in blocks(page):
        if block.kind == "pycon":
            run_example(block, namespace)
        elif block.kind == "python":
            exec(compile("\n" * (block.line - 1) + block.text, str(page), "exec"), namespace)


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_blocks_are_of_a_known_kind(page):
    unknown = [(block.line, block.kind) for block in blocks(page) if block.kind not in KINDS]
    assert not unknown, f"(line, kind) {unknown}, but known are {', '.join(KINDS)}"
    if page.stem != "gallery":
        assert not [block.line for block in blocks(page) if block.kind == "py"]


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_code_stands_in_fences(page):
    """An indented block of code would escape every test here; lists, notes and definitions are indented too."""
    lines = outside_blocks(page).splitlines()
    indented = [
        number
        for number, (before, line) in enumerate(zip(["", *lines], lines, strict=False), start=1)
        if line.startswith("    ") and not before.strip() and opener(lines[: number - 1]) is None
    ]
    assert not indented


def opener(lines):
    """The line that an indented line below these belongs to: a list's, a note's, a definition's; None if to none."""
    for line in reversed(lines):
        if line.strip() and not line.startswith("    "):
            return line if re.match(r"( *[-*] | *\d+\. |!!! |\?\?\?|=== |: {3}|:::)", line) else None
    return None


def test_links_between_the_repositorys_own_files_lead_somewhere():
    """Those of docs/ are followed on the built site."""
    for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "tutorials/oracle/README.md"):
        links = re.findall(r"\]\((?!https:)([^)#]+)[^)]*\)", (ROOT / name).read_text(encoding="utf-8"))
        assert not [link for link in links if not (ROOT / name).parent.joinpath(link).exists()]


def test_data_on_a_page_is_well_formed():
    read = {"json": json.loads, "toml": tomllib.loads}
    found = [block for page in PAGES for block in blocks(page) if block.kind in read]
    for block in found:
        read[block.kind](block.text)
    assert found


def test_code_that_a_page_names_exists():
    from source_code import with_source

    shown = {name_of(page): with_source(page.read_text(encoding="utf-8"), name_of(page)) for page in PAGES}
    walk = shown["docs/reading-reference.md"]
    assert "def fold(left: Partial, right: Partial) -> Partial:" in walk
    assert not [name for name, text in shown.items() if "```source" in text]
    with pytest.raises(LookupError, match=r"a\.md: reference/attention\.py defines no unfold"):
        with_source("```source\nreference/attention.py: fold, unfold\n```\n", "a.md")
    with pytest.raises(LookupError, match=r"a\.md: no file 'reference/nothing\.py'"):
        with_source("```source\nreference/nothing.py\n```\n", "a.md")


def test_code_of_a_method_comes_with_its_decorators():
    from source_code import code

    assert code("common/manager.py", ["BoundedKVManager.free_slots"]).startswith("@property\ndef free_slots(self)")
    assert code("common/numerics.py", ["TILE", "SPLIT"]) == "TILE = 64\n\n\nSPLIT = TILE * TILES_PER_SPLIT"


@pytest.mark.parametrize("name", WITH_EXAMPLES)
def test_the_examples_of_a_docstring_run(name):
    found = doctest.testmod(importlib.import_module(name))
    assert found.attempted > 0
    assert found.failed == 0


def test_figures_are_what_the_code_draws():
    from figures import DRAWN, FIGURES

    for name, draw in DRAWN.items():
        drawn = draw().svg()
        assert (FIGURES / f"{name}.svg").read_text(encoding="utf-8") == drawn, (
            f"python docs/_scripts/figures.py: {name}"
        )


def test_every_figure_is_shown():
    shown = Counter(
        Path(name).name
        for page in PAGES
        for name in re.findall(r"^!\[[^\]]+\]\(([^)]+)\)$", outside_blocks(page), re.M)
    )
    assert set(shown) == {path.name for path in (ROOT / "docs" / "figures").iterdir()}


def test_the_plan_format_has_the_codes_columns():
    from tables import PAGE, columns, with_columns

    page = PAGE.read_text(encoding="utf-8")
    assert with_columns(page) == page, "python docs/_scripts/tables.py"
    assert re.findall(r"`(\w+)`(?=[^|]*\|[^|]*\|$)", columns(), flags=re.MULTILINE) == list(COLUMNS)


def test_numbers_on_the_numerics_page_are_the_codes():
    from boundedkv import NUMERICS_VERSION, numerics

    page = (ROOT / "docs" / "numerics.md").read_text(encoding="utf-8")
    assert f"Version {NUMERICS_VERSION} " in page
    assert f"position // {numerics.TILE}`" in page
    assert f"position // {numerics.SPLIT}`" in page
    assert f"at least {numerics.MIN_EXPONENT})" in page
    assert f"at least {numerics.MIN_IEEE_EXPONENT})" in page


def rows_of(name, first):
    """The rows of a page's tables that begin with a cell, each as a list of cells."""
    lines = (ROOT / "docs" / name).read_text(encoding="utf-8").splitlines()
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith(f"| {first} |")]


def test_errors_told_on_the_page_of_bits_are_those_measured():
    page = (ROOT / "docs" / "bits.md").read_text(encoding="utf-8")
    _, ieee, default, sdpa, tf32, bfloat16, _ = next(row for row in rows_of("accuracy.md", "Gaussian") if len(row) == 7)
    told = re.findall(r"^\| [^|]+ \| ([\d.]+) \|$", page, flags=re.MULTILINE)
    assert told == [cell.partition(" /")[0] for cell in (ieee, sdpa, default, tf32, bfloat16)]
    held_in_float32, held_in_bfloat16 = rows_of("accuracy.md", "queries, other keys x300")[:2]
    for _, _, default, _, tf32, *_ in (held_in_float32, held_in_bfloat16):
        for cell in (default, tf32):
            assert re.search(rf"\b{re.escape(cell.partition(' /')[0])}\b", page)


def test_errors_told_beside_the_tables_of_accuracy_stand_in_them():
    page = (ROOT / "docs" / "accuracy.md").read_text(encoding="utf-8")
    told = re.findall(r"([\d.]+\d)\s+against\s+([\d.]+\d)", page)
    rows = [re.findall(r"[\d.]+\d", line) for line in page.splitlines() if line.startswith("| ")]
    assert len(told) == 4
    assert not [pair for pair in told if not any(set(pair) <= set(row) for row in rows)]


def test_instructions_told_on_the_page_of_bits_are_those_compiled():
    page = (ROOT / "docs" / "bits.md").read_text(encoding="utf-8")
    sm_90 = next(row[4] for row in rows_of("assembly.md", "decode") if row[:3] == ["decode", "float32", "64"])
    told = int(re.search(r"issues about (\d+) instructions a key on sm_90", page)[1])
    assert abs(int(sm_90.rpartition("/ ")[2]) - told) <= 5


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


def test_the_api_pages_have_every_public_name():
    import boundedkv
    from boundedkv import testing

    pages = "\n".join(page.read_text(encoding="utf-8") for page in PAGES if page.parent.name == "api")
    named = set(re.findall(r"^::: [\w.]+\.(\w+)$", pages, flags=re.MULTILINE))
    named |= {name for listed in re.findall(r"members: \[(.*)\]", pages) for name in listed.split(", ")}
    whole = {"boundedkv.plan", "boundedkv.numerics"}  # shown with all that they define
    assert whole <= set(re.findall(r"^::: ([\w.]+)$", pages, flags=re.MULTILINE))
    for module in whole:  # what has a docstring is shown, and constants have theirs below them
        text = Path(importlib.import_module(module).__file__).read_text(encoding="utf-8")
        named |= set(re.findall(r"^(?:class|def) (\w+)", text, flags=re.MULTILINE))
        named |= set(re.findall(r'^([A-Z]\w*)(?:: \w+)? = (?:\((?:.*\n)*?\)|.*)\n"""', text, flags=re.MULTILINE))
    data = {"CASES", "FEATURES"}  # tables that the page on the oracle explains
    assert {*boundedkv.__all__, *testing.public.__all__} - named == data
