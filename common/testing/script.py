"""The calls that were made on a pair: kept, told as Python, and made again on a fresh manager."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from boundedkv.config import BoundedKVConfig, SinkWindow
from boundedkv.manager import BoundedKVManager
from boundedkv.plan import BoundedPlan
from boundedkv.step import BoundedKVStep, Segment, StepContext, StreamPosition
from boundedkv.testing.compare import told
from boundedkv.testing.differential import Difference, Pair
from boundedkv.testing.samples import Sample, made

__all__ = ["ByLength", "Call", "RecordedPair", "Result", "Sample", "fill", "play", "script_told"]

_ASKING = ("current", "free_slots", "holds", "layer")


class ByLength(tuple[SinkWindow, ...]):
    """A retention that depends on the source length: its entries by turns."""

    def __call__(self, source_len: int) -> SinkWindow:
        """The retention of a source length."""
        return self[source_len % len(self)]


class Call(NamedTuple):
    """One call.

    Attributes:
        name: of the interface; "fill" overwrites the slots, see `fill`.
        arguments: as they were given, a `Sample` in place of a tensor, a `Result` in place of an earlier result.
    """

    name: str
    arguments: dict[str, Any]


class Result(NamedTuple):
    """What an earlier call gave.

    Attributes:
        number: the call, counted from 0.
        changes: fields of it that were replaced.
    """

    number: int
    changes: tuple[tuple[str, Any], ...] = ()


class RecordedPair(Pair):
    """A pair that keeps its calls, those that failed included.

    Attributes:
        script: the calls, in order, but for those that only ask.
        results: what each of them gave of the left manager; None for an error.
    """

    def __init__(self, left: BoundedKVManager, right: BoundedKVManager) -> None:
        """Compare the managers as they are given."""
        self.script: list[Call] = []
        self.results: list[Any] = []
        super().__init__(left, right)

    def fill_all(self, kind: str) -> None:
        """Overwrite every slot of both managers; see `fill`."""
        self.script.append(Call("fill", {"kind": kind}))
        self.results.append(None)
        for manager in (self.left, self.right):
            fill(manager, kind)

    def _both(self, name: str, **arguments: Any) -> tuple[Any, Any]:
        if name in _ASKING:
            return super()._both(name, **arguments)
        self.script.append(Call(name, {key: self._as_result(value) for key, value in arguments.items()}))
        self.results.append(None)
        answers = super()._both(name, **{key: made(value) for key, value in arguments.items()})
        self.results[-1] = answers[0]
        return answers

    def repeat(self, script: Sequence[Call]) -> None:
        """Make the calls of a script.

        Raises:
            Difference: from the first call that differs.
        """
        for call in script:
            if call.name == "fill":
                self.fill_all(**call.arguments)
                continue
            arguments = {key: _resolved(item, dict(enumerate(self.results))) for key, item in call.arguments.items()}
            try:
                self._both(call.name, **arguments)
            except Difference:
                raise
            except Exception:
                continue  # refused by both

    def _as_result(self, value: Any) -> Any:
        for number, result in enumerate(self.results):
            if isinstance(value, BoundedPlan) and value is result:
                return Result(number)
            if type(value) is type(result) is dict and value.get("ring") is result["ring"]:
                return Result(number, tuple((key, item) for key, item in value.items() if item is not result[key]))
        return value


def fill(manager: BoundedKVManager, kind: str) -> None:
    """Overwrite every slot: with NaN ("nan"), or with numbers that are all different ("numbers")."""
    for layer_idx in range(manager.config.num_layers):
        slots = manager.layer(layer_idx)
        numbers = torch.arange(slots.numel(), device=slots.device).view(slots.shape) / 64
        slots.copy_(torch.full_like(numbers, float("nan")) if kind == "nan" else numbers)


Change = Callable[[int, Call, Mapping[int, Any]], dict[str, Any] | None]


def play(manager: BoundedKVManager, script: Sequence[Call], change: Change | None = None) -> dict[int, Any]:
    """Make the calls of a script on one manager.

    Args:
        manager: a fresh one.
        script: the calls.
        change: called before each call with its number, the call, and the results so far; gives the arguments to use
            instead, or None to leave the call out.

    Returns:
        What each call gave, by its number; an error is kept in place of a value.
    """
    results: dict[int, Any] = {}
    for number, call in enumerate(script):
        arguments = call.arguments if change is None else change(number, call, results)
        if arguments is None:
            continue
        if call.name == "fill":
            fill(manager, **arguments)
            continue
        arguments = {key: _placed(_resolved(made(item), results), manager.device) for key, item in arguments.items()}
        try:
            results[number] = getattr(manager, call.name)(**arguments)
        except Exception as error:
            results[number] = error
    return results


def _resolved(value: Any, results: Mapping[int, Any]) -> Any:
    if not isinstance(value, Result):
        return value
    result = results.get(value.number)
    return result | dict(value.changes) if value.changes and isinstance(result, dict) else result


def _placed(value: Any, device: torch.device) -> Any:
    if isinstance(value, Tensor):
        return value.to(device)
    return tuple(_placed(item, device) for item in value) if type(value) is tuple else value


# Told as Python.


def config_told(config: BoundedKVConfig) -> str:
    """The call that makes a config, without what goes without saying."""
    words = [f"{config.num_layers}, {config.num_heads}, {config.head_dim}, {_retention_told(config.retention)}"]
    for field in dataclasses.fields(config)[4:]:
        value = getattr(config, field.name)
        if value != field.default and (field.name != "num_query_heads" or value != config.num_heads):
            words.append(f"{field.name}={value!r}")
    return f"BoundedKVConfig({', '.join(words)})"


def _retention_told(retention: object) -> str:
    if isinstance(retention, SinkWindow):
        sink, window, includes_step = retention
        return f"SinkWindow({sink}, {window}{', True' if includes_step else ''})"
    if isinstance(retention, tuple):
        return f"ByLength([{', '.join(map(_retention_told, retention))}])"
    return repr(retention)


def script_told(config: BoundedKVConfig, script: Sequence[Call]) -> str:
    """A script as lines of Python; `manager` is what is made in the first."""
    lines = [f"manager = factory({config_told(config)}, device, None)"]
    steps: dict[int, str] = {}
    for number, call in enumerate(script):
        if call.name == "fill":
            lines.append(f"fill(manager, {call.arguments['kind']!r})")
            continue
        arguments = dict(call.arguments)
        words = []
        if isinstance(arguments.get("step"), BoundedKVStep):
            lines += _step_told(arguments["step"], steps)
            words.append(steps[id(arguments.pop("step"))])
            words.append(_context_told(arguments.pop("ctx")))
        words += [f"{key}={_argument_told(item)}" for key, item in arguments.items() if not _goes_without_saying(item)]
        kept = f"result_{number + 1} = " if _is_used(script, number) else ""
        lines.append(f"{kept}manager.{call.name}({', '.join(words)})")
    return "\n".join(lines)


def _goes_without_saying(value: object) -> bool:
    return value is None or value is False or value == {}


def _is_used(script: Sequence[Call], number: int) -> bool:
    return any(
        isinstance(item, Result) and item.number == number for call in script for item in call.arguments.values()
    )


def _step_told(step: BoundedKVStep, steps: dict[int, str]) -> list[str]:
    """The line that makes a step, where it is met for the first time."""
    if id(step) in steps:
        return []
    steps[id(step)] = name = f"step_{len(steps) + 1}"
    segments = "".join(f"{_segment_told(segment)}, " for segment in step.segments)
    positions = ", ".join(f"{rid!r}: {_position_told(position)}" for rid, position in step.positions.items())
    tokens = f", {dict(step.tokens)}" if step.tokens else ""
    return [f"{name} = BoundedKVStep(({segments.strip()}), {{{positions}}}{tokens})"]


def _segment_told(segment: Segment) -> str:
    return f"Segment({segment.request_id!r}, {segment.span!r})"


def _position_told(position: object) -> str:
    if not isinstance(position, StreamPosition):
        return repr(position)
    source = f", {position.source!r}" if position.source != 0 else ""
    return f"StreamPosition({position.source_len!r}, {position.written!r}{source})"


def _context_told(ctx: StepContext) -> str:
    options = [
        f"{field.name}={getattr(ctx, field.name)!r}"
        for field in dataclasses.fields(ctx)
        if field.name not in ("request_ids", "plan_results") and getattr(ctx, field.name) != field.default
    ]
    return f"StepContext({', '.join([repr(ctx.request_ids), *options])})"


def _argument_told(value: Any) -> str:
    if isinstance(value, Result):
        changes = "".join(f" | {{{key!r}: {told(item)}}}" for key, item in value.changes)
        return f"result_{value.number + 1}{changes}"
    if isinstance(value, Tensor):
        return f"torch.tensor({value.tolist()}, dtype={value.dtype})"
    if isinstance(value, Sample):
        return f"{value!r}.tensor()"
    return f"({', '.join(map(_argument_told, value))})" if type(value) is tuple else repr(value)
