"""The reference manager: what is known of a request in a dict, one row at a time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from boundedkv import refusals
from boundedkv.attend_checks import RowSource
from boundedkv.config import BoundedKVConfig
from boundedkv.manager import BoundedKVManager
from boundedkv.plan import (
    EMPTY_ROW,
    ROW_INTS,
    SINK_SLOT,
    SINK_SOURCE,
    BoundedPlan,
    Row,
    RowLayout,
    decode,
    encode,
)
from boundedkv.reference.arithmetic import rounded
from boundedkv.reference.attention import attend
from boundedkv.reference.layout import place, row_layout
from boundedkv.step import (
    ADMIT_OK,
    AdmitOutcome,
    AdmitRuntimeError,
    BoundedKVStep,
    GraphSlotSpec,
    Segment,
    SlotLease,
    StepContext,
)
from boundedkv.step_checks import real_segments
from boundedkv.transfer import Stream, extent


@dataclass(eq=False)
class Grant:
    """What one `admit` let one request do: write `span` tokens behind `written`."""

    written: int
    span: int


@dataclass
class Request:
    """What is known of a request that holds a slot."""

    slot: int
    source_len: int
    source: int
    written: int = 0
    reach: int = 0  # the furthest that a planned step may have written
    fresh: Grant | None = None  # the grant that took the slot, until it is committed
    pending: Grant | None = None
    committed: Grant | None = None


class ReferenceManager(BoundedKVManager):
    """The definition of every call. See `BoundedKVManager`."""

    def __init__(
        self, config: BoundedKVConfig, device: torch.device | str, kv_dtype: torch.dtype | None = None
    ) -> None:
        """Allocate the slots, all of them free."""
        super().__init__(config, device, kv_dtype)
        c = self.config
        shape = (c.num_layers, c.max_slots, c.rows_per_request, c.num_heads, c.slot_tokens, 2 * c.head_dim)
        self._slots = self._zeros(shape, c.dtype)
        self._requests: dict[str, Request] = {}
        self._grants: WeakKeyDictionary[BoundedKVStep, dict[str, Grant]] = WeakKeyDictionary()
        self._lease_tables: dict[SlotLease, Tensor] = {}

    # The step lifecycle.

    def _admit(self, step: BoundedKVStep, ctx: StepContext) -> AdmitOutcome:
        segments = real_segments(step, ctx)
        for rid, _, _ in segments:
            refusal = self._contradiction(rid, step)
            if refusal is not None:
                return AdmitOutcome(ok=False, reason=refusal)
        taken = {request.slot for request in self._requests.values()}
        free = [slot for slot in range(self.config.max_slots) if slot not in taken]
        fresh = [rid for rid, _, _ in segments if rid not in self._requests]
        if len(fresh) > len(free):
            return AdmitOutcome(ok=False, reason=refusals.no_slot_left(fresh[len(free)], len(fresh), len(free)))
        for rid, slot in zip(fresh, free, strict=False):
            position = step.positions[rid]
            self._requests[rid] = Request(slot, position.source_len, position.source)
        for segment in segments:
            self._grant(segment, step, fresh=segment.request_id in fresh)
        return ADMIT_OK

    def _contradiction(self, rid: str, step: BoundedKVStep) -> AdmitRuntimeError | None:
        position = step.positions[rid]
        request = self._requests.get(rid)
        if request is None:
            return refusals.wrong_written(rid, position.written, 0) if position.written else None
        if position.written != request.written:
            return refusals.wrong_written(rid, position.written, request.written)
        if position.source_len != request.source_len:
            return refusals.changed_source_len(rid, position.source_len, request.source_len)
        if position.source != request.source:
            return refusals.changed_source(rid, position.source, request.source)
        return None

    def _grant(self, segment: Segment, step: BoundedKVStep, fresh: bool) -> None:
        rid = segment.request_id
        request = self._requests[rid]
        grants = self._grants.setdefault(step, {})
        if request.pending is None or grants.get(rid) is not request.pending:
            request.pending = grants[rid] = Grant(request.written, segment.span)
        if fresh:
            request.fresh = request.pending

    def _granted(self, segment: Segment, step: BoundedKVStep) -> Grant | None:
        """The grant that this step's admit saw; for a step admitted as another object, the one of equal numbers."""
        rid = segment.request_id
        grants = self._grants.get(step, {})
        if rid in grants:
            return grants[rid]
        request = self._requests[rid]
        for grant in (request.pending, request.committed):
            if grant is not None and (grant.written, grant.span) == (step.positions[rid].written, segment.span):
                return grant
        return None

    def _rollback_admit(self, step: BoundedKVStep, ctx: StepContext) -> None:
        for segment in real_segments(step, ctx):
            request = self._requests.get(segment.request_id)
            if request is None:
                continue
            grant = self._granted(segment, step)
            if grant is not None and grant is request.fresh:
                self._remove_request(segment.request_id)
            elif grant is not None and grant is request.pending:
                request.pending = None

    def _plan(self, step: BoundedKVStep, ctx: StepContext) -> BoundedPlan:
        rows = tuple(EMPTY_ROW if ctx.capture else self._row(rid, step, ctx) for rid in ctx.row_ids)
        table = self._table(ctx.slot_lease, len(rows))
        table.zero_()
        table[: len(rows)] = torch.from_numpy(encode(rows))
        if ctx.capture:
            c = self.config
            return BoundedPlan(table, rows, c.max_retained, c.slot_tokens, c.max_source_len > 0, c.max_source_len > 0)
        for segment in real_segments(step, ctx):
            request = self._requests[segment.request_id]
            request.reach = max(request.reach, step.positions[segment.request_id].written + segment.span)
        from_source = {source for _, layout, source in rows if layout.source_entries}
        return BoundedPlan(
            table=table,
            rows=rows,
            max_retained=max((layout.retained for _, layout, _ in rows), default=0),
            max_span=max((segment.span for segment in real_segments(step, ctx)), default=0),
            reads_source=any(source >= 0 for source in from_source),
            reads_row_source=-1 in from_source,
        )

    def _row(self, rid: str, step: BoundedKVStep, ctx: StepContext) -> Row:
        if ctx.is_padding_row(rid):
            return EMPTY_ROW
        if rid not in self._requests:
            raise refusals.not_admitted(rid)
        position = step.positions[rid]
        span = next(segment.span for segment in step.segments if segment.request_id == rid)
        layout = row_layout(self.config, position, span, step.tokens.get(rid))
        return self._requests[rid].slot, layout, position.source

    def _table(self, lease: SlotLease | None, num_rows: int) -> Tensor:
        if lease is None:
            return self._zeros((num_rows, ROW_INTS), torch.int32)
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
        own = rounded(
            torch.cat([k.float(), v.float()], dim=-1), self.config.dtype
        )  # [B * rows, H, T, 2D], as the slots will hold it
        out = q.new_zeros((q.shape[0], q.shape[2], q.shape[1], q.shape[3]))  # [B * rows, T, Hq, D]
        rows = decode(plan.table[: len(plan.rows)].cpu().numpy())  # as a captured graph does: the table, as it is now
        per_request = self.config.rows_per_request
        lines = [slice(b * per_request, (b + 1) * per_request) for b in range(len(rows))]
        for b, (slot, layout, index) in enumerate(rows):
            prefix = self._prefix(b, layout, index, source, row_source)
            positions, entries = self._entries(self._slots[layer_idx, slot], layout, prefix, own[lines[b]])
            bias = None if rel_bias is None else rel_bias[lines[b]]
            out[lines[b]] = rounded(self._attend_row(q[lines[b]], positions, entries, layout, bias, ieee), q.dtype)
        for b, (slot, layout, _) in enumerate(rows):
            self._write(self._slots[layer_idx, slot], layout, own[lines[b]])
        return out

    def _prefix(
        self, b: int, layout: RowLayout, index: int, source: Tensor | None, row_source: RowSource | None
    ) -> Tensor | None:
        """The row's source, [rows, H, L, 2D]; None where the row reads none."""
        if not layout.source_entries:
            return None
        if index >= 0:
            return None if source is None else source[index]
        return None if row_source is None else row_source[0][int(row_source[1][b])]

    def _entries(self, slot: Tensor, layout: RowLayout, prefix: Tensor | None, own: Tensor) -> tuple[Tensor, Tensor]:
        """What a row sees, in stream order: the positions [N], and the keys and values [rows, H, N, 2D] in float32."""
        tokens = min(layout.tokens, own.shape[2])
        places = (prefix, slot, prefix, slot, slot)
        parts = [
            place[:, :, read.start : read.start + read.length].float()
            for place, read in zip(places, layout.reads, strict=True)
            if place is not None and read.length
        ]
        sinks = layout.reads[SINK_SOURCE].length + layout.reads[SINK_SLOT].length
        window = layout.retained - sinks
        positions = [*range(sinks), *range(layout.length - window, layout.length + tokens)]
        entries = torch.cat([*parts, own[:, :, :tokens].float()], dim=2)
        return torch.tensor(positions, dtype=torch.int64, device=own.device), entries

    def _attend_row(
        self, q: Tensor, positions: Tensor, entries: Tensor, layout: RowLayout, rel_bias: Tensor | None, ieee: bool
    ) -> Tensor:
        """One row's queries [rows, Hq, T, D] over what it sees; returns [rows, T, Hq, D] in float32."""
        c = self.config
        rows, query_heads, own_tokens, _ = q.shape
        grouped = (rows, c.num_heads, query_heads // c.num_heads)
        t = torch.arange(own_tokens, device=q.device)[:, None]  # [T, 1]
        distance = layout.length + t - positions  # [T, N]
        visible = (t < layout.tokens).expand_as(distance)
        if c.query_window is not None:
            near = (distance >= 0) & (distance <= c.query_window)
            is_sink = (positions < layout.sink) & (distance >= 0)
            visible = visible & (near | is_sink)
        bias = None
        if rel_bias is not None:
            j = torch.arange(len(positions), device=q.device)
            entry = layout.retained + t - j + own_tokens - 1 if c.query_window is None else distance
            entry = torch.where(visible, entry, 0).expand(rows, query_heads, -1, -1)  # [rows, Hq, T, N]
            bias = rel_bias.float().gather(3, entry).unflatten(1, grouped[1:])  # [rows, H, group, T, N]
        out = attend(
            q=q.float().unflatten(1, grouped[1:]),  # [rows, H, group, T, D]
            k=entries[..., : c.head_dim].unsqueeze(2),  # [rows, H, 1, N, D]
            v=entries[..., c.head_dim :].unsqueeze(2),
            positions=positions,
            visible=visible,
            bias=bias,
            scale=c.score_scale,
            ieee=ieee,
        )
        return out.flatten(1, 2).transpose(1, 2)

    def _write(self, slot: Tensor, layout: RowLayout, own: Tensor) -> None:
        """The surviving part of a row's span into its slot [rows, H, cap, 2D]."""
        stride = -1 if self.config.reverse_step_order else 1
        for token, start, length in layout.writes:
            tokens = [token + stride * i for i in range(length)]
            slot[:, :, start : start + length] = own[:, :, tokens]

    def _commit(self, step: BoundedKVStep, ctx: StepContext) -> None:
        segments = real_segments(step, ctx)
        for segment in segments:
            self._check_commit(segment, step)
        for segment in segments:
            request = self._requests[segment.request_id]
            grant = self._granted(segment, step)
            if grant is not None and grant is request.pending:
                request.written = grant.written + grant.span
                request.committed, request.pending, request.fresh = grant, None, None

    def _check_commit(self, segment: Segment, step: BoundedKVStep) -> None:
        rid = segment.request_id
        request = self._requests.get(rid)
        if request is None:
            raise refusals.not_admitted(rid)
        grant = self._granted(segment, step)
        if grant is None or grant not in (request.pending, request.committed):
            raise refusals.stale_commit(rid, step.positions[rid], segment.span, request.written)

    # Requests.

    def _remove_request(self, rid: str) -> None:
        self._requests.pop(rid, None)

    def _reset_request(self, rid: str) -> None:
        request = self._requests.get(rid)
        if request is not None:
            self._requests[rid] = Request(request.slot, request.source_len, request.source, fresh=request.fresh)

    def _rewind_request(self, rid: str, written: int) -> None:
        request = self._requests.get(rid)
        if request is None:
            raise refusals.not_admitted(rid)
        reach = max(request.reach, request.written)
        if written > request.written or reach - written > self.config.spare:
            raise refusals.cannot_rewind(rid, written, request.written, self.config.spare, reach)
        request.written = written
        request.pending = request.committed = None

    def _export_request(self, rid: str) -> Stream:
        request = self._requests.get(rid)
        if request is None:
            raise refusals.not_admitted(rid)
        source_len = request.source_len
        kept, spare = self.config.retentions[source_len], self.config.spare
        held = extent(self.config, rid, source_len, request.written, request.reach)
        slot = self._slots[:, request.slot]  # [layers, rows, H, cap, 2D]
        return Stream(
            source_len=source_len,
            source=request.source,
            written=request.written,
            reach=request.reach,
            sink=kept.sink,
            window=kept.window,
            spare=spare,
            sinks=slot[..., [place(self.config, source_len, s) for s in held.sinks], :],
            ring=slot[..., [place(self.config, source_len, s) for s in held.ring], :],
        )

    def _import_request(self, rid: str, stream: Stream) -> None:
        taken = {request.slot for request in self._requests.values()}
        number = min(set(range(self.config.max_slots)) - taken)
        held = extent(self.config, rid, stream.source_len, stream.written, stream.reach)
        slot = self._slots[:, number]
        sinks, ring = stream.sinks.to(self.device), stream.ring.to(self.device)
        for positions, entries in ((held.sinks, sinks), (held.ring, ring)):
            slot[..., [place(self.config, stream.source_len, s) for s in positions], :] = entries
        self._requests[rid] = Request(number, stream.source_len, stream.source, stream.written, stream.reach)

    def _holds(self, rid: str) -> bool:
        return rid in self._requests

    def _free_slots(self) -> int:
        return self.config.max_slots - len(self._requests)

    def _layer(self, layer_idx: int) -> Tensor:
        return self._slots[layer_idx]

    # The engine around it.

    def _build_graph_buffers(self, slots: Sequence[GraphSlotSpec]) -> None:
        for bucket, slot in slots:
            self._table(SlotLease(slot, bucket), num_rows=0)

    def _cleanup(self) -> None:
        self._requests.clear()
        self._lease_tables.clear()
        self._slots = torch.empty(0)
