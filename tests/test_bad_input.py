"""Wrong calls of a manager: each is refused in the same words by both backends, and nothing is changed by it."""

import re

import pytest
import torch
from bad_calls import (
    CONFIGS,
    admit,
    attend,
    bring,
    call,
    commit,
    follow_up,
    meta,
    normal,
    of_numbers,
    of_row,
    of_storage,
    of_table,
    plan,
    prepared,
    refusal_of,
    rollback,
    seen_of,
    step_of,
    undisturbed,
)
from conftest import device_of

from boundedkv import (
    AdmitRuntimeError,
    AllocationFailed,
    BoundedKVManager,
    BucketKey,
    Segment,
    SlotLease,
)
from boundedkv import StreamPosition as At
from boundedkv.testing.compare import differences

A, V, T = AdmitRuntimeError, ValueError, TypeError
LEASE = SlotLease(0, BucketKey("main", 2, 1))
BUFFERS = "build_accelerator_graph_buffers"
COUNT = "should be an integer from 0 to 2147483647"
HERE = r"should be on (cpu|cuda:0), the manager's"
FLOATS = "should be one of torch.float32, torch.float16, torch.bfloat16"

# Name, call, type of the error or of the outcome's reason, and what it must say. What the requests are: `bad_calls`.

STEPS = [
    ("no position", admit("a", a=None), A, "'a': position is None, but should be a StreamPosition"),
    ("bare position", admit("a", a=(0, 2, 0)), A, r"'a': position is \(0, 2, 0\), but should be a StreamPosition"),
    ("negative span", admit("a", {"a": -1}), A, f"'a': span is -1, but {COUNT}"),
    ("huge span", admit("a", {"a": 2**31}), A, f"'a': span is 2147483648, but {COUNT}"),
    ("broken span", admit("a", {"a": 1.0}), A, f"'a': span is 1.0, but {COUNT}"),
    ("span True", admit("a", {"a": True}), A, f"'a': span is True, but {COUNT}"),
    ("negative written", admit("a", a=At(0, -1)), A, f"'a': written is -1, but {COUNT}"),
    ("huge written", admit("a", a=At(0, 2**31)), A, f"'a': written is 2147483648, but {COUNT}"),
    ("word written", admit("a", a=At(0, "2")), A, f"'a': written is '2', but {COUNT}"),
    ("written ahead", admit("a", a=At(0, 3)), A, "'a': written is 3, but should be 2, which is what was committed"),
    ("written behind", admit("ba", a=At(0, 1)), A, "'a': written is 1, but should be 2, which is what was committed"),
    ("new one written", admit("z", z=At(0, 1)), A, "'z': written is 1, but should be 0, which is what was committed"),
    ("negative source_len", admit("z", z=At(-1, 0)), A, "'z': source_len is -1, but should be an integer from 0 to 4"),
    ("source too long", admit("z", z=At(5, 0)), A, "'z': source_len is 5, but should be an integer from 0 to 4"),
    ("other source_len", admit("b", b=At(2, 1, 1)), A, "'b': source_len is 2, but should be 3, as in its first"),
    ("source below -1", admit("z", z=At(1, 0, -2)), A, "'z': source is -2, but should be an integer from -1 to"),
    ("other source", admit("b", b=At(3, 1, 0)), A, "'b': source is 0, but should be 1, as in its first admitted step"),
    ("few tokens", admit("a", {"a": 2}, {"a": 1}), A, "'a': tokens is 1, but should be an integer from its span 2 to"),
    ("word tokens", admit("a", tokens={"a": "2"}), A, "'a': tokens is '2', but should be an integer from its span 1"),
    ("far end", admit("z", {"z": 2**31 - 1}, z=At(2, 0)), A, "'z': .* position 2147483648, but should stay within"),
    ("two segments", admit("a", more=[Segment("a", 1)]), A, "'a': has two segments in one step, but should have one"),
    ("segment outside", admit("a", more=[Segment("b", 1)]), A, "'b': has a segment, but should be in the batch"),
    ("no segment", admit("a", ctx={"request_ids": ("a", "b")}), A, "'b': is in the batch without a segment"),
    ("in batch twice", admit("aa"), A, "'a': is in the batch twice, but should be there once"),
    ("not padded", admit("ab", ctx={"padded_request_ids": ("b",)}), A, "'a': is in request_ids, .*padded_request_ids"),
    ("lease too small", admit("abc", ctx={"slot_lease": LEASE}), A, "'c': is row 2 of a leased batch, .*its bs of 2"),
    ("capture over lease", admit("abc", ctx={"slot_lease": LEASE, "capture": True}), A, "'c': is row 2 .*its bs of 2"),
    (
        "no slot",
        admit("ayz", y=At(0, 0), z=At(1, 0)),
        AllocationFailed,
        "'z': no slot left; .*2 fresh .*and 1 are free",
    ),
    ("wrong behind new", admit("za", z=At(0, 0), a=At(0, 0)), A, "'a': written is 0, but should be 2"),
    ("no step", call("admit", None, step_of("a")[1]), T, "step is NoneType, but should be a BoundedKVStep"),
    ("no context", call("admit", step_of("a")[0], {}), T, "ctx is dict, but should be a StepContext"),
    ("plan a stranger", plan("az", z=At(0, 0)), A, "'z' holds no slot; admit its step first"),
    ("plan no position", plan("a", a=None), A, "'a': position is None, but should be a StreamPosition"),
    ("plan negative", plan("a", {"a": -3}), A, f"'a': span is -3, but {COUNT}"),
    ("plan over lease", plan("abc", ctx={"slot_lease": LEASE}), A, "'c': is row 2 of a leased batch, .*its bs of 2"),
    ("plan no step", call("plan", [], step_of("a")[1]), T, "step is list, but should be a BoundedKVStep"),
    ("commit a stranger", commit("az", z=At(0, 0)), A, "'z' holds no slot; admit its step first"),
    ("commit other span", commit("ab", {"b": 2}), A, r"'b': the commit of 2 tokens at written 1 fits .*\(1 written\)"),
    ("commit elsewhere", commit("a", a=At(0, 1)), A, r"'a': the commit of 1 tokens at written 1 fits .*\(2 written\)"),
    ("commit negative", commit("a", a=At(0, -2)), A, f"'a': written is -2, but {COUNT}"),
    ("commit no context", call("commit", step_of("a")[0], None), T, "ctx is NoneType, but should be a StepContext"),
    ("roll back twice", rollback("aa"), A, "'a': is in the batch twice, but should be there once"),
    ("roll back no step", call("rollback_admit", "a", None), T, "step is str, but should be a BoundedKVStep"),
]

