"""One tile: where its 64 stream positions lie, what a query sees of them, and what it makes of that.

Strides are tuples in elements, one a axis. Offsets are int64. Stream positions are int32, and every comparison is
written so that the last one, 2^31 - 1, fits.

Shapes: Q query lanes, J = 64 positions of a tile, D elements of a vector, padded to a power of two, as C pieces of P.
"""

import triton
import triton.language as tl

from boundedkv import plan as fmt
from boundedkv.fast.arithmetic import (
    FIX_BITS,
    MAGIC,
    MIN_EXPONENT,
    TILE,
    WEIGHT_BITS,
    WEIGHT_UNITS,
    as_stored,
    ceil,
    exact_dot,
    exp2,
    exp2_int,
    exponents,
    fix,
    halves,
    load_float,
    power_of_two,
    tree,
    value_exponent,
)

LENGTH: tl.constexpr = tl.constexpr(fmt.LENGTH)
SINK: tl.constexpr = tl.constexpr(fmt.SINK)
SINK_SOURCE: tl.constexpr = tl.constexpr(fmt.READS + 2 * fmt.SINK_SOURCE)
SINK_SLOT: tl.constexpr = tl.constexpr(fmt.READS + 2 * fmt.SINK_SLOT)
WINDOW_SOURCE: tl.constexpr = tl.constexpr(fmt.READS + 2 * fmt.WINDOW_SOURCE)
RING: tl.constexpr = tl.constexpr(fmt.READS + 2 * fmt.RING)
RING_WRAPPED: tl.constexpr = tl.constexpr(fmt.READS + 2 * fmt.RING_WRAPPED)


@triton.jit
def retained_bounds(line_ptr):
    """The retained stream positions of a row: [0, sinks) and [low, length), those from ring_low on in the ring.

    Returns length, sinks, low, ring_low.
    """
    length = tl.load(line_ptr + LENGTH)
    sinks = tl.load(line_ptr + SINK_SOURCE + 1) + tl.load(line_ptr + SINK_SLOT + 1)
    ring_low = length - tl.load(line_ptr + RING + 1) - tl.load(line_ptr + RING_WRAPPED + 1)
    low = ring_low - tl.load(line_ptr + WINDOW_SOURCE + 1)
    return length, sinks, low, ring_low


@triton.jit
def locate(s, length, sinks, low, ring_low, source_sinks, ring_start, straight, wrapped_start):
    """Which of the stream positions s are retained in the source (there at s itself), which in the slot, and where.

    The slot holds its sinks from its first entry on, the ring's `straight` first entries from `ring_start` on, the
    others from `wrapped_start` on.
    """
    is_sink = s < sinks
    in_window = (s >= low) & (s < length) & (is_sink == 0)
    in_source = (s < source_sinks) | (in_window & (s < ring_low))
    in_slot = (is_sink | in_window) & (in_source == 0)
    i = s - ring_low
    ring_entry = tl.where(i < straight, ring_start, wrapped_start - straight) + i
    return in_source, in_slot, tl.where(is_sink, s - source_sinks, ring_entry)


