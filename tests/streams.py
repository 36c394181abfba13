"""What these tests share: a manager driven by hand, the definition of what a query sees, attention in float64."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from boundedkv import (
    BoundedKVConfig,
    BoundedKVStep,
    BoundedPlan,
    Segment,
    SinkWindow,
    StepContext,
    StreamPosition,
    build,
)
from boundedkv.plan import Row

NAN = float("nan")
INF = float("inf")
WORDS = {torch.float32: torch.int32, torch.float16: torch.int16, torch.bfloat16: torch.int16}

on_both = pytest.mark.parametrize("backend", ["reference", "fast"])


def device_of(backend: str) -> str:
    return "cuda" if backend == "fast" and torch.cuda.is_available() else "cpu"


def bits(x: Tensor) -> Tensor:
    return x.detach().cpu().contiguous().view(WORDS[x.dtype])


def assert_same(got: Tensor, expected: Tensor, what: str = "result") -> None:
    """Compare bits: -0 is not +0, and a NaN equals only a NaN of the same bits."""
    assert (got.dtype, got.shape) == (expected.dtype, expected.shape), what
    differ = (bits(got) != bits(expected)).nonzero().tolist()
    if differ:
        at = tuple(differ[0])
        told = f"{what}{list(at)} = {got[at].item()!r}, but should be {expected[at].item()!r}"
        raise AssertionError(f"{told} ({len(differ)} of {got.numel()} elements differ)")


# What a stream brings of its own.


class Own(NamedTuple):
    """A stream's own tokens, by how many were written before: q [rows, Hq, N, D], k and v [rows, H, N, D]."""

    q: Tensor
    k: Tensor
    v: Tensor

    def cut(self, start: int, stop: int, width: int | None = None, pad: float = 0.0) -> Own:
        """Tokens [start, stop), filled up to `width` tokens with `pad`."""
        short = 0 if width is None else width - (stop - start)
        return Own(*(torch.nn.functional.pad(x[:, :, start:stop], (0, 0, 0, short), value=pad) for x in self))

    def to(self, dtype: torch.dtype) -> Own:
        return Own(*(x.to(dtype) for x in self))


