"""Both backends, call by call: every call of the interface has a differential case, and hand-picked steps run alike.

A `Pair` compares after each call what was returned or raised, what public calls show, and every bit of every slot; so
the tests below say only what a call is expected to come to.
"""

import inspect

import pytest
import torch

from boundedkv import (
    ADMIT_OK,
    AdmitRuntimeError,
    AllocationFailed,
    BoundedKVConfig,
    BoundedKVManager,
    BoundedKVSpec,
    BoundedKVStep,
    BucketKey,
    EngineResourceInfo,
    GraphSlotSpec,
    Segment,
    SinkWindow,
    SlotLease,
    StepContext,
    StreamPosition,
)
from boundedkv.reference import ReferenceManager
from boundedkv.testing import CASES, Difference, Pair

BUCKET = BucketKey("main", 3, 2)
PUBLIC = {name for name in dir(BoundedKVManager) if not name.startswith("_")}


def a_config(**settings):
    settings = {
        "num_layers": 1,
        "num_heads": 1,
        "head_dim": 3,
        "retention": SinkWindow(1, 2),
        "max_slots": 3,
    } | settings
    return BoundedKVConfig(**settings)


def a_step(written, span=1, source_len=0, source=0, tokens=None, spans=None):
    """A step of the requests that `written` names, each where it says."""
    segments = tuple(Segment(rid, span if spans is None else spans[rid]) for rid in written)
    positions = {rid: StreamPosition(source_len, count, source) for rid, count in written.items()}
    return BoundedKVStep(segments, positions, tokens or {}), StepContext(tuple(written))


def tensors(batch, tokens=1, seed=0, dim=3):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(batch, 1, tokens, dim, generator=generator) for _ in range(3)]


def run(pair, step, ctx, tokens=1, seed=0, **options):
    """A whole step; returns its result."""
    assert pair.admit(step, ctx) == ADMIT_OK
    pair.plan(step, ctx)
    out = pair.attend(0, *tensors(len(ctx.row_ids), tokens, seed), **options)
    pair.commit(step, ctx)
    return out


# The interface.


def test_every_public_call_has_a_case():
    assert PUBLIC - CASES == set(), "calls of BoundedKVManager without a differential case"
    assert CASES - PUBLIC == set(), "cases of calls that BoundedKVManager does not have"


@pytest.mark.parametrize("name", sorted(PUBLIC))
def test_case_is_called_as_the_interface_is(name):
    call, of_pair = inspect.getattr_static(BoundedKVManager, name), inspect.getattr_static(Pair, name)
    assert isinstance(call, property) == isinstance(of_pair, property)
    if not isinstance(call, property):
        call = call.__func__ if isinstance(call, classmethod) else call
        theirs, ours = inspect.signature(call).parameters, inspect.signature(of_pair).parameters
        assert list(ours.values())[1:] == list(theirs.values())[1:]


# Hand-picked steps.


def test_streams_across_the_wrap(make_pair):
    pair = make_pair(a_config(num_layers=2))
    pair.fill(float("nan"))
    written = {"a": 0, "b": 0}
    for i, spans in enumerate([{"a": 1, "b": 3}, {"a": 2, "b": 0}, {"a": 4, "b": 1}]):
        step, ctx = a_step(written, spans=spans, tokens={"b": max(1, spans["b"])})
        assert pair.admit(step, ctx) == ADMIT_OK
        assert pair.plan(step, ctx).max_span == max(spans.values())
        for layer_idx in (1, 0):
            out = pair.attend(layer_idx, *tensors(2, 4, seed=2 * i + layer_idx), ieee=layer_idx == 1)
            assert out.isfinite().all()
        pair.commit(step, ctx)
        written = {rid: count + spans[rid] for rid, count in written.items()}
    assert pair.current.retained().tolist() == [3, 3]
    assert pair.calls == 3 * 5 + 1


def test_refused_steps_change_nothing(make_pair):
    pair = make_pair(a_config(max_slots=2))
    run(pair, *a_step({"a": 0}))
    assert isinstance(pair.admit(*a_step({"a": 1, "b": 0, "c": 0})).reason, AllocationFailed)
    assert isinstance(pair.admit(*a_step({"b": 0, "a": 2})).reason, AdmitRuntimeError)
    assert isinstance(pair.admit(*a_step({"b": 0, "a": 1}, source_len=1)).reason, AdmitRuntimeError)
    assert pair.admit(*a_step({"b": 3, "a": 2})).reason.request_id == "b", "the first contradiction was not told"
    assert (pair.holds("b"), pair.holds("c"), pair.free_slots) == (False, False, 1)
    pair.remove_request("a")
    run(pair, *a_step({"b": 0, "c": 0}), seed=1)
    assert pair.current.rows[0][0] == 0, "the lowest free slot was not taken first"


