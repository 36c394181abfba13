"""The harness can fail: a manager with one planted change is caught, and the message names the call and the place."""

import inspect

import pytest
import torch

from boundedkv import (
    AdmitOutcome,
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
    StepContext,
    StreamPosition,
)
from boundedkv.reference import ReferenceManager
from boundedkv.reference.manager import Request
from boundedkv.testing import Difference, Pair

CONFIG = BoundedKVConfig(
    num_layers=2, num_heads=1, head_dim=3, retention=SinkWindow(1, 2), max_source_len=2, max_slots=2, spare=2
)
BUFFERS = [GraphSlotSpec(BucketKey("main", 3, 2), 0)]


def one_step(span=1, written=0, rid="a"):
    step = BoundedKVStep((Segment(rid, span),), {rid: StreamPosition(0, written)})
    return step, StepContext((rid,))


def tensors(tokens, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(1, 1, tokens, 3, generator=generator) for _ in range(3)]


# One call of each, after one step of "a" that is planned and attended but not committed.

EVERY_CALL = {
    "build": lambda pair: pair.build(BoundedKVSpec(CONFIG), EngineResourceInfo("cpu")),
    "ingest_request": lambda pair: pair.ingest_request("b"),
    "admit": lambda pair: pair.admit(*one_step(rid="b")),
    "rollback_admit": lambda pair: pair.rollback_admit(*one_step(span=2)),
    "plan": lambda pair: pair.plan(*one_step(span=2)),
    "current": lambda pair: pair.current,
    "attend": lambda pair: pair.attend(1, *tensors(2, seed=1)),
    "commit": lambda pair: pair.commit(*one_step(span=2)),
    "remove_request": lambda pair: pair.remove_request("a"),
    "reset_request": lambda pair: pair.reset_request("a"),
    "rewind_request": lambda pair: pair.rewind_request("a", 0),
    "export_request": lambda pair: pair.export_request("a"),
    "import_request": lambda pair: pair.import_request("b", pair.export_request("a")),
    "holds": lambda pair: pair.holds("a"),
    "free_slots": lambda pair: pair.free_slots,
    "layer": lambda pair: pair.layer(1),
    "build_accelerator_graph_buffers": lambda pair: pair.build_accelerator_graph_buffers(BUFFERS, 3, 2),
    "post_warmup_validate": lambda pair: pair.post_warmup_validate(),
    "cleanup": lambda pair: pair.cleanup(),
}


def planted(name, change):
    """A reference manager that, once `armed`, answers the call `name` with what `change` makes of its answer."""
    original = inspect.getattr_static(ReferenceManager, name)
    if isinstance(original, property):

        def answer(self):
            return change(original.fget(self)) if self.armed else original.fget(self)

        wrong = property(answer)
    else:

        def wrong(self, *args, **kwargs):
            answer = getattr(super(Planted, self), name)(*args, **kwargs)
            return change(answer) if self.armed else answer

    Planted = type("Planted", (ReferenceManager,), {name: wrong, "armed": False})
    return Planted(CONFIG, "cpu")


def prepared(right):
    """A pair of references, the right one perhaps planted, in the middle of a step of "a"."""
    pair = Pair(ReferenceManager(CONFIG, "cpu"), right)
    step = one_step(span=2)
    pair.admit(*step)
    pair.plan(*step)
    pair.attend(0, *tensors(2))
    if hasattr(right, "armed"):
        right.armed = True
    return pair


def changed(tensor, place, value):
    """A copy of a tensor in which one element is another."""
    tensor = tensor.clone()
    tensor[place] = value
    return tensor


def fail(answer):
    raise OSError("no such luck")


def test_every_call_is_made_here():
    assert set(EVERY_CALL) == {name for name in dir(BoundedKVManager) if not name.startswith("_")}


@pytest.mark.parametrize("name", sorted(EVERY_CALL))
def test_like_managers_pass_and_each_call_counts(name):
    pair = prepared(ReferenceManager(CONFIG, "cpu"))
    before = pair.calls
    EVERY_CALL[name](pair)
    assert pair.calls - before == (2 if name == "import_request" else 1)


@pytest.mark.parametrize("name", sorted(EVERY_CALL))
def test_error_of_one_is_a_difference(name):
    pair = prepared(planted(name, fail))
    with pytest.raises(
        Difference, match=rf"^call \d+, {name}\(.*\): error is None for ReferenceManager, OSError"
    ) as told:
        EVERY_CALL[name](pair)
    assert isinstance(told.value.__cause__, OSError)


# A planted change in each kind of result: the call, the change, and the place and values that the message must name.

REFUSED = AdmitOutcome(ok=False, reason=AllocationFailed("full", "b", 1))
OTHER = ReferenceManager(BoundedKVConfig(1, 1, 3, SinkWindow(0, 1)), "cpu")


def swap(**fields):
    return lambda value: value._replace(**fields)


