"""What a serving process sets around a call changes no bit: autocast, default types, inference mode; and no call may
reach beyond its pool.
"""

import contextlib

import pytest
import torch

from boundedkv import (
    AdmitRuntimeError,
    BoundedKVConfig,
    BoundedKVStep,
    BucketKey,
    Segment,
    Session,
    SinkWindow,
    SlotLease,
    StepContext,
    StreamPosition,
    build,
    self_test,
    selftest,
)
from boundedkv.testing import Pair

pytestmark = pytest.mark.interpreted
BACKENDS = ["reference", "fast"]
CONFIG = BoundedKVConfig(num_layers=1, num_heads=1, head_dim=4, retention=SinkWindow(1, 3), max_slots=3)


def stream(backend, around=contextlib.nullcontext):
    session = Session(build(CONFIG, backend=backend))
    generator = torch.Generator().manual_seed(0)
    outs = []
    for span in (4, 2):
        q, k, v = torch.randn(3, 1, 1, span, 4, generator=generator, dtype=torch.float32)
        with around(), session.step({"a": span}) as step:
            outs.append(step.attend(0, q, k, v))
    return torch.cat(outs, dim=1)


@contextlib.contextmanager
def default_type(dtype):
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


AROUND = {
    "autocast to bfloat16": lambda: torch.autocast("cpu", torch.bfloat16),
    "autocast to float16": lambda: torch.autocast("cpu", torch.float16),
    "default float16": lambda: default_type(torch.float16),
    "default bfloat16": lambda: default_type(torch.bfloat16),
    "default float64": lambda: default_type(torch.float64),
    "inference mode": torch.inference_mode,
}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", AROUND)
def test_what_stands_around_a_step_changes_no_bit(backend, name):
    assert torch.equal(stream(backend, AROUND[name]).view(torch.int32), stream("reference").view(torch.int32))


def test_the_self_test_is_not_misled(monkeypatch):
    few = {name: selftest.FAMILIES[name] for name in ("full sums", "ties", "zeros")}
    monkeypatch.setattr(selftest, "FAMILIES", few)
    with torch.autocast("cpu", torch.bfloat16), default_type(torch.float16):
        assert self_test("cpu").results > 0


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_pool_built_in_inference_mode_serves_outside_it(backend):
    lease = SlotLease(0, BucketKey("main", 1, 2))
    step, ctx = BoundedKVStep((Segment("a", 2),), {"a": StreamPosition(0, 0)}), StepContext(("a",), slot_lease=lease)
    with torch.inference_mode():
        manager = build(CONFIG, backend=backend)
        manager.admit(step, ctx)
        manager.plan(step, ctx)
    manager.plan(step, ctx)
    assert manager.attend(0, *[torch.ones(1, 1, 2, 4)] * 3).tolist() == [[[[1.0] * 4]] * 2]


@pytest.mark.parametrize("backend", BACKENDS)
def test_no_gradient_gets_into_the_slots(backend):
    manager = build(CONFIG, backend=backend)
    session = Session(manager)
    with session.step({"a": 2}) as step:
        out = step.attend(0, *[torch.ones(1, 1, 2, 4, requires_grad=True)] * 3)
    assert not out.requires_grad
    state = session.export_request("a")
    session.import_request("b", state | {"ring": state["ring"].requires_grad_()})
    assert not manager.layer(0).requires_grad


@pytest.mark.parametrize("backend", BACKENDS)
def test_results_are_contiguous(backend):
    config = BoundedKVConfig(1, 2, 4, SinkWindow(0, 4))
    with Session(build(config, backend=backend)).step({"a": 3}) as step:
        assert step.attend(0, *[torch.ones(1, 2, 3, 4)] * 3).is_contiguous()


@pytest.mark.parametrize("backend", BACKENDS)
def test_views_that_negate_are_read_by_value(backend):
    v = torch.conj(torch.complex(torch.ones(1, 1, 1, 4), torch.ones(1, 1, 1, 4))).imag
    assert v.is_neg()
    with Session(build(CONFIG, backend=backend)).step({"a": 1}) as step:
        assert step.attend(0, torch.zeros(1, 1, 1, 4), v, v).tolist() == [[[[-1.0] * 4]]]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("span", [2, 8, 60])
