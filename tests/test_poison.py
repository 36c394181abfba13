"""What is not to be read may hold anything, and a number that is no number harms exactly the queries that see it."""

import math

import pytest
import torch
from streams import INF, NAN, Drive, Own, assert_same, attend64, bits, normal, on_both, random_own, random_source, stack

from boundedkv import SinkWindow, StreamPosition

PATHS = pytest.mark.parametrize("ieee", [False, True])
CANONICAL = {torch.float32: 0x7FC00000, torch.float16: 0x7E00, torch.bfloat16: 0x7FC0}
POISONS = [NAN, INF, -INF]
LN_2 = math.log(2)  # as a scale it makes scores base-2 logarithms


def assert_poisoned(out):
    """Every element is the one NaN of its type."""
    assert bits(out).unique().tolist() == [CANONICAL[out.dtype]], out


# What no position says was written.


@on_both
@PATHS
@pytest.mark.parametrize("query_window", [None, 3])
def test_memory_that_is_not_to_be_read_may_hold_anything(backend, query_window, ieee):
    """Slots, the source past its length, other sources, lanes past a row's tokens, the bias past what is seen."""
    outs = []
    for fill in (0.0, NAN):
        settings = {"query_window": query_window, "max_source_len": 4, "max_slots": 3}
        drive = Drive(backend, retention=SinkWindow(0 if query_window else 3, 4), **settings)
        drive.manager.layer(0).fill_(fill)
        own, source = random_own(drive.config, 9), torch.full((3, 1, 1, 6, 8), fill)
        source[1, ..., :2, :] = random_source(drive.config, 1, 2)
        drive.positions = {"a": StreamPosition(2, 0, 1), "b": StreamPosition(0, 0, 2)}
        for n, span in ((0, 2), (2, 1), (3, 2)) if backend == "reference" else ((0, 2), (2, 1)):
            tokens = {"a": span, "b": 1}
            bias = torch.full((2, 1, 3, 4 if query_window else 20), fill)
            for row, (rid, real) in enumerate(tokens.items()):
                length = drive.positions[rid].source_len + drive.positions[rid].written
                for t in range(real):  # as far back as the stream reaches: by distance, or by distance + 3 - 1
                    bias[row, 0, t, : length + t + 1 if query_window else length + t + 3] = 0.25
            cut = stack([own.cut(n, n + span, 3, fill), own.cut(n, n + 1, 3, fill)])
            spans = {"a": span, "b": 1}
            outs.append(drive.step(spans, cut, tokens, source=source, rel_bias=bias, ieee=ieee))
            assert_same(outs[-1][0, span:], torch.zeros(3 - span, 1, 4), "lanes past a row's tokens:")
            assert_same(outs[-1][1, 1:], torch.zeros(2, 1, 4), "lanes past a row's tokens:")
    half = len(outs) // 2
    assert torch.cat(outs).isfinite().all()
    for zeroed, poisoned in zip(outs[:half], outs[half:], strict=True):
        assert_same(poisoned, zeroed)


@on_both
def test_a_step_changes_the_entries_it_writes_and_no_other(backend):
    drive = Drive(backend, retention=SinkWindow(1, 3), num_layers=2, max_slots=3)
    drive.poison()
    drive.plan({"b": 0, "a": 0})
    own = random_own(drive.config, 2)
    drive.plan({"a": 2})
    drive.attend(own, layer=1)
    expected = torch.full((3, 1, 1, 4, 8), NAN)
    expected[1, :, :, :2] = torch.cat([own.k, own.v], dim=-1)  # a's slot: its sink, then the ring's first entry
    assert_same(drive.slots(1), expected, "slots")
    assert_same(drive.slots(0), torch.full_like(expected, NAN), "slots of the other layer")


# A visible NaN or infinity.