def table(change):
    return lambda plan: plan._replace(table=change(plan.table))


def row(change):
    return lambda plan: plan._replace(rows=(change(*plan.rows[0]),))


def one_more_line(lines):
    return torch.cat([lines, torch.ones_like(lines)])


def one_bit(x):
    return changed(x.view(torch.int32), (0, 1, 0, 2), x.view(torch.int32)[0, 1, 0, 2] ^ 1).view(torch.float32)


CHANGED_RESULTS = {
    "outcome": ("admit", lambda o: REFUSED, r"result.ok is True for ReferenceManager, False for Planted"),
    "ready": ("admit", swap(ready=False), r"result.ready is True"),
    "reason": ("admit", swap(reason=AdmitRuntimeError("no", "b")), r"result.reason is None .* AdmitRuntimeErr"),
    "outcome type": ("admit", tuple, r"result is AdmitOutcome.* for ReferenceManager, \("),
    "table": ("plan", table(lambda t: changed(t, (0, 3), 258)), r"result.table\[0, 3\] is 0 \(0x0{8}\) .* 258 \(0x"),
    "table type": ("plan", table(torch.Tensor.long), r"result.table is int32 .* int64 \[1, 24\]"),
    "line past the batch": ("plan", table(one_more_line), r"result.table past the batch\[0, 0\] is 0 .* 1 "),
    "row": ("plan", row(lambda slot, *others: (1, *others)), r"result.rows\[0\]\[0\] is 0 \(0x0\) .* 1 \(0x1\)"),
    "writes": (
        "plan",
        row(lambda s, y, i: (s, y._replace(writes=()), i)),
        r"length of result.rows\[0\]\[1\].writes is",
    ),
    "max_retained": ("plan", swap(max_retained=7), r"result.max_retained is 0 \(0x0\) .* 7 \(0x7\)"),
    "max_span": ("plan", swap(max_span=1), r"result.max_span is 2"),
    "reads_source": ("plan", swap(reads_source=True), r"result.reads_source is False"),
    "reads_row_source": ("plan", swap(reads_row_source=True), r"result.reads_row_source is False"),
    "current": ("current", swap(max_span=1), r"result.max_span is 2"),
    "one bit": ("attend", one_bit, r"result\[0, 1, 0, 2\] is \S+ \(0x\w{8}\) .*, \S+ \(0x\w{8}\) .*; 1 of 6 elements"),
    "nan": ("attend", lambda x: changed(x, (0, 1, 0, 2), float("nan")), r"result\[0, 1, 0, 2\] .* nan \(0x7fc00000\)"),
    "element type": ("attend", lambda x: x.half(), r"result is float32 \[1, 2, 1, 3\] .* float16"),
    "shape": ("attend", lambda x: x.mT, r"result is float32 \[1, 2, 1, 3\] .* float32 \[1, 2, 3, 1\]"),
    "nothing": ("attend", lambda x: None, r"result is float32 \[1, 2, 1, 3\] .*, None for Planted"),
    "something": ("commit", lambda x: 5, r"result is None for ReferenceManager, 5 for Planted"),
    "count": ("free_slots", lambda n: n - 1, r"result is 1 \(0x1\) .* 0 \(0x0\)"),
    "held": ("holds", lambda held: not held, r"result is True .* False"),
    "layer": ("layer", lambda x: changed(x, (1, 0, 0, 2, 5), 2.0), r"result\[1, 0, 0, 2, 5\] is 0.0 .* 2.0 "),
    "state": ("export_request", lambda s: s | {"reach": 1}, r"result\['reach'\] is 2 \(0x2\) .* 1 \(0x1\)"),
    "state type": ("export_request", lambda s: s | {"ring": s["ring"].double()}, r"result\['ring'\] is .* float64"),
    "state field": ("export_request", lambda s: s | {"more": 1}, r"length of keys of result is 9"),
    "built": ("build", lambda m: OTHER, r"result.config is BoundedKVConfig"),
}


@pytest.mark.parametrize("which", CHANGED_RESULTS)
def test_changed_result_is_a_difference(which):
    name, change, expected = CHANGED_RESULTS[which]
    pair = prepared(planted(name, change))
    with pytest.raises(Difference, match=rf"^call \d+, {name}\(.*\): {expected}"):
        EVERY_CALL[name](pair)


# A planted deed beside a call that answers as it should: the call, the deed, and the place that the message must name.


def hold(manager, rid):
    manager._requests[rid] = Request(slot=1, source_len=0, source=0)


def rename(manager):
    manager._requests["z"] = manager._requests.pop("a")


def make_current_another(manager):
    manager._current = manager.current._replace(max_span=1)


