"""Retention by its definition: list the stream positions that are kept, then write them down as runs.

A stream position s is kept when it is a sink, `s < sink`, or in the window, the last `window` entries. Kept entries lie

    in the source          at s                                   if s < source_len
    in the slot's sinks    at s - source_len                      if s < sink
    in the slot's ring     at sink_capacity + (s - sink) mod ring  otherwise, with ring = window + spare
"""

from __future__ import annotations

from collections.abc import Iterable

from boundedkv.config import BoundedKVConfig
from boundedkv.plan import ALL_TOKENS, NO_READ, NO_WRITE, Read, RowLayout, Write
from boundedkv.step import StreamPosition


def place(config: BoundedKVConfig, source_len: int, s: int) -> int:
    """Where a written entry at stream position s lies in its slot."""
    kept = config.retentions[source_len]
    if s < kept.sink:
        return s - source_len
    return config.sink_capacity + (s - kept.sink) % (kept.window + config.spare)


def row_layout(config: BoundedKVConfig, position: StreamPosition, span: int, tokens: int | None) -> RowLayout:
    """Lay out one row's step.

    Args:
        config: the pool.
        position: where the stream stands.
        span: tokens that join it.
        tokens: real own tokens; None for as many as the step brings.

    Returns:
        What the row reads and writes.
    """
    source_len = position.source_len
    kept = config.retentions[source_len]
    length = source_len + position.written
    window = max(0, kept.window - span) if kept.window_includes_step else kept.window
    ring = kept.window + config.spare

    def at(s: int) -> int:
        return place(config, source_len, s)

    retained = sorted({*range(min(kept.sink, length)), *range(max(0, length - window), length)})
    sinks = [s for s in retained if s < kept.sink]
    others = [s for s in retained if s >= kept.sink]
    reads = (
        *_reads((s for s in sinks if s < source_len), at_most=1),
        *_reads((at(s) for s in sinks if s >= source_len), at_most=1),
        *_reads((s for s in others if s < source_len), at_most=1),
        *_reads((at(s) for s in others if s >= source_len), at_most=2),
    )

    def token(s: int) -> int:
        return length + span - 1 - s if config.reverse_step_order else s - length

    joining = [s for s in range(length, length + span) if s < kept.sink or ring > 0]
    last_writer = {at(s): s for s in joining}
    surviving = sorted(last_writer.values())
    writes = (
        *_writes(((token(s), at(s)) for s in surviving if s < kept.sink), at_most=1),
        *_writes(((token(s), at(s)) for s in surviving if s >= kept.sink), at_most=2),
    )
    return RowLayout(ALL_TOKENS if tokens is None else tokens, length, kept.sink, reads, writes)


def _reads(entries: Iterable[int], at_most: int) -> list[Read]:
    """Compress places in stream order to exactly `at_most` runs, the missing ones empty."""
    runs: list[Read] = []
    for entry in entries:
        if runs and entry == runs[-1].start + runs[-1].length:
            runs[-1] = Read(runs[-1].start, runs[-1].length + 1)
        else:
            runs.append(Read(entry, 1))
    assert len(runs) <= at_most, runs
    return runs + [NO_READ] * (at_most - len(runs))


def _writes(entries: Iterable[tuple[int, int]], at_most: int) -> list[Write]:
    """Compress (token, place) pairs in stream order to exactly `at_most` runs, the missing ones empty."""
    runs: list[Write] = []
    for token, entry in entries:
        if runs and entry == runs[-1].start + runs[-1].length:
            runs[-1] = Write(runs[-1].token, runs[-1].start, runs[-1].length + 1)
        else:
            runs.append(Write(token, entry, 1))
    assert len(runs) <= at_most, runs
    return runs + [NO_WRITE] * (at_most - len(runs))
