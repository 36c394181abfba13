"""Two managers driven by the same calls; everything that can be seen of them is compared after each.

A `Pair` has the calls of `BoundedKVManager` under their own names. Its left manager is the oracle: the pair returns
what that one returns and raises what it raises. Nothing is compared with a tolerance.

A new call of the interface becomes one method here, marked `case`: `CASES` are the calls that have one.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from boundedkv.attend_checks import RowSource
from boundedkv.config import BoundedKVSpec
from boundedkv.manager import BoundedKVManager
from boundedkv.plan import BoundedPlan
from boundedkv.resource import EngineResourceInfo
from boundedkv.step import AdmitOutcome, BoundedKVStep, GraphSlotSpec, StepContext
from boundedkv.testing.compare import differences, told
from boundedkv.testing.wrapper import ask

CASES: set[str] = set()
REMEMBERED_PLANS = 8

_Method = TypeVar("_Method", bound=Callable[..., Any])


class Difference(AssertionError):
    """Two managers differ. The message names the call, the place, and what each of them has there."""


def case(method: _Method) -> _Method:
    """Mark a method of `Pair` as the differential case of the call of the same name."""
    CASES.add(method.__name__)
    return method


class Pair:
    """Two managers as one.

    A plan that the pair returned stands for both managers' own. Only the last `REMEMBERED_PLANS` do; an older or
    foreign one is handed to both as it is. Tensors are handed over in copies, on each manager's device, strides and
    the memory around them included; that a call leaves this memory alone is checked too.

    Args:
        left: the oracle.
        right: the manager that is held to it, with an equal config.

    Attributes:
        left: the oracle.
        right: the other manager.
        calls: how many calls were compared.

    Raises:
        Difference: from every call, where the two differ in what they return or raise, in the state that public calls
            show, or in the slots; or where one of them changed an argument.

    Examples:
        >>> from boundedkv import BoundedKVConfig, SinkWindow, build
        >>> from boundedkv import BoundedKVStep, Segment, StepContext, StreamPosition
        >>> config = BoundedKVConfig(num_layers=1, num_heads=1, head_dim=4, retention=SinkWindow(1, 2))
        >>> pair = Pair(build(config, backend="reference"), build(config, backend="reference"))
        >>> step, ctx = BoundedKVStep((Segment("a", 1),), {"a": StreamPosition(0, 0)}), StepContext(("a",))
        >>> pair.admit(step, ctx).ok, pair.free_slots, pair.calls
        (True, 31, 2)
    """

    def __init__(self, left: BoundedKVManager, right: BoundedKVManager) -> None:
        """Compare the managers as they are given."""
        self.left, self.right = left, right
        self.calls = 0
        names = type(left).__name__, type(right).__name__
        self._names = names if names[0] != names[1] else ("left", "right")
        self._request_ids: dict[str, None] = {}  # those seen, in order
        self._plans: deque[tuple[BoundedPlan, BoundedPlan]] = deque(maxlen=REMEMBERED_PLANS)
        self._refuse("the managers as given", differences("config", left.config, right.config, self._names))
        self._refuse("the managers as given", self._in_state())

    def fill(self, value: float, slots: Iterable[int] | None = None) -> None:
        """Overwrite slots of both managers, with NaN say, to show that nobody reads what no position says was written.

        Args:
            value: what every element becomes.
            slots: which slots; None means all.
        """
        numbers = list(range(self.left.config.max_slots) if slots is None else slots)
        for manager in (self.left, self.right):
            for layer_idx in range(manager.config.num_layers):
                manager.layer(layer_idx)[numbers] = value

    # The interface's calls.

    @case
    def build(self, spec: BoundedKVSpec, info: EngineResourceInfo) -> Pair:
        """Build a manager of each one's class, each on its own device, and pair them."""
        return Pair(*self._both("build", spec=spec, info=info))

    @case
    def ingest_request(self, rid: str, overrides: Mapping[str, Any] | None = None) -> None:
        """The call of this name on both."""
        self._both("ingest_request", rid=rid, overrides=overrides)

    @case
    def admit(self, step: BoundedKVStep, ctx: StepContext) -> AdmitOutcome:
        """The call of this name on both."""
        outcome: AdmitOutcome = self._both("admit", step=step, ctx=ctx)[0]
        return outcome

    @case
    def rollback_admit(self, step: BoundedKVStep, ctx: StepContext) -> None:
        """The call of this name on both."""
        self._both("rollback_admit", step=step, ctx=ctx)

    @case
    def plan(self, step: BoundedKVStep, ctx: StepContext) -> BoundedPlan:
        """The call of this name on both."""
        plan: BoundedPlan = self._both("plan", step=step, ctx=ctx)[0]
        return plan

    @property
    @case
    def current(self) -> BoundedPlan:
        """The property of this name of both."""
        plan: BoundedPlan = self._both("current")[0]
        return plan

    @case
    def attend(
        self,
        layer_idx: int,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        source: Tensor | None = None,
        plan: BoundedPlan | None = None,
        rel_bias: Tensor | None = None,
        ieee: bool = False,
        row_source: RowSource | None = None,
    ) -> Tensor:
        """The call of this name on both."""
        optional = {"source": source, "plan": plan, "rel_bias": rel_bias, "ieee": ieee, "row_source": row_source}
        out: Tensor = self._both("attend", layer_idx=layer_idx, q=q, k=k, v=v, **optional)[0]
        return out

    @case
    def commit(self, step: BoundedKVStep, ctx: StepContext) -> None:
        """The call of this name on both."""
        self._both("commit", step=step, ctx=ctx)

    @case
    def remove_request(self, rid: str) -> None:
        """The call of this name on both."""
        self._both("remove_request", rid=rid)

    @case
    def reset_request(self, rid: str, free: bool = False) -> None:
        """The call of this name on both."""
        self._both("reset_request", rid=rid, free=free)

    @case
    def rewind_request(self, rid: str, written: int) -> None:
        """The call of this name on both."""
        self._both("rewind_request", rid=rid, written=written)

    @case
    def export_request(self, rid: str) -> dict[str, Any]:
        """The call of this name on both."""
        state: dict[str, Any] = self._both("export_request", rid=rid)[0]
        return state

    @case
    def import_request(self, rid: str, state: Mapping[str, Any]) -> None:
        """The call of this name on both: what the left manager exported is imported by the right one too."""
        self._both("import_request", rid=rid, state=state)

    @case
    def holds(self, rid: str) -> bool:
        """The call of this name on both."""
        held: bool = self._both("holds", rid=rid)[0]
        return held

    @property
    @case
    def free_slots(self) -> int:
        """The property of this name of both."""
        free: int = self._both("free_slots")[0]
        return free

    @case
    def layer(self, layer_idx: int) -> Tensor:
        """The call of this name on both; the left one's slots are returned, to be read only: see `fill`."""
        slots: Tensor = self._both("layer", layer_idx=layer_idx)[0]
        return slots

    @case
    def build_accelerator_graph_buffers(self, slots: Sequence[GraphSlotSpec], max_bs: int, max_seq_len: int) -> None:
        """The call of this name on both."""
        self._both("build_accelerator_graph_buffers", slots=slots, max_bs=max_bs, max_seq_len=max_seq_len)

    @case
    def post_warmup_validate(self) -> None:
        """The call of this name on both."""
        self._both("post_warmup_validate")

    @case
    def cleanup(self) -> None:
        """The call of this name on both."""
        self._both("cleanup")

    # How a call is made and compared.

    def _both(self, name: str, **arguments: Any) -> tuple[Any, Any]:
        """Make one call on both managers and compare; returns what they return, or raises what the left one raises."""
        self.calls += 1
        words = ", ".join(f"{key}={told(value)}" for key, value in arguments.items() if value is not None)
        call = f"call {self.calls}, {name}({words})"
        self._request_ids.update(dict.fromkeys(_ids_in(arguments)))
        answers = []
        for side, manager in enumerate((self.left, self.right)):
            memories: list[tuple[str, Tensor, Tensor]] = []
            handed = {key: self._handed(key, value, side, memories) for key, value in arguments.items()}
            answers.append(ask(manager, name, handed))
            for key, given, copy in memories:
                self._refuse(call, differences(f"bytes of {key}", given, copy, ("given", f"after {self._names[side]}")))
        left, right = answers
        self._refuse(call, differences("error", left.error, right.error, self._names), left.error or right.error)
        self._refuse(call, self._compared(name, arguments, left.value, right.value))
        if name == "plan" and left.error is None:
            self._plans.append((left.value, right.value))
        self._refuse(call, self._in_state())
        if left.error is not None:
            raise left.error
        return left.value, right.value

    def _compared(self, name: str, arguments: dict[str, Any], left: Any, right: Any) -> Iterator[str]:
        """Where two results differ."""
        return differences("result", left, right, self._names)

    def _refuse(self, call: str, found: Iterator[str], cause: Exception | None = None) -> None:
        for difference in found:
            raise Difference(f"{call}: {difference}") from cause

    def _handed(self, place: str, value: Any, side: int, memories: list[tuple[str, Tensor, Tensor]]) -> Any:
        """An argument as one manager gets it. Adds the memory of its tensors, as given and as handed over."""
        device = (self.left, self.right)[side].device
        if isinstance(value, BoundedPlan):
            for plans in self._plans:
                if plans[0] is value:
                    return plans[side]
            return value._replace(table=self._handed(f"{place}.table", value.table, side, memories))
        if isinstance(value, EngineResourceInfo):
            return replace(value, device=device)
        if type(value) in (tuple, list):
            items = (self._handed(f"{place}[{i}]", item, side, memories) for i, item in enumerate(value))
            return type(value)(items)
        if type(value) is dict:
            return {key: self._handed(f"{place}[{key!r}]", item, side, memories) for key, item in value.items()}
        if not isinstance(value, Tensor) or value.device != self.left.device:
            return value
        given = torch.empty(0, dtype=torch.uint8, device=value.device).set_(value.untyped_storage())
        copy = given.to(device, copy=True)
        memories.append((place, given, copy))
        like = torch.empty(0, dtype=value.dtype, device=device)
        return like.set_(copy.untyped_storage(), value.storage_offset(), value.shape, value.stride())

    def _in_state(self) -> Iterator[str]:
        """Where the managers differ in what public calls show of them."""
        probes: list[tuple[str, dict[str, Any]]] = [("free_slots", {}), ("current", {})]
        probes += [("holds", {"rid": rid}) for rid in self._request_ids]
        probes += [("layer", {"layer_idx": layer_idx}) for layer_idx in range(self.left.config.num_layers)]
        for name, arguments in probes:
            place = f"then {name}({', '.join(map(repr, arguments.values()))})" if arguments else f"then {name}"
            left, right = ask(self.left, name, arguments), ask(self.right, name, arguments)
            yield from differences(f"{place} error", left.error, right.error, self._names)
            yield from differences(place, left.value, right.value, self._names)
        for back, plans in enumerate(reversed(self._plans)):
            left_lines, right_lines = (plan.table[: len(plan.rows)] for plan in plans)
            yield from differences(f"then table of plan -{back + 1}", left_lines, right_lines, self._names)


def _ids_in(arguments: Mapping[str, Any]) -> Iterator[str]:
    """The requests that a call names."""
    for value in arguments.values():
        if isinstance(value, BoundedKVStep):
            named: Iterable[Any] = (getattr(segment, "request_id", None) for segment in value.segments or ())
        elif isinstance(value, StepContext):
            named = value.row_ids or ()
        else:
            named = (value,)
        yield from (rid for rid in named if isinstance(rid, str))
