"""How far another arithmetic may be from the exact result: as far as the reference itself, times a factor.

The error of a query is measured over its elements, against float64, in units of the largest element of the values
that it sees. Its limit is `factor` times a unit, which is the largest of

    the worst error of the reference in the same call (with `Close.operands`, of float64 with operands so rounded)
    2^-20 (with operands of 11 bits 2^-11, of 8 bits 2^-8)
    half the last place, at 1, of the coarsest element type among q, k, v, the sources and the slots

The first is the honest measure; the others are there because the reference, too, is exact now and then. A result of
zeros, and a NaN for a poisoned query, have no arithmetic in them and are asked for as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from boundedkv.config import BoundedKVConfig
from boundedkv.plan import BoundedPlan
from boundedkv.testing.compare import told
from boundedkv.testing.exact import Exact, exact

FACTOR = 4.0
LEAST = 2.0**-20  # what float32 makes of a score of size 16, known to its last place


def tf32(x: Tensor) -> Tensor:
    """Round to 10 bits behind the leading one, to nearest even: what a tensor core makes of float32 operands."""
    word = x.float().contiguous().view(torch.int32)
    rounded = ((word + 0xFFF + ((word >> 13) & 1)) & ~0x1FFF).view(torch.float32).double()
    return torch.where(x.isfinite(), rounded, x.double())


def _through(dtype: torch.dtype) -> Callable[[Tensor], Tensor]:
    return lambda x: x.to(dtype).double()


OPERANDS: Mapping[str, tuple[Callable[[Tensor], Tensor], float]] = {
    "float32": (_through(torch.float32), LEAST),
    "tf32": (tf32, 2.0**-11),
    "float16": (_through(torch.float16), 2.0**-11),
    "bfloat16": (_through(torch.bfloat16), 2.0**-8),
}


@dataclass(frozen=True)
class Close:
    """How another arithmetic is judged; the module says how.

    Attributes:
        factor: how many units an error may be. Four leave room for another order of the sums and another rounding
            of scores, weights and products; a key too many among a few hundred is far beyond them.
        operands: what the kernel rounds the operands of its products to, one of "float32", "tf32", "float16",
            "bfloat16"; None: it is held to the reference's own arithmetic.
    """

    factor: float = FACTOR
    operands: str | None = None

    def __post_init__(self) -> None:
        """Refuse what means nothing."""
        if not self.factor > 0:
            raise ValueError(f"factor is {self.factor!r}, but should be above 0")
        if self.operands is not None and self.operands not in OPERANDS:
            raise ValueError(f"operands is {self.operands!r}, but should be one of {', '.join(OPERANDS)}")


class Verdict(NamedTuple):
    """How a result was judged.

    Attributes:
        nearness: the largest error in terms of its limit; above 1 is too far.
        problems: a sentence for each kind of fault.
        place: [row, query, head, element] of the first fault, or of the largest error.
    """

    nearness: float
    problems: tuple[str, ...]
    place: tuple[int, ...]


def judge(
    close: Close,
    config: BoundedKVConfig,
    plan: BoundedPlan,
    slots: Tensor | None,
    arguments: Mapping[str, Any],
    reference: Tensor,
    result: Tensor,
) -> Verdict:
    """Judge a result of attend.

    Args:
        close: how.
        config: the pool.
        plan: the step's layout.
        slots: the layer's slots before the step.
        arguments: what attend was called with.
        reference: the reference's result.
        result: the other one.
    """
    result = result.detach().cpu()
    if result.dtype != reference.dtype or result.shape != reference.shape:
        return Verdict(0.0, (f"result is {told(result)}, but should be {told(reference)}",), (0,) * 4)
    assert slots is not None
    given: dict[str, Any] = {name: arguments.get(name) for name in ("q", "k", "v", "source", "row_source", "rel_bias")}
    table = plan.table[: len(plan.rows)]
    truth = exact(config, table, slots, **given)
    poisoned, unseen = reference.isnan(), (truth.scale == 0)[..., None].expand_as(reference)
    for fault, where in (
        ("is not NaN, but should be: the query sees a poisoned pair", poisoned & ~result.isnan()),
        ("is NaN, but the query sees no poisoned pair", ~poisoned & result.isnan()),
        ("is not 0, but should be: the query sees no key, or zeros alone", unseen & ~poisoned & (result != 0)),
        ("is infinite", ~poisoned & result.isinf() & (result != reference)),
    ):
        if where.any():
            place = tuple(where.nonzero()[0].tolist())
            return Verdict(0.0, (f"result{list(place)} = {result[place].item()} {fault}",), place)
    counts = ~(poisoned | unseen | reference.isinf())
    error = torch.where(counts, (result.double() - truth.out).abs() / truth.scale.clamp(min=1e-300)[..., None], 0.0)
    own, least = torch.where(counts, reference.double(), truth.out), LEAST
    if close.operands is not None:
        operand, least = OPERANDS[close.operands]
        own = exact(config, table, slots, **given, operand=operand).out
    unit = max(_worst(own, truth), least, _coarsest(config, given))
    worst = float(error.amax()) if error.numel() else 0.0
    place = tuple(int(i) for i in torch.unravel_index(error.argmax(), error.shape)) if error.numel() else (0,) * 4
    nearness = worst / (close.factor * unit)
    if nearness <= 1:
        return Verdict(nearness, (), place)
    problem = (
        f"result{list(place)} is {result[place].item():.9g}, but should be near {truth.out[place].item():.9g}: "
        f"an error of {worst:.2g} of its values' scale, {_times(nearness)} times the limit of "
        f"{close.factor:g} x {unit:.2g}"
    )
    if close.operands is None:
        coarser = (replace(close, operands=name) for name in OPERANDS)
        allowed = (
            each for each in coarser if judge(each, config, plan, slots, arguments, reference, result).nearness <= 1
        )
        problem += next((f' (operands="{each.operands}" would allow it)' for each in allowed), "")
    return Verdict(nearness, (problem,), place)


def _worst(out: Tensor, truth: Exact) -> float:
    """The largest error of a result, in units of the values that its query sees."""
    errors = (out - truth.out).abs() / truth.scale.clamp(min=1e-300)[..., None]
    errors = torch.where((truth.scale > 0)[..., None] & errors.isfinite(), errors, 0.0)
    return float(errors.amax()) if errors.numel() else 0.0


def _coarsest(config: BoundedKVConfig, given: Mapping[str, Any]) -> float:
    """Half the last place, at 1, of the coarsest element type."""
    storage = (given["row_source"] or (None,))[0]
    tensors = (given["q"], given["k"], given["v"], given["source"], storage)
    return max(torch.finfo(dtype).eps / 2 for dtype in (config.dtype, *(x.dtype for x in tensors if x is not None)))


def _times(nearness: float) -> str:
    return f"{nearness:,.0f}" if nearness >= 100 else f"{nearness:.3g}"
