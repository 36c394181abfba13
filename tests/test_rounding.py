"""Rounding to the slots' and the result's element types: to nearest, ties to even, subnormals kept, one NaN."""

import pytest
import torch

from boundedkv import BoundedKVConfig, Session, SinkWindow, build

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
