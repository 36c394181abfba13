"""The words of a refusal, so that every backend refuses alike.

What a backend knows of its requests is its own; how it says that a step contradicts it is the interface's.
"""

from __future__ import annotations

from boundedkv.step import AdmitRuntimeError, AllocationFailed, StreamPosition


def wrong_written(request_id: str, declared: int, known: int) -> AdmitRuntimeError:
    """The step starts elsewhere than the stream stands."""
    return _contradiction(request_id, f"written is {declared}, but should be {known}, which is what was committed")


def changed_source_len(request_id: str, declared: int, known: int) -> AdmitRuntimeError:
    """The step declares another source length than the request's first one did."""
    return _contradiction(request_id, f"source_len is {declared}, but should be {known}, as in its first admitted step")


def changed_source(request_id: str, declared: int, known: int) -> AdmitRuntimeError:
    """The step declares another source than the request's first one did."""
    return _contradiction(request_id, f"source is {declared}, but should be {known}, as in its first admitted step")


def no_slot_left(request_id: str, needed: int, free: int) -> AllocationFailed:
    """More fresh slots are needed than are free."""
    message = f"request {request_id!r}: no slot left; {needed} fresh ones are needed and {free} are free"
    return AllocationFailed(message, request_id, needed - free)


def not_admitted(request_id: str) -> AdmitRuntimeError:
    """A plan or a commit for a request that holds no slot."""
    return AdmitRuntimeError(f"request {request_id!r} holds no slot; admit its step first", request_id)


def stale_commit(request_id: str, position: StreamPosition, span: int, known: int) -> AdmitRuntimeError:
    """A commit of a step that is neither pending nor the last one committed."""
    return AdmitRuntimeError(
        f"request {request_id!r}: the commit of {span} tokens at written {position.written} fits no pending step, nor "
        f"the state that its stream is in ({known} written); it was removed, reset, rewound or admitted anew since",
        request_id,
    )


def cannot_rewind(request_id: str, declared: int, known: int, spare: int, reach: int) -> ValueError:
    """A rewind past what the spare ring entries still hold."""
    least = max(0, reach - spare)
    possible = f"should be from {least} to {known}" if least <= known else "no rewind is possible"
    return ValueError(
        f"written is {declared} for request {request_id!r}, but {possible}: {known} are committed, steps were planned "
        f"up to {reach}, and spare is {spare}"
    )


def _contradiction(request_id: str, what: str) -> AdmitRuntimeError:
    return AdmitRuntimeError(f"request {request_id!r}: {what}", request_id)
