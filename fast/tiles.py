"""One tile: where its 64 stream positions lie, what a query sees of them, and what it makes of that.

Strides are tuples in elements, one a axis. Offsets are int64. Stream positions are int32, and every comparison is
written so that the last one, 2^31 - 1, fits.

Shapes: Q query lanes, J = 64 positions of a tile, D elements of a vector, padded to a power of two, as C pieces of P.
"""

import triton
import triton.language as tl

from boundedkv import plan as fmt
from boundedkv.fast.arithmetic import (
    DOT_SHIFT,
    LEFT_BITS,
    LEFT_UNITS,
    MIN_EXPONENT,
    RIGHT_BITS,
    TILE,
    ceil,
    exact_dot,
    exp2,
    exp2_int,
    exponents,
    fix_left,
    fix_right,
    power_of_two,
    to_units,
    tree,
    value_exponent,
)
from boundedkv.fast.entries import crossed, whole

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
def visible_pairs(s, present, position, real, sink, query_window, CAUSAL: tl.constexpr):
    """Which of the present stream positions s [J] each real query [Q] sees, itself at `position` [Q]: [Q, J]."""
    visible = present[None, :] & real[:, None]
    if CAUSAL:
        # As an unsigned number the distance to a key after the query is 2^31 or more.
        distance = (position[:, None] - s[None, :]).to(tl.uint32, bitcast=True)
        reach = tl.where(s < sink, 0x7FFFFFFF, query_window).to(tl.uint32, bitcast=True)
        visible = visible & (distance <= reach[None, :])
    return visible


@triton.jit
def bias_entries(s, t, length, sinks, low, own_tokens, CAUSAL: tl.constexpr):
    """Which entry of the per-distance score term belongs to a pair: first [Q] less index [J], both int64."""
    if CAUSAL:
        first = length + t
        index = s
    else:
        first = t + (length - low + sinks + own_tokens - 1)
        index = tl.where(s < sinks, s, s - low + sinks)
    return first.to(tl.int64), index.to(tl.int64)


@triton.jit
def ieee_scores(q, k, D: tl.constexpr):
    """Scores [1, J] of one query, in plain binary32."""
    return tree(whole(q) * whole(k), D)[None, :]


@triton.jit
def fixed_query(q):
    """A chunk of queries, in pieces [C, Q, 16], in fixed point: exponents [Q] and three parts [Q, elements]."""
    exponent = exponents(q, MIN_EXPONENT)
    high, mid, low = fix_left(q * exp2_int(-exponent + (LEFT_BITS - 1))[None, :, None])
    return exponent, tl.trans(crossed(high)), tl.trans(crossed(mid)), tl.trans(crossed(low))


@triton.jit
def fixed_scores(q_exponent, q_high, q_mid, q_low, k):
    """Scores [Q, J] of a chunk of elements in fixed point, for tensor cores; NaN where a vector is not finite."""
    k_exponent = exponents(k, MIN_EXPONENT)
    k_high, k_low = fix_right(k, exp2_int(-k_exponent + (RIGHT_BITS - 1))[None, :, None])
    x = exact_dot(q_high, q_mid, q_low, crossed(k_high), crossed(k_low))
    x = x * exp2_int(tl.minimum(q_exponent - 13, 0))[:, None]
    x = x * exp2_int(k_exponent - 12)[None, :]
    return x * exp2_int(tl.maximum(q_exponent - 13, 0))[:, None]


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
    p = exp2(z)  # [1, J]
    g = value_exponent(z, v_exponent.to(tl.float32))
    scaled = p * power_of_two(-g + 1.0)[:, None]
    a = tree(tl.trans(tl.trans(scaled) * whole(v)), TILE)  # [J, D] -> [D, J] -> [D]
    return m, tree(p, TILE), g - 1.0, a[None, :]


@triton.jit
def fixed_values(y, v, v_exponent):
    """Weights and weighted values in fixed point, for tensor cores: m, l, e [Q] and a [Q, D]."""
    m = ceil(tl.max(y, 1))
    z = y - m[:, None]
    p = exp2(z)  # [Q, J]
    l = tl.sum(to_units(p * LEFT_UNITS), 1).to(tl.float32) * (1.0 / LEFT_UNITS)  # noqa: E741
    g = value_exponent(z, v_exponent.to(tl.float32))
    weights = p * exp2_int(v_exponent)[None, :]
    p_high, p_mid, p_low = fix_left(weights * power_of_two(-g + LEFT_BITS)[:, None])
    v_high, v_low = fix_right(v, exp2_int(-v_exponent + (RIGHT_BITS - 1))[None, :, None])
    a = exact_dot(p_high, p_mid, p_low, whole(v_high), whole(v_low))
    return m, l, g + (DOT_SHIFT - LEFT_BITS - RIGHT_BITS + 1), a
