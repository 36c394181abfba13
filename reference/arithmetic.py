"""The numerics contract in PyTorch: each function here is one term of docs/numerics.md.

Only operations that are the same on every machine stand here: correctly rounded binary32 arithmetic, one operation a
line where two could be fused, comparisons, integers and bits, sums that are exact, and sums in a stated tree.
"""

from __future__ import annotations

import torch
from torch import Tensor

from boundedkv.numerics import FIX_BITS, MIN_EXPONENT, MIN_POWER, NAN_BITS


def tree(x: Tensor) -> Tensor:
    """Sum the last axis in a balanced tree: neighbours first, zeros up to a power of two."""
    size = x.shape[-1]
    x = torch.nn.functional.pad(x, (0, (1 << (size - 1).bit_length()) - size))
    while x.shape[-1] > 1:
        x = x[..., 0::2] + x[..., 1::2]
    return x[..., 0]


def fix(x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Write vectors as integers of 16 bits and sign, by the exponent of their largest element.

    Args:
        x: [..., D].

    Returns:
        hi and lo [..., D] with `x = (256 hi + lo) * 2^(exponent - 15)`; the exponent and whether all elements are
        finite, [..., 1]. A vector that is not finite is written as zeros.
    """
    ok = finite(x)
    x = torch.where(ok, x, 0.0)
    exponent = exponent_of(x).clamp(min=MIN_EXPONENT)
    hi, lo = halves((x * power_of_two(FIX_BITS - exponent)).round())
    return hi, lo, exponent, ok


def halves(n: Tensor) -> tuple[Tensor, Tensor]:
    """Integers as 256 hi + lo with |lo| <= 128: each half is exact in 16-bit floats."""
    hi = (n / 256).round()
    return hi, n - 256 * hi


def exact_dot(left_hi: Tensor, left_lo: Tensor, right_hi: Tensor, right_lo: Tensor) -> Tensor:
    """Matrix product of fixed-point numbers over 256, without the product of the low halves; rounded once.

    Both parts are integers of at most 2^24, so no order of summation changes them.
    """
    return 256 * (left_hi @ right_hi) + (left_hi @ right_lo + left_lo @ right_hi)


def exp2(z: Tensor, coefficients: tuple[float, ...]) -> Tensor:
    """2^z for -126 <= z <= 0, and 0 for everything else, NaN included."""
    inside = z >= MIN_POWER
    z = torch.where(inside, z, 0.0)
    n = z.round()
    f = z - n
    p = torch.full_like(f, coefficients[-1])
    for coefficient in reversed(coefficients[:-1]):
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
