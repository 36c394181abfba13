"""How a trace writes a call's values as JSON, and reads them back: `docs/traces.md` tells the forms."""

from __future__ import annotations

import builtins
import dataclasses
import hashlib
import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from boundedkv.config import BoundedKVConfig, SinkWindow
from boundedkv.plan import ROW_INTS, BoundedPlan, decode, encode
from boundedkv.step import (
    AdmitOutcome,
    AdmitRuntimeError,
    AllocationFailed,
    BoundedKVStep,
    BucketKey,
    GraphSlotSpec,
    Segment,
    SlotLease,
    StepContext,
    StreamPosition,
)

Json = Any

_RECORDS = {
    kind.__name__: kind for kind in (Segment, StreamPosition, BucketKey, SlotLease, GraphSlotSpec, AdmitOutcome)
}
_ERRORS = {kind.__name__: kind for kind in (AllocationFailed, AdmitRuntimeError)}
_CONTEXT = [field.name for field in dataclasses.fields(StepContext) if field.name != "plan_results"]
_STEP = [field.name for field in dataclasses.fields(BoundedKVStep)]
_BOUNDS = ("max_retained", "max_span", "reads_source", "reads_row_source")


class Tabulated(tuple[SinkWindow, ...]):
    """A retention by source length, as a trace holds it: one `SinkWindow` for each."""

    def __call__(self, source_len: int) -> SinkWindow:
        """The retention of a source length."""
        return self[source_len]


def written_config(config: BoundedKVConfig) -> dict[str, Json]:
    """A config as JSON: its fields, the retention tabulated by source length, or once where it is the same for all."""
    fields = {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}
    kept = config.retentions
    fields["retention"] = [list(each) for each in (kept if len(set(kept)) > 1 else kept[:1])]
    fields["dtype"] = str(config.dtype).removeprefix("torch.")
    return fields


def read_config(fields: Mapping[str, Json]) -> BoundedKVConfig:
    """The config that `written_config` wrote."""
    kept = Tabulated(SinkWindow(*each) for each in fields["retention"])
    retention = kept[0] if len(kept) == 1 else kept
    return BoundedKVConfig(**{**fields, "retention": retention, "dtype": getattr(torch, fields["dtype"])})


