"""What hypothesis draws for a random stream: pools, steps right and wrong, and what a layer is attended with."""

from dataclasses import dataclass, field

import hypothesis.strategies as st
import torch

from boundedkv import (
    BoundedKVConfig,
    BoundedKVStep,
    BucketKey,
    Segment,
    SinkWindow,
    SlotLease,
    StepContext,
    StreamPosition,
)

IDS = ("a", "b", "c", "d")
PADS = ("pad0", "pad1", "pad2")
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
LEASES = tuple(SlotLease(slot, BucketKey("main", 3, 4)) for slot in range(2))
SOURCES = 2
LAST = 2**31 - 1
NAN = float("nan")


class ByLength(tuple):
    """A retention that depends on the source length."""

    def __call__(self, source_len):
        return self[source_len]


@st.composite
def configs(draw, causal):
    """Any small pool. Now and then sources and windows are longer than a tile, or than a split."""
    size = draw(st.sampled_from([*[5] * 12, 70, 600]))
    query_window = draw(st.integers(0, size)) if causal else None
    kept = st.builds(
        SinkWindow,
        sink=st.just(0) if causal and draw(st.booleans()) else st.integers(0, size),
        window=st.integers(query_window or 0, size + 1),
        window_includes_step=st.just(False) if causal else st.booleans(),
    )
    max_source_len = draw(st.sampled_from([0, 3, size]))
    choices = draw(st.lists(kept, min_size=1, max_size=3))
    by_length = ByLength(choices[source_len % len(choices)] for source_len in range(max_source_len + 1))
    shapes = [(1, 1, 1), (1, 1, 2), (1, 1, 1), (1, 1, 3), (2, 1, 1), (1, 2, 2)] if size == 5 else [(1, 1, 1)]
    rows, heads, group = draw(st.sampled_from(shapes))
    return BoundedKVConfig(
        num_layers=draw(st.integers(1, 2)),
        num_heads=heads,
        head_dim=draw(st.integers(1, 6)),
        retention=choices[0] if len(choices) == 1 else by_length,
        rows_per_request=rows,
        max_source_len=max_source_len,
        max_slots=draw(st.sampled_from([2, 3, 1])),
        dtype=draw(st.sampled_from(DTYPES)),
        query_window=query_window,
        reverse_step_order=not causal and draw(st.booleans()),
        spare=draw(st.integers(0, 3)),
        scale=draw(st.sampled_from([None, 1.0, -0.3, 0.0])),
        num_query_heads=heads * group,
    )


# Steps.


@dataclass
class Declared:
    """A step that can still be changed."""

    spans: dict
    positions: dict
    tokens: dict
    row_ids: list
    padded: bool
    lease: SlotLease | None
    more_segments: list = field(default_factory=list)
    left_out: set = field(default_factory=set)

    def frozen(self):
        segments = [Segment(rid, span) for rid, span in self.spans.items() if rid not in self.left_out]
        step = BoundedKVStep((*segments, *self.more_segments), self.positions, self.tokens)
        request_ids = tuple(rid for rid in self.row_ids if rid not in PADS)
        padded = tuple(self.row_ids) if self.padded else None
        return step, StepContext(request_ids, slot_lease=self.lease, padded_request_ids=padded)


@st.composite
def right_steps(draw, config, known):
    """A step of up to three requests; those that `known` has a position of stand there, the others start.

    Seldom do more start than find a slot.
    """
    positions, spans, tokens = {}, {}, {}
    some = draw(st.sampled_from([1, 1, 2, 1, 1, 2, 3, 1, 2, 1, 0]))
    starting = [rid for rid in IDS if rid not in known]
    starting = starting[: config.max_slots - len(known) + draw(st.sampled_from([0, 0, 0, 1]))]
    candidates = [*known, *starting]
    for rid in draw(st.permutations(candidates))[:some]:
        start = StreamPosition(draw(st.integers(0, config.max_source_len)), 0, draw(st.integers(-1, SOURCES - 1)))
        positions[rid] = known.get(rid, start)
        spans[rid] = draw(st.integers(0, 3) | st.integers(1, min(2 * config.ring_capacity + 2, 12)))
        if draw(st.booleans()):
            tokens[rid] = spans[rid] + draw(st.sampled_from([1, 0, 2]))
    lease = draw(st.sampled_from([None, None, None, None, *LEASES]))
    padding = PADS[: min(draw(st.sampled_from([0, 0, 1, 2] if lease else [0, 0, 0, 1])), 3 - len(spans))]
    row_ids = draw(st.permutations([*spans, *padding]))
    return Declared(spans, positions, tokens, row_ids, bool(padding), lease)


