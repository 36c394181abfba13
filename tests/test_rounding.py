"""Rounding to the slots' and the result's element types: to nearest, ties to even, subnormals kept, one NaN.

And the other places where the contract rounds: quotients, fixed-point numbers, the factor of the scores.
"""

import math

import pytest
import torch

from boundedkv import BoundedKVConfig, Session, SinkWindow, build, numerics

# Float32 numbers and the bits they become: ties that go down and up, the neighbours of a tie, the ends, subnormals.
EXPECTED = {
    torch.bfloat16: [
        (1 + 2**-8, 0x3F80),
        (1 + 3 * 2**-8, 0x3F82),
        (1 + 2**-8 + 2**-20, 0x3F81),
        (1 + 3 * 2**-8 - 2**-20, 0x3F81),
        (-1 - 2**-8, 0xBF80),
        (3.4028234663852886e38, 0x7F80),
        (2.0**-126 * (1 + 2**-8), 0x0080),
        (2.0**-133, 0x0001),
    ],
    torch.float16: [
        (1 + 2**-11, 0x3C00),
        (1 + 3 * 2**-11, 0x3C02),
        (1 + 2**-11 + 2**-20, 0x3C01),
        (-1 - 3 * 2**-11, 0xBC02),
        (65519.0, 0x7BFF),
        (65520.0, 0x7C00),
        (2.0**-24, 0x0001),
        (3 * 2.0**-25, 0x0002),
    ],
}
NAN = {torch.bfloat16: 0x7FC0, torch.float16: 0x7E00}


@pytest.mark.parametrize("backend", ["reference", "fast"])
@pytest.mark.parametrize("dtype", EXPECTED)
def test_slots_hold_keys_and_values_rounded_to_even(backend, dtype):
    device = "cuda" if backend == "fast" and torch.cuda.is_available() else "cpu"
    values = torch.tensor([*(number for number, _ in EXPECTED[dtype]), torch.nan, -torch.nan], dtype=torch.float32)
    manager = build(BoundedKVConfig(1, 1, 10, SinkWindow(0, 1), dtype=dtype), device, backend=backend)
    k = values.view(1, 1, 1, 10).to(device)
    with Session(manager).step({"a": 1}) as step:
        step.attend(0, torch.zeros_like(k), k, -k)
    bits = manager.layer(0)[0, 0, 0, 0].view(torch.int16).cpu().tolist()
    expected = [word for _, word in EXPECTED[dtype]]
    assert [word & 0xFFFF for word in bits[:8]] == expected
    assert [word & 0xFFFF for word in bits[10:18]] == [word ^ 0x8000 for word in expected]
    assert bits[8:10] == bits[18:20] == [NAN[dtype]] * 2


@pytest.mark.parametrize("backend", ["reference", "fast"])
@pytest.mark.parametrize("dtype", EXPECTED)
@pytest.mark.parametrize("index", range(8))
def test_results_are_rounded_to_even(backend, dtype, index):
    """One key: the result is its value, read as float32 and rounded to the query's type."""
    device = "cuda" if backend == "fast" and torch.cuda.is_available() else "cpu"
    number, word = EXPECTED[dtype][index]
    manager = build(BoundedKVConfig(1, 1, 1, SinkWindow(0, 1)), device, backend=backend)
    v = torch.full((1, 1, 1, 1), number, dtype=torch.float32, device=device)
    with Session(manager).step({"a": 1}) as step:
        out = step.attend(0, torch.zeros_like(v).to(dtype), v, v, ieee=True)
    assert out.view(torch.int16).item() & 0xFFFF == word


LN_2 = math.log(2)  # as a scale it makes scores base-2 logarithms


