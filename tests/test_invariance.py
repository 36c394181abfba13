"""What a query gets depends on its vector and on the keys it sees with their stream positions, and on nothing else."""

from typing import NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from streams import NAN, Drive, Own, assert_same, normal, on_both, random_own, random_source, stack
from torch import Tensor

from boundedkv import SinkWindow, StreamPosition
from boundedkv.numerics import MAX_POSITION, SPLIT, TILE

FLOATS = st.sampled_from([torch.float32, torch.float16, torch.bfloat16])
FAR = 64  # no distance in the random streams is larger


class Case(NamedTuple):
    """A stream, what it brings, and two ways to run it that must not differ."""

    pool: dict
    own: Own
    bias: Tensor | None  # [rows, Hq, N, 2 * FAR]: a token's score term by distance, from -FAR on
    source: Tensor
    source_len: int
    ieee: bool
    spans: list[int]


@st.composite
def cases(draw, causal, longest, most_steps, most_heads):
    sink, window = draw(st.integers(0, 3)), draw(st.integers(0, 6))
    heads = draw(st.integers(1, most_heads))
    pool = {
        "retention": SinkWindow(sink, window),
        "query_window": draw(st.integers(0, window)) if causal else None,
        "rows_per_request": draw(st.integers(1, most_heads)),
        "num_heads": heads,
        "num_query_heads": heads * draw(st.integers(1, 2)),
        "head_dim": draw(st.sampled_from([4, 5, 8])),
        "max_source_len": 5,
        "dtype": draw(FLOATS),
    }
    spans = draw(st.lists(st.integers(1, longest), min_size=1, max_size=most_steps))
    config, seed = Drive("reference", **pool).config, draw(st.integers(0, 99))
    own = Own(*(x.to(draw(FLOATS)) for x in random_own(config, sum(spans), seed)))
    with_bias = draw(st.booleans()) and not (causal and sink)
    shape = (config.rows_per_request, config.query_heads, sum(spans), 2 * FAR)
    bias = normal(seed + 500, *shape).to(draw(FLOATS)) if with_bias else None
    source = random_source(config, 2, 5, seed).to(draw(FLOATS))
    return Case(pool, own, bias, source, draw(st.integers(0, 5)), draw(st.booleans()), spans)


def score_term(case, start, span, width, config, retained):
    """rel_bias for these tokens in a step of `width` tokens a row: by distance, or by distance + width - 1."""
    first, entries = (
        (0, config.query_window + 1) if config.query_window is not None else (1 - width, retained + 2 * width)
    )
    cut = case.bias[:, :, start : start + span, FAR + first : FAR + first + entries]
    return torch.nn.functional.pad(cut, (0, 0, 0, width - span), value=NAN)


def alone(backend, case, spans):
    """The stream by itself, in the first slot, with nothing beside it."""
    drive = Drive(backend, **case.pool)
    drive.positions["a"] = StreamPosition(case.source_len, 0)
    outs, start = [], 0
    for span in spans:
        term = {}
        if case.bias is not None:
            term = {"rel_bias": score_term(case, start, span, span, drive.config, drive.config.max_retained)}
        cut = case.own.cut(start, start + span)
        outs.append(drive.step({"a": span}, cut, source=case.source, ieee=case.ieee, **term))
        start += span
    return torch.cat(outs, dim=1)


