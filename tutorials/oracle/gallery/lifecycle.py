"""What is known of the pool and its requests goes wrong, though no result does yet."""

from boundedkv import AllocationFailed
from boundedkv.reference import ReferenceManager
from boundedkv.reference.manager import Request

from .planted import found_with


@found_with("batch", "refusals")
class RefusedStepKeepsASlot(ReferenceManager):
    """A step is refused for want of slots, and those of its requests that found one keep it."""

    def _admit(self, step, ctx):
        outcome = super()._admit(step, ctx)
        if not isinstance(outcome.reason, AllocationFailed):
            return outcome
        free = [slot for slot in range(self.config.max_slots) if all(r.slot != slot for r in self._requests.values())]
        fresh = [rid for rid in step.positions if rid not in self._requests]
        for rid, slot in zip(fresh, free, strict=False):
            self._requests[rid] = Request(slot, 0, 0)
        return outcome


@found_with()
class SlotLeak(ReferenceManager):
    """A request that ends before its first commit does not give its slot back."""

    def _remove_request(self, rid):
        if rid in self._requests and self._requests[rid].written:
            super()._remove_request(rid)


@found_with("refusals")
class CommitCountsTwice(ReferenceManager):
    """A commit that is repeated, after a retry say, counts its span again."""

    def _commit(self, step, ctx):
        again = [segment for segment in step.segments if self._is_committed(segment)]
        super()._commit(step, ctx)
        for rid, span, _ in again:
            self._requests[rid].written += span

    def _is_committed(self, segment):
        return segment.request_id in self._requests and self._requests[segment.request_id].committed is not None


@found_with("spare", "refusals")
class RewindsTooFar(ReferenceManager):
    """A stream is taken back further than the spare entries reach."""

    def _rewind_request(self, rid, written):
        request = self._requests.get(rid)
        if request is None or written > request.written:
            return super()._rewind_request(rid, written)
        request.written, request.pending, request.committed = written, None, None


@found_with("export")
class ImportForgetsTheCount(ReferenceManager):
    """An imported stream has its entries, and stands at 0 written."""

    def _import_request(self, rid, stream):
        super()._import_request(rid, stream)
        self._requests[rid].written = 0


@found_with("refusals")
class LateCommitHitsTheSuccessor(ReferenceManager):
    """A request ends and another takes its id; a late commit of the old step moves the new one's count."""

    def _granted(self, segment, step):
        request, grant = self._requests[segment.request_id], super()._granted(segment, step)
        return grant if grant in (request.pending, request.committed) else request.pending
