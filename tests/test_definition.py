"""Plans against a simulated stream that keeps everything, slots against brute force, attention against float64."""

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from streams import (
    Drive,
    Everything,
    attend64,
    normal,
    on_both,
    random_own,
    random_source,
    read_places,
    write_places,
)

from boundedkv import BoundedKVConfig, BucketKey, SinkWindow, SlotLease, StepContext, StreamPosition
from boundedkv import plan as fmt
from boundedkv.plan import Read, RowLayout, Write, decode, encode

MAX_SOURCE = 9
INT32 = st.integers(-(2**31), 2**31 - 1)


@st.composite
def pools(draw):
    """Settings of a pool in which every rule of retention can meet every other."""
    rule = draw(st.sampled_from(["step", "includes_step", "reverse", "query"]))
    kept = st.builds(SinkWindow, st.integers(0, 7), st.integers(0, 6), st.just(rule == "includes_step"))
    if draw(st.booleans()):
        retention = draw(kept)
        windows = [retention.window]
    else:
        table = draw(st.lists(kept, min_size=MAX_SOURCE + 1, max_size=MAX_SOURCE + 1))
        retention, windows = table.__getitem__, [window for _, window, _ in table]
    pool = {"retention": retention, "max_source_len": MAX_SOURCE, "spare": draw(st.integers(0, 4)), "max_slots": 1}
    if rule == "query":
        pool["query_window"] = draw(st.integers(0, min(windows)))
    return pool | {"reverse_step_order": rule == "reverse"}


@dataclass
class Memory:
    """What a slot and a source hold, entry by entry: the token, by a name no other has."""

    slot: list
    source: list

    def read(self, row):
        return [(self.slot if memory == "slot" else self.source)[i] for memory, i in read_places(row)]

    def write(self, row, own, reverse):
        places = write_places(row, reverse)
        assert len({place for _, place in places}) == len(places), "one place is written twice"
        assert len({token for token, _ in places}) == len(places), "one token is written twice"
        for token, place in places:
            assert 0 <= place < len(self.slot)
            self.slot[place] = own[token]


@on_both
@settings(max_examples=250)
@given(pool=pools(), source_len=st.integers(0, MAX_SOURCE), index=st.integers(-1, 2), data=st.data())
def test_a_plan_reads_what_the_stream_retains(backend, pool, source_len, index, data):
    """Every retained entry once, in stream order, from where it was last written; rewinds and dropped steps too."""
    drive = Drive(backend, **pool)
    config, manager = drive.config, drive.manager
    stream = Everything(config, source_len)
    stream.entries = [f"source {s}" for s in range(source_len)]
    memory = Memory([None] * config.slot_tokens, list(stream.entries))
    drive.positions["a"] = StreamPosition(source_len, 0, index)
    reach = 0
    for turn in range(data.draw(st.integers(1, 9))):
        what = data.draw(st.sampled_from(["step", "step", "step", "dropped", "rewind"]))
        here = drive.positions["a"].written
        span = data.draw(st.integers(0, 2 * stream.window + 3))
        if what == "rewind" and turn:
            written = max(0, here - span)
            if reach - written > config.spare:
                with pytest.raises(ValueError, match="spare"):
                    manager.rewind_request("a", written)
            else:
                manager.rewind_request("a", written)
                drive.positions["a"] = StreamPosition(source_len, written, index)
                del stream.entries[source_len + written :]  # what was written behind it still fills the ring
            continue
        if what == "dropped":
            span = min(span, max(0, config.spare - (reach - here)))
        plan = drive.plan({"a": span})
        own = [f"token {token} of step {turn}" for token in range(span)]
        retained = stream.retained(span)
        (row,) = plan.rows
        assert memory.read(row) == [stream.entries[s] for s in retained]
        memory.write(row, own, config.reverse_step_order)
        reach = max(reach, here + span)
        slot, layout, source = row
        in_source = [s for s in retained if s < source_len]
        assert (slot, source, layout.tokens) == (0, index, fmt.ALL_TOKENS)
        assert (layout.length, layout.sink) == (len(stream.entries), stream.sink)
        assert (plan.max_retained, plan.max_span, plan.retained().tolist()) == (len(retained), span, [len(retained)])
        assert (plan.reads_source, plan.reads_row_source) == (
            bool(in_source) and index >= 0,
            bool(in_source) and index < 0,
        )
        assert layout.source_entries == max(in_source, default=-1) + 1
        assert plan.table.tolist() == encode(plan.rows).tolist()
        if what == "step":
            stream.join(span, own)
            drive.advance({"a": span})


