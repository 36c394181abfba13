"""How close the two paths come to float64, on the kinds of numbers that models make, beside other arithmetic."""

import pytest
import torch
from streams import Drive, Own, attend64, normal

from boundedkv import SinkWindow

D, KEYS, HEADS = 64, 512, 2
OUTLIERS = [3, 17]  # channels that are larger than the others, as some channels of keys are in language models


def gaussian(seed: int) -> Own:
    return Own(*(normal(10 * seed + i, 1, HEADS, KEYS, D) for i in range(3)))


def with_outliers(seed: int, factor: float, where: str) -> Own:
    own = gaussian(seed)
    for name in where:
        getattr(own, name)[..., OUTLIERS] *= factor
    return own


def log_normal(seed: int) -> Own:
    signs = (normal(10 * seed + 5 + i, 1, HEADS, KEYS, D).sign() for i in range(3))
    return Own(*(x.exp() * sign for x, sign in zip(gaussian(seed), signs, strict=True)))


def peaked(seed: int) -> Own:
    own = gaussian(seed)
    return own._replace(q=own.q * 8)


# How many times closer the default path is than TF32 operands at least; in the comment, what was measured.
FAMILIES = {
    "gaussian": (gaussian, 3.0),  # 6.9
    "keys x30": (lambda seed: with_outliers(seed, 30.0, "k"), 2.0),  # 3.5
    "keys x300": (lambda seed: with_outliers(seed, 300.0, "k"), 2.0),  # 3.4
    "queries and keys x30": (lambda seed: with_outliers(seed, 30.0, "qk"), 2.0),  # 5.6
    "queries and keys x300": (lambda seed: with_outliers(seed, 300.0, "qk"), 2.0),  # 21
    "values x30": (lambda seed: with_outliers(seed, 30.0, "v"), 2.0),  # 3
    "log-normal": (log_normal, 3.0),  # 6.2
    "peaked": (peaked, 3.0),  # 9.2
}
ON_EACH = pytest.mark.parametrize("family", FAMILIES)


def tf32(x: torch.Tensor) -> torch.Tensor:
    """Round to 10 bits behind the leading one, to nearest even: what a tensor core makes of float32 operands."""
    word = x.contiguous().view(torch.int32)
    return ((word + 0xFFF + ((word >> 13) & 1)) & ~0x1FFF).view(torch.float32)


def float32(own: Own, operand=lambda x: x) -> torch.Tensor:
    """Attention with float32 sums, its operands rounded: [1, H, T, D]."""
    weights = torch.softmax(operand(own.q) @ operand(own.k).mT * D**-0.5, dim=-1)
    return operand(weights) @ operand(own.v)


def ours(own: Own, ieee: bool) -> torch.Tensor:
    drive = Drive("reference", num_heads=HEADS, head_dim=D, retention=SinkWindow(0, 0))
    return drive.step({"a": 0}, own, tokens={"a": KEYS}, ieee=ieee).transpose(1, 2)


def error(got: torch.Tensor, own: Own) -> float:
    return (got - attend64(*own, scale=D**-0.5)).norm().item()


@ON_EACH
def test_accuracy_of_the_ieee_path_is_at_least_that_of_float32(family):
    own = FAMILIES[family][0](seed=1)
    # Measured: 0.3 to 0.6. Sums in a balanced tree err less than sums in a row.
    assert error(ours(own, ieee=True), own) <= error(float32(own), own)


@ON_EACH
def test_accuracy_of_the_default_path_beats_tf32(family):
    make, factor = FAMILIES[family]
    own = make(seed=1)
    assert factor * error(ours(own, ieee=False), own) <= error(float32(own, tf32), own)


@ON_EACH
def test_accuracy_of_the_default_path_beats_bfloat16_tenfold(family):
    own = FAMILIES[family][0](seed=1)
    assert 10 * error(ours(own, ieee=False), own) <= error(float32(own, lambda x: x.bfloat16().float()), own)


@pytest.mark.parametrize("factor", [1.0, 30.0, 300.0, 2.0**40])
def test_accuracy_of_small_channels_is_relative_to_their_vector(factor):
    """A value is held to 16 bits of its vector's largest element: beside outliers, small channels have fewer."""
    own = with_outliers(1, factor, "v")
    difference = (ours(own, ieee=False) - attend64(*own, scale=D**-0.5)).abs()
    small = [d for d in range(D) if d not in OUTLIERS]
    assert difference[..., small].max() <= 2**-15 * own.v.abs().max()


def test_tf32_is_rounded_to_nearest_even():
    one = 2.0**-10
    given = torch.tensor([1 + one, 1 + one / 2, 1 + 1.5 * one, 1 + 0.49 * one, -(1 + 0.51 * one)])
    assert tf32(given).tolist() == [1 + one, 1.0, 1 + 2 * one, 1.0, -(1 + one)]
