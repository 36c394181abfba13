"""The right keys take part, and the numbers made of them are wrong.

The message says so, and without what the difference would not be there.
"""

import itertools

import torch

from boundedkv.reference import ReferenceManager

from .planted import found_with


@found_with("rel_bias")
class BiasShifted(ReferenceManager):
    """Each key takes the bias of the distance beside its own."""

    def _attend_row(self, q, positions, entries, layout, rel_bias, ieee):
        bias = None if rel_bias is None else rel_bias.roll(1, -1)
        return super()._attend_row(q, positions, entries, layout, bias, ieee)


@found_with("rel_bias")
class MaskedByALargeNumber(ReferenceManager):
    """A masked pair gets the score -1e9: where all pairs are masked, the query sees their mean."""

    def _attend_row(self, q, positions, entries, layout, rel_bias, ieee):
        bias = None if rel_bias is None else rel_bias.clamp(min=-1e9)
        return super()._attend_row(q, positions, entries, layout, bias, ieee)


@found_with("far_positions")
class TilesByIndex(ReferenceManager):
    """Keys are put into tiles by their index among the keys read, instead of by stream position."""

    def _attend_row(self, q, positions, entries, layout, rel_bias, ieee):
        by_index = torch.arange(len(positions))
        return super()._attend_row(q, by_index, entries, layout, rel_bias, ieee)


@found_with("batch", "far_positions")
class SplitDependsOnTheBatch(ReferenceManager):
    """With more rows there are fewer splits: a row's last bits depend on who else is there."""

    def _attend(self, layer_idx, q, k, v, plan, *others):
        self._rows = len(plan.rows)
        return super()._attend(layer_idx, q, k, v, plan, *others)

    def _attend_row(self, q, positions, entries, layout, rel_bias, ieee):
        positions = positions if self._rows == 1 else torch.arange(len(positions))
        return super()._attend_row(q, positions, entries, layout, rel_bias, ieee)


@found_with("mixed_types", "bfloat16")
class OwnKeysNotRounded(ReferenceManager):
    """The step's own keys take part as they came, and are rounded only when they are stored."""

    def _attend(self, layer_idx, q, k, v, plan, *others):
        self._as_they_came = iter(torch.cat([k.float(), v.float()], -1).split(self.config.rows_per_request))
        return super()._attend(layer_idx, q, k, v, plan, *others)

    def _entries(self, slot, layout, prefix, own):
        return super()._entries(slot, layout, prefix, next(self._as_they_came))


@found_with("poisoned_memory")
class NanLeak(ReferenceManager):
    """What is not seen is multiplied by a weight of zero, and zero times NaN is NaN."""

    def _attend_row(self, *arguments):
        return super()._attend_row(*arguments) + 0 * self.layer(0).float().sum()


@found_with("bfloat16")
class ResultInFloat32(ReferenceManager):
    """The result has the type it was computed in, instead of the queries'."""

    def _attend(self, *arguments):
        return super()._attend(*arguments).float()


@found_with("padding")
class MinusZero(ReferenceManager):
    """A padding row gives -0."""

    def _attend_row(self, q, positions, entries, layout, rel_bias, ieee):
        out = super()._attend_row(q, positions, entries, layout, rel_bias, ieee)
        return out if layout.tokens else -out


@found_with("strides")
class StridesIgnored(ReferenceManager):
    """The queries are read as if they were contiguous."""

    def _attend(self, layer_idx, q, *others):
        flat = q.as_strided((q.numel(),), (1,)) if q.stride(-1) and q.layout == torch.strided else q
        whole = q.is_contiguous() or q.untyped_storage().nbytes() < q.numel() * q.element_size()
        return super()._attend(layer_idx, q if whole else flat.view(q.shape), *others)


@found_with()
class AnotherEachTime(ReferenceManager):
    """Sums whose order is not the same from run to run."""

    runs = itertools.count()

    def _attend_row(self, *arguments):
        return super()._attend_row(*arguments) * (1 + next(self.runs) % 3 * 2.0**-22)