class Writer:
    """Writes values as JSON. Tensors are kept aside, each content once; so are steps, which count by identity.

    Attributes:
        tensors: the tensors by name, on the host.
        steps: the steps as JSON, in the order they came.
    """

    def __init__(self) -> None:
        """Start with nothing written."""
        self.tensors: dict[str, Tensor] = {}
        self.steps: list[Json] = []
        self._names: dict[bytes, str] = {}  # digest -> the name of the tensor that has it
        self._numbers: dict[int, int] = {}  # id of a step -> its index
        self._plans: dict[int, int] = {}  # id of a plan -> the call that returned it
        self._alive: list[Any] = []  # those whose ids are kept

    def remember_plan(self, plan: BoundedPlan, call: int) -> None:
        """From here on, an argument that is this very plan is written as the result of a call."""
        self._plans[id(plan)] = call
        self._alive.append(plan)

    def argument(self, place: str, value: Any) -> Json:
        """An argument as JSON; a plan that a call returned is written as that call's number."""
        if isinstance(value, BoundedPlan) and id(value) in self._plans:
            return {"type": "plan_of_call", "call": self._plans[id(value)]}
        return self.value(place, value)

    def value(self, place: str, value: Any) -> Json:
        """A value as JSON.

        Args:
            place: what its tensors are called.
            value: the value.

        Raises:
            TypeError: a trace cannot hold it.
        """
        if value is None or isinstance(value, bool):
            return value
        if isinstance(value, int):
            return int(value)
        if isinstance(value, str):
            return str(value)
        if isinstance(value, float):
            return value if math.isfinite(value) else {"type": "float", "value": str(value)}
        if isinstance(value, Tensor):
            return {"type": "tensor", "name": self._tensor(place, value)}
        if isinstance(value, BoundedPlan):
            return self._plan(place, value)
        if isinstance(value, BoundedKVStep):
            return {"type": "step", "index": self._step(place, value)}
        if isinstance(value, StepContext):
            return {"type": "StepContext", **self._fields(place, value, _CONTEXT)}
        if type(value).__name__ in _RECORDS and type(value) is _RECORDS[type(value).__name__]:
            return {"type": type(value).__name__, **self._fields(place, value, value._fields)}
        if isinstance(value, Exception):
            attributes = self._items(place, vars(value))
            return {"type": "error", "class": type(value).__name__, "text": str(value), "attributes": attributes}
        if isinstance(value, Mapping) and all(isinstance(key, str) for key in value):
            return {"type": "dict", "items": self._items(place, value)}
        if type(value) in (tuple, list):
            items = [self.value(f"{place}.{i}", item) for i, item in enumerate(value)]
            return items if type(value) is tuple else {"type": "list", "items": items}
        raise TypeError(
            f"{place} is {type(value).__name__}, which a trace cannot hold: docs/traces.md lists what it can"
        )

    def _fields(self, place: str, value: Any, names: Any) -> dict[str, Json]:
        return {name: self.value(f"{place}.{name}", getattr(value, name)) for name in names}

    def _items(self, place: str, value: Mapping[str, Any]) -> dict[str, Json]:
        return {key: self.value(f"{place}.{key}", item) for key, item in value.items()}

    def _tensor(self, place: str, value: Tensor) -> str:
        host = value.detach().resolve_neg().resolve_conj().to("cpu", copy=True).contiguous()
        digest = hashlib.sha256(f"{host.dtype} {list(host.shape)} ".encode())
        if host.numel():
            digest.update(host.reshape(-1).view(torch.uint8).numpy().data)
        name = self._names.setdefault(digest.digest(), place)
        self.tensors.setdefault(name, host)
        return name

    def _plan(self, place: str, plan: BoundedPlan) -> Json:
        bounds = {name: getattr(plan, name) for name in _BOUNDS}
        table = self.value(f"{place}.table", plan.table)
        return {"type": "plan", "table": table, "rows": encode(plan.rows).tolist(), **bounds}

    def _step(self, place: str, step: BoundedKVStep) -> int:
        written = self._fields(place, step, _STEP)
        index = self._numbers.setdefault(id(step), len(self.steps))
        if index == len(self.steps):
            self.steps.append(written)
            self._alive.append(step)
        elif self.steps[index] != written:
            raise ValueError(f"{place} has changed since it was recorded first, but a step should stay as it is")
        return index


class Reader:
    """Reads the values that a `Writer` wrote.

    Args:
        tensors: the tensors by name.
        steps: the steps as JSON.
        device: where tensors are put.

    Attributes:
        plans: number of a call -> the plan that it returned this time; whoever makes the calls fills it in.
    """

    def __init__(self, tensors: Mapping[str, Tensor], steps: list[Json], device: torch.device | str) -> None:
        """Start with no plan known."""
        self.plans: dict[int, BoundedPlan] = {}
        self._tensors, self._device = tensors, device
        self._steps = [BoundedKVStep(**{name: self.value(step[name]) for name in _STEP}) for step in steps]

    def value(self, written: Json) -> Any:
        """The value that was written."""
        if isinstance(written, list):
            return tuple(map(self.value, written))
        if not isinstance(written, dict):
            return written
        kind = written["type"]
        fields = {name: item for name, item in written.items() if name != "type"}
        if kind == "float":
            return float(fields["value"])
        if kind == "tensor":
            return self._tensors[fields["name"]].to(self._device, copy=True)
        if kind == "plan_of_call":
            return self.plans[fields["call"]]
        if kind == "plan":
            rows = decode(np.array(fields["rows"], dtype=np.int32).reshape(-1, ROW_INTS))
            return BoundedPlan(**{**fields, "table": self.value(fields["table"]), "rows": rows})
        if kind == "step":
            return self._steps[fields["index"]]
        if kind == "list":
            return [self.value(item) for item in fields["items"]]
        if kind == "dict":
            return {key: self.value(item) for key, item in fields["items"].items()}
        if kind == "error":
            return self._error(fields)
        record = StepContext if kind == "StepContext" else _RECORDS[kind]
        return record(**{name: self.value(item) for name, item in fields.items()})

    def _error(self, fields: Mapping[str, Json]) -> Exception:
        name = fields["class"]
        kind: Any = _ERRORS.get(name) or getattr(builtins, name, None) or type(name, (Exception,), {})
        error: Exception = kind.__new__(kind, fields["text"])  # as its own arguments are not known
        vars(error).update({key: self.value(item) for key, item in fields["attributes"].items()})
        return error
