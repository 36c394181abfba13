"""Attention by its definition: keys in tiles of absolute stream positions, folded left to right.

For one query, with c = scale * log2(e):

    x_j = dot(q, k_j) + bias_j       y_j = x_j * c       m = ceil(max y)       p_j = 2^(y_j - m)
    l = sum p_j                      a = sum p_j v_j     output = a / l

summed over one tile of 64 positions at a time; tiles fold into splits of eight, splits into the result. The running
maximum is that of online softmax (Milakov & Gimelshein, 2018), taken up to an integer, so that every rescaling is by a
power of two. Every sum below is exact or in a stated order, so these bits can be had on any machine.

Everything is float32. Shapes: `...` rows and heads, T queries, N keys, D = head_dim, J = 64 positions of a tile.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from boundedkv.numerics import (
    EXP2_EXACT,
    EXP2_IEEE,
    FIX_BITS,
    MIN_IEEE_EXPONENT,
    MIN_POWER,
    SPLIT,
    TILE,
    WEIGHT_BITS,
    score_factor,
)
from boundedkv.reference.arithmetic import exact_dot, exp2, exponent_of, finite, fix, halves, power_of_two, tree

INF = float("inf")


class Partial(NamedTuple):
    """Softmax over some of the keys: the weights are relative to 2^m, their sum is l, of the values it is a * 2^e.

    In the exact path l and a are 2^16 times that.
    """

    m: Tensor  # [..., T, 1], an integer; -inf: no key seen, +inf: poisoned
    l: Tensor  # [..., T, 1]  # noqa: E741
    e: Tensor  # [..., T, 1], an integer; -inf: no key seen
    a: Tensor  # [..., T, D]


def attend(
    q: Tensor, k: Tensor, v: Tensor, positions: Tensor, visible: Tensor, bias: Tensor | None, scale: float, ieee: bool
) -> Tensor:
    """Attend T queries over N keys.

    Args:
        q: [..., T, D].
        k: [..., N, D].
        v: [..., N, D].
        positions: [N] int64, ascending: the stream position of each key.
        visible: [T, N] bool: which keys a query sees.
        bias: [..., T, N] added to the dot product, -inf masks; None for none.
        scale: factor on the scores.
        ieee: plain binary32 and sums in a tree, instead of 16-bit fixed point.

    Returns:
        [..., T, D] float32, zeros where a query sees no key, NaN where it sees a poisoned pair.
    """
    factor = torch.tensor(score_factor(scale), dtype=torch.float32, device=q.device)
    total = nothing_seen(q)
    for split in (positions // SPLIT).unique().tolist():
        part = nothing_seen(q)
        for tile in (positions[positions // SPLIT == split] // TILE).unique().tolist():
            here = (positions // TILE == tile).nonzero().squeeze(1)
            lanes = positions[here] % TILE
            tile_bias = None if bias is None else spread(bias[..., here], lanes, dim=-1)
            scores = Scores(
                q=q,
                k=spread(k[..., here, :], lanes, dim=-2),  # [..., J, D]
                bias=tile_bias,  # [..., T, J]
                visible=spread(visible[:, here], lanes, dim=-1),  # [T, J]
                factor=factor,
            )
            tile_v = spread(v[..., here, :], lanes, dim=-2)  # [..., J, D]
            part = fold(part, ieee_tile(scores, tile_v) if ieee else exact_tile(scores, tile_v))
        total = fold(total, part)
    return finish(total)


class Scores(NamedTuple):
    """What the scores of one tile are made of."""

    q: Tensor  # [..., T, D]
    k: Tensor  # [..., J, D]
    bias: Tensor | None  # [..., T, J]
    visible: Tensor  # [T, J]
    factor: Tensor  # []


def nothing_seen(q: Tensor) -> Partial:
    """The neutral element of `fold`."""
    column = torch.zeros_like(q[..., :1])
    return Partial(column - INF, column, column - INF, torch.zeros_like(q))


def spread(x: Tensor, lanes: Tensor, dim: int) -> Tensor:
    """Put a tile's keys in their lanes; the other lanes are zero: absent keys, seen by nobody."""
    shape = list(x.shape)
    shape[dim] = TILE
    return x.new_zeros(shape).index_copy(dim, lanes, x)


