"""Whether two results are the same to the bit and, where they are not, in which place first."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from boundedkv.manager import BoundedKVManager
from boundedkv.plan import BoundedPlan
from boundedkv.step import StepContext

_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def differences(place: str, left: Any, right: Any, names: tuple[str, str] = ("left", "right")) -> Iterator[str]:
    """Tell where two values differ.

    Tensors are compared as integers; plans line by line; errors by type, text and attributes; managers by their
    config; everything else by type and value. A tensor's device does not count, nor does one that an error names.

    Args:
        place: what the values are called.
        left: what a manager returned or raised.
        right: the same of another manager.
        names: what the managers are called.

    Yields:
        A sentence for each place, none if the values are the same.

    Examples:
        >>> import torch
        >>> print(*differences("x", torch.tensor([1.0, 0.0]), torch.tensor([1.0, -0.0])))
        x[1] is 0.0 (0x00000000) for left, -0.0 (0x80000000) for right; 1 of 2 elements differ
    """
    if isinstance(left, BoundedKVManager) and isinstance(right, BoundedKVManager):
        yield from differences(f"{place}.config", left.config, right.config, names)
    elif type(left) is not type(right):
        yield f"{place} is {told(left)} for {names[0]}, {told(right)} for {names[1]}"
    elif isinstance(left, Tensor):
        yield from _tensor_differences(place, left, right, names)
    elif isinstance(left, BoundedPlan):
        yield from _plan_differences(place, left, right, names)
    elif isinstance(left, Exception):
        yield from differences(f"text of {place}", _text(left), _text(right), names)
        yield from differences(f"attributes of {place}", vars(left), vars(right), names)
    elif isinstance(left, tuple | list):
        yield from differences(f"length of {place}", len(left), len(right), names)
        fields = [f".{field}" for field in getattr(left, "_fields", ())] or [f"[{i}]" for i in range(len(left))]
        for field, left_item, right_item in zip(fields, left, right, strict=False):
            yield from differences(place + field, left_item, right_item, names)
    elif isinstance(left, Mapping):
        yield from differences(f"keys of {place}", list(left), list(right), names)
        for key in [key for key in left if key in right]:
            yield from differences(f"{place}[{key!r}]", left[key], right[key], names)
    elif left != right:
        yield f"{place} is {_number(left)} for {names[0]}, {_number(right)} for {names[1]}"


def _plan_differences(place: str, left: BoundedPlan, right: BoundedPlan, names: tuple[str, str]) -> Iterator[str]:
    """The lines past the batch are not counted, so that one table may be longer, but must be zero in both."""
    rows = len(left.rows)
    for field, left_value, right_value in zip(left._fields[1:], left[1:], right[1:], strict=True):
        yield from differences(f"{place}.{field}", left_value, right_value, names)
    yield from differences(f"{place}.table", left.table[:rows], right.table[:rows], names)
    yield from differences(f"{place}.retained()", left.retained(), right.retained(), names)
    for name, table in zip(names, (left.table, right.table), strict=True):
        past = table[rows:]
        yield from differences(f"{place}.table past the batch", torch.zeros_like(past), past, ("the format", name))


def _tensor_differences(place: str, left: Tensor, right: Tensor, names: tuple[str, str]) -> Iterator[str]:
    if left.dtype != right.dtype or left.shape != right.shape:
        yield f"{place} is {told(left)} for {names[0]}, {told(right)} for {names[1]}"
        return
    left, right = left.detach().cpu(), right.detach().cpu()
    words = _WORDS[left.element_size()]
    left_bits, right_bits = left.view(words), right.view(words)
    if torch.equal(left_bits, right_bits):
        return
    unequal = (left_bits != right_bits).nonzero()
    first = tuple(unequal[0].tolist())
    mask = (1 << 8 * left.element_size()) - 1
    digits = 2 * left.element_size()
    left_told, right_told = (
        f"{value[first].item()} (0x{int(bits[first]) & mask:0{digits}x})"
        for value, bits in ((left, left_bits), (right, right_bits))
    )
    yield (
        f"{place}{list(first)} is {left_told} for {names[0]}, {right_told} for {names[1]}; "
        f"{len(unequal)} of {left.numel()} elements differ"
    )


def _number(value: object) -> str:
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value} ({value:#x})"
    return f"{value} ({value.hex()})" if isinstance(value, float) else repr(value)


def _text(error: Exception) -> str:
    return re.sub(r"\b(cpu|cuda:\d+)\b", "<device>", str(error))


def told(value: object) -> str:
    """A value in words short enough for a message: tensors by their type and shape, the rest in full."""
    if isinstance(value, Tensor):
        where = "" if value.device.type == "cpu" else f" on {value.device}"
        return f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)}{where}"
    if isinstance(value, BoundedPlan):
        return f"BoundedPlan(rows={value.rows})"
    if isinstance(value, StepContext):
        return repr(replace(value, plan_results={}))
    if type(value) in (tuple, list):
        return f"({', '.join(map(told, value))})"  # type: ignore[call-overload]
    if type(value) is dict:
        return "{" + ", ".join(f"{key!r}: {told(item)}" for key, item in value.items()) + "}"
    return repr(value)
