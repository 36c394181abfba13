"""One request through the reference, watched: what its plans keep, what its slot holds, whom its queries see."""

from __future__ import annotations

import torch

from boundedkv import BoundedKVConfig, BoundedPlan, Session, SinkWindow, build
from boundedkv.plan import SINK_SLOT, SINK_SOURCE, RowLayout


class Stream:
    """One request whose keys are their own stream positions, so that memory tells what it holds.

    Args:
        sink: entries kept from the start.
        window: entries kept from the end.
        head_dim: as many stream positions as `seen` can tell apart.
        **config: further settings of the pool.
    """

    def __init__(self, sink: int, window: int, head_dim: int = 32, **config: int) -> None:
        """Build the pool."""
        self.config = BoundedKVConfig(1, 1, head_dim, SinkWindow(sink, window), max_slots=1, **config)
        self.manager = build(self.config, backend="reference")
        self.session = Session(self.manager)
        self.plan: BoundedPlan | None = None

    def step(self, span: int) -> torch.Tensor:
        """Run one step; returns what its queries saw, [T, stream positions] bool."""
        length, dim = self.session.written("a"), self.config.head_dim
        positions = torch.arange(length, length + span)
        k = positions.float()[None, None, :, None].expand(1, 1, span, dim)
        v = torch.nn.functional.one_hot(positions, dim).float()[None, None]
        with self.session.step({"a": span}) as step:
            out = step.attend(0, torch.zeros(1, 1, span, dim), k, v)
            self.plan = step.plan
        return out[0, :, 0] > 0

    def layout(self) -> RowLayout:
        """The layout of the last step."""
        assert self.plan is not None
        return self.plan.rows[0][1]

    def next_layout(self) -> RowLayout:
        """The layout that a step of one token would have now."""
        with self.session.step({"a": 0}) as step:
            return step.plan.rows[0][1]

    def slot(self) -> list[int]:
        """The stream position that each entry of the slot holds; those that nobody wrote hold 0 too."""
        return self.manager.layer(0)[0, 0, 0, :, 0].int().tolist()


def kinds(layout: RowLayout) -> dict[int, str]:
    """Stream position -> "sink" or "window", for all that a row retains."""
    reads = layout.reads
    sinks = reads[SINK_SOURCE].length + reads[SINK_SLOT].length
    window = layout.retained - sinks
    return {
        **dict.fromkeys(range(sinks), "sink"),
        **dict.fromkeys(range(layout.length - window, layout.length), "window"),
    }
