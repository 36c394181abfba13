"""What the pages of the documentation hold: their fenced blocks, where they stand, and what kind each is of."""

import re
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
PAGES = [*sorted((ROOT / "docs").rglob("*.md")), ROOT / "README.md", ROOT / "CONTRIBUTING.md"]
FENCE = re.compile(r"^(?P<indent> *)```(?P<kind>\S*)[^\n]*\n(?P<text>.*?)^(?P=indent)```$", re.MULTILINE | re.DOTALL)


class Block(NamedTuple):
    """A fenced block of a page: the word behind its fence, its text, and the line where that begins."""

    page: str
    kind: str
    text: str
    line: int


def name_of(page):
    return page.relative_to(ROOT).as_posix()


def blocks(page):
    """The blocks of a page, in order."""
    markdown = page.read_text(encoding="utf-8")
    for found in FENCE.finditer(markdown):
        indent, text = found["indent"], found["text"]
        if indent:
            text = re.sub(f"^{indent}", "", text, flags=re.MULTILINE)
        yield Block(name_of(page), found["kind"], text, markdown.count("\n", 0, found.start("text")) + 1)


def outside_blocks(page):
    """The page without its blocks, their lines left empty."""
    return FENCE.sub(lambda found: "\n" * found[0].count("\n"), page.read_text(encoding="utf-8"))