@triton.jit
def load_vectors(
    base_ptr,
    index,
    stride,
    d_stride,
    mask,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    P: tl.constexpr,
    DTYPE: tl.constexpr,
):
    """Vectors at `index` [N] of an array, in pieces [BLOCK_D / P, N, P]; zero where masked and beyond D.

    In pieces a thread holds much of few vectors instead of little of many: fewer addresses, fewer steps to a maximum.
    """
    d = tl.arange(0, BLOCK_D // P)[:, None, None] * P + tl.arange(0, P)[None, None, :]
    offsets = index.to(tl.int64)[None, :, None] * stride + d.to(tl.int64) * d_stride
    return load_float(base_ptr + offsets, mask[None, :, None] & (d < D), DTYPE)


@triton.jit
def overlay(x, others, mask, HELD_TYPE: tl.constexpr):
    """The vectors x [C, N, P], and where masked [N] others instead, as elements of HELD_TYPE hold them."""
    return tl.where(mask[None, :, None], as_stored(others, HELD_TYPE), x)


@triton.jit
def whole(x):
    """Vectors in pieces [C, N, P] as rows [N, D]."""
    return tl.reshape(tl.permute(x, (1, 0, 2)), (x.shape[1], x.shape[0] * x.shape[2]))


@triton.jit
def crossed(x):
    """Vectors in pieces of 16 [C, N, 16] as columns [D, N], element 4a + 2b + c of a piece at 8b + 2a + c.

    That is how the registers of a tensor core hold a piece, so no element changes its thread. An exact dot does not ask
    for an order, as long as both sides have the same.
    """
    C: tl.constexpr = x.shape[0]
    N: tl.constexpr = x.shape[1]
    return tl.reshape(tl.permute(tl.reshape(x, (C, N, 4, 2, 2)), (0, 3, 2, 4, 1)), (C * 16, N))


@triton.jit
def visible_pairs(s, present, distance, sink, query_window, CAUSAL: tl.constexpr):
    """Which of the present positions s [J] each query sees, `distance` [Q, J] before it: [Q, J]."""
    if CAUSAL:
        reach = tl.where(present, tl.where(s < sink, -0x80000000, query_window + 1), 0).to(tl.uint32, bitcast=True)
        return distance.to(tl.uint32, bitcast=True) < reach[None, :]  # a key after the query is 2^31 or more before it
    return present[None, :] & (distance == distance)  # true: it lends its shape


@triton.jit
def bias_entries(s, t, distance, length, sinks, low, own_tokens, CAUSAL: tl.constexpr):
    """Which entry of the per-distance score term belongs to a pair: [Q, J]."""
    if CAUSAL:
        return distance
    index = tl.where(s < sinks, s, s - low + sinks)
    return (t + (length - low + sinks + own_tokens - 1))[:, None] - index[None, :]


@triton.jit
def ieee_scores(q, k, D: tl.constexpr):
    """Scores [1, J] of one query, in plain binary32."""
    return tree(whole(q) * whole(k), D)[None, :]


@triton.jit
def exact_scores(q_hi, q_lo, q_exponent, k):
    """Scores [Q, J] in 16-bit fixed point, for tensor cores; NaN where a vector is not finite."""
    k_exponent = exponents(k, MIN_EXPONENT)
    k_hi, k_lo = fix(k, k_exponent)
    x = exact_dot(q_hi, q_lo, crossed(k_hi), crossed(k_lo))
    x = x * exp2_int(tl.minimum(q_exponent - 11, 0))[:, None]
    x = x * exp2_int(k_exponent - 11)[None, :]
    return x * exp2_int(tl.maximum(q_exponent - 11, 0))[:, None]


@triton.jit
def finite_values(v, LEAST: tl.constexpr):
    """The values, in pieces, with vectors that are not finite zeroed, their exponents and which are finite [J]."""
    exponent = exponents(v, LEAST)
    ok = exponent < 128
    return tl.where(ok[None, :, None], v, 0.0), tl.where(ok, exponent, LEAST), ok


@triton.jit
def ieee_values(y, v, v_exponent):
    """Weights and weighted values of one query, every operation a binary32 operation: m, l, e [1] and a [1, D]."""
    m = ceil(tl.max(y, 1))
    z = y - m[:, None]
    p = exp2(z, True)  # [1, J]
    g = value_exponent(z, v_exponent.to(tl.float32))
    scaled = p * power_of_two(-g + 1.0)[:, None]
    a = tree(tl.trans(tl.trans(scaled) * whole(v)), TILE)  # [J, D] -> [D, J] -> [D]
    return m, tree(p, TILE), g - 1.0, a[None, :]


@triton.jit
def exact_values(y, v, v_exponent):
    """Weights and weighted values in 16-bit fixed point, for tensor cores: m, l, e [Q] and a [Q, D]."""
    m = ceil(tl.max(y, 1))
    z = y - m[:, None]
    p = exp2(z, False)  # [Q, J]
    l = tl.sum(tl.fma(p, WEIGHT_UNITS, MAGIC) - MAGIC, 1)  # noqa: E741
    g = value_exponent(z, v_exponent.to(tl.float32))
    weighted = p * exp2_int(v_exponent)[None, :]
    fixed = tl.fma(weighted, power_of_two(-g + WEIGHT_BITS)[:, None], MAGIC) - MAGIC
    p_hi, p_lo = halves(fixed)
    v_hi, v_lo = fix(v, v_exponent)
    return m, l, g + (8 - FIX_BITS), exact_dot(p_hi, p_lo, whole(v_hi), whole(v_lo))
