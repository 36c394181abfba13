"""One picture of a run: what a slot held as its stream went by, and who held the slots.

Both panels are drawn from the rows of the plans that the run made, not from what they should have been.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from numpy.typing import NDArray

from boundedkv.config import BoundedKVConfig
from boundedkv.demo.streaming import Turn

EMPTY = np.nan


def places(turns: Sequence[Turn], name: str, capacity: int) -> NDArray[np.float64]:
    """The stream position that each place of a request's slot held.

    Args:
        turns: the run's steps.
        name: the request.
        capacity: places of a slot.

    Returns:
        `[capacity, length + 1]`: column n is the slot when the stream is n entries long (inside a chunk: as the chunk
        found it); NaN where nothing was written yet.
    """
    held = np.full(capacity, EMPTY)
    columns = [held.copy()]
    for turn in turns:
        for row_name, (_, layout, _) in zip(turn.names, turn.rows, strict=True):
            if row_name != name:
                continue
            columns += [held.copy() for _ in range(layout.tokens - 1)]
            for token, start, length in layout.writes:
                held[start : start + length] = layout.length + token + np.arange(length)
            columns.append(held.copy())
    return np.stack(columns, axis=1)


def draw_slot(axes: Axes, turns: Sequence[Turn], name: str, config: BoundedKVConfig) -> None:
    """The places of one request's slot against the length of its stream."""
    held = places(turns, name, config.slot_tokens)
    last = held.shape[1] - 1
    image = axes.imshow(
        held,
        aspect="auto",
        origin="lower",
        interpolation="nearest",
        cmap="viridis",
        extent=(-0.5, last + 0.5, -0.5, config.slot_tokens - 0.5),
    )
    axes.axhline(config.sink_capacity - 0.5, color="white", linewidth=1.5)
    axes.set_title(f"One slot while '{name}' streamed through it", loc="left")
    axes.set_xlabel("entries the stream has written")
    axes.set_ylabel("place in the slot")
    for word, first, places_of_it in (
        ("sinks", 0, config.sink_capacity),
        ("ring", config.sink_capacity, config.ring_capacity),
    ):
        middle = (first + places_of_it / 2) / config.slot_tokens
        axes.text(1.01, middle, word, transform=axes.transAxes, va="center", fontsize=8)
    bar = axes.figure.colorbar(image, ax=axes, pad=0.07)
    bar.set_label("stream position held there")


def draw_holders(axes: Axes, turns: Sequence[Turn], config: BoundedKVConfig) -> None:
    """Which request held which slot, step by step."""
    held: dict[tuple[str, int], list[int]] = {}
    for step, turn in enumerate(turns):
        for name, (slot, _, _) in zip(turn.names, turn.rows, strict=True):
            held.setdefault((name, slot), []).append(step)
    for index, ((name, slot), steps) in enumerate(held.items()):
        axes.barh(slot, len(steps), left=steps[0] - 0.5, color=colormaps["Set2"](index), edgecolor="white")
        axes.text(steps[0] + len(steps) / 2, slot, name, ha="center", va="center", fontsize=8)
    axes.set_yticks(range(config.max_slots))
    axes.set_xlim(-0.5, len(turns) - 0.5)
    axes.set_title("Who held which slot: a request takes one when it first runs and keeps it", loc="left")
    axes.set_xlabel("step")
    axes.set_ylabel("slot")


def draw(turns: Sequence[Turn], config: BoundedKVConfig, file: Path) -> None:
    """Write the picture; its format follows the file's ending (.svg, .png, .pdf).

    Args:
        turns: the run's steps.
        config: the pool.
        file: where to write.
    """
    read: dict[str, int] = {}
    for turn in turns:
        for name, (_, layout, _) in zip(turn.names, turn.rows, strict=True):
            read[name] = layout.length + layout.tokens
    longest = max(read, key=lambda name: read[name])
    figure = Figure(figsize=(10, 8), layout="constrained")
    slot, holders = figure.subplots(2, 1, height_ratios=[3, 1])
    draw_slot(slot, turns, longest, config)
    draw_holders(holders, turns, config)
    figure.supxlabel(
        f"Drawn from the {len(turns)} plans of the run. The {config.sink_capacity} sinks are written once and stay. "
        f"The ring's {config.ring_capacity} places are overwritten in place, oldest first:\n"
        "each edge after the first is one more turn of it. White: nothing written yet. "
        "A slot is never larger than this, however long its stream.",
        fontsize=9,
    )
    figure.savefig(file)
