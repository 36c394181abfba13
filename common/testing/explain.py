"""A difference as a person would tell it: what differs, where, what was seen instead, and by which calls."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from boundedkv.backends import build
from boundedkv.manager import BoundedKVManager
from boundedkv.plan import COLUMNS, BoundedPlan
from boundedkv.testing.closeness import Close
from boundedkv.testing.compare import differences
from boundedkv.testing.hunt import Found
from boundedkv.testing.probe import Label, Probe, Row, Sight, rows_of
from boundedkv.testing.samples import Sample
from boundedkv.testing.script import Call, play, script_told

Factory = Callable[..., BoundedKVManager]

_INDENT = " " * 13
_COLUMNS = re.compile(r"\.table\[(\d+), (\d+)\]")


class Scene:
    """A difference on stage: both managers can be had fresh, and the script played on them."""

    def __init__(self, found: Found, factory: Factory, device: torch.device) -> None:
        """Play it once."""
        self.found, self._factory, self._device = found, factory, device
        self.last = len(found.script) - 1
        self.left, self.right = self.reference(), self.other()
        self.left_results, self.right_results = play(self.left, found.script), play(self.right, found.script)

    def reference(self) -> BoundedKVManager:
        """A fresh reference."""
        return build(self.found.config, "cpu", backend="reference")

    def other(self) -> BoundedKVManager:
        """A fresh manager of the factory's."""
        return self._factory(self.found.config, self._device, None)

    @property
    def call(self) -> Call:
        """The call that differs."""
        return self.found.script[self.last]

    def agrees(self, change: Callable[[Call], Call | None]) -> bool:
        """Whether the last results are the same once each call is changed so."""

        def changed(_: int, call: Call, results: object) -> dict[str, Any] | None:
            kept = change(call)
            return None if kept is None else kept.arguments

        left, right = (play(manager, self.found.script, changed) for manager in (self.reference(), self.other()))
        return next(differences("", left.get(self.last), right.get(self.last)), None) is None


def explained(found: Found, factory: Factory, device: torch.device, close: Close | None) -> str:
    """Tell a difference.

    Args:
        found: the difference.
        factory: makes the managers that differ from the reference.
        device: where they live.
        close: how results of attend are judged; None for bit by bit.

    Returns:
        Some lines, ordered from what to how.
    """
    if not found.script:
        return f"{found.message}\n\n{script_told(found.config, found.script)}"
    scene = Scene(found, factory, device)
    place = found.message.split("): ", 1)[-1] if "): " in found.message else found.message
    head = f"call {len(found.script)} of {len(found.script)}, {scene.call.name}"
    facts = dict(_facts(scene, place, close))
    lines = [f"{name:<11}  {words}".replace("\n", "\n" + _INDENT) for name, words in facts.items()]
    script = "\n".join(f"    {line}" for line in script_told(found.config, found.script).splitlines())
    return "\n".join([f"{head}: {_summary(place)}", *lines, "", "The calls:", script])


def _summary(place: str) -> str:
    """What differs, in a few words."""
    kinds = {
        "result.table": "the plan differs",
        "result.rows": "the plan differs",
        "result": "the result differs",
        "error": "one raises, the other does not, or another error",
        "text of error": "the errors have other words",
        "then layer": "the slots differ afterwards",
        "then": "what is known of the pool differs afterwards",
        "bytes of": "an argument was changed",
    }
    return next((words for start, words in kinds.items() if place.startswith(start)), "they differ")


def _facts(scene: Scene, place: str, close: Close | None) -> Iterator[tuple[str, str]]:
    """What can be told of a difference: name and words."""
    left, right = scene.left_results.get(scene.last), scene.right_results.get(scene.last)
    of_attend = scene.call.name == "attend" and place.startswith("result")
    if of_attend and isinstance(left, Tensor) and isinstance(right, Tensor) and _alike(left, right):
        yield from _attend_facts(scene, place, left, right, close)
    elif place.startswith("then layer"):
        yield from _slot_facts(scene, place)
    else:
        column = _COLUMNS.search(place)
        if column and isinstance(left, BoundedPlan):
            row, number = int(column[1]), int(column[2])
            request = scene.call.arguments["ctx"].row_ids[row] if row < len(left.rows) else "no row"
            yield "where", f"column {number}, {COLUMNS[number]}, of row {row}: request {request!r}"
        yield "values", place


