"""What an engine says of each step: which requests it runs, where their streams stand, and what came of admitting."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple


class Segment(NamedTuple):
    """One request's part of a step.

    Attributes:
        request_id: the request.
        span: tokens that join its stream (the first `span` of the step's own tokens); 0 reads only.
        label: the engine's name for the part; kept for it, not read here.
    """

    request_id: str
    span: int
    label: str = "main"


class StreamPosition(NamedTuple):
    """Where a request's stream stands when a step starts.

    Attributes:
        source_len: entries of its source prefix.
        written: entries it has written before this step.
        source: index of its prefix in the layer's `source` bank; -1 reads it from `row_source`.
    """

    source_len: int
    written: int
    source: int = 0


@dataclass(frozen=True, eq=False)
class BoundedKVStep:
    """One step as the model declares it. Two steps are the same only if they are the same object.

    Attributes:
        segments: one `Segment` a request.
        positions: request id -> `StreamPosition`.
        tokens: request id -> how many of the row's own tokens are real. A request left out brings all T of them, so
            say it for each row that is shorter: nothing else tells its padding from tokens. As in `positions`,
            entries of requests that are not in the step are not looked at.
    """

    segments: tuple[Segment, ...]
    positions: Mapping[str, StreamPosition]
    tokens: Mapping[str, int] = field(default_factory=dict)


class BucketKey(NamedTuple):
    """The shape a captured graph was captured for.

    Attributes:
        graph_walk: the walk of the model's graph.
        bs: rows of the batch, padding included.
        num_tokens: own tokens of each row.
    """

    graph_walk: str
    bs: int
    num_tokens: int


class SlotLease(NamedTuple):
    """A graph's persistent buffers, lent to one step.

    Attributes:
        slot: which of the bucket's buffers.
        bucket: the captured shape.
    """

    slot: int
    bucket: BucketKey


class GraphSlotSpec(NamedTuple):
    """One set of persistent buffers that a runner is going to lease.

    Attributes:
        bucket: the captured shape.
        slot: which of the bucket's buffers.
    """

    bucket: BucketKey
    slot: int


@dataclass(frozen=True)
class StepContext:
    """How the engine runs a step.

    Attributes:
        request_ids: the batch's requests, in row order.
        graph_walk: the walk of the model's graph.
        slot: the engine's own buffer index; not read here.
        capture: a graph is being captured: every row plans empty, no request is touched.
        slot_lease: the persistent buffers that the step's plan is written to; None in eager mode.
        padded_request_ids: `request_ids` and the padding rows behind them, in row order; None without padding.
        plan_results: where the engine keeps each resource's plan.
    """

    request_ids: tuple[str, ...]
    graph_walk: str = "main"
    slot: int = 0
    capture: bool = False
    slot_lease: SlotLease | None = None
    padded_request_ids: tuple[str, ...] | None = None
    plan_results: dict[str, Any] = field(default_factory=dict)

    @property
    def row_ids(self) -> tuple[str, ...]:
        """The id of every row, padding included."""
        return self.request_ids if self.padded_request_ids is None else self.padded_request_ids

    def is_padding_row(self, request_id: str) -> bool:
        """Whether this id stands for a padding row: it is in `padded_request_ids` only."""
        return request_id not in self.request_ids and request_id in (self.padded_request_ids or ())


class AllocationFailed(RuntimeError):
    """No slot is left; the caller may retry when a request has ended.

    Args:
        message: what was asked for and what there was.
        request_id: the first request that found no slot.
        slots_short: slots that the step lacks.
    """

    def __init__(self, message: str, request_id: str, slots_short: int) -> None:
        """Keep the request and the shortage beside the message."""
        super().__init__(message)
        self.message = message
        self.request_id = request_id
        self.slots_short = slots_short


class AdmitRuntimeError(RuntimeError):
    """A step contradicts itself or what is known of a request; trying again cannot help.

    Args:
        message: names the request, what was declared and what is known.
        request_id: the request.
    """

    def __init__(self, message: str, request_id: str) -> None:
        """Keep the request beside the message."""
        super().__init__(message)
        self.message = message
        self.request_id = request_id


class AdmitOutcome(NamedTuple):
    """What came of `admit`.

    Attributes:
        ok: the step was admitted. If not, nothing was changed.
        ready: the step can run now (a pool of slots never makes a step wait: always True).
        reason: why the step was refused: an `AllocationFailed` or an `AdmitRuntimeError`, not raised but returned.
    """

    ok: bool
    ready: bool = True
    reason: AllocationFailed | AdmitRuntimeError | None = None


ADMIT_OK = AdmitOutcome(ok=True)
"""The outcome of every step that is admitted."""
