"""What a fault of the gallery is: something wrong, and the public call that finds it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from boundedkv.testing import check_attention, check_manager


class Planted(NamedTuple):
    """A fault and how it is looked for.

    Attributes:
        fault: a class of managers, or an attention function.
        judge: `check_manager` or `check_attention`.
        options: what it is called with; `features` keep the search short.
    """

    fault: Callable[..., Any]
    judge: Callable[..., Any]
    options: dict[str, Any]

    def message(self) -> str:
        """The first case that differs, and its message; empty if nothing was found."""
        report = self.judge(self.fault, **self.options, first_only=True)
        return next((f"{case.name}: {case.failure}" for case in report.cases if case.failure), "")


GALLERY: dict[str, Planted] = {}


def found_with(*features: str, judge: Callable[..., Any] = check_manager, **options: Any) -> Callable[[Any], Any]:
    """Hang a fault in the gallery."""

    def hang(fault: Any) -> Any:
        GALLERY[fault.__name__] = Planted(fault, judge, {"features": features, **options})
        return fault

    return hang


__all__ = ["GALLERY", "Planted", "check_attention", "check_manager", "found_with"]
