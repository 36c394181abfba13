"""The polynomial for 2^f: its constants are what the derivation gives, and keep the bounds the contract states."""

import numpy as np
from derive_exp2 import DEGREE, check, derive, evenly_spaced, horner, theoretical

from boundedkv import numerics


def test_constants_are_binary32_and_start_with_one():
    assert numerics.EXP2[0] == 1.0
    assert [float(np.float32(c)) for c in numerics.EXP2] == list(numerics.EXP2)


def test_constants_are_those_the_derivation_gives():
    assert derive() == numerics.EXP2


def test_error_is_within_the_stated_bound():
    report = check(numerics.EXP2, step=61)  # derive_exp2.py itself takes every float
    assert len(numerics.EXP2) == DEGREE + 1
    assert report.floats > 1_900_000
    assert theoretical(numerics.EXP2) <= 2**-27.5  # of the polynomial itself
    assert report.relative <= 2**-23.4
    assert report.ulps <= 1.08
    assert report.ordered, "2^f is on the wrong side of 1"
    assert report.in_range, "2^f is outside [1/2, 2): adding n to its exponent would not be a product with 2^n"


def test_value_at_zero_is_one_and_does_not_fall_where_n_steps():
    low, zero, high = horner(numerics.EXP2, np.array([-0.5, 0.0, 0.5], np.float32))
    assert zero == 1
    assert high <= 2 * low


def test_check_notices_a_wrong_coefficient():
    wrong = (1.0, *(-c for c in numerics.EXP2[1:]))
    report = check(wrong, step=9973)
    assert not report.ordered
    assert report.relative > 0.5


def test_horner_rounds_after_each_operation():
    f = evenly_spaced(1 << 12)
    fused = (numerics.EXP2[5] + numerics.EXP2[6] * f.astype(np.float64)).astype(np.float32)
    assert (horner(numerics.EXP2[5:], f) != fused).any()