def test_rollbacks_and_late_commits(make_pair):
    pair = make_pair(a_config())
    first = a_step({"a": 0})
    pair.admit(*first)
    pair.rollback_admit(*first)
    pair.rollback_admit(*first)
    assert not pair.holds("a")
    with pytest.raises(AdmitRuntimeError, match="'a' holds no slot"):
        pair.commit(*first)
    run(pair, *first)
    pair.commit(*first)
    pair.rollback_admit(*first)  # too late: it is committed
    assert pair.holds("a")
    second = a_step({"a": 1})
    run(pair, *second, seed=1)
    pair.commit(*a_step({"a": 1}))  # the second step once more, declared anew
    third = a_step({"a": 2})
    pair.admit(*third)
    pair.rollback_admit(*third)
    for late in (first, third):
        with pytest.raises(AdmitRuntimeError, match=r"'a'.*\(2 written\)"):
            pair.commit(*late)
    pair.reset_request("a")
    with pytest.raises(AdmitRuntimeError, match=r"'a'.*\(0 written\)"):
        pair.commit(*second)
    pair.reset_request("a", free=True)
    assert pair.free_slots == 3


def test_lease_with_padding_rows(make_pair):
    pair = make_pair(a_config(max_source_len=1))
    pair.fill(float("nan"))
    lease = SlotLease(0, BUCKET)
    pair.build_accelerator_graph_buffers([GraphSlotSpec(BUCKET, 0)], max_bs=3, max_seq_len=2)
    pads = ("pad0", "pad1", "pad2")
    nothing = BoundedKVStep((), {})
    captured = StepContext((), capture=True, slot_lease=lease, padded_request_ids=pads)
    assert pair.admit(nothing, captured) == ADMIT_OK
    captured_plan = pair.plan(nothing, captured)
    source = torch.zeros(1, 1, 1, 1, 6)
    row_source = (source, torch.zeros(3, dtype=torch.int64))
    options = {"source": source, "row_source": row_source}
    assert pair.attend(0, *tensors(3, 2), **options).eq(0).all()
    pair.commit(nothing, captured)
    for live, count in ((("a", "b", "c"), 0), (("b",), 1)):
        step, _ = a_step(dict.fromkeys(live, count))
        ctx = StepContext(live, slot_lease=lease, padded_request_ids=(*live, *pads)[:3])
        assert pair.admit(step, ctx) == ADMIT_OK
        plan = pair.plan(step, ctx)
        out = pair.attend(0, *tensors(3, 2, seed=count), plan=captured_plan, **options)  # a replay
        assert out[: len(live)].ne(0).any()
        assert out[len(live) :].eq(0).all()
        assert out.equal(pair.attend(0, *tensors(3, 2, seed=count), plan=plan, **options))
        pair.commit(step, ctx)


def test_sources_of_both_kinds(make_pair):
    pair = make_pair(a_config(max_source_len=4, retention=lambda source_len: SinkWindow(source_len % 3, 3)))
    bank = torch.randn(2, 1, 1, 5, 6, generator=torch.Generator().manual_seed(5))
    storage = torch.randn(3, 1, 1, 4, 6, generator=torch.Generator().manual_seed(6)).half()
    lengths, sources = {"a": 4, "b": 2, "c": 1}, {"a": 1, "b": -1, "c": 0}
    for written in range(3):
        positions = {rid: StreamPosition(lengths[rid], written, sources[rid]) for rid in lengths}
        step = BoundedKVStep(tuple(Segment(rid, 1) for rid in lengths), positions)
        slots = torch.tensor([9, 2, -5])  # of these only b's is read
        out = run(pair, step, StepContext(tuple(lengths)), seed=written, source=bank, row_source=(storage, slots))
        assert out.isfinite().all()
    with pytest.raises(ValueError, match="source is None"):
        pair.attend(0, *tensors(3), row_source=(storage, slots))


def test_older_plan_is_as_good_as_new(make_pair):
    pair = make_pair(a_config(spare=2))
    first = a_step({"a": 0})
    run(pair, *first)
    old = pair.current
    again = pair.attend(0, *tensors(1), plan=old)
    second = a_step({"a": 1})
    pair.admit(*second)
    pair.plan(*second)
    assert pair.attend(0, *tensors(1), plan=old).equal(again)
    assert pair.current is not old


