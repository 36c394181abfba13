"""A difference in a result of attend, told: which query, which keys it sees instead, and what makes it go away."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from boundedkv.testing.closeness import Close
from boundedkv.testing.probe import Label, Probe, Row, Sight, rows_of
from boundedkv.testing.samples import Sample
from boundedkv.testing.scene import Scene
from boundedkv.testing.script import Call
from boundedkv.testing.suspects import suspects

_INDEX = re.compile(r"result\[(\d+), (\d+), (\d+), (\d+)\]")

NOTHING = Sight(Counter(), 0)


def attend_facts(
    scene: Scene, place: str, left: Tensor, right: Tensor, close: Close | None
) -> Iterator[tuple[str, str]]:
    """What can be told of two results of attend: name and words.

    Args:
        scene: the difference.
        place: the difference as the pair told it.
        left: the reference's result.
        right: the other one, of the same shape and type.
        close: how results are judged; None for bit by bit.
    """
    right = right.cpu()
    different = words_of(left) != words_of(right)
    steady = scene.found.verdict is not None or bool(different.any())
    index = _first(scene, place, different)
    rows = rows_of(scene.found.script, scene.last, scene.left_results)
    line, t, head, element = index
    b, part = divmod(line, scene.found.config.rows_per_request)
    row = rows[b] if b < len(rows) else Row("padding", 0, "", padding=True)
    query = f"query {t}, at stream position {row.length + t}, head {head}, element {element}"
    yield "where", f"{_row_told(scene, row, b, part)}, {query}"
    yield "values", _judged_told(place) if scene.found.verdict or not steady else values_told(left, right, index)
    if not steady or not scene.is_steady():
        yield "but", "played again, it gives another result: sums are not in the same order from run to run"
        return
    group = scene.found.config.query_heads // scene.found.config.num_heads
    mine = (scene.call.arguments["layer_idx"], part, head // group)
    sights = dict(_sight_facts(scene, (line, t, head), row, mine))
    yield from sights.items()
    if "but sees" not in sights:
        yield from _cause_facts(scene, row, len(rows), right, close)


def _first(scene: Scene, place: str, different: Tensor) -> tuple[int, ...]:
    """[row, query, head, element] of the first difference."""
    if scene.found.verdict is not None:
        return scene.found.verdict.place
    if different.any():
        return tuple(different.nonzero()[0].tolist())
    told = _INDEX.match(place)
    return tuple(map(int, told.groups())) if told else (0,) * 4


def _row_told(scene: Scene, row: Row, b: int, part: int) -> str:
    of_rows = f", its row {part}" if scene.found.config.rows_per_request > 1 else ""
    kind = "padding row" if row.padding else "request"
    reads = f", which reads {row.source}" if row.reads_source else ""
    return f"{kind} {row.request!r} (row {b} of the batch{of_rows}{reads})"


def _sight_facts(
    scene: Scene, query: tuple[int, int, int], row: Row, mine: tuple[int, int, int]
) -> Iterator[tuple[str, str]]:
    """What a query sees instead, or that it sees the right keys."""
    probe = Probe(scene.found.config, scene.found.script)
    sights = probe.sights(scene.reference, scene.other, query)
    if sights is not None and sights[0] != sights[1]:
        yield "should see", _sight_told(sights[0], row, mine)
        yield "but sees", _sight_told(sights[1], row, mine)
        yield "that is", _difference_told(*sights, row, mine)
        return
    if sights == (NOTHING, NOTHING):
        yield "sees", "no key, as it should: the result should be zeros"
    elif sights is not None:
        yield "sees", f"the right keys, each once: {_sight_told(sights[0], row, mine)}; the numbers made of them differ"
        entries = probe.bias_entries(scene.reference, scene.other, query)
        if entries is not None and entries[0] != entries[1]:
            yield "rel_bias", _entries_told(*entries)


def _cause_facts(scene: Scene, row: Row, batch: int, right: Tensor, close: Close | None) -> Iterator[tuple[str, str]]:
    """Where the right keys are seen: without what the difference goes away, and which mistake gives the same."""
    if close is None:
        gone = [words for words, change in _WHAT_IFS.items() if _applies(scene, change) and scene.agrees(change)]
        if batch > 1 and not row.padding and scene.agrees_alone(row.request):
            gone.append(f"where request {row.request!r} is alone in its steps")
        if gone:
            yield "goes away", " or ".join(gone)
    same = suspects(scene.found.config, scene.found.script, scene.left_results[scene.last], right, close is not None)
    if same:
        bits = "nearly that" if close is not None else "these bits"
        yield "looks like", f"{' or '.join(same)}: the reference gives {bits} so"


def _judged_told(place: str) -> str:
    """What `closeness.judge` said, or a pair, without the index: `where` has it."""
    return _INDEX.sub("result", place, count=1)


def words_of(x: Tensor) -> Tensor:
    """A tensor as integers."""
    return x.contiguous().view({2: torch.int16, 4: torch.int32}[x.element_size()])


def values_told(left: Tensor, right: Tensor, index: tuple[int, ...]) -> str:
    """One element of two tensors, in decimal and in bits."""
    unequal = int((words_of(left) != words_of(right)).sum())
    mask, digits = (1 << 8 * left.element_size()) - 1, 2 * left.element_size()
    should, is_ = (f"{x[index].item():.9g} (0x{int(words_of(x)[index]) & mask:0{digits}x})" for x in (left, right))
    return f"should be {should}, is {is_}; {unequal} of {left.numel()} elements differ"


def _sight_told(sight: Sight, row: Row, mine: tuple[int, int, int]) -> str:
    """Stream positions in order, runs as first-last, entries that are not the row's own by their owner."""
    own = sorted(label.position for label in sight.entries if _is_own(label, row, mine))
    words = [_runs(own)] if own else []
    words += [_label_told(label, row, mine) for label in sight.entries if not _is_own(label, row, mine)]
    words += [f"{count} times {_label_told(label, row, mine)}" for label, count in sight.entries.items() if count > 1]
    words += [f"{_counted(sight.unwritten)} that nobody wrote"] if sight.unwritten else []
    return ", ".join(words) or "no key"


