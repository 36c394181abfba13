"""Whether a device computes as the numerics contract says, tried on the device itself.

The fast backend attends on the device, the reference on the CPU, over inputs chosen to be hard: sums that reach their
bounds, ties, signed zeros, subnormals, the ends of the range. Every result is compared as integers.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from boundedkv.backends import build
from boundedkv.config import BoundedKVConfig, SinkWindow
from boundedkv.numerics import NUMERICS_VERSION
from boundedkv.session import Session
from boundedkv.transfer import Stream

_TINY = torch.finfo(torch.float32).tiny


class DeviceSelfTestError(RuntimeError):
    """A device, or its compiler, does not compute as the contract says: its bits cannot be trusted."""


class SelfTestReport(NamedTuple):
    """What a self test looked at.

    Attributes:
        device: the device that was tried.
        numerics_version: the contract it was held to.
        families: the names of the input families.
        results: how many results were compared, all of them equal.
    """

    device: str
    numerics_version: int
    families: tuple[str, ...]
    results: int


class _Case(NamedTuple):
    """A step of two tokens over retained keys.

    Attributes:
        q: [1, 1, 2, D].
        k: [1, 1, N + 2, D], the retained keys, then the step's own.
        v: [1, 1, N + 2, D].
        bias: [1, 1, 2, N + 3] by distance, or None.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    bias: Tensor | None = None


def self_test(device: torch.device | str) -> SelfTestReport:
    """Try a device against the reference, in both numeric paths.

    Args:
        device: a GPU, or the CPU where kernels are interpreted.

    Returns:
        What was compared.

    Raises:
        DeviceSelfTestError: a result differs; the message names the family, the element and both values.
        ValueError: the fast backend does not run on this device.
    """
    device = torch.device(device)
    results = 0
    for name, make in FAMILIES.items():
        for head_dim in (1, 16, 256):
            case = make(torch.Generator().manual_seed(head_dim), head_dim)
            for ieee in (False, True):
                expected = _attend(case, "reference", torch.device("cpu"), ieee)
                got = _attend(case, "fast", device, ieee)
                _compare(f"{name}, head_dim {head_dim}, {'ieee' if ieee else 'default'} path", expected, got, device)
                results += expected.numel()
    return SelfTestReport(str(device), NUMERICS_VERSION, tuple(FAMILIES), results)


def _attend(case: _Case, backend: str, device: torch.device, ieee: bool) -> Tensor:
    retained = case.k.shape[2] - 2
    config = BoundedKVConfig(1, 1, case.q.shape[3], SinkWindow(0, retained), max_slots=1)
    session = Session(build(config, device, backend=backend))
    entries = torch.cat([case.k, case.v], dim=-1)[None, :, :, :retained]  # [1, 1, 1, N, 2D]
    stream = Stream(0, 0, retained, retained, 0, retained, 0, sinks=entries[:, :, :, :0], ring=entries)
    session.import_request("self_test", stream._asdict())
    q, k, v = (x[:, :, -2:].to(device) for x in case[:3])
    bias = None if case.bias is None else case.bias.to(device)
    with session.step({"self_test": 2}) as step:
        return step.attend(0, q, k, v, rel_bias=bias, ieee=ieee).cpu()


def _compare(place: str, expected: Tensor, got: Tensor, device: torch.device) -> None:
    expected_bits, got_bits = expected.view(torch.int32), got.view(torch.int32)
    if torch.equal(expected_bits, got_bits):
        return
    first = tuple((expected_bits != got_bits).nonzero()[0].tolist())
    raise DeviceSelfTestError(
        f"{device} does not compute as numerics version {NUMERICS_VERSION} says: {place}, element {list(first)} is "
        f"{got[first].item()} (0x{int(got_bits[first]) & 0xFFFFFFFF:08x}), but should be "
        f"{expected[first].item()} (0x{int(expected_bits[first]) & 0xFFFFFFFF:08x})"
    )


def _normal(generator: torch.Generator, retained: int, head_dim: int) -> tuple[Tensor, Tensor, Tensor]:
    q = torch.randn(1, 1, 2, head_dim, generator=generator, dtype=torch.float32)
    k, v = (torch.randn(1, 1, retained + 2, head_dim, generator=generator, dtype=torch.float32) for _ in range(2))
    return q, k, v


def _gaussian(generator: torch.Generator, head_dim: int) -> _Case:
    """Nothing special: a fused multiply-add or another order of summation shows here."""
    return _Case(*_normal(generator, 100, head_dim))


def _long(generator: torch.Generator, head_dim: int) -> _Case:
    """Rows over several splits, whose partial results another kernel merges."""
    return _Case(*_normal(generator, 1700, head_dim))


