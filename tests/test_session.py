"""A session counts for a person: commits on leaving, rolls back on an error, and follows a stream that moves."""

import pytest
import torch

from boundedkv import AdmitRuntimeError, AllocationFailed, BoundedKVConfig, Session, SinkWindow, build

pytestmark = pytest.mark.interpreted
CONFIG = BoundedKVConfig(
    num_layers=1, num_heads=1, head_dim=4, retention=SinkWindow(1, 3), max_slots=2, max_source_len=2, spare=2
)


def tensors(rows, tokens, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(rows, 1, tokens, 4, generator=generator) for _ in range(3)]


@pytest.fixture(params=["reference", "fast"])
def session(request):
    return Session(build(CONFIG, backend=request.param))


def test_counts_what_is_written(session):
    with session.step({"a": 3, "b": 1}, tokens={"b": 2}) as step:
        out = step.attend(0, *tensors(2, 3))
        assert [layout.length for _, layout, _ in step.plan.rows] == [0, 0]
    assert (session.written("a"), session.written("b"), session.written("c")) == (3, 1, 0)
    assert out.shape == (2, 3, 1, 4)
    assert out[1, 2].tolist() == [[0.0] * 4]
    with session.step({"b": 2}) as step:
        assert step.plan.rows[0][1].length == 1
        step.attend(0, *tensors(1, 2))
    assert session.written("b") == 3


def test_a_step_that_only_reads_is_not_counted(session):
    for _ in range(2):
        with session.step({"a": 0}, tokens={"a": 1}) as step:
            step.attend(0, *tensors(1, 1))
    assert session.written("a") == 0


def test_source_is_declared_once(session):
    source = torch.randn(2, 1, 1, 2, 8)
    with session.step({"a": 1}, source_len={"a": 2}, source={"a": 1}) as step:
        step.attend(0, *tensors(1, 1), source=source)
    with session.step({"a": 1}) as step:
        assert step.plan.rows[0][2] == 1
        assert step.plan.rows[0][1].length == 3
        step.attend(0, *tensors(1, 1), source=source)


def test_an_error_in_the_body_rolls_back(session):
    def fail():
        with session.step({"a": 2}) as step:
            step.attend(0, *tensors(1, 2))
            raise KeyError("body")

    with pytest.raises(KeyError, match="body"):
        fail()
    assert session.written("a") == 0
    with session.step({"b": 1, "c": 1}):  # two slots in all, and "a" has given its one back
        pass
    session.remove("c")
    with session.step({"a": 2, "b": 1}):
        pass
    assert session.written("a") == 2


def test_refusals_are_raised(session):
    with session.step({"a": 1, "b": 1}):
        pass
    with pytest.raises(AllocationFailed, match="request 'c': no slot left"), session.step({"c": 1}):
        pass
    with pytest.raises(AdmitRuntimeError, match="span is -1"), session.step({"a": -1}):
        pass
    session.remove("b")
    with session.step({"c": 1}):
        pass
    assert session.written("b") == 0


@pytest.mark.parametrize("name", ["tokens", "source_len", "source"])
def test_a_request_that_is_not_in_the_step_is_refused(session, name):
    with pytest.raises(ValueError, match=rf"^{name} names 'b', but should name requests of the step: \['a'\]"):
        session.step({"a": 1}, **{name: {"b": 1}}).__enter__()
    assert session.written("a") == 0


def test_a_source_is_known_after_a_first_step_that_failed():
    config = BoundedKVConfig(1, 1, 4, SinkWindow(1, 2), max_source_len=3, max_slots=1)
    manager = build(config, backend="reference")
    session = Session(manager)
    with pytest.raises(KeyError), session.step({"a": 1}, source_len={"a": 3}, source={"a": 2}):
        raise KeyError
    assert not manager.holds("a")
    with session.step({"a": 1}) as step:
        assert (step.plan.rows[0][1].length, step.plan.rows[0][2]) == (3, 2)
    session.remove("a")
    with session.step({"a": 1}) as step:
        assert (step.plan.rows[0][1].length, step.plan.rows[0][2]) == (0, 0)


def test_reset_starts_the_stream_again_in_its_slot(session):
    outs = []
    for _ in range(2):
        with session.step({"a": 5}) as step:
            outs.append(step.attend(0, *tensors(1, 5)))
        session.reset("a")
        assert session.written("a") == 0
    assert torch.equal(outs[0].view(torch.int32), outs[1].view(torch.int32))
    session.reset("never seen")
    assert session.written("never seen") == 0


def test_rewind_gives_the_bits_of_a_stream_that_never_went_on(session):
    q, k, v = tensors(1, 8)
    straight = Session(build(CONFIG, backend="reference"))
    for part in (slice(0, 4), slice(4, 6)):
        for each in (session, straight):
            with each.step({"a": part.stop - part.start}) as step:
                step.attend(0, q[:, :, part], k[:, :, part], v[:, :, part])
    with session.step({"a": 2}) as step:
        step.attend(0, *tensors(1, 2, seed=9))
    session.rewind("a", 6)
    assert session.written("a") == 6
    outs = []
    for each in (session, straight):
        with each.step({"a": 2}) as step:
            outs.append(step.attend(0, q[:, :, 6:], k[:, :, 6:], v[:, :, 6:]))
    assert torch.equal(outs[0].view(torch.int32), outs[1].view(torch.int32))


def test_a_stream_moves_with_its_count(session):
    q, k, v = tensors(1, 9)
    with session.step({"a": 7}) as step:
        step.attend(0, q[:, :, :7], k[:, :, :7], v[:, :, :7])
    other = Session(build(CONFIG, backend="reference"))
    other.import_request("z", session.export_request("a"))
    outs = []
    for each, rid in ((session, "a"), (other, "z")):
        with each.step({rid: 2}) as step:
            outs.append(step.attend(0, q[:, :, 7:], k[:, :, 7:], v[:, :, 7:]))
    assert torch.equal(outs[0].view(torch.int32), outs[1].view(torch.int32))
    assert other.written("z") == 9
