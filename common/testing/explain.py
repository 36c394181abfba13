"""A difference as a person would tell it: what differs, where, what was seen instead, and by which calls."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from boundedkv.plan import COLUMNS, READS, WRITES, BoundedPlan
from boundedkv.step import AdmitOutcome, BoundedKVStep
from boundedkv.testing.closeness import Close
from boundedkv.testing.explain_attend import attend_facts, values_told, words_of
from boundedkv.testing.hunt import Found
from boundedkv.testing.probe import Probe, rows_of
from boundedkv.testing.scene import Factory, Scene
from boundedkv.testing.script import script_told

_CALLS = (
    "The calls:",
    "    import torch",
    "    from boundedkv import *",
    "    from boundedkv.testing.script import *",
)
_INDENT = " " * 13
_COLUMNS = re.compile(r"\.table\[(\d+), (\d+)\]")
_FIELDS = re.compile(r"\.rows\[(\d+)\]\[1\]\.(reads|writes)\[(\d+)\]\.(\w+)")
_HEADS = re.compile(r"\.rows\[(\d+)\](\[0\]|\[2\]|\[1\]\.tokens|\[1\]\.length|\[1\]\.sink) ")
_SIDES = re.compile(r"^(.*?) is (.*) for (?:the )?\w+, (.*) for \w+(; \d+ of \d+ elements differ)?$", re.DOTALL)
_PAST = re.compile(r"\.table past the batch\[(\d+), (\d+)\]")


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
    head = f"call {len(found.script)} of {len(found.script)}, {scene.call.name}"
    facts = dict(_facts(scene, found.place, close))
    lines = [f"{name:<11}  {words}".replace("\n", "\n" + _INDENT) for name, words in facts.items()]
    script = "\n".join(f"    {line}" for line in script_told(found.config, found.script).splitlines())
    return "\n".join([f"{head}: {_summary(found.place)}", *lines, "", *_CALLS, script])


def _summary(place: str) -> str:
    """What differs, in a few words."""
    kinds = {
        "result.table": "the plan differs",
        "result.rows": "the plan differs",
        "result": "the result differs",
        "error is None": "it raises, and should not",
        "error": "it should raise, and does not, or another error",
        "text of error": "the error has other words",
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
        yield from attend_facts(scene, place, left, right, close)
    elif place.startswith("then layer"):
        yield from _slot_facts(scene, place)
    elif isinstance(left, BoundedPlan) and isinstance(right, BoundedPlan):
        yield from _plan_facts(scene, place, len(left.rows))
    else:
        yield from _call_facts(scene, place, left, right)


def _alike(left: Tensor, right: Tensor) -> bool:
    return left.shape == right.shape and left.dtype == right.dtype


# A plan.


def _plan_facts(scene: Scene, place: str, rows: int) -> Iterator[tuple[str, str]]:
    row, column = _column_of(place, rows)
    if row is not None and column is not None:
        ids = scene.call.arguments["ctx"].row_ids
        whose = f"request {ids[row]!r}" if row < rows else f"behind the {rows} of the batch"
        yield "where", f"column {column}, {COLUMNS[column]}, of row {row}: {whose}"
    yield "values", _sides_told(place)


def _column_of(place: str, rows: int) -> tuple[int | None, int | None]:
    """The row and the column of the table that a difference of plans is about."""
    if found := _COLUMNS.search(place):
        return int(found[1]), int(found[2])
    if found := _PAST.search(place):
        return rows + int(found[1]), int(found[2])
    if found := _HEADS.search(place):
        return int(found[1]), ("[0]", "[2]", "[1].tokens", "[1].length", "[1].sink").index(found[2])
    if found := _FIELDS.search(place):
        if found[2] == "reads":
            return int(found[1]), READS + 2 * int(found[3]) + ("start", "length").index(found[4])
        return int(found[1]), WRITES + 3 * int(found[3]) + ("token", "start", "length").index(found[4])
    return None, None


# Any other call.


def _call_facts(scene: Scene, place: str, left: object, right: object) -> Iterator[tuple[str, str]]:
    requests = _requests_told(scene.call.arguments)
    if requests:
        yield "where", requests
    if isinstance(left, AdmitOutcome) and isinstance(right, AdmitOutcome) and left.ok != right.ok:
        yield "values", f"should be {_outcome_told(left)}, is {_outcome_told(right)}"
    else:
        yield "values", _sides_told(place)
    held = [", ".join(map(repr, _holders(scene, manager))) or "nobody" for manager in (scene.left, scene.right)]
    if held[0] != held[1]:
        yield "should hold", f"a slot: {held[0]}"
        yield "but hold", f"one: {held[1]}"


def _requests_told(arguments: dict[str, Any]) -> str:
    """The requests that a call is about."""
    step = arguments.get("step")
    if isinstance(step, BoundedKVStep):
        ids = [segment.request_id for segment in step.segments]
        written = {rid: getattr(step.positions.get(rid), "written", None) for rid in ids}
        return ", ".join(
            f"request {segment.request_id!r}, {segment.span} tokens behind {written[segment.request_id]} written"
            for segment in step.segments
        )
    return f"request {arguments['rid']!r}" if "rid" in arguments else ""


def _outcome_told(outcome: AdmitOutcome) -> str:
    return "admitted" if outcome.ok else f"refused: {outcome.reason}"


def _holders(scene: Scene, manager: Any) -> list[str]:
    """The requests of the calls that hold a slot after them."""
    named = {rid for call in scene.found.script for rid in _ids_in(call.arguments)}
    return sorted(rid for rid in named if manager.holds(rid))


def _ids_in(arguments: dict[str, Any]) -> Iterator[str]:
    if isinstance(arguments.get("step"), BoundedKVStep):
        yield from (rid for rid in arguments["step"].positions if isinstance(rid, str))
    if isinstance(arguments.get("rid"), str):
        yield arguments["rid"]


def _sides_told(place: str) -> str:
    """What a pair told, in terms of should and is."""
    sides = _SIDES.match(place)
    if sides is None:
        return place
    what, should, is_, count = sides.groups()
    what, count = what.removeprefix("then "), count or ""
    if what == "error":
        should, is_ = ("nothing" if side == "None" else side for side in (should, is_))
        return f"should raise {should}, raises {is_}"
    if what == "text of error":
        return f"should say {should}, says {is_}"
    return f"{what} should be {should}, is {is_}{count}"


# Slots.


def _slot_facts(scene: Scene, place: str) -> Iterator[tuple[str, str]]:
    config = scene.found.config
    layer_idx = int(place.removeprefix("then layer(").partition(")")[0])
    left, right = scene.left.layer(layer_idx), scene.right.layer(layer_idx).cpu()
    different = words_of(left) != words_of(right)
    if not different.any():
        yield "values", _sides_told(place)
        yield "but", "played again, both wrote the same: results are not the same from run to run"
        return
    slot, row, head, entry, element = index = tuple(different.nonzero()[0].tolist())
    sinks = config.sink_capacity
    region = f"entry {entry} of the sinks" if entry < sinks else f"entry {entry - sinks} of the ring"
    part = f"key element {element}" if element < config.head_dim else f"value element {element - config.head_dim}"
    of_rows = f", row {row}" if config.rows_per_request > 1 else ""
    rows = rows_of(scene.found.script, scene.last, scene.left_results) if scene.call.name == "attend" else []
    owners = [repr(line.request) for line in rows if line.slot == slot and not line.padding]
    whose = f" (request {owners[0]})" if owners else " (no request of this step)"
    yield "where", f"layer {layer_idx}, slot {slot}{whose}{of_rows}, head {head}, {region}, {part}"
    yield "values", values_told(left, right, index)
    held = Probe(config, scene.found.script).held(scene.reference, scene.other, layer_idx, (slot, row, head, entry))
    if held[0] != held[1]:
        yield "should hold", held[0]
        yield "but holds", held[1]