@pytest.mark.parametrize("ieee", [False, True])
@pytest.mark.parametrize("query_window", [None, 550])
def test_window_of_several_splits(make_pair, query_window, ieee):
    pair = make_pair(a_config(retention=SinkWindow(70, 600), query_window=query_window))
    junk = torch.randn(pair.layer(0).shape, generator=torch.Generator().manual_seed(7))
    for manager in (pair.left, pair.right):
        manager.layer(0).copy_(junk)
    step, ctx = a_step({"a": 0, "b": 0}, spans={"a": 1500, "b": 66})
    pair.admit(step, ctx)
    pair.commit(step, ctx)
    out = run(pair, *a_step({"a": 1500, "b": 66}), seed=1, ieee=ieee)
    assert pair.current.retained().tolist() == [670, 66]
    assert out.isfinite().all()


def test_rewound_and_moved(make_pair):
    pair = make_pair(a_config(spare=2))
    for written in range(4):
        run(pair, *a_step({"a": written}), seed=written)
    expected = run(pair, *a_step({"a": 4}), seed=4)
    pair.rewind_request("a", 4)
    with pytest.raises(ValueError, match=r"written is 1 .*'a'"):
        pair.rewind_request("a", 1)
    state = pair.export_request("a")
    pair.import_request("b", state)
    pair.remove_request("a")
    pair.import_request("c", state)
    assert pair.free_slots == 1
    for rid in ("b", "c"):
        assert run(pair, *a_step({rid: 4}), seed=4).equal(expected)


@pytest.mark.interpreted  # the resource's device is one for both
def test_built_and_closed(make_pair):
    pair = make_pair(a_config(dtype=torch.bfloat16))
    pair.ingest_request("a", {"anything": 1})
    other = pair.build(BoundedKVSpec(pair.left.config), EngineResourceInfo("cpu", kv_dtype=torch.float16))
    run(other, *a_step({"a": 0}))
    assert other.layer(0).dtype == torch.float16
    assert (pair.holds("a"), other.holds("a")) == (False, True)
    pair.post_warmup_validate()
    pair.cleanup()
    pair.cleanup()
    with pytest.raises(RuntimeError, match="cleaned up"):
        pair.layer(0)
    assert other.free_slots == 2


# How arguments are handed over, and the managers as they are given.


def test_tensors_are_handed_over_as_they_lie():
    lies = []

    class Watching(ReferenceManager):
        def attend(self, **arguments):
            lies.append([(x.data_ptr(), x.shape, x.stride(), x.storage_offset()) for x in map(arguments.get, "qkv")])
            return super().attend(**arguments)

    pair = Pair(Watching(a_config(), "cpu"), Watching(a_config(), "cpu"))
    pair.admit(*a_step({"a": 0}))
    pair.plan(*a_step({"a": 0}))
    q, k, v = torch.ones(1, 1, 4, 3)[:, :, 1:3], torch.ones(1).expand(1, 1, 2, 3), torch.ones(1, 1, 3, 2).mT
    pair.attend(0, q, k, v)
    given = [(x.data_ptr(), x.shape, x.stride(), x.storage_offset()) for x in (q, k, v)]
    assert [lie[1:] for lie in lies[0]] == [lie[1:] for lie in lies[1]] == [lie[1:] for lie in given]
    assert len({lie[0] for lie in [*lies[0], *lies[1], *given]}) == 9, "the same memory was handed to both"


def test_filled_slots():
    pair = Pair(ReferenceManager(a_config(), "cpu"), ReferenceManager(a_config(), "cpu"))
    pair.fill(7.0, slots=[2, 0])
    for manager in (pair.left, pair.right):
        assert manager.layer(0).amin(dim=(1, 2, 3, 4)).tolist() == [7.0, 0.0, 7.0]


def test_other_config_is_a_difference():
    other = ReferenceManager(a_config(), "cpu", torch.float16)
    with pytest.raises(Difference, match=r"^the managers as given: config is .*torch.float32.*torch.float16"):
        Pair(ReferenceManager(a_config(), "cpu"), other)


def test_used_manager_is_a_difference():
    used = ReferenceManager(a_config(), "cpu")
    used.admit(*a_step({"a": 0}))
    with pytest.raises(Difference, match=r"^the managers as given: then free_slots is 3 .* for left, 2 .* for right"):
        Pair(ReferenceManager(a_config(), "cpu"), used)
