"""Driving a manager by hand: a session counts what each request has written, so that a person need not."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from boundedkv import refusals
from boundedkv.manager import BoundedKVManager
from boundedkv.plan import BoundedPlan
from boundedkv.step import BoundedKVStep, Segment, StepContext, StreamPosition


class SessionStep:
    """A step that is admitted and planned.

    Attributes:
        plan: its layout.
    """

    def __init__(self, manager: BoundedKVManager, plan: BoundedPlan) -> None:
        """Keep the plan for every layer's `attend`."""
        self._manager = manager
        self.plan = plan

    def attend(self, layer_idx: int, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
        """Attend in one layer: `BoundedKVManager.attend` with this step's plan.

        Args:
            layer_idx: which layer's slots.
            q: [B * rows, Hq, T, D].
            k: [B * rows, H, T, D].
            v: [B * rows, H, T, D].
            **options: `source`, `row_source`, `rel_bias`, `ieee`.

        Returns:
            [B * rows, T, Hq, D].
        """
        return self._manager.attend(layer_idx, q, k, v, plan=self.plan, **options)


class Session:
    """Drives a manager step by step and keeps count of what each request has written.

    One session for one manager: requests that something else drives are not its own.

    Args:
        manager: any backend's.

    Examples:
        >>> import torch
        >>> from boundedkv import BoundedKVConfig, Session, SinkWindow, build
        >>> config = BoundedKVConfig(num_layers=1, num_heads=1, head_dim=8, retention=SinkWindow(2, 4))
        >>> session = Session(build(config, backend="reference"))
        >>> q = k = v = torch.ones(1, 1, 3, 8)
        >>> with session.step({"a": 3}) as step:
        ...     out = step.attend(0, q, k, v)
        >>> session.written("a"), tuple(out.shape)
        (3, (1, 3, 1, 8))
    """

    def __init__(self, manager: BoundedKVManager) -> None:
        """Start with no request known."""
        self._manager = manager
        self._positions: dict[str, StreamPosition] = {}

    @contextmanager
    def step(
        self,
        spans: Mapping[str, int],
        *,
        source_len: Mapping[str, int] | None = None,
        source: Mapping[str, int] | None = None,
        tokens: Mapping[str, int] | None = None,
    ) -> Iterator[SessionStep]:
        """Admit and plan a step; commit it on leaving, roll it back where the body raises.

        What the body attended before it raised stays in the slots: see `BoundedKVManager.rollback_admit`. With a span
        beyond the config's `spare` the next step would then read a damaged stream: `rewind` to what is written, and
        where that raises, `reset`. So leave the block right after the last attend, and do the rest outside.

        Args:
            spans: request -> tokens that join its stream, in row order.
            source_len: request -> entries of its source prefix, with its first step; 0 where left out. Known from then
                on, until `remove`, even if that step failed.
            source: request -> index of its prefix (-1: in `row_source`), with its first step; 0 where left out.
            tokens: request -> real own tokens of its row; where left out all T of them, padding too.

        Yields:
            The step, to attend with.

        Raises:
            AllocationFailed: no slot left.
            AdmitRuntimeError: the step contradicts itself or what is known.
            ValueError: a request that is not in the step is named; nothing was changed.
        """
        for name, told in (("source_len", source_len), ("source", source), ("tokens", tokens)):
            for rid in told or {}:
                if rid not in spans:
                    raise ValueError(f"{name} names {rid!r}, but should name requests of the step: {list(spans)}")
        positions = {rid: self._position(rid, source_len or {}, source or {}) for rid in spans}
        self._positions.update(positions)
        segments = tuple(Segment(rid, span) for rid, span in spans.items())
        step = BoundedKVStep(segments, positions, dict(tokens or {}))
        ctx = StepContext(tuple(spans))
        outcome = self._manager.admit(step, ctx)
        if outcome.reason is not None:
            raise outcome.reason
        try:
            yield SessionStep(self._manager, self._manager.plan(step, ctx))
        except BaseException:
            self._manager.rollback_admit(step, ctx)
            raise
        self._manager.commit(step, ctx)
        for rid, span in spans.items():
            self._positions[rid] = positions[rid]._replace(written=positions[rid].written + span)

    def _position(self, rid: str, source_len: Mapping[str, int], source: Mapping[str, int]) -> StreamPosition:
        known = self._positions.get(rid, StreamPosition(0, 0))
        return StreamPosition(source_len.get(rid, known.source_len), known.written, source.get(rid, known.source))

    def written(self, rid: str) -> int:
        """Tokens that a request has written; 0 for an unknown one."""
        return self._positions.get(rid, StreamPosition(0, 0)).written

    def reset(self, rid: str) -> None:
        """Take a request's stream back to nothing written, in its slot: `BoundedKVManager.reset_request`."""
        self._manager.reset_request(rid)
        if rid in self._positions:
            self._positions[rid] = self._positions[rid]._replace(written=0)

    def rewind(self, rid: str, written: int) -> None:
        """Take a request's stream back: `BoundedKVManager.rewind_request`."""
        if rid not in self._positions:
            raise refusals.not_admitted(rid)
        self._manager.rewind_request(rid, written)
        self._positions[rid] = self._positions[rid]._replace(written=written)

    def export_request(self, rid: str) -> dict[str, Any]:
        """Copy a request's stream out: `BoundedKVManager.export_request`."""
        return self._manager.export_request(rid)

    def import_request(self, rid: str, state: Mapping[str, Any]) -> None:
        """Take a stream in and go on with its count: `BoundedKVManager.import_request`."""
        self._manager.import_request(rid, state)
        self._positions[rid] = StreamPosition(state["source_len"], state["written"], state["source"])

    def remove(self, rid: str) -> None:
        """End a request and free its slot. An unknown one is left alone."""
        self._manager.remove_request(rid)
        self._positions.pop(rid, None)