DEEDS = {
    "slot": ("attend", lambda m: m.layer(1)[0, 0, 0, 1].mul_(2), r"then layer\(1\)\[0, 0, 0, 1, 0\]"),
    "other slot": ("attend", lambda m: m.layer(1)[1, 0, 0, 3].add_(1), r"then layer\(1\)\[1, 0, 0, 3, 0\] is 0.0"),
    "zero's sign": ("attend", lambda m: m.layer(1)[1].neg_(), r"then layer\(1\)\[1, 0, 0, 0, 0\] is 0.0 .* -0.0 \(0x8"),
    "other layer": ("attend", lambda m: m.layer(0)[0].neg_(), r"then layer\(0\)\[0, 0, 0, 0, 0\]"),
    "slot at commit": ("commit", lambda m: m.layer(0)[0].zero_(), r"then layer\(0\)\[0, 0, 0, 0, 0\]"),
    "slot taken": ("ingest_request", lambda m: hold(m, "b"), r"then free_slots is 1 \(0x1\) .* 0 \(0x0\) for Planted"),
    "other owner": ("commit", rename, r"then holds\('a'\) is True for ReferenceManager, False for Planted"),
    "current": ("commit", make_current_another, r"then current.max_span is 2 \(0x2\) .* 1 \(0x1\) for Planted"),
    "plan in use": ("attend", lambda m: m.current.table.add_(1), r"then current.table\[0, 0\] is 0 .* 1 "),
    "closed": ("commit", lambda m: m.cleanup(), r"then free_slots error is None .* RuntimeError\('the manager was"),
}


def with_deed(name, deed):
    """A pair whose right manager does a deed after each call `name`."""
    right = planted("holds", bool)
    pair = prepared(right)
    call = getattr(right, name)

    def call_and_deed(**arguments):
        answer = call(**arguments)
        deed(right, **arguments) if inspect.signature(deed).parameters.keys() & arguments else deed(right)
        return answer

    setattr(right, name, call_and_deed)
    return pair


@pytest.mark.parametrize("which", DEEDS)
def test_deed_beside_a_call_is_a_difference(which):
    name, deed, expected = DEEDS[which]
    pair = with_deed(name, deed)
    with pytest.raises(Difference, match=rf"^call \d+, {name}\(.*\): {expected}"):
        EVERY_CALL[name](pair)


def test_older_plan_that_changes_is_a_difference():
    pair = with_deed("plan", lambda manager: first.table.add_(1))
    first = pair.right.current
    with pytest.raises(Difference, match=r"plan\(.*\): then table of plan -2\[0, 0\] is 0"):
        pair.plan(*one_step(span=2))


@pytest.mark.parametrize("name", ["q", "k", "v"])
def test_argument_that_changes_is_a_difference(name):
    pair = with_deed("attend", lambda m, q, k, v, **rest: {"q": q, "k": k, "v": v}[name].view(torch.int32).add_(1))
    expected = rf"attend\(.*\): bytes of {name}\[0\] is \d+ \(0x..\) for given, \d+ \(0x..\) for after Planted"
    with pytest.raises(Difference, match=expected):
        pair.attend(1, *tensors(2))


def test_memory_beside_an_argument_that_changes_is_a_difference():
    pair = with_deed("attend", lambda m, k, **rest: k.as_strided((1,), (1,), 0).fill_(7.0))
    q, k, v = tensors(2)
    k = torch.cat([torch.zeros(1, 1, 1, 3), k], dim=2)[:, :, 1:]
    with pytest.raises(Difference, match=r"attend\(.*\): bytes of k\[2\] is 0 .*, 224 \(0xe0\) for after Planted"):
        pair.attend(1, q, k, v)


# Errors: both raise, but not alike.


def raising(error):
    def call(**arguments):
        raise error

    return call


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (RuntimeError("request 'b' holds no slot; admit its step first"), r"error is AdmitRuntimeError.*RuntimeError"),
        (AdmitRuntimeError("request 'b'!", "b"), r"text of error is \"request 'b' holds no slot.*\"request 'b'!\""),
        (
            AdmitRuntimeError("request 'b' holds no slot; admit its step first", "a"),
            r"attributes of error\['request_id'\] is 'b' for ReferenceManager, 'a' for Planted",
        ),
    ],
)
def test_other_error_is_a_difference(error, expected):
    pair = prepared(planted("holds", bool))
    pair.right.plan = raising(error)
    with pytest.raises(Difference, match=rf"plan\(.*\): {expected}"):
        pair.plan(*one_step(rid="b"))


def test_same_error_is_raised():
    pair = prepared(ReferenceManager(CONFIG, "cpu"))
    with pytest.raises(AdmitRuntimeError, match="request 'b' holds no slot"):
        pair.plan(*one_step(rid="b"))


def test_message_repeats_the_call():
    pair = prepared(planted("commit", fail))
    step, ctx = one_step(span=2)
    with pytest.raises(Difference) as told:
        pair.commit(step, ctx)
    assert f"call 4, commit(step={step!r}, ctx={ctx!r}): " in str(told.value)
