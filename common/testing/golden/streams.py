"""The streams of the golden traces: together they go through every feature, in both numeric paths.

Layer 0 takes the default path and layer 1 the ieee one, with the same tensors. Inputs come from the raw bits of a
generator whose stream numpy promises to keep, so that every machine makes the same ones.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import product
from typing import Any

import numpy as np
import torch
from torch import Tensor

from boundedkv.config import FLOAT_DTYPES, BoundedKVConfig, SinkWindow
from boundedkv.step import (
    AdmitOutcome,
    BoundedKVStep,
    BucketKey,
    GraphSlotSpec,
    Segment,
    SlotLease,
    StepContext,
    StreamPosition,
)
from boundedkv.testing.traces import Recording

F32, F16, BF16 = FLOAT_DTYPES
NAN, INF = float("nan"), float("inf")
SHORT = SinkWindow(2, 3)


class Driver:
    """A recorded manager, driven step by step.

    Args:
        manager: the manager.
        source: what every layer is given as `source`.
        row_source: what every layer is given as `row_source`.
    """

    def __init__(
        self, manager: Recording, source: Tensor | None = None, row_source: tuple[Tensor, Tensor] | None = None
    ) -> None:
        """Start with no request known."""
        self.manager = manager
        self.positions: dict[str, StreamPosition] = {}
        self.banks = {"source": source, "row_source": row_source}
        self._drawn = 0

    def normal(self, *shape: int, dtype: torch.dtype = F32) -> Tensor:
        """Numbers that look normal; others each time."""
        self._drawn += 1
        return normal(self._drawn, *shape, dtype=dtype)

    def step(self, spans: Mapping[str, int], tokens: Mapping[str, int] | None = None, **attend: Any) -> AdmitOutcome:
        """One whole step: admit, plan, attend in each layer, commit; a refused one stops there."""
        step, ctx = self.declare(spans, tokens)
        outcome = self.manager.admit(step, ctx)
        if outcome.ok:
            self.manager.plan(step, ctx)
            self.attend(len(spans), max(1, *spans.values(), *(tokens or {}).values()), **attend)
            self.commit(step, ctx)
        return outcome

    def declare(
        self, spans: Mapping[str, int], tokens: Mapping[str, int] | None = None, **context: Any
    ) -> tuple[BoundedKVStep, StepContext]:
        """A step in which each request writes its span from where it stands."""
        positions = {rid: self.positions.setdefault(rid, StreamPosition(0, 0)) for rid in spans}
        segments = tuple(Segment(rid, span) for rid, span in spans.items())
        return BoundedKVStep(segments, positions, dict(tokens or {})), StepContext(tuple(spans), **context)

    def attend(
        self,
        requests: int,
        tokens: int,
        dtypes: tuple[torch.dtype, ...] = (F32, F32, F32),
        spoil: Callable[[Tensor, Tensor, Tensor], None] | None = None,
        **others: Any,
    ) -> None:
        """Attend in each layer with the same fresh tensors; `spoil` may change them first."""
        c = self.manager.config
        rows = requests * c.rows_per_request
        heads = (c.query_heads, c.num_heads, c.num_heads)
        q, k, v = (
            self.normal(rows, count, tokens, c.head_dim, dtype=dtype)
            for count, dtype in zip(heads, dtypes, strict=True)
        )
        if spoil is not None:
            spoil(q, k, v)
        for layer_idx in range(c.num_layers):
            self.manager.attend(layer_idx, q, k, v, ieee=layer_idx % 2 == 1, **{**self.banks, **others})

    def commit(self, step: BoundedKVStep, ctx: StepContext) -> None:
        """Commit a step and count its spans."""
        self.manager.commit(step, ctx)
        for rid, span, _ in step.segments:
            self.positions[rid] = self.positions[rid]._replace(written=self.positions[rid].written + span)

    def look(self) -> None:
        """Record every slot of every layer."""
        for layer_idx in range(self.manager.config.num_layers):
            self.manager.layer(layer_idx)


def normal(seed: int, *shape: int, dtype: torch.dtype = F32) -> Tensor:
    """Sums of four 16-bit numbers, centred: of mean 0 and a deviation of 1.15, the same on every machine."""
    raw = np.random.PCG64(seed).random_raw(int(np.prod(shape)))
    quarters = np.stack([(raw >> np.uint64(shift)) & np.uint64(0xFFFF) for shift in (0, 16, 32, 48)]).astype(np.int64)
    numbers = (quarters.sum(axis=0) - 2 * 0xFFFF) * 2.0**-15
    return torch.from_numpy(numbers.astype(np.float32)).reshape(shape).to(dtype)


def config(head_dim: int = 4, retention: Any = SHORT, **others: Any) -> BoundedKVConfig:
    """A small pool of two layers."""
    settings = {"num_layers": 2, "num_heads": 1, "max_slots": 2} | others
    return BoundedKVConfig(head_dim=head_dim, retention=retention, **settings)


def retention_by_source(source_len: int) -> SinkWindow:
    """Sinks shorter and longer than the source, windows that change with it."""
    return (SinkWindow(2, 4), SinkWindow(3, 2), SinkWindow(0, 3), SinkWindow(4, 3), SinkWindow(2, 3))[source_len]


# The streams: what each does with a fresh recorded manager of its config.


def lone(manager: Recording, spans: tuple[int, ...] = (1, 2, 5, 1, 0, 9, 1), **attend: Any) -> None:
    """One request: its sinks fill, its ring wraps, a span exceeds the ring, a step reads only."""
    driver = Driver(manager)
    for span in spans:
        driver.step({"a": span}, **attend)
    driver.look()


def two(manager: Recording) -> None:
    """Two requests of different lengths in one batch, either first."""
    driver = Driver(manager)
    driver.step({"a": 3, "b": 1}, tokens={"b": 2})
    driver.step({"b": 4, "a": 2})
    driver.step({"a": 1, "b": 1}, tokens={"a": 2, "b": 1})
    driver.look()


def few(manager: Recording) -> None:
    """One request, three steps, for pools of many rows and heads."""
    lone(manager, (2, 4, 1))


def element_types(manager: Recording) -> None:
    """Every triple of element types for q, k and v; the source's and the score term's take turns."""
    driver = Driver(manager)
    for turn, dtypes in enumerate(product(FLOAT_DTYPES, repeat=3)):
        if turn % 9 == 0:
            driver.manager.remove_request("a")
            driver.positions["a"] = StreamPosition(2, 0)
        if turn % 3 == FLOAT_DTYPES.index(manager.config.dtype):
            bank = normal(99, 1, 1, 1, 2, 2 * manager.config.head_dim, dtype=FLOAT_DTYPES[turn // 9])
            bias = driver.normal(1, 1, 1, 9, dtype=FLOAT_DTYPES[(turn // 3) % 3])
            driver.step({"a": 1}, dtypes=dtypes, source=bank, rel_bias=bias)
    driver.look()


def sources(manager: Recording) -> None:
    """Source prefixes empty, shorter and longer than the sinks, from a shared bank and by row."""
    size = (1, 1, 4, 2 * manager.config.head_dim)
    storage = normal(51, 3, *size)
    driver = Driver(manager, normal(50, 2, *size), (storage, torch.tensor([2, 0], dtype=torch.int32)))
    for first, second in ((StreamPosition(4, 0, 1), StreamPosition(1, 0, -1)), (StreamPosition(3, 0, -1), None)):
        driver.positions = {"a": first, "b": second or StreamPosition(2, 0, 0)}
        for spans in ({"a": 1, "b": 2}, {"b": 5, "a": 0}):
            driver.step(spans)
        driver.look()
        for rid in ("a", "b"):
            manager.remove_request(rid)


def score_terms(manager: Recording) -> None:
    """A score term by distance, with -inf that masks some keys, then all of them."""
    driver = Driver(manager)
    window = manager.config.query_window
    for turn, span in enumerate((2, 3, 1, 4)):
        entries = 2 * span + manager.config.max_retained if window is None else window + 1
        bias = driver.normal(1, manager.config.query_heads, span, entries)
        bias[..., turn::2] = -INF
        if turn == 2:
            bias[:] = -INF
        driver.step({"a": span}, rel_bias=bias)
    driver.look()


def poison(manager: Recording, **attend: Any) -> None:
    """NaN in every slot from the start; then odd numbers in q, k and v."""
    slots = range(manager.config.max_slots)
    for layer_idx in range(manager.config.num_layers):
        manager.write_slots(layer_idx, tuple(slots), torch.tensor(NAN, dtype=manager.config.dtype))

    def odd(q: Tensor, k: Tensor, v: Tensor) -> None:
        q[0, 0, 0, 0] = -0.0
        k[0, 0, 0, 1], v[0, 0, 0, 0], v[0, 0, 1, 1] = 3e38, -0.0, 1e-41

    driver = Driver(manager)
    driver.step({"a": 2}, tokens={"a": 3}, **attend)
    driver.step({"a": 2}, spoil=odd, **attend)
    driver.look()
    driver.step({"a": 2}, spoil=lambda q, k, v: q[0, 0, 1].fill_(NAN), **attend)
    driver.step({"a": 3}, spoil=lambda q, k, v: v[0, 0, 1, :2].fill_(INF), **attend)
    driver.step({"a": 3}, spoil=lambda q, k, v: k[0, 0, 2].fill_(NAN), **attend)
    driver.step({"a": 1}, **attend)
    driver.look()


def life(manager: Recording) -> None:
    """Refusals, rollback, rewind, reset, export and import, the end of requests."""
    driver = Driver(manager)
    manager.ingest_request("a")
    driver.step({"a": 4})
    driver.step({"a": 3, "b": 2})
    driver.step({"c": 1})  # no slot left
    right, driver.positions["a"] = driver.positions["a"], StreamPosition(0, 99)
    driver.step({"a": 1})  # not where its stream stands
    driver.positions["a"] = right
    step, ctx = driver.declare({"a": 1, "b": 1})
    _refused(lambda: manager.commit(step, ctx))
    _refused(lambda: manager.plan(*driver.declare({"d": 1})))
    manager.admit(step, ctx)
    manager.rollback_admit(step, ctx)
    _refused(lambda: manager.attend(0, normal(1, 2, 1, 1, 3), normal(2, 2, 1, 1, 4), normal(3, 2, 1, 1, 4)))
    manager.rewind_request("a", 6)
    _refused(lambda: manager.rewind_request("a", 1))
    driver.positions["a"] = StreamPosition(0, 6)
    driver.step({"a": 2})
    state = manager.export_request("a")
    manager.remove_request("b")
    manager.import_request("z", state)
    _refused(lambda: manager.import_request("a", state))
    driver.positions["z"] = driver.positions["a"]
    driver.step({"z": 2, "a": 1})
    manager.reset_request("z")
    driver.positions["z"] = StreamPosition(0, 0)
    driver.step({"z": 1})
    manager.reset_request("a", free=True)
    for rid in ("a", "z"):
        manager.holds(rid)
    for name in ("free_slots", "current"):
        getattr(manager, name)
    driver.look()


def graphs(manager: Recording) -> None:
    """Leases with padding rows, and attends with the plan of the capture, as its replays launch them."""
    bucket = BucketKey("main", 3, 2)
    lease = SlotLease(0, bucket)
    manager.build_accelerator_graph_buffers([GraphSlotSpec(bucket, 0)], 3, 2)
    driver = Driver(manager)
    pads = ("pad0", "pad1", "pad2")
    empty = driver.declare({}, capture=True, slot_lease=lease, padded_request_ids=pads)
    manager.admit(*empty)
    captured = manager.plan(*empty)
    driver.attend(3, 2, plan=captured)
    for spans in ({"a": 2}, {"b": 1, "a": 2}, {"b": 2}):
        rows = (*spans, *pads)[:3]
        step, ctx = driver.declare(spans, slot_lease=lease, padded_request_ids=rows)
        manager.admit(step, ctx)
        manager.plan(step, ctx)
        driver.attend(3, 2, plan=captured)
        driver.commit(step, ctx)
    driver.look()


def splits(manager: Recording) -> None:
    """A source of more than four splits."""
    source_len = manager.config.max_source_len
    driver = Driver(manager, normal(7, 1, 1, 1, source_len, 2 * manager.config.head_dim, dtype=F16))
    driver.positions["a"] = StreamPosition(source_len, 0)
    driver.step({"a": 1})


def serving(manager: Recording, steps: int = 40) -> None:
    """Requests come and go at random; each starts with a prompt and goes on token by token."""
    draw = np.random.PCG64(steps)
    driver = Driver(manager)
    alive: list[str] = []
    for turn in range(steps):
        if len(alive) < manager.config.max_slots and draw.random_raw() % 3 == 0:
            alive.append(f"r{turn}")
        spans = {rid: 1 if rid in driver.positions else 2 + int(draw.random_raw()) % 30 for rid in alive}
        if spans:
            driver.step(spans)
        if alive and draw.random_raw() % 4 == 0:
            manager.remove_request(alive.pop(int(draw.random_raw()) % len(alive)))
    driver.look()


def _refused(call: Callable[[], object]) -> None:
    try:
        call()
    except (RuntimeError, ValueError):
        return
    raise AssertionError("the call was to be refused")


Stream = tuple[BoundedKVConfig, Callable[[Recording], None]]

STREAMS: dict[str, Stream] = {
    "sinks-and-window": (config(16), lone),
    "no-sink": (config(3, SinkWindow(0, 4)), two),
    "nothing-retained": (config(1, SinkWindow(0, 0)), lambda manager: lone(manager, (2, 1))),
    "window-includes-step": (config(5, SinkWindow(1, 5, True)), lone),
    "query-window": (config(6, SinkWindow(1, 4), query_window=3), two),
    "grouped-heads-two-rows": (
        config(8, num_heads=2, num_query_heads=4, rows_per_request=2),
        lambda manager: lone(manager, (2, 4)),
    ),
    "reversed": (config(4, SinkWindow(2, 4), reverse_step_order=True), two),
    "spare-and-scale": (config(4, SinkWindow(1, 2), spare=2, scale=-0.75), few),
    "types-float32": (config(2, SinkWindow(3, 3), max_source_len=2, dtype=F32), element_types),
    "types-float16": (config(2, SinkWindow(3, 3), max_source_len=2, dtype=F16), element_types),
    "types-bfloat16": (config(2, SinkWindow(3, 3), max_source_len=2, dtype=BF16), element_types),
    "sources": (config(4, retention_by_source, max_source_len=4), sources),
    "score-terms": (config(24, num_query_heads=2), score_terms),
    "score-terms-query-window": (config(4, SinkWindow(0, 4), query_window=3), score_terms),
    "poison": (config(4), poison),
    "poison-halves": (config(4, dtype=F16), lambda manager: poison(manager, dtypes=(BF16, F32, F16))),
    "life": (config(4, SinkWindow(1, 3), spare=2), life),
    "graphs": (config(4, SinkWindow(1, 3)), graphs),
    "head-dim-64": (config(64, SinkWindow(1, 2), dtype=BF16), few),
    "head-dim-256": (config(256, SinkWindow(1, 1), max_slots=1, dtype=F16), lambda manager: lone(manager, (2, 1))),
    "splits": (config(1, SinkWindow(2, 2060), max_source_len=2060, max_slots=1, dtype=BF16), splits),
}

LARGER: dict[str, Stream] = {
    **{
        f"serving-{dtype}".replace("torch.", ""): (
            config(128, SinkWindow(4, 64), num_heads=2, num_query_heads=8, max_slots=6, dtype=dtype),
            serving,
        )
        for dtype in FLOAT_DTYPES
    },
    "serving-query-window": (config(64, SinkWindow(4, 24), num_heads=2, query_window=20), serving),
    "serving-two-rows": (config(64, SinkWindow(4, 30, True), rows_per_request=2, reverse_step_order=True), serving),
}
