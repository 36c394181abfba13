"""Every call of the interface, made through one method: what stands between an engine and its manager starts here."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from boundedkv.attend_checks import RowSource
from boundedkv.manager import BoundedKVManager
from boundedkv.plan import BoundedPlan
from boundedkv.step import AdmitOutcome, BoundedKVStep, GraphSlotSpec, StepContext


class Answer(NamedTuple):
    """What came of one call of one manager: a value or an error."""

    value: Any
    error: Exception | None = None

    def given(self) -> Any:
        """The value, returned; or the error, raised."""
        if self.error is not None:
            raise self.error
        return self.value


def ask(manager: Any, name: str, arguments: Mapping[str, Any]) -> Answer:
    """Make one call, or read one property, and keep what comes of it."""
    try:
        attribute = getattr(manager, name)
        return Answer(attribute(**arguments) if callable(attribute) else attribute)
    except Exception as error:
        return Answer(None, error)


@BoundedKVManager.register
class Wrapper(ABC):
    """A manager around a manager. To `isinstance` it is a `BoundedKVManager`.

    Its own attributes start with an underscore; all others are the wrapped manager's, to read and to set. `build`
    builds another manager of the wrapped one's class, not wrapped.
    """

    def __init__(self, manager: BoundedKVManager) -> None:
        """Wrap a manager."""
        self._manager = manager

    @abstractmethod
    def _call(self, name: str, arguments: dict[str, Any]) -> Any:
        """Make one call of the interface, a property among them; return what it returns, raise what it raises."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return getattr(self._manager, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name.startswith("_"):
            super().__setattr__(name, value)
        else:
            setattr(self._manager, name, value)

    def ingest_request(self, rid: str, overrides: Mapping[str, Any] | None = None) -> None:
        """The call of this name."""
        self._call("ingest_request", {"rid": rid, "overrides": overrides})

    def admit(self, step: BoundedKVStep, ctx: StepContext) -> AdmitOutcome:
        """The call of this name."""
        outcome: AdmitOutcome = self._call("admit", {"step": step, "ctx": ctx})
        return outcome

    def rollback_admit(self, step: BoundedKVStep, ctx: StepContext) -> None:
        """The call of this name."""
        self._call("rollback_admit", {"step": step, "ctx": ctx})

    def plan(self, step: BoundedKVStep, ctx: StepContext) -> BoundedPlan:
        """The call of this name."""
        plan: BoundedPlan = self._call("plan", {"step": step, "ctx": ctx})
        return plan

    @property
    def current(self) -> BoundedPlan:
        """The property of this name."""
        plan: BoundedPlan = self._call("current", {})
        return plan

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
        """The call of this name."""
        arguments = {"layer_idx": layer_idx, "q": q, "k": k, "v": v, "source": source, "plan": plan}
        more = {"rel_bias": rel_bias, "ieee": ieee, "row_source": row_source}
        out: Tensor = self._call("attend", arguments | more)
        return out

    def commit(self, step: BoundedKVStep, ctx: StepContext) -> None:
        """The call of this name."""
        self._call("commit", {"step": step, "ctx": ctx})

    def remove_request(self, rid: str) -> None:
        """The call of this name."""
        self._call("remove_request", {"rid": rid})

    def reset_request(self, rid: str, free: bool = False) -> None:
        """The call of this name."""
        self._call("reset_request", {"rid": rid, "free": free})

    def rewind_request(self, rid: str, written: int) -> None:
        """The call of this name."""
        self._call("rewind_request", {"rid": rid, "written": written})

    def export_request(self, rid: str) -> dict[str, Any]:
        """The call of this name."""
        state: dict[str, Any] = self._call("export_request", {"rid": rid})
        return state

    def import_request(self, rid: str, state: Mapping[str, Any]) -> None:
        """The call of this name."""
        self._call("import_request", {"rid": rid, "state": state})

    def holds(self, rid: str) -> bool:
        """The call of this name."""
        held: bool = self._call("holds", {"rid": rid})
        return held

    @property
    def free_slots(self) -> int:
        """The property of this name."""
        free: int = self._call("free_slots", {})
        return free

    def layer(self, layer_idx: int) -> Tensor:
        """The call of this name."""
        slots: Tensor = self._call("layer", {"layer_idx": layer_idx})
        return slots

    def build_accelerator_graph_buffers(self, slots: Sequence[GraphSlotSpec], max_bs: int, max_seq_len: int) -> None:
        """The call of this name."""
        self._call("build_accelerator_graph_buffers", {"slots": slots, "max_bs": max_bs, "max_seq_len": max_seq_len})

    def post_warmup_validate(self) -> None:
        """The call of this name."""
        self._call("post_warmup_validate", {})

    def cleanup(self) -> None:
        """The call of this name."""
        self._call("cleanup", {})