@on_both
@settings(max_examples=100)
@given(pool=pools(), data=st.data())
def test_a_batch_is_planned_row_by_row(backend, pool, data):
    """Rows in the context's order, not the segments'; padding rows empty; a leased table zero behind them."""
    rids = data.draw(st.lists(st.sampled_from("abcde"), min_size=1, unique=True))
    padding = tuple(f"pad{i}" for i in range(data.draw(st.integers(0, 2))))
    drive = Drive(backend, **pool | {"max_slots": 6})
    spans = {rid: data.draw(st.integers(0, 9)) for rid in data.draw(st.permutations(rids))}
    tokens = {rid: spans[rid] + data.draw(st.integers(0, 2)) for rid in rids if data.draw(st.booleans())}
    for rid in rids:
        drive.positions[rid] = StreamPosition(data.draw(st.integers(0, MAX_SOURCE)), 0, data.draw(st.integers(-1, 2)))
    drive.plan(dict.fromkeys(spans, 0))
    slots = {rid: row[0] for rid, row in zip(spans, drive.manager.current.rows, strict=True)}
    for rid in rids:
        drive.positions[rid] = drive.positions[rid]._replace(written=data.draw(st.integers(0, 30)))
    lease = SlotLease(0, BucketKey("main", len(rids) + len(padding) + 1, 9)) if data.draw(st.booleans()) else None
    drive.plan({"z": 0})
    drive.manager.plan(*drive.declare(dict.fromkeys((*rids, "z"), 1), slot_lease=lease))  # leaves more lines than come
    step, _ = drive.declare(spans, tokens)
    plan = drive.manager.plan(step, StepContext(tuple(rids), slot_lease=lease, padded_request_ids=(*rids, *padding)))
    alone = [drive.manager.plan(*drive.declare({rid: spans[rid]}, tokens)) for rid in rids]
    assert plan.rows == (*(one.rows[0] for one in alone), *decode(np.zeros((len(padding), fmt.ROW_INTS), np.int32)))
    assert [(row[0], row[1].tokens) for row in plan.rows] == [
        *((slots[rid], tokens.get(rid, fmt.ALL_TOKENS)) for rid in rids),
        *((0, 0) for _ in padding),
    ]
    assert plan.table.tolist() == [*encode(plan.rows).tolist(), *([[0] * fmt.ROW_INTS] if lease else [])]
    for name in ("max_retained", "max_span", "reads_source", "reads_row_source"):
        assert getattr(plan, name) == max(getattr(one, name) for one in alone)
    assert plan.retained().tolist() == [*(one.max_retained for one in alone), *(0 for _ in padding)]


@settings(max_examples=60)
@given(pool=pools(), data=st.data())
def test_slots_are_as_large_as_the_streams_need(pool, data):
    config = BoundedKVConfig(1, 1, 4, **pool)
    sinks, ring = 0, 0
    for source_len in range(MAX_SOURCE + 1):
        stream = Everything(config, source_len)
        stream.join(40)
        written = [s for s in stream.retained() if s >= source_len]
        sinks = max(sinks, sum(s < stream.sink for s in written))
        ring = max(ring, sum(s >= stream.sink for s in written))
    assert (config.sink_capacity, config.ring_capacity) == (sinks, ring + config.spare)
    assert config.slot_tokens == sinks + ring + config.spare
    entry = {"num_layers": 3, "num_heads": 2, "rows_per_request": 2, "head_dim": 5, "dtype": torch.float16}
    sized = Drive("reference", **pool | entry)
    assert sized.config.slot_bytes == sum(sized.manager.layer(i).nbytes for i in range(3))


def test_slots_are_not_sized_by_the_longest_source_alone():
    config = BoundedKVConfig(1, 1, 4, SinkWindow(4, 2), max_source_len=10)
    assert (config.sink_capacity, config.slot_tokens) == (4, 6)


LAYOUTS = st.builds(
    RowLayout,
    INT32,
    INT32,
    INT32,
    st.tuples(*[st.builds(Read, INT32, INT32)] * fmt.NUM_READS),
    st.tuples(*[st.builds(Write, INT32, INT32, INT32)] * fmt.NUM_WRITES),
)


