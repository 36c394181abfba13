"""The numerics contract in Triton: each function here is one term of docs/numerics.md.

Only operations that are the same on every machine stand here: correctly rounded binary32 arithmetic, comparisons,
integers and bits, sums that are exact, and sums in a stated tree. Launch with fusion off; `tl.fma` stands only where
its product is exact.

Shapes: Q queries, J = 64 positions of a tile, N vectors of D elements, padded to a power of two, as C pieces of P.
"""

import torch
import triton
import triton.language as tl

from boundedkv import numerics

FLOAT32: tl.constexpr = tl.constexpr(0)
FLOAT16: tl.constexpr = tl.constexpr(1)
BFLOAT16: tl.constexpr = tl.constexpr(2)

INF: tl.constexpr = tl.constexpr(float("inf"))
LARGEST: tl.constexpr = tl.constexpr(3.4028234663852886e38)
# Adding and subtracting it rounds a number below 2**22 to an integer, to nearest even. In between, the last bits of the
# sum are that integer's.
MAGIC: tl.constexpr = tl.constexpr(12582912.0)
TWO_23: tl.constexpr = tl.constexpr(8388608.0)

TILE: tl.constexpr = tl.constexpr(numerics.TILE)
MIN_POWER: tl.constexpr = tl.constexpr(numerics.MIN_POWER)
MIN_EXPONENT: tl.constexpr = tl.constexpr(numerics.MIN_EXPONENT)
MIN_IEEE_EXPONENT: tl.constexpr = tl.constexpr(numerics.MIN_IEEE_EXPONENT)
LEFT_BITS: tl.constexpr = tl.constexpr(numerics.LEFT_BITS)
LOW: tl.constexpr = tl.constexpr(2.0**numerics.LOW_BITS)
RIGHT_BITS: tl.constexpr = tl.constexpr(numerics.RIGHT_BITS)
RIGHT_LOW: tl.constexpr = tl.constexpr(2.0**numerics.RIGHT_LOW_BITS)
DOT_SHIFT: tl.constexpr = tl.constexpr(numerics.DOT_SHIFT)
LEFT_UNITS: tl.constexpr = tl.constexpr(2.0**numerics.LEFT_BITS)
NAN_FLOAT32: tl.constexpr = tl.constexpr(numerics.NAN_BITS[torch.float32])
NAN_FLOAT16: tl.constexpr = tl.constexpr(numerics.NAN_BITS[torch.float16])
NAN_BFLOAT16: tl.constexpr = tl.constexpr(numerics.NAN_BITS[torch.bfloat16])

C1: tl.constexpr = tl.constexpr(numerics.EXP2[1])
C2: tl.constexpr = tl.constexpr(numerics.EXP2[2])
C3: tl.constexpr = tl.constexpr(numerics.EXP2[3])
C4: tl.constexpr = tl.constexpr(numerics.EXP2[4])
C5: tl.constexpr = tl.constexpr(numerics.EXP2[5])
C6: tl.constexpr = tl.constexpr(numerics.EXP2[6])


@triton.jit
def ceil(x):
    """The least integer not below x, for any x: where 2^23 does not fit, x is an integer, or infinite."""
    small = tl.abs(x) < TWO_23
    away = tl.where(x < 0.0, -TWO_23, TWO_23)
    r = tl.where(small, (x + away) - away, x)
    return r + tl.where(r < x, 1.0, 0.0)


@triton.jit
def power_of_two(n):
    """2^n for integers n (floats) from -126 to 127, and 0 for everything else."""
    inside = (n >= MIN_POWER) & (n <= 127.0)
    bits = (n + (MAGIC + 127.0)).to(tl.int32, bitcast=True) << 23
    return tl.where(inside, bits.to(tl.float32, bitcast=True), 0.0)


@triton.jit
def exp2(z):
    """2^z for -126 <= z <= 0, and 0 for everything else, NaN included."""
    inside = z >= MIN_POWER
    z = tl.where(inside, z, 0.0)
    magic_n = z + MAGIC
    f = z - (magic_n - MAGIC)
    p = f * C6 + C5
    p = p * f + C4
    p = p * f + C3
    p = p * f + C2
    p = p * f + C1
    p = p * f + 1.0
    bits = p.to(tl.int32, bitcast=True) + (magic_n.to(tl.int32, bitcast=True) << 23)
    return tl.where(inside, bits.to(tl.float32, bitcast=True), 0.0)


@triton.jit
def tree(x, N: tl.constexpr):
    """Sum the last axis of [M, N], N a power of two up to 256, in a balanced tree, neighbours first: [M]."""
    M: tl.constexpr = x.shape[0]
    for level in tl.static_range(8):
        if N >> level > 1:
            even, odd = tl.split(tl.reshape(x, (M, N >> (level + 1), 2)))
            x = even + odd
    return tl.reshape(x, (M,))


@triton.jit
def exponents(x, LEAST: tl.constexpr):
    """The exponent of the largest element of each of N vectors, an integer from LEAST to 127; 128 if not finite.

    The vectors come as [C, N, P], C pieces of P elements.

    It comes from the bits: as integers, those of infinity are above every number's, those of NaN above infinity's.
    """
    bits = tl.max(tl.max(x.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 0), 1)
    return tl.maximum((bits >> 23) - 127, LEAST)


@triton.jit
def exp2_int(n):
    """2^n for int32 n from -126 to 127: `power_of_two` without its guards."""
    return ((n + 127) << 23).to(tl.float32, bitcast=True)


@triton.jit
def rint(x):
    """The nearest integer, ties to even, for |x| <= 2^22."""
    return (x + MAGIC) - MAGIC


