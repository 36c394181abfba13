"""How near attention comes to its exact result, measured, and the page that shows it: `docs/accuracy.md`.

Run it: `python tests/accuracy.py --help`.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch
from accuracy_measure import (
    ARITHMETICS,
    ELEMENT_TYPES,
    FAMILIES,
    SHAPES,
    USUAL,
    Error,
    Errors,
    Study,
    study,
    sweeps,
    times,
)

DOCS = Path(__file__).parents[1] / "docs"
PAGE, FIGURES = DOCS / "accuracy.md", DOCS / "figures"


# Tables, in Markdown.


def millionths(error: Error) -> str:
    def text(x: float) -> str:
        return f"{float(f'{x:.3g}'):.0f}" if x >= 100 else f"{x:#.3g}"

    return " / ".join(text(1e6 * x) for x in error)


def table(*lines: Iterable[str]) -> str:
    head, *rows = (f"| {' | '.join(line)} |\n" for line in lines)
    return head + "|---" * (head.count("|") - 1) + "|\n" + "".join(rows)


def error_row(family: str, errors: Errors) -> list[str]:
    return [family, *(millionths(error) for error in errors.values())]


def error_table(found: Study, element_type: str) -> str:
    rows = (error_row(family, found[element_type, family, USUAL]) for family in FAMILIES)
    return table(("input", *ARITHMETICS), *rows)


def factor_table(found: Study, element_type: str) -> str:
    """How many times nearer the default path is than TF32; bold where it is not nearer."""

    def cell(errors: Errors) -> str:
        factors = errors["default"].beside(errors["TF32"])
        return " / ".join(f"**{times(x)}**" if x <= 1 else times(x) for x in factors)

    rows = ((family, *(cell(found[element_type, family, shape]) for shape in SHAPES)) for family in FAMILIES)
    return table(("input", *SHAPES), *rows)


def behind_table(found: Study, mine: str, theirs: str, *beside: str) -> str:
    """The inputs for which `mine` is not the nearer one in each shape and measure, and the range of factors there."""

    def span(element_type: str, family: str, other: str) -> tuple[float, float]:
        cells = (found[element_type, family, shape] for shape in SHAPES)
        factors = [x for errors in cells for x in errors[mine].beside(errors[other])]
        return min(factors), max(factors)

    rows = [
        (family, element_type, *(" to ".join(map(times, span(element_type, family, x))) for x in (theirs, *beside)))
        for element_type in ELEMENT_TYPES
        for family in FAMILIES
        if span(element_type, family, theirs)[0] <= 1
    ]
    return table(("input", "held in", *(f"{other} / {mine}" for other in (theirs, *beside))), *rows)


def blocks(found: Study) -> dict[str, str]:
    """What stands between the page's markers, by name."""
    return {
        **{f"errors {name}": error_table(found, name) for name in ELEMENT_TYPES},
        **{f"factors {name}": factor_table(found, name) for name in ELEMENT_TYPES},
        "default behind": behind_table(found, "default", "TF32", "bfloat16"),
        "ieee behind": behind_table(found, "`ieee`", "SDPA float32"),
    }


def written(page: str, texts: Mapping[str, str]) -> str:
    """The page, each text put between its markers."""
    for name, text in texts.items():
        marked = re.compile(f"(<!-- {name}: .*? -->\n).*?(<!-- end -->)", flags=re.DOTALL)
        page, count = marked.subn(lambda match, text=text: f"{match[1]}\n{text}\n{match[2]}", page)
        if count != 1:
            raise ValueError(f"the page must have the marker '{name}: ..' once, but has it {count} times")
    return page


def main() -> None:
    """Measure, print the tables, and draw or write them if asked to."""
    parser = argparse.ArgumentParser(description="Measure errors against float64, print the tables: about two minutes.")
    asked = parser.add_mutually_exclusive_group()
    asked.add_argument("--figures", type=Path, metavar="FOLDER", help="draw the figures into this folder")
    asked.add_argument("--write", action="store_true", help="put the tables and the figures into docs/")
    options = parser.parse_args()
    torch.set_num_threads(1)
    found = study()
    for name, text in blocks(found).items():
        print(f"{name}\n\n{text}")
    folder = FIGURES if options.write else options.figures
    if folder is not None:
        from accuracy_figures import draw_all

        draw_all(found, sweeps(), folder)
    if options.write:
        page = PAGE.read_text(encoding="utf-8")
        PAGE.write_text(written(page, blocks(found)), encoding="utf-8")


if __name__ == "__main__":
    main()
