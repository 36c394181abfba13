"""Errors of attention against float64: which inputs, by what arithmetic, by what measure.

The reference computes for both backends, their bits being the same. Inputs are drawn in binary64 and rounded, so that
`ieee` and the default path err by the same on any machine. The others sum as PyTorch does there: they may differ a bit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

import numpy as np
import torch
from streams import Own, attend64
from torch import Tensor

from boundedkv.reference.attention import attend


class Shape(NamedTuple):
    head_dim: int = 64
    keys: int = 512
    queries: int = 64
    heads: int = 4


SHAPES = {
    "head_dim 16": Shape(head_dim=16),
    "head_dim 64": Shape(),
    "head_dim 128": Shape(head_dim=128),
    "head_dim 256": Shape(head_dim=256),
    "16384 keys": Shape(keys=16384, queries=16),
}
USUAL = "head_dim 64"
# What the inputs are rounded to before anyone computes: the type in which a model holds them.
ELEMENT_TYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


# Inputs. A family draws q [heads, queries, head_dim], k and v [heads, keys, head_dim] in float64.

HERE, ELSEWHERE = (3, 9), (5, 12)  # channels with outliers
Family = Callable[[np.random.RandomState, Shape], Own]


def normal(random: np.random.RandomState, *shape: int) -> Tensor:
    return torch.from_numpy(random.standard_normal(shape))


def gaussian(random: np.random.RandomState, shape: Shape) -> Own:
    return Own(*(normal(random, shape.heads, n, shape.head_dim) for n in (shape.queries, shape.keys, shape.keys)))


def outliers(factor: float, **channels: tuple[int, ...]) -> Family:
    """Gaussian, but some channels of q, k or v are larger than the others."""

    def family(random: np.random.RandomState, shape: Shape) -> Own:
        own = gaussian(random, shape)
        for name, loud in channels.items():
            getattr(own, name)[..., loud] *= factor
        return own

    return family


def balanced(random: np.random.RandomState, shape: Shape) -> Own:
    """Each outlier shared by queries and keys: one is multiplied by what the other is divided by; scores stay."""
    own = outliers(300, q=HERE, k=ELSEWHERE)(random, shape)
    for large, small, channels in ((own.q, own.k, HERE), (own.k, own.q, ELSEWHERE)):
        large[..., channels] /= 16
        small[..., channels] *= 16
    return own


def log_normal(random: np.random.RandomState, shape: Shape) -> Own:
    """Each number with a magnitude of its own."""
    sizes, signs = gaussian(random, shape), gaussian(random, shape)
    return Own(*(size.exp() * sign.sign() for size, sign in zip(sizes, signs, strict=True)))


def tokens_log_normal(random: np.random.RandomState, shape: Shape) -> Own:
    """Each value vector with a magnitude of its own, over some five powers of ten."""
    own = gaussian(random, shape)
    return own._replace(v=own.v * (2 * normal(random, shape.heads, shape.keys, 1)).exp())


def peaked(random: np.random.RandomState, shape: Shape) -> Own:
    """Scores so large that few keys matter to a query."""
    own = gaussian(random, shape)
    return own._replace(q=own.q * 8)


def sink(random: np.random.RandomState, shape: Shape) -> Own:
    """The first key takes nearly all of the weight and has next to no value, as first tokens do in language models."""
    own = gaussian(random, shape)
    own.q[..., 0] = 4
    own.k[:, 0] = 0
    own.k[:, 0, 0] = 3 * shape.head_dim**0.5  # a score of 12
    own.v[:, 0] *= 0.01
    return own


FAMILIES: dict[str, Family] = {
    "Gaussian": gaussian,
    "queries x30": outliers(30, q=HERE),
    "queries x300": outliers(300, q=HERE),
    "keys x30": outliers(30, k=HERE),
    "keys x300": outliers(300, k=HERE),
    "queries and keys x30": outliers(30, q=HERE, k=HERE),
    "queries and keys x300": outliers(300, q=HERE, k=HERE),
    "queries, other keys x30": outliers(30, q=HERE, k=ELSEWHERE),
    "queries, other keys x300": outliers(300, q=HERE, k=ELSEWHERE),
    "queries, other keys x300, balanced": balanced,
    "values x30": outliers(30, v=HERE),
    "values x300": outliers(300, v=HERE),
    "log-normal": log_normal,
    "values log-normal by token": tokens_log_normal,
    "peaked": peaked,
    "sink": sink,
}


def draw(family: Family, shape: Shape, element_type: str = "float32") -> Own:
    """The same numbers on any machine: a library's last bit in binary64 is lost where they are rounded."""
    own = family(np.random.RandomState(0), shape)
    return Own(*(x.to(ELEMENT_TYPES[element_type]).float() for x in own))