def test_a_plan_of_a_larger_pool_is_refused(backend, span):
    larger = build(BoundedKVConfig(1, 1, 4, SinkWindow(1, 64), max_slots=1), backend="reference")
    manager = build(CONFIG, backend=backend)
    step, ctx = BoundedKVStep((Segment("a", span),), {"a": StreamPosition(0, 9)}), StepContext(("a",))
    larger.admit(BoundedKVStep((Segment("a", 1),), {"a": StreamPosition(0, 0)}), ctx)
    before = manager.layer(0).clone()
    with pytest.raises(ValueError, match=r"plan row 0 has .*, but should stay within the 4"):
        manager.attend(0, *[torch.ones(1, 1, span, 4)] * 3, plan=larger.plan(step, ctx))
    assert torch.equal(manager.layer(0), before)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_plan_whose_lease_was_planned_again_is_refused_where_it_no_longer_fits(backend):
    manager = build(BoundedKVConfig(1, 1, 4, SinkWindow(0, 8), max_slots=1), backend=backend)
    ctx = StepContext(("a",), slot_lease=SlotLease(0, BucketKey("main", 1, 5)))
    first = BoundedKVStep((Segment("a", 1),), {"a": StreamPosition(0, 0)})
    manager.admit(first, ctx)
    old = manager.plan(first, ctx)
    manager.plan(BoundedKVStep((Segment("a", 5),), {"a": StreamPosition(0, 1)}), ctx)
    with pytest.raises(ValueError, match="its lease was planned again since"):
        manager.attend(0, *[torch.ones(1, 1, 5, 4)] * 3, plan=old)
    assert not manager.layer(0).any()


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_capture_is_refused_what_no_replay_could_read(backend):
    def capture(**options):
        config = BoundedKVConfig(1, 1, 4, SinkWindow(1, 4), max_slots=1, **options)
        manager = build(config, backend=backend)
        ctx = StepContext((), capture=True, padded_request_ids=("p",), slot_lease=SlotLease(0, BucketKey("main", 1, 1)))
        manager.plan(BoundedKVStep((), {}), ctx)
        return lambda **more: manager.attend(0, *[torch.ones(1, 1, 1, 4)] * 3, **more)

    with pytest.raises(ValueError, match="source and row_source are None, but one should be given"):
        capture(max_source_len=2)()
    with pytest.raises(ValueError, match="rel_bias is given, but a row has 1 sinks"):
        capture(query_window=2)(rel_bias=torch.zeros(1, 1, 1, 3))


@pytest.mark.parametrize("backend", BACKENDS)
def test_keys_that_lie_in_the_slots_are_refused(backend):
    manager = build(CONFIG, backend=backend)
    with Session(manager).step({"a": 2}) as step:
        inside = manager.layer(0)[:1, 0, :, :2, :4]
        with pytest.raises(ValueError, match="v is a view of the layer's slots"):
            step.attend(0, torch.ones(1, 1, 2, 4), torch.ones(1, 1, 2, 4), inside)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("call", ["reset_request", "rewind_request"])
def test_a_rollback_frees_the_fresh_slot_of_a_request_started_over(backend, call):
    manager = build(CONFIG, backend=backend)
    step, ctx = BoundedKVStep((Segment("a", 2),), {"a": StreamPosition(0, 0)}), StepContext(("a",))
    manager.admit(step, ctx)
    getattr(manager, call)("a", **({"written": 0} if call == "rewind_request" else {}))
    manager.rollback_admit(step, ctx)
    assert manager.free_slots == 3
    with pytest.raises(AdmitRuntimeError, match="holds no slot"):
        manager.commit(step, ctx)


ILL_TYPED = {
    "a plain tuple": (
        lambda: BoundedKVStep((("a", 1),), {"a": StreamPosition(0, 0)}),
        "a",
        r"step.segments\[0\] is \('a'",
    ),
    "no segments": (lambda: BoundedKVStep(None, {}), "a", "step.segments is NoneType"),
    "no positions": (lambda: BoundedKVStep((Segment("a", 1),), None), "a", "step.positions is NoneType"),
    "no tokens": (lambda: BoundedKVStep((Segment("a", 1),), {}, None), "a", "step.tokens is NoneType"),
    "a number as id": (lambda: BoundedKVStep((Segment(5, 1),), {}), "a", r"step.segments\[0\].request_id is 5"),
    "a string as batch": (lambda: BoundedKVStep((), {}), None, "ctx.request_ids is str"),
}


@pytest.mark.parametrize("name", ILL_TYPED)
@pytest.mark.parametrize("call", ["admit", "plan", "commit", "rollback_admit"])
def test_ill_typed_steps_are_told_by_argument(name, call):
    make, rid, message = ILL_TYPED[name]
    pair = Pair(*(build(CONFIG, backend=backend) for backend in BACKENDS))
    with pytest.raises(TypeError, match=message):
        getattr(pair, call)(make(), StepContext("a" if rid is None else (rid,)))
    assert pair.free_slots == 3


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_session_does_not_rewind_what_it_does_not_know(backend):
    manager = build(CONFIG, backend=backend)
    with Session(manager).step({"a": 2}):
        pass
    with pytest.raises(AdmitRuntimeError, match="request 'a' holds no slot"):
        Session(manager).rewind("a", 2)
