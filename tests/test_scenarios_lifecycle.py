"""Scenarios 17-23 that users of other caches reported: rows that come and go, plans kept, steps dropped, refusals."""

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
    shares,
    stack,
)

from boundedkv import (
    AdmitRuntimeError,
    AllocationFailed,
    BoundedKVStep,
    BucketKey,
    GraphSlotSpec,
    Segment,
    SinkWindow,
    SlotLease,
    StepContext,
    StreamPosition,
)
from boundedkv.plan import EMPTY_ROW


@on_both
def test_s17_rows_that_come_and_go_equal_their_solo_runs(backend):
    more = {"reference": 20, "fast": 3}[backend]
    settings = {"retention": SinkWindow(1, 5), "query_window": 5, "max_slots": 3}
    drive = Drive(backend, **settings)
    drive.poison()
    lengths = {"a": 40, "b": 12, "c": 7}
    own = {rid: random_own(drive.config, n + 1 + more, seed) for seed, (rid, n) in enumerate(lengths.items())}
    outs = {rid: [] for rid in "abcd"}

    def run(rids, spans):
        width = max(spans.values())
        starts = {rid: drive.positions[rid].written if rid in drive.positions else 0 for rid in rids}
        cuts = [own[rid].cut(starts[rid], starts[rid] + spans[rid], width, pad=NAN) for rid in rids]
        out = drive.step(spans, stack(cuts), tokens=spans)
        for row, rid in enumerate(rids):
            outs[rid].append(out[row : row + 1, : spans[rid]])
        return [row[0] for row in drive.manager.current.rows]

    assert run("abc", lengths) == [0, 1, 2]
    run("abc", dict.fromkeys("abc", 1))
    drive.manager.remove_request("a")
    own["d"] = random_own(drive.config, 9 + more, seed=9)
    for i in range(more):
        if i == more // 2:
            assert run("d", {"d": 9}) == [0], "a free slot is not the lowest one"
        rids = "bc" if i < more // 2 else "bdc"
        run(rids, dict.fromkeys(rids, 1))
    for rid, parts in outs.items():
        solo = Drive(backend, **settings)
        spans = [part.shape[1] for part in parts]
        whole = [sum(spans)] if backend == "fast" else spans  # one step and its tokens one by one: the same bits
        assert_same(torch.cat(parts, dim=1), solo.stream(own[rid], whole, rid), f"request {rid}:")


@on_both
@pytest.mark.parametrize("spans", [(2, 3), (7, 1)])
def test_s18_a_kept_plan_gives_what_it_would_have(backend, spans):
    drives = [Drive(backend, retention=SinkWindow(1, 4)) for _ in range(2)]
    own = random_own(drives[0].config, 3 + sum(spans))
    cuts = [own.cut(0, 3), own.cut(3, 3 + spans[0]), own.cut(3 + spans[0], 3 + sum(spans))]
    in_turn = [drives[0].step({"a": span}, cut) for span, cut in zip([3, *spans], cuts, strict=True)]

    drive = drives[1]
    drive.step({"a": 3}, cuts[0])
    kept = drive.plan({"a": spans[0]})
    table, rows = kept.table.clone(), kept.rows
    drive.moved({"a": spans[0]})
    after = drive.manager.plan(*drive.declare({"a": spans[1]}))  # ahead of the commit
    assert drive.manager.current is after
    assert torch.equal(kept.table, table)
    assert kept.rows == rows
    assert_same(drive.attend(cuts[1], plan=kept), in_turn[1])
    assert_same(drive.attend(cuts[2]), in_turn[2])
    assert_same(drive.slots(), drives[0].slots(), "slots")