ATTENDS = [
    ("no such layer", attend(layer_idx=2), V, "layer_idx is 2, but should be an integer from 0 to 1"),
    ("layer -1", attend(layer_idx=-1), V, "layer_idx is -1, but should be an integer from 0 to 1"),
    ("layer True", attend(layer_idx=True), V, "layer_idx is True, but should be an integer from 0 to 1"),
    ("ieee 1", attend(ieee=1), V, "ieee is 1, but should be True or False"),
    ("q a list", attend(q=[1.0]), V, r"q is list, but should be a tensor \[3, 2, \*, 3\]"),
    ("q rank", attend(q=lambda q: q[0]), V, r"q is \[2, 1, 3\], but should be \[3, 2, \*, 3\]"),
    ("q rows", attend(q=lambda q: q[:2]), V, r"q is \[2, 2, 1, 3\], but should be \[3, 2, \*, 3\]"),
    ("q heads", attend(q=lambda q: q[:, :1]), V, r"q is \[3, 1, 1, 3\], but should be \[3, 2, \*, 3\]"),
    ("q head_dim", attend(q=lambda q: q[..., :2]), V, r"q is \[3, 2, 1, 2\], but should be \[3, 2, \*, 3\]"),
    ("q no tokens", attend(q=lambda q: q[:, :, :0]), V, "q has 0 tokens, but should have at least one"),
    ("q float64", attend(q=lambda q: q.double()), V, f"q is torch.float64, but {FLOATS}"),
    ("q elsewhere", attend(q=meta), V, f"q is on meta, but {HERE}"),
    ("k missing", attend(k=None), V, r"k is NoneType, but should be a tensor \[3, 1, 1, 3\]"),
    ("k heads", attend(k=lambda k: k.expand(-1, 2, -1, -1)), V, r"k is \[3, 2, 1, 3\], but should be \[3, 1, 1, 3\]"),
    ("k tokens", attend(k=lambda k: k.expand(-1, -1, 2, -1)), V, r"k is \[3, 1, 2, 3\], but should be \[3, 1, 1, 3\]"),
    ("k integers", attend(k=lambda k: k.int()), V, f"k is torch.int32, but {FLOATS}"),
    ("v head_dim", attend(v=lambda v: v[..., :2]), V, r"v is \[3, 1, 1, 2\], but should be \[3, 1, 1, 3\]"),
    ("v elsewhere", attend(v=meta), V, f"v is on meta, but {HERE}"),
    ("plan a number", attend(plan=3), V, "plan is int, but should be a BoundedPlan"),
    ("table type", attend(plan=of_table(torch.Tensor.long)), V, r"table is torch.int64 \[3, 24\], but .*\[>= 3, 24\]"),
    ("table short", attend(plan=of_table(lambda t: t[:2])), V, r"table is torch.int32 \[2, 24\], but .*\[>= 3, 24\]"),
    ("table narrow", attend(plan=of_table(lambda t: t[:, 1:])), V, r"plan.table is torch.int32 \[3, 23\], but .* 24\]"),
    ("table elsewhere", attend(plan=of_table(meta)), V, f"plan.table is on meta, but {HERE}"),
    ("plan's slot", attend(plan=of_row(1, slot=4)), V, "plan row 1 has slot 4, but should have one from 0 to 3"),
    ("plan's tokens", attend(plan=of_row(0, tokens=2)), V, "plan row 0 has 2 tokens, but q brings 1 a row"),
    ("plan's span", attend(plan=lambda p: p._replace(max_span=2)), V, "plan.max_span is 2, but should be at most"),
    ("plan's length", attend(plan=of_row(0, length=2**31)), V, "plan row 0 takes .* position 2147483648, but"),
    ("no source", attend(source=None), V, "source is None, but should be given: the plan reads it"),
    ("source rank", attend(source=lambda s: s[0]), V, r"source is \[1, 1, 4, 6\], but should be \[\*, 1, 1, \*, 6\]"),
    ("source keys only", attend(source=lambda s: s[..., :3]), V, r"source is \[.* 3\], but .*\[\*, 1, 1, \*, 6\]"),
    ("too few sources", attend(source=lambda s: s[:1]), V, r"source is \[1, 1, .*at least 2 sources of 3 entries"),
    ("source short", attend(source=lambda s: s[..., :2, :]), V, r"source is \[2, 1, 1, 2, 6\].* of 3 entries"),
    ("source integers", attend(source=lambda s: s.int()), V, f"source is torch.int32, but {FLOATS}"),
    ("source elsewhere", attend(source=meta), V, f"source is on meta, but {HERE}"),
    ("no row_source", attend(row_source=None), V, "row_source is None, but should be given: the plan reads it"),
    ("row_source bare", attend(row_source=lambda r: r[0]), V, r"row_source is Tensor, but should be a tuple"),
    ("row_source of 3", attend(row_source=lambda r: (*r, 1)), V, r"row_source is tuple, but should be a tuple \("),
    ("storage missing", attend(row_source=of_storage(lambda s: None)), V, "row_source storage is NoneType, but"),
    ("storage rank", attend(row_source=of_storage(lambda s: s[0])), V, r"row_source storage is \[1, 1, 2, 6\], but"),
    (
        "storage short",
        attend(row_source=of_storage(lambda s: s[..., :1, :])),
        V,
        "row_source storage .*least 2 entries",
    ),
    ("storage elsewhere", attend(row_source=of_storage(meta)), V, f"row_source storage is on meta, but {HERE}"),
    ("numbers a list", attend(row_source=of_numbers(list)), V, r"row_source slots is list, but .*tensor \[>= rows\]"),
    ("broken numbers", attend(row_source=of_numbers(torch.Tensor.float)), V, r"slots is torch.float32 \[3\], .*int64"),
    ("few numbers", attend(row_source=of_numbers(lambda n: n[:2])), V, "slots has 2 entries, but the plan has 3 rows"),
    ("numbers elsewhere", attend(row_source=of_numbers(meta)), V, f"row_source slots is on meta, but {HERE}"),
    ("bias rank", attend(rel_bias=normal(0, 2, 1, 9)), V, r"rel_bias is \[2, 1, 9\], but should be \[3, 2, 1, \*\]"),
    ("bias heads", attend(rel_bias=normal(0, 3, 1, 1, 9)), V, r"rel_bias is \[3, 1, 1, 9\], but .*\[3, 2, 1, \*\]"),
    ("bias short", attend(rel_bias=normal(0, 3, 2, 1, 4)), V, "has 4 entries .* at least 5: 4 retained and 1 own"),
    ("bias integers", attend(rel_bias=normal(0, 3, 2, 1, 9).int()), V, f"rel_bias is torch.int32, but {FLOATS}"),
    ("bias elsewhere", attend(rel_bias=meta(normal(0, 3, 2, 1, 9))), V, f"rel_bias is on meta, but {HERE}"),
]
if device_of("fast") == "cpu":  # elsewhere looking at them would make the host wait for the device
    of_five = of_numbers(lambda numbers: numbers + 4)
    ATTENDS.append(("number 5", attend(row_source=of_five), V, "slots has 5 for row 2, but .* one from 0 to 1"))

