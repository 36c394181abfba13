"""The examples of tutorials/oracle find what they tell of."""

import re

import pytest

pytest.importorskip("hypothesis")

import naive_ring
import plain_torch

from boundedkv.testing import FEATURES


@pytest.fixture(autouse=True)
def impatient(monkeypatch):
    """Shrinking that does not take long."""
    monkeypatch.setattr("boundedkv.testing.hunt.SHRINKING_PATIENCE", 0.5)


def test_plain_torch_conforms_for_what_it_has_and_not_beyond(capsys):
    report, claimed = plain_torch.main(examples=2)
    assert report.conforms, str(report)
    assert 0 < max(case.nearest or 0 for case in report.cases) < 0.5
    assert set(report.not_covered) >= set(FEATURES) - set(plain_torch.HAS)
    failure = next(case.failure for case in claimed.cases if case.failure)
    assert re.search(r"should see +.*\nbut sees +.*\nthat is +with ", failure), failure
    assert "PlainTorch does not conform: " in capsys.readouterr().out


def test_naive_ring_is_found_and_mended(capsys):
    before, after = naive_ring.main(examples=4)
    failure = next(case.failure for case in before.cases if case.failure)
    assert re.search(r"of the ring, key element 0\n.*\nshould hold +stream position \d+ of '\w'\nbut holds", failure), (
        failure
    )
    assert after.conforms, str(after)
    assert "naive does not conform" in capsys.readouterr().out


def test_tf32_kernel_is_too_far_unless_it_says_so(capsys):
    pytest.importorskip("triton")
    import tf32_kernel

    before, after = tf32_kernel.main(examples=1)
    failure = next(case.failure for case in before.cases if case.failure)
    assert re.search(r'\d+ times the limit of 4 x .* \(operands="tf32" would allow it\)', failure), failure
    assert after.conforms, str(after)
    assert 0.05 < max(case.nearest or 0 for case in after.cases) < 0.9
    assert 'operands="tf32"' in capsys.readouterr().out
