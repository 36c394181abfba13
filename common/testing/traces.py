"""Traces: what a manager was asked and what it answered, in a file that any language can read.

`record` writes one, `replay` holds a manager to one. The file is a safetensors file; `docs/traces.md` is its format.
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType, TracebackType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from boundedkv.config import BoundedKVConfig
from boundedkv.manager import BoundedKVManager
from boundedkv.numerics import NUMERICS_VERSION
from boundedkv.plan import PLAN_VERSION
from boundedkv.testing.compare import differences, told
from boundedkv.testing.differential import Difference
from boundedkv.testing.trace_values import Json, Reader, Writer, read_config, written_config
from boundedkv.testing.wrapper import Answer, Wrapper, ask

FORMAT = "boundedkv-trace"
FORMAT_VERSION = 1
METADATA_KEY = "boundedkv_trace"

_VERSIONS = {"format_version": FORMAT_VERSION, "numerics_version": NUMERICS_VERSION, "plan_version": PLAN_VERSION}


class Slots:
    """The two calls of a trace that the interface lacks: they read and write slots through `layer`.

    Args:
        manager: whose slots.
    """

    def __init__(self, manager: BoundedKVManager) -> None:
        """Of this manager."""
        self._manager = manager

    def read_slots(self, layer_idx: int, slots: Sequence[int]) -> Tensor:
        """A copy of some slots of a layer, [len(slots), rows, H, cap, 2D]."""
        return self._manager.layer(layer_idx)[list(slots)]

    @torch.no_grad()
    def write_slots(self, layer_idx: int, slots: Sequence[int], entries: Tensor) -> None:
        """Overwrite some slots of a layer with entries of that shape, or with a single one (of shape [])."""
        self._manager.layer(layer_idx)[list(slots)] = entries.to(self._manager.device)


_SLOT_CALLS = ("read_slots", "write_slots")


class Trace(NamedTuple):
    """A trace as read.

    Attributes:
        config: the config of the manager that was recorded.
        calls: the calls in order, as JSON; call numbers count from 1.
        steps: the steps that calls refer to, as JSON.
        tensors: the tensors by name, on the host.
    """

    config: BoundedKVConfig
    calls: list[Json]
    steps: list[Json]
    tensors: dict[str, Tensor]


class TraceWriter:
    """Gathers calls in the host's memory, and writes them to a file at once.

    Args:
        config: the config of the manager that is called.
    """

    def __init__(self, config: BoundedKVConfig) -> None:
        """Start without a call."""
        self._safetensors = require_safetensors()
        self._config = config
        self._values = Writer()
        self._calls: list[Json] = []

    def arguments(self, name: str, arguments: Mapping[str, Any]) -> Json:
        """The next call as JSON, as yet without a result; to be made before the call, which may change memory.

        Raises:
            TypeError: a trace cannot hold an argument.
        """
        place = f"{len(self._calls) + 1}."
        given = {key: value for key, value in arguments.items() if value is not None}
        return {
            "call": name,
            "arguments": {key: self._values.argument(place + key, value) for key, value in given.items()},
        }

    def add(self, call: Json, answer: Answer | None = None) -> None:
        """Add the next call, and what came of it; None if that is not to be compared."""
        number = len(self._calls) + 1
        if answer is not None and answer.error is not None:
            call = call | {"error": self._values.value(f"{number}.error", answer.error)}
        elif answer is not None:
            call = call | {"result": self._values.value(f"{number}.result", answer.value)}
        if call["call"] == "plan" and answer is not None and answer.error is None:
            self._values.remember_plan(answer.value, number)
        self._calls.append(call)

    def save(self, path: str | Path) -> None:
        """Write the file: whole, or not at all."""
        head = {"format": FORMAT, **_VERSIONS, "config": written_config(self._config)}
        content = {**head, "steps": self._values.steps, "calls": self._calls}
        text = json.dumps(content, allow_nan=False, separators=(",", ":"))
        path = Path(path)
        unfinished = path.with_name(f".{path.name}.{os.getpid()}.unfinished")
        try:
            self._safetensors.torch.save_file(self._values.tensors, unfinished, metadata={METADATA_KEY: text})
            os.replace(unfinished, path)
        finally:
            unfinished.unlink(missing_ok=True)


class Recording(Wrapper):
    """A manager whose calls are written down. Made by `record`; writes its file when it is closed."""

    def __init__(self, manager: BoundedKVManager, path: str | Path) -> None:
        """See `record`."""
        free = manager.free_slots
        if free != manager.config.max_slots:
            raise ValueError(
                f"manager has {free} free slots, but should have all {manager.config.max_slots}: "
                "a replay starts with none held"
            )
        super().__init__(manager)
        self._path = Path(path)
        self._writer: TraceWriter | None = TraceWriter(manager.config)
        self._order = threading.RLock()
        for layer_idx in range(manager.config.num_layers):
            layer = enumerate(manager.layer(layer_idx))
            slots = [slot for slot, entries in layer if entries.contiguous().view(torch.uint8).any()]
            if slots:
                self.write_slots(layer_idx, slots, manager.layer(layer_idx)[slots])

    def _call(self, name: str, arguments: dict[str, Any]) -> Any:
        with self._order:
            if self._writer is None:
                return ask(self._manager, name, arguments).given()
            if self._manager.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
                raise RuntimeError(f"{name} is called while a graph is captured, which cannot be recorded")
            call = self._writer.arguments(name, arguments)
            answer = _make_call(self._manager, name, arguments)
            self._writer.add(call, answer)
            return answer.given()

    def read_slots(self, layer_idx: int, slots: Sequence[int]) -> Tensor:
        """Some slots of a layer, copied, compared by a replay: [len(slots), rows, H, cap, 2D]."""
        entries: Tensor = self._call("read_slots", {"layer_idx": layer_idx, "slots": tuple(slots)})
        return entries

    def write_slots(self, layer_idx: int, slots: Sequence[int], entries: Tensor) -> None:
        """Overwrite some slots of a layer, in a replay too; `entries` of their shape, or a single one of shape []."""
        self._call("write_slots", {"layer_idx": layer_idx, "slots": tuple(slots), "entries": entries})

    def close(self) -> None:
        """Write the file. Harmless when repeated; later calls go to the manager and are not recorded."""
        with self._order:
            if self._writer is not None:
                self._writer.save(self._path)
                self._writer = None

    def __enter__(self) -> Recording:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        self.close()


def record(manager: BoundedKVManager, path: str | Path) -> Recording:
    """Write down what a manager is asked and what it answers.

    The tensors stay in the host's memory until the file is written. The calls are those of the one manager: `build`
    is not recorded, and what a replayed graph does is seen by nobody.

    Args:
        manager: any manager none of whose slots is held.
        path: the file; it appears, whole, when the recording is closed or its `with` block is left, by an error too.

    Returns:
        The manager's own calls, recorded, and `read_slots`, `write_slots` and `close`.

    Raises:
        ValueError: a request holds a slot.
        ImportError: safetensors is not installed.
        TypeError: (from a call) an argument that a trace cannot hold; the call was not made.
        RuntimeError: (from a call) a graph is being captured; the call was not made.

    Examples:
        >>> import tempfile
        >>> import torch
        >>> from boundedkv import BoundedKVConfig, Session, SinkWindow, build
        >>> pool = BoundedKVConfig(1, 1, 8, SinkWindow(sink=2, window=4))
        >>> folder = tempfile.TemporaryDirectory()
        >>> file = Path(folder.name, "one.safetensors")
        >>> with record(build(pool, backend="reference"), file) as manager:
        ...     with Session(manager).step({"a": 3}) as step:
        ...         out = step.attend(0, *torch.randn(3, 1, 1, 3, 8))
        >>> replay(file, build(pool, backend="reference"))  # admit, plan, attend, commit
        4
        >>> folder.cleanup()
    """
    return Recording(manager, path)


def read_trace(path: str | Path) -> Trace:
    """Read a trace.

    Args:
        path: the file.

    Returns:
        Its content.

    Raises:
        ValueError: the file is not a trace, or one of another format, numerics or plan version.
        ImportError: safetensors is not installed.
    """
    safetensors = require_safetensors()
    try:
        with safetensors.safe_open(path, framework="pt") as file:
            text = (file.metadata() or {}).get(METADATA_KEY)
    except safetensors.SafetensorError as error:
        raise ValueError(f"{path} should be a safetensors file, but: {error}") from error
    if text is None:
        raise ValueError(f"{path} has no {METADATA_KEY} in its metadata, but should be a trace")
    content = json.loads(text)
    for name, expected in {"format": FORMAT, **_VERSIONS}.items():
        if content.get(name) != expected:
            raise ValueError(f"{path} has {name} {content.get(name)!r}, but should have {expected!r}: record it anew")
    tensors = safetensors.torch.load_file(path)
    return Trace(read_config(content["config"]), content["calls"], content["steps"], tensors)


def replay(path: str | Path, manager: BoundedKVManager) -> int:
    """Make the calls of a trace, and compare all that comes of them with what it says.

    Args:
        path: the trace.
        manager: a manager with the config of the trace (see `read_trace`) and no slot held, on any device.

    Returns:
        How many calls were made, all of them answered alike.

    Raises:
        Difference: the first difference; the message names the call's number, the place and both values.
        ValueError: the file is no trace of these versions, or the manager is not fit for it.
        ImportError: safetensors is not installed.
    """
    trace = read_trace(path)
    _check_fit(trace, manager)
    reader = Reader(trace.tensors, trace.steps, manager.device)
    names = ("the trace", type(manager).__name__)
    for number, call in enumerate(trace.calls, start=1):
        name = call["call"]
        arguments = {key: reader.value(value) for key, value in call["arguments"].items()}
        answer = _make_call(manager, name, arguments)
        if name == "plan" and answer.error is None:
            reader.plans[number] = answer.value
        if "result" in call or "error" in call:
            words = ", ".join(f"{key}={told(value)}" for key, value in arguments.items())
            expected = Answer(reader.value(call.get("result")), reader.value(call.get("error")))
            for difference in (
                *differences("error", expected.error, answer.error, names),
                *differences("result", expected.value, answer.value, names),
            ):
                raise Difference(f"{path}: call {number}, {name}({words}): {difference}") from answer.error
    return len(trace.calls)


def _check_fit(trace: Trace, manager: BoundedKVManager) -> None:
    expected, got = written_config(trace.config), written_config(manager.config)
    for name, value in expected.items():
        if got[name] != value:
            raise ValueError(f"manager's config has {name} {got[name]!r}, but should have {value!r}, as in the trace")
    free = manager.free_slots
    if free != manager.config.max_slots:
        raise ValueError(f"manager has {free} free slots, but should have all {manager.config.max_slots}")


def _make_call(manager: BoundedKVManager, name: str, arguments: Mapping[str, Any]) -> Answer:
    return ask(Slots(manager) if name in _SLOT_CALLS else manager, name, arguments)


def require_safetensors() -> ModuleType:
    """The package, imported where it is needed first: everything else works without it."""
    try:
        import safetensors
        import safetensors.torch
    except ImportError as error:
        raise ImportError("traces are safetensors files: pip install 'boundedkv[traces]'") from error
    return safetensors
