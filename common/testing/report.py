"""What a run of the conformance suite found: told in a table, or as JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from boundedkv.testing.features import FEATURES


@dataclass(frozen=True)
class CaseReport:
    """What came of one case.

    Attributes:
        name: the case.
        calls: calls compared.
        examples: streams that were drawn.
        seconds: how long it took.
        nearest: in close mode, how near an error came to its limit: 1 is at it; None where none was measured.
        failure: the first difference, explained; None if there was none.
    """

    name: str
    calls: int
    examples: int
    seconds: float
    nearest: float | None = None
    failure: str | None = None


@dataclass(frozen=True)
class Report:
    """What came of a run.

    Attributes:
        implementation: what was judged.
        numerics: "bits" or "close".
        device: where it ran.
        seed: which streams.
        cases: what came of each case, in order.
        features: how many calls had to do with each feature; features that were not asked for are missing.
        not_run: cases left out, because an earlier one differed and no more was asked for.
    """

    implementation: str
    numerics: str
    device: str
    seed: int
    cases: tuple[CaseReport, ...]
    features: Mapping[str, int]
    not_run: tuple[str, ...] = ()

    @property
    def conforms(self) -> bool:
        """Whether no difference was found."""
        return all(case.failure is None for case in self.cases)

    @property
    def not_covered(self) -> tuple[str, ...]:
        """Features that no call had to do with, because they were not asked for or because no stream reached them."""
        return tuple(name for name in FEATURES if not self.features.get(name))

    @property
    def calls(self) -> int:
        """Calls compared, in all."""
        return sum(case.calls for case in self.cases)

    @property
    def examples(self) -> int:
        """Streams drawn, in all."""
        return sum(case.examples for case in self.cases)

    @property
    def seconds(self) -> float:
        """How long it took, in all."""
        return sum(case.seconds for case in self.cases)

    def to_json(self) -> str:
        """The report as one JSON object."""
        return json.dumps(self.to_dict(), indent=2)

    def to_dict(self) -> dict[str, Any]:
        """The report as numbers, words and lists."""
        return {
            "implementation": self.implementation,
            "conforms": self.conforms,
            "numerics": self.numerics,
            "device": self.device,
            "seed": self.seed,
            "calls": self.calls,
            "examples": self.examples,
            "seconds": round(self.seconds, 3),
            "calls_per_second": round(self.calls / max(self.seconds, 1e-9), 1),
            "features": {name: self.features.get(name) for name in FEATURES},
            "cases": [vars(case) for case in self.cases],
            "not_run": list(self.not_run),
        }

    def lines(self) -> list[tuple[str, ...]]:
        """The table, a line a case: name, result, calls, calls of all cases with this feature, seconds, nearness."""
        return [
            (
                case.name,
                "conforms" if case.failure is None else "DIFFERS",
                f"{case.calls:,}",
                f"{self.features[case.name]:,}" if case.name in self.features else "",
                f"{case.seconds:.1f}",
                "" if case.nearest is None else f"{case.nearest:.3f}",
            )
            for case in self.cases
        ]

    def remarks(self) -> list[str]:
        """What is not covered, what was not run, and each failure."""
        not_covered = ["not covered: " + ", ".join(self.not_covered)] if self.not_covered else []
        not_covered += ["not run after the first difference: " + ", ".join(self.not_run)] if self.not_run else []
        failed = [case for case in self.cases if case.failure is not None]
        return [*not_covered, *(f"{case.name}\n{'-' * len(case.name)}\n{case.failure}" for case in failed)]

    @property
    def headings(self) -> tuple[str, ...]:
        """What the columns of `lines` are called."""
        return ("case", "result", "calls", "with it", "seconds", "of the limit" if self.numerics == "close" else "")

    @property
    def verdict(self) -> str:
        """One sentence."""
        failed = [case.name for case in self.cases if case.failure is not None]
        a_second = self.calls / max(self.seconds, 1e-9)
        speed = f"{self.calls:,} calls compared in {self.seconds:.0f} s ({a_second:,.0f} a second)"
        if failed:
            return f"{self.implementation} does not conform: {', '.join(failed)}; {speed}"
        how = "every bit equal" if self.numerics == "bits" else "arithmetic within its limit, all else equal to the bit"
        return f"{self.implementation} conforms: {how}; {speed}"

    def __str__(self) -> str:
        """The verdict, the table, what is not covered, and each failure."""
        rows = [self.headings, *self.lines()]
        widths = [max(len(row[i]) for row in rows) for i in range(len(self.headings))]
        table = [
            "  ".join(f"{word:<{width}}" if i < 2 else f"{word:>{width}}" for i, (word, width) in enumerate(cells))
            for cells in (zip(row, widths, strict=True) for row in rows)
        ]
        return "\n\n".join([self.verdict, "\n".join(line.rstrip() for line in table), *self.remarks()])
