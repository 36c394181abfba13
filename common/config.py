"""What a model declares once: how much of a stream is kept, and the shape of the slots that keep it."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch

from boundedkv.numerics import MAX_HEAD_DIM

FLOAT_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


class SinkWindow(NamedTuple):
    """How much of a stream is retained: its first `sink` entries and its last `window` ones.

    Keeping the first entries beside the last is what lets a model read on without end: see "Efficient Streaming
    Language Models with Attention Sinks" (Xiao et al., 2023).

    Attributes:
        sink: entries kept from the start of the stream, source prefix included.
        window: entries kept before the step that reads them.
        window_includes_step: the step's own span counts towards `window`, so a step of `span` tokens finds
            `max(0, window - span)` retained entries beside the sinks.

    Examples:
        >>> SinkWindow(sink=4, window=1020)
        SinkWindow(sink=4, window=1020, window_includes_step=False)
    """

    sink: int
    window: int
    window_includes_step: bool = False


Retention = SinkWindow | Callable[[int], SinkWindow]


@dataclass(frozen=True)
class BoundedKVConfig:
    """The shape of a pool of slots and the rule by which its streams are retained and read.

    Args:
        num_layers: attention layers that share the plan; each has its own slots.
        num_heads: key/value heads.
        head_dim: elements of one key or value vector, 1 to 256.
        retention: a `SinkWindow`, or a function from source length to one.
        rows_per_request: rows of q, k and v that one request brings (2 for classifier-free guidance).
        max_source_len: the longest source prefix a request may declare, in entries.
        max_slots: requests that can hold a slot at one time.
        dtype: element type of the slots.
        query_window: None: a query sees every retained key and all of the step's tokens. W: the causal rule, a query
            sees itself, the W entries before it, and the sinks.
        reverse_step_order: the span's tokens join the stream last first.
        spare: ring entries beyond the window; a request can be rewound by up to this many tokens.
        scale: factor on the scores; None means `head_dim ** -0.5`.
        num_query_heads: query heads, a multiple of `num_heads`; query head h reads key/value head
            `h // (num_query_heads // num_heads)`. None means `num_heads`.

    Raises:
        ValueError: a number out of range, or two settings that contradict each other. The message names the setting.

    Examples:
        Four sinks, a window of 1020, keys and values of 8 heads in bfloat16:

        >>> config = BoundedKVConfig(32, 8, 128, SinkWindow(4, 1020), dtype=torch.bfloat16, max_slots=16)
        >>> config.slot_tokens, config.slot_bytes * config.max_slots
        (1024, 2147483648)

        A source prefix of up to 100 entries, kept whole. It is read where it lies, so the slots have no room for it:

        >>> voice = BoundedKVConfig(8, 4, 64, lambda length: SinkWindow(length, 250), max_source_len=100)
        >>> voice.sink_capacity, voice.ring_capacity
        (0, 250)
        >>> BoundedKVConfig(8, 4, 512, SinkWindow(4, 250))
        Traceback (most recent call last):
        ValueError: head_dim is 512, but should be an integer from 1 to 256
    """

    num_layers: int
    num_heads: int
    head_dim: int
    retention: Retention
    rows_per_request: int = 1
    max_source_len: int = 0
    max_slots: int = 32
    dtype: torch.dtype = torch.float32
    query_window: int | None = None
    reverse_step_order: bool = False
    spare: int = 0
    scale: float | None = None
    num_query_heads: int | None = None

    def __post_init__(self) -> None:
        """Refuse settings no stream could be served with."""
        for name in ("num_layers", "num_heads", "rows_per_request", "max_slots"):
            _require_int(name, getattr(self, name), least=1)
        _require_int("head_dim", self.head_dim, least=1, most=MAX_HEAD_DIM)
        for name in ("max_source_len", "spare"):
            _require_int(name, getattr(self, name), least=0)
        if self.dtype not in FLOAT_DTYPES:
            raise ValueError(f"dtype is {self.dtype}, but should be one of {', '.join(map(str, FLOAT_DTYPES))}")
        if self.num_query_heads is not None:
            _require_int("num_query_heads", self.num_query_heads, least=1)
            if self.num_query_heads % self.num_heads:
                raise ValueError(
                    f"num_query_heads is {self.num_query_heads}, but should be a multiple of num_heads {self.num_heads}"
                )
        if self.scale is not None and not _is_scale(self.scale):
            raise ValueError(f"scale is {self.scale!r}, but should be finite, in float32 and times log2(e) too")
        if not isinstance(self.reverse_step_order, bool):
            raise ValueError(f"reverse_step_order is {self.reverse_step_order!r}, but should be True or False")
        if not callable(self.retention) and not isinstance(self.retention, SinkWindow):
            raise ValueError(
                f"retention is {self.retention!r}, but should be a SinkWindow or a function from source length to one"
            )
        for source_len, kept in enumerate(self.retentions):
            _check_sink_window(source_len, kept)
        if self.query_window is not None:
            self._check_query_window(self.query_window)

    def _check_query_window(self, query_window: int) -> None:
        _require_int("query_window", query_window, least=0)
        if self.reverse_step_order:
            raise ValueError("reverse_step_order is True, but should be False beside a query_window")
        for source_len, kept in enumerate(self.retentions):
            if kept.window < query_window:
                raise ValueError(
                    f"query_window is {query_window}, but should be at most the retained window, which is "
                    f"{kept.window} for source length {source_len}: a step and its tokens one by one would see "
                    "different keys"
                )
            if kept.window_includes_step:
                raise ValueError(
                    f"window_includes_step is True for source length {source_len}, but should be False beside a "
                    "query_window: a step and its tokens one by one would see different keys"
                )

    @cached_property
    def retentions(self) -> tuple[SinkWindow, ...]:
        """The retention of every source length 0 .. max_source_len, in order."""
        if isinstance(self.retention, SinkWindow):
            return (self.retention,) * (self.max_source_len + 1)
        return tuple(self.retention(source_len) for source_len in range(self.max_source_len + 1))

    @cached_property
    def sink_capacity(self) -> int:
        """Entries of a slot's sink region: the most sink entries that any request writes itself."""
        return max(max(0, kept.sink - source_len) for source_len, kept in enumerate(self.retentions))

    @cached_property
    def ring_capacity(self) -> int:
        """Entries of a slot's ring: the longest window, and the spare entries."""
        return max(kept.window for kept in self.retentions) + self.spare

    @cached_property
    def max_retained(self) -> int:
        """The most entries that any stream retains."""
        return max(kept.sink + kept.window for kept in self.retentions)

    @property
    def slot_tokens(self) -> int:
        """Entries of one slot in one layer."""
        return self.sink_capacity + self.ring_capacity

    @property
    def slot_bytes(self) -> int:
        """Bytes that one slot takes over all layers, in `dtype`."""
        entry = self.rows_per_request * self.num_heads * 2 * self.head_dim * self.dtype.itemsize
        return self.num_layers * self.slot_tokens * entry

    @property
    def query_heads(self) -> int:
        """Query heads, with the default resolved."""
        return self.num_heads if self.num_query_heads is None else self.num_query_heads

    @property
    def score_scale(self) -> float:
        """Factor on the scores, with the default resolved."""
        return float(self.head_dim**-0.5 if self.scale is None else self.scale)


