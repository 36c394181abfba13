"""What hypothesis draws for a random stream: pools, steps right and wrong, and what a layer is attended with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import hypothesis.strategies as st
import torch

from boundedkv.config import BoundedKVConfig, SinkWindow
from boundedkv.step import BoundedKVStep, BucketKey, Segment, SlotLease, StepContext, StreamPosition
from boundedkv.testing.features import FEATURES
from boundedkv.testing.samples import Sample
from boundedkv.testing.script import ByLength

IDS = ("a", "b", "c", "d")
PADS = ("pad0", "pad1", "pad2")
LEASES = tuple(SlotLease(slot, BucketKey("main", 3, 4)) for slot in range(2))
SOURCES = 2
LAST = 2**31 - 1

Positions = Sequence[StreamPosition | None]


@dataclass(frozen=True)
class Scope:
    """What may be drawn.

    Attributes:
        features: names out of `FEATURES` that may take part.
        focus: the one that takes part wherever it can; None for no such one.
        close: numbers are such that kernels of other arithmetic can be near the exact result.
    """

    features: frozenset[str] = frozenset(FEATURES)
    focus: str | None = None
    close: bool = False

    def has(self, *names: str) -> bool:
        """Whether one of these features may take part."""
        return not self.features.isdisjoint(names)

    def some(self, name: str, one_in: int = 2) -> st.SearchStrategy[bool]:
        """Whether a feature takes part this time."""
        if name not in self.features:
            return st.just(False)
        if self.focus == name:
            return st.booleans() if name == "extremes" else st.just(True)
        return st.sampled_from([*[False] * (one_in - 1), True])

    @property
    def dtypes(self) -> list[torch.dtype]:
        """The element types that may be drawn."""
        return [torch.float32, *(getattr(torch, name) for name in ("float16", "bfloat16") if self.has(name))]


@st.composite
def configs(draw: st.DrawFn, scope: Scope) -> BoundedKVConfig:
    """Any small pool. Now and then sources and windows are longer than a tile, or than a split."""
    focus = scope.focus
    not_causal = focus in ("window_includes_step", "reverse_step_order")
    causal = focus == "query_window" or (not not_causal and draw(scope.some("query_window")))
    size = 5
    if scope.has("long_rows"):
        size = draw(st.sampled_from([70, 70, 70, 600] if focus == "long_rows" else [*[5] * 12, 70, 600]))
    query_window = draw(st.integers(0, size)) if causal else None
    kept = st.builds(
        SinkWindow,
        sink=st.just(0) if causal and (focus == "rel_bias" or draw(st.booleans())) else st.integers(0, size),
        window=st.integers(max(query_window or 0, 65 if focus == "long_rows" else 0), size + 1),
        window_includes_step=st.just(False) if causal else scope.some("window_includes_step"),
    )
    prefixes = scope.has("sources", "row_source")
    least = 0 if focus not in ("sources", "row_source", "retention_by_length") else 3
    max_source_len = draw(st.sampled_from([least, 3, size])) if prefixes else 0
    by_length = prefixes and scope.has("retention_by_length")
    choices = draw(st.lists(kept, min_size=1 + (focus == "retention_by_length"), max_size=3 if by_length else 1))
    rows, heads, group = draw(_shapes(scope, small=size == 5))
    return BoundedKVConfig(
        num_layers=draw(st.integers(1 + (focus == "layers"), 2)) if scope.has("layers") else 1,
        num_heads=heads,
        head_dim=draw(_head_dims(scope)),
        retention=choices[0] if len(choices) == 1 else ByLength(choices),
        rows_per_request=rows,
        max_source_len=max_source_len,
        max_slots=draw(st.sampled_from([2, 3] if focus == "batch" else [2, 3, 1])),
        dtype=draw(_slot_dtypes(scope)),
        query_window=query_window,
        reverse_step_order=not causal and focus != "rel_bias" and draw(scope.some("reverse_step_order")),
        spare=draw(st.integers(int(focus == "spare"), 3)) if scope.has("spare") else 0,
        scale=draw(st.sampled_from([None, 1.0, -0.3, 0.0])),
        num_query_heads=heads * group,
    )


def _shapes(scope: Scope, small: bool) -> st.SearchStrategy[tuple[int, int, int]]:
    """Rows, heads, and query heads a head."""
    plain = [] if scope.focus in ("rows", "grouped_heads") else [(1, 1, 1)]
    if small and plain:
        plain += [(1, 1, 1), (1, 2, 1)]
    rows = [(2, 1, 1)] if scope.has("rows") and (small or scope.focus == "rows") else []
    grouped = [(1, 1, 2), (1, 1, 3), (1, 2, 2)] if scope.has("grouped_heads") else []
    if not small:
        grouped = grouped[:1] if scope.focus == "grouped_heads" else []
    return st.sampled_from({"rows": rows, "grouped_heads": grouped}.get(scope.focus or "", plain + rows + grouped))


def _head_dims(scope: Scope) -> st.SearchStrategy[int]:
    if not scope.has("any_head_dim"):
        return st.sampled_from([16, 32, 64])
    return st.sampled_from([1, 3, 7, 17, 80]) if scope.focus == "any_head_dim" else st.integers(1, 6)


def _slot_dtypes(scope: Scope) -> st.SearchStrategy[torch.dtype]:
    focused = [dtype for dtype in scope.dtypes if str(dtype) == f"torch.{scope.focus}"]
    return st.sampled_from(focused or scope.dtypes)


# Steps.


@dataclass
class Declared:
    """A step that can still be changed."""

    spans: dict[str, Any]
    positions: dict[str, Any]
    tokens: dict[str, Any]
    row_ids: list[str]
    padded: bool
    lease: SlotLease | None
    more_segments: list[Segment] = field(default_factory=list)
    left_out: set[str] = field(default_factory=set)

    def frozen(self) -> tuple[BoundedKVStep, StepContext]:
        """The step, and its context."""
        segments = [Segment(rid, span) for rid, span in self.spans.items() if rid not in self.left_out]
        step = BoundedKVStep((*segments, *self.more_segments), self.positions, self.tokens)
        request_ids = tuple(rid for rid in self.row_ids if rid not in PADS)
        padded = tuple(self.row_ids) if self.padded else None
        return step, StepContext(request_ids, slot_lease=self.lease, padded_request_ids=padded)


@st.composite
def right_steps(
    draw: st.DrawFn, scope: Scope, config: BoundedKVConfig, known: Mapping[str, StreamPosition]
) -> Declared:
    """A step of up to three requests; those that `known` has a position of stand there, the others start.

    Seldom do more start than find a slot.
    """
    positions, spans, tokens = {}, {}, {}
    some = 1
    if scope.has("batch"):
        some = draw(st.sampled_from([2, 2, 3] if scope.focus == "batch" else [1, 1, 2, 1, 1, 2, 3, 1, 2, 1, 0]))
    starting = [rid for rid in IDS if rid not in known]
    starting = starting[: config.max_slots - len(known) + draw(st.sampled_from([0, 0, 0, int(scope.has("refusals"))]))]
    candidates = [*known, *starting]
    spans_of = st.integers(0, 3) | st.integers(1, min(2 * config.ring_capacity + 2, 12))
    common_span = draw(spans_of) or 1
    for rid in draw(st.permutations(candidates))[:some]:
        positions[rid] = known.get(rid) or draw(_starts(scope, config))
        spans[rid] = draw(spans_of) if scope.has("lookahead") else common_span
        if draw(scope.some("ragged")):
            tokens[rid] = spans[rid] + (draw(st.sampled_from([1, 0, 2])) if scope.has("lookahead") else 0)
    lease = draw(st.sampled_from(LEASES)) if draw(scope.some("leases", 6)) else None
    pads = draw(st.integers(1, 2)) if draw(scope.some("padding", 2 if lease else 4)) else 0
    padding = PADS[: min(pads, 3 - len(spans))]
    row_ids = draw(st.permutations([*spans, *padding]))
    return Declared(spans, positions, tokens, row_ids, bool(padding), lease)


def _starts(scope: Scope, config: BoundedKVConfig) -> st.SearchStrategy[StreamPosition]:
    """Where a request can start."""
    numbers = [*([-1] if scope.has("row_source") else []), *(range(SOURCES) if scope.has("sources") else [])]
    if scope.focus in ("sources", "row_source"):
        numbers = [number for number in numbers if (number < 0) == (scope.focus == "row_source")]
    least = min(config.max_source_len, int(scope.focus in ("sources", "row_source")))
    return st.builds(
        StreamPosition,
        source_len=st.integers(least, config.max_source_len),
        written=st.just(0),
        source=st.sampled_from(numbers or [0]),
    )


ODD_NUMBERS = st.sampled_from([-2, -1, 0, 1, 2, 3, 7, 1000, LAST - 1, LAST, LAST + 1, 2**40, True, None, 1.5, "1"])


@st.composite
def wrong_steps(
    draw: st.DrawFn, scope: Scope, config: BoundedKVConfig, known: Mapping[str, StreamPosition]
) -> Declared:
    """A step with one thing in it that is not as it was; which may make it another right one."""
    declared = draw(right_steps(scope, config, known))
    rid = draw(st.sampled_from([*declared.spans] or ["a"]))
    what = draw(st.sampled_from(["span", "tokens", "source_len", "written", "source", "position", "segment", "batch"]))
    if what == "span":
        declared.spans[rid] = draw(ODD_NUMBERS)
    elif what == "tokens":
        declared.tokens[rid] = draw(ODD_NUMBERS)
    elif what in StreamPosition._fields and rid in declared.positions:
        declared.positions[rid] = declared.positions[rid]._replace(**{what: draw(ODD_NUMBERS)})
    elif what == "position":
        declared.positions[rid] = draw(st.sampled_from([None, (0, 0, 0), StreamPosition(0, 0)]))
    elif what == "segment":
        declared.more_segments = [Segment(draw(st.sampled_from([*IDS, *PADS])), 1)]
    else:
        declared.left_out = draw(st.sampled_from([{rid}, set()]))
        declared.padded = draw(st.booleans())
        declared.row_ids = [*declared.row_ids, *draw(st.lists(st.sampled_from([*IDS, *PADS]), max_size=2))]
    return declared


# What a layer is attended with.


@st.composite
def samples(draw: st.DrawFn, scope: Scope, config: BoundedKVConfig, *shape: int) -> Sample:
    """Numbers of one kind and one dtype, in memory of one layout; what lies around them is NaN."""
    kinds = ["normal"] * 8 + ["zeros"] if scope.close else [*["normal"] * 8, *["wide"] * 4, "zeros"]
    odd = draw(scope.some("extremes", 14))
    return Sample(
        shape,
        seed=draw(st.integers(0, 9)),
        kind=("poison" if scope.close else "odd") if odd else draw(st.sampled_from(kinds)),
        dtype=draw(st.sampled_from([config.dtype, *scope.dtypes])) if scope.has("mixed_types") else config.dtype,
        layout=draw(st.sampled_from(["within", "transposed", "expanded"])) if draw(scope.some("strides")) else "whole",
    )


@st.composite
def sources(
    draw: st.DrawFn, scope: Scope, config: BoundedKVConfig, positions: Positions
) -> tuple[Sample | None, tuple[Sample, torch.Tensor] | None]:
    """`source` and `row_source` for rows at these positions, NaN behind the prefixes that they have."""
    if not scope.has("sources", "row_source") or (config.max_source_len == 0 and draw(st.booleans())):
        return None, None
    entries = config.max_source_len + draw(st.integers(0, 1))
    shape = (config.rows_per_request, config.num_heads, entries, 2 * config.head_dim)
    rows = range(len(positions))
    numbers = draw(st.lists(st.integers(0, 2), min_size=len(positions), max_size=len(positions)))
    bank = _ending(draw(samples(scope, config, SOURCES, *shape)), positions, [p.source if p else -1 for p in positions])
    own = [numbers[row] if (p := positions[row]) and p.source < 0 else -1 for row in rows]
    storage = _ending(draw(samples(scope, config, 3, *shape)), positions, own)
    read = [(p := positions[row]) is not None and p.source < 0 and p.source_len > 0 for row in rows]
    slots = torch.tensor(
        [numbers[row] if read[row] else 1000 for row in rows],  # the others are read by nobody
        dtype=draw(st.sampled_from([torch.int32, torch.int64])),
    )
    return bank if scope.has("sources") else None, (storage, slots) if scope.has("row_source") else None


def _ending(bank: Sample, positions: Positions, entry_of: Sequence[int]) -> Sample:
    """A bank that is NaN behind what each of its entries is read for."""
    ends = [0] * bank.shape[0]
    for position, entry in zip(positions, entry_of, strict=True):
        if position is not None and 0 <= entry < len(ends):
            ends[entry] = max(ends[entry], position.source_len)
    if bank.layout == "expanded":
        ends = [max(ends)] * len(ends)
    return Sample(bank.shape, bank.seed, bank.kind, bank.dtype, bank.layout, tuple(ends))


@st.composite
def biases(
    draw: st.DrawFn, scope: Scope, config: BoundedKVConfig, batch: int, tokens: int, max_retained: int
) -> Sample:
    """A score term by distance; a part of it masks."""
    entries = config.query_window + 1 if config.query_window is not None else max_retained + 2 * tokens - 1
    if scope.has("refusals"):
        entries = max(0, entries + draw(st.sampled_from([0, 0, 0, 1, -1])))
    bias = draw(samples(scope, config, batch, config.query_heads, tokens, entries))
    masked = draw(st.integers(1, 3)) if draw(st.booleans()) else 0
    return Sample(bias.shape, bias.seed, bias.kind, bias.dtype, bias.layout, masked=masked)
