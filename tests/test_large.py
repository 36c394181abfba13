"""Memory of more than 2^31 elements: offsets into it do not fit 32 bits. Runs where 16 GiB of memory are there."""

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


@pytest.mark.skipif(MEMORY < 16 * 2**30, reason="needs 16 GiB of memory for tokens that lie 256 MiB apart")
@pytest.mark.parametrize("backend", ["reference", "fast"])
def test_tokens_that_lie_beyond_32_bits(backend):
    device = "cuda" if backend == "fast" and torch.cuda.is_available() else "cpu"
    apart = torch.empty(17 * 2**27, dtype=torch.float16, device=device)
    own = [apart.as_strided((1, 1, 17, 4), (68, 68, 2**27, 1), 4 * i) for i in range(3)]
    for seed, x in enumerate(own):
        x.copy_(torch.randn(x.shape, generator=torch.Generator().manual_seed(seed)))
    outs = []
    for q, k, v in (own, [x.contiguous() for x in own]):
        session = Session(build(BoundedKVConfig(1, 1, 4, SinkWindow(0, 32)), device, backend=backend))
        with session.step({"a": 17}) as step:
            outs.append(step.attend(0, q, k, v))
        outs.append(session.export_request("a")["ring"].half())
    assert torch.equal(outs[0].view(torch.int16), outs[2].view(torch.int16))
    assert torch.equal(outs[1].view(torch.int16), outs[3].view(torch.int16))