@on_both
@PATHS
@pytest.mark.parametrize("name", ["q", "k", "v"])
@pytest.mark.parametrize("poison", POISONS)
def test_a_bad_number_harms_the_queries_that_see_it(backend, name, poison, ieee):
    """Under the query rule, in one tile: those from its own position to the window's end, and no neighbour."""
    own = random_own(Drive("reference", retention=SinkWindow(0, 2)).config, 7)
    own = own._replace(q=own.q.abs(), k=own.k.abs())  # an infinite score has the sign of the infinity
    bad = Own(*(x.clone() for x in own))
    getattr(bad, name)[..., 3, 1] = poison
    seeing = [3] if name == "q" else [3, 4, 5]
    # With ieee a score of -inf is as good as a mask; without, a vector that is not finite has no score.
    weightless = ieee and poison == -INF and name != "v"
    mask = torch.zeros(1, 1, 7, 3)
    for t in seeing if weightless else []:
        mask[:, :, t, ... if name == "q" else t - 3] = -INF
    settings = {"retention": SinkWindow(0, 2), "query_window": 2}
    clean, harmed = Drive(backend, **settings), Drive(backend, **settings)
    expected = clean.step({"a": 7}, own, rel_bias=mask, ieee=ieee)
    out = harmed.stream(bad, [2, 3, 2] if backend == "reference" else [4, 3], ieee=ieee)
    others = [t for t in range(7) if t not in seeing or weightless]
    assert_same(out[:, others], expected[:, others])
    if not weightless:
        assert_poisoned(out[:, seeing])


@on_both
@PATHS
@pytest.mark.parametrize("poison", POISONS)
def test_a_bad_score_term_harms_its_query(backend, poison, ieee):
    """Minus infinity in it masks the pair, whatever that pair holds."""
    drive = Drive(backend, retention=SinkWindow(0, 2))
    own, bias = random_own(drive.config, 3), normal(7, 1, 1, 3, 9)
    bias[0, 0, 1, 2] = poison  # nothing is retained: query 1 and key 1, at 1 - 1 + 3 - 1
    drive.plan({"a": 0})
    out = drive.attend(own, rel_bias=bias, ieee=ieee)
    bias[0, 0, 1, 2] = 0.0
    clean = drive.attend(own, rel_bias=bias, ieee=ieee)
    assert_same(out[:, [0, 2]], clean[:, [0, 2]], "queries beside it:")
    if poison == -INF:
        two = Own(own.q[:, :, [1]], own.k[:, :, [0, 2]], own.v[:, :, [0, 2]])
        assert out[0, 1].ne(clean[0, 1]).all()
        assert out[0, 1, 0].sub(attend64(*two, 0.5, bias[0, 0, 1, [3, 1]])[0, 0, 0]).abs().max() < 2**-12
    else:
        assert_poisoned(out[:, 1])


@on_both
@PATHS
@pytest.mark.parametrize("poison", POISONS)
def test_what_a_pair_holds_does_not_matter_where_it_is_masked(backend, poison, ieee):
    drive = Drive(backend, retention=SinkWindow(0, 2))
    own, mask = random_own(drive.config, 4), torch.zeros(1, 1, 4, 9)
    for t in range(4):
        mask[0, 0, t, t - 1 + 3] = -INF  # key 1, for every query
    mask[0, 0, 2] = -INF
    drive.plan({"a": 0})
    clean = drive.attend(own, rel_bias=mask, ieee=ieee)
    own.k[0, 0, 1, 0] = own.v[0, 0, 1, 3] = poison
    own.q[0, 0, 2] = poison
    assert_same(drive.attend(own, rel_bias=mask, ieee=ieee), clean)
    assert_same(clean[:, 2], torch.zeros(1, 1, 4), "a query that sees nothing:")


@on_both
@pytest.mark.parametrize("dtype", CANONICAL)
def test_a_nan_has_one_pattern(backend, dtype):
    """In results, and in slots: whatever its sign and payload were."""
    drive = Drive(backend, retention=SinkWindow(0, 4), dtype=dtype)
    own = random_own(drive.config, 2).to(dtype)
    words = torch.tensor([CANONICAL[dtype] + 5, -3], dtype=bits(own.k).dtype)  # both patterns are NaNs
    assert words.view(dtype).isnan().all()
    own.k[0, 0, 0, 0], own.v[0, 0, 1, 1] = words.view(dtype)
    assert_poisoned(drive.step({"a": 2}, own))
    held = drive.slots()[0, 0, 0]
    assert_poisoned(torch.stack([held[0, 0], held[1, 5]]))
    assert held.isnan().sum() == 2


