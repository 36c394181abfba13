"""Captured graphs: persistent tables, and a launch chosen at capture that covers every replay.

A captured graph launches kernels with fixed arguments. Without a GPU a replay is an `attend` with the plan of the
capture: the same arguments, the same launch, whatever numbers the lease's table holds by then.
"""

import pytest
import torch

from boundedkv import (
    BoundedKVConfig,
    BoundedKVStep,
    BucketKey,
    GraphSlotSpec,
    Segment,
    SinkWindow,
    SlotLease,
    StepContext,
    StreamPosition,
    build,
)

BUCKET = BucketKey("main", 4, 2)
LEASE = SlotLease(0, BUCKET)
CONFIG = BoundedKVConfig(
    num_layers=1, num_heads=1, head_dim=4, retention=SinkWindow(1, 5), max_slots=4, max_source_len=3, query_window=4
)


@pytest.fixture(params=["reference", "fast"])
def manager(request):
    return build(CONFIG, device_of(request.param), backend=request.param)


def device_of(backend):
    return "cuda" if backend == "fast" and torch.cuda.is_available() else "cpu"


def a_step(written, span=2, source_len=0):
    return BoundedKVStep(
        tuple(Segment(rid, span) for rid in written),
        {rid: StreamPosition(source_len, count) for rid, count in written.items()},
    )


def a_context(rids, lease=None, capture=False):
    padded = (*rids, *(f"pad{i}" for i in range(BUCKET.bs - len(rids))))
    return StepContext(tuple(rids), slot_lease=lease, capture=capture, padded_request_ids=padded if lease else None)


def tensors(manager, rows, seed):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(rows, 1, 2, 4, generator=generator).to(manager.device) for _ in range(3)]


def capture(manager):
    manager.build_accelerator_graph_buffers([GraphSlotSpec(BUCKET, 0)], max_bs=4, max_seq_len=2)
    step, ctx = a_step({}), a_context((), LEASE, capture=True)
    assert manager.admit(step, ctx).ok
    return manager.plan(step, ctx)


def test_buffers_grow_and_are_never_moved(manager):
    first = capture(manager)
    address = first.table.data_ptr()
    other = BucketKey("main", 8, 1)
    for _ in range(2):
        manager.build_accelerator_graph_buffers([GraphSlotSpec(other, 1), GraphSlotSpec(BUCKET, 0)], 8, 1)
    manager.build_accelerator_graph_buffers([], max_bs=1, max_seq_len=1)
    second = capture(manager)
    assert second.table.data_ptr() == address
    larger = manager.plan(
        a_step({}), StepContext((), capture=True, slot_lease=SlotLease(1, other), padded_request_ids=("p",) * 0)
    )
    assert larger.table.shape[0] == 8
    assert larger.table.data_ptr() != address


def test_a_capture_plans_empty_rows_under_the_largest_bounds(manager):
    plan = capture(manager)
    assert plan.max_retained == 6
    assert plan.max_span == CONFIG.slot_tokens
    assert plan.reads_source
    assert plan.reads_row_source
    assert not plan.table.any()
    assert len(plan.rows) == 4
    before = manager.layer(0).clone()
    source = torch.randn(1, 1, 1, 3, 8).to(manager.device)
    out = manager.attend(0, *tensors(manager, 4, 0), source=source)
    assert not out.any()
    assert torch.equal(manager.layer(0), before)
    assert manager.free_slots == 4


def test_plans_on_one_lease_share_its_table_and_eager_plans_their_own(manager):
    captured = capture(manager)
    step = a_step({"a": 0})
    assert manager.admit(step, a_context(("a",), LEASE)).ok
    leased = manager.plan(step, a_context(("a",), LEASE))
    assert leased.table.data_ptr() == captured.table.data_ptr()
    assert leased.table[0].any()
    assert not leased.table[1:].any()
    eager = manager.plan(step, a_context(("a",)))
    assert eager.table.data_ptr() != captured.table.data_ptr()
    kept = eager.table.clone()
    manager.plan(a_step({"a": 2}), a_context(("a",)))
    assert torch.equal(eager.table, kept)


