"""What the demo says: each function measures one thing and prints it."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from rich.console import Console

from boundedkv.config import BoundedKVConfig, SinkWindow
from boundedkv.demo import text
from boundedkv.demo.model import STREAM_LENGTH, CharModel
from boundedkv.demo.quality import bits_per_character, bounded, share_on_first
from boundedkv.demo.streaming import Record, Stream
from boundedkv.testing import Pair

MASK_TOLERANCE = 0.002
"""Bits per character by which plain PyTorch under the mask may differ from the managers: rounding, nothing else."""


def say_start(console: Console, model: CharModel, pair: Pair, streams: Sequence[Stream]) -> None:
    """Who reads what through which managers."""
    weights = sum(weight.numel() for weight in model.parameters())
    left, right = (f"{type(manager).__name__} on {manager.device.type}" for manager in (pair.left, pair.right))
    console.print(
        f"A character model of {weights:,} weights reads the docstrings of {len(streams)} modules it has never seen.\n"
        "They join and leave at different times, in chunks and letter by letter, in one ragged batch.\n"
        f"Every call goes to both managers: {left}, {right}."
    )
    if pair.right.device.type == "cpu":
        console.print("Without a GPU Triton's interpreter runs the kernels: about a minute on two free cores.")


def say_equal(console: Console, pair: Pair, record: Record) -> None:
    """What was compared."""
    steps, layers = len(record.turns), pair.left.config.num_layers
    console.print(f"{pair.calls:,} calls, all bits equal", style="bold green")
    console.print(
        f"  {steps} steps, {steps * layers} attends, {record.waits} admissions refused for want of a slot.\n"
        "  Outputs, plans and refusals were compared, and after every call every slot of every layer."
    )


def say_quality(console: Console, model: CharModel, kept: SinkWindow, streams: Sequence[Stream], quick: bool) -> bool:
    """Bits per character for three caches; False if the managers did something else than the mask that stands for them.

    Args:
        console: where to print.
        model: the model.
        kept: the demo's retention.
        streams: what went through the managers, to its end.
        quick: measure on little text.
    """
    texts = [text.streams(module, STREAM_LENGTH) for module in text.HELD_OUT]
    unseen = torch.cat([each[:1] for each in texts] if quick else texts)
    length, places = STREAM_LENGTH - 1, kept.sink + kept.window
    console.print(
        f"Bits per character, fewer is better, over {len(unseen) * length:,} unseen ones in streams of {length}\n"
        "  (plain PyTorch attention with the mask that each cache means):"
    )
    for name, attend in (
        (f"{kept.sink} sinks + window of {kept.window}", bounded(length, kept.sink, kept.window)),
        (f"window of {places} alone", bounded(length, 0, places)),
        ("growing cache", bounded(length, 0, length)),
    ):
        console.print(f"  {name:<28}{bits_per_character(model, unseen, attend):.3f}")
    share = share_on_first(model, unseen[:: len(unseen) // len(texts)], after=places)
    console.print(
        f"  On average {share:.0%} of a head's attention rests on a stream's first entry, which the window alone loses."
    )

    read = sum(each.written for each in streams)
    streamed = sum(each.nats for each in streams) / math.log(2) / read
    masked = sum(
        bits_per_character(model, each.symbols[None], bounded(each.written, kept.sink, kept.window))
        * each.written
        / read
        for each in streams
    )
    agreed = abs(streamed - masked) <= MASK_TOLERANCE
    console.print(
        f"  The {read:,} characters streamed above: {streamed:.4f} by the managers, {masked:.4f} by the mask."
    )
    if not agreed:
        console.print("The mask is not what the managers did", style="bold red")
    return agreed


def say_memory(console: Console, config: BoundedKVConfig, record: Record) -> None:
    """Bytes held against those of a growing cache."""
    entry = config.slot_bytes // config.slot_tokens
    console.print(
        f"Held: {config.max_slots * config.slot_bytes:,} bytes in {config.max_slots} slots, however long the streams. "
        f"A growing cache would have held {record.peak * entry:,}\n  in this run's fullest step, would hold "
        f"{config.max_slots * STREAM_LENGTH * entry:,} for {config.max_slots} streams of {STREAM_LENGTH}, and grow on."
    )