@on_both
def test_a_bad_entry_is_forgotten_when_it_leaves_the_window(backend):
    drives = [Drive(backend, retention=SinkWindow(0, 2)) for _ in range(2)]
    own = random_own(drives[0].config, 5)
    bad = Own(*(x.clone() for x in own))
    bad.v[..., 0, 2] = NAN
    clean, harmed = (drive.stream(mine, [1] * 5) for drive, mine in zip(drives, (own, bad), strict=True))
    assert_poisoned(harmed[:, :3])
    assert_same(harmed[:, 3:], clean[:, 3:])


# Extremes that are numbers.


def one_step(backend, k, v, q, ieee, scale=LN_2):
    """One query over these keys and values, [N, 4] each, of which the first is its own: the result, [4]."""
    drive = Drive(backend, retention=SinkWindow(0, 0), scale=scale)
    q = torch.cat([q[None], torch.zeros(len(k) - 1, 4)])
    return drive.step({"a": 0}, Own(*(x[None, None] for x in (q, k, v))), tokens={"a": len(k)}, ieee=ieee)[0, 0, 0]


@on_both
def test_subnormal_numbers_are_honoured_with_ieee(backend):
    small, eye = 2.0**-149, torch.eye(4)
    v = torch.tensor([[3.0, 0, 0, -1], [1, 0, 0, -1], [2, 3, 0, -1]]) * small
    assert_same(one_step(backend, torch.ones(3, 4), v, torch.zeros(4), True), torch.tensor([2.0, 1, 0, -1]) * small)
    k = torch.stack([eye[0] * 2.0**-127, torch.zeros(4)])  # a subnormal key, whose score is 1
    assert_same(one_step(backend, k, eye[:2], eye[0] * 2.0**127, True), torch.tensor([2.0, 1, 0, 0]) / 3)


@on_both
def test_subnormal_scores_are_honoured_by_default(backend):
    """A score just above zero has the ceiling 1: the sum of weights then has one bit less, and loses the other keys."""
    q = torch.tensor([2.0**-74, 2.0**-74, 0, 0])
    above = torch.tensor([[1.5 * 2.0**-75, 0, 0, 0], *[[0, -1.5 * 2.0**78, 0, 0]] * 3])  # scores 2^-148 and -24
    at_zero = above * torch.tensor([[0.0], [1.0], [1.0], [1.0]])
    v = torch.eye(4)
    expected = torch.tensor([1.0, 2.0**-24, 2.0**-24, 2.0**-24])
    assert_same(one_step(backend, above, v, q, False), expected)
    assert_same(one_step(backend, at_zero, v, q, False), expected / (1 + 3 * 2.0**-24))


@on_both
def test_subnormal_results_are_honoured(backend):
    """By default: 64 keys of value 0, and one of 2^-107 that weighs 2^-16. In 16-bit types: their own subnormals."""
    k, v = torch.zeros(65, 4), torch.zeros(65, 4)
    k[0, 0], v[0] = -16.0, 2.0**-107
    expected = torch.tensor(1.0) / (64 * 2**16 + 1) * 2.0**-107
    assert 0 < expected < 2**-126
    assert_same(one_step(backend, k, v, torch.tensor([1.0, 0, 0, 0]), False), expected.expand(4))
    for dtype, least in ((torch.float16, 2.0**-24), (torch.bfloat16, 2.0**-133)):
        drive = Drive(backend, retention=SinkWindow(0, 0), dtype=dtype)
        v = (torch.tensor([1.0, 3, -2, 0]) * least).to(dtype)[None, None, None]
        out = drive.step({"a": 1}, Own(torch.zeros_like(v), torch.zeros_like(v), v), ieee=True)
        assert_same(out[:, 0], v[:, :, 0])


@on_both
@PATHS
@pytest.mark.parametrize(
    "values", [[3e38] * 3, [3.4028234663852886e38] * 2, [3e38, 3e38, -3e38, -3e38], [3e38, 1, -3e38]]
)
def test_values_near_the_largest_float_stay_finite(backend, values, ieee):
    v = torch.tensor(values)[:, None].expand(-1, 4)
    out = one_step(backend, torch.ones(len(values), 4), v, torch.zeros(4), ieee)
    exact = v.double().mean(0)
    # A value is held to 16 bits by default: what is lost of the largest is more than the others are.
    assert (out - exact).abs().max() <= (2**-24 if ieee else 2**-16) * 3.5e38
    assert_same(out, out[:1].expand(4))


