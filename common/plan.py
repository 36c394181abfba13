"""The plan format: one line of integers a row, which says what a step reads and what it writes.

A line is `slot, source, tokens, length, sink`, then five reads and three writes. Everything a kernel needs of a row
is in its line, so a captured graph replays with nothing but new numbers in the table.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

PLAN_VERSION = 1
"""The version of the format; it rises when a column moves or changes its meaning."""

# Columns of the head.
SLOT = 0  # the slot that the row reads and writes
SOURCE = 1  # index of the row's prefix in `source`, or -1: in `row_source`
TOKENS = 2  # real own tokens, ALL_TOKENS for as many as the step brings
LENGTH = 3  # entries of the stream when the step starts; own token t stands at LENGTH + t
SINK = 4  # stream positions below this are sinks

READS = 5
"""The first column of the reads: pairs (start, length), in stream order. A start counts from the source's or the slot's
first entry."""

SINK_SOURCE, SINK_SLOT, WINDOW_SOURCE, RING, RING_WRAPPED = range(5)
NUM_READS = 5

WRITES = READS + 2 * NUM_READS
"""The first column of the writes: triples (first own token, slot start, length), in stream order: the sinks, the ring,
the ring where it wraps."""

WRITE_SINK, WRITE_RING, WRITE_RING_WRAPPED = range(3)
NUM_WRITES = 3

ROW_INTS = WRITES + 3 * NUM_WRITES
"""Columns of a line."""

ALL_TOKENS = 2**31 - 1
"""What `tokens` holds where a row's own tokens are all real."""

READ_NAMES = ("sink_source", "sink_slot", "window_source", "ring", "ring_wrapped")
WRITE_NAMES = ("sink", "ring", "ring_wrapped")
COLUMNS = (
    "slot",
    "source",
    "tokens",
    "length",
    "sink",
    *(f"read_{name}_{part}" for name in READ_NAMES for part in ("start", "length")),
    *(f"write_{name}_{part}" for name in WRITE_NAMES for part in ("token", "start", "length")),
)
"""The name of each column, in order."""


class Read(NamedTuple):
    """A run of entries that a row reads.

    Attributes:
        start: first entry, counted from the source's or the slot's first.
        length: entries; 0 for none, then `start` is 0 too.
    """

    start: int
    length: int


class Write(NamedTuple):
    """A run of entries that a row writes.

    Attributes:
        token: the own token that goes to `start`; the next entry takes the token after it (before it with
            `reverse_step_order`).
        start: first entry of the slot.
        length: entries; 0 for none, then the others are 0 too.
    """

    token: int
    start: int
    length: int


NO_READ = Read(0, 0)
NO_WRITE = Write(0, 0, 0)


class RowLayout(NamedTuple):
    """One row of a plan, but for its slot and source.

    Attributes:
        tokens: real own tokens; `ALL_TOKENS` for as many as the step brings.
        length: entries of the stream when the step starts.
        sink: stream positions below this are sinks.
        reads: five `Read`s in stream order: sinks in the source, sinks in the slot, window in the source, ring, ring
            where it wraps.
        writes: three `Write`s in stream order: sinks, ring, ring where it wraps.
    """

    tokens: int
    length: int
    sink: int
    reads: tuple[Read, ...]
    writes: tuple[Write, ...]

    @property
    def retained(self) -> int:
        """Entries that the row reads beside its own tokens."""
        return sum(read.length for read in self.reads)

    @property
    def source_entries(self) -> int:
        """Entries that the row needs its source to have; 0 where it reads none."""
        return max(read.start + read.length for read in (self.reads[SINK_SOURCE], self.reads[WINDOW_SOURCE]))


Row = tuple[int, RowLayout, int]

EMPTY_ROW: Row = (0, RowLayout(0, 0, 0, (NO_READ,) * NUM_READS, (NO_WRITE,) * NUM_WRITES), 0)
"""A row that reads nothing and writes nothing: padding, or any row under a capture."""


class BoundedPlan(NamedTuple):
    """One step's layout, which an engine passes on without looking inside. Only the table of a lease ever changes.

    Attributes:
        table: int32 [>= rows, ROW_INTS] on the manager's device, one line per row of the batch (a request, or a
            padding row); lines past the batch are zero.
        rows: the same lines for people: `(slot, RowLayout, source)` each.
        max_retained: no row reads more entries than this beside its own tokens.
        max_span: no row writes more tokens than this.
        reads_source: a row reads from `source`.
        reads_row_source: a row reads from `row_source`.
    """

    table: Tensor
    rows: tuple[Row, ...]
    max_retained: int
    max_span: int
    reads_source: bool
    reads_row_source: bool

    def retained(self) -> Tensor:
        """Each row's retained keys before its step, [rows] int32 on the device."""
        lengths = self.table[: len(self.rows), READS + 1 : WRITES : 2]
        return lengths.sum(dim=1, dtype=torch.int32)


def encode(rows: tuple[Row, ...]) -> NDArray[np.int32]:
    """Write rows as the lines of a table.

    Args:
        rows: `(slot, RowLayout, source)` each.

    Returns:
        int32 [rows, ROW_INTS]; `decode` is its inverse.

    Examples:
        >>> table = encode((EMPTY_ROW, EMPTY_ROW))
        >>> table.shape == (2, ROW_INTS), decode(table) == (EMPTY_ROW, EMPTY_ROW)
        (True, True)
    """
    table = np.zeros((len(rows), ROW_INTS), dtype=np.int32)
    for line, (slot, layout, source) in zip(table, rows, strict=True):
        line[:READS] = slot, source, layout.tokens, layout.length, layout.sink
        line[READS:WRITES] = np.ravel(layout.reads)
        line[WRITES:] = np.ravel(layout.writes)
    return table


def decode(table: NDArray[np.int32]) -> tuple[Row, ...]:
    """Read the lines of a table as rows.

    Args:
        table: int32 [rows, ROW_INTS] on the host.

    Returns:
        `(slot, RowLayout, source)` for each line; `encode` is its inverse.
    """
    return tuple(_decode_line(line) for line in table.tolist())


def _decode_line(line: list[int]) -> Row:
    slot, source, tokens, length, sink = line[:READS]
    reads = tuple(Read(*line[i : i + 2]) for i in range(READS, WRITES, 2))
    writes = tuple(Write(*line[i : i + 3]) for i in range(WRITES, ROW_INTS, 3))
    return slot, RowLayout(tokens, length, sink, reads, writes), source