def among_others(backend, case, spans, data, most_others):
    """The stream in another slot and ring, other requests beside it, more lanes than tokens, source by another way."""
    others = [f"other{i}" for i in range(data.draw(st.integers(0, most_others)))]
    pool = case.pool | {"spare": data.draw(st.integers(0, 3)), "max_slots": 5}
    drive = Drive(backend, **pool)
    drive.poison()
    for rid in data.draw(st.permutations([*others, "a"])):
        drive.positions[rid] = StreamPosition(case.source_len, 0, 1) if rid == "a" else StreamPosition(0, 0)
        drive.plan({rid: 0})
    rows, outs, start = drive.config.rows_per_request, [], 0
    bank = case.source.flip(0).contiguous()
    for turn, span in enumerate(spans):
        order = data.draw(st.permutations([*others, "a"]))
        width = span + data.draw(st.integers(0, 3))
        cuts = [random_own(drive.config, width, seed=100 + turn + i).to(case.own.k.dtype) for i in range(len(order))]
        at = order.index("a")
        cuts[at] = case.own.cut(start, start + span, width, pad=NAN)
        cuts = [Own(*(x.to(mine.dtype) for x, mine in zip(cut, case.own, strict=True))) for cut in cuts]
        term = {}
        if case.bias is not None:
            mine = score_term(case, start, span, width, drive.config, drive.config.max_retained)
            term = {"rel_bias": torch.cat([mine if rid == "a" else torch.zeros_like(mine) for rid in order])}
        tokens = {"a": span} if width > span else {}
        out = drive.step(dict.fromkeys(order, span), stack(cuts), tokens, source=bank, ieee=case.ieee, **term)
        outs.append(out[at * rows : (at + 1) * rows, :span])
        start += span
    return torch.cat(outs, dim=1)


def check(backend, data, causal, longest, most_steps, most_heads):
    case = data.draw(cases(causal, longest, most_steps, most_heads))
    together = among_others(backend, case, case.spans, data, most_others=most_heads)
    # With a query window the whole stream may be one step. Without, a step's tokens see each other, and cuts stay.
    assert_same(together, alone(backend, case, [sum(case.spans)] if causal else case.spans))


CAUSAL = pytest.mark.parametrize("causal", [True, False], ids=["cuts", "surroundings"])


@CAUSAL
@settings(max_examples=120)
@given(data=st.data())
def test_cuts_and_surroundings_do_not_matter_on_the_reference(causal, data):
    check("reference", data, causal, longest=9, most_steps=5, most_heads=2)


@CAUSAL
@settings(max_examples=8)
@given(data=st.data())
def test_cuts_and_surroundings_do_not_matter_on_the_fast_backend(causal, data):
    """Fewer streams, and shorter: Triton's interpreter takes a tenth of a second a program."""
    check("fast", data, causal, longest=3, most_steps=2, most_heads=1)


# Streams that stand where a tile, a split or the range of positions ends.


def at_position(backend, start, own, spans, ieee, sink=2, window=6):
    """The first `sink` tokens written at the start of a stream, the others from `start - window` on."""
    drive = Drive(backend, retention=SinkWindow(sink, window), query_window=window, dtype=torch.bfloat16)
    drive.poison()
    filled = sink + window
    drive.jump(own.cut(0, sink), {"a": sink}, written=0)
    drive.jump(own.cut(sink, filled), {"a": window}, written=start - window)
    outs = []
    for span in spans:
        outs.append(drive.jump(own.cut(filled, filled + span), {"a": span}, written=start, ieee=ieee))
        start, filled = start + span, filled + span
    return torch.cat(outs, dim=1)


BOUNDARIES = [TILE - 3, SPLIT - 3, 7 * SPLIT + TILE - 2, MAX_POSITION - 5]


@on_both
@pytest.mark.parametrize(("start", "ieee"), [*((s, False) for s in BOUNDARIES), *((s, True) for s in BOUNDARIES[1::2])])
def test_cuts_do_not_matter_across_boundaries(backend, start, ieee):
    own = random_own(Drive("reference", retention=SinkWindow(2, 6)).config, 14)
    cuts = [[6], [1] * 6, [2, 4], [3, 1, 2]] if backend == "reference" else [[2, 4]]
    expected = at_position("reference", start, own, [6], ieee)
    assert expected.isfinite().all()
    for cut in cuts:
        assert_same(at_position(backend, start, own, cut, ieee), expected, f"cut {cut}:")