BIG = [2.0**22 + 0.5, 2.0**23 + 1, 1e9, 1e30, 3e38]


@on_both
@PATHS
@pytest.mark.parametrize("score", BIG + [-x for x in BIG])
def test_scores_far_beyond_what_rounding_by_addition_can_take(backend, score, ieee):
    """The key of the largest score has all the weight; of two alike, each has half."""
    eye = torch.eye(4)
    other = -3e38 if score > 0 else score * 1.125
    k = torch.stack([eye[0] * score, eye[0] * other, eye[0] * score])
    v = torch.stack([eye[1], eye[2], eye[3]])
    out = one_step(backend, k, v, eye[0], ieee)
    assert_same(out, torch.tensor([0, 0.5, 0, 0.5]), "two alike:")
    assert_same(one_step(backend, k[:2], v[:2], eye[0], ieee), eye[1], "one:")


@on_both
@PATHS
def test_a_large_score_is_its_own_ceiling(backend, ieee):
    """2^32 - 256: rounded by adding 2^23 it would come out 256 larger, and its key would weigh nothing."""
    drive = Drive(backend, retention=SinkWindow(0, 0), scale=LN_2)
    zeros = torch.zeros(1, 1, 1, 4)
    out = drive.step(
        {"a": 1}, Own(zeros, zeros, zeros + 3), rel_bias=torch.tensor([2.0**32 - 256])[None, None, None], ieee=ieee
    )
    assert_same(out, zeros + 3)


@on_both
@PATHS
def test_scores_beyond_the_largest_float_are_infinite(backend, ieee):
    """Plus infinity poisons, minus infinity weighs nothing; where all weigh nothing, nothing is seen."""
    eye = torch.eye(4)
    k = torch.stack([eye[0] * 3e38, -eye[0] * 3e38])
    assert_poisoned(one_step(backend, k, eye[:2], eye[0] * 2, ieee))
    assert_same(one_step(backend, k.flip(0) * torch.tensor([[1.0], [0.0]]), eye[:2], eye[0] * 2, ieee), eye[1])
    assert_same(one_step(backend, k[1:], eye[:1], eye[0] * 2, ieee), torch.zeros(4))


@on_both
@PATHS
@pytest.mark.parametrize("value", [-0.0, -(2.0**-149)])
def test_a_result_is_never_minus_zero(backend, value, ieee):
    """Not where a value is, and not where a weight makes it vanish."""
    k = torch.tensor([[0.0, 0, 0, 0], [-100, 0, 0, 0]])
    v = torch.tensor([[-0.0] * 4, [value] * 4])
    assert_same(one_step(backend, k, v, torch.eye(4)[0], ieee), torch.zeros(4))


@on_both
@PATHS
@pytest.mark.parametrize(
    ("largest", "other", "counts"),
    [(0.0, -126.0, True), (0.0, -126.25, False), (0.25, -124.875, True), (0.25, -125.125, False)],
)
def test_weights_count_down_to_2_to_the_minus_126(backend, largest, other, counts, ieee):
    """Relative to the largest score, taken up to an integer; a weight that does not count scales no value either."""
    k = torch.tensor([[largest, 0, 0, 0], [other, 0, 0, 0]])
    v = torch.tensor([[2.0**-20, 0, 0, 0], [0, 2.0**125, 0, 0]])
    out = one_step(backend, k, v, torch.eye(4)[0], ieee)
    if counts:
        assert 0.5 <= out[1] * 2.0 ** (largest - other) / 2.0**125 <= 1.001
    else:
        assert_same(out, torch.tensor([2.0**-20, 0, 0, 0]))


@on_both
@PATHS
def test_large_queries_and_small_keys_have_moderate_scores(backend, ieee):
    """And the other way round: no power on the way takes the score out of range."""
    v = torch.eye(4)[:2]
    for q, k in ((2.0**127, 2.0**-96), (2.0**-96, 2.0**127)):
        keys = torch.tensor([[k, 0, 0, 0], [0, 0, 0, 0]])
        out = one_step(backend, keys, v, torch.eye(4)[0] * q, ieee, scale=LN_2 * 2.0**-31)
        assert_same(out, torch.tensor([2.0, 1, 0, 0]) / 3)
