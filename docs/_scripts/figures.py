"""Draws the figures of the concepts from what the reference does: `python docs/_scripts/figures.py`.

Nothing in them is placed by hand: which entries are kept comes out of a plan, what a slot holds out of its memory, who
is seen out of a call of `attend`. A test draws them again and compares.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import torch
from drawing import CELL, Drawing
from stream import Stream, kinds

from boundedkv import (
    BoundedKVConfig,
    BoundedKVStep,
    Segment,
    Session,
    SinkWindow,
    StepContext,
    StreamPosition,
    build,
)
from boundedkv.numerics import LOW_BITS, RIGHT_BITS, RIGHT_LOW_BITS, SPLIT, TILE
from boundedkv.plan import (
    ALL_TOKENS,
    LENGTH,
    RING,
    RING_WRAPPED,
    SINK_SLOT,
    SINK_SOURCE,
    SLOT,
    TOKENS,
    WINDOW_SOURCE,
    Read,
    Write,
)
from boundedkv.reference.arithmetic import fix_left, fix_right

FIGURES = Path(__file__).parents[1] / "figures"
LEFT = 110  # where strips begin; their labels stand before
NEAR = 54  # where labels are short


def run(part: Read | Write) -> range:
    """The entries of a read or a write."""
    return range(part.start, part.start + part.length)


def slot_of_stream() -> Drawing:
    """One stream, and the slot that holds what is kept of it."""
    stream = Stream(sink=4, window=6)
    for span in (5, 7, 5):
        stream.step(span)
    kept, held = kinds(stream.next_layout()), stream.slot()
    drawing = Drawing("A stream of 17 entries and the slot of 10 that holds its sinks and its window")
    drawing.text(NEAR - 12, CELL / 2 + 28, "stream", anchor="end")
    for s in range(stream.session.written("a")):
        drawing.cell(NEAR + s * CELL, 24, s, kept.get(s))
    drawing.legend(NEAR, 12, {"sink": "sink", "window": "window", "not kept": None})
    below, left = 130, NEAR + 3 * CELL
    drawing.text(left - 12, below + CELL / 2 + 4, "slot", anchor="end")
    for entry, s in enumerate(held):
        x = left + entry * CELL + (10 if entry >= stream.config.sink_capacity else 0)
        drawing.cell(x, below, s, kept[s])
        drawing.line([(NEAR + s * CELL + CELL / 2, 24 + CELL), (x + CELL / 2, below)], kept[s])
    drawing.text(left + 2 * CELL, below + CELL + 16, "sinks: never overwritten", anchor="middle")
    drawing.text(left + 4 * CELL + 10, below + CELL + 32, "ring: the newest entry takes the oldest one's place")
    return drawing


def retained() -> Drawing:
    """Which stream positions are kept as the stream grows."""
    stream = Stream(sink=2, window=4)
    drawing = Drawing("Which stream positions a stream with sink=2 and window=4 keeps at six lengths")
    drawing.legend(LEFT, 12, {"sink": "sink", "window": "window", "not kept": None})
    for row, span in enumerate((1, 2, 3, 1, 2, 5)):
        stream.step(span)
        y = 24 + row * (CELL + 6)
        drawing.text(LEFT - 12, y + CELL / 2 + 4, f"length {stream.session.written('a')}", anchor="end")
        kept = kinds(stream.next_layout())
        for s in range(stream.session.written("a")):
            drawing.cell(LEFT + s * CELL, y, s, kept.get(s))
    return drawing


def ring() -> Drawing:
    """What the slot holds after each step."""
    stream = Stream(sink=2, window=4)
    drawing = Drawing(
        "The contents of a slot with 2 sink entries and a ring of 4 after steps of 1, 3, 2, 3 and 6 tokens"
    )
    drawing.legend(LEFT, 12, {"written by this step": "own", "sink": "sink", "ring": "window", "empty": None})
    for row, span in enumerate((1, 3, 2, 3, 6)):
        stream.step(span)
        y = 24 + row * (CELL + 6)
        length = stream.session.written("a")
        drawing.text(LEFT - 12, y + CELL / 2 + 4, f"span {span}: length {length}", anchor="end")
        written = {entry for write in stream.layout().writes for entry in run(write)}
        held = {entry for read in stream.next_layout().reads[SINK_SLOT:] for entry in run(read)}
        for entry, s in enumerate(stream.slot()):
            kind = "own" if entry in written else ("sink" if entry < 2 else "window") if entry in held else None
            x = LEFT + entry * CELL + (10 if entry >= 2 else 0)
            drawing.cell(x, y, s if kind else "", kind)
    return drawing


def visible(query_window: int | None) -> Drawing:
    """Who sees whom in a step of five tokens."""
    config = {} if query_window is None else {"query_window": query_window}
    stream = Stream(sink=2, window=4, **config)
    for _ in range(9):
        stream.step(1)
    rule = "every query sees what is retained and all of the step" if query_window is None else "causal, by distance"
    seen = stream.step(5)
    length = stream.session.written("a")
    drawing = Drawing(f"Which keys the five queries of a step at length 9 see: {rule}")
    drawing.legend(LEFT, 12, {"sink": "sink", "window": "window", "own token": "own", "not seen": None})
    drawing.text(LEFT, 32, "keys, by stream position")
    for t in range(len(seen)):
        y = 40 + t * CELL
        drawing.text(LEFT - 12, y + CELL / 2 + 4, f"query at {length - len(seen) + t}", anchor="end")
        for s in range(length):
            kind = "sink" if s < 2 else "own" if s >= length - len(seen) else "window"
            drawing.cell(LEFT + s * CELL, y, s if seen[t, s] else "", kind if seen[t, s] else None)
    return drawing


def sources() -> Drawing:
    """Where each retained entry of a stream with a source prefix is read."""
    retention = SinkWindow(sink=2, window=6)
    manager = build(BoundedKVConfig(1, 1, 8, retention, max_source_len=5, max_slots=1), backend="reference")
    session = Session(manager)
    with session.step({"a": 4}, source_len={"a": 5}):
        pass
    with session.step({"a": 0}) as step:
        layout = step.plan.rows[0][1]
    kept = kinds(layout)
    reads = layout.reads
    in_source = {s for part in (SINK_SOURCE, WINDOW_SOURCE) for s in run(reads[part])}
    drawing = Drawing("A stream with a source prefix of 5 entries and 4 written tokens, and where its entries are read")
    drawing.legend(NEAR, 12, {"read in the source": "source", "sink": "sink", "window": "window", "not kept": None})
    source_y, stream_y, slot_y = 24, 104, 184
    for label, y in (("source", source_y), ("stream", stream_y), ("slot", slot_y)):
        drawing.text(NEAR - 12, y + CELL / 2 + 4, label, anchor="end")
    for s in range(5):
        drawing.cell(NEAR + s * CELL, source_y, s, "source" if s in in_source else None)
    for s in range(layout.length):
        drawing.cell(NEAR + s * CELL, stream_y, s, kept.get(s))
    for s in sorted(in_source):
        x = NEAR + s * CELL + CELL / 2
        drawing.line([(x, source_y + CELL), (x, stream_y)], "source")
    entries = [entry for part in (SINK_SLOT, RING, RING_WRAPPED) for entry in run(reads[part])]
    holds = dict(zip(entries, sorted(set(kept) - in_source), strict=True))
    left = NEAR + 3 * CELL
    for entry in range(manager.config.slot_tokens):
        if entry not in holds:
            drawing.cell(left + entry * CELL, slot_y)
            continue
        s = holds[entry]
        drawing.cell(left + entry * CELL, slot_y, s, kept[s])
        ends = NEAR + s * CELL + CELL / 2, left + entry * CELL + CELL / 2
        drawing.line([(ends[0], stream_y + CELL), (ends[1], slot_y)], kept[s])
    return drawing


def rows() -> Drawing:
    """A batch with two rows a request and a padding row: q, the plan's lines, the slots."""
    config = BoundedKVConfig(1, 1, 8, SinkWindow(2, 4), rows_per_request=2, max_slots=4)
    manager = build(config, backend="reference")
    session = Session(manager)
    for spans in ({"x": 1}, {"a": 5}, {"b": 3}):
        with session.step(spans):
            pass
    session.remove("x")
    step = BoundedKVStep(
        (Segment("b", 2), Segment("a", 1)),
        {"a": StreamPosition(0, 5), "b": StreamPosition(0, 3)},
        tokens={"a": 1},
    )
    context = StepContext(("b", "a"), padded_request_ids=("b", "a", "pad"))
    manager.admit(step, context)
    plan = manager.plan(step, context)
    drawing = Drawing("Six rows of q, the three lines of their plan, and the slots that these name")
    names = [(rid, row) for rid in context.row_ids for row in range(2)]
    kinds_of = {"b": "window", "a": "own", "pad": None}
    line_x, slot_x, cell_width, step_y = 190, 430, 62, 2 * CELL + 16
    drawing.text(20, 14, "rows of q, k, v")
    drawing.text(line_x, 14, "lines of the plan")
    drawing.text(slot_x, 14, "slots")
    for i, (rid, row) in enumerate(names):
        y = 44 + (i // 2) * step_y + (i % 2) * CELL
        drawing.cell(20, y, f"{rid}, row {row}", kinds_of[rid], width=96)
    for x, name in enumerate(("slot", "tokens", "length")):
        drawing.text(line_x + x * cell_width + cell_width / 2, 34, name, anchor="middle")
    slot_y = [44 + slot * (CELL + 18) for slot in range(config.max_slots)]
    for b, rid in enumerate(context.row_ids):
        y = 44 + b * step_y + CELL / 2
        drawing.line([(116, y + CELL / 2), (line_x, y + CELL / 2)], kinds_of[rid] or "plain")
        line = plan.table[b].tolist()
        for x, column in enumerate((SLOT, TOKENS, LENGTH)):
            shown = "all" if line[column] == ALL_TOKENS else line[column]
            drawing.cell(line_x + x * cell_width, y, shown, kinds_of[rid], width=cell_width)
        if kinds_of[rid]:
            drawing.line(
                [(line_x + 3 * cell_width, y + CELL / 2), (slot_x, slot_y[line[SLOT]] + CELL / 2)], kinds_of[rid]
            )
    owners = {plan.rows[b][0]: rid for b, rid in enumerate(context.request_ids)}
    for slot, y in enumerate(slot_y):
        rid = owners.get(slot)
        drawing.cell(slot_x, y, f"slot {slot}: {rid or 'free'}", rid and kinds_of[rid], width=96)
    return drawing


def tiles() -> Drawing:
    """Which tiles and splits the keys of one query fall into."""
    stream = Stream(sink=4, window=200, head_dim=1)
    with stream.session.step({"a": 700}):
        pass
    kept = kinds(stream.next_layout())
    counts = {tile: [s for s in kept if s // TILE == tile] for tile in range(700 // TILE + 1)}
    drawing = Drawing("The 204 keys of a stream of 700 entries by tile of 64 and split of 512 stream positions")
    drawing.legend(20, 12, {"tile with sinks": "sink", "tile with window entries": "window", "no key: skipped": None})
    width = 52
    for tile, keys in counts.items():
        x = 20 + tile * width + 14 * (tile * TILE // SPLIT)
        drawing.cell(x, 48, len(keys) or "", kept[keys[0]] if keys else None, width=width)
        drawing.text(x + 2, 42, tile * TILE, size=9)
    ends = []
    for split in range(700 // SPLIT + 1):
        mine = [tile for tile, keys in counts.items() if keys and tile * TILE // SPLIT == split]
        centres = [20 + tile * width + 14 * split + width / 2 for tile in mine]
        for left, right in pairwise(centres):
            drawing.line([(left, 48 + CELL), (left, 94), (right, 94)])
        drawing.line([(centres[-1], 48 + CELL), (centres[-1], 120)])
        drawing.text(centres[-1] - 8, 134, f"split {split}: tiles " + ", ".join(map(str, mine)), anchor="middle")
        ends.append(centres[-1])
    drawing.line([(ends[0], 140), (ends[0], 158), (ends[-1], 158), (ends[-1], 140)])
    drawing.text(ends[-1], 174, "splits fold left to right: the result", anchor="end")
    return drawing


def parts() -> Drawing:
    """Two numbers in fixed point, cut into parts."""
    left, right = torch.tensor(11_259_375.0), torch.tensor(1_193_046.0)
    drawing = Drawing("A number of 24 bits cut into three parts and one of 21 bits cut into two")
    y = 24
    left_sizes = {"high": LOW_BITS, "mid": LOW_BITS, "low": LOW_BITS}
    right_sizes = {"high": RIGHT_BITS - RIGHT_LOW_BITS, "low": RIGHT_LOW_BITS}
    for name, number, values, sizes in (
        ("left: query, weight", left, fix_left(left), left_sizes),
        ("right: key, value", right, fix_right(right), right_sizes),
    ):
        x, low = 0.0, sum(sizes.values())
        drawing.text(0, y - 8, f"{name}: {int(number)}, {low} bits")
        for (label, size), value in zip(sizes.items(), values, strict=True):
            low -= size
            kind = {"high": "sink", "mid": "window", "low": "own"}[label]
            drawing.cell(x, y, f"{label} = {int(value)}", kind, width=size * 18)
            drawing.text(x + size * 9, y + CELL + 14, f"times 2^{low}" if low else "times 1", anchor="middle", size=10)
            x += size * 18
        y += CELL + 54
    return drawing


def growth() -> Drawing:
    """Bytes of one request: a cache that grows, and a slot."""
    config = BoundedKVConfig(32, 8, 128, SinkWindow(4, 4096), dtype=torch.bfloat16)
    entry = config.slot_bytes / config.slot_tokens
    drawing = Drawing("Memory of one request against the length of its stream: a growing cache and a slot")
    left, top, width, height, longest = 70, 30, 460, 200, 65536
    most = entry * longest

    def at(tokens: float, size: float) -> tuple[float, float]:
        return left + width * tokens / longest, top + height * (1 - size / most)

    drawing.line([(left, top), (left, top + height), (left + width, top + height)])
    for tokens in range(0, longest + 1, 16384):
        drawing.text(at(tokens, 0)[0], top + height + 16, f"{tokens:,}", anchor="middle")
    for size in range(0, int(most) + 1, 2**31):
        drawing.text(left - 8, at(0, size)[1] + 4, f"{size >> 30} GiB", anchor="end")
    drawing.text(left + width, top + height + 34, "entries of the stream", anchor="end")
    drawing.line([at(0, 0), at(longest, most)], "sink", width=2)
    drawing.line([at(0, config.slot_bytes), at(longest, config.slot_bytes)], "window", width=2)
    drawing.text(*at(40000, 0.72 * most), "a cache that grows", anchor="end", color="#c2571a")
    x, y = at(longest, config.slot_bytes)
    drawing.text(x, y - 8, f"a slot: {config.slot_bytes / 2**20:.1f} MiB", anchor="end", color="#3b6fd4")
    return drawing


DRAWN: dict[str, Callable[[], Drawing]] = {
    "slot": slot_of_stream,
    "retained": retained,
    "ring": ring,
    "visible-step": lambda: visible(None),
    "visible-window": lambda: visible(4),
    "sources": sources,
    "rows": rows,
    "tiles": tiles,
    "parts": parts,
    "growth": growth,
}


def main() -> None:
    """Write every figure."""
    for name, draw in DRAWN.items():
        (FIGURES / f"{name}.svg").write_text(draw().svg(), encoding="utf-8")


if __name__ == "__main__":
    main()