# Arithmetic.


def ours(own: Own, ieee: bool) -> Tensor:
    queries, keys = own.q.shape[-2], own.k.shape[-2]
    visible = torch.ones(queries, keys, dtype=torch.bool)
    return attend(*own, torch.arange(keys), visible, None, own.q.shape[-1] ** -0.5, ieee)


def sdpa(own: Own, dtype: torch.dtype) -> Tensor:
    return torch.nn.functional.scaled_dot_product_attention(*own.to(dtype)).float()


def emulated(own: Own, operand: Callable[[Tensor], Tensor]) -> Tensor:
    """Sums in float32, the operands of both matrix products rounded: the weights too."""
    weights = torch.softmax(operand(own.q) @ operand(own.k).mT * own.q.shape[-1] ** -0.5, dim=-1)
    return operand(weights) @ operand(own.v)


def tf32(x: Tensor) -> Tensor:
    """Round to 10 bits behind the leading one, to nearest even."""
    word = x.contiguous().view(torch.int32)
    return ((word + 0xFFF + ((word >> 13) & 1)) & ~0x1FFF).view(torch.float32)


def bfloat16(x: Tensor) -> Tensor:
    return x.bfloat16().float()


ARITHMETICS: dict[str, Callable[[Own], Tensor]] = {
    "`ieee`": lambda own: ours(own, ieee=True),
    "default": lambda own: ours(own, ieee=False),
    "SDPA float32": lambda own: sdpa(own, torch.float32),
    "TF32": lambda own: emulated(own, tf32),
    "bfloat16": lambda own: emulated(own, bfloat16),
    "SDPA bfloat16": lambda own: sdpa(own, torch.bfloat16),
}


# Errors.


class Error(NamedTuple):
    """Root mean square errors, each over the root mean square of what is exact there."""

    overall: float
    worst: float  # of the channel that is worst by this measure

    def beside(self, other: Error) -> Error:
        """How many times the other error is as large."""
        return Error(*(b / a if a else float("inf") for a, b in zip(self, other, strict=True)))


def times(factor: float) -> str:
    return f"{factor:.0f}" if factor >= 10 else f"{factor:.2g}"


Errors = dict[str, Error]  # by arithmetic
Study = dict[tuple[str, str, str], Errors]  # by element type, family and shape
Sweeps = dict[tuple[str, str], dict[int, Errors]]  # by element type and what grows, at each point


def measure(own: Own, arithmetics: Iterable[str] = tuple(ARITHMETICS)) -> Errors:
    exact = attend64(*own, scale=own.q.shape[-1] ** -0.5)  # [heads, queries, head_dim]

    def error(got: Tensor) -> Error:
        wrong, right = (got - exact).square(), exact.square()
        by_channel = wrong.mean((0, 1)) / right.mean((0, 1))
        return Error((wrong.mean() / right.mean()).sqrt().item(), by_channel.max().sqrt().item())

    return {name: error(ARITHMETICS[name](own)) for name in arithmetics}


def study() -> Study:
    return {
        (element_type, family, shape): measure(draw(FAMILIES[family], SHAPES[shape], element_type))
        for element_type in ELEMENT_TYPES
        for family in FAMILIES
        for shape in SHAPES
    }


def sweeps() -> Sweeps:
    """By element type and by what grows: errors at each point."""
    larger = {
        "values larger": {"v": HERE},
        "keys larger": {"k": HERE},
        "queries, other keys larger": {"q": HERE, "k": ELSEWHERE},
    }
    found: Sweeps = {}
    for element_type in ELEMENT_TYPES:
        for title, channels in larger.items():
            families = {factor: outliers(factor, **channels) for factor in (4**i for i in range(7))}
            points = {factor: measure(draw(family, Shape(), element_type)) for factor, family in families.items()}
            found[element_type, title] = points
        shapes = {keys: Shape(keys=keys, queries=16) for keys in (4**i for i in range(3, 8))}
        points = {keys: measure(draw(gaussian, shape, element_type)) for keys, shape in shapes.items()}
        found[element_type, "no outliers, more keys"] = points
    return found