def _counted(entries: int) -> str:
    return "an entry" if entries == 1 else f"{entries} entries"


def _is_own(label: Label, row: Row, mine: tuple[int, int, int]) -> bool:
    return label.owner in (row.request, row.source) and label.part == mine


def _label_told(label: Label, row: Row, mine: tuple[int, int, int]) -> str:
    if _is_own(label, row, mine):
        return str(label.position)
    kinds = zip(("layer", "row", "head"), label.part, mine, strict=True)
    parts = [f"{kind} {got}" for kind, got, expected in kinds if got != expected]
    owner = [] if label.owner in (row.request, row.source) else [label.owner]
    return f"{label.position} of {', '.join([*owner, *parts])}"


def _runs(positions: list[int]) -> str:
    """Numbers in order, as "0, 3-5"."""
    runs: list[list[int]] = []
    for position in positions:
        if runs and position == runs[-1][1] + 1:
            runs[-1][1] = position
        else:
            runs.append([position, position])
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)


def _difference_told(should: Sight, sees: Sight, row: Row, mine: tuple[int, int, int]) -> str:
    missing = Sight(Counter(dict.fromkeys(should.entries - sees.entries, 1)), max(0, should.unwritten - sees.unwritten))
    more = Sight(Counter(dict.fromkeys(sees.entries - should.entries, 1)), max(0, sees.unwritten - should.unwritten))
    words = [
        f"{name} {_sight_told(sight, row, mine)}"
        for name, sight in (("without", missing), ("with", more))
        if sight.entries or sight.unwritten
    ]
    return ", ".join(words)


def _entries_told(should: dict[Label, int], takes: dict[Label, int]) -> str:
    label = min(label for label in should.keys() | takes.keys() if should.get(label) != takes.get(label))
    if label not in takes:
        return f"the key at stream position {label.position} takes part although its entry, {should[label]}, is -inf"
    entries = (f"entry {side[label]}" if label in side else "no entry" for side in (should, takes))
    return "the key at stream position {} should take {}, but takes {}".format(label.position, *entries)


# What the same calls give without this or that.


def _without_bias(call: Call) -> Call:
    return call._replace(arguments=call.arguments | {"rel_bias": None}) if call.name == "attend" else call


def _clean(call: Call) -> Call | None:
    return None if call.name == "fill" else call


def _with_samples(**fields: Any) -> Callable[[Call], Call]:
    def plainer(value: Any) -> Any:
        if isinstance(value, Sample):
            return Sample(**(vars(value) | {key: item(value) for key, item in fields.items()}))
        return tuple(map(plainer, value)) if type(value) is tuple else value

    return lambda call: call._replace(arguments={key: plainer(item) for key, item in call.arguments.items()})


_WHAT_IFS: dict[str, Callable[[Call], Call | None]] = {
    "without rel_bias": _without_bias,
    "where the memory that nobody wrote holds zeros": _clean,
    "where all tensors are contiguous": _with_samples(layout=lambda sample: "whole"),
    "without extremes among the inputs": _with_samples(
        kind=lambda sample: "normal" if sample.kind in ("odd", "poison") else sample.kind
    ),
    "where all tensors are float32": _with_samples(dtype=lambda sample: torch.float32),
}


def _applies(scene: Scene, change: Callable[[Call], Call | None]) -> bool:
    """Whether a change changes anything."""
    return any(change(call) != call for call in scene.found.script)