ODD_NUMBERS = st.sampled_from([-2, -1, 0, 1, 2, 3, 7, 1000, LAST - 1, LAST, LAST + 1, 2**40, True, None, 1.5, "1"])


@st.composite
def wrong_steps(draw, config, known):
    """A step with one thing in it that is not as it was; which may make it another right one."""
    declared = draw(right_steps(config, known))
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
def tensors(draw, *shape):
    """Numbers of one kind and one dtype, in memory of one layout; what lies around them is NaN."""
    generator = torch.Generator().manual_seed(draw(st.integers(0, 9)))
    kind = draw(st.sampled_from([*["normal"] * 8, *["wide"] * 4, "zeros", "odd"]))
    x = torch.zeros(shape) if kind == "zeros" else torch.randn(shape, generator=generator)
    if kind == "wide":
        x = x * 2.0 ** torch.randint(-30, 12, shape, generator=generator)
    if kind == "odd":
        odd = torch.tensor([NAN, float("inf"), -float("inf"), -0.0, 1e-41, 3e38, 6e-8, 1.0])
        odd = odd[torch.randint(len(odd), shape, generator=generator)]
        x = torch.where(torch.rand(shape, generator=generator) < 0.1, odd, x)
    x = x.to(draw(st.sampled_from(DTYPES)))
    layout = draw(st.sampled_from(["whole", "within", "transposed", "expanded"]))
    if layout == "within":
        around = x.new_full([size + 2 for size in shape], NAN)
        return around[tuple(slice(1, 1 + size) for size in shape)].copy_(x)
    if layout == "transposed":
        return x.transpose(1, 2).contiguous().transpose(1, 2)
    return x[:1].expand(shape) if layout == "expanded" else x


@st.composite
def sources(draw, config, positions):
    """`source` and `row_source` for rows at these positions, NaN behind the prefixes that they have."""
    if config.max_source_len == 0 and draw(st.booleans()):
        return None, None
    shape = (
        config.rows_per_request,
        config.num_heads,
        config.max_source_len + draw(st.integers(0, 1)),
        2 * config.head_dim,
    )
    bank = draw(tensors(SOURCES, *shape))
    storage = draw(tensors(3, *shape))
    numbers = torch.tensor(draw(st.lists(st.integers(0, 2), min_size=len(positions), max_size=len(positions))))
    numbers = numbers.to(draw(st.sampled_from([torch.int32, torch.int64])))
    for x, entry_of in (
        (bank, lambda row, p: p.source),
        (storage, lambda row, p: int(numbers[row]) if p.source < 0 else -1),
    ):
        lengths = {}
        for row, position in enumerate(positions):
            if position is not None:
                entry = 0 if x.stride(0) == 0 else entry_of(row, position)
                lengths[entry] = max(lengths.get(entry, 0), position.source_len)
        for entry in range(1 if x.stride(0) == 0 else len(x)):
            x[entry, :, :, lengths.get(entry, 0) :] = NAN
    for row, position in enumerate(positions):
        if position is None or position.source >= 0 or position.source_len == 0:
            numbers[row] = 1000  # read by nobody
    return bank, (storage, numbers)


@st.composite
def biases(draw, config, batch, tokens, max_retained):
    """A score term by distance; a part of it masks."""
    entries = config.query_window + 1 if config.query_window is not None else max_retained + 2 * tokens - 1
    entries = max(0, entries + draw(st.sampled_from([0, 0, 0, 1, -1])))
    bias = draw(tensors(batch, config.query_heads, tokens, entries))
    if draw(st.booleans()) and bias.stride(0) != 0:
        bias[..., :: draw(st.integers(1, 3))] = -float("inf")
    return bias