def ieee_tile(scores: Scores, v: Tensor) -> Partial:
    """One tile in plain binary32, sums in a tree."""
    x = tree(scores.q[..., :, None, :] * scores.k[..., None, :, :])  # [..., T, J]
    v_finite = finite(v)  # [..., J, 1]
    v = torch.where(v_finite, v, 0.0)
    v_exponent = exponent_of(v).clamp(min=MIN_IEEE_EXPONENT)  # [..., J, 1]
    y = log2_scores(x, scores, v_finite)
    m = y.amax(-1, keepdim=True).ceil()  # [..., T, 1]
    z = y - m
    p = exp2(z, EXP2_IEEE)  # [..., T, J]
    g = value_exponent(z, v_exponent)  # [..., T, 1]
    scaled = p * power_of_two(1 - g)  # keeps the sum below in range
    a = tree((scaled[..., None] * v[..., None, :, :]).transpose(-1, -2))  # [..., T, J, D] -> [..., T, D]
    return Partial(m, tree(p)[..., None], g - 1, a)


def exact_tile(scores: Scores, v: Tensor) -> Partial:
    """One tile in 16-bit fixed point: the sums are exact, in whatever order a matrix product takes them."""
    q_hi, q_lo, q_exponent, q_finite = fix(scores.q)  # [..., T, D], [..., T, 1]
    k_hi, k_lo, k_exponent, k_finite = fix(scores.k)  # [..., J, D], [..., J, 1]
    x = exact_dot(q_hi, q_lo, k_hi.mT, k_lo.mT)  # [..., T, J], to be scaled by 2^(q_exponent + k_exponent - 22)
    q_shift = q_exponent - 11
    x = x * power_of_two(q_shift.clamp(max=0))
    x = x * power_of_two(k_exponent.mT - 11)
    x = x * power_of_two(q_shift.clamp(min=0))
    x = torch.where(q_finite & k_finite.mT, x, torch.nan)
    v_hi, v_lo, v_exponent, v_finite = fix(v)  # [..., J, D], [..., J, 1]
    y = log2_scores(x, scores, v_finite)
    m = y.amax(-1, keepdim=True).ceil()  # [..., T, 1]
    z = y - m
    p = exp2(z, EXP2_EXACT)  # [..., T, J]
    l = (p * 2**WEIGHT_BITS).round().sum(-1, keepdim=True)  # noqa: E741  [..., T, 1], integers
    g = value_exponent(z, v_exponent)  # [..., T, 1]
    fixed = p * power_of_two(v_exponent.mT) * power_of_two(WEIGHT_BITS - g)
    p_hi, p_lo = halves(fixed.round())
    a = exact_dot(p_hi, p_lo, v_hi, v_lo)  # [..., T, D]
    return Partial(m, l, g + (8 - FIX_BITS), a)


def log2_scores(x: Tensor, scores: Scores, v_finite: Tensor) -> Tensor:
    """Scores with bias, in base-2 logarithms: -inf for pairs not seen, +inf for pairs that poison their query."""
    visible = scores.visible
    if scores.bias is not None:
        x = x + scores.bias
        visible = visible & (scores.bias != -INF)
    y = x * scores.factor
    y = torch.where((y < INF) & v_finite.mT, y, INF)
    return torch.where(visible, y, -INF)


def value_exponent(z: Tensor, v_exponent: Tensor) -> Tensor:
    """An integer g with |p_j v_j| < 2^(g + 1) for every key seen; -inf where none is: [..., T, 1]."""
    return torch.where(z >= MIN_POWER, z + v_exponent.mT, -INF).amax(-1, keepdim=True).ceil()


def fold(left: Partial, right: Partial) -> Partial:
    """Join two partial softmaxes, `left` of earlier keys: rescale both to the larger maximum, then add."""
    m = torch.maximum(left.m, right.m)
    left_shift = torch.where(left.m == m, 0.0, left.m - m)
    right_shift = torch.where(right.m == m, 0.0, right.m - m)
    left_e, right_e = left.e + left_shift, right.e + right_shift
    e = torch.maximum(left_e, right_e)
    return Partial(
        m=m,
        l=left.l * power_of_two(left_shift) + right.l * power_of_two(right_shift),
        e=e,
        a=left.a * power_of_two(left_e - e) + right.a * power_of_two(right_e - e),
    )


def finish(total: Partial) -> Tensor:
    """Divide; the result is within the range of its values, and so of binary32, where no value poisons it."""
    seen = total.l > 0
    out = total.a / torch.where(seen, total.l, 1.0)
    out = out * power_of_two(torch.where(seen, total.e, 0.0))
    largest = torch.finfo(torch.float32).max
    out = out.clamp(-largest, largest) + 0.0  # -0 becomes +0
    out = torch.where(seen, out, 0.0)
    return torch.where(total.m == INF, torch.nan, out)
