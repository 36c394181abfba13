"""Scenarios 11-16 that users of other caches reported: sinks that fill, long first spans, sources, the score term."""

import math

import pytest
import torch
from streams import (
    INF,
    NAN,
    Drive,
    Everything,
    assert_same,
    on_both,
    probe_step,
    random_own,
    random_source,
    stack,
)

from boundedkv import SinkWindow, StreamPosition

# Each score term is a power of two in the weight, and the factor on it is exactly 1.
LN_2 = math.log(2)


@on_both
@pytest.mark.parametrize(("sink", "window", "spans"), [(4, 4, [3, 3, 3]), (6, 2, [1, 2, 1, 9, 1]), (4, 4, [3, 6])])
def test_s11_sink_fills_over_several_steps(backend, sink, window, spans):
    drive = Drive(backend, retention=SinkWindow(sink, window), head_dim=24)
    drive.poison()
    stream = Everything(drive.config)
    for span in spans:
        probe_step(drive, stream, span)
        n = len(stream.entries)
        assert len(stream.retained()) == min(n, sink + window) == drive.plan({"a": 0}).max_retained
    if spans == [3, 3, 3]:
        assert stream.retained() == [0, 1, 2, 3, 5, 6, 7, 8]
    probe_step(drive, stream, span=0, tokens=1)


@on_both
@pytest.mark.parametrize("ieee", [False, True])
def test_s12_one_span_of_twelve_is_twelve_spans_of_one(backend, ieee):
    drives = [Drive(backend, retention=SinkWindow(2, 4), query_window=4) for _ in range(2)]
    own = random_own(drives[0].config, 12)
    whole = drives[0].stream(own, [12], ieee=ieee)
    assert_same(drives[1].stream(own, [1] * 12, ieee=ieee), whole)
    assert_same(drives[1].slots(), drives[0].slots(), "slots")


@on_both
@pytest.mark.parametrize("spans", [[12], [4, 8]])
def test_s12_a_query_sees_its_sinks_and_its_window(backend, spans):
    drive = Drive(backend, retention=SinkWindow(2, 4), query_window=4, head_dim=16)
    stream, seen = Everything(drive.config), []
    for span in spans:
        seen += probe_step(drive, stream, span)
    assert seen[9] == [0, 1, 5, 6, 7, 8, 9]
    assert seen[5] == [0, 1, 2, 3, 4, 5]


@on_both
@pytest.mark.parametrize(("sink", "window", "first"), [(4, 8, 20), (0, 3, 20), (9, 2, 10)])
def test_s13_first_span_longer_than_the_slot(backend, sink, window, first):
    drive = Drive(backend, retention=SinkWindow(sink, window), head_dim=32)
    drive.poison()
    stream = Everything(drive.config)
    assert probe_step(drive, stream, first) == [list(range(first))] * first
    assert stream.retained() == sorted({*range(sink), *range(first - window, first)})
    probe_step(drive, stream, span=1)
    probe_step(drive, stream, span=0, tokens=2)


@on_both
def test_s14_a_slot_used_again_is_as_good_as_fresh(backend):
    settings = {"retention": SinkWindow(4, 8), "max_source_len": 50, "max_slots": 1}
    pool = Drive(backend, **settings)
    assert pool.config.sink_capacity == 4
    source = random_source(pool.config, 2, 50)
    for turn, source_len in enumerate([50, 10, 0, 3, 50]):
        own = random_own(pool.config, 14, seed=turn)
        fresh = Drive(backend, **settings)
        fresh.poison()
        for drive in (pool, fresh):
            drive.positions["a"] = StreamPosition(source_len, 0, turn % 2)
        spans = [3, 9, 2]
        used = pool.stream(own, spans, source=source)
        assert_same(used, fresh.stream(own, spans, source=source), f"source length {source_len}:")
        assert not used.isnan().any()
        pool.manager.remove_request("a")


