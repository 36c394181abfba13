"""The manager as an engine's resource: built from a spec, found by name, checked across ranks, used from threads."""

import random
import threading
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import EntryPoint

import pytest
import torch
import torch.multiprocessing

import boundedkv
from boundedkv import (
    BoundedKVConfig,
    BoundedKVManager,
    BoundedKVSpec,
    BoundedKVStep,
    EngineResourceInfo,
    Segment,
    SinkWindow,
    StepContext,
    StreamPosition,
    build,
)
from boundedkv.reference import ReferenceManager

CONFIG = BoundedKVConfig(num_layers=1, num_heads=1, head_dim=4, retention=SinkWindow(1, 2), max_slots=4)
BACKENDS = ["reference", "fast"]


class TheirManager(ReferenceManager):
    """Somebody else's backend, as far as the registry can tell."""


def test_a_spec_builds_the_backend_it_names():
    spec = BoundedKVSpec(CONFIG, backend="reference")
    assert (spec.resource_key, spec.nodes) == ("bounded_kv", frozenset())
    manager = BoundedKVManager.build(spec, EngineResourceInfo("cpu", kv_dtype=torch.bfloat16))
    assert type(manager) is ReferenceManager
    assert manager.layer(0).dtype == torch.bfloat16
    assert manager.config.slot_bytes == CONFIG.slot_bytes // 2
    assert type(BoundedKVManager.build(BoundedKVSpec(CONFIG), EngineResourceInfo("cpu"))) is ReferenceManager
    assert type(TheirManager.build(spec, EngineResourceInfo("cpu"))) is TheirManager


def test_a_deployment_may_set_the_slots():
    spec = BoundedKVSpec(CONFIG)
    spec.apply_yaml_overrides()
    assert spec.config is CONFIG
    spec.apply_yaml_overrides(max_slots=7)
    assert (spec.config.max_slots, CONFIG.max_slots) == (7, 4)
    with pytest.raises(ValueError, match="max_slots is 0, but should be an integer at least 1"):
        spec.apply_yaml_overrides(max_slots=0)
    assert spec.config.max_slots == 7


def test_entry_points_are_backends(monkeypatch):
    point = EntryPoint("theirs", f"{__name__}:TheirManager", "boundedkv.backends")
    monkeypatch.setattr(EntryPoint, "load", lambda self: TheirManager)
    monkeypatch.setattr(boundedkv.backends, "entry_points", lambda group: [point] if group == point.group else [])
    assert boundedkv.available_backends() == ("reference", "fast", "theirs")
    assert type(build(CONFIG, backend="theirs")) is TheirManager
    with pytest.raises(ValueError, match=r"backend is 'ours', but should be one of 'auto', .* 'theirs'"):
        build(CONFIG, backend="ours")


def rank(index, init, admitted, told):
    torch.distributed.init_process_group("gloo", init_method=init, rank=index, world_size=2)
    info = EngineResourceInfo("cpu", process_group=torch.distributed.group.WORLD)
    manager = BoundedKVManager.build(BoundedKVSpec(CONFIG), info)
    if index in admitted:
        step = BoundedKVStep((Segment("a", 1),), {"a": StreamPosition(0, 0)})
        manager.admit(step, StepContext(("a",)))
    try:
        manager.post_warmup_validate()
        told[index] = "agree"
    except RuntimeError as error:
        told[index] = str(error)
    torch.distributed.destroy_process_group()


@pytest.mark.parametrize(
    ("admitted", "message"),
    [((0, 1), "agree"), ((1,), "free slots by rank are [4, 3], but should be the same on all")],
)
def test_ranks_compare_their_free_slots(tmp_path, admitted, message):
    with torch.multiprocessing.get_context("spawn").Manager() as manager:
        told = manager.dict()
        torch.multiprocessing.spawn(rank, (f"file://{tmp_path}/rendezvous", admitted, told), nprocs=2)
        assert dict(told) == {0: message, 1: message}


@pytest.mark.parametrize("backend", BACKENDS)
def test_one_rank_alone_has_nothing_to_compare(backend):
    build(CONFIG, backend=backend).post_warmup_validate()


@pytest.mark.parametrize("backend", BACKENDS)
def test_lifecycle_calls_from_several_threads(backend):
    """Four threads, each with requests of its own: every slot has one owner at any time, none is lost."""
    manager = build(CONFIG, backend=backend)
    owners: dict[int, str] = {}
    guard = threading.Lock()

    def live(thread):
        rnd = random.Random(thread)
        for turn in range(60):
            rid = f"{thread}-{turn}"
            ctx = StepContext((rid,))
            while not manager.admit(BoundedKVStep((Segment(rid, 1),), {rid: StreamPosition(0, 0)}), ctx).ok:
                pass
            for written in range(rnd.randint(1, 3)):
                step = BoundedKVStep((Segment(rid, 1),), {rid: StreamPosition(0, written)})
                assert manager.admit(step, ctx).ok
                slot = manager.plan(step, ctx).rows[0][0]
                with guard:
                    assert owners.setdefault(slot, rid) == rid
                manager.commit(step, ctx)
            with guard:
                del owners[slot]
                manager.remove_request(rid)

    with ThreadPoolExecutor(5) as pool:
        for done in [pool.submit(live, thread) for thread in range(5)]:
            done.result()
    assert manager.free_slots == CONFIG.max_slots


@pytest.mark.parametrize("backend", BACKENDS)
def test_no_plan_is_current_before_the_first(backend):
    with pytest.raises(RuntimeError, match="no step is planned yet; call plan first"):
        _ = build(CONFIG, backend=backend).current


@pytest.mark.parametrize("backend", BACKENDS)
def test_after_cleanup_every_call_says_so(backend):
    manager = build(CONFIG, backend=backend)
    manager.cleanup()
    manager.cleanup()
    step, ctx = BoundedKVStep((), {}), StepContext(())
    for call in (
        lambda: manager.admit(step, ctx),
        lambda: manager.plan(step, ctx),
        lambda: manager.commit(step, ctx),
        lambda: manager.rollback_admit(step, ctx),
        lambda: manager.layer(0),
        lambda: manager.free_slots,
        lambda: manager.current,
        lambda: manager.holds("a"),
        lambda: manager.ingest_request("a"),
        lambda: manager.remove_request("a"),
        lambda: manager.reset_request("a"),
        lambda: manager.rewind_request("a", 0),
        lambda: manager.export_request("a"),
        lambda: manager.import_request("a", {}),
        lambda: manager.build_accelerator_graph_buffers([], 1, 1),
        lambda: manager.post_warmup_validate(),
        lambda: manager.attend(0, *[torch.zeros(1, 1, 1, 4)] * 3),
    ):
        with pytest.raises(RuntimeError, match="the manager was cleaned up; build another"):
            call()


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_thread_that_flushes_subnormals_is_told(backend):
    manager = build(CONFIG, backend=backend)
    step, ctx = BoundedKVStep((Segment("a", 1),), {"a": StreamPosition(0, 0)}), StepContext(("a",))
    manager.admit(step, ctx)
    manager.plan(step, ctx)
    assert torch.set_flush_denormal(True)
    try:
        with pytest.raises(RuntimeError, match="flushes subnormal numbers to zero"):
            manager.attend(0, *[torch.ones(1, 1, 1, 4)] * 3)
    finally:
        torch.set_flush_denormal(False)
    assert not manager.layer(0).any()
    assert manager.attend(0, *[torch.ones(1, 1, 1, 4)] * 3).tolist() == [[[[1.0] * 4]]]
