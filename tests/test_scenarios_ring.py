"""Scenarios 1-10 that users of other caches reported: what the window keeps while the ring turns."""

import random
from itertools import permutations

import pytest
import torch
from streams import (
    NAN,
    Drive,
    Everything,
    assert_same,
    on_both,
    probe,
    probe_step,
    random_own,
    random_source,
    read_places,
    shares,
    stack,
    write_places,
)

from boundedkv import SinkWindow, StreamPosition


@on_both
@pytest.mark.parametrize(("window", "spans"), [(3, [2, 1, 1, 1, 1, 1, 1]), (3, [8]), (0, [1, 2, 1]), (2, [1, 5, 1])])
def test_s01_query_window_slides_one_entry_a_token(backend, window, spans):
    drive = Drive(backend, retention=SinkWindow(0, window + 1), query_window=window, head_dim=12)
    stream, seen = Everything(drive.config), []
    for span in spans:
        seen += probe_step(drive, stream, span)
        plan = drive.plan({"a": 0})
        n = len(stream.entries)
        places = [s % (window + 1) for s in range(max(0, n - window - 1), n)]
        assert read_places(plan.rows[0]) == [("slot", place) for place in places], "read in another order than written"
    if window == 3:
        assert seen[2:] == [[0, 1, 2], [0, 1, 2, 3], [1, 2, 3, 4], [2, 3, 4, 5], [3, 4, 5, 6], [4, 5, 6, 7]]


@on_both
@pytest.mark.parametrize("sink", [0, 3])
def test_s02_first_eviction_comes_with_entry_window_plus_one(backend, sink):
    drive = Drive(backend, retention=SinkWindow(sink, 8), head_dim=20)
    stream = Everything(drive.config)
    for span in [6] + [1] * (sink + 4):
        probe_step(drive, stream, span)
    at = {n: Everything(drive.config) for n in (8, 9, 10)}
    for n, other in at.items():
        other.join(sink + n)
    evicted = {n: sorted(set(range(sink + n)) - set(other.retained())) for n, other in at.items()}
    assert evicted == {8: [], 9: [sink], 10: [sink, sink + 1]}
    assert probe_step(drive, stream, span=0, tokens=1) == [[*range(sink), *range(sink + 2, sink + 10), sink + 10]]


@on_both
@pytest.mark.parametrize(("sink", "window"), [(4, 4), (0, 3), (2, 7)])
def test_s03_cuts_of_ten_tokens_leave_the_same_slot(backend, sink, window):
    cuts = [[1] * 10, [10], [3, 7], [9, 1]] if backend == "reference" or sink == 4 else [[10], [3, 7]]
    runs = []
    for cut in cuts:
        drive = Drive(backend, retention=SinkWindow(sink, window))
        own = random_own(drive.config, 12)
        drive.stream(own.cut(0, 10), cut)
        slots = drive.slots()
        runs.append((slots, drive.step({"a": 2}, own.cut(10, 12))))
    stream = Everything(drive.config)
    stream.join(10)
    assert stream.retained() == sorted({*range(sink), *range(10 - window, 10)})
    for slots, out in runs[1:]:
        assert_same(slots, runs[0][0], "slots")
        assert_same(out, runs[0][1])


@on_both
@pytest.mark.parametrize("window", [4, 1, 6])
def test_s04_chunks_as_long_as_the_window(backend, window):
    drive = Drive(backend, retention=SinkWindow(0, window), head_dim=2 * window)
    stream = Everything(drive.config)
    memory = drive.manager.layer(0)
    assert drive.config.slot_bytes == window * 2 * (2 * window) * 4
    for _ in range(4):
        probe_step(drive, stream, span=window)
        n = len(stream.entries)
        assert stream.retained() == list(range(n - window, n))
        held = memory[0, 0, 0, :, 2 * window :].sum(0).cpu()
        assert_same(held, shares(stream.retained(), 0, 2 * window) * window, "sum of the slot's values")
    assert drive.manager.layer(0).data_ptr() == memory.data_ptr()
    assert drive.manager.layer(0).shape == memory.shape


@on_both
@pytest.mark.parametrize(("window", "spans"), [(4, [3, 9]), (1, [1, 4])])
def test_s05_span_longer_than_the_window_has_no_empty_row(backend, window, spans):
    drive = Drive(backend, retention=SinkWindow(0, window), query_window=window, head_dim=16)
    drive.poison()
    stream = Everything(drive.config)
    for span in spans + [1] * (3 * window):
        for visible in probe_step(drive, stream, span):  # holds the result to finite numbers, bit by bit
            assert len(visible) == min(visible[-1], window) + 1


@on_both
@pytest.mark.parametrize(("sink", "window", "spans"), [(0, 4, [8, 8]), (1, 3, [5, 4, 9]), (0, 1, [1, 7])])
def test_s06_every_query_reads_before_anything_is_overwritten(backend, sink, window, spans):
    tight = Drive(backend, retention=SinkWindow(sink, window), head_dim=16)
    roomy = Drive(backend, retention=SinkWindow(sink, window), head_dim=16, spare=max(spans))  # overwrites nothing
    own = random_own(tight.config, sum(spans))
    assert_same(tight.stream(own, spans), roomy.stream(own, spans))


