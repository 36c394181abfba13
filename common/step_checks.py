"""What an engine may say of a step: looked at here before a backend touches anything."""

from __future__ import annotations

from collections.abc import Mapping

from boundedkv.config import BoundedKVConfig
from boundedkv.numerics import MAX_POSITION
from boundedkv.step import (
    AdmitRuntimeError,
    BoundedKVStep,
    BucketKey,
    Segment,
    SlotLease,
    StepContext,
    StreamPosition,
)


def check_types(step: object, ctx: object) -> None:
    """Raise `TypeError` where a lifecycle call was given something else than a step and its context."""
    if not isinstance(step, BoundedKVStep):
        raise TypeError(f"step is {type(step).__name__}, but should be a BoundedKVStep")
    if not isinstance(ctx, StepContext):
        raise TypeError(f"ctx is {type(ctx).__name__}, but should be a StepContext")
    _check_sequence("step.segments", step.segments, Segment)
    for index, segment in enumerate(step.segments):
        if not isinstance(segment.request_id, str):
            raise TypeError(f"step.segments[{index}].request_id is {segment.request_id!r}, but should be a string")
    for name, value in (("positions", step.positions), ("tokens", step.tokens)):
        if not isinstance(value, Mapping):
            raise TypeError(f"step.{name} is {type(value).__name__}, but should be a mapping")
    _check_sequence("ctx.request_ids", ctx.request_ids, str)
    if ctx.padded_request_ids is not None:
        _check_sequence("ctx.padded_request_ids", ctx.padded_request_ids, str)
    if ctx.slot_lease is not None:
        if not isinstance(ctx.slot_lease, SlotLease):
            raise TypeError(f"ctx.slot_lease is {type(ctx.slot_lease).__name__}, but should be a SlotLease")
        check_bucket("ctx.slot_lease.bucket", ctx.slot_lease.bucket)


def check_bucket(name: str, bucket: object) -> None:
    """Raise `ValueError` where a captured shape is none."""
    if not isinstance(bucket, BucketKey) or not _is_int(bucket.bs) or bucket.bs < 1:
        raise ValueError(f"{name} is {bucket!r}, but should be a BucketKey with a bs of at least 1")


def _check_sequence(name: str, value: object, kind: type) -> None:
    if not isinstance(value, tuple | list):
        raise TypeError(f"{name} is {type(value).__name__}, but should be a tuple of {kind.__name__}")
    for index, item in enumerate(value):
        if not isinstance(item, kind):
            raise TypeError(f"{name}[{index}] is {item!r}, but should be a {kind.__name__}")


def check_request_id(rid: object) -> None:
    """Raise `TypeError` where a request's id is not a string."""
    if not isinstance(rid, str):
        raise TypeError(f"rid is {rid!r}, but should be a string")


def real_segments(step: BoundedKVStep, ctx: StepContext) -> list[Segment]:
    """The step's segments without those of padding rows, in their order."""
    if ctx.padded_request_ids is None:
        return list(step.segments)
    return [segment for segment in step.segments if not ctx.is_padding_row(segment.request_id)]


def step_problem(config: BoundedKVConfig, step: BoundedKVStep, ctx: StepContext) -> AdmitRuntimeError | None:
    """Find where a step contradicts itself, its context or the config; None where it does not.

    The first problem in this order is told: the batch's rows, then the segments in order, then requests without one.
    """
    problem = _batch_problem(ctx)
    if problem is not None or ctx.capture:
        return problem
    batch = set(ctx.request_ids)
    seen: set[str] = set()
    for segment in real_segments(step, ctx):
        rid = segment.request_id
        if rid not in batch:
            return _problem(rid, "has a segment, but should be in the batch")
        if rid in seen:
            return _problem(rid, "has two segments in one step, but should have one")
        seen.add(rid)
        what = _segment_problem(config, segment, step)
        if what is not None:
            return _problem(rid, what)
    for rid in ctx.request_ids:
        if rid not in seen:
            return _problem(rid, "is in the batch without a segment, but should have one")
    return None


def _problem(rid: str, what: str) -> AdmitRuntimeError:
    return AdmitRuntimeError(f"request {rid!r}: {what}", rid)


def _batch_problem(ctx: StepContext) -> AdmitRuntimeError | None:
    rows = ctx.row_ids
    seen: set[str] = set()
    for rid in rows:
        if rid in seen:
            return _problem(rid, "is in the batch twice, but should be there once")
        seen.add(rid)
    for rid in ctx.request_ids:
        if rid not in seen:
            return _problem(rid, "is in request_ids, but should be in padded_request_ids too")
    if ctx.slot_lease is not None and len(rows) > ctx.slot_lease.bucket.bs:
        bs = ctx.slot_lease.bucket.bs
        return _problem(rows[bs], f"is row {bs} of a leased batch, but should fit its bs of {bs}")
    return None


def _segment_problem(config: BoundedKVConfig, segment: Segment, step: BoundedKVStep) -> str | None:
    position = step.positions.get(segment.request_id)
    if not isinstance(position, StreamPosition):
        return f"position is {position!r}, but should be a StreamPosition"
    source_len, written, source = position
    for name, value, least, most in (
        ("span", segment.span, 0, MAX_POSITION),
        ("source_len", source_len, 0, config.max_source_len),
        ("written", written, 0, MAX_POSITION),
        ("source", source, -1, MAX_POSITION),
    ):
        if not _is_int(value) or not least <= value <= most:
            return f"{name} is {value!r}, but should be an integer from {least} to {most}"
    tokens = step.tokens.get(segment.request_id, segment.span)
    if not _is_int(tokens) or not segment.span <= tokens <= MAX_POSITION:
        return f"tokens is {tokens!r}, but should be an integer from its span {segment.span} to {MAX_POSITION}"
    length = source_len + written
    if length > MAX_POSITION or length + tokens - 1 > MAX_POSITION:
        return (
            f"its stream of {length} entries and {tokens} tokens reach stream position {length + max(tokens, 1) - 1}, "
            f"but should stay within {MAX_POSITION}"
        )
    return None


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