@on_both
@pytest.mark.parametrize("spare", [0, 2])
def test_s19_a_dropped_step_without_spare_has_cost_retained_entries(backend, spare):
    drive = Drive(backend, retention=SinkWindow(2, 4), head_dim=16, spare=spare)
    stream = Everything(drive.config)
    probe_step(drive, stream, span=10)
    drive.plan({"a": 3})
    again = probe(drive, range(10, 13), sink=2)
    sees = [0, 1, 6, 7, 8, 9, 10, 11, 12]
    assert_same(drive.attend(again)[0, 0, 0], shares(sees, 2, 16), "first time:")
    lost = [s for s in range(6, 10) if s + 4 + spare < 13]  # a token of the step lies there now, and counts twice
    assert lost == ([6, 7, 8] if spare == 0 else [6])
    overwritten = shares(sees, 2, 16)
    for s in lost:
        overwritten[s + 4 + spare], overwritten[s] = torch.tensor(2.0) / 9, 0.0
    assert_same(drive.attend(again)[0, 0, 0], overwritten, "second time:")
    before = drive.slots()
    with pytest.raises(ValueError, match=rf"written is 10 for request 'a'.*spare is {spare}"):
        drive.manager.rewind_request("a", 10)
    assert_same(drive.slots(), before, "slots")
    drive.advance({"a": 3})  # nothing was changed: the step is still the pending one


@on_both
@pytest.mark.parametrize("ieee", [False, True])
@pytest.mark.parametrize("spare", [3, 5])
def test_s19_with_spare_a_dropped_step_leaves_no_trace(backend, spare, ieee):
    settings = {"retention": SinkWindow(2, 4), "spare": spare}
    clean = Drive(backend, **settings)
    own, rejected = random_own(clean.config, 16), random_own(clean.config, 3, seed=1)
    clean.step({"a": 10}, own.cut(0, 10))
    expected = clean.step({"a": 3}, own.cut(10, 13), ieee=ieee)
    after = clean.step({"a": 2}, own.cut(13, 15), ieee=ieee)

    drive = Drive(backend, **settings)
    drive.step({"a": 10}, own.cut(0, 10))
    drive.plan({"a": 3})
    drive.attend(rejected)  # dropped: attended again with other tokens
    assert_same(drive.attend(own.cut(10, 13), ieee=ieee), expected, "attended again:")
    drive.manager.rewind_request("a", 10)
    assert_same(drive.step({"a": 3}, own.cut(10, 13), ieee=ieee), expected, "rewound before a commit:")
    drive.manager.rewind_request("a", 10)
    drive.positions["a"] = StreamPosition(0, 10)
    assert_same(drive.step({"a": 3}, own.cut(10, 13), ieee=ieee), expected, "rewound after it:")
    assert_same(drive.step({"a": 2}, own.cut(13, 15), ieee=ieee), after, "the step behind:")


def step_of(positions, spans, source_len=None):
    source_len = source_len or {}
    places = {rid: StreamPosition(source_len.get(rid, 0), written) for rid, written in positions.items()}
    return BoundedKVStep(tuple(Segment(rid, spans) for rid in positions), places), StepContext(tuple(positions))


@on_both
def test_s20_a_refused_batch_has_taken_nothing(backend):
    drive = Drive(backend, retention=SinkWindow(1, 4), max_slots=2)
    own = random_own(drive.config, 4)
    drive.step({"a": 3}, own.cut(0, 3))
    before, manager = drive.slots(), drive.manager
    for order in permutations("abc"):
        outcome = manager.admit(*step_of({rid: 3 if rid == "a" else 0 for rid in order}, 1))
        assert (outcome.ok, type(outcome.reason)) == (False, AllocationFailed)
        assert outcome.reason.slots_short == 1
        assert outcome.reason.request_id == [rid for rid in order if rid != "a"][1]
        assert (manager.free_slots, manager.holds("a"), manager.holds("b"), manager.holds("c")) == (
            1,
            True,
            False,
            False,
        )
    assert_same(drive.slots(), before, "slots")
    fresh = Drive(backend, retention=SinkWindow(1, 4))
    alone = fresh.step({"b": 1}, own.cut(0, 1))
    assert_same(drive.step({"a": 1, "b": 1}, stack([own.cut(3, 4), own.cut(0, 1)]))[1:], alone)
    assert [slot for slot, _, _ in manager.current.rows] == [0, 1]


