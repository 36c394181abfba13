"""The golden traces: every bit as it was recorded, for each backend, wherever it runs."""

import json

import pytest
import torch
from conftest import device_of
from trace_reader import read_by_the_page

from boundedkv import NUMERICS_VERSION, PLAN_VERSION, build

pytest.importorskip("safetensors")

from boundedkv.testing import read_trace, replay
from boundedkv.testing.golden import golden_traces
from boundedkv.testing.golden.__main__ import main
from boundedkv.testing.golden.streams import LARGER, STREAMS, normal
from boundedkv.testing.traces import FORMAT_VERSION

TRACES = golden_traces()
ANEW = "after a change of bits raise NUMERICS_VERSION and record anew: python -m boundedkv.testing.golden"
each_trace = pytest.mark.parametrize("path", TRACES, ids=lambda path: path.stem)


@each_trace
def test_a_trace_replays_with_every_bit(path, backend):
    manager = build(read_trace(path).config, device_of(backend), backend=backend)
    assert replay(path, manager) == len(read_trace(path).calls)


def test_every_stream_has_its_trace_and_no_other():
    assert {path.stem for path in TRACES} == set(STREAMS), ANEW
    assert sum(path.stat().st_size for path in TRACES) < 400_000


@each_trace
def test_the_versions_are_the_codes(path):
    trace, _ = read_by_the_page(path)
    versions = trace["format_version"], trace["numerics_version"], trace["plan_version"]
    assert versions == (FORMAT_VERSION, NUMERICS_VERSION, PLAN_VERSION), ANEW


def test_recording_anew_gives_the_same_files(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("boundedkv.testing.golden.__main__.FOLDER", tmp_path)
    main([])
    assert capsys.readouterr().out.count(" KB") == len(STREAMS)
    for path in TRACES:
        assert (tmp_path / path.name).read_bytes() == path.read_bytes(), f"{path.name} is not what is recorded; {ANEW}"


def test_another_folder_gets_the_larger_ones_too(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("boundedkv.testing.golden.__main__.STREAMS", {"no-sink": STREAMS["no-sink"]})
    monkeypatch.setattr("boundedkv.testing.golden.__main__.LARGER", {"poison": STREAMS["poison"]})
    main(["--out", str(tmp_path / "more")])
    assert {path.stem for path in (tmp_path / "more").iterdir()} == {"no-sink", "poison"}
    assert not set(LARGER) & set(STREAMS)


def test_inputs_are_the_same_on_every_machine():
    expected = [float.fromhex(x) for x in ("0x1.3e38p+0", "0x1.e78cp+0", "-0x1.1468p+1", "0x1.cc10p+0")]
    assert normal(1, 4).tolist() == expected
    assert normal(1, 1, 4, dtype=torch.bfloat16)[0].tolist() == torch.tensor(expected).bfloat16().tolist()


def test_features_that_must_not_be_lost():
    """What the traces are for: each thing occurs in some call."""
    traces = [read_by_the_page(path)[0] for path in TRACES]
    attends = [call["arguments"] for trace in traces for call in trace["calls"] if call["call"] == "attend"]
    text = json.dumps([trace["calls"] for trace in traces])
    for words in ('"slot_lease": {', '"capture": true', '"padded_request_ids": ["a"', "no slot left", "plan_of_call"):
        assert words in text
    for name in ("import_request", "export_request", "rewind_request", "rollback_admit", "reset_request", "layer"):
        assert f'"call": "{name}"' in text
    for name in ("source", "row_source", "rel_bias"):
        assert any(name in arguments for arguments in attends)
    assert {arguments["ieee"] for arguments in attends} == {False, True}
    configs = [trace["config"] for trace in traces]
    assert {1, 16, 24, 64, 256} <= {config["head_dim"] for config in configs}
    assert {"float32", "float16", "bfloat16"} == {config["dtype"] for config in configs}
    for name in ("query_window", "reverse_step_order", "spare", "scale", "num_query_heads", "rows_per_request"):
        assert len({config[name] for config in configs}) > 1
    assert any(config["max_source_len"] > 2048 for config in configs)
    assert any(len(config["retention"]) > 1 for config in configs)
    assert any(config["retention"][0][2] for config in configs)
