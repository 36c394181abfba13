"""Scenarios 24-29 that users of other caches reported: empty tiles and rows, poison, element types, strides, layers."""

from itertools import permutations, product

import pytest
import torch
from streams import (
    INF,
    NAN,
    Drive,
    Everything,
    Own,
    assert_same,
    normal,
    on_both,
    probe_step,
    random_own,
    random_source,
)

from boundedkv import SinkWindow, StreamPosition

FLOATS = (torch.float32, torch.float16, torch.bfloat16)
PATHS = pytest.mark.parametrize("ieee", [False, True])


@on_both
@pytest.mark.parametrize(("sink", "window", "spans"), [(0, 10, [80]), (2, 10, [80]), (0, 3, [60, 8])])
def test_s24_a_tile_that_a_query_does_not_see(backend, sink, window, spans):
    drive = Drive(backend, retention=SinkWindow(sink, window), query_window=window, head_dim=16)
    stream, seen = Everything(drive.config), []
    for span in spans:
        seen += probe_step(drive, stream, span)
    blind = [p for p, visible in enumerate(seen) if p >= 64 and not set(range(sink, 64)) & set(visible)]
    assert blind == list(range(64 + window, sum(spans))), "no query is there that sees nothing of the first tile"


@on_both
@PATHS
@pytest.mark.parametrize("query_window", [None, 0])
def test_s24_a_query_whose_pairs_are_all_masked_gets_zero(backend, query_window, ieee):
    drive = Drive(backend, retention=SinkWindow(0, 0), query_window=query_window)
    assert drive.config.slot_tokens == 0
    v = torch.tensor([[3.0, -5.0, 0.5, 7.0], [-1.0, 2.0, 8.0, -0.25], [4.0, 4.0, -2.0, 1.0]])[None, None]
    own = Own(torch.zeros_like(v), normal(1, *v.shape), v)
    bias = torch.zeros(1, 1, 3, 5 if query_window is None else 1)
    bias[:, :, 1] = -INF
    for _ in range(2):
        out = drive.step({"a": 3}, own, rel_bias=bias, ieee=ieee)
        mean = torch.tensor([6.0, 1.0, 6.5, 7.75]) / 3
        expected = [mean, torch.zeros(4), mean] if query_window is None else [v[0, 0, 0], torch.zeros(4), v[0, 0, 2]]
        assert_same(out[0, :, 0], torch.stack(expected))


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize(("got", "expected"), [(NAN, 1.0), (1.0, NAN), (0.0, -0.0), (NAN, INF), (1.0, 1.0078125)])
def test_s24_a_comparison_that_meets_another_number_fails(dtype, got, expected):
    numbers, others = torch.tensor([2.0, got]).to(dtype), torch.tensor([2.0, expected]).to(dtype)
    assert_same(numbers, numbers.clone())
    with pytest.raises(AssertionError, match=r"result\[1\] = .* \(1 of 2 elements differ\)"):
        assert_same(numbers, others)


@on_both
@pytest.mark.parametrize(("sink", "window"), [(3, 2), (0, 1)])
def test_s25_what_was_never_written_is_never_read(backend, sink, window):
    drives = [Drive(backend, retention=SinkWindow(sink, window), spare=1) for _ in range(2)]
    drives[1].poison()
    own = random_own(drives[0].config, sink + window + 3)
    for n in range(sink + window + 3):
        zeroed, poisoned = (drive.step({"a": 1}, own.cut(n, n + 1)) for drive in drives)
        assert zeroed.isfinite().all()
        assert_same(poisoned, zeroed, f"after {n} tokens:")


TYPES = list(product(FLOATS, repeat=5))
PICKS = [
    (torch.bfloat16, torch.float32, torch.float32, torch.float16, torch.float32),
    (torch.float32, torch.float32, torch.float32, torch.bfloat16, torch.float32),
    (torch.float16, torch.bfloat16, torch.float16, torch.float32, torch.bfloat16),
]


@on_both
def test_s26_element_types_are_converted_by_value(backend):
    """A run of mixed types is the float32 run of the same values, rounded once to q's type."""
    settings = {"retention": SinkWindow(1, 3), "max_source_len": 3}
    for types in TYPES if backend == "reference" else PICKS:
        q_type, k_type, v_type, pool_type, source_type = types
        mixed, plain = Drive(backend, dtype=pool_type, **settings), Drive(backend, **settings)
        raw, source = random_own(plain.config, 7), random_source(plain.config, 1, 3).to(source_type)
        own = Own(raw.q.to(q_type), raw.k.to(k_type), raw.v.to(v_type))
        in_pool = Own(own.q.float(), *(x.to(pool_type).float() for x in own[1:]))
        for drive in (mixed, plain):
            drive.positions["a"] = StreamPosition(3, 0)
        got = mixed.stream(own, [4, 3], source=source)
        assert_same(got, plain.stream(in_pool, [4, 3], source=source.float()).to(q_type), f"{types}:")
        assert_same(mixed.slots().float(), plain.slots(), f"slots of {types}:")


