"""Shadow: silent beside a correct manager, loud beside a planted fault, and without effect on what an engine gets."""

import os
import random
import subprocess
import sys

import pytest
import torch
from conftest import device_of

from boundedkv import (
    AdmitRuntimeError,
    BoundedKVConfig,
    BoundedKVManager,
    BoundedKVStep,
    BucketKey,
    Segment,
    Session,
    SinkWindow,
    SlotLease,
    StepContext,
    StreamPosition,
    build,
)
from boundedkv.reference import ReferenceManager
from boundedkv.testing import Difference, Shadow, read_trace, record, replay
from boundedkv.testing.golden.streams import STREAMS

pytest.importorskip("safetensors")

CONFIG = BoundedKVConfig(2, 1, 3, SinkWindow(1, 2), max_slots=3)


def one_step(manager, rid="a", span=2, written=0, seed=0):
    """A whole step of one request; what the layers gave."""
    step, ctx = BoundedKVStep((Segment(rid, span),), {rid: StreamPosition(0, written)}), StepContext((rid,))
    assert manager.admit(step, ctx).ok
    manager.plan(step, ctx)
    generator = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(1, 1, span, 3, generator=generator).to(manager.device) for _ in range(3))
    outs = [manager.attend(layer_idx, q, k, v) for layer_idx in range(manager.config.num_layers)]
    manager.commit(step, ctx)
    return outs


# Beside a correct manager.


@pytest.mark.parametrize("every", [1, 3])
@pytest.mark.parametrize("name", STREAMS)
def test_a_correct_manager_never_alarms(name, every, tmp_path):
    config, stream = STREAMS[name]
    shadow = Shadow(build(config, backend="reference"), every=every, folder=tmp_path / "found")
    with record(shadow, tmp_path / "trace") as recording:
        stream(recording)
    assert shadow.difference is None
    assert not (tmp_path / "found").exists()
    assert replay(tmp_path / "trace", build(config, backend="reference")) > 0


@pytest.mark.parametrize("every", [1, 2])
@pytest.mark.parametrize("judged", ["fast"])
def test_neither_does_the_other_backend(judged, every):
    shadow = Shadow(build(CONFIG, device_of(judged), backend=judged), every=every)
    life(shadow)
    assert shadow.difference is None


LEASE = SlotLease(0, BucketKey("main", 2, 3))


def random_life(manager, draw, turns=40):
    """Whatever an engine may do, in any order: what is refused is refused."""
    pads = ("pad0", "pad1")
    captured = manager.plan(BoundedKVStep((), {}), StepContext((), "main", 0, True, LEASE, pads))
    written, states = {}, []
    for _ in range(turns):
        rid = draw.choice("abcd")
        do = draw.choice(["step"] * 8 + ["rollback", "remove", "reset", "rewind", "export", "import", "free_slots"])
        step = BoundedKVStep((Segment(rid, draw.randint(0, 3)),), {rid: StreamPosition(0, written.get(rid, 0))})
        leased = draw.random() < 0.4
        rows = (rid, "pad0") if leased else (rid,)
        ctx = StepContext((rid,), slot_lease=LEASE if leased else None, padded_request_ids=rows)
        try:
            if do in ("step", "rollback") and manager.admit(step, ctx).ok:
                plan = manager.plan(step, ctx)
                assert manager.current is plan
                if do == "rollback":
                    manager.rollback_admit(step, ctx)
                    continue
                for layer_idx in (0, 1):
                    q, k, v = (torch.full((len(rows), 1, 3, 3), draw.random()) for _ in range(3))
                    manager.attend(layer_idx, q, k, v, plan=captured if leased and draw.random() < 0.5 else None)
                manager.commit(step, ctx)
                written[rid] = written.get(rid, 0) + step.segments[0].span
            elif do == "remove":
                manager.remove_request(rid)
                written.pop(rid, None)
            elif do == "reset":
                manager.reset_request(rid, free=draw.random() < 0.5)
                written.pop(rid, None)
            elif do == "rewind":
                back = max(0, written.get(rid, 0) - 1)
                manager.rewind_request(rid, back)
                written[rid] = back
            elif do == "export":
                states.append(manager.export_request(rid))
            elif do == "import" and states:
                manager.import_request(rid, states[-1])
                written[rid] = states[-1]["written"]
            else:
                assert manager.free_slots <= 3
        except (ValueError, RuntimeError):
            continue


@pytest.mark.parametrize("every", [1, 2, 5])
def test_nor_in_any_random_life(every):
    config = BoundedKVConfig(2, 1, 3, SinkWindow(1, 3), max_slots=3, spare=2)
    for seed in range(25):
        shadow = Shadow(build(config, backend="reference"), every=every)
        random_life(shadow, random.Random(seed))
        assert shadow.difference is None