LONG = {"max_source_len": 4 * SPLIT, "max_slots": 2}


@on_both
@pytest.mark.parametrize(
    ("sink", "window", "source_len", "spans"),
    [(3, 520, 500, [6, 18]), (520, 40, 690, [6, 18]), (70, 8, 700, [1, 4]), (1, 2 * SPLIT + 1, 4 * SPLIT, [2, 1])],
    ids=["window_over_two_splits", "sinks_end_in_the_windows_split", "sinks_over_two_tiles", "all_splits_of_a_launch"],
)
def test_cuts_do_not_matter_over_long_prefixes(backend, sink, window, source_len, spans):
    settings = LONG | {"retention": SinkWindow(sink, window), "query_window": window}
    config = Drive("reference", **settings).config
    own, source = random_own(config, sum(spans)), random_source(config, 1, source_len)
    outs = []
    for which, cut in [("reference", [sum(spans)]), (backend, spans), ("reference", [1] * sum(spans))]:
        drive = Drive(which, **settings)
        drive.positions["a"] = StreamPosition(source_len, 0)
        outs.append(drive.stream(own, cut, source=source))
    assert_same(outs[1], outs[0], "in two steps:")
    assert_same(outs[2], outs[0], "one by one:")


@on_both
@pytest.mark.parametrize("ieee", [False, True])
def test_a_long_neighbour_does_not_matter(backend, ieee):
    """A long row lets a launch give each split a program of its own; the rows beside it must not tell."""
    drives = [Drive(backend, **LONG, retention=SinkWindow(2, 600)) for _ in range(2)]
    own = [random_own(drives[0].config, 4, seed) for seed in range(2)]
    source = random_source(drives[0].config, 1, 700)
    for drive in drives:
        drive.positions = {"short": StreamPosition(5, 0), "long": StreamPosition(700, 0)}
    for n in (0, 2):
        cuts = [x.cut(n, n + 2) for x in own]
        single = drives[0].step({"short": 2}, cuts[0], source=source, ieee=ieee)
        both = drives[1].step({"long": 2, "short": 2}, stack(cuts[::-1]), source=source, ieee=ieee)
        assert_same(both[1:], single)


# Heads and rows are streams of their own.


@on_both
@pytest.mark.parametrize("ieee", [False, True])
def test_heads_rows_and_groups_are_independent(backend, ieee):
    settings = {"retention": SinkWindow(1, 3)}
    whole = Drive(backend, num_heads=2, num_query_heads=4, rows_per_request=2, **settings)
    own = random_own(whole.config, 3)
    out = torch.cat([whole.step({"a": span}, own.cut(n, n + span), ieee=ieee) for n, span in ((0, 2), (2, 1))], dim=1)
    for row, head in ((0, 1), (1, 0), (1, 3)) if backend == "reference" else ((1, 2),):
        single = Drive(backend, **settings)
        line = slice(row, row + 1)
        mine = Own(own.q[line, head : head + 1], *(x[line, head // 2 : head // 2 + 1] for x in own[1:]))
        assert_same(single.stream(mine, [2, 1], ieee=ieee), out[line, :, head : head + 1], f"row {row}, head {head}:")


@on_both
def test_a_group_may_lie_in_two_programs(backend):
    """24 tokens of 3 query heads are 72 lanes: with 64 of them to a program, a token's heads do not stay together."""
    settings = {"retention": SinkWindow(1, 5), "query_window": 5, "num_query_heads": 3}
    drive, single = Drive(backend, **settings), Drive("reference", **settings | {"num_query_heads": 1})
    own = random_own(drive.config, 26)
    out = drive.stream(own, [2, 24])
    for head in range(3):
        mine = own._replace(q=own.q[:, head : head + 1])
        assert_same(out[:, :, head : head + 1], single.stream(mine, [26], rid=f"head {head}"), f"head {head}:")
