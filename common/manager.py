"""The one interface: a pool of fixed-size slots, driven step by step.

Every public call checks its arguments here, then calls the backend's method of the same name with an underscore. A
backend subclasses `BoundedKVManager` and writes those methods; nothing else of it is seen from outside.
"""

from __future__ import annotations

import dataclasses
import threading
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from boundedkv import attend_checks, refusals, step_checks
from boundedkv.attend_checks import PlanNeeds, RowSource
from boundedkv.config import BoundedKVConfig, BoundedKVSpec
from boundedkv.plan import BoundedPlan
from boundedkv.resource import EngineResourceInfo, Resource
from boundedkv.step import ADMIT_OK, AdmitOutcome, BoundedKVStep, GraphSlotSpec, StepContext
from boundedkv.transfer import Stream, check_stream


class BoundedKVManager(Resource):
    """A pool of slots, one for each request, that keep the first and the last entries of its stream.

    There is nothing to reserve step by step: a request takes a slot with its first admitted step and keeps it. The
    ring is overwritten in place, as in the rolling buffer of "Mistral 7B" (Jiang et al., 2023), and a step's layout
    is a table of integers that follows from the positions the step declares.

    The lifecycle calls may come from several threads; `attend` is for one thread at a time.

    Args:
        config: the pool.
        device: where its tensors live.
        kv_dtype: element type of the slots; None keeps the config's.

    Attributes:
        config: the pool, with `kv_dtype` resolved.
        device: where its tensors live.

    Raises:
        TypeError: `config` is not a `BoundedKVConfig`.
        ValueError: there is no such device here.

    Examples:
        One step of one request, every call in the open; `Session` makes them for you.

        >>> import torch
        >>> from boundedkv import BoundedKVStep, Segment, SinkWindow, StepContext, StreamPosition, build
        >>> manager = build(BoundedKVConfig(1, 1, 8, SinkWindow(sink=2, window=4)), backend="reference")
        >>> step = BoundedKVStep((Segment("a", span=5),), {"a": StreamPosition(source_len=0, written=0)})
        >>> ctx = StepContext(request_ids=("a",))
        >>> manager.admit(step, ctx).ok
        True
        >>> plan = manager.plan(step, ctx)
        >>> q, k, v = torch.randn(3, 1, 1, 5, 8)
        >>> manager.attend(0, q, k, v, plan=plan).shape
        torch.Size([1, 5, 1, 8])
        >>> manager.commit(step, ctx)
        >>> manager.remove_request("a")
    """

    def __init__(
        self, config: BoundedKVConfig, device: torch.device | str, kv_dtype: torch.dtype | None = None
    ) -> None:
        """Allocate the slots; see the class."""
        if not isinstance(config, BoundedKVConfig):
            raise TypeError(f"config is {type(config).__name__}, but should be a BoundedKVConfig")
        self.config = config if kv_dtype is None else dataclasses.replace(config, dtype=kv_dtype)
        self.device = _with_index(torch.device(device))
        self.process_group: Any = None
        self._lock = threading.RLock()
        self._current: BoundedPlan | None = None
        self._checked: tuple[BoundedPlan, int, PlanNeeds] | None = None
        self._closed = False

    @classmethod
    def build(cls, spec: BoundedKVSpec, info: EngineResourceInfo) -> BoundedKVManager:
        """Build the pool that a model's description asks for.

        Args:
            spec: the pool and the backend that serves it. Called on a backend's own class, that class serves it.
            info: the engine's device, element type and ranks.

        Returns:
            A manager with every slot free.

        Raises:
            ValueError: no such backend.
        """
        if cls is BoundedKVManager:
            from boundedkv.backends import build

            manager = build(spec.config, info.device, info.kv_dtype, backend=spec.backend)
        else:
            manager = cls(spec.config, info.device, info.kv_dtype)
        manager.process_group = info.process_group
        return manager

    # The step lifecycle.

    def ingest_request(self, rid: str, overrides: Mapping[str, Any] | None = None) -> None:
        """Learn of a request. Harmless when repeated or late: a slot is taken by `admit` alone.

        Args:
            rid: the request.
            overrides: settings of the request; a pool has none, they are ignored.
        """
        step_checks.check_request_id(rid)
        self._check_open()

    def admit(self, step: BoundedKVStep, ctx: StepContext) -> AdmitOutcome:
        """Check a step against what is known and take a slot for every request that holds none.

        All or nothing: refused, it has changed nothing. A fresh slot is always the lowest-numbered free one, taken in
        the order of the segments. Padding rows and captures take none.

        Args:
            step: the step.
            ctx: how it is run.

        Returns:
            `ADMIT_OK`, or an outcome whose `reason` is an `AdmitRuntimeError` (the step contradicts itself or what is
            known) or an `AllocationFailed` (no slot left; worth another try when a request has ended).

        Raises:
            TypeError: not a step or not a context, or a part of one is of the wrong type.
        """
        step_checks.check_types(step, ctx)
        with self._lock:
            self._check_open()
            problem = step_checks.step_problem(self.config, step, ctx)
            if problem is not None:
                return AdmitOutcome(ok=False, reason=problem)
            return ADMIT_OK if ctx.capture else self._admit(step, ctx)

    def rollback_admit(self, step: BoundedKVStep, ctx: StepContext) -> None:
        """Free the slots that this step's `admit` took fresh and that were not committed since.

        Harmless when repeated. A slot that a request held before the step stays with it, and so does what the step may
        have written there: with a span beyond the config's `spare` it may have overwritten ring entries that the stream
        retains. `rewind_request` to where the stream stands refuses wherever a planned step might have, even if that
        step never ran or the ring was not full; where it goes through, nothing retained was overwritten.

        Args:
            step: the step that was admitted.
            ctx: how it was to be run.
        """
        step_checks.check_types(step, ctx)
        with self._lock:
            self._check_open()
            self._raise_problem(step, ctx)
            if not ctx.capture:
                self._rollback_admit(step, ctx)

    def plan(self, step: BoundedKVStep, ctx: StepContext) -> BoundedPlan:
        """Lay a step out: what each row reads and what it writes.

        It depends on the declared positions and the slots alone, so planning twice, or ahead of the last commit, is
        harmless. Without a lease the plan never changes; with one its table is the lease's own buffer, which the next
        plan on the same lease overwrites. Under `ctx.capture` every row is empty and the bounds are the config's
        largest.

        Args:
            step: the step.
            ctx: how it is run; its rows give the order of the table's lines.

        Returns:
            The plan, which is also `current` until the next one.

        Raises:
            AdmitRuntimeError: the step contradicts itself, or a request holds no slot.
        """
        step_checks.check_types(step, ctx)
        with self._lock:
            self._check_open()
            self._raise_problem(step, ctx)
            self._current = self._plan(step, ctx)
            return self._current

    @property
    def current(self) -> BoundedPlan:
        """The last plan made.

        Raises:
            RuntimeError: there is none yet.
        """
        self._check_open()
        if self._current is None:
            raise RuntimeError("no step is planned yet; call plan first")
        return self._current

    @torch.no_grad()
    def attend(
        self,
        layer_idx: int,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        source: Tensor | None = None,
        plan: BoundedPlan | None = None,
        rel_bias: Tensor | None = None,
        ieee: bool = False,
        row_source: RowSource | None = None,
    ) -> Tensor:
        """Attend over each row's retained keys and the step's own, then write the step's span into the slots.

        Mutates the layer's slots, nothing else. The caller encodes positions into keys before they get here. The
        step's own keys and values take part as the slots hold them: rounded to the slots' element type. No gradient
        is recorded.

        `torch.compile` must not trace it, since an optimiser may fuse and reorder: give the compiled model
        `torch.compiler.disable(manager.attend)`.

        A step can be attended again, after an error say, as long as its span is within the config's `spare`. Beyond
        that its first attempt may have overwritten ring entries that the second would read; nothing here notices.
        `rewind_request` to where the stream stands refuses wherever that might be so, even where it is not.

        Shapes: B rows of the plan, rows = `rows_per_request`, Hq query heads, H key/value heads, T own tokens a row,
        D = `head_dim`. Every tensor may be float32, float16 or bfloat16 and have any strides.

        Args:
            layer_idx: which layer's slots.
            q: [B * rows, Hq, T, D].
            k: [B * rows, H, T, D].
            v: [B * rows, H, T, D].
            source: [sources, rows, H, L, 2D], this layer's shared prefixes, keys then values in the last axis.
            plan: the step's layout; None means `current`, the last one made. It names slots, not requests: the slot
                of a request that was removed since may be another's.
            rel_bias: a score term by distance, added to the dot product before the scale; -inf masks its pair. As in
                "Self-Attention with Relative Position Representations" (Shaw et al., 2018). Without a query window
                [B * rows, Hq, T, R], R >= max_retained + 2T - 1, entry `(m + t) - j + T - 1` for query t and the
                key of index j among the m retained and then the own ones. With one [B * rows, Hq, T, W + 1], entry =
                distance.
            ieee: plain binary32 with sums in a stated tree, instead of exact dots of fixed-point numbers.
            row_source: (storage [slots, rows, H, L, 2D], slots [>= B] int32 or int64), the prefixes of rows whose
                source is -1.

        Returns:
            [B * rows, T, Hq, D] in q's element type. A query that sees no key gets zeros; one that sees a poisoned
            pair gets NaN.

        Raises:
            ValueError: an argument does not fit; nothing was written.
            RuntimeError: this thread flushes subnormal numbers to zero.
        """
        self._check_open()
        if self.device.type == "cpu":
            attend_checks.check_subnormals()
        attend_checks.check_layer(self.config, layer_idx)
        if not isinstance(ieee, bool):
            raise ValueError(f"ieee is {ieee!r}, but should be True or False")
        plan = self._current if plan is None else plan
        if plan is None:
            raise ValueError("plan is None and no step is planned, but should be given, or made by plan first")
        if not isinstance(plan, BoundedPlan):
            raise ValueError(f"plan is {type(plan).__name__}, but should be a BoundedPlan")
        q, k, v = attend_checks.check_qkv(self.config, self.device, len(plan.rows), q, k, v)
        own_tokens = q.shape[2]
        attend_checks.check_apart(self._layer(layer_idx), k, v)
        needs = self._needs(plan, own_tokens)
        source = attend_checks.check_source(self.config, self.device, plan, needs, source, row_source)
        row_source = attend_checks.check_row_source(self.config, self.device, plan, needs, row_source)
        rel_bias = attend_checks.check_rel_bias(self.config, self.device, plan, needs, own_tokens, rel_bias)
        with torch.autocast(self.device.type, enabled=False):
            return self._attend(layer_idx, q, k, v, plan, source, row_source, rel_bias, ieee)

    def commit(self, step: BoundedKVStep, ctx: StepContext) -> None:
        """Record that a step was run: each stream now ends behind its span.

        Harmless when repeated. All or nothing.

        Args:
            step: the step that was admitted.
            ctx: how it was run.

        Raises:
            AdmitRuntimeError: the step is neither pending nor the last one committed, because its request was
                removed, reset, rewound or admitted anew since; nothing was changed.
        """
        step_checks.check_types(step, ctx)
        with self._lock:
            self._check_open()
            self._raise_problem(step, ctx)
            if not ctx.capture:
                self._commit(step, ctx)

    # Requests.

    def remove_request(self, rid: str) -> None:
        """End a request and free its slot. An unknown one is left alone."""
        step_checks.check_request_id(rid)
        with self._lock:
            self._check_open()
            self._remove_request(rid)

    def reset_request(self, rid: str, free: bool = False) -> None:
        """Take a request's stream back to nothing written. Nothing is zeroed: no later read reaches what was there.

        Args:
            rid: the request; an unknown one is left alone.
            free: give the slot back too, as `remove_request` does.
        """
        step_checks.check_request_id(rid)
        with self._lock:
            self._check_open()
            if free:
                self._remove_request(rid)
            else:
                self._reset_request(rid)

    def rewind_request(self, rid: str, written: int) -> None:
        """Take a request's stream back by at most the config's `spare` tokens, as speculative decoding does.

        Every step planned for the request counts as run, since its keys may stand in the ring.

        Args:
            rid: the request.
            written: tokens that stay written.

        Raises:
            AdmitRuntimeError: the request holds no slot.
            ValueError: the ring does not hold what the shorter stream retains; nothing was changed.
        """
        step_checks.check_request_id(rid)
        if not isinstance(written, int) or isinstance(written, bool) or written < 0:
            raise ValueError(f"written is {written!r}, but should be an integer at least 0")
        with self._lock:
            self._check_open()
            self._rewind_request(rid, written)

    def export_request(self, rid: str) -> dict[str, Any]:
        """Copy a request's stream out of its slot, to move it to another manager or to save it.

        Args:
            rid: the request; it keeps its slot.

        Returns:
            The fields of `boundedkv.transfer.Stream`: numbers, and tensors on the manager's device.

        Raises:
            AdmitRuntimeError: the request holds no slot, or a planned step that was not committed may have overwritten
                what its stream retains.
        """
        step_checks.check_request_id(rid)
        with self._lock:
            self._check_open()
            return self._export_request(rid)._asdict()

    @torch.no_grad()
    def import_request(self, rid: str, state: Mapping[str, Any]) -> None:
        """Give a stream that was exported a slot here. Its continuation has the bits it would have had there.

        Another shape, element type, sink, window or spare is refused. The rest of the config has to be the same for
        the bits to go on (`query_window`, `scale`, query heads, `window_includes_step`, `reverse_step_order`); that is
        not checked.

        Args:
            rid: the request, under any id that holds no slot here.
            state: what `export_request` gave, its tensors on any device.

        Raises:
            ValueError: the state is not one of a pool like this one, or the id holds a slot.
            AllocationFailed: no slot left.
        """
        step_checks.check_request_id(rid)
        with self._lock:
            self._check_open()
            stream = check_stream(self.config, state)
            if self._holds(rid):
                raise ValueError(f"rid is {rid!r}, which holds a slot, but should hold none")
            if self._free_slots() == 0:
                raise refusals.no_slot_left(rid, 1, 0)
            self._import_request(rid, stream)

    def holds(self, rid: str) -> bool:
        """Whether a request holds a slot."""
        step_checks.check_request_id(rid)
        with self._lock:
            self._check_open()
            return self._holds(rid)

    @property
    def free_slots(self) -> int:
        """Slots that no request holds."""
        with self._lock:
            self._check_open()
            return self._free_slots()

    def layer(self, layer_idx: int) -> Tensor:
        """One layer's slots, live: [max_slots, rows, H, cap, 2D], keys then values in the last axis.

        Args:
            layer_idx: which layer.

        Raises:
            ValueError: there is no such layer.
        """
        self._check_open()
        attend_checks.check_layer(self.config, layer_idx)
        return self._layer(layer_idx)

    # The engine around it.

    def build_accelerator_graph_buffers(self, slots: Sequence[GraphSlotSpec], max_bs: int, max_seq_len: int) -> None:
        """Make the tables that captured graphs read: one a lease, of its bucket's rows, at an address that stays.

        Harmless when repeated: a lease that has its table keeps it.

        Args:
            slots: the buffers that are going to be leased.
            max_bs: rows of the largest batch; a table is as long as its own bucket says.
            max_seq_len: own tokens a row of the longest step; a table's size does not depend on it.

        Raises:
            ValueError: a slot that is no `GraphSlotSpec`, or a size below 1.
        """
        if not isinstance(slots, Sequence):
            raise ValueError(f"slots is {type(slots).__name__}, but should be a sequence of GraphSlotSpec")
        for index, spec in enumerate(slots):
            if not isinstance(spec, GraphSlotSpec):
                raise ValueError(f"slots[{index}] is {type(spec).__name__}, but should be a GraphSlotSpec")
            step_checks.check_bucket(f"slots[{index}].bucket", spec.bucket)
        for name, size in (("max_bs", max_bs), ("max_seq_len", max_seq_len)):
            if not isinstance(size, int) or isinstance(size, bool) or size < 1:
                raise ValueError(f"{name} is {size!r}, but should be an integer at least 1")
        with self._lock:
            self._check_open()
            self._build_graph_buffers(slots)

    def post_warmup_validate(self) -> None:
        """Check that all ranks have the same number of free slots. Every rank of the process group must call it.

        Raises:
            RuntimeError: the ranks differ.
        """
        free = self.free_slots
        if self.process_group is None:
            return
        counts: list[Any] = [None] * torch.distributed.get_world_size(self.process_group)
        torch.distributed.all_gather_object(counts, free, group=self.process_group)
        if len(set(counts)) > 1:
            raise RuntimeError(f"free slots by rank are {counts}, but should be the same on all")

    def cleanup(self) -> None:
        """Drop the pool's memory. Harmless when repeated; every other call raises from then on."""
        with self._lock:
            if not self._closed:
                self._closed = True
                self._current = self._checked = None
                self._cleanup()

    def _needs(self, plan: BoundedPlan, own_tokens: int) -> PlanNeeds:
        """Check a plan: on a GPU once, on the CPU each time, since there its table can be read and may be a lease's."""
        if self._checked is not None and self.device.type != "cpu":
            checked, tokens, needs = self._checked
            if checked is plan and tokens == own_tokens:
                return needs
        needs = attend_checks.plan_needs(self.config, self.device, plan, own_tokens)
        self._checked = plan, own_tokens, needs
        return needs

    def _zeros(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Memory that lives as long as the manager: written in place in and out of inference mode."""
        with torch.inference_mode(False):
            return torch.zeros(shape, dtype=dtype, device=self.device)

    def _check_open(self) -> None:
        if self._closed:
            raise RuntimeError("the manager was cleaned up; build another")

    def _raise_problem(self, step: BoundedKVStep, ctx: StepContext) -> None:
        problem = step_checks.step_problem(self.config, step, ctx)
        if problem is not None:
            raise problem

    # What a backend writes. Arguments are checked, the lock is held (but for `_attend` and `_layer`).

    @abstractmethod
    def _admit(self, step: BoundedKVStep, ctx: StepContext) -> AdmitOutcome: ...

    @abstractmethod
    def _rollback_admit(self, step: BoundedKVStep, ctx: StepContext) -> None: ...

    @abstractmethod
    def _plan(self, step: BoundedKVStep, ctx: StepContext) -> BoundedPlan: ...

    @abstractmethod
    def _attend(
        self,
        layer_idx: int,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        plan: BoundedPlan,
        source: Tensor | None,
        row_source: RowSource | None,
        rel_bias: Tensor | None,
        ieee: bool,
    ) -> Tensor: ...

    @abstractmethod
    def _commit(self, step: BoundedKVStep, ctx: StepContext) -> None: ...

    @abstractmethod
    def _remove_request(self, rid: str) -> None: ...

    @abstractmethod
    def _reset_request(self, rid: str) -> None: ...

    @abstractmethod
    def _rewind_request(self, rid: str, written: int) -> None: ...

    @abstractmethod
    def _export_request(self, rid: str) -> Stream: ...

    @abstractmethod
    def _import_request(self, rid: str, stream: Stream) -> None: ...

    @abstractmethod
    def _holds(self, rid: str) -> bool: ...

    @abstractmethod
    def _free_slots(self) -> int: ...

    @abstractmethod
    def _layer(self, layer_idx: int) -> Tensor: ...

    @abstractmethod
    def _build_graph_buffers(self, slots: Sequence[GraphSlotSpec]) -> None: ...

    @abstractmethod
    def _cleanup(self) -> None: ...


def _with_index(device: torch.device) -> torch.device:
    """The device with its index, so that it compares equal to a tensor's."""
    if device.type != "cuda":
        return device
    if not torch.cuda.is_available():
        raise ValueError(f"device is {str(device)!r}, but torch sees no GPU; it should be 'cpu'")
    return device if device.index is not None else torch.device("cuda", torch.cuda.current_device())
