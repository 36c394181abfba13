"""Every fault of the gallery is found, and docs/gallery.md shows what its code and its message are."""

import inspect
import re
from pathlib import Path

import pytest

pytest.importorskip("hypothesis")

from gallery import GALLERY, SECTIONS
from gallery.__main__ import title

from boundedkv.testing import check_attention
from boundedkv.testing.attention import attention_manager
from boundedkv.testing.conformance import cases, check_case

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "gallery.md").read_text(encoding="utf-8")
ENTRIES = re.findall(
    r"^### ([^\n]*)\n\n```py\n(.*?)\n```\n\n```text\n(\w+): (.*?)\n```", PAGE, flags=re.MULTILINE | re.DOTALL
)
SHOWN = {name: (source, case, message) for name, source, case, message in ENTRIES}

# What a message must say whatever the streams were: the place, and what is wrong there.
REQUEST = r"where +request '\w' \(row \d of the batch"
SEES = r"should see +.*\nbut sees +"
HOLDS = r"should hold +stream position \d+ of '(\w)'\nbut holds +(stream position \d+ of '\1'|what was there before)"
SAYS = {
    "WindowOneShort": [REQUEST, SEES, r"that is +without \d+$"],
    "SinksForgotten": [REQUEST, SEES, r"that is +without 0"],
    "SinkCountedTwice": [REQUEST, r"but sees +.*2 times \d", r"that is +with \d"],
    "WritesBeforeItReads": [REQUEST, SEES, r"that is +without \d"],
    "ReadsTheSpareEntries": [REQUEST, SEES, r"that is +with "],
    "StepRuleForAQueryWindow": [REQUEST, SEES, r"that is +with \d"],
    "CausalWithinTheStep": [REQUEST, SEES, r"that is +without \d"],
    "PositionsInFloat32": [r"at stream position \d{8,}", "sees|should see"],
    "SourceOfAnother": [r"which reads source \d\)", SEES, r"with \d.* of source \d"],
    "RowSourceOfTheFirstRow": [
        r"\(row [12] of the batch, which reads row_source of row [12]\)",
        "of row_source of row 0",
    ],
    "GroupedHeadsMixedUp": [REQUEST, r"head [12], element", r"with \d.* of head [01]"],
    "GuidanceRowsSwapped": [r"of the batch, its row [01]\)", r"with \d.* of row [01]"],
    "OneLayersSlotsForAll": [REQUEST, SEES, "layer_idx=1"],
    "RingStartsOneLate": [r"where +column 11, read_ring_start, of row \d: request '\w'"],
    "SinkEvicted": [r"slot \d \(request '\w'\), head \d, entry 0 of the sinks", HOLDS],
    "TheFirstOfASpanStays": [r"slot \d \(request '\w'\), head \d, entry \d of the ring", HOLDS],
    "StepOrderNotReversed": [r"slot \d \(request '\w'\), head \d, entry \d of the ", HOLDS],
    "WindowWithoutTheStep": [r"where +column \d+, read_ring_(start|length), of row \d: request '\w'"],
    "PaddingRowWrites": [r"slot 0 \((no request of this step|request '\w')\), head \d, entry 0"],
    "StaleTable": [r"where +column \d+, \w+, of row \d: behind the \d of the batch"],
    "CapturedRowsBakedIn": [REQUEST, "but sees +no key"],
    "ThirtyTwoBitOffset": [r"where +column 3, length, of row 0: request '\w'"],
    "SinksOfTheSourceCountedInTheSlot": [r"where +column \d, read_sink_(source|slot)_length, of row \d: request '\w'"],
    "BiasShifted": [REQUEST, r"rel_bias +the key at stream position \d+ ", "goes away +without rel_bias"],
    "MaskedByALargeNumber": [
        REQUEST,
        r"rel_bias +the key at stream position \d+ (takes part although its entry, \d, is -inf|should take entry)",
        "goes away +without rel_bias",
    ],
    "TilesByIndex": [REQUEST, "sees +the right keys, each once", "looks like +tiles counted by index"],
    "SplitDependsOnTheBatch": [REQUEST, r"goes away +.*where request '\w' is alone in its steps"],
    "OwnKeysNotRounded": [REQUEST, "looks like +the step's own keys and values taken as they came"],
    "NanLeak": [REQUEST, r"is nan \(0x7fc0", "goes away +where the memory that nobody wrote holds zeros"],
    "ResultInFloat32": [r"should be bfloat16 \[.*\], is float32 \["],
    "MinusZero": [r"where +padding row 'pad\d'", r"should be 0 \(0x0+\), is -0 \(0x80+\)", "no key, as it should"],
    "StridesIgnored": [REQUEST, "goes away +where all tensors are contiguous"],
    "AnotherEachTime": [REQUEST, "but +played again, it gives another result"],
    "RefusedStepKeepsASlot": ["admit: ", r"where +request '\w', ", r"but hold +one: '\w'"],
    "SlotLeak": [r"where +request '\w'", r"free_slots should be \d .*, is \d", r"but hold +one: '\w'"],
    "CommitCountsTwice": [r"where +request '\w', \d+ tokens behind \d+ written", "should be admitted, is refused: "],
    "RewindsTooFar": [r"where +request '\w'", r"should raise ValueError\(.*, raises nothing"],
    "ImportForgetsTheCount": [r"where +.*request '\w'", r"is refused: request '\w': written is \d+, but should be 0"],
    "LateCommitHitsTheSuccessor": ["commit: it should raise, and does not", r"where +request '\w', "],
    "second_part_of_the_ring_missing": [REQUEST, SEES, r"that is +without \d"],
    "writes_into_the_pool": [r"slot \d \(.*\), head \d, entry 0", "but holds +what no request brought"],
    "scale_forgotten": [REQUEST, "sees +the right keys", "looks like +scores that are not scaled"],
    "almost_zero": [REQUEST, "is not 0, but should be: the query sees no key"],
    "bfloat16_inside": [REQUEST, r"an error of [\d.]+ of its values' scale, [\d,.]+ times the limit of 4 x"],
}


@pytest.fixture(autouse=True)
def impatient(monkeypatch):
    """Shrinking that does not take long."""
    monkeypatch.setattr("boundedkv.testing.hunt.SHRINKING_PATIENCE", 0.5)
    monkeypatch.setattr("boundedkv.testing.hunt.PRUNING_PATIENCE", 1.0)


def test_the_page_shows_the_whole_gallery():
    assert sorted(name for name, *_ in ENTRIES) == sorted(map(title, GALLERY))
    assert re.findall(r"^## (.*)", PAGE, flags=re.MULTILINE) == list(SECTIONS)
    assert f"\n{len(GALLERY)} faults as KV caches" in PAGE
    assert set(SAYS) == set(GALLERY)


@pytest.mark.parametrize("name", GALLERY)
def test_the_page_shows_the_code_and_the_message(name):
    source, _, message = SHOWN[title(name)]
    assert source == inspect.getsource(GALLERY[name].fault).rstrip()
    for part in SAYS[name]:
        assert re.search(part, message, flags=re.MULTILINE), f"{part} is not in\n{message}"


@pytest.mark.parametrize("name", GALLERY)
def test_a_fault_is_found_where_the_page_says(name):
    fault, judge, options = GALLERY[name]
    options = dict(options)
    suite = {case.name: case for case in cases(options.pop("features"))}
    factory = attention_manager(fault) if judge is check_attention else fault
    failure = check_case(suite[SHOWN[title(name)][1]], factory, **options).failure
    assert failure is not None
    for part in SAYS[name]:
        assert re.search(part, failure, flags=re.MULTILINE), f"{part} is not in\n{failure}"
