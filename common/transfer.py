"""What a request takes along when it moves to another manager, or to a disk and back.

The entries travel in stream order, not as the slot's bytes: where the ring stood, and what other requests left in the
slot before, stay behind.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from torch import Tensor

from boundedkv.config import BoundedKVConfig
from boundedkv.numerics import MAX_POSITION
from boundedkv.step import AdmitRuntimeError

_NUMBERS = ("source_len", "source", "written", "reach", "sink", "window", "spare")


class Stream(NamedTuple):
    """A request's stream, as `export_request` gives it (as a dict of these fields).

    Attributes:
        source_len: entries of its source prefix.
        source: index of the prefix; -1 for `row_source`.
        written: entries it has written.
        reach: the furthest that a planned step may have written.
        sink: its retention's sinks.
        window: its retention's window.
        spare: the pool's spare ring entries.
        sinks: [num_layers, rows, H, S, 2D], the written sinks in stream order.
        ring: [num_layers, rows, H, N, 2D], the last written entries behind the sinks, in stream order.
    """

    source_len: int
    source: int
    written: int
    reach: int
    sink: int
    window: int
    spare: int
    sinks: Tensor
    ring: Tensor


class Extent(NamedTuple):
    """Which stream positions of a request's own entries are at hand.

    Attributes:
        sinks: the written sinks, a range of positions.
        ring: the entries in the ring, a range of positions.
    """

    sinks: range
    ring: range


def extent(config: BoundedKVConfig, rid: str, source_len: int, written: int, reach: int) -> Extent:
    """The stream positions that a slot still holds.

    Raises:
        AdmitRuntimeError: a planned step may have overwritten entries that the stream retains.
    """
    kept = config.retentions[source_len]
    length = source_len + written
    first = max(kept.sink, source_len)
    oldest = source_len + max(written, reach) - kept.window - config.spare
    if oldest > max(first, length - kept.window):
        raise AdmitRuntimeError(
            f"request {rid!r}: a step was planned up to {reach} written and {written} are committed; what it "
            "overwrote is lost to the stream: commit it first",
            rid,
        )
    return Extent(
        range(source_len, max(source_len, min(kept.sink, length))), range(min(max(first, oldest), length), length)
    )


def check_stream(config: BoundedKVConfig, state: object) -> Stream:
    """Raise `ValueError` where a state was not exported from a pool like this one."""
    if not isinstance(state, Mapping) or set(state) != set(Stream._fields):
        told = sorted(map(str, state)) if isinstance(state, Mapping) else type(state).__name__
        raise ValueError(f"state is {told}, but should be a dict with {sorted(Stream._fields)}")
    stream = Stream(**state)
    for name in _NUMBERS:
        value = getattr(stream, name)
        least = -1 if name == "source" else 0
        if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= MAX_POSITION + 1:
            raise ValueError(f"state {name} is {value!r}, but should be an integer that export_request gives")
    if stream.source_len > config.max_source_len or stream.source_len + stream.written > MAX_POSITION + 1:
        raise ValueError(
            f"state source_len is {stream.source_len} and written is {stream.written}, but should be at most "
            f"{config.max_source_len}, and within stream position {MAX_POSITION}"
        )
    kept = config.retentions[stream.source_len]
    for name, got, expected in (
        ("sink", stream.sink, kept.sink),
        ("window", stream.window, kept.window),
        ("spare", stream.spare, config.spare),
    ):
        if got != expected:
            raise ValueError(f"state {name} is {got}, but should be {expected}, as in this pool")
    try:
        held = extent(config, "", stream.source_len, stream.written, stream.reach)
    except AdmitRuntimeError:
        raise ValueError(
            f"state reach is {stream.reach}, but should leave what {stream.written} written entries retain"
        ) from None
    for name, positions in (("sinks", held.sinks), ("ring", held.ring)):
        _check_entries(config, name, getattr(stream, name), len(positions))
    return stream


def _check_entries(config: BoundedKVConfig, name: str, entries: Any, count: int) -> None:
    shape = [config.num_layers, config.rows_per_request, config.num_heads, count, 2 * config.head_dim]
    if not isinstance(entries, Tensor):
        raise ValueError(f"state {name} is {type(entries).__name__}, but should be a tensor {shape}")
    if entries.device.type == "meta":
        raise ValueError(f"state {name} is on meta, but should be on a device that holds its entries")
    if list(entries.shape) != shape or entries.dtype != config.dtype:
        raise ValueError(f"state {name} is {entries.dtype} {list(entries.shape)}, but should be {config.dtype} {shape}")