def _full_sums(generator: torch.Generator, head_dim: int) -> _Case:
    """Every fixed-point number at its largest: exact dots reach 2^24."""
    largest = torch.full((1, 1, 66, head_dim), 1.9999999, dtype=torch.float32)
    return _Case(largest[:, :, :2] / head_dim, largest, -largest)


def _full_parts(generator: torch.Generator, head_dim: int) -> _Case:
    """The lower parts of the fixed-point numbers at their largest: 2^7 on the left, 2^10 on the right."""
    q = torch.full((1, 1, 2, head_dim), 1 + 2.0**-8 + 2.0**-16, dtype=torch.float32)
    k = torch.full((1, 1, 66, head_dim), 1 + 2.0**-10, dtype=torch.float32)
    return _Case(q / 2 ** round(math.log2(head_dim)), k, -k)


def _ties(generator: torch.Generator, head_dim: int) -> _Case:
    """Multiples of half a unit of the fixed-point numbers: every other rounding is a tie."""
    q, k, v = _normal(generator, 20, head_dim)
    q, k, v = ((x.clamp(-1, 1) * 65536).round() / 65536 for x in (q, k, v))
    for x in (q, k, v):
        x[..., 0] = 1.5
    return _Case(q, k, v)


def _zeros(generator: torch.Generator, head_dim: int) -> _Case:
    """Both zeros, in scores and in values."""
    q, k, v = _normal(generator, 4, head_dim)
    return _Case(q * 0.0, k * -0.0, torch.where(v > 0, 0.0 * v, -0.0 * v))


def _subnormals(generator: torch.Generator, head_dim: int) -> _Case:
    """Products, values and results below the normal numbers: flushed ones show."""
    q, k, v = _normal(generator, 6, head_dim)
    return _Case(q * 2.0**-70, k * 2.0**-70, v * _TINY / 8)


def _small_ceilings(generator: torch.Generator, head_dim: int) -> _Case:
    """Scores just above zero: their ceiling is 1, but 0 where a subnormal is flushed."""
    q = torch.full((1, 1, 2, head_dim), 2.0**-66, dtype=torch.float32)
    k = torch.full((1, 1, 5, head_dim), 2.0**-68, dtype=torch.float32)
    return _Case(q, k, torch.ones_like(k))


def _large(generator: torch.Generator, head_dim: int) -> _Case:
    """Values at the end of the range that cancel, keys near it, queries that bring the scores back."""
    q, k, v = _normal(generator, 6, head_dim)
    return _Case(q * 2.0**-118, k * 2.0**116, v.sign() * torch.finfo(torch.float32).max)


def _far_scores(generator: torch.Generator, head_dim: int) -> _Case:
    """Scores beyond 2^22, where rounding by a large constant no longer holds."""
    q, k, v = _normal(generator, 6, head_dim)
    return _Case(q * 2.0**13, k * 2.0**13, v)


def _exponents(generator: torch.Generator, head_dim: int) -> _Case:
    """Values of every size, and weights from 1 down to nothing."""
    q, k, v = _normal(generator, 62, head_dim)
    return _Case(q * 4, k, v * torch.linspace(-120, 120, 64, dtype=torch.float32).round().exp2().view(64, 1))


def _vanishing(generator: torch.Generator, head_dim: int) -> _Case:
    """Weights on both sides of 2^-126, below which they count as 0, on values large enough to show it."""
    q, k, v = _normal(generator, 62, head_dim)
    q[...], k[...] = 0.0, 0.0
    q[..., 0] = head_dim**0.5 * math.log(2)  # makes y the first element of k
    k[..., 0] = -torch.linspace(100, 140, 64, dtype=torch.float32)
    k[..., -1, 0] = 0.0
    v[..., :-1, :] *= 2.0**120
    return _Case(q, k, v)


def _masks(generator: torch.Generator, head_dim: int) -> _Case:
    """Masked pairs, a query whose pairs are all masked, and one with a pair that poisons it."""
    q, k, v = _normal(generator, 6, head_dim)
    bias = torch.randn(1, 1, 2, 9, generator=generator, dtype=torch.float32)
    bias[..., 0, ::2] = -torch.inf
    bias[..., 1, :] = -torch.inf if head_dim == 16 else torch.inf
    return _Case(q, k, v, bias)


FAMILIES: dict[str, Callable[[torch.Generator, int], _Case]] = {
    "gaussian": _gaussian,
    "long": _long,
    "full sums": _full_sums,
    "full parts": _full_parts,
    "ties": _ties,
    "zeros": _zeros,
    "subnormals": _subnormals,
    "small ceilings": _small_ceilings,
    "large": _large,
    "far scores": _far_scores,
    "exponents": _exponents,
    "vanishing": _vanishing,
    "masks": _masks,
}