def test_a_plan_ahead_leaves_a_lease_as_its_last_plan_left_it():
    """The captured plan reads what the lease's last plan wrote, which was not compared, in a step that is."""
    shadow = Shadow(build(CONFIG, backend="reference"), every=2)
    pads = ("pad0", "pad1")
    captured = shadow.plan(BoundedKVStep((), {}), StepContext((), "main", 0, True, LEASE, pads))
    one_step(shadow)
    step, ahead = (BoundedKVStep((Segment("a", 1),), {"a": StreamPosition(0, written)}) for written in (2, 3))
    shadow.plan(step, StepContext(("a",), slot_lease=LEASE, padded_request_ids=("a", "pad0")))
    shadow.plan(ahead, StepContext(("a",)))
    for layer_idx in (0, 1):
        shadow.attend(layer_idx, *(torch.ones(2, 1, 1, 3) for _ in range(3)), plan=captured)
    assert shadow.difference is None
    assert shadow.layer(1)[0, 0, 0, 2].any()


def test_an_engine_gets_what_the_judged_manager_gives():
    inner = build(CONFIG, backend="reference")
    given = []
    attend = inner._attend

    def kept(*arguments):
        given.append(attend(*arguments))
        return given[-1]

    inner._attend = kept
    shadow = Shadow(inner)
    assert isinstance(shadow, BoundedKVManager)
    outs = one_step(shadow)
    assert [out is own for out, own in zip(outs, given, strict=True)] == [True, True]
    assert shadow.layer(1).data_ptr() == inner.layer(1).data_ptr()
    with pytest.raises(AdmitRuntimeError, match="request 'b' holds no slot") as raised:
        shadow.export_request("b")
    assert raised.value.request_id == "b"


def test_a_session_drives_it():
    session = Session(Shadow(build(CONFIG, backend="reference")))
    with session.step({"a": 2}) as step:
        step.attend(0, *(torch.ones(1, 1, 2, 3) for _ in range(3)))
    assert session.written("a") == 2


def test_slots_that_the_engine_writes_itself_are_taken_over():
    shadow = Shadow(build(CONFIG, backend="reference"))
    one_step(shadow)
    shadow.layer(0)[0, :, :, 0] = 5.0
    one_step(shadow, written=2)
    assert shadow.difference is None


def test_between_samples_the_reference_is_not_asked(monkeypatch):
    shadow = Shadow(build(CONFIG, backend="reference"), every=10)
    asked = []
    reference = shadow._reference._manager
    attend = reference._attend
    monkeypatch.setattr(reference, "_attend", lambda *given: asked.append(given[0]) or attend(*given))
    for turn in range(25):
        one_step(shadow, written=2 * turn, seed=turn)
    assert asked == [0, 1, 0]  # of steps 0, 10 and 20, the layers by turns


def test_requests_that_ended_are_forgotten():
    shadow = Shadow(build(CONFIG, backend="reference"), every=2)
    for rid in "abc":
        one_step(shadow, rid)
    for rid in "abc":
        assert shadow._slot_of
        assert shadow._history
        shadow.remove_request(rid)
    assert not shadow._slot_of
    assert not shadow._history
    assert not shadow._reference._deferred


# Beside a fault.


class Faulty(ReferenceManager):
    """The reference with a fault that a test chooses; it shows from the third attend on."""

    fault = ""
    attends = 0

    def _admit(self, step, ctx):
        outcome = super()._admit(step, ctx)
        if self.fault == "admit" and "b" in self._requests:
            return outcome._replace(ready=False)
        return outcome

    def _plan(self, step, ctx):
        plan = super()._plan(step, ctx)
        if self.fault == "plan" and plan.rows[0][1].length:
            plan.table[0, 3] += 1
        return plan

    def _attend(self, layer_idx, *arguments):
        out = super()._attend(layer_idx, *arguments)
        self.attends += 1
        if self.attends >= 3:
            if self.fault == "bit":
                out.view(torch.int32)[0, 1, 0, 2] ^= 1
            if self.fault == "slot":  # of "a", whose attend it is
                self._slots[layer_idx, 1, 0, 0, 1, 0] += 1
            if self.fault == "neighbour":
                self._slots[layer_idx, 0, 0, 0, 0, 0] += 1
            if self.fault == "table":
                arguments[3].table[0, 3] += 1
            if self.fault == "error":
                raise OSError("no such luck")
        return out

    def _commit(self, step, ctx):
        super()._commit(step, ctx)
        if self.fault == "commit":
            self._slots[1, 0, 0, 0, 1, 0] += 1

    def _export_request(self, rid):
        stream = super()._export_request(rid)
        if self.fault == "export":
            stream.ring.neg_()
        return stream._replace(reach=stream.reach + 1) if self.fault == "reach" else stream

    def _free_slots(self):
        return super()._free_slots() - (self.fault == "count" and "a" in self._requests)