def test_more_rows_than_the_lease_has_are_refused(manager):
    ctx = StepContext(("a", "b", "c", "d", "e"), slot_lease=LEASE)
    outcome = manager.admit(a_step(dict.fromkeys("abcde", 0)), ctx)
    assert "request 'e': is row 4 of a leased batch, but should fit its bs of 4" in str(outcome.reason)
    assert manager.free_slots == 4


@pytest.mark.parametrize("ieee", [False, True])
def test_replays_have_the_bits_of_an_eager_run(manager, ieee):
    """Eight replays on one lease: requests join and leave, batches of 4 down to 1, the pool poisoned at first."""
    manager.layer(0).fill_(float("nan"))
    eager = build(CONFIG, "cpu", backend="reference")
    captured = capture(manager)
    source = torch.randn(1, 1, 1, 3, 8, generator=torch.Generator().manual_seed(5))
    written = dict.fromkeys("abcd", 0)
    for turn, leaving in enumerate(["", "", "c", "a", "", "bd", "", ""]):
        step, rids = a_step(written, source_len=3), tuple(written)
        for each, ctx in ((manager, a_context(rids, LEASE)), (eager, a_context(rids))):
            assert each.admit(step, ctx).ok
            each.plan(step, ctx)
        q, k, v = tensors(eager, 4, seed=turn)
        out = manager.attend(
            0, *(x.to(manager.device) for x in (q, k, v)), source=source.to(manager.device), plan=captured, ieee=ieee
        ).cpu()
        rows = len(rids)
        expected = eager.attend(0, q[:rows], k[:rows], v[:rows], source=source, ieee=ieee)
        assert torch.equal(out[:rows].view(torch.int32), expected.view(torch.int32)), turn
        assert not out[rows:].any()
        for each, ctx in ((manager, a_context(rids, LEASE)), (eager, a_context(rids))):
            each.commit(step, ctx)
            for rid in leaving:
                each.remove_request(rid)
        written = {rid: count + 2 for rid, count in written.items() if rid not in leaving} or {"e": 0}
        if turn == 4:
            written["f"] = 0


@pytest.mark.gpu
@pytest.mark.parametrize("ieee", [False, True])
def test_a_captured_cuda_graph_replays_fifty_steps(ieee):
    manager = build(CONFIG, "cuda", backend="fast")
    eager = build(CONFIG, "cpu", backend="reference")
    captured = capture(manager)
    source = torch.randn(1, 1, 1, 3, 8, generator=torch.Generator().manual_seed(5))
    device_source = source.cuda()
    inputs = [torch.zeros(4, 1, 2, 4, device="cuda") for _ in range(3)]
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        manager.attend(0, *inputs, source=device_source, plan=captured, ieee=ieee)  # compiles before the capture
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = manager.attend(0, *inputs, source=device_source, plan=captured, ieee=ieee)
    written = dict.fromkeys("abc", 0)
    for turn in range(50):
        step, rids = a_step(written, source_len=3), tuple(written)
        for each, ctx in ((manager, a_context(rids, LEASE)), (eager, a_context(rids))):
            assert each.admit(step, ctx).ok
            each.plan(step, ctx)
        fresh = tensors(eager, 4, seed=turn)
        for buffer, values in zip(inputs, fresh, strict=True):
            buffer.copy_(values)
        graph.replay()
        expected = eager.attend(0, *(x[:3] for x in fresh), source=source, ieee=ieee)
        assert torch.equal(out[:3].cpu().view(torch.int32), expected.view(torch.int32)), turn
        assert not out[3].any()
        for each, ctx in ((manager, a_context(rids, LEASE)), (eager, a_context(rids))):
            each.commit(step, ctx)
        written = {rid: count + 2 for rid, count in written.items()}
