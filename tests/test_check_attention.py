"""An attention function is judged without a manager of its own, and gets what `check_attention` says."""

import pytest
import torch

from boundedkv.testing import FEATURES, check_attention
from boundedkv.testing.attention import OF_MANAGERS, attention_manager
from boundedkv.testing.conformance import cases, check_case
from boundedkv.testing.exact import exact

QUICK = {"features": ["batch", "sources", "rel_bias"], "examples": 3}


def plain(q, k, v, pool, source, table, config, row_source, rel_bias, ieee):
    """Softmax in float64 over the plan's lines."""
    return exact(config, table, pool, q, k, v, source, row_source, rel_bias).out.to(q.dtype)


def short_sighted(table, **others):
    """It does not read the ring's second part."""
    table = table.clone()
    table[:, 14] = 0
    return plain(table=table, **others)


def overwrites(pool, **others):
    out = plain(pool=pool, **others)
    pool[:, :, :, :1] = 1.0
    return out


def writes_itself(q, k, v, pool, table, config, **others):
    """It writes its span as the table says."""
    out = plain(q=q, k=k, v=v, pool=pool, table=table, config=config, **others)
    own = torch.cat([k, v], dim=-1).to(pool.dtype)
    for b, line in enumerate(table.tolist()):
        rows = slice(b * config.rows_per_request, (b + 1) * config.rows_per_request)
        for token, start, length in (line[15:18], line[18:21], line[21:24]):
            pool[line[0], :, :, start : start + length] = own[rows, :, token : token + length]
    return out


def test_attention_function_conforms():
    report = check_attention(plain, "close", **QUICK)
    assert report.conforms, str(report)
    assert report.implementation == "plain"
    assert 0 < max(case.nearest or 0 for case in report.cases) < 0.5


def test_attention_function_that_writes_conforms():
    report = check_attention(writes_itself, "close", writes=True, **QUICK)
    assert report.conforms, str(report)


@pytest.mark.parametrize(
    ("fn", "writes", "words"),
    [
        (short_sighted, False, "but sees"),
        (overwrites, False, "the slots differ afterwards"),
        (plain, True, "the slots differ afterwards"),
    ],
)
def test_faults_are_found_and_told(fn, writes, words, monkeypatch):
    monkeypatch.setattr("boundedkv.testing.hunt.SHRINKING_PATIENCE", 0.5)
    report = check_case(cases([])[0], attention_manager(fn, writes=writes), "close", examples=15, steps=6)
    assert words in report.failure


def test_features_of_managers_are_left_out():
    report = check_attention(plain, "close", without=set(FEATURES) - {"batch", *OF_MANAGERS}, examples=1)
    assert set(report.features) == {"batch"}
