"""What attend should give, in float64: softmax over the keys that a query sees, by the plan's own lines."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from boundedkv.attend_checks import RowSource
from boundedkv.config import BoundedKVConfig
from boundedkv.plan import SINK_SLOT, SINK_SOURCE, RowLayout, decode

INF = float("inf")


class Exact(NamedTuple):
    """A step's result.

    Attributes:
        out: [B * rows, T, Hq, D] float64.
        scale: [B * rows, T, Hq] float64, the largest element of the values that a query sees; 0 if it sees none.
    """

    out: Tensor
    scale: Tensor


def exact(
    config: BoundedKVConfig,
    table: Tensor,
    slots: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    source: Tensor | None = None,
    row_source: RowSource | None = None,
    rel_bias: Tensor | None = None,
    operand: Callable[[Tensor], Tensor] = lambda x: x,
) -> Exact:
    """Attend in float64.

    Args:
        config: the pool.
        table: the plan's lines.
        slots: the layer's slots before the step.
        q: as in `attend`, and so are the next five.
        k: .
        v: .
        source: .
        row_source: .
        rel_bias: .
        operand: what the arithmetic makes of a number before it multiplies it.

    Returns:
        The result. It means nothing where an input that a query sees is not finite.
    """
    per_request = config.rows_per_request
    own = torch.cat([k.float(), v.float()], dim=-1).to(config.dtype).double()  # as the slots will hold it
    shape = (q.shape[0], q.shape[2], q.shape[1])  # [B * rows, T, Hq]
    out, scale = q.new_zeros((*shape, config.head_dim), dtype=torch.float64), q.new_zeros(shape, dtype=torch.float64)
    for b, (slot, layout, index) in enumerate(decode(table.cpu().numpy())):
        lines = slice(b * per_request, (b + 1) * per_request)
        prefix = source[index] if index >= 0 and source is not None else None
        if index < 0 and row_source is not None and layout.source_entries:
            prefix = row_source[0][int(row_source[1][b])]
        entries, positions = _entries(slots[slot].double(), layout, prefix, own[lines])
        visible = _visible(config, layout, positions, q.shape[2])
        bias = None if rel_bias is None else _bias(config, layout, positions, visible, rel_bias[lines].double())
        group = config.query_heads // config.num_heads
        keys, values = entries.repeat_interleave(group, dim=1).split(config.head_dim, dim=-1)  # [rows, Hq, N, D] each
        values = torch.where(values.isfinite(), values, 0.0)
        scores = operand(q[lines].double()) @ operand(keys).mT  # [rows, Hq, T, N]
        scores = (scores if bias is None else scores + bias) * config.score_scale
        shown = visible if bias is None else visible & (bias != -INF)
        weights = torch.where(shown, scores, -INF).softmax(dim=-1).nan_to_num(0.0)  # none seen: 0 / 0
        out[lines] = (operand(weights) @ operand(values)).transpose(1, 2)
        if len(positions):
            size = values.abs().amax(-1, keepdim=True).mT  # [rows, Hq, 1, N]
            scale[lines] = torch.where(shown, size, 0.0).amax(-1).transpose(1, 2)
    return Exact(out, scale)


def _entries(slot: Tensor, layout: RowLayout, prefix: Tensor | None, own: Tensor) -> tuple[Tensor, Tensor]:
    """What a row sees in stream order, [rows, H, N, 2D], and at which stream positions, [N]."""
    tokens = min(layout.tokens, own.shape[2])
    places = (prefix, slot, prefix, slot, slot)
    parts = [
        place[:, :, read.start : read.start + read.length].double()
        for place, read in zip(places, layout.reads, strict=True)
        if place is not None and read.length
    ]
    sinks = layout.reads[SINK_SOURCE].length + layout.reads[SINK_SLOT].length
    window = layout.retained - sinks
    positions = [*range(sinks), *range(layout.length - window, layout.length + tokens)]
    return torch.cat([*parts, own[:, :, :tokens]], dim=2), torch.tensor(positions, dtype=torch.int64)


def _visible(config: BoundedKVConfig, layout: RowLayout, positions: Tensor, own_tokens: int) -> Tensor:
    """Which keys a query sees: [T, N] bool."""
    t = torch.arange(own_tokens)[:, None]
    distance = layout.length + t - positions
    real = (t < layout.tokens).expand_as(distance)
    if config.query_window is None:
        return real
    return real & (distance >= 0) & ((distance <= config.query_window) | (positions < layout.sink))


def _bias(config: BoundedKVConfig, layout: RowLayout, positions: Tensor, visible: Tensor, rel_bias: Tensor) -> Tensor:
    """The score term of each pair, [rows, Hq, T, N], from its distance."""
    t = torch.arange(visible.shape[0])[:, None]
    j = torch.arange(visible.shape[1])
    entry = layout.length + t - positions
    if config.query_window is None:
        entry = layout.retained + t - j + len(t) - 1
    entry = torch.where(visible, entry, 0)
    return rel_bias.gather(3, entry.expand(*rel_bias.shape[:2], -1, -1))