@on_both
@PATHS
def test_s26_the_bias_may_be_of_another_type(backend, ieee):
    drives = [Drive(backend, retention=SinkWindow(0, 2), dtype=torch.bfloat16) for _ in range(3)]
    own, bias = random_own(drives[0].config, 2).to(torch.float16), normal(5, 1, 1, 2, 3)
    for other, drive in zip((torch.float16, torch.bfloat16), drives[1:], strict=True):
        expected = drives[0].step({"a": 0}, own, tokens={"a": 2}, rel_bias=bias.to(other).float(), ieee=ieee)
        assert_same(drive.step({"a": 0}, own, tokens={"a": 2}, rel_bias=bias.to(other), ieee=ieee), expected)


@on_both
@PATHS
def test_s27_strides_do_not_matter(backend, ieee):
    settings = {"retention": SinkWindow(1, 3), "max_source_len": 4, "num_heads": 2}
    device = Drive(backend, **settings).manager.device
    wide = normal(1, 2, 7, 1, 2, 9).to(device)  # another source, more entries, two heads, one more element
    views = {
        "slice": wide[1:, 2:6, :, :, :8].permute(0, 2, 3, 1, 4),
        "expanded": wide[:1, :1, :, :1, 1:].permute(0, 2, 3, 1, 4).expand(3, 1, 2, 4, 8),
        "every second": normal(2, 1, 1, 2, 8, 16).to(device)[:, :, :, ::2, ::2],
    }
    turned = Own(*(normal(seed, 2, 2, 2, 4).to(device).transpose(1, 2) for seed in range(3)))
    spread = Own(*(normal(seed, 3, 3, 2, 8).to(device)[1:, 1:, :, 1::2].transpose(1, 2) for seed in range(3)))
    for name, source in views.items():
        if ieee and name != "slice":
            continue  # how a tile is loaded does not depend on the path
        own = spread if name == "slice" else turned
        assert not own.q.is_contiguous()
        assert not source.is_contiguous()
        outs = []
        for same in (lambda x: x, lambda x: x.contiguous()):
            drive = Drive(backend, **settings)
            drive.positions = {"a": StreamPosition(4, 0), "b": StreamPosition(4, 0)}
            drive.step({"a": 2, "b": 2}, Own(*map(same, own)), source=same(source), ieee=ieee)
            drive.plan({"a": 0, "b": 0})
            cut = Own(*(same(x[:, :, 1:2]) for x in own))
            outs.append((drive.attend(cut, source=same(source), ieee=ieee), drive.slots()))
        assert_same(outs[0][0], outs[1][0], f"{name}:")
        assert_same(outs[0][1], outs[1][1], f"{name}: slots")


@on_both
@pytest.mark.parametrize("head_dim", [24, 72, 80, 96, 1, 129])
def test_s28_memory_beside_the_head_is_not_read(backend, head_dim):
    settings = {"retention": SinkWindow(1, 3), "max_source_len": 2, "head_dim": head_dim}
    drives = [Drive(backend, **settings) for _ in range(2)]
    own, source = random_own(drives[0].config, 5), random_source(drives[0].config, 1, 2)
    device = drives[0].manager.device

    def between_poison(x):
        room = torch.full((*x.shape[:-2], x.shape[-2] + 2, x.shape[-1] + 9), NAN, device=device)
        room[..., 1:-1, 4:-5] = x.to(device)
        return room[..., 1:-1, 4:-5]

    outs = []
    for drive, held in zip(drives, (lambda x: x, between_poison), strict=True):
        drive.positions["a"] = StreamPosition(2, 0)
        for span, ieee in ((3, False), (2, head_dim in (1, 72))):
            start = drive.positions["a"].written
            cut = Own(*map(held, own.cut(start, start + span)))
            outs.append(drive.step({"a": span}, cut, source=held(source), ieee=ieee))
    assert outs[0].isfinite().all()
    assert_same(outs[2], outs[0])
    assert_same(outs[3], outs[1])
    assert_same(drives[1].slots(), drives[0].slots(), "slots")


@on_both
def test_s29_layers_do_not_meet(backend):
    orders = list(permutations(range(3))) if backend == "reference" else [(2, 0, 1)]
    settings = {"retention": SinkWindow(1, 2)}
    single = [Drive(backend, **settings) for _ in range(3)]
    own = [random_own(single[0].config, 4, seed=layer) for layer in range(3)]
    alone = [[drive.step({"a": 2}, own[i].cut(n, n + 2)) for n in (0, 2)] for i, drive in enumerate(single)]
    for order in orders:
        drive = Drive(backend, num_layers=3, **settings)
        for turn in range(2):
            drive.plan({"a": 2})
            for layer in order if turn == 0 else reversed(order):
                others = [drive.slots(i) for i in range(3) if i != layer]
                out = drive.attend(own[layer].cut(2 * turn, 2 * turn + 2), layer)
                assert_same(out, alone[layer][turn], f"layer {layer}, order {order}:")
                for before, i in zip(others, (i for i in range(3) if i != layer), strict=True):
                    assert_same(drive.slots(i), before, f"slots of layer {i}")
            drive.advance({"a": 2})