@on_both
def test_s14_sinks_of_a_short_source_are_its_own_tokens(backend):
    drive = Drive(backend, retention=SinkWindow(4, 3), max_source_len=8, head_dim=16)
    for source_len in (8, 2, 0):
        drive.poison()
        drive.positions["a"] = StreamPosition(source_len, 0)
        stream = Everything(drive.config, source_len)
        source = torch.zeros(1, 1, 1, 8, 32)
        for s in range(source_len):
            source[..., s, 16 + s] = 1.0  # the probe's one-hot value: no lane is shared by positions 0 to 15
        for span in (1, 5, 2):
            probe_step(drive, stream, span, source=source)
        drive.manager.remove_request("a")


@on_both
@pytest.mark.parametrize("by_row", [False, True])
def test_s15_each_row_reads_its_own_source(backend, by_row):
    steps = 3 if backend == "fast" else 20 if by_row else 100  # the interpreter takes half a second for one of these
    settings = {"retention": SinkWindow(2, 5), "max_source_len": 6, "max_slots": 3}
    batch = Drive(backend, **settings)
    bank = random_source(batch.config, 4, 9).to(batch.manager.device)
    kept = bank.clone()
    batch.positions = {"a": StreamPosition(6, 0, 3), "b": StreamPosition(6, 0, 1), "c": StreamPosition(0, 0)}
    sources = {"source": bank}
    if by_row:  # b's prefix lies in another resource's storage, whose table says that its entry is 2
        table = torch.tensor([[9, 1], [2, 1], [9, 1]]).to(bank.device)
        sources["row_source"] = (bank[[0, 3, 1]], table[:, 0])
        batch.positions["b"] = StreamPosition(6, 0, -1)
    own = {rid: random_own(batch.config, 2 * steps, seed) for seed, rid in enumerate("abc")}
    outs = []
    for i in range(steps):
        cut = stack(own[rid].cut(2 * i, 2 * i + 2) for rid in "abc")
        outs.append(batch.step(dict.fromkeys("abc", 2), cut, **sources))
    assert_same(bank, kept, "source")
    for row, (rid, index) in enumerate({"a": 3, "b": 1, "c": None}.items()):
        solo = Drive(backend, **settings)
        solo.positions[rid] = StreamPosition(0 if index is None else 6, 0)
        source = None if index is None else bank[index : index + 1]
        alone = solo.stream(own[rid], [2] * steps, rid, source=source)
        assert_same(torch.cat([out[row : row + 1] for out in outs], dim=1), alone, f"row {rid}:")


@on_both
@pytest.mark.parametrize("source", [0, -1])
def test_s15_a_source_that_is_not_given_is_refused_before_anything_is_written(backend, source):
    drive = Drive(backend, retention=SinkWindow(0, 4), max_source_len=3)
    drive.positions = {"a": StreamPosition(0, 0), "b": StreamPosition(3, 0, source)}
    own = random_own(drive.config, 2)
    drive.plan({"a": 2, "b": 2})
    before = drive.slots()
    given = random_source(drive.config, 1, 3)
    other = {"row_source": (given, torch.zeros(2, dtype=torch.int32))} if source == 0 else {"source": given}
    for sources in ({}, other):
        with pytest.raises(ValueError, match=r"source is None, but should be given: the plan reads it"):
            drive.attend(stack([own, own]), **sources)
        assert_same(drive.slots(), before, "slots")


def slopes(tokens: int) -> torch.Tensor:
    return torch.tensor([[1.0 + t % 2] for t in range(tokens)])


def step_rule_bias(retained: int, tokens: int) -> torch.Tensor:
    """Entry by entry, minus the distance, for every other query twice that: weights are powers of two."""
    entries = retained + 2 * tokens - 1
    distance = torch.arange(entries) - (tokens - 1.0)
    return (-distance * slopes(tokens))[None, None]


def weighted(weights: dict[int, int], head_dim: int) -> torch.Tensor:
    """The probe's result where key s has weight 2 ** weights[s]: sums below are exact, the division rounds once."""
    parts = torch.zeros(head_dim)
    for s, power in weights.items():
        parts[s % head_dim] += 2.0**power
    return parts / parts.sum()


