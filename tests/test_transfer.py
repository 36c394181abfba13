"""A stream that moves to another manager goes on with the same bits, wherever its ring stood, whoever takes it in."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from boundedkv import AdmitRuntimeError, AllocationFailed, BoundedKVConfig, Session, SinkWindow, build

pytestmark = pytest.mark.interpreted
BACKENDS = ["reference", "fast"]


def config(sink=2, window=3, spare=0, dtype=torch.float32, max_slots=2, max_source_len=3):
    return BoundedKVConfig(
        num_layers=2,
        num_heads=1,
        head_dim=3,
        retention=SinkWindow(sink, window),
        max_slots=max_slots,
        max_source_len=max_source_len,
        spare=spare,
        dtype=dtype,
    )


def run(session, rid, span, source_len, source):
    generator = torch.Generator().manual_seed(100 * span + session.written(rid))
    q, k, v = (torch.randn(1, 1, max(span, 1), 3, generator=generator) for _ in range(3))
    with session.step({rid: span}, source_len={rid: source_len}) as step:
        return [step.attend(layer, q, k, v, source=source) for layer in (0, 1)]


@pytest.mark.parametrize("giver", BACKENDS)
@pytest.mark.parametrize("taker", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_continuation_after_the_ring_wrapped(giver, taker, dtype):
    source = torch.randn(1, 1, 1, 3, 6, generator=torch.Generator().manual_seed(1))
    there = Session(build(config(dtype=dtype), backend=giver))
    for span in (2, 5, 1):
        run(there, "a", span, 1, source)
    manager = build(config(dtype=dtype), backend=taker)
    for layer in (0, 1):
        manager.layer(layer).fill_(float("nan"))
    here = Session(manager)
    here.import_request("a", there.export_request("a"))
    for span in (1, 4):
        for left, right in zip(run(there, "a", span, 1, source), run(here, "a", span, 1, source), strict=True):
            assert torch.equal(left.view(torch.int32), right.view(torch.int32))


@settings(max_examples=60)
@given(
    spans=st.lists(st.integers(0, 9), min_size=1, max_size=6),
    sink=st.integers(0, 4),
    window=st.integers(0, 5),
    spare=st.integers(0, 3),
    source_len=st.integers(0, 3),
)
def test_any_ring_position_between_references(spans, sink, window, spare, source_len):
    source = torch.randn(1, 1, 1, 3, 6, generator=torch.Generator().manual_seed(1))
    there = Session(build(config(sink, window, spare), backend="reference"))
    for span in spans:
        run(there, "a", span, source_len, source)
    here = Session(build(config(sink, window, spare, max_slots=3), backend="reference"))
    run(here, "other", 2, 0, source)
    here.import_request("a", there.export_request("a"))
    for left, right in zip(run(there, "a", 3, source_len, source), run(here, "a", 3, source_len, source), strict=True):
        assert torch.equal(left.view(torch.int32), right.view(torch.int32))


@pytest.mark.parametrize("backend", BACKENDS)
def test_both_backends_export_the_same(backend):
    states = []
    for each in ("reference", backend):
        session = Session(build(config(spare=2), backend=each))
        for span in (3, 5, 2):
            run(session, "a", span, 0, None)
        states.append(session.export_request("a"))
    assert states[0].keys() == states[1].keys()
    for name, left in states[0].items():
        right = states[1][name]
        assert torch.equal(left, right) if isinstance(left, torch.Tensor) else left == right, name


@pytest.mark.parametrize("backend", BACKENDS)
def test_an_export_is_a_copy(backend):
    session = Session(build(config(), backend=backend))
    run(session, "a", 4, 0, None)
    state = session.export_request("a")
    before = state["ring"].clone()
    run(session, "a", 3, 0, None)
    assert torch.equal(state["ring"], before)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_planned_step_that_may_have_overwritten_is_not_exported(backend):
    session = Session(build(config(), backend=backend))
    run(session, "a", 5, 0, None)
    with pytest.raises(RuntimeError, match="body"), session.step({"a": 1}):
        raise RuntimeError("body")
    with pytest.raises(AdmitRuntimeError, match="planned up to 6 written and 5 are committed"):
        session.export_request("a")


@pytest.mark.parametrize("backend", BACKENDS)
def test_how_far_planned_steps_reached_goes_along(backend):
    giver, taker = (Session(build(config(spare=2), backend=backend)) for _ in range(2))
    run(giver, "a", 5, 0, None)
    with pytest.raises(RuntimeError, match="body"), giver.step({"a": 1}):
        raise RuntimeError("body")
    taker.import_request("a", giver.export_request("a"))
    for session in (giver, taker):
        with pytest.raises(ValueError, match="should be from 4 to 5: 5 are committed, steps were planned up to 6"):
            session.rewind("a", 3)
        session.rewind("a", 4)


WRONG = {
    "not a dict": (lambda state: [], "state is list"),
    "a field short": (
        lambda state: {k: v for k, v in state.items() if k != "ring"},
        "state is .*should be a dict",
    ),
    "a number that is none": (lambda state: state | {"written": 2.0}, "state written is 2.0"),
    "a source too long": (lambda state: state | {"source_len": 4}, "state source_len is 4"),
    "other sinks": (lambda state: state | {"sink": 1}, "state sink is 1, but should be 2"),
    "other window": (lambda state: state | {"window": 4}, "state window is 4, but should be 3"),
    "other spare": (lambda state: state | {"spare": 1}, "state spare is 1, but should be 0"),
    "no tensor": (lambda state: state | {"ring": None}, "state ring is NoneType"),
    "entries missing": (
        lambda state: state | {"ring": state["ring"][:, :, :, 1:]},
        r"state ring is .*2, 6\]",
    ),
    "other dtype": (lambda state: state | {"sinks": state["sinks"].half()}, "state sinks is torch.float16"),
}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_state_changes_nothing(backend, name):
    spoil, message = WRONG[name]
    session = Session(build(config(), backend=backend))
    run(session, "a", 4, 0, None)
    manager = build(config(), backend=backend)
    with pytest.raises(ValueError, match=message):
        manager.import_request("a", spoil(session.export_request("a")))
    assert manager.free_slots == 2
    assert not manager.holds("a")
    assert not manager.layer(0).any()


@pytest.mark.parametrize("backend", BACKENDS)
def test_an_id_that_holds_a_slot_and_a_full_pool_are_refused(backend):
    session = Session(build(config(), backend=backend))
    run(session, "a", 4, 0, None)
    state = session.export_request("a")
    with pytest.raises(ValueError, match="rid is 'a', which holds a slot"):
        session.import_request("a", state)
    run(session, "b", 1, 0, None)
    with pytest.raises(AllocationFailed, match="request 'c': no slot left"):
        session.import_request("c", state)
    with pytest.raises(AdmitRuntimeError, match="request 'c' holds no slot"):
        session.export_request("c")
