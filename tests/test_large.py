"""A pool of more than 2^31 elements: offsets into it do not fit 32 bits. Runs where 16 GiB of memory are there."""

import os

import pytest
import torch

from boundedkv import BoundedKVConfig, Session, SinkWindow, build

MEMORY = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.skipif(MEMORY < 16 * 2**30, reason="needs 16 GiB of memory for a pool of 6 GiB")
@pytest.mark.parametrize("backend", ["reference", "fast"])
def test_the_last_slot_of_a_pool_beyond_32_bits(backend):
    device = "cuda" if backend == "fast" and torch.cuda.is_available() else "cpu"
    outs = []
    for window in (2**21, 8):
        config = BoundedKVConfig(1, 1, 256, SinkWindow(0, window), max_slots=3, dtype=torch.float16)
        manager = build(config, device, backend=backend)
        assert (manager.layer(0).numel() > 2**31) == (window == 2**21)
        session = Session(manager)
        generator = torch.Generator().manual_seed(0)
        for span in (3, 2):
            q, k, v = (torch.randn(3, 1, span, 256, generator=generator).to(device) for _ in range(3))
            with session.step({"a": span, "b": span, "c": span}) as step:
                assert [slot for slot, _, _ in step.plan.rows] == [0, 1, 2]
                out = step.attend(0, q, k, v)
        outs.append(out.cpu())
        entries = manager.layer(0)[2, 0, 0, :5, :256].float().cpu()
        assert torch.equal(entries[3:], k[2, 0].half().float().cpu())
    assert torch.equal(outs[0].view(torch.int32), outs[1].view(torch.int32))
