"""Both backends conform, with every feature covered, and the suite can fail: planted faults are found where they are.

`BOUNDEDKV_PROFILE=deep pytest tests/test_conformance.py` compares some hundred thousand calls, in about half an hour;
the last line tells how many.
"""

import os
import random
import re
from collections import Counter

import pytest
import torch
from conftest import CALLS, device_of

from boundedkv import BoundedKVConfig, SinkWindow, build
from boundedkv.reference import ReferenceManager
from boundedkv.testing import FEATURES, check_attention, check_manager
from boundedkv.testing.conformance import cases, check_case

DEEP = os.environ.get("BOUNDEDKV_PROFILE") == "deep"
# Streams of a case, and draws of calls in a stream. What attends takes time; the lifecycle alone does not.
QUICK = {"reference": (4, 20), "fast": (2, 3), "lifecycle": (8, 50), "together": (2, 20)}
THOROUGH = {"reference": (100, 20), "fast": (20, 20), "lifecycle": (100, 50), "together": (100, 20)}
BY_CHANCE = {"long_rows", "far_positions", "export", "capture", "refusals"}  # what a short run may not come to
SEED = random.randrange(2**31) if DEEP else 0
CASES = {case.name: case for case in cases()}


def judged(name, factory, numerics="bits", examples=20, **options):
    """One case; its report."""
    return check_case(CASES[name], factory, numerics, examples=examples, **options)


@pytest.mark.parametrize("name", CASES)
def test_our_backends_conform(name, backend, record_property):
    if device_of(backend) == "cuda" and name in FEATURES and not DEEP:
        pytest.skip("a GPU compiles each new mixture of features: one by one they are left to the deep profile")
    used = Counter()
    examples, steps = (THOROUGH if DEEP else QUICK)[name if name in QUICK else backend]
    report = check_case(
        CASES[name],
        lambda config, device, kv_dtype: build(config, device, kv_dtype, backend=backend),
        device=device_of(backend),
        examples=1 if device_of(backend) == "cuda" and not DEEP else examples,
        steps=steps,
        seed=SEED,
        used=used,
    )
    record_property(CALLS, report.calls)
    assert report.failure is None, f"seed {SEED}\n{report.failure}"
    covered = used[name] > 0 or name not in FEATURES or (backend == "fast" and name in BY_CHANCE)
    assert covered, f"no call had to do with {name}"


# Planted faults: each is found in its own case, and the message names the place.


class Planted(ReferenceManager):
    """The reference, whose rows see other entries."""

    def change(self, positions, entries, layout):
        return positions, entries

    def _attend_row(self, q, positions, entries, layout, rel_bias, ieee):
        positions, entries = self.change(positions, entries, layout)
        return super()._attend_row(q, positions, entries, layout, rel_bias, ieee)


class ForgetsTheFirst(Planted):
    def change(self, positions, entries, layout):
        kept = (positions > 0) | (positions >= layout.length)
        return positions[kept], entries[:, :, kept]


class SeesTheNewestTwice(Planted):
    def change(self, positions, entries, layout):
        return torch.cat([positions, positions[-1:] + 1]), torch.cat([entries, entries[:, :, -1:]], dim=2)


class WritesBeforeItReads(ReferenceManager):
    def _attend(self, *arguments):
        super()._attend(*arguments)
        return super()._attend(*arguments)


class ShiftsTheBias(ReferenceManager):
    def _attend_row(self, q, positions, entries, layout, rel_bias, ieee):
        return super()._attend_row(
            q, positions, entries, layout, None if rel_bias is None else rel_bias.roll(1, -1), ieee
        )


class LeaksMemory(ReferenceManager):
    """It multiplies what nobody wrote by zero, instead of leaving it alone."""

    def _attend_row(self, *arguments):
        return super()._attend_row(*arguments) + 0 * self.layer(0).float().sum()


class WritesTheTokenBefore(ReferenceManager):
    def _write(self, slot, layout, own):
        sinks, *ring = layout.writes
        late = (write._replace(token=max(0, write.token - 1)) for write in ring)
        super()._write(slot, layout._replace(writes=(sinks, *late)), own)


class StartsTheRingLate(ReferenceManager):
    def _plan(self, step, ctx):
        plan = super()._plan(step, ctx)
        plan.table[:, 11] += plan.table[:, 12].clamp(max=1)
        return plan


class LeaksASlot(ReferenceManager):
    def _remove_request(self, rid):
        if rid in self._requests and self._requests[rid].written == 0:
            super()._remove_request(rid)


class OneHeadIsAnother(ReferenceManager):
    def _attend_row(self, q, positions, entries, layout, rel_bias, ieee):
        return super()._attend_row(q, positions, entries.roll(1, 1), layout, rel_bias, ieee)


