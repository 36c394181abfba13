"""The constants of the numerics contract: change one, and bits of results may change.

Both backends read them here and compute with them on their own. `NUMERICS_VERSION` names the whole contract, which
`docs/numerics.md` tells in words.
"""

from __future__ import annotations

import math

import numpy as np
import torch

NUMERICS_VERSION = 1

# Keys meet in tiles of consecutive stream positions; tiles fold into splits, splits into the result, left to right.
TILE = 64
TILES_PER_SPLIT = 8
SPLIT = TILE * TILES_PER_SPLIT

# Exact dots hold for this many products of two fixed-point vectors: 256 * 256 * 256 = 2**24.
MAX_HEAD_DIM = 256

# A vector is fixed with 15 bits below the exponent of its largest element, which is not taken lower than this.
FIX_BITS = 15
MIN_EXPONENT = -100
# In the ieee path the exponent of a value vector only keeps sums in range; 2**(it - 1) must be a normal number.
MIN_IEEE_EXPONENT = -125

# Weights are fixed with 16 bits below one.
WEIGHT_BITS = 16

# Weights below 2**MIN_POWER, and rescales below it, count as 0.
MIN_POWER = -126

# 2**f for f in [-1/2, 1/2], coefficients of f**0, f**1, ...: derived by tests/derive_exp2.py.
# Exact path: relative error 2**-18.39 in binary32, enough for weights of 16 bits.
EXP2_EXACT = (
    1.0,
    0.6931241750717163,
    0.2402409166097641,
    0.05590648949146271,
    0.009583127684891224,
)
# ieee path: relative error 2**-23.40 in binary32.
EXP2_IEEE = (
    1.0,
    0.6931472420692444,
    0.24022655189037323,
    0.055502619594335556,
    0.009617350064218044,
    0.0013422886840999126,
    0.00015694767353124917,
)

# The one NaN of each element type, as an integer: what a poisoned query returns, and how a slot holds a NaN.
NAN_BITS = {torch.float32: 0x7FC00000, torch.float16: 0x7E00, torch.bfloat16: 0x7FC0}

# The last stream position; positions are int32 in the plan.
MAX_POSITION = 2**31 - 1


def score_factor(scale: float) -> float:
    """The factor that takes a score to base-2 logarithms, rounded once to binary32.

    Args:
        scale: the config's score scale.

    Returns:
        `scale * log2(e)`, computed in binary64, as a float that binary32 holds.
    """
    return float(np.float32(scale * math.log2(math.e)))