@on_both
@pytest.mark.parametrize(
    ("bad", "match"),
    [
        ({"written": {"b": 2}}, "request 'b': written is 2, but should be 0"),
        ({"written": {"a": 2}}, "request 'a': written is 2, but should be 3"),
        ({"source_len": {"c": 6}}, "request 'c': source_len is 6, but should be an integer from 0 to 5"),
        ({"source_len": {"a": 4}}, "request 'a': source_len is 4, but should be 0"),
        ({"written": {"c": -1}}, "request 'c': written is -1, but should be an integer from 0"),
    ],
    ids=["fresh", "known", "long_source", "other_source", "negative"],
)
def test_s20_a_bad_step_has_taken_nothing_in_any_order(backend, bad, match):
    drive = Drive(backend, retention=SinkWindow(1, 4), max_source_len=5)
    drive.step({"a": 3}, random_own(drive.config, 3))
    manager = drive.manager
    for order in permutations("abc"):
        written = {rid: bad.get("written", {}).get(rid, 3 if rid == "a" else 0) for rid in order}
        outcome = manager.admit(*step_of(written, 1, bad.get("source_len")))
        assert (outcome.ok, type(outcome.reason)) == (False, AdmitRuntimeError)
        assert str(outcome.reason).startswith(match)
        assert (manager.free_slots, manager.holds("b"), manager.holds("c")) == (3, False, False)
    assert manager.admit(*step_of({"b": 0, "a": 3, "c": 0}, 1)).ok


@on_both
def test_s21_removing_twice_and_the_unknown_are_harmless(backend):
    drive = Drive(backend, retention=SinkWindow(1, 4), max_slots=2)
    manager = drive.manager
    manager.remove_request("nobody")
    manager.reset_request("nobody")
    manager.reset_request("nobody", free=True)
    drive.plan({"a": 1, "b": 1})
    manager.remove_request("a")
    manager.remove_request("a")
    assert (manager.free_slots, manager.holds("a"), manager.holds("b")) == (1, False, True)
    manager.reset_request("b")
    assert (manager.free_slots, manager.holds("b")) == (1, True)
    manager.remove_request("b")
    manager.reset_request("b", free=True)
    assert manager.free_slots == 2
    assert [row[0] for row in drive.plan({"c": 1, "d": 1}).rows] == [0, 1]


@on_both
def test_s21_ten_thousand_random_calls_never_share_or_lose_a_slot(backend):
    drive = Drive(backend, retention=SinkWindow(1, 3), max_slots=5)
    manager, chance = drive.manager, random.Random(21)
    slot_of, written = {}, {}  # what is to be held
    for call in range(10_000):
        rid = f"r{chance.randrange(9)}"
        what = chance.choice(["admit", "admit", "step", "rollback", "remove", "remove", "reset", "free", "ingest"])
        step = step_of({rid: written.get(rid, 0)}, chance.randrange(4))
        if what == "ingest":
            manager.ingest_request(rid)
        elif what in ("remove", "free"):
            manager.remove_request(rid) if what == "remove" else manager.reset_request(rid, free=True)
            slot_of.pop(rid, None)
            written.pop(rid, None)
        elif what == "reset":
            manager.reset_request(rid)
            written |= {rid: 0} if rid in written else {}
        else:
            fresh = rid not in slot_of
            room = not fresh or len(slot_of) < 5
            assert manager.admit(*step).ok == room
            if room and what == "rollback":
                manager.rollback_admit(*step)
            elif room:
                slot_of.setdefault(rid, min(set(range(5)) - set(slot_of.values()), default=None))
                assert manager.plan(*step).rows[0][0] == slot_of[rid], f"call {call}"
                written.setdefault(rid, 0)
                if what == "step":
                    manager.commit(*step)
                    written[rid] += step[0].segments[0].span
        held = [f"r{i}" for i in range(9) if manager.holds(f"r{i}")]
        assert held == sorted(slot_of), f"call {call}"
        assert manager.free_slots + len(held) == 5
    assert [row[0] for row in manager.plan(*step_of(written, 1)).rows] == [slot_of[rid] for rid in written]