OTHERS = [
    ("remove 5", call("remove_request", 5), T, "rid is 5, but should be a string"),
    ("reset None", call("reset_request", None), T, "rid is None, but should be a string"),
    ("ingest bytes", call("ingest_request", b"a"), T, "rid is b'a', but should be a string"),
    ("holds a tuple", call("holds", ("a",)), T, r"rid is \('a',\), but should be a string"),
    ("export None", call("export_request", None), T, "rid is None, but should be a string"),
    ("rewind 5", call("rewind_request", 5, 0), T, "rid is 5, but should be a string"),
    ("rewind stranger", call("rewind_request", "z", 0), A, "'z' holds no slot; admit its step first"),
    ("rewind below 0", call("rewind_request", "a", -1), V, "written is -1, but should be an integer at least 0"),
    ("rewind to True", call("rewind_request", "a", True), V, "written is True, but should be an integer at least 0"),
    ("rewind to 1.0", call("rewind_request", "a", 1.0), V, "written is 1.0, but should be an integer at least 0"),
    ("rewind ahead", call("rewind_request", "a", 3), V, "written is 3 .*'a', but should be from 2 to 2: .*up to 3"),
    ("rewind far", call("rewind_request", "a", 1), V, "written is 1 for request 'a', but .*from 2 to 2: .*spare is 1"),
    ("export stranger", call("export_request", "z"), A, "'z' holds no slot; admit its step first"),
    ("import a list", call("import_request", "z", []), V, r"state is list, but should be a dict with \['reach'"),
    ("import a part", call("import_request", "z", {"ring": 1}), V, r"state is \['ring'\], but should be a dict with"),
    ("import over", bring("a"), V, "rid is 'a', which holds a slot, but should hold none"),
    ("import under 5", bring(5), T, "rid is 5, but should be a string"),
    ("other sink", bring(sink=2), V, "state sink is 2, but should be 1, as in this pool"),
    ("other window", bring(window=2), V, "state window is 2, but should be 3, as in this pool"),
    ("other spare", bring(spare=0), V, "state spare is 0, but should be 1, as in this pool"),
    ("negative state", bring(written=-1), V, "state written is -1, but should be an integer that export_request gives"),
    ("state True", bring(reach=True), V, "state reach is True, but should be an integer that export_request gives"),
    ("far source", bring(source_len=5), V, "state source_len is 5 and .*, but should be at most 4"),
    ("ring a list", bring(ring=[]), V, r"state ring is list, but should be a tensor \[2, 1, 1, 1, 6\]"),
    ("ring long", bring(ring=normal(0, 2, 1, 1, 2, 6)), V, r"ring is .*\[2, 1, 1, 2, 6\], but .*\[2, 1, 1, 1, 6\]"),
    ("ring float16", bring(ring=torch.Tensor.half), V, "state ring is torch.float16 .*, but should be torch.float32"),
    ("layer 2", call("layer", 2), V, "layer_idx is 2, but should be an integer from 0 to 1"),
    ("layer None", call("layer", None), V, "layer_idx is None, but should be an integer from 0 to 1"),
    ("buffers a lease", call(BUFFERS, [LEASE], 2, 1), V, r"slots\[0\] is SlotLease, but should be a GraphSlotSpec"),
    ("buffers for 0", call(BUFFERS, [], 0, 1), V, "max_bs is 0, but should be an integer at least 1"),
    ("buffers of True", call(BUFFERS, [], 1, True), V, "max_seq_len is True, but should be an integer at least 1"),
]

