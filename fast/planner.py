"""A batch's layout in closed form: all rows at once, in numpy."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from boundedkv import plan as fmt
from boundedkv.config import BoundedKVConfig
from boundedkv.transfer import Extent

Ints = NDArray[np.int64]


class Batch(NamedTuple):
    """A step as arrays, one entry a row; all int64."""

    slot: Ints
    source_len: Ints
    written: Ints
    source: Ints
    span: Ints
    tokens: Ints


class Planner:
    """Computes the lines of plan tables for one config."""

    def __init__(self, config: BoundedKVConfig) -> None:
        kept = config.retentions
        self._sink = np.array([sink for sink, _, _ in kept], dtype=np.int64)
        self._window = np.array([window for _, window, _ in kept], dtype=np.int64)
        self._includes_step = np.array([includes for _, _, includes in kept], dtype=bool)
        self._sink_capacity = config.sink_capacity
        self._spare = config.spare
        self._reverse = config.reverse_step_order

    def table(self, batch: Batch) -> NDArray[np.int32]:
        """The lines of a plan, int32 [rows, ROW_INTS]."""
        lines = np.zeros((len(batch.slot), fmt.ROW_INTS), dtype=np.int64)
        length = batch.source_len + batch.written
        sink = self._sink[batch.source_len]
        window = self._window[batch.source_len]
        lines[:, fmt.SLOT] = batch.slot
        lines[:, fmt.SOURCE] = batch.source
        lines[:, fmt.TOKENS] = batch.tokens
        lines[:, fmt.LENGTH] = length
        lines[:, fmt.SINK] = sink
        ring = window + self._spare
        self._fill_reads(lines, batch, length, sink, window, ring)
        self._fill_writes(lines, batch, length, sink, ring)
        return lines.astype(np.int32)

    def places(self, source_len: int, held: Extent) -> tuple[Ints, Ints]:
        """Where a slot holds these sinks and these entries of the ring."""
        ring = max(1, int(self._window[source_len]) + self._spare)
        sinks, later = (np.arange(r.start, r.stop, dtype=np.int64) for r in held)
        return sinks - source_len, self._sink_capacity + (later - self._sink[source_len]) % ring

    def _fill_reads(self, lines: Ints, batch: Batch, length: Ints, sink: Ints, window: Ints, ring: Ints) -> None:
        shrunk = np.where(self._includes_step[batch.source_len], np.maximum(window - batch.span, 0), window)
        sinks = np.minimum(sink, length)
        source_sinks = np.minimum(sinks, batch.source_len)
        low = np.minimum(np.maximum(sink, length - shrunk), length)
        source_window = np.maximum(batch.source_len - low, 0)
        in_ring = length - low - source_window
        place = (length - in_ring - sink) % np.maximum(ring, 1)
        straight = np.minimum(in_ring, ring - place)
        _put_read(lines, fmt.SINK_SOURCE, np.zeros_like(low), source_sinks)
        _put_read(lines, fmt.SINK_SLOT, np.zeros_like(low), sinks - source_sinks)
        _put_read(lines, fmt.WINDOW_SOURCE, low, source_window)
        _put_read(lines, fmt.RING, self._sink_capacity + place, straight)
        _put_read(lines, fmt.RING_WRAPPED, np.full_like(low, self._sink_capacity), in_ring - straight)

    def _fill_writes(self, lines: Ints, batch: Batch, length: Ints, sink: Ints, ring: Ints) -> None:
        end = length + batch.span
        sinks = np.clip(sink - length, 0, batch.span)
        first = np.minimum(np.maximum(np.maximum(length, sink), end - ring), end)
        in_ring = end - first
        place = (first - sink) % np.maximum(ring, 1)
        straight = np.minimum(in_ring, ring - place)
        self._put_write(lines, fmt.WRITE_SINK, batch.span, np.zeros_like(end), batch.written, sinks)
        self._put_write(lines, fmt.WRITE_RING, batch.span, first - length, self._sink_capacity + place, straight)
        wrapped = np.full_like(end, self._sink_capacity)
        self._put_write(
            lines, fmt.WRITE_RING_WRAPPED, batch.span, first - length + straight, wrapped, in_ring - straight
        )

    def _put_write(self, lines: Ints, which: int, span: Ints, offset: Ints, start: Ints, count: Ints) -> None:
        """Write entries that join the stream `offset` behind its end."""
        column = fmt.WRITES + 3 * which
        token = span - 1 - offset if self._reverse else offset
        some = count > 0
        lines[:, column] = np.where(some, token, 0)
        lines[:, column + 1] = np.where(some, start, 0)
        lines[:, column + 2] = np.maximum(count, 0)


def _put_read(lines: Ints, which: int, start: Ints, count: Ints) -> None:
    column = fmt.READS + 2 * which
    lines[:, column] = np.where(count > 0, start, 0)
    lines[:, column + 1] = np.maximum(count, 0)