@on_both
@pytest.mark.parametrize("how", ["removed", "reset", "freed"])
@pytest.mark.parametrize("old_span", [2, 5])
def test_s22_a_late_commit_leaves_the_new_stream_alone(backend, how, old_span):
    drive = Drive(backend, retention=SinkWindow(1, 4))
    manager = drive.manager
    old = step_of({"a": 0}, old_span)
    assert manager.admit(*old).ok
    manager.plan(*old)
    if how == "removed":
        manager.remove_request("a")
    else:
        manager.reset_request("a", free=how == "freed")
    new = step_of({"a": 0}, 2)  # with the old step's numbers, or others
    assert manager.admit(*new).ok
    manager.plan(*new)
    for _ in range(2):
        with pytest.raises(AdmitRuntimeError, match="request 'a': the commit of"):
            manager.commit(*old)
    manager.commit(*new)
    with pytest.raises(AdmitRuntimeError, match="request 'a': the commit of"):
        manager.commit(*old)
    assert manager.admit(*step_of({"a": 2}, 1)).ok
    assert not manager.admit(*step_of({"a": old_span + 2}, 1)).ok


@on_both
@pytest.mark.parametrize("full", [False, True])
def test_s23_padding_rows_write_nothing_and_return_zero(backend, full):
    settings = {"retention": SinkWindow(1, 3), "max_slots": 9}
    bucket = BucketKey("main", bs=8, num_tokens=1)
    drive, eager = Drive(backend, **settings), Drive(backend, **settings)
    drive.poison()
    manager, lease = drive.manager, SlotLease(0, bucket)
    manager.build_accelerator_graph_buffers([GraphSlotSpec(bucket, 0)], max_bs=8, max_seq_len=1)
    rows, padding = [f"r{i}" for i in range(8)], tuple(f"pad{i}" for i in range(8))
    capture = StepContext((), capture=True, slot_lease=lease, padded_request_ids=padding)
    captured = manager.plan(BoundedKVStep((), {}), capture)
    own = random_own(drive.config, 3 * 8)
    assert_same(drive.attend(stack(own.cut(i, i + 1) for i in range(8))), torch.zeros(8, 1, 1, 4), "captured:")
    if full:
        drive.plan({"other": 0})
    for turn, live in enumerate([8, 3, 0]):
        rids = rows[:live]
        cuts = [own.cut(8 * turn + i, 8 * turn + i + 1) for i in range(live)]
        if not live and not full:
            for rid in rows:
                manager.remove_request(rid)
        ctx = {"slot_lease": lease, "padded_request_ids": (*rids, *padding[live:])}
        step, ctx = drive.declare(dict.fromkeys(rids, 1), **ctx)
        assert manager.admit(step, ctx).ok
        planned = manager.plan(step, ctx)
        assert manager.free_slots == (0 if full else 1 if live else 9)
        assert planned.table.data_ptr() == captured.table.data_ptr(), "a captured graph reads this address"
        before = drive.slots()
        batch = stack([*cuts, *[random_own(drive.config, 1)] * (8 - live)])
        for x in batch:
            x[live:] = NAN
        # What a graph replays is the launch of the captured plan, whose table has new numbers by now. The reference
        # has no launches: it reads the rows that a plan gives to people.
        out = drive.attend(batch, plan=captured if backend == "fast" else planned)
        assert_same(out[live:], torch.zeros(8 - live, 1, 1, 4), "padding rows:")
        if live:
            assert_same(out[:live], eager.step(dict.fromkeys(rids, 1), stack(cuts)), "live rows:")
        taken = {row[0] for row in planned.rows[:live]}
        others = [slot for slot in range(9) if slot not in taken]
        assert_same(drive.slots()[others], before[others], "slots of no row")
        manager.commit(step, ctx)
        drive.moved(dict.fromkeys(rids, 1))


@on_both
def test_s23_a_padding_row_that_is_declared_like_the_others_takes_part_in_nothing(backend):
    drive = Drive(backend, retention=SinkWindow(1, 3), max_slots=1)
    step, _ = drive.declare({"a": 2, "pad": 2})
    ctx = StepContext(("a",), padded_request_ids=("a", "pad"))
    assert drive.manager.admit(step, ctx).ok, "one slot is enough"
    assert drive.manager.plan(step, ctx).rows[1] == EMPTY_ROW
    drive.manager.commit(step, ctx)
    assert drive.manager.holds("a")
    assert not drive.manager.holds("pad")