def one_query(backend, q, k, v, ieee, scale=LN_2):
    """One query [D] over keys and values [N, D] that a slot holds: the result, [D]."""
    device = "cuda" if backend == "fast" and torch.cuda.is_available() else "cpu"
    session = Session(build(BoundedKVConfig(1, 1, len(q), SinkWindow(0, len(k)), scale=scale), device, backend=backend))
    none = torch.zeros(1, 1, 1, len(q), device=device)
    with session.step({"a": len(k)}) as step:
        step.attend(0, none.expand(1, 1, len(k), -1), k.to(device)[None, None], v.to(device)[None, None])
    with session.step({"a": 0}, tokens={"a": 1}) as step:
        mask = torch.zeros(1, 1, 1, len(k) + 1, device=device)
        mask[..., 0] = -torch.inf  # the query's own key
        return step.attend(0, q.to(device).view(1, 1, 1, -1), none, none, rel_bias=mask, ieee=ieee)[0, 0, 0].cpu()


@pytest.mark.parametrize("backend", ["reference", "fast"])
@pytest.mark.parametrize("ieee", [False, True])
@pytest.mark.parametrize("keys", [3, 7, 41])
def test_results_are_quotients_rounded_once(backend, ieee, keys):
    """One value among some that are zero, all of one weight. A product with the reciprocal is another number."""
    numbers = torch.arange(1.0, 65.0)
    v = torch.cat([numbers[None], torch.zeros(keys - 1, 64)])
    out = one_query(backend, torch.zeros(64), torch.ones(keys, 64), v, ieee)
    assert out.tolist() == (numbers / keys).tolist()
    assert out.tolist() != (numbers * (torch.tensor(1.0) / keys)).tolist()


# How many bits below the exponent of its largest element a vector keeps by default.
KEPT = {"query": 23, "key": 20}


@pytest.mark.parametrize("backend", ["reference", "fast"])
@pytest.mark.parametrize("side", KEPT)
@pytest.mark.parametrize(("units", "held"), [(1.0, 1), (0.5, 0), (1.5, 2), (0.75, 1), (-2.5, -2), (200.0, 200)])
def test_fixed_vectors_are_rounded_to_even(backend, side, units, held):
    """A small element beside 1, in units of the last bit that is kept: what is held of it shows in the score."""
    small = torch.tensor([1.0, units * 2.0 ** -KEPT[side]])
    large = torch.tensor([0.0, 2.0 ** KEPT[side]])
    q, k = (small, large) if side == "query" else (large, small)
    out = one_query(backend, q, torch.stack([k, torch.zeros(2)]), torch.eye(2), ieee=False)
    smaller = 2.0 ** -abs(held) if abs(held) < 16 else 0.0  # or so small that it counts as nothing
    weights = torch.tensor([1.0, smaller] if held >= 0 else [smaller, 1.0])
    assert out.tolist() == (weights / weights.sum()).tolist()


@pytest.mark.parametrize("backend", ["reference", "fast"])
@pytest.mark.parametrize(("below", "units"), [(0.5, 1), (1.5, 0)])
def test_weights_are_counted_in_the_nearest_number_of_units(backend, below, units):
    """By default: beside a weight of 1, three of 0.71 units count as three, three of 0.35 as none. The sum tells."""
    k = torch.tensor([[0.0, 0], *[[-(24 + below), 0]] * 3])
    v = torch.tensor([[1.0, 0], *[[0.0, 1]] * 3])
    out = one_query(backend, torch.tensor([1.0, 0]), k, v, ieee=False)
    assert out[0] == 1 / torch.tensor(1 + 3 * units * 2.0**-24)


@pytest.mark.parametrize(
    ("scale", "bits"), [(1.0, 0x3FB8AA3B), (3**-0.5, 0x3F553B95), (5**-0.5, 0x3F252B5C), (12**-0.5, 0x3ED53B95)]
)
def test_the_factor_of_the_scores_is_rounded_once(scale, bits):
    """The binary32 next to scale * log2(e). The product of both in binary32 is another, but for the first."""
    assert torch.tensor(numerics.score_factor(scale)).view(torch.int32).item() == bits
