"""What an engine drives: a resource whose life follows the steps of a serving loop."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from boundedkv.step import AdmitOutcome, BoundedKVStep, GraphSlotSpec, StepContext


@dataclass(frozen=True)
class EngineResourceInfo:
    """What an engine tells a resource when it is built.

    Attributes:
        device: where the resource's tensors live.
        kv_dtype: element type of the slots; None keeps the config's.
        process_group: ranks that must agree after warm-up; None for a single one.
    """

    device: torch.device | str
    kv_dtype: torch.dtype | None = None
    process_group: Any = None


class Resource(ABC):
    """State that a model's nodes share over the steps of a request.

    The calls come in this order: `ingest_request`, then for every step `admit`, `plan`, the forward, `commit`;
    `remove_request` ends it.
    """

    @abstractmethod
    def ingest_request(self, rid: str, overrides: Mapping[str, Any] | None = None) -> None:
        """Learn of a request; harmless when repeated or late."""

    @abstractmethod
    def admit(self, step: BoundedKVStep, ctx: StepContext) -> AdmitOutcome:
        """Check a step and reserve what it needs, all or nothing."""

    @abstractmethod
    def rollback_admit(self, step: BoundedKVStep, ctx: StepContext) -> None:
        """Give back what this step's `admit` took fresh."""

    @abstractmethod
    def plan(self, step: BoundedKVStep, ctx: StepContext) -> Any:
        """Lay the step out for the forward."""

    @abstractmethod
    def commit(self, step: BoundedKVStep, ctx: StepContext) -> None:
        """Record that the step was run."""

    @abstractmethod
    def remove_request(self, rid: str) -> None:
        """End a request and free what it held."""

    @abstractmethod
    def reset_request(self, rid: str, free: bool = False) -> None:
        """Start a request over."""

    @abstractmethod
    def build_accelerator_graph_buffers(self, slots: Sequence[GraphSlotSpec], max_bs: int, max_seq_len: int) -> None:
        """Size what captured replays read."""

    @abstractmethod
    def post_warmup_validate(self) -> None:
        """Check, after graph capture, that all ranks are in the same state."""

    @abstractmethod
    def cleanup(self) -> None:
        """Drop the resource's memory."""
