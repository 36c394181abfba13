"""`python -m boundedkv check` passes managers that conform, and names the place where one does not."""

import pytest
import torch

from boundedkv.cli import main
from boundedkv.reference import ReferenceManager
from boundedkv.testing.conformance import CONFIGS


class LatePlan(ReferenceManager):
    """Its ring begins one entry late."""

    def _plan(self, step, ctx):
        plan = super()._plan(step, ctx)
        plan.table[:, 11] += plan.table[:, 12].clamp(max=1)
        return plan


class OneBit(ReferenceManager):
    """One bit of a result is wrong, in one config."""

    def _attend(self, *arguments):
        out = super()._attend(*arguments)
        if self.config.query_window is not None:
            out.view(torch.int32)[0, 0, 0, 0] ^= 1
        return out


@pytest.mark.parametrize("factory", ["boundedkv.reference:ReferenceManager", "boundedkv.fast:FastManager"])
def test_our_backends_conform(factory, capsys):
    device = "cuda" if "fast" in factory and torch.cuda.is_available() else "cpu"
    assert main(["check", factory, "--device", device]) == 0
    calls, rest = capsys.readouterr().out.split(maxsplit=1)
    assert int(calls.replace(",", "")) > 20 * len(CONFIGS)
    assert rest == "calls, all bits equal\n"


@pytest.mark.parametrize(
    ("name", "words"),
    [("LatePlan", "result.table[0, 11] is"), ("OneBit", "config 'query window': call 5, attend(")],
)
def test_faults_are_found_and_named(name, words, capsys):
    assert main(["check", f"{__name__}:{name}"]) == 1
    out = capsys.readouterr().out
    assert out.startswith("NOT EQUAL\n")
    assert words in out


@pytest.mark.parametrize("factory", ["boundedkv.nowhere:F", "boundedkv:Nobody", "boundedkv", ":F"])
def test_a_factory_that_is_not_there(factory, capsys):
    assert main(["check", factory]) == 2
    assert f"MODULE:FACTORY is {factory!r}, but should name a callable" in capsys.readouterr().out