@dataclass
class BoundedKVSpec:
    """What a model's description says of its pool: the config, and which backend serves it.

    Attributes:
        config: the pool.
        resource_key: the name under which the model's nodes find the resource.
        nodes: the names of the nodes that use it.
        backend: "reference", "fast", "auto" or the name of an entry point.
    """

    config: BoundedKVConfig
    resource_key: str = "bounded_kv"
    nodes: frozenset[str] = frozenset()
    backend: str = "auto"

    def apply_yaml_overrides(self, max_slots: int | None = None) -> None:
        """Replace what a deployment may set. Mutates `config` (by a changed copy).

        Args:
            max_slots: the pool's slots; None leaves them.

        Raises:
            ValueError: `max_slots` is not a positive integer.
        """
        if max_slots is not None:
            self.config = dataclasses.replace(self.config, max_slots=max_slots)


def _is_scale(scale: object) -> bool:
    if not isinstance(scale, int | float) or isinstance(scale, bool):
        return False
    return abs(scale * math.log2(math.e)) <= torch.finfo(torch.float32).max


def _require_int(name: str, value: object, least: int, most: int | None = None) -> None:
    if isinstance(value, int) and not isinstance(value, bool) and value >= least and (most is None or value <= most):
        return
    bounds = f"at least {least}" if most is None else f"from {least} to {most}"
    raise ValueError(f"{name} is {value!r}, but should be an integer {bounds}")


def _check_sink_window(source_len: int, kept: object) -> None:
    if not isinstance(kept, SinkWindow):
        raise ValueError(f"retention gives {kept!r} for source length {source_len}, but should give a SinkWindow")
    _require_int(f"sink for source length {source_len}", kept.sink, least=0)
    _require_int(f"window for source length {source_len}", kept.window, least=0)
    if not isinstance(kept.window_includes_step, bool):
        raise ValueError(
            f"window_includes_step for source length {source_len} is {kept.window_includes_step!r}, "
            "but should be True or False"
        )
