"""`python -m boundedkv check`: the conformance suite at the command line."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from boundedkv.testing.conformance import EXAMPLES, check_manager
from boundedkv.testing.locate import factory_named, names_in, numerics_named
from boundedkv.testing.report import Report


def run(options: argparse.Namespace) -> int:
    """Run `check`.

    Args:
        options: see `boundedkv.cli.declare_check`.

    Returns:
        0 if the manager conforms, 1 if it does not, 2 for wrong usage.
    """
    try:
        report = check_manager(
            factory_named(options.factory),
            numerics_named(options.numerics, options.operands),
            names_in(options.features),
            without=names_in(options.without) or (),
            device=options.device,
            examples=EXAMPLES if options.examples is None else options.examples,
            seed=options.seed,
            first_only=options.first_only,
        )
    except (ValueError, ModuleNotFoundError) as error:
        sys.stderr.write(f"{error}\n")
        return 2
    if options.json == "-":
        sys.stdout.write(report.to_json() + "\n")
    else:
        show(report)
        if options.json is not None:
            Path(options.json).write_text(report.to_json() + "\n", encoding="utf-8")
    return 0 if report.conforms else 1


def show(report: Report) -> None:
    """Print a report: with rich where it is installed, plain elsewhere."""
    try:
        from rich.console import Console
        from rich.table import Table
    except ModuleNotFoundError:
        sys.stdout.write(f"{report}\n")
        return
    console = Console(highlight=False, soft_wrap=True)
    table = Table(box=None, pad_edge=False)
    for i, heading in enumerate(report.headings):
        table.add_column(heading, justify="left" if i < 2 else "right")
    for line in report.lines():
        table.add_row(*line, style=None if line[1] == "conforms" else "bold red")
    console.print(report.verdict, style="green" if report.conforms else "bold red")
    console.print()
    console.print(table)
    for part in report.remarks():
        console.print(f"\n{part}", markup=False)
