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
    CHUNK,
    DOT_SHIFT,
    LEFT_BITS,
    MIN_EXPONENT,
    MIN_IEEE_EXPONENT,
    MIN_POWER,
    RIGHT_BITS,
    SPLIT,
    TILE,
    score_factor,
)
from boundedkv.reference.arithmetic import exact_dot, exp2, exponent_of, finite, fix_left, fix_right, power_of_two, tree

INF = float("inf")


class Partial(NamedTuple):
    """Softmax over some of the keys: the weights are relative to 2^m, their sum is l, of the values it is a * 2^e."""

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
        ieee: plain binary32 and sums in a tree, instead of fixed point.

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
    p = exp2(z)  # [..., T, J]
    g = value_exponent(z, v_exponent)  # [..., T, 1]
    scaled = p * power_of_two(1 - g)  # keeps the sum below in range
    a = tree((scaled[..., None] * v[..., None, :, :]).transpose(-1, -2))  # [..., T, J, D] -> [..., T, D]
    return Partial(m, tree(p)[..., None], g - 1, a)


def exact_tile(scores: Scores, v: Tensor) -> Partial:
    """One tile in fixed point: the sums are exact, in whatever order a matrix product takes them."""
    x = exact_scores(scores.q, scores.k)  # [..., T, J]
    v_finite = finite(v)  # [..., J, 1]
    v = torch.where(v_finite, v, 0.0)
    v_exponent = exponent_of(v).clamp(min=MIN_EXPONENT)  # [..., J, 1]
    y = log2_scores(x, scores, v_finite)
    m = y.amax(-1, keepdim=True).ceil()  # [..., T, 1]
    z = y - m
    p = exp2(z)  # [..., T, J]
    units = (p * 2**LEFT_BITS).round().to(torch.int32)
    l = units.sum(-1, keepdim=True).float() * 2**-LEFT_BITS  # noqa: E741  [..., T, 1]
    g = value_exponent(z, v_exponent)  # [..., T, 1]
    weights = p * power_of_two(v_exponent.mT) * power_of_two(LEFT_BITS - g)
    values = v * power_of_two(RIGHT_BITS - 1 - v_exponent)
    a = exact_dot(fix_left(weights), fix_right(values))  # [..., T, D]
    return Partial(m, l, g + (DOT_SHIFT - LEFT_BITS - RIGHT_BITS + 1), a)


def exact_scores(q: Tensor, k: Tensor) -> Tensor:
    """Dots of queries [..., T, D] and keys [..., J, D], chunk after chunk in fixed point: [..., T, J]."""
    x = q.new_zeros((*q.shape[:-1], k.shape[-2]))
    for q_chunk, k_chunk in zip(q.split(CHUNK, dim=-1), k.split(CHUNK, dim=-1), strict=True):
        x = x + chunk_scores(q_chunk, k_chunk)
    return x


def chunk_scores(q: Tensor, k: Tensor) -> Tensor:
    """Dots of chunks of queries [..., T, C] and keys [..., J, C]: [..., T, J]; NaN where one is not finite."""
    q_finite, k_finite = finite(q), finite(k)  # [..., T, 1], [..., J, 1]
    q, k = torch.where(q_finite, q, 0.0), torch.where(k_finite, k, 0.0)
    q_exponent = exponent_of(q).clamp(min=MIN_EXPONENT)
    k_exponent = exponent_of(k).clamp(min=MIN_EXPONENT)
    left = fix_left(q * power_of_two(LEFT_BITS - 1 - q_exponent))
    high, low = fix_right(k * power_of_two(RIGHT_BITS - 1 - k_exponent))
    x = exact_dot(left, (high.mT, low.mT))
    q_shift = q_exponent - 13  # with k_exponent - 12: the exponents, less 23 and 20 fixed bits, plus the dot's 18
    x = x * power_of_two(q_shift.clamp(max=0))
    x = x * power_of_two(k_exponent.mT - 12)
    x = x * power_of_two(q_shift.clamp(min=0))
    return torch.where(q_finite & k_finite.mT, x, torch.nan)


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