BIAS = attend(rel_bias=normal(0, 3, 2, 1, 9))
BY_RULE = [
    ("reverse", "bias", BIAS, V, "rel_bias is given, but should be None with reverse_step_order"),
    ("query rule", "bias long", BIAS, V, r"rel_bias is \[3, 2, 1, 9\], but should be \[3, 2, 1, 3\]"),
    ("query rule, sinks", "bias", BIAS, V, "rel_bias is given, but a row has 1 sinks, which have no entry in it"),
]

CALLS = [("step rule", *wrong) for wrong in STEPS + ATTENDS + OTHERS] + BY_RULE


@pytest.mark.parametrize("wrong", CALLS, ids=[f"{rule}: {name}" for rule, name, *_ in CALLS])
def test_wrong_call_is_refused_and_changes_nothing(make_pair, wrong):
    rule, _, make_call, kind, words = wrong
    x = prepared(make_pair(CONFIGS[rule]))
    before = seen_of(x.pair)
    refusal = refusal_of(make_call, x)
    assert type(refusal) is kind
    assert re.search(words, str(refusal)), f"{refusal} should say {words}"
    assert not list(differences("what is seen", before, seen_of(x.pair), ("before", "after")))
    out, rows, layers = undisturbed(rule)
    expected = out, rows, *layers
    got = *follow_up(x.pair), *(x.pair.left.layer(layer_idx).cpu() for layer_idx in range(2))
    assert not list(differences("the next steps", expected, got, ("a pool without it", "this pool")))


