"""What a pool takes and what it saves: `python -m boundedkv size`."""

from __future__ import annotations

import argparse

import torch

from boundedkv.config import FLOAT_DTYPES, BoundedKVConfig, SinkWindow

_DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in FLOAT_DTYPES}
_NUMBERS = (
    ("layers", None, "attention layers"),
    ("heads", None, "key/value heads"),
    ("head-dim", None, "elements of one key or value vector"),
    ("sink", None, "entries kept from the start of a stream"),
    ("window", None, "entries kept before a step"),
    ("slots", 32, "requests at one time (%(default)s)"),
    ("rows", 1, "rows per request (%(default)s)"),
    ("source", 0, "longest source prefix (%(default)s)"),
    ("spare", 0, "spare ring entries (%(default)s)"),
    ("stream", 10_000, "length of the streams to compare a growing cache with (%(default)s)"),
)


def declare_size(parser: argparse.ArgumentParser) -> None:
    """The options of `size`."""
    parser.description = "The memory that a pool takes, beside what a growing cache would take for the same streams."
    for name, default, text in _NUMBERS:
        parser.add_argument(f"--{name}", type=int, default=default, required=default is None, help=text, metavar="N")
    parser.add_argument("--dtype", choices=_DTYPES, default="bfloat16", help="element type (%(default)s)")
    parser.set_defaults(run=run_size)


def run_size(options: argparse.Namespace) -> int:
    """Run `size`; 2 if the numbers make no pool."""
    try:
        config = BoundedKVConfig(
            num_layers=options.layers,
            num_heads=options.heads,
            head_dim=options.head_dim,
            retention=SinkWindow(options.sink, options.window),
            rows_per_request=options.rows,
            max_source_len=options.source,
            max_slots=options.slots,
            spare=options.spare,
            dtype=_DTYPES[options.dtype],
        )
        if options.stream < 0:
            raise ValueError(f"stream is {options.stream}, but should be an integer at least 0")
    except ValueError as error:
        print(error)
        return 2
    print(report(config, options.stream))
    return 0


def report(config: BoundedKVConfig, stream: int) -> str:
    """Say what a pool takes.

    Args:
        config: the pool.
        stream: length of the streams, in entries, that a growing cache would hold whole.

    Returns:
        A few lines of text.
    """
    entry = torch.Size((config.num_layers, config.rows_per_request, config.num_heads, 2, config.head_dim)).numel()
    growing = config.max_slots * stream * entry * config.dtype.itemsize
    pool = config.max_slots * config.slot_bytes
    lines = (
        ("a slot", f"{config.slot_tokens:,} entries a layer", config.slot_bytes),
        ("the pool", f"{config.max_slots:,} slots", pool),
        ("a growing cache", f"{config.max_slots:,} streams of {stream:,} entries", growing),
    )
    width = max(len(what) for _, what, _ in lines)
    return "\n".join(
        f"{name:<16} {what:<{width}} {size:>20,} bytes  {size / 2**30:10.3f} GiB" for name, what, size in lines
    )
