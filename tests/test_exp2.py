"""The two polynomials for 2^f: the constants are what the derivation gives, and keep the bounds the contract states."""

import numpy as np
import pytest
from derive_exp2 import check, derive, evenly_spaced, horner, theoretical

from boundedkv import numerics

# name, degree, bound on the relative error of the polynomial itself, and of its evaluation in binary32, and in ulps
POLYNOMIALS = [("EXP2_EXACT", 4, 2**-18.43, 2**-18.39, 43.0), ("EXP2_IEEE", 6, 2**-27.5, 2**-23.4, 1.08)]
NAMES = [name for name, *_ in POLYNOMIALS]


@pytest.mark.parametrize("name", NAMES)
def test_constants_are_binary32_and_start_with_one(name):
    coefficients = getattr(numerics, name)
    assert coefficients[0] == 1.0
    assert [float(np.float32(c)) for c in coefficients] == list(coefficients)


@pytest.mark.parametrize(("name", "degree"), [(name, degree) for name, degree, *_ in POLYNOMIALS])
def test_constants_are_those_the_derivation_gives(name, degree):
    assert tuple(getattr(numerics, name)) == derive(degree)


@pytest.mark.parametrize(("name", "degree", "real_bound", "bound", "ulps"), POLYNOMIALS)
def test_error_is_within_the_stated_bound(name, degree, real_bound, bound, ulps):
    coefficients = getattr(numerics, name)
    report = check(coefficients, step=61)  # derive_exp2.py itself takes every float
    assert len(coefficients) == degree + 1
    assert report.floats > 1_900_000
    assert theoretical(coefficients) <= real_bound
    assert report.relative <= bound
    assert report.ulps <= ulps
    assert report.ordered, "2^f is on the wrong side of 1"
    assert report.in_range, "2^f is outside [1/2, 2): adding n to its exponent would not be a product with 2^n"


@pytest.mark.parametrize("name", NAMES)
def test_value_at_zero_is_one_and_does_not_fall_where_n_steps(name):
    low, zero, high = horner(getattr(numerics, name), np.array([-0.5, 0.0, 0.5], np.float32))
    assert zero == 1
    assert high <= 2 * low


def test_check_notices_a_wrong_coefficient():
    wrong = (1.0, *(-c for c in numerics.EXP2_IEEE[1:]))
    report = check(wrong, step=9973)
    assert not report.ordered
    assert report.relative > 0.5


def test_horner_rounds_after_each_operation():
    f = evenly_spaced(1 << 12)
    fused = (numerics.EXP2_IEEE[5] + numerics.EXP2_IEEE[6] * f.astype(np.float64)).astype(np.float32)
    assert (horner(numerics.EXP2_IEEE[5:], f) != fused).any()
