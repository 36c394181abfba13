"""Close mode passes kernels of other arithmetic, says how near they came, and still finds what is wrong."""

import pytest
import torch
from streams import Drive, attend64, normal, random_own

from boundedkv import SinkWindow
from boundedkv.reference import ReferenceManager
from boundedkv.testing import Close
from boundedkv.testing.closeness import tf32
from boundedkv.testing.conformance import cases, check_case
from boundedkv.testing.exact import exact

CASES = {case.name: case for case in cases()}


class OtherArithmetic(ReferenceManager):
    """A float32 softmax over the same entries, its operands rounded."""

    operand = staticmethod(lambda x: x)

    def _attend_row(self, q, positions, entries, layout, rel_bias, ieee):
        group = self.config.query_heads // self.config.num_heads
        operand = self.operand
        keys, values = entries.repeat_interleave(group, 1).split(self.config.head_dim, -1)
        t = torch.arange(q.shape[2])[:, None]
        visible = (t < layout.tokens).expand(-1, len(positions))
        scores = (operand(q.float()) @ operand(keys).mT) * self.config.score_scale
        weights = torch.where(visible, scores, -torch.inf).softmax(-1).nan_to_num(0.0)
        return (operand(weights) @ operand(values)).transpose(1, 2)


class Tf32(OtherArithmetic):
    operand = staticmethod(lambda x: tf32(x).float())


class Bfloat16(OtherArithmetic):
    operand = staticmethod(lambda x: x.bfloat16().float())


class OneKeyTooMany(OtherArithmetic):
    """The newest key counts twice."""

    def _attend_row(self, q, positions, entries, layout, rel_bias, ieee):
        entries = torch.cat([entries, entries[:, :, -1:]], 2)
        positions = torch.cat([positions, positions[-1:]])
        return super()._attend_row(q, positions, entries, layout, rel_bias, ieee)


class PaddingIsNotZero(OtherArithmetic):
    def _attend_row(self, q, positions, entries, layout, rel_bias, ieee):
        out = super()._attend_row(q, positions, entries, layout, rel_bias, ieee)
        out[:, layout.tokens :] = 1e-9
        return out


class RoundsTheSlots(OtherArithmetic):
    def _write(self, slot, layout, own):
        super()._write(slot, layout, own.bfloat16().to(own.dtype))


def judged(factory, close, name="basics", examples=8):
    return check_case(CASES[name], factory, close, examples=examples, steps=5)


@pytest.mark.parametrize(
    ("factory", "close", "nearest"),
    [
        (ReferenceManager, Close(), 0.26),
        (OtherArithmetic, Close(), 0.5),
        (OtherArithmetic, Close(operands="float32"), 0.5),
        (Tf32, Close(operands="tf32"), 0.5),
        (Bfloat16, Close(operands="bfloat16"), 0.5),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_other_arithmetic_is_close(factory, close, nearest):
    report = judged(factory, close)
    assert report.failure is None
    assert 0 < report.nearest < nearest


@pytest.mark.parametrize(
    ("factory", "close", "words"),
    [
        (Tf32, Close(), 'times the limit of 4 x 9.5e-07 (operands="tf32" would allow it)'),
        (Bfloat16, Close(operands="tf32"), "times the limit of 4 x "),
        (RoundsTheSlots, Close(), "the slots differ afterwards"),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_too_far_is_told(factory, close, words, monkeypatch):
    monkeypatch.setattr("boundedkv.testing.hunt.SHRINKING_PATIENCE", 0.5)
    assert words in judged(factory, close).failure


def test_key_too_many_is_found_and_named(monkeypatch):
    monkeypatch.setattr("boundedkv.testing.hunt.SHRINKING_PATIENCE", 0.5)
    failure = judged(OneKeyTooMany, Close()).failure
    assert "should see" in failure
    assert "but sees" in failure
    assert ", 2 times " in failure


def test_padding_is_zero_to_the_bit(monkeypatch):
    monkeypatch.setattr("boundedkv.testing.hunt.SHRINKING_PATIENCE", 0.5)
    failure = judged(PaddingIsNotZero, Close(), "ragged").failure
    assert "is not 0, but should be: the query sees no key" in failure


@pytest.mark.parametrize("factor", [0, -1.0, float("nan")])
def test_wrong_factor_is_refused(factor):
    with pytest.raises(ValueError, match=r"factor is .*, but should be above 0"):
        Close(factor=factor)


def test_unknown_operands_are_refused():
    with pytest.raises(ValueError, match="operands is 'int8', but should be one of float32, tf32, float16, bfloat16"):
        Close(operands="int8")


def test_tf32_has_ten_bits_and_keeps_what_is_not_finite():
    one = 2.0**-10
    given = torch.tensor([1 + one, 1 + one / 2, 1 + 1.5 * one, -(1 + 0.51 * one), torch.inf, torch.nan])
    assert tf32(given).tolist()[:5] == [1 + one, 1.0, 1 + 2 * one, -(1 + one), torch.inf]
    assert tf32(given)[5].isnan()


@pytest.mark.parametrize("query_window", [None, 3])
def test_exact_is_softmax_over_what_a_query_sees(query_window):
    """Held to the definition on a stream whose ring has turned, in float64."""
    sink, window, written, tokens = 2, 4, 11, 3
    settings = {
        "retention": SinkWindow(sink, window),
        "query_window": query_window,
        "num_query_heads": 2,
        "head_dim": 5,
    }
    drive = Drive("reference", **settings)
    own = random_own(drive.config, written + tokens)
    for start in range(0, written, 4):
        drive.step({"a": min(4, written - start)}, own.cut(start, min(start + 4, written)))
    plan = drive.plan({"a": tokens})
    q, k, v = own.cut(written, written + tokens)
    bias = None if query_window is not None else normal(7, 1, 2, tokens, plan.max_retained + 2 * tokens - 1)
    got = exact(drive.config, plan.table, drive.manager.layer(0), q, k, v, rel_bias=bias).out
    for t in range(tokens):
        at = written + t
        seen = [s for s in range(written + tokens) if s < sink or s >= written - window]
        if query_window is not None:
            seen = [s for s in seen if s <= at and (s < sink or at - s <= query_window)]
        retained = plan.rows[0][1].retained
        places = [s if s < sink else s - (written - retained) for s in seen]  # indices in retained, then own
        for head in range(2):
            terms = None if bias is None else bias[0, head, t, [retained + t - j + tokens - 1 for j in places]]
            expected = attend64(
                q[0, head, t : t + 1], own.k[0, 0, seen], own.v[0, 0, seen], drive.config.score_scale, terms
            )
            torch.testing.assert_close(got[0, t, head], expected[0], rtol=1e-12, atol=0)
