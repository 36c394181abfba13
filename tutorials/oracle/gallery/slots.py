"""The slots, or the plan that says where to write, are not what they should be.

Seen at the call that goes wrong, not when a query reads the entry many steps later.
"""

import dataclasses

import torch

from boundedkv.plan import EMPTY_ROW, RING
from boundedkv.reference import ReferenceManager

from .planted import found_with


@found_with()
class RingStartsOneLate(ReferenceManager):
    """The plan reads the ring from the entry after the oldest."""

    def _row(self, rid, step, ctx):
        slot, layout, source = super()._row(rid, step, ctx)
        reads = list(layout.reads)
        if reads[RING].length:
            reads[RING] = reads[RING]._replace(start=reads[RING].start + 1)
        return slot, layout._replace(reads=tuple(reads)), source


@found_with()
class SinkEvicted(ReferenceManager):
    """The ring wraps to the slot's first entry, which is a sink's."""

    def _write(self, slot, layout, own):
        *first, wrapped = layout.writes
        super()._write(slot, layout._replace(writes=(*first, wrapped._replace(start=0))), own)


@found_with()
class TheFirstOfASpanStays(ReferenceManager):
    """Of a span longer than the ring the first tokens are kept, instead of the last."""

    def _write(self, slot, layout, own):
        sinks = layout.writes[0].length
        early = [write._replace(token=min(write.token, sinks + i)) for i, write in enumerate(layout.writes)]
        super()._write(slot, layout._replace(writes=tuple(early)), own)


@found_with("reverse_step_order")
class StepOrderNotReversed(ReferenceManager):
    """The span joins the stream first token first, although `reverse_step_order` is set."""

    def _write(self, slot, layout, own):
        turned = own[:, :, : max([0, *(write.token + 1 for write in layout.writes)])].flip(2)
        super()._write(slot, layout, turned)


@found_with("window_includes_step")
class WindowWithoutTheStep(ReferenceManager):
    """The step's span does not count towards the window, although `window_includes_step` is set."""

    def _row(self, rid, step, ctx):
        declared, kept = self.config, self.config.retention._replace(window_includes_step=False)
        self.config = dataclasses.replace(declared, retention=kept)
        row = super()._row(rid, step, ctx)
        self.config = declared
        return row


@found_with("padding")
class PaddingRowWrites(ReferenceManager):
    """A padding row writes its first token to the slot that its line happens to name."""

    def _write(self, slot, layout, own):
        super()._write(slot, layout, own)
        if layout == EMPTY_ROW[1]:
            slot[:, :, :1] = own[:, :, :1]


@found_with("leases", "batch")
class StaleTable(ReferenceManager):
    """A leased table keeps the lines of the larger batch that it held before."""

    def _plan(self, step, ctx):
        before = self._table(ctx.slot_lease, len(ctx.row_ids)).clone()
        plan = super()._plan(step, ctx)
        plan.table[len(plan.rows) :] = before[len(plan.rows) :]
        return plan


@found_with("capture", "leases")
class CapturedRowsBakedIn(ReferenceManager):
    """A captured graph runs the rows of its capture, whatever its table holds by now."""

    def _attend(self, layer_idx, q, k, v, plan, *others):
        live = plan.table
        then = torch.zeros_like(live) if plan.rows == (EMPTY_ROW,) * len(plan.rows) else live
        return super()._attend(layer_idx, q, k, v, plan._replace(table=then), *others)


@found_with("far_positions")
class ThirtyTwoBitOffset(ReferenceManager):
    """A stream's position is found from an element offset, and that wraps at 2^31."""

    def _row(self, rid, step, ctx):
        slot, layout, source = super()._row(rid, step, ctx)
        offset = layout.length * 2 * self.config.head_dim % 2**31
        return slot, layout._replace(length=offset // (2 * self.config.head_dim)), source


@found_with("sources")
class SinksOfTheSourceCountedInTheSlot(ReferenceManager):
    """Sinks that lie in the source are looked for in the slot, where they do not lie."""

    def _row(self, rid, step, ctx):
        slot, layout, source = super()._row(rid, step, ctx)
        in_source, in_slot, *others = layout.reads
        longer = in_slot._replace(length=min(in_source.length + in_slot.length, self.config.slot_tokens))
        return slot, layout._replace(reads=(in_source._replace(start=0, length=0), longer, *others)), source
