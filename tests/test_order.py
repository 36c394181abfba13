"""Sums are taken in the order that the contract states: each sum here comes out otherwise in any other order.

2^24 + 1 is a tie and rounds to 2^24, so a sum shows which of its terms met first.
"""

import pytest
import torch
from streams import Drive, Own, assert_same, on_both

from boundedkv import SinkWindow, StreamPosition
from boundedkv.numerics import SPLIT, TILE

BIG = 2.0**24
PATHS = pytest.mark.parametrize("ieee", [False, True])
LN_2 = torch.tensor(2.0).log().item()  # as a scale it makes scores base-2 logarithms
UNSEEN = -1000.0  # a score that weighs nothing


def key(score):
    """A key that a query of ones scores like this."""
    return [score, 0.0, 0.0, 0.0]


def attended(backend, keys, values, ieee):
    """One query of ones over a source, by stream position; a key that is not given weighs nothing.

    The window begins with the first of these positions: a narrow one is folded by one program, a wide one in splits.
    """
    first, length = min(keys), max(keys) + 1
    source = torch.tensor([*key(UNSEEN), 0, 0, 0, 0]).repeat(1, 1, 1, length, 1)
    for position, elements in keys.items():
        source[..., position, :4] = torch.tensor(elements)
    for position, value in values.items():
        source[..., position, 4:] = torch.tensor(value)
    drive = Drive(backend, retention=SinkWindow(0, length - first), scale=LN_2, max_source_len=length, max_slots=1)
    drive.positions["a"] = StreamPosition(length, 0)
    own = Own(torch.ones(1, 1, 1, 4), torch.tensor(key(UNSEEN)).view(1, 1, 1, 4), torch.zeros(1, 1, 1, 4))
    return drive.step({"a": 0}, own, tokens={"a": 1}, source=source, ieee=ieee)[0, 0, 0]


def summed(backend, values, ieee):
    """The sum of values that weigh alike; a power of two of them, so that their mean is as exact."""
    out = attended(backend, dict.fromkeys(values, key(0.0)), values, ieee)
    assert_same(out, out[:1].expand(4))
    return out[0].item() * len(values)


@on_both
@PATHS
def test_tiles_fold_from_left_to_right(backend, ieee):
    assert summed(backend, {0: BIG, TILE: 1.0, 2 * TILE: 1.0, 3 * TILE: 0.0}, ieee) == BIG
    assert summed(backend, {0: 1.0, TILE: 1.0, 2 * TILE: BIG, 3 * TILE: 0.0}, ieee) == BIG + 2


@on_both
@PATHS
def test_splits_fold_from_left_to_right(backend, ieee):
    assert summed(backend, {0: BIG, SPLIT: 1.0, 2 * SPLIT: 1.0, 2 * SPLIT + 1: 0.0}, ieee) == BIG
    assert summed(backend, {0: 1.0, SPLIT: 1.0, 2 * SPLIT: BIG, 2 * SPLIT + 1: 0.0}, ieee) == BIG + 2


@on_both
@PATHS
@pytest.mark.parametrize("first", [0, SPLIT - TILE - 1], ids=["wide", "narrow"])
def test_tiles_fold_inside_their_split_first(backend, ieee, first):
    assert summed(backend, {first: BIG, SPLIT: 1.0, SPLIT + TILE: 1.0, SPLIT + TILE + 1: 0.0}, ieee) == BIG + 2
    assert summed(backend, {first: BIG, SPLIT - TILE: 1.0, SPLIT: 1.0, SPLIT + 1: 0.0}, ieee) == BIG


@on_both
def test_values_of_a_tile_meet_their_neighbours_first(backend):
    assert summed(backend, {0: 1.0, 1: BIG, 2: 1.0, 3: -BIG}, ieee=True) == 1
    assert summed(backend, {0: 1.0, 1: 1.0, 2: BIG, 3: -BIG}, ieee=True) == 2
    assert summed(backend, {1: 1.0, 2: 1.0, 4: BIG, 7: 0.0}, ieee=True) == BIG + 2


@on_both
def test_weights_of_a_tile_meet_their_neighbours_first(backend):
    one_more = torch.tensor(1 + 2.0**-23)
    together = attended(backend, {0: key(-24.0), 1: key(-24.0), 32: key(0.0)}, {32: 1.0}, ieee=True)
    assert_same(together, (1 / one_more).expand(4))
    apart = attended(backend, {0: key(-24.0), 32: key(0.0), 33: key(-24.0)}, {32: 1.0}, ieee=True)
    assert_same(apart, torch.ones(4))


@on_both
@pytest.mark.parametrize(
    ("elements", "score"),
    [([1.0, BIG, 1.0, -BIG], 1.0), ([1.0, 1.0, BIG, -BIG], 2.0), ([BIG, 1.0, 1.0, -BIG], 1.0)],
)
def test_products_of_a_dot_meet_their_neighbours_first(backend, elements, score):
    out = attended(backend, {0: elements, 1: key(0.0)}, {0: [1.0, 0, 0, 0], 1: [0, 1.0, 0, 0]}, ieee=True)
    weights = torch.tensor([1.0, 2.0**-score, 0, 0])
    assert_same(out, weights / weights.sum())


@on_both
@PATHS
@pytest.mark.parametrize(("score", "expected"), [(-126.0, 2.0**-126), (-127.0, 0.0)])
def test_a_fold_takes_sums_down_to_2_to_the_minus_126(backend, score, expected, ieee):
    """Two keys in two tiles: each is the largest in its own."""
    out = attended(backend, {0: key(score), TILE: key(0.0)}, {0: [1.0, 0, 0, 0], TILE: [0, 1.0, 0, 0]}, ieee)
    assert_same(out, torch.tensor([expected, 1.0, 0, 0]))
