"""The serving loop: requests join, bring their text in chunks of their own, and leave, all in one ragged batch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from boundedkv.demo.arrivals import Request
from boundedkv.demo.model import CharModel
from boundedkv.demo.text import BEGIN, streams
from boundedkv.plan import Row
from boundedkv.step import AllocationFailed, BoundedKVStep, Segment, StepContext, StreamPosition
from boundedkv.testing import Difference, Pair


@dataclass
class Stream:
    """A request on its way.

    Attributes:
        request: what it is going to do.
        symbols: its text, int64 `[length]`, with one symbol more than it reads: the last one to predict.
        written: symbols read so far.
        nats: what predicting the symbols after them has cost.
    """

    request: Request
    symbols: Tensor
    written: int = 0
    nats: float = 0.0
    _step: int = 0

    @property
    def chunk(self) -> int:
        """Symbols it brings in its next step."""
        return self.request.chunks[self._step]

    @property
    def done(self) -> bool:
        """It has read everything."""
        return self._step == len(self.request.chunks)

    def advance(self, scores: Tensor) -> None:
        """Take the model's scores for its chunk, `[chunk, NUM_SYMBOLS]`, and move past it."""
        end = self.written + len(scores)
        self.nats += cross_entropy(scores, self.symbols[self.written + 1 : end + 1], reduction="sum").item()
        self.written = end
        self._step += 1


def open_stream(request: Request) -> Stream:
    """The stream of a request: the first text of its module, as long as its chunks and one symbol more."""
    length = sum(request.chunks) + 1
    return Stream(request, streams(request.module, length)[0])


class Turn(NamedTuple):
    """What one step did, for the picture.

    Attributes:
        names: the batch's requests.
        rows: the plan's rows, one a request.
    """

    names: tuple[str, ...]
    rows: tuple[Row, ...]


@dataclass
class Record:
    """What a whole run did.

    Attributes:
        turns: its steps.
        waits: steps that were refused a slot and ran without the request that asked.
        peak: the most stream entries alive at one time, which is what a growing cache would hold.
    """

    turns: list[Turn] = field(default_factory=list)
    waits: int = 0
    peak: int = 0


@torch.no_grad()
def run(model: CharModel, pair: Pair, arriving: Iterable[Stream], progress: Callable[[int, int], None]) -> Record:
    """Serve all streams to their end.

    Args:
        model: reads the symbols.
        pair: both managers.
        arriving: in order of arrival; at most one joins a step.
        progress: called after every step with the chunks served and the calls compared so far.

    Raises:
        Difference: the managers disagreed.
    """
    record, waiting, running, served = Record(), list(arriving), list[Stream](), 0
    while waiting or running:
        if waiting and (not running or waiting[0].request.joins <= len(record.turns)):
            running.append(waiting.pop(0))
        step, ctx = declare(running)
        outcome = pair.admit(step, ctx)
        if isinstance(outcome.reason, AllocationFailed):
            record.waits += 1
            waiting.insert(0, running.pop())
            step, ctx = declare(running)
            outcome = pair.admit(step, ctx)
        if outcome.reason is not None:
            raise outcome.reason
        record.turns.append(Turn(ctx.request_ids, pair.plan(step, ctx).rows))
        scores = forward(model, pair, running)
        pair.commit(step, ctx)
        served += len(running)
        record.peak = max(record.peak, sum(stream.written + stream.chunk for stream in running))
        for stream, row in zip(tuple(running), scores, strict=True):
            stream.advance(row[: stream.chunk])
            if stream.done:
                running.remove(stream)
                pair.remove_request(stream.request.module)
        progress(served, pair.calls)
    return record


def declare(running: Sequence[Stream]) -> tuple[BoundedKVStep, StepContext]:
    """The step in which every running stream brings its next chunk."""
    chunks = {stream.request.module: stream.chunk for stream in running}
    step = BoundedKVStep(
        segments=tuple(Segment(name, chunk) for name, chunk in chunks.items()),
        positions={stream.request.module: StreamPosition(0, stream.written) for stream in running},
        tokens=chunks,
    )
    return step, StepContext(request_ids=tuple(chunks))


def forward(model: CharModel, pair: Pair, running: Sequence[Stream]) -> Tensor:
    """Scores `[B, T, NUM_SYMBOLS]` of one step; T is the largest chunk, shorter ones are filled up behind."""
    longest = max(stream.chunk for stream in running)
    symbols = torch.full((len(running), longest), BEGIN)
    positions = torch.zeros_like(symbols)
    for row, stream in enumerate(running):
        symbols[row, : stream.chunk] = stream.symbols[stream.written : stream.written + stream.chunk]
        positions[row] = stream.written + torch.arange(longest)
    try:
        scores: Tensor = model(symbols, positions, pair.attend)
    except Difference as difference:
        names = ", ".join(f"{row} is {stream.request.module!r}" for row, stream in enumerate(running))
        difference.add_note(f"result[row, token, head, element]; of the rows, {names}")
        raise
    return scores
