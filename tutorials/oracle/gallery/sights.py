"""A query sees other keys than it should.

The message says which: the stream positions that should take part, and those that do.
"""

import dataclasses

import torch

from boundedkv.reference import ReferenceManager

from .planted import found_with


@found_with()
class WindowOneShort(ReferenceManager):
    """The oldest entry of the window is left out."""

    def _entries(self, slot, layout, prefix, own):
        positions, entries = super()._entries(slot, layout, prefix, own)
        kept = positions != layout.length - self.config.retention.window
        return positions[kept], entries[:, :, kept]


@found_with()
class SinksForgotten(ReferenceManager):
    """Once the window is full, the sinks are no longer read."""

    def _entries(self, slot, layout, prefix, own):
        positions, entries = super()._entries(slot, layout, prefix, own)
        full = layout.length > layout.sink + self.config.retention.window
        kept = (positions >= layout.sink) | torch.tensor(not full)
        return positions[kept], entries[:, :, kept]


@found_with()
class SinkCountedTwice(ReferenceManager):
    """While the stream is short, sinks lie in the window too, and are read as both."""

    def _entries(self, slot, layout, prefix, own):
        positions, entries = super()._entries(slot, layout, prefix, own)
        twice = (positions < layout.sink) & (positions >= layout.length - self.config.retention.window)
        again = positions[-1] + 1 + torch.arange(int(twice.sum()))
        return torch.cat([positions, again]), torch.cat([entries, entries[:, :, twice]], 2)


@found_with()
class WritesBeforeItReads(ReferenceManager):
    """The step's span is in the ring before the window was read from it."""

    def _attend(self, layer_idx, q, k, v, plan, *others):
        own = torch.cat([k, v], -1).to(self.config.dtype)
        for row, (slot, layout, _) in zip(own, plan.rows, strict=True):
            self._write(self.layer(layer_idx)[slot], layout, row[None])
        return super()._attend(layer_idx, q, k, v, plan, *others)


@found_with("spare")
class ReadsTheSpareEntries(ReferenceManager):
    """The whole ring is taken for the window, the spare entries too."""

    def _entries(self, slot, layout, prefix, own):
        ring = slot[:, :, self.config.sink_capacity :].float()
        positions, entries = super()._entries(slot, layout, prefix, own)
        spare = ring[:, :, : self.config.spare] if layout.length > layout.sink + ring.shape[2] else ring[:, :, :0]
        older = torch.full((spare.shape[2],), layout.length - self.config.retention.window - 1)
        return torch.cat([older, positions]), torch.cat([spare, entries], 2)


@found_with("query_window")
class StepRuleForAQueryWindow(ReferenceManager):
    """Every query sees what the step may see, as if no `query_window` were set."""

    def _attend_row(self, q, positions, entries, layout, rel_bias, ieee):
        narrow, self.config = self.config, dataclasses.replace(self.config, query_window=None)
        out = super()._attend_row(q, positions, entries, layout, rel_bias, ieee)
        self.config = narrow
        return out


@found_with("lookahead")
class CausalWithinTheStep(ReferenceManager):
    """A query does not see the step's later tokens, although no `query_window` is set."""

    def _attend_row(self, q, positions, entries, layout, rel_bias, ieee):
        def one(t):
            seen = positions <= layout.length + t
            return super(CausalWithinTheStep, self)._attend_row(
                q, positions[seen], entries[:, :, seen], layout, rel_bias, ieee
            )[:, t]

        return torch.stack([one(t) for t in range(q.shape[2])], 1)


@found_with("query_window", "far_positions", examples=40)
class PositionsInFloat32(ReferenceManager):
    """Distances are taken between float32 positions, which behind 2^24 are even numbers."""

    def _attend_row(self, q, positions, entries, layout, rel_bias, ieee):
        return super()._attend_row(q, positions.float().long(), entries, layout, rel_bias, ieee)


@found_with("sources", "batch")
class SourceOfAnother(ReferenceManager):
    """A row takes the source of its place in the batch, instead of the one that its position names."""

    def _prefix(self, b, layout, index, source, row_source):
        return super()._prefix(b, layout, b % 2 if index >= 0 else index, source, row_source)


@found_with("row_source", "batch")
class RowSourceOfTheFirstRow(ReferenceManager):
    """Every row reads the `row_source` of row 0."""

    def _prefix(self, b, layout, index, source, row_source):
        return super()._prefix(0 if index < 0 else b, layout, index, source, row_source)


@found_with("grouped_heads")
class GroupedHeadsMixedUp(ReferenceManager):
    """Query head h reads key/value head h % H, instead of h // (Hq // H)."""

    def _attend_row(self, q, positions, entries, layout, rel_bias, ieee):
        heads = torch.arange(q.shape[1]).view(-1, entries.shape[1]).T.flatten()
        bias = None if rel_bias is None else rel_bias[:, heads]
        out = super()._attend_row(q[:, heads], positions, entries, layout, bias, ieee)
        return out[:, :, heads.argsort()]


@found_with("rows")
class GuidanceRowsSwapped(ReferenceManager):
    """Each row of a request reads what the other one wrote."""

    def _entries(self, slot, layout, prefix, own):
        return super()._entries(slot.flip(0), layout, prefix, own)


@found_with("layers")
class OneLayersSlotsForAll(ReferenceManager):
    """Every layer reads the slots of layer 0."""

    def _attend(self, layer_idx, q, k, v, plan, *others):
        self._slot_of_layer_0 = iter([self._slots[0, slot] for slot, _, _ in plan.rows])
        return super()._attend(layer_idx, q, k, v, plan, *others)

    def _entries(self, slot, layout, prefix, own):
        return super()._entries(next(self._slot_of_layer_0), layout, prefix, own)
