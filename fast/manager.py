"""The fast manager: what is known of each slot in arrays, a step's rows handled together."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from typing import NamedTuple
from weakref import WeakKeyDictionary

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from boundedkv import refusals
from boundedkv.attend_checks import RowSource
from boundedkv.config import BoundedKVConfig
from boundedkv.fast import launch
from boundedkv.fast.planner import Batch, Ints, Planner
from boundedkv.fast.runtime import require_device
from boundedkv.manager import BoundedKVManager
from boundedkv.plan import ALL_TOKENS, READS, ROW_INTS, SINK_SOURCE, SOURCE, WINDOW_SOURCE, WRITES, BoundedPlan, decode
from boundedkv.step import (
    ADMIT_OK,
    AdmitOutcome,
    AdmitRuntimeError,
    BoundedKVStep,
    GraphSlotSpec,
    SlotLease,
    StepContext,
)
from boundedkv.step_checks import real_segments
from boundedkv.transfer import Stream, extent

NO_GRANT = 0


class Declared(NamedTuple):
    """A step's real segments as arrays; a request without a slot has slot -1."""

    rids: list[str]
    slot: Ints
    span: Ints
    source_len: Ints
    written: Ints
    source: Ints


class FastManager(BoundedKVManager):
    """The manager to serve with: numpy on the host, Triton on the device. See `BoundedKVManager`."""

    def __init__(
        self, config: BoundedKVConfig, device: torch.device | str, kv_dtype: torch.dtype | None = None
    ) -> None:
        """Allocate the slots, all of them free."""
        super().__init__(config, device, kv_dtype)
        require_device(self.device)
        c = self.config
        shape = (c.max_slots, c.rows_per_request, c.num_heads, c.slot_tokens, 2 * c.head_dim)
        self._slots = [self._zeros(shape, c.dtype) for _ in range(c.num_layers)]
        self._planner = Planner(c)
        self._slot_of: dict[str, int] = {}
        self._free = list(range(c.max_slots))  # a heap: the lowest number first
        self._written, self._source_len, self._source, self._reach = np.zeros((4, c.max_slots), dtype=np.int64)
        # Grants are numbered; one slot has at most one of each kind. Spans are kept beside the grants they belong to.
        self._next_grant = 1
        self._fresh, self._pending, self._committed = np.zeros((3, c.max_slots), dtype=np.int64)
        self._pending_span, self._committed_span = np.zeros((2, c.max_slots), dtype=np.int64)
        self._grants: WeakKeyDictionary[BoundedKVStep, dict[str, int]] = WeakKeyDictionary()
        self._lease_tables: dict[SlotLease, Tensor] = {}

    # The step lifecycle.

    def _declared(self, step: BoundedKVStep, ctx: StepContext) -> Declared:
        segments = real_segments(step, ctx)
        rids = [segment.request_id for segment in segments]
        positions = np.array([step.positions[rid] for rid in rids], dtype=np.int64).reshape(-1, 3)
        return Declared(
            rids=rids,
            slot=np.array([self._slot_of.get(rid, -1) for rid in rids], dtype=np.int64),
            span=np.array([segment.span for segment in segments], dtype=np.int64),
            source_len=positions[:, 0],
            written=positions[:, 1],
            source=positions[:, 2],
        )

    def _admit(self, step: BoundedKVStep, ctx: StepContext) -> AdmitOutcome:
        declared = self._declared(step, ctx)
        known = declared.slot >= 0
        refusal = self._contradiction(declared, known)
        if refusal is not None:
            return AdmitOutcome(ok=False, reason=refusal)
        fresh = np.flatnonzero(~known)
        if len(fresh) > len(self._free):
            first = declared.rids[fresh[len(self._free)]]
            return AdmitOutcome(ok=False, reason=refusals.no_slot_left(first, len(fresh), len(self._free)))
        for i in fresh.tolist():
            declared.slot[i] = self._slot_of[declared.rids[i]] = heapq.heappop(self._free)
        slots = declared.slot
        self._source_len[slots] = declared.source_len
        self._source[slots] = declared.source
        self._start_over(slots[fresh])
        self._fresh[slots[fresh]] = NO_GRANT
        self._grant(step, declared)
        self._fresh[slots[fresh]] = self._pending[slots[fresh]]
        return ADMIT_OK

    def _contradiction(self, declared: Declared, known: NDArray[np.bool_]) -> AdmitRuntimeError | None:
        written = np.where(known, self._written[declared.slot], 0)
        other_written = declared.written != written
        other_length = known & (declared.source_len != self._source_len[declared.slot])
        other_source = known & (declared.source != self._source[declared.slot])
        wrong = np.flatnonzero(other_written | other_length | other_source)
        if not len(wrong):
            return None
        i = int(wrong[0])
        rid, slot = declared.rids[i], declared.slot[i]
        if other_written[i]:
            return refusals.wrong_written(rid, int(declared.written[i]), int(written[i]))
        if other_length[i]:
            return refusals.changed_source_len(rid, int(declared.source_len[i]), int(self._source_len[slot]))
        return refusals.changed_source(rid, int(declared.source[i]), int(self._source[slot]))

    def _grant(self, step: BoundedKVStep, declared: Declared) -> None:
        grants = self._grants.setdefault(step, {})
        for rid, slot, span in zip(declared.rids, declared.slot.tolist(), declared.span.tolist(), strict=True):
            if self._pending[slot] == NO_GRANT or grants.get(rid) != self._pending[slot]:
                grants[rid] = self._pending[slot] = self._next_grant
                self._pending_span[slot] = span
                self._next_grant += 1

    def _granted(self, step: BoundedKVStep, declared: Declared) -> Ints:
        """The grants that this step's admit saw, or for a step admitted as another object, those of equal numbers."""
        grants = self._grants.get(step, {})
        slot = declared.slot
        held = slot >= 0
        start = self._written[slot] - self._committed_span[slot]
        is_pending = (
            held
            & (self._pending[slot] != NO_GRANT)
            & (declared.written == self._written[slot])
            & (declared.span == self._pending_span[slot])
        )
        is_committed = (
            held
            & (self._committed[slot] != NO_GRANT)
            & (declared.written == start)
            & (declared.span == self._committed_span[slot])
        )
        by_numbers = np.where(is_pending, self._pending[slot], np.where(is_committed, self._committed[slot], NO_GRANT))
        seen = np.array([grants.get(rid, -1) for rid in declared.rids], dtype=np.int64)
        return np.where(seen >= 0, seen, by_numbers)

    def _rollback_admit(self, step: BoundedKVStep, ctx: StepContext) -> None:
        declared = self._declared(step, ctx)
        grant = self._granted(step, declared)
        mine = (declared.slot >= 0) & (grant != NO_GRANT)
        fresh = mine & (grant == self._fresh[declared.slot])
        pending = mine & ~fresh & (grant == self._pending[declared.slot])
        self._pending[declared.slot[pending]] = NO_GRANT
        for i in np.flatnonzero(fresh).tolist():
            self._remove_request(declared.rids[i])

    def _plan(self, step: BoundedKVStep, ctx: StepContext) -> BoundedPlan:
        c = self.config
        lines = np.zeros((len(ctx.row_ids), ROW_INTS), dtype=np.int32)
        if ctx.capture:
            rows = decode(lines)
            table = self._table(ctx.slot_lease, lines)
            return BoundedPlan(table, rows, c.max_retained, c.slot_tokens, c.max_source_len > 0, c.max_source_len > 0)
        declared = self._declared(step, ctx)
        if (declared.slot < 0).any():
            self._raise_not_admitted(declared, ctx)
        tokens = np.array([step.tokens.get(rid, ALL_TOKENS) for rid in declared.rids], dtype=np.int64)
        line_of = {rid: line for line, rid in enumerate(ctx.row_ids)}
        order = [line_of[rid] for rid in declared.rids]
        lines[order] = self._planner.table(
            Batch(declared.slot, declared.source_len, declared.written, declared.source, declared.span, tokens)
        )
        self._reach[declared.slot] = np.maximum(self._reach[declared.slot], declared.written + declared.span)
        lengths = lines[:, READS + 1 : WRITES : 2]
        reads = (lengths[:, SINK_SOURCE] > 0) | (lengths[:, WINDOW_SOURCE] > 0)
        return BoundedPlan(
            table=self._table(ctx.slot_lease, lines),
            rows=decode(lines),
            max_retained=int(lengths.sum(1).max(initial=0)),
            max_span=int(declared.span.max(initial=0)),
            reads_source=bool((reads & (lines[:, SOURCE] >= 0)).any()),
            reads_row_source=bool((reads & (lines[:, SOURCE] < 0)).any()),
        )

    def _raise_not_admitted(self, declared: Declared, ctx: StepContext) -> None:
        missing = {rid for rid, slot in zip(declared.rids, declared.slot.tolist(), strict=True) if slot < 0}
        raise refusals.not_admitted(next(rid for rid in ctx.row_ids if rid in missing))

    def _table(self, lease: SlotLease | None, lines: NDArray[np.int32]) -> Tensor:
        """The lines on the device: in a new table, or in a lease's own, whose address never changes."""
        if lease is None:
            host = torch.from_numpy(lines)
            return host if self.device.type == "cpu" else host.pin_memory().to(self.device, non_blocking=True)
        table = self._lease_table(lease)
        padded = np.zeros(table.shape, dtype=np.int32)
        padded[: len(lines)] = lines
        host = torch.from_numpy(padded)
        table.copy_(host if self.device.type == "cpu" else host.pin_memory(), non_blocking=True)
        return table

    def _lease_table(self, lease: SlotLease) -> Tensor:
        if lease not in self._lease_tables:
            self._lease_tables[lease] = self._zeros((lease.bucket.bs, ROW_INTS), torch.int32)
        return self._lease_tables[lease]

    def _attend(
        self,
        layer_idx: int,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        plan: BoundedPlan,
        source: Tensor | None,
        row_source: RowSource | None,
        rel_bias: Tensor | None,
        ieee: bool,
    ) -> Tensor:
        inputs = launch.Inputs(q, k, v, self._slots[layer_idx], source, row_source, rel_bias)
        out = launch.attend(self.config, plan, inputs, ieee)
        launch.write(self.config, plan, inputs)
        return out

    def _commit(self, step: BoundedKVStep, ctx: StepContext) -> None:
        declared = self._declared(step, ctx)
        slot, grant = declared.slot, self._granted(step, declared)
        pending = grant == self._pending[slot]
        fits = (grant != NO_GRANT) & (pending | (grant == self._committed[slot]))
        wrong = np.flatnonzero((slot < 0) | ~fits)
        if len(wrong):
            i = int(wrong[0])
            rid = declared.rids[i]
            if slot[i] < 0:
                raise refusals.not_admitted(rid)
            raise refusals.stale_commit(rid, step.positions[rid], int(declared.span[i]), int(self._written[slot[i]]))
        done = slot[pending]
        self._written[done] += self._pending_span[done]
        self._committed[done], self._committed_span[done] = self._pending[done], self._pending_span[done]
        self._pending[done] = self._fresh[done] = NO_GRANT

    # Requests.

    def _remove_request(self, rid: str) -> None:
        slot = self._slot_of.pop(rid, None)
        if slot is not None:
            heapq.heappush(self._free, slot)

    def _reset_request(self, rid: str) -> None:
        slot = self._slot_of.get(rid)
        if slot is not None:
            self._start_over(np.array([slot]))

    def _start_over(self, slots: Ints) -> None:
        self._written[slots] = self._reach[slots] = 0
        self._pending[slots] = self._committed[slots] = NO_GRANT

    def _rewind_request(self, rid: str, written: int) -> None:
        slot = self._slot_of.get(rid)
        if slot is None:
            raise refusals.not_admitted(rid)
        known = int(self._written[slot])
        reach = max(int(self._reach[slot]), known)
        if written > known or reach - written > self.config.spare:
            raise refusals.cannot_rewind(rid, written, known, self.config.spare, reach)
        self._written[slot] = written
        self._pending[slot] = self._committed[slot] = NO_GRANT

    def _export_request(self, rid: str) -> Stream:
        slot = self._slot_of.get(rid)
        if slot is None:
            raise refusals.not_admitted(rid)
        source_len, written, reach = (int(known[slot]) for known in (self._source_len, self._written, self._reach))
        sinks, ring = self._planner.places(source_len, extent(self.config, rid, source_len, written, reach))
        sink, window, _ = self.config.retentions[source_len]
        return Stream(
            source_len=source_len,
            source=int(self._source[slot]),
            written=written,
            reach=reach,
            sink=sink,
            window=window,
            spare=self.config.spare,
            sinks=torch.stack([layer[slot][..., torch.from_numpy(sinks), :] for layer in self._slots]),
            ring=torch.stack([layer[slot][..., torch.from_numpy(ring), :] for layer in self._slots]),
        )

    def _import_request(self, rid: str, stream: Stream) -> None:
        held = extent(self.config, rid, stream.source_len, stream.written, stream.reach)
        sinks, ring = map(torch.from_numpy, self._planner.places(stream.source_len, held))
        sink_entries, ring_entries = stream.sinks.to(self.device), stream.ring.to(self.device)
        slot = self._slot_of[rid] = heapq.heappop(self._free)
        for layer, layer_sinks, layer_ring in zip(self._slots, sink_entries, ring_entries, strict=True):
            layer[slot][..., sinks, :] = layer_sinks
            layer[slot][..., ring, :] = layer_ring
        self._start_over(np.array([slot]))
        self._fresh[slot] = NO_GRANT
        self._source_len[slot], self._source[slot] = stream.source_len, stream.source
        self._written[slot], self._reach[slot] = stream.written, stream.reach

    def _holds(self, rid: str) -> bool:
        return rid in self._slot_of

    def _free_slots(self) -> int:
        return len(self._free)

    def _layer(self, layer_idx: int) -> Tensor:
        return self._slots[layer_idx]

    # The engine around it.

    def _build_graph_buffers(self, slots: Sequence[GraphSlotSpec]) -> None:
        for bucket, slot in slots:
            self._lease_table(SlotLease(slot, bucket))

    def _cleanup(self) -> None:
        self._slot_of.clear()
        self._lease_tables.clear()
        self._slots.clear()
