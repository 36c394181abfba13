"""The conformance suite as a function: somebody's manager beside the reference, driven by drawn streams."""

from __future__ import annotations

import importlib.util
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch

from boundedkv.config import BoundedKVConfig
from boundedkv.manager import BoundedKVManager
from boundedkv.testing.closeness import Close
from boundedkv.testing.features import FEATURES, chosen
from boundedkv.testing.report import CaseReport, Report

Factory = Callable[[BoundedKVConfig, torch.device, torch.dtype | None], BoundedKVManager]
Numerics = str | Close

EXAMPLES = 12  # streams of a case; about a minute for the reference
STEPS = 20  # draws of calls in a stream, each a call or a few steps

# What a case draws beside its own feature, where the implementation has it.
_BESIDE = {
    "ragged": {"batch", "lookahead"},
    "padding": {"batch"},
    "row_source": {"sources", "batch"},
    "retention_by_length": {"sources", "row_source"},
    "rel_bias": {"lookahead", "query_window"},
    "query_window": {"lookahead"},
    "window_includes_step": {"lookahead"},
    "reverse_step_order": {"lookahead"},
    "mixed_types": {"float16", "bfloat16", "sources", "rel_bias"},
    "strides": {"sources", "rel_bias", "batch"},
    "extremes": {"sources", "rel_bias", "ieee"},
    "long_rows": {"far_positions", "sources"},
    "leases": {"batch", "padding"},
    "capture": {"batch", "padding", "leases"},
    "refusals": set(FEATURES) - {"long_rows", "capture"},
}


@dataclass(frozen=True)
class Case:
    """A part of the suite.

    Attributes:
        name: a feature; or "basics", one request with nothing out of `FEATURES`; "lifecycle", every call but attend;
            "together", all features at once.
        features: what may be drawn.
        examples: streams, for each that is asked for.
        attends: whether attend is among the calls.
    """

    name: str
    features: frozenset[str]
    examples: int = 1
    attends: bool = True

    @property
    def title(self) -> str:
        """What it is about."""
        return FEATURES.get(self.name, _TITLES.get(self.name, ""))


_TITLES = {
    "basics": "one request, sinks and a window, span by span",
    "lifecycle": "every call but attend, with all the features",
    "together": "all the features at once",
}


def cases(features: Iterable[str] | None = None, without: Iterable[str] = ()) -> tuple[Case, ...]:
    """The suite for an implementation.

    Args:
        features: what it supports, names out of `FEATURES`; None means all.
        without: names to leave out of these.

    Returns:
        The cases, simple ones first.
    """
    named = chosen(features, without)
    single = (Case(name, named & ({name} | _BESIDE.get(name, set()))) for name in FEATURES if name in named)
    return (
        Case("basics", frozenset()),
        *single,
        Case("lifecycle", named, examples=8, attends=False),
        Case("together", named, examples=2),
    )


def check_manager(
    factory: Factory,
    numerics: Numerics = "bits",
    features: Iterable[str] | None = None,
    *,
    without: Iterable[str] = (),
    device: torch.device | str = "cpu",
    examples: int = EXAMPLES,
    seed: int = 0,
    first_only: bool = False,
) -> Report:
    """Hold somebody's managers to the reference: drawn streams, the same calls, everything compared after each.

    Args:
        factory: called as `factory(config, device, None)` for every drawn config, which names the slots' type itself.
        numerics: "bits", every result is compared as integers; "close", or a `Close`, for kernels whose arithmetic is
            another one: `attend` may err as `Close` says, and all else is compared as integers.
        features: what the implementation supports, names out of `FEATURES`; None means all. The others are neither
            drawn nor judged, and reported as not covered.
        without: names to leave out of these.
        device: where its managers live; the reference lives on the CPU.
        examples: drawn streams of a case.
        seed: which streams.
        first_only: stop after the first case that differs.

    Returns:
        What was found. A difference is no exception: see `Report.conforms`, and `print` the report.

    Raises:
        ValueError: an unknown feature, and the message lists the known ones; another argument that means nothing; a
            device that torch does not see.
        TypeError: the factory cannot be called.
        ModuleNotFoundError: hypothesis, which draws the streams, is not installed.

    Examples:
        >>> from boundedkv.reference import ReferenceManager
        >>> check_manager(ReferenceManager, features=["batch"], examples=1).conforms
        True
    """
    close = _close(numerics)
    if not isinstance(examples, int) or examples < 1:
        raise ValueError(f"examples is {examples!r}, but should be an integer at least 1")
    if not callable(factory):
        raise TypeError(f"factory is {factory!r}, but should be called as factory(config, device, kv_dtype)")
    _check_device(device)
    used: Counter[str] = Counter()
    suite = cases(features, without)
    reports: list[CaseReport] = []
    for case in suite:
        reports.append(check_case(case, factory, numerics, device=device, examples=examples, seed=seed, used=used))
        if first_only and reports[-1].failure is not None:
            break
    return Report(
        implementation=_name_of(factory),
        numerics="bits" if close is None else "close",
        device=str(device),
        seed=seed,
        cases=tuple(reports),
        features={name: used[name] for name in FEATURES if name in chosen(features, without)},
        not_run=tuple(case.name for case in suite[len(reports) :]),
    )


def check_case(
    case: Case,
    factory: Factory,
    numerics: Numerics = "bits",
    *,
    device: torch.device | str = "cpu",
    examples: int = EXAMPLES,
    steps: int = STEPS,
    seed: int = 0,
    used: Counter[str] | None = None,
) -> CaseReport:
    """One case of `check_manager`, which takes the same arguments.

    Args:
        case: one of `cases`.
        factory: makes the managers.
        numerics: how results of attend are judged.
        device: where the managers live.
        examples: drawn streams.
        steps: how many draws of calls each of them is long, at most.
        seed: which streams.
        used: counts the calls that had to do with each feature.

    Returns:
        What was found.
    """
    _require_hypothesis()
    from boundedkv.testing.explain import explained
    from boundedkv.testing.hunt import Hunt
    from boundedkv.testing.strategies import Scope

    close = _close(numerics)
    scope = Scope(case.features, case.name if case.name in FEATURES else None, close is not None)
    hunt = Hunt(factory, torch.device(device), close)
    start = time.perf_counter()
    counted = Counter[str]() if used is None else used
    hunt.run(scope, case.attends, case.examples * examples, steps, f"{seed} {case.name}", counted)
    failure = None if hunt.found is None else explained(hunt.found, factory, torch.device(device), close)
    return CaseReport(
        case.name,
        calls=hunt.calls,
        examples=hunt.examples,
        seconds=time.perf_counter() - start,
        nearest=hunt.nearest,
        failure=failure,
    )


def _close(numerics: object) -> Close | None:
    """How results are judged; None for bit by bit."""
    if isinstance(numerics, Close):
        return numerics
    if numerics not in ("bits", "close"):
        raise ValueError(f"numerics is {numerics!r}, but should be 'bits', 'close' or a Close")
    return Close() if numerics == "close" else None


def _check_device(device: torch.device | str) -> None:
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:  # an unknown word; a build or a machine without it
        problem = str(error).partition("\n")[0]
        raise ValueError(f"device is {str(device)!r}, but should be one that torch sees: {problem}") from None


def _name_of(factory: Factory) -> str:
    return str(getattr(factory, "__qualname__", type(factory).__name__))


def _require_hypothesis() -> None:
    if importlib.util.find_spec("hypothesis") is None:
        raise ModuleNotFoundError("the conformance suite needs hypothesis: pip install 'boundedkv[testing]'")
