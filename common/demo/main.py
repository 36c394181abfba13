"""The demo from end to end: stream through both backends, compare, measure, draw, and say what came out."""

from __future__ import annotations

import traceback
import warnings
from collections.abc import Callable
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from boundedkv.backends import build
from boundedkv.config import BoundedKVConfig, SinkWindow
from boundedkv.demo import arrivals, report
from boundedkv.demo.model import HEAD_DIM, NUM_HEADS, NUM_LAYERS, NUM_QUERY_HEADS, CharModel, load_model
from boundedkv.demo.picture import draw
from boundedkv.demo.streaming import Record, Stream, open_stream, run
from boundedkv.testing import Difference, Pair

RETENTION = SinkWindow(sink=4, window=60)


def pool() -> BoundedKVConfig:
    """The demo's pool: a few slots of 64 entries."""
    return BoundedKVConfig(
        num_layers=NUM_LAYERS,
        num_heads=NUM_HEADS,
        num_query_heads=NUM_QUERY_HEADS,
        head_dim=HEAD_DIM,
        retention=RETENTION,
        query_window=RETENTION.window,
        max_slots=arrivals.MAX_SLOTS,
    )


def both_backends(config: BoundedKVConfig) -> Pair:
    """The reference on the CPU beside the fast backend on the GPU, or without one in Triton's interpreter."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    with warnings.catch_warnings(action="ignore", category=RuntimeWarning):  # of the interpreter, which the report says
        return Pair(build(config, "cpu", backend="reference"), build(config, device, backend="fast"))


def demo(out: Path, quick: bool = False, managers: Callable[[BoundedKVConfig], Pair] = both_backends) -> int:
    """Run the demo.

    Args:
        out: where the picture goes.
        quick: few steps and little text, for tests.
        managers: makes the two managers that are compared.

    Returns:
        The exit status: 0 if every bit was equal, 1 with the first difference said if not.
    """
    console = Console(highlight=False, markup=False, soft_wrap=True)
    config, model = pool(), load_model()
    pair = managers(config)
    streams = [open_stream(request) for request in arrivals.requests(quick)]
    report.say_start(console, model, pair, streams)
    try:
        record = serve(console, model, pair, streams)
    except Difference as difference:
        console.print("NOT EQUAL", style="bold red")
        console.print(*traceback.format_exception_only(difference), sep="")
        return 1
    report.say_equal(console, pair, record)
    agreed = report.say_quality(console, model, RETENTION, streams, quick)
    report.say_memory(console, config, record)
    draw(record.turns, config, out)
    console.print(f"Picture of the slots and the ring: {out}")
    return 0 if agreed else 1


def serve(console: Console, model: CharModel, pair: Pair, streams: list[Stream]) -> Record:
    """Serve the streams, with a bar that moves."""
    columns = (
        TextColumn("chunks"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[calls]} calls compared"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("", total=sum(len(each.request.chunks) for each in streams), calls=0)
        return run(model, pair, streams, lambda served, calls: progress.update(task, completed=served, calls=calls))
