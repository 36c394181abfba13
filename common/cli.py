"""The command line: `python -m boundedkv SUBCOMMAND`.

Each subcommand is a function that declares its options and one that runs it. What it needs is imported when it runs,
so that `--help` answers at once and one subcommand's extras are not asked for by another.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path

from boundedkv.sizing import declare_size

DEMO_NEEDS = frozenset({"matplotlib", "rich"})
PICTURES = (".svg", ".png", ".pdf")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a subcommand.

    Args:
        arguments: the words after the program's name; None takes them from the command line.

    Returns:
        The exit status.
    """
    parser = argparse.ArgumentParser(prog="python -m boundedkv", description="A bounded KV cache, seen at work.")
    subcommands = parser.add_subparsers(required=True, metavar="SUBCOMMAND")
    declare_demo(subcommands.add_parser("demo", help="read real text through both backends and compare every bit"))
    declare_check(subcommands.add_parser("check", help="hold a manager of your own to the reference"))
    declare_size(subcommands.add_parser("size", help="say what memory a pool takes"))
    options = parser.parse_args(arguments)
    run: Callable[[argparse.Namespace], int] = options.run
    return run(options)


def declare_check(parser: argparse.ArgumentParser) -> None:
    """The options of `check`."""
    parser.description = (
        "Drives the reference and a manager of your own with the same drawn streams and compares them after every "
        "call. Exit status 0 if it conforms, 1 if it does not, 2 for wrong usage."
    )
    parser.add_argument("factory", metavar="MODULE:FACTORY", help="called as factory(config, device, kv_dtype)")
    parser.add_argument("--numerics", choices=("bits", "close"), default="bits", help="how results are judged")
    parser.add_argument("--operands", metavar="TYPE", help="with close: what the kernel rounds its operands to")
    parser.add_argument("--features", metavar="A,B", help="what the manager supports; default: everything")
    parser.add_argument("--without", metavar="A,B", help="what it does not support")
    parser.add_argument(
        "--examples", type=int, metavar="N", help="drawn streams of a case; default: some 40,000 calls in all"
    )
    parser.add_argument("--device", default="cpu", help="where its managers live (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="which streams (%(default)s)")
    parser.add_argument("--first-only", action="store_true", help="stop after the first case that differs")
    parser.add_argument(
        "--json", type=_report, metavar="FILE", help="write the report there as JSON; - for standard output, alone"
    )
    parser.set_defaults(run=run_check)


def _report(word: str) -> str:
    """Where a report can be written, as far as one can tell before it is made."""
    if word != "-" and not Path(word).parent.is_dir():
        raise argparse.ArgumentTypeError(f"no folder {Path(word).parent}")
    return word


def run_check(options: argparse.Namespace) -> int:
    """Run `check`; 1 if the manager does not conform, 2 for wrong usage."""
    import torch

    from boundedkv.testing.command import run

    torch.set_num_threads(1)  # the tensors are tiny: more threads would only wait for one another
    return run(options)


def declare_demo(parser: argparse.ArgumentParser) -> None:
    """The options of `demo`."""
    parser.description = (
        "A small character model reads the standard library's docstrings through both backends at once. Exit status 0 "
        "only if every output, plan and slot had equal bits."
    )
    parser.add_argument("--out", type=_picture, default=Path("boundedkv-demo.svg"), help="the picture (%(default)s)")
    parser.add_argument("--quick", action="store_true", help="a few steps only, to see that it runs")
    parser.set_defaults(run=run_demo)


def _picture(word: str) -> Path:
    """Where a picture can be written, as far as one can tell before it is drawn."""
    file = Path(word)
    if file.suffix not in PICTURES:
        raise argparse.ArgumentTypeError(f"{word} should end in {', '.join(PICTURES)}")
    if not file.parent.is_dir():
        raise argparse.ArgumentTypeError(f"no folder {file.parent}")
    return file


def run_demo(options: argparse.Namespace) -> int:
    """Run `demo`; 2 if what it shows itself with is not installed."""
    import torch

    torch.set_num_threads(1)  # the tensors are tiny: more threads would only wait for one another
    try:
        from boundedkv.demo.main import demo
    except ModuleNotFoundError as error:
        missing = str(error.name).partition(".")[0]
        if missing not in DEMO_NEEDS:
            raise
        print(f"The demo needs {missing}, which comes with the extra 'demo': pip install 'boundedkv[demo]'")
        return 2
    return demo(options.out, options.quick)