@given(st.lists(st.tuples(INT32, LAYOUTS, INT32), max_size=4))
def test_decode_is_the_inverse_of_encode(rows):
    table = encode(tuple(rows))
    assert (table.shape, table.dtype) == ((len(rows), fmt.ROW_INTS), np.int32)
    assert decode(table) == tuple(rows)


@given(st.lists(st.lists(INT32, min_size=fmt.ROW_INTS, max_size=fmt.ROW_INTS), max_size=4))
def test_encode_is_the_inverse_of_decode(lines):
    table = np.array(lines, dtype=np.int32).reshape(-1, fmt.ROW_INTS)
    assert encode(decode(table)).tolist() == lines
    assert len(fmt.COLUMNS) == len(set(fmt.COLUMNS)) == fmt.ROW_INTS


# Attention over the simulated stream's list of keys. float64 is another arithmetic, so the error is bounded: over all
# the results of a run, by what torch's own float32 softmax errs on the same numbers. Measured: 0.7 to 1.35 times with
# ieee, 210 to 680 times without (16 bits instead of 24). A key too many or too few is an error of a million times.
WORST = {False: 1000.0, True: 2.0}

RULES = {
    "step": {"retention": SinkWindow(2, 5)},
    "includes_step": {"retention": SinkWindow(1, 6, True)},
    "reverse": {"retention": SinkWindow(1, 4), "reverse_step_order": True},
    "query": {"retention": SinkWindow(2, 5), "query_window": 4},
    "bias": {"retention": SinkWindow(2, 5)},
    "query_bias": {"retention": SinkWindow(0, 5), "query_window": 5},
}


def per_query(stream, own, past, span, bias):
    """For each query of a step: q [H, 1, D], k and v of the N keys that it sees [H, N, D], their bias [H, 1, N]."""
    n, tokens = len(stream.entries), own.k.shape[2]
    k, v = (torch.cat([old[:, stream.entries], new[0]], dim=1) for old, new in zip(past, own[1:], strict=True))
    retained = stream.retained(span)
    for t in range(tokens):
        visible = stream.sees(t, tokens, span)
        if stream.query_window is None:
            order = [*retained, *range(n, n + tokens)]
            entries = [len(retained) + t - order.index(s) + tokens - 1 for s in visible]
        else:
            entries = [n + t - s for s in visible]
        term = torch.zeros(1) if bias is None else bias[0, :, t, entries][:, None]
        yield own.q[0, :, t, None], k[:, visible], v[:, visible], term


@on_both
@pytest.mark.parametrize("ieee", [False, True])
@pytest.mark.parametrize("rule", RULES)
def test_attention_is_softmax_over_what_a_query_sees(backend, rule, ieee):
    spans = [3, 7, 1, 0, 5, 2] if backend == "reference" else [3, 4, 1]
    drive = Drive(backend, head_dim=8, max_source_len=4, num_heads=2 if backend == "reference" else 1, **RULES[rule])
    drive.poison()
    drive.positions["a"] = StreamPosition(4, 0)
    config, stream = drive.config, Everything(drive.config, source_len=4)
    own, source = random_own(config, sum(spans) + 2), random_source(config, 1, 4)
    past = [torch.cat([s, x], dim=1) for s, x in zip(source[0, 0].split(8, dim=-1), (own.k[0], own.v[0]), strict=True)]
    ours, torchs = [], []
    for turn, span in enumerate(spans):
        written = drive.positions["a"].written
        cut = own.cut(written, written + max(span, 2))  # a step of one token or none looks ahead
        tokens, retained = cut.k.shape[2], len(stream.retained(span))
        bias = None
        if "bias" in rule:
            entries = 6 if rule == "query_bias" else retained + 2 * tokens - 1
            bias = normal(50 + turn, 1, config.query_heads, tokens, entries)
        out = drive.step({"a": span}, cut, tokens={"a": tokens}, source=source, rel_bias=bias, ieee=ieee)
        for t, (q, k, v, term) in enumerate(per_query(stream, cut, past, span, bias)):
            exact = attend64(q, k, v, config.score_scale, term)
            torchs.append(torch.softmax((q @ k.mT + term) * config.score_scale, dim=-1) @ v - exact)
            ours.append(out[0, t, :, None] - exact)
        stream.join(span, range(4 + written, 4 + written + span))
    ratio = torch.cat(ours).norm() / torch.cat(torchs).norm()
    assert ratio <= WORST[ieee], f"the error is {ratio:.1f} times that of float32"