def _alike(left: Tensor, right: Tensor) -> bool:
    return left.shape == right.shape and left.dtype == right.dtype


# A result of attend.


def _attend_facts(
    scene: Scene, place: str, left: Tensor, right: Tensor, close: Close | None
) -> Iterator[tuple[str, str]]:
    config = scene.found.config
    verdict = scene.found.verdict
    right = right.cpu()
    if verdict is not None:
        index = verdict.place
    else:
        different = _words(left) != _words(right)
        if not different.any():
            yield "values", place
            yield "but", "played again, both gave the same: results are not the same from run to run"
            return
        index = tuple(different.nonzero()[0].tolist())
    line, t, head, element = index
    rows = rows_of(scene.found.script, scene.last, scene.left_results)
    b, part = divmod(line, config.rows_per_request)
    row = rows[b] if b < len(rows) else Row("padding", 0, "")
    of_rows = f", its row {part}" if config.rows_per_request > 1 else ""
    where = f"request {row.request!r} (row {b} of the batch{of_rows}), query {t}, at stream position {row.length + t}"
    yield "where", f"{where}, head {head}, element {element}"
    yield "values", place if verdict is not None else _values(left, right, index)
    probe = Probe(config, scene.found.script)
    query = (line, t, head)
    sights = probe.sights(scene.reference, scene.other, query)
    group = config.query_heads // config.num_heads
    mine = (scene.call.arguments["layer_idx"], part, head // group)
    same_sight = sights is not None and sights[0] == sights[1]
    if sights is not None and not same_sight:
        yield "should see", _sight_told(sights[0], row, mine)
        yield "but sees", _sight_told(sights[1], row, mine)
        yield "that is", _difference_told(*sights, row, mine)
    elif sights is not None:
        yield "sees", f"the right keys, each once: {_sight_told(sights[0], row, mine)}; the numbers made of them differ"
        entries = probe.bias_entries(scene.reference, scene.other, query)
        if entries is not None and entries[0] != entries[1]:
            yield "rel_bias", _entries_told(*entries)
    if close is None and not (sights is not None and not same_sight):
        gone = [words for words, change in _WHAT_IFS.items() if _applies(scene, change) and scene.agrees(change)]
        if gone:
            yield "goes away", " or ".join(gone)


def _words(x: Tensor) -> Tensor:
    return x.contiguous().view({2: torch.int16, 4: torch.int32}[x.element_size()])


def _values(left: Tensor, right: Tensor, index: tuple[int, ...]) -> str:
    unequal = int((_words(left) != _words(right)).sum())
    mask, digits = (1 << 8 * left.element_size()) - 1, 2 * left.element_size()
    should, is_ = (f"{x[index].item():.9g} (0x{int(_words(x)[index]) & mask:0{digits}x})" for x in (left, right))
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


# Slots.


def _slot_facts(scene: Scene, place: str) -> Iterator[tuple[str, str]]:
    config = scene.found.config
    layer_idx = int(place.removeprefix("then layer(").partition(")")[0])
    left, right = scene.left.layer(layer_idx), scene.right.layer(layer_idx).cpu()
    different = _words(left) != _words(right)
    if not different.any():
        yield "values", place
        yield "but", "played again, both wrote the same: results are not the same from run to run"
        return
    slot, row, head, entry, element = index = tuple(different.nonzero()[0].tolist())
    sinks = config.sink_capacity
    region = f"entry {entry} of the sinks" if entry < sinks else f"entry {entry - sinks} of the ring"
    part = f"key element {element}" if element < config.head_dim else f"value element {element - config.head_dim}"
    of_rows = f", row {row}" if config.rows_per_request > 1 else ""
    yield "where", f"layer {layer_idx}, slot {slot}{of_rows}, head {head}, {region}, {part}"
    yield "values", _values(left, right, index)
    probe = Probe(config, scene.found.script)
    held = probe.slots(scene.reference, scene.other, layer_idx)
    names = {number + 1: label for label, number in probe.labels.items()}
    should, is_ = (names.get(int(side[slot, row, head, entry])) for side in held)
    if should != is_:
        yield "should hold", _held_told(should)
        yield "but holds", _held_told(is_)


def _held_told(label: Label | None) -> str:
    return "what was there before" if label is None else f"stream position {label.position} of {label.owner!r}"