def faulty(fault, config=CONFIG):
    manager = Faulty(config, "cpu")
    manager.fault = fault
    return manager


def life(manager):
    """Two requests by turns, and everything else that can be asked of them."""
    one_step(manager, "b")
    for turn in range(4):
        one_step(manager, "a", written=2 * turn, seed=turn)
        one_step(manager, "b", written=2 * turn + 2, seed=turn)
    manager.free_slots  # noqa: B018
    manager.export_request("a")


FAULTS = {
    "admit": r"^admit\(.*\): result.ready is True for reference, False for judged",
    "plan": r"^plan\(.*\): result.table\[0, 3\] is 2 \(0x00000002\) for reference, 3 ",
    "bit": r"^attend\(layer_idx=0, q=float32.*\): result\[0, 1, 0, 2\] is \S+ \(0x\w{8}\) for reference, .*; 1 of 6"
    r" elements differ; that is request 'a' \(row 0\), query 1 at stream position \d+, head 0",
    "slot": r"^attend\(.*\): layer\(0\)\[1\] after it\[0, 0, 1, 0\] is",
    "neighbour": r"^attend\(.*\): layer\(0\)\[0\] before it\[0, 0, 0, 0\] is",
    "table": r"^attend\(layer_idx=1, .*\): plan.table\[0, 3\] is 0 \(0x00000000\) for reference, 1 ",
    "commit": r"^attend\(.*\): layer\(1\)\[0\] before it\[0, 0, 1, 0\] is",
    "error": r"^attend\(.*\): error is None for reference, OSError\('no such luck'\) for judged",
    "export": r"^export_request\(rid='a'\): result\['ring'\]\[0, 0, 0, 0, 0\] is",
    "reach": r"^export_request\(rid='a'\): result\['reach'\] is 8 \(0x8\) for reference, 9",
    "count": r"^free_slots\(\): result is 1 \(0x1\) for reference, 0 \(0x0\) for judged",
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_raised_once(fault):
    shadow = Shadow(faulty(fault))
    with pytest.raises(Difference, match=FAULTS[fault]):
        life(shadow)
    assert shadow.difference is not None
    shadow.remove_request("a")
    shadow.remove_request("b")
    shadow._manager.fault = ""
    one_step(shadow)


@pytest.mark.parametrize("fault", sorted(set(FAULTS) - {"error"}))
def test_a_fault_is_logged_once_and_changes_nothing(fault, caplog):
    shadow, plain = Shadow(faulty(fault), on_difference="log"), faulty(fault)
    for manager in (shadow, plain):
        life(manager)
    for layer_idx in (0, 1):
        assert torch.equal(shadow.layer(layer_idx).view(torch.int32), plain.layer(layer_idx).view(torch.int32))
    (entry,) = caplog.records
    assert (entry.name, entry.levelname) == ("boundedkv.testing.shadow", "ERROR")
    assert entry.getMessage() == shadow.difference


@pytest.mark.parametrize("every", [1, 100])
def test_a_comparison_that_fails_is_told_and_stops_nobody(every, caplog):
    inner = build(CONFIG, backend="reference")
    shadow = Shadow(inner, every=every, on_difference="log")
    one_step(shadow)
    plan = inner._plan
    inner._plan = lambda step, ctx: plan(step, ctx)._replace(rows=())
    step, ctx = BoundedKVStep((Segment("a", 1),), {"a": StreamPosition(0, 2)}), StepContext(("a",))
    assert shadow.plan(step, ctx).rows == ()
    assert len(caplog.records) == 1
    assert shadow.difference.endswith(
        "length of result.rows is 1 (0x1) for reference, 0 (0x0) for judged"
        if every == 1
        else "it could not be compared: ValueError('zip() argument 2 is shorter than argument 1')"
    )


@pytest.mark.parametrize("fault", ["bit", "slot", "error"])
def test_samples_find_a_fault_in_attend(fault):
    shadow = Shadow(faulty(fault), every=3)
    with pytest.raises((Difference, OSError)):
        life(shadow)
    assert (shadow.difference is None) == (fault == "error")  # it came from an attend that was not sampled


def test_nothing_is_compared_while_a_graph_is_captured(monkeypatch):
    shadow = Shadow(faulty("bit"))
    monkeypatch.setattr(shadow, "_is_capturing", lambda: True)
    life(shadow)
    assert shadow.difference is None


def test_what_a_replayed_graph_writes_is_taken_over():
    """A replay writes slots that no call tells of; it reads a lease's table, so a step on that lease came before it."""
    shadow = Shadow(build(CONFIG, backend="reference"))
    one_step(shadow)
    step, lease = BoundedKVStep((Segment("a", 1),), {"a": StreamPosition(0, 2)}), SlotLease(0, BucketKey("main", 1, 1))
    shadow.plan(step, StepContext(("a",), slot_lease=lease))
    shadow._manager.layer(0)[0] += 1.0
    shadow.attend(0, *(torch.ones(1, 1, 1, 3) for _ in range(3)))
    assert shadow.difference is None


@pytest.mark.gpu
def test_a_graph_is_captured_through_it():
    shadow = Shadow(build(CONFIG, "cuda", backend="fast"))
    one = [torch.ones(1, 1, 1, 3, device="cuda") for _ in range(3)]
    lease = SlotLease(0, BucketKey("main", 1, 1))
    captured = shadow.plan(BoundedKVStep((), {}), StepContext((), "main", 0, True, lease, ("pad",)))
    shadow.attend(0, *one, plan=captured)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = shadow.attend(0, *one, plan=captured)
    for written in range(3):
        step = BoundedKVStep((Segment("a", 1),), {"a": StreamPosition(0, written)})
        ctx = StepContext(("a",), slot_lease=lease)
        assert shadow.admit(step, ctx).ok
        shadow.plan(step, ctx)
        graph.replay()
        assert out.any()
        shadow.commit(step, ctx)
    step, ctx = BoundedKVStep((Segment("a", 1),), {"a": StreamPosition(0, 3)}), StepContext(("a",))
    assert shadow.admit(step, ctx).ok
    shadow.plan(step, ctx)
    shadow.attend(0, *one)
    assert shadow.difference is None


# The folder that shows it again.

MODULE = """
import sys
sys.path.insert(0, {tests!r})
from test_shadow import faulty
def make(config, device, kv_dtype):
    manager = faulty({fault!r}, config)
    manager.attends = 9
    return manager
"""


@pytest.mark.parametrize("fault", ["plan", "bit", "slot", "export"])
def test_a_repro_shows_the_fault_in_a_fresh_process(fault, tmp_path):
    shadow = Shadow(faulty(fault), folder=tmp_path)
    with pytest.raises(Difference, match=r"to see it again: .*difference-\d+-1") as told:
        life(shadow)
    (folder,) = tmp_path.iterdir()
    assert {path.name for path in folder.iterdir()} == {
        *("difference.txt", "repro.py", "reference.safetensors", "judged.safetensors")
    }
    assert (folder / "difference.txt").read_text().strip() == str(told.value).partition("; to see")[0]
    (tmp_path / "theirs.py").write_text(MODULE.format(tests=os.path.dirname(__file__), fault=fault))
    run = [sys.executable, str(folder / "repro.py"), "theirs:make"]
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run(run, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300)
    calls = len(read_trace(folder / "reference.safetensors").calls)
    assert done.stdout.splitlines() == [f"the reference: {calls} calls alike"], done.stderr
    assert done.returncode == 1
    assert "Difference: " in done.stderr
    assert "for the trace, " in done.stderr


def test_the_judged_managers_answers_are_kept_too(tmp_path):
    shadow = Shadow(faulty("bit"), folder=tmp_path)
    with pytest.raises(Difference):
        life(shadow)
    (folder,) = tmp_path.iterdir()
    again = faulty("bit")
    again.attends = 9
    assert replay(folder / "judged.safetensors", again) == 3
    with pytest.raises(Difference, match=r"call 2, attend\(.*\): result\[0, 1, 0, 2\]"):
        replay(folder / "judged.safetensors", build(CONFIG, backend="reference"))


def test_a_folder_that_cannot_be_written_does_not_hide_the_difference(tmp_path):
    (tmp_path / "file").write_text("in the way")
    shadow = Shadow(faulty("bit"), folder=tmp_path / "file")
    with pytest.raises(Difference, match=r"result\[0, 1, 0, 2\] .*; what shows it again could not be written: "):
        life(shadow)


# What is refused.


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"every": 0}, "every is 0, but should be an integer at least 1"),
        ({"every": True}, "every is True, but should be an integer at least 1"),
        ({"on_difference": "print"}, "on_difference is 'print', but should be 'raise' or 'log'"),
    ],
)
def test_a_wrong_setting_is_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        Shadow(build(CONFIG, backend="reference"), **settings)


def test_a_manager_in_use_is_refused():
    manager = build(CONFIG, backend="reference")
    one_step(manager)
    with pytest.raises(ValueError, match="manager has 2 free slots, but should have all 3"):
        Shadow(manager)