def normal(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def random_own(config: BoundedKVConfig, tokens: int, seed: int = 0) -> Own:
    c, size = config, (tokens, config.head_dim)
    return Own(
        normal(3 * seed, c.rows_per_request, c.query_heads, *size),
        normal(3 * seed + 1, c.rows_per_request, c.num_heads, *size),
        normal(3 * seed + 2, c.rows_per_request, c.num_heads, *size),
    )


def random_source(config: BoundedKVConfig, sources: int, entries: int, seed: int = 0) -> Tensor:
    c = config
    return normal(1000 + seed, sources, c.rows_per_request, c.num_heads, entries, 2 * c.head_dim)


def stack(parts: Iterable[Own]) -> Own:
    """A batch of several requests' tokens, one under the other."""
    return Own(*(torch.cat(tensors) for tensors in zip(*parts, strict=True)))


# A manager driven by hand.


class Drive:
    """A manager, and where each request's stream stands."""

    def __init__(self, backend: str, **settings: Any) -> None:
        settings = {"num_layers": 1, "num_heads": 1, "head_dim": 4, "max_slots": 4} | settings
        self.manager = build(BoundedKVConfig(**settings), device_of(backend), backend=backend)
        self.config = self.manager.config
        self.positions: dict[str, StreamPosition] = {}

    def declare(
        self, spans: Mapping[str, int], tokens: Mapping[str, int] | None = None, **context: Any
    ) -> tuple[BoundedKVStep, StepContext]:
        """A step in which each request writes its span from where it stands; rows in the order of `spans`."""
        positions = {rid: self.positions.setdefault(rid, StreamPosition(0, 0)) for rid in spans}
        segments = tuple(Segment(rid, span) for rid, span in spans.items())
        return BoundedKVStep(segments, positions, tokens or {}), StepContext(tuple(spans), **context)

    def plan(self, spans: Mapping[str, int], tokens: Mapping[str, int] | None = None) -> BoundedPlan:
        """Admit and plan, no more."""
        step, ctx = self.declare(spans, tokens)
        outcome = self.manager.admit(step, ctx)
        assert outcome.ok, outcome.reason
        return self.manager.plan(step, ctx)

    def attend(self, own: Own, layer: int = 0, **others: Any) -> Tensor:
        device = self.manager.device
        moved = {name: x.to(device) if isinstance(x, Tensor) else x for name, x in others.items()}
        return self.manager.attend(layer, *(x.to(device) for x in own), **moved).cpu()

    def advance(self, spans: Mapping[str, int]) -> None:
        """Commit a step that was planned, or one like it."""
        self.manager.commit(*self.declare(spans))
        self.moved(spans)

    def moved(self, spans: Mapping[str, int]) -> None:
        for rid, span in spans.items():
            here = self.positions[rid]
            self.positions[rid] = here._replace(written=here.written + span)

    def step(
        self, spans: Mapping[str, int], own: Own, tokens: Mapping[str, int] | None = None, **others: Any
    ) -> Tensor:
        """One whole step."""
        step, ctx = self.declare(spans, tokens)
        outcome = self.manager.admit(step, ctx)
        assert outcome.ok, outcome.reason
        self.manager.plan(step, ctx)
        out = self.attend(own, **others)
        self.manager.commit(step, ctx)
        self.moved(spans)
        return out

    def stream(self, own: Own, spans: Sequence[int], rid: str = "a", **others: Any) -> Tensor:
        """A request's own tokens, cut into spans; the steps' results, joined: [rows, N, Hq, D]."""
        outs = []
        for span in spans:
            start = self.positions.setdefault(rid, StreamPosition(0, 0)).written
            outs.append(self.step({rid: span}, own.cut(start, start + span), **others))
        return torch.cat(outs, dim=1)

    def jump(self, own: Own, spans: Mapping[str, int], written: int, **others: Any) -> Tensor:
        """Plan and attend a step declared to stand at `written`, committing nothing."""
        for rid in spans:
            if not self.manager.holds(rid):
                self.plan({rid: 0})
            self.positions[rid] = self.positions[rid]._replace(written=written)
        self.manager.plan(*self.declare(spans))
        return self.attend(own, **others)

    def slots(self, layer: int = 0) -> Tensor:
        return self.manager.layer(layer).cpu().clone()

    def poison(self) -> None:
        for layer in range(self.config.num_layers):
            self.manager.layer(layer).fill_(NAN)


# What a plan's row means, expanded.


def read_places(row: Row) -> list[tuple[str, int]]:
    """The entries a row reads, in its order: which memory, and where in it."""
    _, layout, _ = row
    memories = ("source", "slot", "source", "slot", "slot")
    runs = zip(memories, layout.reads, strict=True)
    return [(memory, start + i) for memory, (start, length) in runs for i in range(length)]


def write_places(row: Row, reverse: bool = False) -> list[tuple[int, int]]:
    """The own tokens that a row writes, in its order, and where each goes in the slot."""
    _, layout, _ = row
    sign = -1 if reverse else 1
    return [(token + sign * i, start + i) for token, start, length in layout.writes for i in range(length)]


# The definition.


class Everything:
    """A stream that keeps every entry it was ever given, and says which of them a step may see.

    Entries can be anything that tells them apart. By default they are their own stream positions.
    """

    def __init__(self, config: BoundedKVConfig, source_len: int = 0) -> None:
        kept = config.retention
        self.sink, self.window, self.includes_step = kept if isinstance(kept, SinkWindow) else kept(source_len)
        self.query_window, self.reverse = config.query_window, config.reverse_step_order
        self.source_len = source_len
        self.entries: list[Any] = list(range(source_len))

    def retained(self, span: int = 0) -> list[int]:
        """The stream positions that are kept when a step of `span` starts."""
        n = len(self.entries)
        window = max(0, self.window - span) if self.includes_step else self.window
        return [s for s in range(n) if s < self.sink or n - s <= window]

    def sees(self, t: int, tokens: int, span: int) -> list[int]:
        """The stream positions that query t of a step of `tokens` tokens sees."""
        n = len(self.entries)
        if t >= tokens:
            return []
        there = self.retained(span) + list(range(n, n + tokens))
        if self.query_window is None:
            return there
        return [s for s in there if s <= n + t and (s < self.sink or n + t - s <= self.query_window)]

    def join(self, span: int, own: Sequence[Any] | None = None) -> None:
        """The step's first `span` tokens become part of the stream."""
        n = len(self.entries)
        joining = list(range(n, n + span)) if own is None else list(own[:span])
        self.entries += joining[::-1] if self.reverse else joining


def attend64(q: Tensor, k: Tensor, v: Tensor, scale: float, bias: Tensor | None = None) -> Tensor:
    """Softmax attention in float64 over all of k and v: [..., T, D] and [..., N, D] -> [..., T, D]."""
    scores = q.double() @ k.double().mT
    if bias is not None:
        scores = scores + bias.double()
    return torch.softmax(scores * scale, dim=-1) @ v.double()


# The membership probe: with q = 0 all weights are alike, and a one-hot v shows which keys take part.


def lane_of(s: int, sink: int, lanes: int) -> int:
    """The element that stands for a stream position: sinks have their own, the others take turns."""
    return s if s < sink else sink + (s - sink) % (lanes - sink)


def probe(drive: Drive, positions: Sequence[int], sink: int) -> Own:
    """Tokens at these stream positions, made so that a result shows what it was made of."""
    c = drive.config
    one_hot = torch.zeros(len(positions), c.head_dim)
    for i, s in enumerate(positions):
        one_hot[i, lane_of(s, sink, c.head_dim)] = 1.0
    v = one_hot.expand(c.rows_per_request, c.num_heads, -1, -1).contiguous()
    q = torch.zeros(c.rows_per_request, c.query_heads, len(positions), c.head_dim)
    return Own(q, torch.ones_like(v), v)


def shares(visible: Sequence[int], sink: int, lanes: int) -> Tensor:
    """What the probe gives for a query that sees these positions: an equal share each, rounded once."""
    there = [lane_of(s, sink, lanes) for s in visible]
    assert len(set(there)) == len(there), "two visible positions share a lane: the probe needs a larger head_dim"
    expected = torch.zeros(lanes)
    expected[there] = torch.tensor(1.0) / max(1, len(visible))
    return expected


def probe_step(
    drive: Drive, stream: Everything, span: int, tokens: int | None = None, rid: str = "a", **others: Any
) -> list[list[int]]:
    """One whole step of the probe, held to the definition; what each query was to see."""
    tokens = span if tokens is None else tokens
    n = len(stream.entries)
    out = drive.step({rid: span}, probe(drive, range(n, n + tokens), stream.sink), **others)
    labels = [*stream.entries, *range(n, n + tokens)]
    sets = [[labels[s] for s in stream.sees(t, tokens, span)] for t in range(tokens)]
    expected = [shares(visible, stream.sink, drive.config.head_dim) for visible in sets]
    assert_same(out, torch.stack(expected)[:, None].expand_as(out), f"queries at {n}.., which see {sets}: result")
    stream.join(span)
    return sets
