"""A manager in plain PyTorch, written from the documentation alone, held to the reference.

It shares no line with the reference. What a stream retains is found by playing the stream: a list grows token by
token and drops its oldest. Attention is a float32 softmax, so its last bits are its own: it is judged in close mode.

    python tutorials/oracle/plain_torch.py
"""

from __future__ import annotations

import torch

from boundedkv import AdmitOutcome, BoundedKVManager, BoundedPlan
from boundedkv.plan import ALL_TOKENS, NO_READ, NO_WRITE, Read, RowLayout, Write
from boundedkv.testing import check_manager

HAS = """batch lookahead layers rows grouped_heads any_head_dim float16 bfloat16 mixed_types strides
    poisoned_memory""".split()


class PlainTorch(BoundedKVManager):
    """A list that grows, and a softmax. No sources, no bias, no causal rule, no graphs."""

    def __init__(self, config, device, kv_dtype=None):
        super().__init__(config, device, kv_dtype)
        c = self.config
        shape = (c.num_layers, c.max_slots, c.rows_per_request, c.num_heads, c.slot_tokens, 2 * c.head_dim)
        self.slots = self._zeros(shape, c.dtype)
        self.slot_of, self.written = {}, {}

    def _admit(self, step, ctx):
        free = [slot for slot in range(self.config.max_slots) if slot not in self.slot_of.values()]
        for segment in step.segments:
            if segment.request_id not in self.slot_of:
                self.slot_of[segment.request_id] = free.pop(0)
                self.written[segment.request_id] = 0
        return AdmitOutcome(ok=True)

    def _commit(self, step, ctx):
        for rid, span, _ in step.segments:
            self.written[rid] = step.positions[rid].written + span

    def _plan(self, step, ctx):
        spans = {rid: span for rid, span, _ in step.segments}
        rows = tuple(
            (self.slot_of[rid], self.layout(step.positions[rid].written, spans[rid]), 0) for rid in ctx.row_ids
        )
        lines = [
            [slot, source, layout.tokens, layout.length, layout.sink, *sum(layout.reads + layout.writes, ())]
            for slot, layout, source in rows
        ]
        table = torch.tensor(lines, dtype=torch.int32, device=self.device).view(len(rows), 24)
        most = max((layout.retained for _, layout, _ in rows), default=0)
        return BoundedPlan(table, rows, most, max(spans.values(), default=0), False, False)

    def layout(self, written, span):
        """Play the stream: what is retained of it, and where the step's tokens go."""
        sink, window, _ = self.config.retention
        retained = []
        for position in range(written):
            retained.append(position)
            if len(retained) - min(sink, written) > window and position >= sink:
                del retained[sink]
        ring = [self.place(position) for position in retained if position >= sink]
        to_sinks = [token for token in range(span) if written + token < sink]
        to_ring = [token for token in range(span) if written + token >= sink][-window:] if window else []
        return RowLayout(
            tokens=ALL_TOKENS,
            length=written,
            sink=sink,
            reads=(NO_READ, Read(0, len(retained) - len(ring)), NO_READ, *two_runs(ring)),
            writes=(
                Write(to_sinks[0], written, len(to_sinks)) if to_sinks else NO_WRITE,
                *self.ring_writes(to_ring, written),
            ),
        )

    def place(self, position):
        """Where an entry behind the sinks lies in its slot."""
        return self.config.sink_capacity + (position - self.config.retention.sink) % self.config.retention.window

    def ring_writes(self, tokens, written):
        """The tokens that go to the ring, as at most two runs."""
        first, second = two_runs([self.place(written + token) for token in tokens])
        return (
            Write(tokens[0], *first) if first.length else NO_WRITE,
            Write(tokens[0] + first.length, *second) if second.length else NO_WRITE,
        )

    def _attend(self, layer_idx, q, k, v, plan, source, row_source, rel_bias, ieee):
        c = self.config
        slots = self.slots[layer_idx]
        own = torch.cat([k.float(), v.float()], -1).to(c.dtype)
        out = torch.empty(q.shape[0], q.shape[2], q.shape[1], q.shape[3], dtype=q.dtype, device=self.device)
        batches = [slice(b * c.rows_per_request, (b + 1) * c.rows_per_request) for b in range(len(plan.rows))]
        for here, (slot, layout, _) in zip(batches, plan.rows, strict=True):
            old = [slots[slot, :, :, start : start + length] for start, length in layout.reads]
            entries = torch.cat([*old, own[here]], 2).float().repeat_interleave(c.query_heads // c.num_heads, 1)
            keys, values = entries.split(c.head_dim, -1)
            weights = (q[here].float() @ keys.mT * c.score_scale).softmax(-1)
            out[here] = (weights @ values).transpose(1, 2).to(q.dtype)
        for here, (slot, layout, _) in zip(batches, plan.rows, strict=True):
            for token, start, length in layout.writes:
                slots[slot, :, :, start : start + length] = own[here][:, :, token : token + length]
        return out

    def _remove_request(self, rid):
        self.slot_of.pop(rid, None)

    def _reset_request(self, rid):
        if rid in self.slot_of:
            self.written[rid] = 0

    def _holds(self, rid):
        return rid in self.slot_of

    def _free_slots(self):
        return self.config.max_slots - len(self.slot_of)

    def _layer(self, layer_idx):
        return self.slots[layer_idx]

    def _cleanup(self):
        self.slot_of.clear()

    def _missing(self, *arguments):
        raise NotImplementedError("not written yet")

    _rollback_admit = _rewind_request = _export_request = _import_request = _build_graph_buffers = _missing


def two_runs(places):
    """Places in stream order as at most two runs: the ring wraps once."""
    wrap = next((i for i in range(1, len(places)) if places[i] != places[i - 1] + 1), len(places))
    return [Read(part[0], len(part)) if part else NO_READ for part in (places[:wrap], places[wrap:])]


def main(examples=12):
    """Judge it for what it has; then let it claim more."""
    print("1. What it has, in close mode.\n")
    report = check_manager(PlainTorch, "close", features=HAS, examples=examples)
    print(report)
    print("\n2. It claims a query_window too, and has none.\n")
    claimed = check_manager(PlainTorch, "close", features=["query_window"], examples=examples, first_only=True)
    print(claimed)
    return report, claimed


if __name__ == "__main__":
    main()
