"""The constants of the numerics contract: change one, and bits of results may change.

Both backends read them here and compute with them on their own. `NUMERICS_VERSION` names the whole contract, which
`docs/numerics.md` tells in words.
"""

from __future__ import annotations

import math

import numpy as np
import torch

NUMERICS_VERSION = 1
"""The version of the contract; it rises when a result's bits change."""

TILE = 64
"""Stream positions of a tile; its keys are taken together."""

TILES_PER_SPLIT = 8
"""Tiles that fold into one split, left to right."""

SPLIT = TILE * TILES_PER_SPLIT
"""Stream positions of a split; splits fold into the result, left to right."""

CHUNK = 64
"""Elements of a query or key that are fixed together. An exact dot has at most this many products of fixed-point
numbers, as 64 * 256 * 1024 = 2**24: as many as a tile has positions."""

MAX_HEAD_DIM = 256
"""The longest vector."""

LEFT_BITS = 24
"""Bits of the left side of an exact dot, queries and weights, held in three parts `LOW_BITS` apart. Each part is exact
in float16."""

LOW_BITS = 8
"""Bits between the parts of the left side."""

RIGHT_BITS = 21
"""Bits of the right side, keys and values, held in two parts `RIGHT_LOW_BITS` apart, each exact in float16."""

RIGHT_LOW_BITS = 11
"""Bits between the parts of the right side."""

DOT_SHIFT = 18
"""An exact dot of integers is divided by 2 to this, so that its parts meet in fused multiply-adds of exact products."""

MIN_EXPONENT = -100
"""The exponent of a fixed vector's largest element is not taken lower."""

MIN_IEEE_EXPONENT = -125
"""The same in the ieee path, where a value's exponent only keeps sums in range; 2**(it - 1) must be a normal number."""

MIN_POWER = -126
"""Weights below 2 to this, and rescales below it, count as 0."""

EXP2 = (
    1.0,
    0.6931472420692444,
    0.24022655189037323,
    0.055502619594335556,
    0.009617350064218044,
    0.0013422886840999126,
    0.00015694767353124917,
)
"""2**f for f in [-1/2, 1/2]: the coefficients of f**0, f**1 and so on, derived by tests/derive_exp2.py. Its relative
error is 2**-23.40 in binary32."""

NAN_BITS = {torch.float32: 0x7FC00000, torch.float16: 0x7E00, torch.bfloat16: 0x7FC0}
"""The one NaN of each element type, as an integer: what a poisoned query returns, and how a slot holds a NaN."""

MAX_POSITION = 2**31 - 1
"""The last stream position; positions are int32 in the plan."""


def score_factor(scale: float) -> float:
    """The factor that takes a score to base-2 logarithms, rounded once to binary32.

    Args:
        scale: the config's score scale.

    Returns:
        `scale * log2(e)`, computed in binary64, as a float that binary32 holds.
    """
    return float(np.float32(scale * math.log2(math.e)))