@triton.jit
def to_units(x):
    """The nearest integer, ties to even, for 0 <= x <= 2^24, as an int32: from 2^23 on x is one."""
    return tl.where(x < TWO_23, (x + TWO_23) - TWO_23, x).to(tl.int32)


@triton.jit
def fix_left(x):
    """Write numbers below 2^24 as integers 2^16 high + 2^8 mid + low, high at most 2^8, the others at most 2^7.

    Of infinity mid and low are NaN.
    """
    high = tl.fma(x, 1.0 / (LOW * LOW), MAGIC) - MAGIC
    x = tl.fma(high, -LOW * LOW, x)
    mid = tl.fma(x, 1.0 / LOW, MAGIC) - MAGIC
    low = rint(tl.fma(mid, -LOW, x))
    return high.to(tl.float16), mid.to(tl.float16), low.to(tl.float16)


@triton.jit
def fix_right(x, scale):
    """Write x * scale, below 2^21, as integers 2^11 high + low, both at most 2^10; scale is a power of two.

    Of infinity low is NaN.
    """
    n = tl.fma(x, scale, MAGIC) - MAGIC
    high = tl.fma(n, 1.0 / RIGHT_LOW, MAGIC) - MAGIC
    low = tl.fma(high, -RIGHT_LOW, n)
    return high.to(tl.float16), low.to(tl.float16)


@triton.jit
def exact_dot(left_high, left_mid, left_low, right_high, right_low):
    """Matrix product of fixed-point numbers over 2^18, without the product of the low parts; four rounded adds.

    Each `tl.dot` is exact and starts from zero: a plain `x + tl.dot(..)` would be folded into one that is neither.
    """
    x = tl.dot(left_mid, right_low) * 2.0**-10
    x = tl.fma(tl.dot(left_low, right_high), 2.0**-7, x)
    x = tl.fma(tl.dot(left_high, right_low), 2.0**-2, x)
    x = tl.fma(tl.dot(left_mid, right_high), 2.0, x)
    return tl.fma(tl.dot(left_high, right_high), 2.0**9, x)


@triton.jit
def poisoned(y, visible, ok):
    """Scores in base-2 logarithms: -inf for pairs not seen, +inf for pairs that poison their query."""
    y = tl.where((y < INF) & ok, y, INF)
    return tl.where(visible, y, -INF)


@triton.jit
def value_exponent(z, v_exponent):
    """An integer g [Q] with |p_j v_j| < 2^(g + 1) for every key seen; -inf where none is."""
    return ceil(tl.max(tl.where(z >= MIN_POWER, z + v_exponent[None, :], -INF), 1))


@triton.jit
def fold(m1, l1, e1, a1, m2, l2, e2, a2):
    """Join two partial softmaxes, the first of earlier keys: rescale to the larger maximum, then add.

    m [Q] the maximum, an integer; l [Q] the sum of weights relative to 2^m; a [Q, D] with exponent e [Q] the weighted
    sum of values, a * 2^e.
    """
    m = tl.maximum(m1, m2)
    shift1 = tl.where(m1 == m, 0.0, m1 - m)
    shift2 = tl.where(m2 == m, 0.0, m2 - m)
    l = l1 * power_of_two(shift1) + l2 * power_of_two(shift2)  # noqa: E741
    e1 = e1 + shift1
    e2 = e2 + shift2
    e = tl.maximum(e1, e2)
    a = a1 * power_of_two(e1 - e)[:, None] + a2 * power_of_two(e2 - e)[:, None]
    return m, l, e, a


@triton.jit
def finish(m, l, e, a):  # noqa: E741
    """Divide: [Q, D], zeros where no key was seen, NaN where a pair poisons."""
    seen = l > 0.0
    out = tl.div_rn(a, tl.where(seen, l, 1.0)[:, None] + tl.zeros_like(a))
    out = out * power_of_two(tl.where(seen, e, 0.0))[:, None]
    out = tl.where(out > LARGEST, LARGEST, out)
    out = tl.where(out < -LARGEST, -LARGEST, out) + 0.0
    out = tl.where(seen[:, None], out, 0.0)
    return tl.where((m == INF)[:, None], float("nan"), out)


@triton.jit
def load_float(pointer, mask, DTYPE: tl.constexpr):
    """Load as float32, zero where masked. bfloat16 comes as its bits, which are the upper half of float32's."""
    if DTYPE == BFLOAT16:
        bits = tl.load(pointer, mask=mask, other=0).to(tl.int32) << 16
        return bits.to(tl.float32, bitcast=True)
    return tl.load(pointer, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def bfloat16_bits(x):
    """Round float32 to bfloat16, to nearest even, as bits in the lower half of an int32; not for NaN."""
    bits = x.to(tl.int32, bitcast=True)
    return (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16


@triton.jit
def as_stored(x, DTYPE: tl.constexpr):
    """The float32 that comes back when x is held as an element of this type."""
    if DTYPE == FLOAT16:
        x = x.to(tl.float16).to(tl.float32)
    elif DTYPE == BFLOAT16:
        x = tl.where(x == x, (bfloat16_bits(x) << 16).to(tl.float32, bitcast=True), x)
    return x


@triton.jit
def store_float(pointer, x, mask, DTYPE: tl.constexpr):
    """Round to the element type and store its bits; NaN has one pattern."""
    if DTYPE == FLOAT32:
        bits = tl.where(x == x, x.to(tl.int32, bitcast=True), NAN_FLOAT32)
    elif DTYPE == FLOAT16:
        bits = tl.where(x == x, x.to(tl.float16).to(tl.int16, bitcast=True), NAN_FLOAT16).to(tl.int16)
    else:
        bits = tl.where(x == x, bfloat16_bits(x), NAN_BFLOAT16).to(tl.int16)
    tl.store(pointer, bits, mask=mask)
