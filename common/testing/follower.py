"""The reference that follows another manager: it skips most of what that one does, and catches up when it is needed."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor

from boundedkv.backends import build
from boundedkv.config import BoundedKVConfig
from boundedkv.plan import ROW_INTS, SLOT, BoundedPlan
from boundedkv.step import BoundedKVStep, Segment, SlotLease, StepContext, StreamPosition
from boundedkv.step_checks import real_segments
from boundedkv.testing.differential import REMEMBERED_PLANS
from boundedkv.testing.wrapper import Answer, ask

_STARTS_OVER = ("remove_request", "reset_request", "import_request", "rollback_admit")

_Planned = tuple[Segment, StreamPosition]


class Follower:
    """A reference whose plans and slots may be older than those of the manager it follows.

    Attends leave its slots behind, unless it makes them too. A plan that it skips matters to it later only by how far
    it may have written: rewinding and exporting ask for that, and then it is made up for.

    Args:
        config: the pool.

    Attributes:
        current_is_known: its current plan is the one of the same step.
    """

    def __init__(self, config: BoundedKVConfig) -> None:
        """Nothing held, nothing known of the other's slots."""
        self._manager = build(config, "cpu", backend="reference")
        self.current_is_known = True
        self._alike: list[set[int]] = [set() for _ in range(config.num_layers)]  # slots that both have alike
        self._deferred: dict[str, _Planned] = {}  # the furthest of the plans that were skipped
        self._plans: deque[tuple[BoundedPlan, BoundedPlan, SlotLease | None]] = deque(maxlen=REMEMBERED_PLANS)
        self._captured: list[tuple[BoundedPlan, BoundedPlan, SlotLease | None]] = []
        self._behind: set[SlotLease] = set()  # leases whose last plan was skipped

    @property
    def free_slots(self) -> int:
        """Slots that no request holds."""
        return self._manager.free_slots

    def holds(self, rid: str) -> bool:
        """Whether a request holds a slot."""
        return self._manager.holds(rid)

    def layer(self, layer_idx: int) -> Tensor:
        """One layer's slots, live."""
        return self._manager.layer(layer_idx)

    def ask(self, name: str, arguments: Mapping[str, Any]) -> Answer:
        """Make a call on the reference."""
        if name in ("rewind_request", "export_request"):
            self._catch_up(arguments["rid"])
        answer = ask(self._manager, name, arguments)
        if name in _STARTS_OVER and answer.error is None:
            named = arguments.get("rid")
            self._deferred = {rid: plan for rid, plan in self._deferred.items() if rid != named and self.holds(rid)}
        return answer

    # Plans.

    def defer_plan(self, step: BoundedKVStep, ctx: StepContext) -> None:
        """Skip a plan."""
        self.current_is_known = False
        self._lose_slots_to(ctx.slot_lease)
        if ctx.slot_lease is not None:
            self._behind.add(ctx.slot_lease)
        for segment in real_segments(step, ctx):
            position = step.positions[segment.request_id]
            known = self._deferred.get(segment.request_id)
            if known is None or position.written + segment.span > known[1].written + known[0].span:
                self._deferred[segment.request_id] = segment, position

    def _catch_up(self, rid: Any) -> None:
        planned = self._deferred.pop(rid, None) if isinstance(rid, str) else None
        if planned is not None and self.holds(rid):
            self.current_is_known = False
            self._manager.plan(BoundedKVStep((planned[0],), {rid: planned[1]}), StepContext((rid,)))

    def pair_plans(self, theirs: BoundedPlan, mine: BoundedPlan, ctx: StepContext) -> None:
        """Take note of both plans of a step; those of captures are kept for good."""
        self.current_is_known = True
        self._lose_slots_to(ctx.slot_lease)
        if ctx.slot_lease is not None:
            self._behind.discard(ctx.slot_lease)
        (self._captured if ctx.capture else self._plans).append((theirs, mine, ctx.slot_lease))

    def plan_for(self, theirs: BoundedPlan) -> BoundedPlan:
        """The reference's plan of the same step, or a copy of theirs where it has none that is up to date."""
        for known, mine, lease in (*self._plans, *self._captured):
            if known is theirs and lease not in self._behind:
                return mine
        return theirs._replace(table=theirs.table.to("cpu", copy=True))

    # Slots.

    def follow(self, layer_idx: int, slots: list[int], layer: Tensor) -> Iterator[tuple[int, Tensor, Tensor]]:
        """Take over slots of the other's layer; those that were alike are handed back, with both contents."""
        mine, theirs = self.layer(layer_idx), layer[slots].cpu()
        for slot, entries in zip(slots, theirs, strict=True):
            if slot in self._alike[layer_idx]:
                yield slot, mine[slot], entries
            else:
                mine[slot] = entries
                self._alike[layer_idx].add(slot)

    def lose_slots(self) -> None:
        """From here on nothing is known of the other's slots."""
        for slots in self._alike:
            slots.clear()

    def _lose_slots_to(self, lease: SlotLease | None) -> None:
        if lease is not None:  # a graph that is replayed on it tells nobody of what it writes
            self.lose_slots()


def slots_named(plan: BoundedPlan, max_slots: int) -> list[int]:
    """The slots of a plan, by its table as it is now; those that no pool of that size has are left out."""
    if plan.table.ndim != 2 or plan.table.shape[1] != ROW_INTS:
        return []
    lines = plan.table[: len(plan.rows)]
    return sorted({int(line[SLOT]) for line in lines if line.any()} & set(range(max_slots)))
