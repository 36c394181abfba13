"""Traces: what is recorded is replayed to the bit, anything else is told, and the page is enough to read the file."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from conftest import device_of
from trace_reader import read_by_the_page

from boundedkv import (
    NUMERICS_VERSION,
    PLAN_VERSION,
    AdmitRuntimeError,
    BoundedKVConfig,
    BoundedKVManager,
    BoundedKVStep,
    BucketKey,
    Segment,
    SinkWindow,
    SlotLease,
    StepContext,
    StreamPosition,
    build,
)
from boundedkv.reference import ReferenceManager
from boundedkv.testing import Difference, read_trace, record, replay
from boundedkv.testing.wrapper import Wrapper

pytest.importorskip("safetensors")

CONFIG = BoundedKVConfig(1, 1, 3, SinkWindow(1, 2), max_slots=2, dtype=torch.float16)
STEP = BoundedKVStep((Segment("a", 2),), {"a": StreamPosition(0, 0)})
CONTEXT = StepContext(("a",))


def tensors(tokens=2, rows=1, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(rows, 1, tokens, 3, generator=generator) for _ in range(3)]


def one_step(manager):
    """Five calls: admit, plan, attend, commit, layer."""
    manager.admit(STEP, CONTEXT)
    manager.plan(STEP, CONTEXT)
    out = manager.attend(0, *tensors())
    manager.commit(STEP, CONTEXT)
    manager.layer(0)
    return out


def recorded(path, calls=one_step, config=CONFIG):
    with record(build(config, backend="reference"), path) as manager:
        calls(manager)
    return path


def test_the_page_is_enough_to_read_a_trace(tmp_path):
    trace, arrays = read_by_the_page(recorded(tmp_path / "trace"))
    assert [trace[name] for name in ("format", "format_version", "numerics_version", "plan_version")] == [
        "boundedkv-trace",
        1,
        NUMERICS_VERSION,
        PLAN_VERSION,
    ]
    assert trace["config"]["retention"] == [[1, 2, False]]
    assert trace["config"]["dtype"] == "float16"
    assert [call["call"] for call in trace["calls"]] == ["admit", "plan", "attend", "commit", "layer"]
    assert trace["steps"][0]["segments"][0] == {"type": "Segment", "request_id": "a", "span": 2, "label": "main"}
    plan, attend, layer = (trace["calls"][i] for i in (1, 2, 4))
    assert arrays[plan["result"]["table"]["name"]].tolist() == plan["result"]["rows"]
    manager = build(CONFIG, backend="reference")
    out = one_step(manager)
    assert arrays[attend["result"]["name"]].tobytes() == out.numpy().tobytes()
    assert arrays[attend["arguments"]["k"]["name"]].tobytes() == tensors()[1].numpy().tobytes()
    assert arrays[layer["result"]["name"]].tobytes() == manager.layer(0).numpy().tobytes()


def test_the_example_of_the_page_makes_the_trace_it_shows(tmp_path, monkeypatch):
    page = (Path(__file__).parents[1] / "docs" / "traces.md").read_text(encoding="utf-8")
    (code,) = re.findall(r"^```python\n(.*?)^```", page, flags=re.DOTALL | re.MULTILINE)
    header, shown = map(json.loads, re.findall(r"^```json\n(.*?)^```", page, flags=re.DOTALL | re.MULTILINE))
    monkeypatch.chdir(tmp_path)
    exec(code, {})
    trace, arrays = read_by_the_page(tmp_path / "step.safetensors")
    assert trace == shown
    assert {name: tensor["shape"] for name, tensor in header.items()} == {
        name: list(array.shape) for name, array in arrays.items()
    }
    assert header["2.result.table"]["data_offsets"] == [32, 128]


def test_recording_changes_nothing_and_a_replay_has_every_bit(tmp_path):
    plain = one_step(build(CONFIG, backend="reference"))
    with record(build(CONFIG, backend="reference"), tmp_path / "trace") as manager:
        assert isinstance(manager, BoundedKVManager)
        assert manager.config == CONFIG
        out = one_step(manager)
        assert not (tmp_path / "trace").exists()
    assert torch.equal(out.view(torch.int32), plain.view(torch.int32))
    assert replay(tmp_path / "trace", build(CONFIG, backend="reference")) == 5
    manager.remove_request("a")
    assert manager.free_slots == 2
    assert len(read_trace(tmp_path / "trace").calls) == 5


def test_every_call_of_the_interface_is_wrapped():
    interface = {name for name in dir(BoundedKVManager) if not name.startswith("_")}
    assert {name for name in vars(Wrapper) if not name.startswith("_")} == interface - {"build"}


def test_other_attributes_are_the_managers_own(tmp_path):
    inner = build(CONFIG, backend="reference")
    manager = record(inner, tmp_path / "trace")
    manager.process_group = "ranks"
    assert inner.process_group == manager.process_group == "ranks"
    with pytest.raises(AttributeError, match="no_such_thing"):
        manager.no_such_thing  # noqa: B018


ODD = [float("nan"), -0.0, 0.0, float("inf"), 1e-45]


def test_bits_of_odd_numbers_survive(tmp_path):
    odd = torch.tensor(ODD)
    odd.view(torch.int32)[0] = 0x7FC12345  # a NaN like no other
    config = BoundedKVConfig(1, 1, 5, SinkWindow(0, 2), max_slots=2)

    def write(manager):
        manager.write_slots(0, (1,), odd.repeat(2).expand(1, 1, 1, 2, 10))
        manager.write_slots(0, (0,), torch.tensor(-0.0))

    trace = read_trace(recorded(tmp_path / "trace", write, config))
    assert trace.tensors["1.entries"].view(torch.int32)[0, 0, 0, 0, :5].tolist() == odd.view(torch.int32).tolist()
    assert trace.tensors["2.entries"].view(torch.int32).item() == -(2**31)


def test_slots_written_before_the_recording_are_part_of_it(tmp_path):
    manager = build(CONFIG, backend="reference")
    manager.layer(0)[1] = -0.0
    with record(manager, tmp_path / "trace") as recording:
        recording.read_slots(0, (0, 1))
    assert replay(tmp_path / "trace", build(CONFIG, backend="reference")) == 2


def test_a_tensor_is_kept_once_whatever_it_is_called(tmp_path):
    def twice(manager):
        one_step(manager)
        manager.attend(0, *tensors())

    trace = read_trace(recorded(tmp_path / "trace", twice))
    assert trace.calls[5]["arguments"]["q"] == {"type": "tensor", "name": "3.q"}


# Which step and which plan an argument is: identity counts.


def test_equal_steps_stay_two_and_the_same_stays_one(tmp_path):
    other = BoundedKVStep(STEP.segments, STEP.positions)

    def calls(manager):
        for step in (STEP, other):
            manager.admit(step, CONTEXT)
        for step in (other, STEP):
            manager.rollback_admit(step, CONTEXT)

    trace = read_trace(recorded(tmp_path / "trace", calls))
    assert [call["arguments"]["step"]["index"] for call in trace.calls] == [0, 1, 1, 0]
    replay(tmp_path / "trace", build(CONFIG, backend="reference"))


def test_a_plan_of_a_call_is_the_replayed_ones_and_a_foreign_one_is_written_out(backend, tmp_path):
    lease = SlotLease(0, BucketKey("main", 2, 2))

    def calls(manager):
        capture = StepContext((), capture=True, slot_lease=lease, padded_request_ids=("p", "q"))
        captured = manager.plan(BoundedKVStep((), {}), capture)
        manager.admit(STEP, CONTEXT)
        leased = StepContext(("a",), slot_lease=lease, padded_request_ids=("a", "p"))
        plan = manager.plan(STEP, leased)
        manager.attend(0, *tensors(rows=2), plan=captured)
        manager.attend(0, *tensors(rows=2), plan=plan._replace(table=plan.table.clone()))

    trace = read_trace(recorded(tmp_path / "trace", calls))
    first, second = (call["arguments"]["plan"] for call in trace.calls[3:])
    assert first == {"type": "plan_of_call", "call": 1}
    assert second["type"] == "plan"
    assert trace.tensors[trace.calls[3]["result"]["name"]][0].any()  # the capture's plan reads the lease's new lines
    assert replay(tmp_path / "trace", build(CONFIG, device_of(backend), backend=backend)) == 5


def test_a_step_that_changes_is_refused(tmp_path):
    positions = {"a": StreamPosition(0, 0)}
    step = BoundedKVStep((Segment("a", 1),), positions)
    manager = record(build(CONFIG, backend="reference"), tmp_path / "trace")
    manager.admit(step, CONTEXT)
    positions["a"] = StreamPosition(0, 1)
    with pytest.raises(ValueError, match="step has changed since it was recorded first"):
        manager.plan(step, CONTEXT)


# What a replay tells.


class Planted(ReferenceManager):
    """The reference with a fault in one call."""

    fault = ""

    def _admit(self, step, ctx):
        outcome = super()._admit(step, ctx)
        return outcome._replace(ready=False) if self.fault == "admit" else outcome

    def _plan(self, step, ctx):
        plan = super()._plan(step, ctx)
        return plan._replace(max_span=7) if self.fault == "plan" else plan

    def _attend(self, *arguments):
        out = super()._attend(*arguments)
        if self.fault == "attend":
            out.view(torch.int32)[0, 1, 0, 2] ^= 1
        if self.fault == "sign":
            self._slots[0, 1].neg_()
        return out

    def _commit(self, step, ctx):
        if self.fault == "commit":
            raise AdmitRuntimeError("no", "a")
        super()._commit(step, ctx)


@pytest.mark.parametrize(
    ("fault", "expected"),
    [
        ("admit", r"call 1, admit\(.*\): result.ready is True for the trace, False for Planted"),
        ("plan", r"call 2, plan\(.*\): result.max_span is 2 \(0x2\) for the trace, 7"),
        ("attend", r"call 3, attend\(.*\): result\[0, 1, 0, 2\] is \S+ \(0x.*; 1 of 6 elements differ"),
        ("commit", r"call 4, commit\(.*\): error is None for the trace, AdmitRuntimeError\('no'"),
        ("sign", r"call 5, layer\(.*\): result\[1, 0, 0, 0, 0\] is 0.0 .* -0.0"),
    ],
)
def test_a_planted_fault_is_told_with_its_call_and_place(fault, expected, tmp_path):
    manager = Planted(CONFIG, "cpu")
    manager.fault = fault
    with pytest.raises(Difference, match=expected):
        replay(recorded(tmp_path / "trace"), manager)


def test_a_manager_that_spoils_its_arguments_does_not_spoil_the_trace(tmp_path):
    def twice(manager):
        one_step(manager)
        manager.attend(0, *tensors())

    manager = build(CONFIG, backend="reference")
    attend = manager._attend

    def spoiling(layer_idx, q, *others):
        out = attend(layer_idx, q, *others)
        q.zero_()
        return out

    manager._attend = spoiling
    assert replay(recorded(tmp_path / "trace", twice), manager) == 6


def test_errors_are_replayed_by_type_text_and_attributes(tmp_path):
    def refused(manager):
        with pytest.raises(AdmitRuntimeError):
            manager.plan(STEP, CONTEXT)
        with pytest.raises(ValueError, match="layer_idx is nan"):
            manager.layer(float("nan"))
        with pytest.raises(TypeError, match="step is list"):
            manager.admit([1, None], CONTEXT)

    path = recorded(tmp_path / "trace", refused)
    written = read_trace(path).calls[0]["error"]
    assert (written["class"], written["attributes"]["request_id"]) == ("AdmitRuntimeError", "a")
    assert replay(path, build(CONFIG, backend="reference")) == 3
    manager = build(CONFIG, backend="reference")
    manager.plan = lambda **arguments: (_ for _ in ()).throw(AdmitRuntimeError(written["text"], "b"))
    with pytest.raises(Difference, match=r"attributes of error\['request_id'\] is 'a' for the trace, 'b'"):
        replay(path, manager)


# What is refused, and what never exists.


def test_a_file_appears_whole_or_not_at_all(tmp_path, monkeypatch):
    import safetensors.torch

    def half(tensors, path, metadata):
        path.write_bytes(b"half a file")
        raise OSError("disk full")

    manager = record(build(CONFIG, backend="reference"), tmp_path / "trace")
    one_step(manager)
    with monkeypatch.context() as patch:
        patch.setattr(safetensors.torch, "save_file", half)
        with pytest.raises(OSError, match="disk full"):
            manager.close()
    assert list(tmp_path.iterdir()) == []
    manager.close()
    assert [path.name for path in tmp_path.iterdir()] == ["trace"]


def test_a_file_of_that_name_is_replaced_not_written_over(tmp_path):
    (tmp_path / "trace").write_text("the old one")
    with (tmp_path / "trace").open() as old:
        recorded(tmp_path / "trace")
        assert old.read() == "the old one"
    assert len(read_trace(tmp_path / "trace").calls) == 5


def test_an_error_in_the_block_leaves_the_trace_of_what_was_called(tmp_path):
    def calls(manager):
        one_step(manager)
        raise OSError("engine")

    with pytest.raises(OSError, match="engine"):
        recorded(tmp_path / "t", calls)
    assert replay(tmp_path / "t", build(CONFIG, backend="reference")) == 5


def rewrite(path, **fields):
    """The same trace with other fields at its head."""
    from safetensors.torch import load_file, save_file

    trace, _ = read_by_the_page(path)
    save_file(load_file(path), path, metadata={"boundedkv_trace": json.dumps(trace | fields)})


@pytest.mark.parametrize("name", ["format_version", "numerics_version", "plan_version"])
def test_another_version_is_refused(name, tmp_path):
    path = recorded(tmp_path / "trace")
    rewrite(path, **{name: 99})
    with pytest.raises(ValueError, match=rf"trace has {name} 99, but should have \d+: record it anew"):
        replay(path, build(CONFIG, backend="reference"))


def test_a_file_of_another_kind_is_refused(tmp_path):
    from safetensors.torch import save_file

    (tmp_path / "text").write_text("no trace")
    save_file({}, tmp_path / "weights")
    with pytest.raises(ValueError, match="text should be a safetensors file, but: "):
        read_trace(tmp_path / "text")
    with pytest.raises(ValueError, match="weights has no boundedkv_trace in its metadata, but should be a trace"):
        read_trace(tmp_path / "weights")


def test_a_manager_that_is_not_fit_is_refused(tmp_path):
    path = recorded(tmp_path / "trace")
    other = BoundedKVConfig(1, 1, 3, SinkWindow(1, 3), max_slots=2, dtype=torch.float16)
    with pytest.raises(ValueError, match=r"config has retention \[\[1, 3, False\]\], but should have \[\[1, 2, False"):
        replay(path, build(other, backend="reference"))
    used = build(CONFIG, backend="reference")
    used.admit(STEP, CONTEXT)
    with pytest.raises(ValueError, match="manager has 1 free slots, but should have all 2"):
        replay(path, used)
    with pytest.raises(ValueError, match="manager has 1 free slots, but should have all 2"):
        record(used, path)


def test_a_retention_by_source_length_is_tabulated(tmp_path):
    config = BoundedKVConfig(1, 1, 3, lambda source_len: SinkWindow(source_len, 2), max_source_len=2, max_slots=1)
    trace = read_trace(recorded(tmp_path / "trace", lambda manager: None, config))
    assert trace.config.retentions == config.retentions
    assert replay(tmp_path / "trace", build(config, backend="reference")) == 0


def test_what_a_trace_cannot_hold_is_refused_before_the_call(tmp_path):
    manager = record(build(CONFIG, backend="reference"), tmp_path / "trace")
    manager.admit(STEP, CONTEXT)
    with pytest.raises(TypeError, match=r"2\.rid is set, which a trace cannot hold"):
        manager.remove_request({"a"})
    manager.close()
    assert len(read_trace(tmp_path / "trace").calls) == 1


def test_without_safetensors_the_rest_works_and_the_extra_is_named(tmp_path):
    code = f"""
import sys
sys.modules["safetensors"] = None
from boundedkv import BoundedKVConfig, SinkWindow, build
from boundedkv.testing import Shadow, record, replay
manager = build(BoundedKVConfig(1, 1, 3, SinkWindow(1, 2)), backend="reference")
Shadow(manager)
path = {str(tmp_path / "trace")!r}
for call in (record, lambda manager, path: replay(path, manager), lambda manager, path: Shadow(manager, folder=path)):
    try:
        call(manager, path)
    except ImportError as error:
        print(error)
"""
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["traces are safetensors files: pip install 'boundedkv[traces]'"] * 3


@pytest.mark.gpu
def test_a_call_while_a_graph_is_captured_is_refused(tmp_path):
    manager = record(build(CONFIG, "cuda", backend="fast"), tmp_path / "trace")
    manager.admit(STEP, CONTEXT)
    manager.plan(STEP, CONTEXT)
    inputs = [x.cuda() for x in tensors()]
    manager.attend(0, *inputs)
    torch.cuda.synchronize()
    with torch.cuda.graph(torch.cuda.CUDAGraph()), pytest.raises(RuntimeError, match="attend is called while a graph"):
        manager.attend(0, *inputs)