@on_both
def test_s07_only_the_last_entries_of_a_long_span_are_stored(backend):
    first = None
    for _ in range({"reference": 50, "fast": 6}[backend]):
        drive = Drive(backend, retention=SinkWindow(2, 4))
        drive.poison()
        own = random_own(drive.config, 11)
        out = drive.step({"a": 11}, own)
        slot = drive.slots()[0]
        stored = [0, 1, 10, 7, 8, 9]  # sinks, then ring places 0 to 3
        assert_same(slot, torch.cat([own.k, own.v], dim=-1)[:, :, stored], "slot")
        first = first or (out, slot)
        assert_same(out, first[0])
        assert_same(slot, first[1], "slot")


@pytest.mark.parametrize("sink", [0, 2, 5])
@pytest.mark.parametrize("window", [0, 1, 4])
def test_s07_each_place_is_written_once(sink, window):
    for written in range(12):
        for span in range(12):
            places = []
            for backend in ("reference", "fast"):
                drive = Drive(backend, retention=SinkWindow(sink, window))
                drive.plan({"a": 0})
                drive.positions["a"] = StreamPosition(0, written)
                places.append(write_places(drive.manager.plan(*drive.declare({"a": span})).rows[0]))
            end = written + span
            kept = [s for s in range(written, end) if s < sink or s >= end - window]
            ring = [(s - sink) % window if s >= sink else 0 for s in kept]
            slot = [s if s < sink else sink + place for s, place in zip(kept, ring, strict=True)]
            expected = [(s - written, place) for s, place in zip(kept, slot, strict=True)]
            assert places == [expected, expected], (written, span)


@on_both
def test_s08_each_row_equals_its_own_run_in_any_order(backend):
    lengths = {"a": 3, "b": 17, "c": 64, "d": 65}
    settings = {"retention": SinkWindow(0, 8), "max_slots": 4}
    batch = Drive(backend, **settings)
    own = {rid: random_own(batch.config, n + 2, seed) for seed, (rid, n) in enumerate(lengths.items())}
    prompt = stack(own[rid].cut(0, n, width=65, pad=NAN) for rid, n in lengths.items())
    prompt_out = batch.step(lengths, prompt, tokens=lengths)
    alone = {}
    for row, (rid, n) in enumerate(lengths.items()):
        solo = Drive(backend, **settings)
        assert_same(prompt_out[row : row + 1, :n], solo.stream(own[rid].cut(0, n), [n], rid), f"prompt of {rid}:")
        alone[rid] = solo.step({rid: 0}, own[rid].cut(n, n + 2), tokens={rid: 2})
    for order in [*permutations(lengths)] if backend == "reference" else ["abcd", "dbca"]:
        spans = dict.fromkeys(order, 0)
        out = batch.step(spans, stack(own[rid].cut(lengths[rid], lengths[rid] + 2) for rid in order))
        assert_same(out, torch.cat([alone[rid] for rid in order]), f"order {order}:")


@on_both
@pytest.mark.parametrize("sink", [0, 1, 5])
@pytest.mark.parametrize("window", [1, 2, 7, 8])
def test_s09_two_hundred_random_steps(backend, sink, window):
    # Every step's plan is held to the definition. The interpreter takes a tenth of a second a launch, so the fast
    # backend runs the first steps and the last, and is probed where what it retains was written by these.
    spans = random.Random(10 * sink + window).choices(range(1, 2 * window + 2), k=200)
    drive = Drive(backend, retention=SinkWindow(sink, window), head_dim=sink + 3 * window + 2)
    stream, probed, held = Everything(drive.config), 0, {}
    for i, span in enumerate(spans):
        row = drive.plan({"a": span}).rows[0]
        retained = stream.retained(span)
        places = [s if s < sink else sink + (s - sink) % window for s in retained]
        assert read_places(row) == [("slot", place) for place in places], f"step {i}, which retains {retained}"
        stored = all(held.get(place) == s for place, s in zip(places, retained, strict=True))
        if backend == "reference" or len(stream.entries) <= sink + window or i >= 197:
            n = len(stream.entries)
            held |= {place: n + token for token, place in write_places(row)}
            if stored:
                probe_step(drive, stream, span)
                probed += 1
                continue
            drive.attend(probe(drive, range(n, n + span), sink))
        stream.join(span)
        drive.advance({"a": span})
    assert probed == 200 if backend == "reference" else probed >= 2


@on_both
def test_s10_the_physical_place_of_a_key_never_matters(backend):
    window = 5
    outs = []
    for slot, spare, source_len in [(0, 0, 0), (2, 0, 0), (1, 3, 0), (0, 4, 0), (1, 0, 3), (0, 2, 3)]:
        retention = SinkWindow(0, window)
        drive = Drive(backend, retention=retention, spare=spare, max_source_len=3)
        drive.poison()
        drive.plan({f"other{i}": 0 for i in range(slot)})
        own = random_own(drive.config, window + 4)
        source = random_source(drive.config, 1, 3)
        drive.positions["a"] = StreamPosition(source_len, 0)
        written = window + 3 - source_len  # all streams are as long, and end in the same keys
        drive.step({"a": written}, own.cut(window + 3 - written, window + 3), source=source)
        outs.append(drive.step({"a": 1}, own.cut(window + 3, window + 4), source=source))
        assert drive.manager.current.rows[0][0] == slot
    for out in outs[1:]:
        assert_same(out, outs[0])
