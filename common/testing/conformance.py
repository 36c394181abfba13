"""Whether a manager of somebody's own conforms: the reference beside it, driven by the same streams, call by call."""

from __future__ import annotations

import random
from collections.abc import Callable

import torch

from boundedkv.backends import build
from boundedkv.config import BoundedKVConfig, SinkWindow
from boundedkv.manager import BoundedKVManager
from boundedkv.step import BoundedKVStep, Segment, StepContext, StreamPosition
from boundedkv.testing.differential import Pair

Factory = Callable[[BoundedKVConfig, torch.device, torch.dtype | None], BoundedKVManager]

_STEPS = 8
_REQUESTS = ("a", "b", "c")

CONFIGS = {
    "sinks and window": BoundedKVConfig(2, 1, 5, SinkWindow(2, 3), max_slots=2),
    "no sink": BoundedKVConfig(1, 1, 4, SinkWindow(0, 4), max_slots=2),
    "nothing retained": BoundedKVConfig(1, 1, 4, SinkWindow(0, 0), max_slots=2),
    "window includes the step": BoundedKVConfig(1, 1, 4, SinkWindow(1, 5, True), max_slots=2),
    "query window": BoundedKVConfig(1, 1, 4, SinkWindow(1, 4), max_slots=2, query_window=3),
    "grouped heads, two rows": BoundedKVConfig(1, 2, 3, SinkWindow(1, 3), 2, max_slots=2, num_query_heads=4),
    "reversed steps": BoundedKVConfig(1, 1, 4, SinkWindow(2, 3), max_slots=2, reverse_step_order=True),
    "sources": BoundedKVConfig(1, 1, 4, SinkWindow(2, 3), max_slots=2, max_source_len=4),
    "bfloat16 slots": BoundedKVConfig(1, 1, 4, SinkWindow(1, 3), max_slots=2, dtype=torch.bfloat16),
}


def check_streams(factory: Factory, device: torch.device | str = "cpu", seed: int = 0) -> int:
    """Drive a factory's managers beside the reference: random streams, refusals and poisoned slots included.

    Args:
        factory: called as `factory(config, device, kv_dtype)` for every config.
        device: where its managers live.
        seed: which streams.

    Returns:
        How many calls were compared, all of them equal.

    Raises:
        Difference: the first difference; the message names the config, the call and the place.
    """
    calls = 0
    for name, config in CONFIGS.items():
        pair = Pair(build(config, "cpu", backend="reference"), factory(config, torch.device(device), None))
        try:
            _drive(pair, random.Random(f"{seed} {name}"))
        except AssertionError as difference:
            difference.args = (f"config {name!r}: {difference}",)
            raise
        calls += pair.calls
    return calls


def _drive(pair: Pair, draw: random.Random) -> None:
    config = pair.left.config
    generator = torch.Generator().manual_seed(draw.randrange(2**31))
    heads = (config.rows_per_request, config.num_heads)
    source = torch.randn(2, *heads, 4, 2 * config.head_dim, generator=generator, dtype=torch.float32)
    written: dict[str, int] = {}
    source_len = {rid: draw.randint(0, config.max_source_len) for rid in _REQUESTS}
    pair.fill(float("nan"))
    for _ in range(_STEPS):
        rids = draw.sample(_REQUESTS, draw.randint(1, 2))
        tokens = draw.choice((1, 2, 5, 9))
        spans = {rid: draw.randint(0, tokens) for rid in rids}
        wrong = draw.random() < 0.1
        step = BoundedKVStep(
            tuple(Segment(rid, span) for rid, span in spans.items()),
            {rid: StreamPosition(source_len[rid], written.get(rid, 0) + wrong) for rid in rids},
            {rid: draw.randint(spans[rid], tokens) for rid in rids if draw.random() < 0.5},
        )
        ctx = StepContext(tuple(rids))
        if not pair.admit(step, ctx).ok:
            pair.remove_request(rids[0])
            written.pop(rids[0], None)
            continue
        pair.plan(step, ctx)
        rows = len(rids) * config.rows_per_request
        for layer_idx in range(config.num_layers):
            q = torch.randn(rows, config.query_heads, tokens, config.head_dim, generator=generator, dtype=torch.float32)
            k, v = (
                torch.randn(rows, config.num_heads, tokens, config.head_dim, generator=generator, dtype=torch.float32)
                for _ in range(2)
            )
            pair.attend(layer_idx, q, k, v, source=source, ieee=draw.random() < 0.2)
        if draw.random() < 0.2:
            pair.rollback_admit(step, ctx)
            for rid in rids:
                pair.remove_request(rid)
                written.pop(rid, None)
            continue
        pair.commit(step, ctx)
        written.update({rid: written.get(rid, 0) + span for rid, span in spans.items()})
