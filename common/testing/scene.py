"""A difference on stage: both managers can be had fresh, and the script played on them again."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from boundedkv.backends import build
from boundedkv.config import BoundedKVConfig
from boundedkv.manager import BoundedKVManager
from boundedkv.step import BoundedKVStep, StepContext
from boundedkv.testing.compare import differences
from boundedkv.testing.hunt import Found
from boundedkv.testing.probe import rows_of
from boundedkv.testing.samples import made
from boundedkv.testing.script import Call, Change, play

Factory = Callable[..., BoundedKVManager]


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

    def is_steady(self) -> bool:
        """Whether the other manager gives the same once more."""
        again = play(self.other(), self.found.script)
        return next(differences("", self.right_results.get(self.last), again.get(self.last)), None) is None

    def agrees(self, change: Callable[[Call], Call | None]) -> bool:
        """Whether the last results are the same once each call is changed so; None leaves it out."""

        def changed(_: int, call: Call, results: object) -> dict[str, Any] | None:
            kept = change(call)
            return None if kept is None else kept.arguments

        return self._agrees_played(changed)

    def agrees_alone(self, request: str) -> bool:
        """Whether the last results are the same where a request is alone in every step."""
        return self._agrees_played(_alone(self.found.script, request, self.left_results, self.found.config))

    def _agrees_played(self, change: Change) -> bool:
        left, right = (play(manager, self.found.script, change) for manager in (self.reference(), self.other()))
        return self.last in left and next(differences("", left[self.last], right.get(self.last)), None) is None


def _alone(script: Sequence[Call], request: str, results: Mapping[int, Any], config: BoundedKVConfig) -> Change:
    """Leaves everything out of a script that is not of one request."""
    steps: dict[int, BoundedKVStep] = {}

    def of_step(step: BoundedKVStep, ctx: StepContext) -> dict[str, Any] | None:
        if ctx.capture or request not in step.positions:
            return None
        mine = tuple(segment for segment in step.segments if segment.request_id == request)
        tokens = {rid: count for rid, count in step.tokens.items() if rid == request}
        alone = BoundedKVStep(mine, {request: step.positions[request]}, tokens)
        return {
            "step": steps.setdefault(id(step), alone),
            "ctx": StepContext((request,), slot_lease=ctx.slot_lease),
        }

    def of_attend(number: int, arguments: dict[str, Any]) -> dict[str, Any] | None:
        requests = [row.request for row in rows_of(script, number, results)]
        if request not in requests:
            return None
        b, per_request = requests.index(request), config.rows_per_request
        rows = slice(b * per_request, (b + 1) * per_request)
        names = [name for name in ("q", "k", "v", "rel_bias") if arguments.get(name) is not None]
        cut: dict[str, Any] = {name: made(arguments[name])[rows] for name in names}
        if arguments.get("row_source") is not None:
            storage, slots = arguments["row_source"]
            cut["row_source"] = storage, slots[b : b + 1]
        return arguments | cut

    def change(number: int, call: Call, _: object) -> dict[str, Any] | None:
        if isinstance(call.arguments.get("step"), BoundedKVStep):
            return of_step(call.arguments["step"], call.arguments["ctx"])
        return of_attend(number, call.arguments) if call.name == "attend" else call.arguments

    return change
