"""An engine's own manager, with the reference beside it: watched in production, and nothing of what it does changed."""

from __future__ import annotations

import logging
import math
import threading
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from boundedkv.backends import build
from boundedkv.manager import BoundedKVManager
from boundedkv.plan import ROW_INTS, SLOT, BoundedPlan
from boundedkv.step import StepContext
from boundedkv.testing.compare import differences, told
from boundedkv.testing.differential import REMEMBERED_PLANS, Difference
from boundedkv.testing.repro import Call, write_repro
from boundedkv.testing.traces import require_safetensors
from boundedkv.testing.wrapper import Answer, Wrapper, ask

REMEMBERED_CALLS = 4096
_NAMES = ("reference", "judged")
_ENDS = ("remove_request", "reset_request", "rollback_admit")
_MOVES = (*_ENDS, "import_request", "cleanup")  # after these a request may hold another slot than it was planned for
_NO_LINES = torch.zeros(0, ROW_INTS, dtype=torch.int32)
_log = logging.getLogger(__name__)


class Shadow(Wrapper):
    """A manager to use in the place of another: it returns what that one returns, and compares with the reference.

    Every lifecycle call is made on the reference too, which lives in the host's memory, and compared. Of the attends,
    one in `every` is: the slots that its plan names are brought over first, so those in between cost a counter. A slot
    that was compared before and has changed since without a call that may change it is a difference too.

    No attend is compared while a graph is captured, since nothing may be copied then, and replays are seen by nobody:
    with a plan on a lease all slots count as changed. After a difference nothing is compared any more.

    Args:
        manager: the manager that is judged, none of its slots held.
        every: of how many attends one is compared. Raised to the next number that shares no divisor with the number
            of layers, so that each layer has its turn.
        on_difference: "raise" a `Difference` from the call in which it shows, which has been made; or "log" it.
        folder: where a folder that shows the difference again is put; None for none.

    Raises:
        ValueError: an argument is out of range, or a request holds a slot.
        ImportError: `folder` is given and safetensors is not installed.
        Difference: from any call, with `on_difference="raise"`, once.
    """

    def __init__(
        self,
        manager: BoundedKVManager,
        every: int = 1,
        on_difference: str = "raise",
        folder: str | Path | None = None,
    ) -> None:
        """See the class."""
        if not isinstance(every, int) or isinstance(every, bool) or every < 1:
            raise ValueError(f"every is {every!r}, but should be an integer at least 1")
        if on_difference not in ("raise", "log"):
            raise ValueError(f"on_difference is {on_difference!r}, but should be 'raise' or 'log'")
        if manager.free_slots != manager.config.max_slots:
            raise ValueError(
                f"manager has {manager.free_slots} free slots, but should have all {manager.config.max_slots}: "
                "the reference starts with none held"
            )
        if folder is not None:
            require_safetensors()
        super().__init__(manager)
        self._reference = build(manager.config, "cpu", backend="reference")
        self._period = next(n for n in range(every, 2 * every + 2) if math.gcd(n, manager.config.num_layers) == 1)
        self._raises = on_difference == "raise"
        self._folder = None if folder is None else Path(folder)
        self._order = threading.RLock()
        self._found: str | None = None
        self._attends = 0
        self._alike: list[set[int]] = [set() for _ in range(manager.config.num_layers)]  # slots that both have alike
        self._slot_of: dict[str, int] = {}
        self._plans: deque[tuple[BoundedPlan, BoundedPlan]] = deque(maxlen=REMEMBERED_PLANS)
        self._captured: list[tuple[BoundedPlan, BoundedPlan]] = []
        self._history: deque[Call] = deque(maxlen=REMEMBERED_CALLS)  # lifecycle calls since no slot was held

    @property
    def difference(self) -> str | None:
        """The difference that was found; None as long as there is none."""
        return self._found

    def _call(self, name: str, arguments: dict[str, Any]) -> Any:
        if self._found is None and name == "attend":
            if not self._is_due(arguments):
                return ask(self._manager, name, arguments).given()
            with self._order:
                return self._compared_attend(arguments)
        if self._found is not None or name in ("layer", "post_warmup_validate"):
            if name == "layer":
                self._forget_slots()  # whoever has them may write to them
            return ask(self._manager, name, arguments).given()
        with self._order:
            return self._compared(name, arguments)

    # The lifecycle.

    def _compared(self, name: str, arguments: dict[str, Any]) -> Any:
        before = list(self._follow_request(arguments["rid"])) if name == "export_request" else []
        judged = ask(self._manager, name, arguments)
        reference = ask(self._reference, name, arguments)
        message = next(iter([*before, *self._differences(name, arguments, judged, reference)]), None)
        if message is not None:
            calls = [*self._history, *self._slots_for(name, arguments), Call(name, arguments, judged, reference)]
            self._report(name, arguments, message, calls)
            return judged.given()
        self._history.append(Call(name, _without_entries(arguments)))
        if name == "plan" and judged.error is None:
            self._remember(judged.value, reference.value, arguments["ctx"])
        if name in _MOVES:
            self._slot_of.clear()
        if name in _ENDS and self._reference.free_slots == self.config.max_slots:
            self._history.clear()
        return judged.given()

    def _differences(self, name: str, arguments: Mapping[str, Any], judged: Answer, reference: Answer) -> Iterator[str]:
        yield from differences("error", reference.error, judged.error, _NAMES)
        left, right = reference.value, judged.value
        if isinstance(left, BoundedPlan) and isinstance(right, BoundedPlan) and self.device.type != "cpu":
            # Their tables wait for an attend: a look at one now would hold the engine up until its device is idle.
            left, right = left._replace(table=_NO_LINES), right._replace(table=_NO_LINES)
        if name == "export_request" and arguments["rid"] not in self._slot_of:
            left, right = (_without_entries(state) if isinstance(state, Mapping) else state for state in (left, right))
        yield from differences("result", left, right, _NAMES)

    def _remember(self, judged: BoundedPlan, reference: BoundedPlan, ctx: StepContext) -> None:
        (self._captured if ctx.capture else self._plans).append((judged, reference))
        if ctx.slot_lease is not None:
            self._forget_slots()
        if not ctx.capture:
            self._slot_of.update({rid: row[0] for rid, row in zip(ctx.row_ids, judged.rows, strict=True)})

    # The slots.

    def _forget_slots(self) -> None:
        for slots in self._alike:
            slots.clear()

    def _follow(self, layer_idx: int, slots: list[int], when: str) -> Iterator[str]:
        """Compare the slots that both had alike; take over the others."""
        alike = self._alike[layer_idx]
        entries = self._manager.layer(layer_idx)[slots].cpu()
        mine = self._reference.layer(layer_idx)
        for slot, theirs in zip(slots, entries, strict=True):
            if slot in alike:
                yield from differences(f"layer({layer_idx})[{slot}] {when}", mine[slot], theirs, _NAMES)
            else:
                mine[slot] = theirs
                alike.add(slot)

    def _follow_request(self, rid: str) -> Iterator[str]:
        if rid in self._slot_of:
            for layer_idx in range(self.config.num_layers):
                yield from self._follow(layer_idx, [self._slot_of[rid]], "before it")

    def _slots_for(self, name: str, arguments: Mapping[str, Any]) -> Iterator[Call]:
        """The calls that put an exported request's slots in place."""
        if name == "export_request" and arguments["rid"] in self._slot_of:
            slot = self._slot_of[arguments["rid"]]
            for layer_idx in range(self.config.num_layers):
                yield _writes(layer_idx, [slot], self._reference.layer(layer_idx)[[slot]])

    # Attends.

    def _is_due(self, arguments: Mapping[str, Any]) -> bool:
        """Whether an attend is to be compared. One that is not leaves the reference's slots behind."""
        self._attends += 1
        if (self._attends - 1) % self._period == 0 and not self._capturing() and self._is_comparable(arguments):
            return True
        self._forget_slots()
        return False

    def _capturing(self) -> bool:
        return bool(self.device.type == "cuda" and torch.cuda.is_current_stream_capturing())

    def _is_comparable(self, arguments: Mapping[str, Any]) -> bool:
        """Whether the reference can be asked the same: not of tensors elsewhere, nor of the judged one's own slots."""
        return all(tensor.device == self.device for tensor in _tensors_in(arguments)) and not any(
            tensor.untyped_storage().data_ptr() == self._manager.layer(layer_idx).untyped_storage().data_ptr()
            for layer_idx in range(self.config.num_layers)
            for tensor in (arguments["k"], arguments["v"])
            if isinstance(tensor, Tensor)
        )

    @torch.no_grad()
    def _compared_attend(self, arguments: dict[str, Any]) -> Any:
        layer_idx = arguments["layer_idx"]
        given = {key: _on_host(value) for key, value in arguments.items()}
        plans = self._plans_of(arguments["plan"])
        slots = self._slots_in(layer_idx, plans)
        found = list(self._follow(layer_idx, slots, "before it")) if slots else []
        calls = [_writes(layer_idx, slots, self._reference.layer(layer_idx)[slots])] if slots else []
        if plans is not None:
            given["plan"] = plans[1]
            found += differences("plan", plans[1], plans[0], _NAMES)
        shown = {key: _on_host(value) for key, value in given.items()}
        judged = ask(self._manager, "attend", arguments)
        reference = ask(self._reference, "attend", given)
        found += differences("error", reference.error, judged.error, _NAMES)
        found += differences("result", reference.value, judged.value, _NAMES)
        calls.append(Call("attend", shown, judged, reference))
        if slots:
            after = [Answer(manager.layer(layer_idx)[slots].cpu()) for manager in (self._manager, self._reference)]
            calls.append(Call("read_slots", {"layer_idx": layer_idx, "slots": tuple(slots)}, *after))
            found += self._follow(layer_idx, slots, "after it")
        if found:
            self._report("attend", arguments, found[0], calls)
        return judged.given()

    def _plans_of(self, plan: Any) -> tuple[BoundedPlan, BoundedPlan] | None:
        """A plan of the judged manager, and the reference's of the same step or else a copy; None if it is none."""
        if plan is None:
            plan = ask(self._manager, "current", {}).value
        if not isinstance(plan, BoundedPlan):
            return None
        for pair in (*self._plans, *self._captured):
            if pair[0] is plan:
                return pair
        return plan, plan._replace(table=_on_host(plan.table))

    def _slots_in(self, layer_idx: Any, plans: tuple[BoundedPlan, BoundedPlan] | None) -> list[int]:
        """The slots that a plan names, by its table as it is now; none for a call that will be refused."""
        is_layer = isinstance(layer_idx, int) and 0 <= layer_idx < self.config.num_layers
        if plans is None or not is_layer or plans[0].table.ndim != 2:
            return []
        lines = plans[0].table[: len(plans[0].rows)].cpu()
        slots = {int(line[SLOT]) for line in lines if line.any()}
        return sorted(slots & set(range(self.config.max_slots)))

    # What is told of a difference.

    def _report(self, name: str, arguments: Mapping[str, Any], found: str, calls: list[Call]) -> None:
        words = ", ".join(f"{key}={told(value)}" for key, value in arguments.items() if value is not None)
        message = f"{name}({words}): {found}"
        if self._folder is not None:
            try:
                message += f"; to see it again: {write_repro(self._folder, message, self.config, calls)}"
            except Exception as error:  # the difference must be told whatever becomes of the folder
                message += f"; what shows it again could not be written: {error!r}"
        self._found = message
        if self._raises:
            raise Difference(message)
        _log.error(message)


def _writes(layer_idx: int, slots: list[int], entries: Tensor) -> Call:
    return Call("write_slots", {"layer_idx": layer_idx, "slots": tuple(slots), "entries": entries})


def _tensors_in(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    for item in value.values() if isinstance(value, Mapping) else value if isinstance(value, tuple) else ():
        yield from _tensors_in(item)


def _on_host(value: Any) -> Any:
    """A copy of a value in the host's memory: of a tensor, or of a tuple with some in it, a plan say."""
    if isinstance(value, Tensor):
        return value.detach().to("cpu", copy=True)
    if isinstance(value, BoundedPlan):
        return value._replace(table=_on_host(value.table))
    return tuple(map(_on_host, value)) if type(value) is tuple else value


def _without_entries(value: Any) -> Any:
    """A value to remember: tensors become zeros that take no memory, and a context lets go of its engine's plans."""
    if isinstance(value, Tensor):
        return torch.zeros((), dtype=value.dtype).expand(value.shape)
    if isinstance(value, StepContext):
        return replace(value, plan_results={})
    if isinstance(value, Mapping):
        return {key: _without_entries(item) for key, item in value.items()}
    return value