@on_both
@pytest.mark.parametrize("ieee", [False, True])
@pytest.mark.parametrize("tokens", [1, 2, 3])
@pytest.mark.parametrize("written", [6, 7, 9])  # the ring of 4 wraps at another place each time
def test_s16_bias_is_taken_by_distance(backend, tokens, written, ieee):
    drive = Drive(backend, retention=SinkWindow(0, 4), head_dim=16, scale=LN_2)
    stream = Everything(drive.config)
    probe_step(drive, stream, span=written)
    bias = step_rule_bias(4, tokens)
    if (written, tokens) == (6, 1):
        assert bias[0, 0, 0].flip(0).tolist() == [-4, -3, -2, -1, 0]  # of the keys at positions 2 to 6
    one_hot = torch.eye(16)[[s % 16 for s in range(written, written + tokens)]][None, None]
    out = drive.step({"a": tokens}, (torch.zeros_like(one_hot), one_hot, one_hot), rel_bias=bias, ieee=ieee)
    for t in range(tokens):
        p = written + t
        weights = {s: -(p - s) * (1 + t % 2) for s in range(written - 4, written + tokens)}
        assert_same(out[0, t, 0], weighted(weights, 16), f"query {t}:")


@on_both
@pytest.mark.parametrize("spans", [[9], [4, 1, 4]])
def test_s16_bias_beside_a_query_window_is_taken_by_distance(backend, spans):
    drive = Drive(backend, retention=SinkWindow(0, 4), query_window=3, head_dim=16, scale=LN_2)
    written = 0
    for span in spans:
        one_hot = torch.eye(16)[None, None, written : written + span]
        bias = -torch.arange(4.0) * slopes(span)
        own = (torch.zeros_like(one_hot), one_hot, one_hot)
        out = drive.step({"a": span}, own, rel_bias=bias[None, None])
        for t in range(span):
            p = written + t
            weights = {s: -(p - s) * (1 + t % 2) for s in range(max(0, p - 3), p + 1)}
            assert_same(out[0, t, 0], weighted(weights, 16), f"query at {p}:")
        written += span


@on_both
@pytest.mark.parametrize("tokens", [1, 3])
def test_s16_bias_too_short_is_refused_and_one_longer_is_not_read(backend, tokens):
    drive = Drive(backend, retention=SinkWindow(0, 4))
    own = random_own(drive.config, 6 + tokens)
    drive.step({"a": 6}, own.cut(0, 6))
    drive.plan({"a": 0})
    bias, before = step_rule_bias(4, tokens), drive.slots()
    with pytest.raises(ValueError, match=f"has {4 + 2 * tokens - 2} entries a query, but should have at least"):
        drive.attend(own.cut(6, 6 + tokens), rel_bias=bias[..., :-1])
    assert_same(drive.slots(), before, "slots")
    longer = torch.nn.functional.pad(bias, (0, 3), value=NAN)
    cut = own.cut(6, 6 + tokens)
    assert_same(drive.attend(cut, rel_bias=longer), drive.attend(cut, rel_bias=bias))


@on_both
def test_s16_bias_that_masks_leaves_the_others(backend):
    drive = Drive(backend, retention=SinkWindow(0, 4), head_dim=16, scale=LN_2)
    probe_step(drive, Everything(drive.config), span=6)
    one_hot = torch.eye(16)[None, None, 6:8]
    bias = torch.zeros(1, 1, 2, 7)
    bias[..., 0, 3] = bias[..., 1, 1] = -INF  # query 0 loses distance 2, key 4; query 1 distance 0, itself
    out = drive.step({"a": 2}, (torch.zeros_like(one_hot), one_hot, one_hot), rel_bias=bias)
    assert_same(out[0, 0, 0], weighted(dict.fromkeys([2, 3, 5, 6, 7], 0), 16), "query 0:")
    assert_same(out[0, 1, 0], weighted(dict.fromkeys([2, 3, 4, 5, 6], 0), 16), "query 1:")
