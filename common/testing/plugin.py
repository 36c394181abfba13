"""The conformance suite as pytest's own tests: `pytest --boundedkv-manager MODULE:FACTORY`.

Without the option nothing happens, and nothing is imported but this file.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from boundedkv.testing.conformance import Case


def pytest_addoption(parser: pytest.Parser) -> None:
    """The options, each beginning with `--boundedkv-`."""
    group = parser.getgroup("boundedkv", "boundedkv: hold a KV cache manager to the reference")
    group.addoption(
        "--boundedkv-manager", metavar="MODULE:FACTORY", help="factory(config, device, kv_dtype) -> manager"
    )
    group.addoption("--boundedkv-numerics", choices=("bits", "close"), default="bits", help="how results are judged")
    group.addoption("--boundedkv-operands", help="with close: what the kernel rounds its operands to")
    group.addoption("--boundedkv-features", metavar="A,B", help="what the manager supports (default: everything)")
    group.addoption("--boundedkv-without", metavar="A,B", help="what it does not support")
    group.addoption("--boundedkv-device", default="cpu", help="where its managers live")
    group.addoption("--boundedkv-examples", type=int, default=None, help="drawn streams of a test")
    group.addoption("--boundedkv-seed", type=int, default=0, help="which streams")


class ConformanceFailure(Exception):
    """A manager does not conform; the message explains the first difference."""


class ConformanceItem(pytest.Item):
    """One case of the suite.

    Args:
        case: what it draws.
        covered: whether the manager is said to support it.
        settings: the other arguments of `check_case`.
    """

    def __init__(self, *, case: Case, covered: bool, settings: dict[str, Any], **options: Any) -> None:
        """Run nothing yet."""
        super().__init__(**options)
        self.case, self.covered, self.settings = case, covered, settings

    def runtest(self) -> None:
        """Run the case.

        Raises:
            ConformanceFailure: there was a difference.
        """
        from boundedkv.testing.conformance import check_case

        if not self.covered:
            pytest.skip("not covered: the manager is not said to support it")
        report = check_case(self.case, **self.settings)
        self.user_properties.append(("boundedkv calls compared", report.calls))
        if report.failure is not None:
            raise ConformanceFailure(report.failure)

    def repr_failure(self, excinfo: pytest.ExceptionInfo[BaseException], style: Any = None) -> Any:
        """The explanation alone, without a traceback through the suite."""
        if isinstance(excinfo.value, ConformanceFailure):
            return str(excinfo.value)
        return super().repr_failure(excinfo, style)

    def reportinfo(self) -> tuple[Path, None, str]:
        """What the case is about."""
        return self.path, None, f"boundedkv {self.case.name}: {self.case.title}"


class ConformanceSuite(pytest.Collector):
    """The suite as a node; its tests are named `boundedkv::CASE`."""

    def collect(self) -> Iterator[ConformanceItem]:
        """One test a case. Features that are not supported are tests that are skipped."""
        from boundedkv.testing.conformance import EXAMPLES, cases
        from boundedkv.testing.locate import factory_named, names_in, numerics_named

        option = self.config.getoption
        try:
            supported = cases(names_in(option("boundedkv_features")), names_in(option("boundedkv_without")) or ())
            settings = {
                "factory": factory_named(option("boundedkv_manager")),
                "numerics": numerics_named(option("boundedkv_numerics"), option("boundedkv_operands")),
                "device": option("boundedkv_device"),
                "examples": EXAMPLES if option("boundedkv_examples") is None else option("boundedkv_examples"),
                "seed": option("boundedkv_seed"),
            }
        except (ValueError, ModuleNotFoundError) as error:
            raise pytest.UsageError(str(error)) from None
        named = {case.name: case for case in supported}
        for case in cases():
            covered = case.name in named
            yield ConformanceItem.from_parent(
                self, name=case.name, case=named.get(case.name, case), covered=covered, settings=settings
            )


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(session: pytest.Session, config: pytest.Config, items: list[pytest.Item]) -> None:
    """Add the suite to what was collected."""
    if config.getoption("boundedkv_manager") is None:
        return
    here = str(config.invocation_params.dir)
    if here not in sys.path:
        sys.path.insert(0, here)
    suite = ConformanceSuite.from_parent(session, name="boundedkv", nodeid="boundedkv")
    items += suite.collect()
