"""The numerics contract in PyTorch: each function here is one term of docs/numerics.md.

Only operations that are the same on every machine stand here: correctly rounded binary32 arithmetic, one operation a
line where two could be fused, comparisons, integers and bits, sums that are exact, and sums in a stated tree.
"""

from __future__ import annotations

import torch
from torch import Tensor

from boundedkv.numerics import EXP2, LOW_BITS, MIN_POWER, NAN_BITS, RIGHT_LOW_BITS


def tree(x: Tensor) -> Tensor:
    """Sum the last axis in a balanced tree: neighbours first, zeros up to a power of two."""
    size = x.shape[-1]
    x = torch.nn.functional.pad(x, (0, (1 << (size - 1).bit_length()) - size))
    while x.shape[-1] > 1:
        x = x[..., 0::2] + x[..., 1::2]
    return x[..., 0]


def fix_left(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Write numbers below 2^24 as integers 2^16 high + 2^8 mid + low, high at most 2^8, the others at most 2^7."""
    high = (x / 2 ** (2 * LOW_BITS)).round()
    x = x - 2 ** (2 * LOW_BITS) * high
    mid = (x / 2**LOW_BITS).round()
    return high, mid, (x - 2**LOW_BITS * mid).round()


def fix_right(x: Tensor) -> tuple[Tensor, Tensor]:
    """Write numbers below 2^21 as integers 2^11 high + low, both at most 2^10."""
    n = x.round()
    high = (n / 2**RIGHT_LOW_BITS).round()
    return high, n - 2**RIGHT_LOW_BITS * high


def exact_dot(left: tuple[Tensor, Tensor, Tensor], right: tuple[Tensor, Tensor]) -> Tensor:
    """Matrix product of fixed-point numbers over 2^18, without the product of the low parts.

    Each of the five products below is an integer of at most 2^24 for up to 64 of them: no order of summation changes
    it. They meet in four rounded adds, small ones first. The products are taken in binary64 because PyTorch can be told
    to take those of binary32 more coarsely; they are exact in either.
    """
    (high, mid, low), (right_high, right_low) = ([part.double() for part in parts] for parts in (left, right))
    x = (mid @ right_low).float() * 2**-10
    x = (low @ right_high).float() * 2**-7 + x
    x = (high @ right_low).float() * 2**-2 + x
    x = (mid @ right_high).float() * 2 + x
    return (high @ right_high).float() * 2**9 + x


def exp2(z: Tensor) -> Tensor:
    """2^z for -126 <= z <= 0, and 0 for everything else, NaN included."""
    inside = z >= MIN_POWER
    z = torch.where(inside, z, 0.0)
    n = z.round()
    f = z - n
    p = torch.full_like(f, EXP2[-1])
    for coefficient in reversed(EXP2[:-1]):
        p = p * f
        p = p + coefficient
    return torch.where(inside, p * power_of_two(n), 0.0)


def power_of_two(n: Tensor) -> Tensor:
    """2^n for integers n from -126 to 127, and 0 for everything else."""
    inside = (n >= MIN_POWER) & (n <= 127)
    bits = (torch.where(inside, n, 0.0).to(torch.int32) + 127) << 23
    return torch.where(inside, bits.view(torch.float32), 0.0)


def finite(x: Tensor) -> Tensor:
    """Whether all elements of a vector are finite: [..., D] -> [..., 1]."""
    return x.isfinite().all(-1, keepdim=True)


def exponent_of(x: Tensor) -> Tensor:
    """The exponent of a vector's largest element, from its bits: [..., D] -> [..., 1]; -127 for subnormals."""
    return ((x.abs().amax(-1, keepdim=True).view(torch.int32) >> 23) - 127).float()


def rounded(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Round float32 to an element type, to nearest even; what is not a number is written with one pattern of bits."""
    words = torch.int32 if dtype == torch.float32 else torch.int16
    nan = torch.tensor(NAN_BITS[dtype], dtype=words, device=x.device).view(dtype)
    return torch.where(x.isnan(), nan, x.to(dtype))
