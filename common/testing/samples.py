"""Tensors told in a few words, so that a failure can be told, and made again, in a few lines."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

NAN = float("nan")
INF = float("inf")
ODD = (NAN, INF, -INF, -0.0, 1e-41, 3e38, 6e-8, 1.0)
POISON = (NAN, -0.0)


@dataclass(frozen=True)
class Sample:
    """A tensor of random numbers.

    Attributes:
        shape: its sizes.
        seed: which numbers.
        kind: "normal"; "wide", of sizes from 2^-30 to 2^11; "zeros"; "odd", a tenth of them NaN, infinities, zeros'
            signs, subnormals or near the largest; "poison", a tenth of them NaN or -0.
        dtype: element type.
        layout: "whole"; "within" a larger tensor of NaN; "transposed" in memory; "expanded" from the first entry.
        ends: entry i of the first axis is NaN from index `ends[i]` of the last axis but one; None for no such end.
        masked: of the last axis, every entry whose index is a multiple of this is -inf; 0 for none.

    Examples:
        >>> Sample((1, 1, 2, 8), seed=3).tensor().shape
        torch.Size([1, 1, 2, 8])
    """

    shape: tuple[int, ...]
    seed: int = 0
    kind: str = "normal"
    dtype: torch.dtype = torch.float32
    layout: str = "whole"
    ends: tuple[int, ...] | None = None
    masked: int = 0

    def tensor(self) -> Tensor:
        """The tensor itself, the same each time, on the CPU."""
        x = self._numbers().to(self.dtype)
        for entry, end in enumerate(self.ends or ()):
            x[entry, ..., end:, :] = NAN
        if self.masked:
            x[..., :: self.masked] = -INF
        if self.layout == "within":
            around = x.new_full([size + 2 for size in self.shape], NAN)
            return around[tuple(slice(1, 1 + size) for size in self.shape)].copy_(x)
        if self.layout == "transposed":
            return x.transpose(1, 2).contiguous().transpose(1, 2)
        return x[:1].expand(self.shape) if self.layout == "expanded" else x

    def _numbers(self) -> Tensor:
        generator = torch.Generator().manual_seed(self.seed)
        if self.kind == "zeros":
            return torch.zeros(self.shape, dtype=torch.float32)
        x = torch.randn(self.shape, generator=generator, dtype=torch.float32)
        if self.kind == "wide":
            return x * 2.0 ** torch.randint(-30, 12, self.shape, generator=generator)
        if self.kind in ("odd", "poison"):
            odd = torch.tensor(ODD if self.kind == "odd" else POISON, dtype=torch.float32)
            odd = odd[torch.randint(len(odd), self.shape, generator=generator)]
            return torch.where(torch.rand(self.shape, generator=generator) < 0.1, odd, x)
        return x

    def __repr__(self) -> str:
        """The call that makes it, without what goes without saying."""
        others = (
            f", {field.name}={getattr(self, field.name)!r}"
            for field in dataclasses.fields(self)[1:]
            if getattr(self, field.name) != field.default
        )
        return f"Sample({self.shape}{''.join(others)})"


def made(value: Any) -> Any:
    """A value with a tensor in place of every `Sample` in it."""
    if isinstance(value, Sample):
        return value.tensor()
    return tuple(map(made, value)) if type(value) is tuple else value