def test_table_is_long_enough():
    assert len(CALLS) >= 60
    assert len({(rule, name) for rule, name, *_ in CALLS}) == len(CALLS)


# What is wrong at any time, or only at some.


def test_no_plan_yet(make_pair):
    pair = make_pair(CONFIGS["step rule"])
    with pytest.raises(ValueError, match="plan is None and no step is planned, but should be given"):
        pair.attend(0, normal(0, 1, 2, 1, 3), normal(1, 1, 1, 1, 3), normal(2, 1, 1, 1, 3))
    with pytest.raises(RuntimeError, match="no step is planned yet; call plan first"):
        pair.current  # noqa: B018
    assert pair.free_slots == 4


def test_import_into_a_full_pool(make_pair):
    x = prepared(make_pair(CONFIGS["step rule"]))
    assert x.pair.admit(*step_of("y", y=At(0, 0))).ok
    with pytest.raises(AllocationFailed, match=r"'z': no slot left; 1 fresh .*and 0 are free"):
        x.pair.import_request("z", x.state)
    assert not x.pair.holds("z")


def test_export_of_what_a_planned_step_may_have_overwritten(make_pair):
    x = prepared(make_pair(CONFIGS["step rule"]))
    x.pair.plan(*step_of("a", {"a": 9}))
    with pytest.raises(AdmitRuntimeError, match="'a': a step was planned up to 11 written and 2 are committed"):
        x.pair.export_request("a")


def test_commit_of_what_was_removed_and_admitted_anew(make_pair):
    x = prepared(make_pair(CONFIGS["step rule"]))
    late = step_of("a")
    assert x.pair.admit(*late).ok
    x.pair.remove_request("a")
    assert x.pair.admit(*step_of("a", {"a": 3}, a=At(0, 0))).ok
    with pytest.raises(AdmitRuntimeError, match=r"'a': the commit of 1 tokens at written 2 fits no .*\(0 written\)"):
        x.pair.commit(*late)


AFTER_CLEANUP = {
    "ingest_request": call("ingest_request", "a"),
    "admit": admit("a"),
    "rollback_admit": rollback("a"),
    "plan": plan("a"),
    "attend": attend(),
    "commit": commit("a"),
    "remove_request": call("remove_request", "a"),
    "reset_request": call("reset_request", "a"),
    "rewind_request": call("rewind_request", "a", 2),
    "export_request": call("export_request", "a"),
    "import_request": bring(),
    "holds": call("holds", "a"),
    "free_slots": lambda x: x.pair.free_slots,
    "current": lambda x: x.pair.current,
    "layer": call("layer", 0),
    "build_accelerator_graph_buffers": call("build_accelerator_graph_buffers", [], 1, 1),
    "post_warmup_validate": call("post_warmup_validate"),
}


def test_every_call_after_cleanup_is_tried():
    assert set(AFTER_CLEANUP) | {"build", "cleanup"} == {n for n in dir(BoundedKVManager) if not n.startswith("_")}


@pytest.mark.parametrize("name", AFTER_CLEANUP)
def test_call_after_cleanup(make_pair, name):
    x = prepared(make_pair(CONFIGS["step rule"]))
    x.pair.cleanup()
    x.pair.cleanup()
    with pytest.raises(RuntimeError, match="the manager was cleaned up; build another"):
        AFTER_CLEANUP[name](x)
