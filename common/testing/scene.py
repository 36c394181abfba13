"""A difference on stage: both managers can be had fresh, and the script played on them again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from boundedkv.backends import build
from boundedkv.manager import BoundedKVManager
from boundedkv.testing.compare import differences
from boundedkv.testing.hunt import Found
from boundedkv.testing.script import Call, play

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

    def agrees(self, change: Callable[[Call], Call | None]) -> bool:
        """Whether the last results are the same once each call is changed so."""

        def changed(_: int, call: Call, results: object) -> dict[str, Any] | None:
            kept = change(call)
            return None if kept is None else kept.arguments

        left, right = (play(manager, self.found.script, changed) for manager in (self.reference(), self.other()))
        return next(differences("", left.get(self.last), right.get(self.last)), None) is None
