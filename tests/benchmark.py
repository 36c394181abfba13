"""Time the fast backend beside PyTorch's attention over the same keys: `python tests/benchmark.py --help`.

One table, a line for each step and element type of the pool. docs/gpu.md says what its columns mean.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from boundedkv import BoundedKVConfig, Session, SinkWindow, build

TYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class Step(NamedTuple):
    """A step that is timed: B requests, each with `retained` entries in its slot and `tokens` of its own."""

    name: str
    requests: int
    tokens: int
    retained: int
    heads: int = 8
    head_dim: int = 64
    causal: bool = False


STEPS = (
    Step("speech", 8, 25, 100),
    Step("speech", 8, 25, 400),
    Step("speech", 8, 25, 1000),
    Step("decode", 1, 1, 4096, head_dim=128),
    Step("decode", 64, 1, 4096, head_dim=128),
    Step("prefill", 4, 512, 1024, causal=True),
)
# The same kinds of steps, small enough for the interpreter.
TINY = (Step("speech", 2, 3, 6, 1, 4), Step("decode", 1, 1, 9, 1, 4), Step("prefill", 1, 5, 9, 1, 4, causal=True))

DEFAULT, IEEE, GATHERED, MASKED, BARE = WAYS = ("default", "ieee", "gathered", "masked", "bare")


class Timing(NamedTuple):
    """Seconds of each round, and whether the device had to wait for the host in most of them."""

    rounds: tuple[float, ...]
    waited: bool

    @property
    def median(self) -> float:
        return statistics.median(self.rounds)


class Line(NamedTuple):
    """A line of the table."""

    step: Step
    kind: str
    timings: dict[str, Timing]

    @property
    def read(self) -> int:
        """Bytes of keys and values that the step reads: each visible one once."""
        entries = self.step.requests * (self.step.retained + self.step.tokens)
        return entries * self.step.heads * 2 * self.step.head_dim * TYPES[self.kind].itemsize

    def ratio(self, way: str, other: str) -> float:
        """How many times as long one way takes: the median over rounds, in which both ran side by side."""
        pairs = zip(self.timings[way].rounds, self.timings[other].rounds, strict=True)
        return statistics.median(mine / theirs for mine, theirs in pairs)


def ways(step: Step, dtype: torch.dtype, device: torch.device) -> dict[str, Callable[[], Tensor]]:
    """The calls to time, all over the same keys: ours from the slots, PyTorch's from dense tensors."""
    sink = 4
    config = BoundedKVConfig(
        num_layers=1,
        num_heads=step.heads,
        head_dim=step.head_dim,
        retention=SinkWindow(sink, step.retained - sink),
        max_slots=step.requests,
        dtype=dtype,
        query_window=step.retained - sink if step.causal else None,
    )
    manager = build(config, device, backend="fast")
    session = Session(manager)
    rids = [str(i) for i in range(step.requests)]
    # Any entries will do, and the stream stands in the middle of a turn of the ring.
    for span in (step.retained, step.retained // 2):
        with session.step(dict.fromkeys(rids, span)):
            pass
    pool = manager.layer(0).normal_()
    shape = step.requests, step.heads, step.tokens, step.head_dim
    q, k, v = (torch.randn(shape, dtype=dtype, device=device) for _ in range(3))
    with session.step(dict.fromkeys(rids, step.tokens)) as planned:
        plan = planned.plan
    slots = torch.tensor([slot for slot, _, _ in plan.rows], device=device)

    def gathered() -> tuple[Tensor, Tensor]:
        entries = pool[slots, 0]  # [B, H, cap, 2D]
        keys, values = entries.split(step.head_dim, dim=-1)
        return torch.cat([keys, k], dim=2), torch.cat([values, v], dim=2)

    keys, values = gathered()
    mask = visible(config, step, session.written("0") - step.tokens, device)
    return {
        DEFAULT: lambda: manager.attend(0, q, k, v, plan=plan),
        IEEE: lambda: manager.attend(0, q, k, v, plan=plan, ieee=True),
        GATHERED: lambda: scaled_dot_product_attention(q, *gathered(), attn_mask=mask),
        MASKED: lambda: scaled_dot_product_attention(q, keys, values, attn_mask=mask),
        BARE: lambda: scaled_dot_product_attention(q, keys, values),
    }


def visible(config: BoundedKVConfig, step: Step, written: int, device: torch.device) -> Tensor:
    """What each query sees of the slot's entries and of the own ones: [1, 1, T, cap + T]."""
    sink, ring = config.sink_capacity, config.ring_capacity
    place = torch.arange(ring)
    last = written - 1
    in_ring = last - (last - sink - place) % ring  # the stream position that each place of the ring holds
    own = torch.arange(written, written + step.tokens)
    positions = torch.cat([torch.arange(sink), in_ring, own])
    distance = own[:, None] - positions
    sees = torch.ones_like(distance, dtype=torch.bool)
    if config.query_window is not None:
        sees = (distance >= 0) & ((distance <= config.query_window) | (positions < sink))
    return sees[None, None].to(device)


def clocked(call: Callable[[], Tensor], flush: Tensor) -> tuple[float, bool]:
    """Seconds of a call on the device of `flush`, and whether the device waited for the host.

    On a GPU the second-level cache is emptied first, by writing `flush`: in a model other layers lie between two
    calls. That takes long enough for the host to queue the call meanwhile, so that kernels are timed and not Python.
    """
    if flush.device.type == "cpu":
        begun = time.perf_counter()
        call()
        return time.perf_counter() - begun, False
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    for _ in range(4):
        flush.zero_()
    begin.record()
    call()
    end.record()
    waited = begin.query()  # the device was there before the host had queued the call
    end.synchronize()
    return begin.elapsed_time(end) / 1000, waited


def measured(step: Step, kind: str, device: torch.device, rounds: int) -> Line:
    """Time every way in turn, round by round, after two rounds that do not count: the first compiles."""
    calls = ways(step, TYPES[kind], device)
    flush = torch.empty(1 << (28 if device.type == "cuda" else 0), device=device)  # 1 GiB, no cache is as large
    for _ in range(2 if device.type == "cuda" else 0):  # on the CPU nothing is compiled
        for call in calls.values():
            clocked(call, flush)
    times = [{way: clocked(call, flush) for way, call in calls.items()} for _ in range(rounds)]
    timings = {
        way: Timing(tuple(each[way][0] for each in times), 2 * sum(each[way][1] for each in times) > rounds)
        for way in WAYS
    }
    return Line(step, kind, timings)


RATIOS = ((DEFAULT, GATHERED), (DEFAULT, MASKED), (DEFAULT, BARE), (IEEE, MASKED))


def table(lines: Iterable[Line]) -> str:
    """The lines as text, with a line of titles."""
    titles = [*"step B T kept D pool".split(), *(f"{way} us" for way in WAYS), "default GB/s", "ieee GB/s"]
    rows = [[*titles, *(f"{way}/{other}" for way, other in RATIOS)]]
    for line in lines:
        step, timings = line.step, line.timings
        cells = [step.name, *map(str, (step.requests, step.tokens, step.retained, step.head_dim)), line.kind]
        cells += [f"{timings[way].median * 1e6:.1f}{'*' if timings[way].waited else ''}" for way in WAYS]
        cells += [f"{line.read / timings[way].median / 1e9:.0f}" for way in (DEFAULT, IEEE)]
        rows.append(cells + [f"{line.ratio(way, other):.2f}" for way, other in RATIOS])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)


def main(arguments: list[str] | None = None) -> None:
    """Time every step and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda", help="where to run (default: cuda; cpu says nothing of speed)")
    parser.add_argument("--tiny", action="store_true", help="steps small enough for Triton's interpreter")
    parser.add_argument("--rounds", type=int, default=50, metavar="N", help="timings of each call; 0: only compile")
    options = parser.parse_args(arguments)
    device = torch.device(options.device)
    torch.manual_seed(0)
    with torch.inference_mode():
        lines = [
            measured(step, kind, device, options.rounds) for step in (TINY if options.tiny else STEPS) for kind in TYPES
        ]
    if options.rounds:
        print(table(lines))


if __name__ == "__main__":
    main()
