"""Derive the polynomial for 2^f on [-1/2, 1/2] that `boundedkv.numerics` carries.

It has c0 = 1 exactly and is evaluated by Horner in binary32, multiply then add, never fused. Degree 6 is as good as
that evaluation allows.

How: a Remez exchange gives the minimax relative error with c0 fixed; then the coefficients are rounded to binary32
one after the other, lowest first, and the rest is refitted after each rounding. The first coefficients also try their
neighbouring floats, and the candidate with the smallest evaluated error is taken.

    python tests/derive_exp2.py          derive it, check every float with exponent >= -8, print constants and bounds

Only numpy is needed: the smallest error sought, 2^-29, is far above what float64 blurs.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

F32 = NDArray[np.float32]
F64 = NDArray[np.float64]

DEGREE = 6
# A Chebyshev grid, dense at the ends where the error peaks; even length, so 0 (where the error is 0) is not on it.
GRID: F64 = 0.5 * np.cos(np.linspace(np.pi, 0.0, 4000))


def horner(coefficients: Sequence[float], f: F32) -> F32:
    """The polynomial as the kernels evaluate it: binary32, one rounded multiply and one rounded add per degree."""
    c = [np.float32(x) for x in coefficients]
    value = np.full_like(f, c[-1])
    for ck in reversed(c[:-1]):
        np.multiply(value, f, out=value)
        np.add(value, ck, out=value)
    return value


def exact_value(coefficients: Sequence[float], f: F64) -> F64:
    """The polynomial in float64: what the coefficients say, without binary32 rounding."""
    value = np.full_like(f, coefficients[-1])
    for ck in reversed(coefficients[:-1]):
        value = value * f + ck
    return value


def theoretical(coefficients: Sequence[float]) -> float:
    """Largest relative error of the polynomial itself, without binary32 rounding of its evaluation."""
    f = np.concatenate([np.linspace(-0.5, 0.5, 20001), GRID])
    return float(np.abs(exact_value(coefficients, f) / np.exp2(f) - 1).max())


def remez(fixed: Sequence[float], degree: int) -> list[float]:
    """Coefficients 0..degree with the smallest maximum of |p(f) / 2^f - 1| over the grid; the first are `fixed`.

    What remains to choose is f^k * (polynomial in f) / 2^f, k = len(fixed): times sign(f)^k it is a positive weight
    times a polynomial, so the best error alternates after that sign is taken out.
    """
    k, free = len(fixed), degree + 1 - len(fixed)
    side = np.sign(GRID) ** k
    true = np.exp2(GRID)
    columns = np.stack([side * GRID**j / true for j in range(k, degree + 1)], axis=1)
    target = side * (true - exact_value(fixed, GRID)) / true
    points = np.unique(np.round(np.linspace(0, len(GRID) - 1, free + 1)).astype(int))
    best: list[float] = []
    best_error = np.inf
    for _ in range(60):
        signs = (-1.0) ** np.arange(free + 1)
        solution = np.linalg.solve(np.column_stack([columns[points], signs]), target[points])
        error = columns @ solution[:free] - target
        size = float(np.abs(error).max())
        if size < best_error:
            best, best_error = [*fixed, *(float(x) for x in solution[:free])], size
        if size <= abs(solution[free]) * (1 + 1e-9):
            break
        # One extreme point per run of equal sign; with a run too many, the run with the smaller end error goes.
        cuts = np.flatnonzero(np.diff(np.sign(error)) != 0) + 1
        runs = np.split(np.arange(len(GRID)), cuts)
        extremes = [int(run[np.abs(error[run]).argmax()]) for run in runs]
        while len(extremes) > free + 1:
            extremes.pop(0 if abs(error[extremes[0]]) < abs(error[extremes[-1]]) else -1)
        if len(extremes) < free + 1:
            break
        points = np.array(extremes)
    return best


def neighbours(x: float, reach: int) -> Iterator[float]:
    """The binary32 value nearest to x, then those up to `reach` steps away."""
    centre = np.float32(x)
    yield float(centre)
    for direction in (np.float32(np.inf), np.float32(-np.inf)):
        y = centre
        for _ in range(reach):
            y = np.nextafter(y, direction)
            yield float(y)


def candidates(degree: int, reaches: Sequence[int]) -> Iterator[tuple[float, ...]]:
    """Binary32 coefficients near the minimax ones: c1, c2, ... reach as many steps as `reaches` says, the rest 0."""

    def grow(fixed: tuple[float, ...]) -> Iterator[tuple[float, ...]]:
        if len(fixed) > degree:
            yield fixed
            return
        reach = reaches[len(fixed) - 1] if len(fixed) <= len(reaches) else 0
        for c in neighbours(remez(fixed, degree)[len(fixed)], reach):
            yield from grow((*fixed, c))

    return grow((1.0,))


def evenly_spaced(count: int) -> F32:
    """`count` + 1 binary32 values from -1/2 to 1/2, both ends and 0 among them for an even count."""
    return np.linspace(-0.5, 0.5, count + 1).astype(np.float32)


@dataclass
class Report:
    """What an evaluation over many floats found; errors are maxima."""

    floats: int = 0
    relative: float = 0.0
    ulps: float = 0.0
    ordered: bool = True  # p(f) >= 1 where f >= 0, p(f) <= 1 where f <= 0
    in_range: bool = True  # 1/2 <= p(f) < 2
    monotone: bool = True  # no float's value above its successor's, inside each block given to `add`

    def add(self, coefficients: Sequence[float], f: F32) -> Report:
        """Evaluate on the ascending floats `f` and fold the findings in."""
        value = horner(coefficients, f)
        true = np.exp2(f.astype(np.float64))
        error = np.abs(value.astype(np.float64) - true)
        ulp = np.where(true >= 1, 2.0**-23, 2.0**-24)
        self.floats += f.size
        self.relative = max(self.relative, float((error / true).max()))
        self.ulps = max(self.ulps, float((error / ulp).max()))
        self.ordered &= bool((value[f >= 0] >= 1).all() and (value[f <= 0] <= 1).all())
        self.in_range &= bool((value >= 0.5).all() and (value < 2).all())
        self.monotone &= bool((np.diff(value) >= 0).all())
        return self


def derive() -> tuple[float, ...]:
    """The coefficients, ascending, each exactly a binary32 value. The same on every machine."""
    # What is left of the error is that of the evaluation: candidates are evaluated, all of them on few floats, the best
    # ones on many.
    few, many = evenly_spaced(1 << 15), evenly_spaced(1 << 20)
    ranked = sorted(candidates(DEGREE, (1, 1, 1)), key=lambda c: Report().add(c, few).ulps)
    return min(ranked[:8], key=lambda c: Report().add(c, many).ulps)


def blocks(step: int = 1) -> Iterator[F32]:
    """Every `step`-th binary32 value with 2^-8 <= |f| <= 1/2, then samples below, each block ascending."""
    first, last = (int(np.float32(x).view(np.int32)) for x in (2.0**-8, 0.5))
    size = 1 << 22
    for start in range(first, last + 1, size * step):
        bits = np.arange(start, min(start + size * step, last + 1), step, dtype=np.int32)
        yield from (bits.view(np.float32), -bits[::-1].view(np.float32))
    ends = np.array([-0.5, 0.0, 0.5], dtype=np.float32)
    bits = np.arange(0, first, 997 * step, dtype=np.int32)  # zero, subnormals and all exponents below -8
    small = bits.view(np.float32)
    yield from (ends, small, -small[::-1])


def check(coefficients: Sequence[float], step: int = 1) -> Report:
    """Evaluate on `blocks(step)`; at step 1 these are all floats that matter."""
    report = Report()
    for f in blocks(step):
        report.add(coefficients, f)
    return report


def main() -> int:
    """Derive, check and print the polynomial; exit status 1 if a condition fails."""
    c = derive()
    report = check(c)
    zero, low, high = (float(horner(c, np.array([x], np.float32))[0]) for x in (0.0, -0.5, 0.5))
    print(f"EXP2 = (  # degree {DEGREE}, ascending")
    for x in c:
        print(f"    {x!r},  # 0x{int(np.float32(x).view(np.int32)):08X}  {x.hex()}")
    print(")")
    print(f"  minimax, real coefficients : 2^{np.log2(theoretical(remez([1.0], DEGREE))):.3f}")
    print(f"  binary32 coefficients      : 2^{np.log2(theoretical(c)):.3f}")
    print(f"  evaluated in binary32      : 2^{np.log2(report.relative):.3f}, {report.ulps:.4f} ulp")
    print(f"  over                       : {report.floats} floats")
    conditions = {
        "p(0) == 1": zero == 1.0,
        "p >= 1 for f >= 0, p <= 1 for f <= 0": report.ordered,
        "1/2 <= p < 2": report.in_range,
        "p(1/2) <= 2 p(-1/2), so 2^x does not fall where n steps": high <= 2 * low,
    }
    for text, held in conditions.items():
        print(f"  {'holds' if held else 'FAILS'}: {text}")
    print(f"  monotone, float by float: {'yes' if report.monotone else 'no'} (not required)")
    return 0 if all(conditions.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