ATTEND = r"call \d+ of \d+, attend: the result differs\nwhere +request '\w' \(row \d"
FAULTS = {
    ForgetsTheFirst: ("basics", [ATTEND, r"should see +0, |should see +0-", r"but sees +\d", "that is +without 0\n"]),
    SeesTheNewestTwice: ("basics", [ATTEND, r"but sees +.*2 times \d", r"that is +with \d"]),
    WritesBeforeItReads: ("basics", [ATTEND, "should see", "but sees", "that is"]),
    ShiftsTheBias: (
        "rel_bias",
        [
            ATTEND,
            "sees +the right keys",
            r"rel_bias +the key at stream position \d+ should take entry \d+, but takes (no )?entry",
            "goes away +without rel_bias",
            r"rel_bias=Sample\(",
        ],
    ),
    LeaksMemory: (
        "poisoned_memory",
        [ATTEND, r"is nan \(0x7fc00000\)", "goes away +where the memory that nobody wrote holds zeros"],
    ),
    WritesTheTokenBefore: (
        "basics",
        [
            r"attend: the slots differ afterwards\nwhere +layer 0, slot 0 \(request '\w'\), head 0, entry \d",
            r"should hold +stream position \d+ of '(\w)'\nbut holds +stream position \d+ of '\1'",
        ],
    ),
    StartsTheRingLate: (
        "basics",
        [
            r"plan: the plan differs\nwhere +column 11, read_ring_start, of row 0: request '\w'",
            r"should be 0 \(0x00000000\), is 1 \(0x",
        ],
    ),
    LeaksASlot: (
        "lifecycle",
        [
            "what is known of the pool differs afterwards",
            r"where +request '(\w)'\nvalues +free_slots should be \d+ \(0x",
            r"but hold +one: '\w'",
        ],
    ),
    OneHeadIsAnother: ("grouped_heads", [ATTEND, r"but sees +.*\d of head \d"]),
}


@pytest.fixture
def impatient(monkeypatch):
    """Shrinking that does not take long."""
    monkeypatch.setattr("boundedkv.testing.hunt.SHRINKING_PATIENCE", 0.5)


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_fault_is_found_and_told(fault, impatient):
    name, patterns = FAULTS[fault]
    failure = judged(name, fault).failure
    assert failure is not None
    for pattern in [
        *patterns,
        r"The calls:\n    import torch\n    from .*\n    from .*\n    manager = factory\(BoundedKVConfig\(\d.*\(\d+",
    ]:
        assert re.search(pattern, failure), f"{pattern} is not in\n{failure}"
    last = failure.splitlines()[-1]
    assert re.search(r"^    (result_\d+ = )?manager\.\w+\(", last), failure


def test_told_script_runs_and_differs(impatient):
    """The lines of a failure are Python: run, they show the two results that it tells."""
    failure = judged("basics", ForgetsTheFirst).failure
    lines = [line.strip() for line in failure.partition("The calls:\n")[2].splitlines()]
    outs = []
    for factory in (ReferenceManager, ForgetsTheFirst):
        names = {"factory": factory, "device": "cpu"}
        exec("\n".join([*lines[:-1], f"out = {lines[-1]}"]), names)
        outs.append(names["out"])
    told = re.search(r"should be (\S+) \(0x(\w+)\), is (\S+) \(0x(\w+)\)", failure)
    different = (outs[0].view(torch.int32) != outs[1].view(torch.int32)).nonzero()[0].tolist()
    words = [int(out.view(torch.int32)[tuple(different)]) & 0xFFFFFFFF for out in outs]
    assert words == [int(told[2], 16), int(told[4], 16)]


def test_fault_is_found_in_the_cases_that_have_to_do_with_it(impatient):
    report = check_manager(ShiftsTheBias, features=["rel_bias", "batch"], examples=5)
    assert [case.name for case in report.cases if case.failure is None] == ["basics", "batch", "lifecycle"]
    assert not report.conforms
    assert "ShiftsTheBias does not conform: rel_bias, together; " in str(report)
    assert report.to_dict()["conforms"] is False


def test_factory_that_raises_is_told(impatient):
    def factory(config, device, kv_dtype):
        raise NotImplementedError("no such pool")

    failure = judged("basics", factory).failure
    assert failure.startswith("the factory raises NotImplementedError: no such pool\n")
    assert "BoundedKVConfig(" in failure


def test_results_that_change_from_run_to_run_are_told(impatient):
    wrong = iter([0.5])

    class Unsteady(ReferenceManager):
        def _attend_row(self, *arguments):
            return super()._attend_row(*arguments) + next(wrong, 0.0)

    failure = judged("basics", Unsteady).failure
    assert "played again, it gives another result: sums are not in the same order from run to run" in failure


def test_features_that_are_not_named_are_not_drawn():
    report = check_manager(ReferenceManager, features=["batch", "lookahead"], examples=3)
    assert [case.name for case in report.cases] == ["basics", "batch", "lookahead", "lifecycle", "together"]
    assert set(report.features) == {"batch", "lookahead"}
    assert set(report.not_covered) == set(FEATURES) - {"batch", "lookahead"}
    assert "not covered: ragged, padding, " in str(report)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"features": ["sinks"]}, r"no feature is called 'sinks'; known are batch, lookahead, .*, refusals$"),
        ({"without": ["row"]}, r"no feature is called 'row'; known are batch"),
        ({"features": "batch"}, r"features is 'batch' .* but each should be a list of names"),
        ({"numerics": "near"}, r"numerics is 'near', but should be 'bits', 'close' or a Close"),
        ({"examples": 0}, r"examples is 0, but should be an integer at least 1"),
        ({"device": "tpu"}, r"device is 'tpu', but should be one that torch sees: "),
    ],
)
def test_wrong_usage_is_refused(options, words):
    with pytest.raises(ValueError, match=words):
        check_manager(ReferenceManager, **options)


def test_a_manager_in_the_place_of_a_factory_is_refused():
    manager = ReferenceManager(BoundedKVConfig(1, 1, 4, SinkWindow(1, 2)), "cpu")
    with pytest.raises(TypeError, match=r"factory is <.*, but should be called as factory\(config, device, kv_dtype\)"):
        check_manager(manager)


def test_no_function_is_refused():
    with pytest.raises(TypeError, match="fn is None, but should be a function of q, k, v, "):
        check_attention(None)
