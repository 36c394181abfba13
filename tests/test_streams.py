"""Random streams: both backends driven by whatever calls hypothesis draws, misuse included, compared after each.

`BOUNDEDKV_PROFILE=deep pytest tests/test_streams.py` compares some hundred thousand calls, in about half an hour; the
last line tells how many.
"""

from dataclasses import replace
from typing import NamedTuple

import hypothesis.strategies as st
import pytest
import torch
from conftest import device_of
from drawn import (
    IDS,
    LAST,
    LEASES,
    NAN,
    ODD_NUMBERS,
    PADS,
    SOURCES,
    biases,
    configs,
    right_steps,
    sources,
    tensors,
    wrong_steps,
)
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test

from boundedkv import (
    AdmitRuntimeError,
    AllocationFailed,
    BoundedKVStep,
    BoundedPlan,
    GraphSlotSpec,
    Segment,
    SlotLease,
    StepContext,
    StreamPosition,
)

REFUSALS = (AdmitRuntimeError, AllocationFailed, ValueError)
KEPT = 8  # steps, plans and states that can be come back to
LONGEST = 20  # own tokens that are worth the time
STEP_CALLS = ("admit", "plan", "commit", "rollback_admit")
BOUNDARIES = (64, 128, 512, 1024, 2**24, 2**30, LAST)


class Made(NamedTuple):
    """A plan, and what it was made of."""

    plan: BoundedPlan
    step: BoundedKVStep
    ctx: StepContext

    @property
    def lease(self) -> SlotLease | None:
        return self.ctx.slot_lease

    @property
    def positions(self) -> list[StreamPosition | None]:
        """Where each row stands; None for a row that is empty."""
        if self.ctx.capture:
            return [None] * len(self.plan.rows)
        return [None if self.ctx.is_padding_row(rid) else self.step.positions[rid] for rid in self.ctx.row_ids]

    @property
    def tokens(self) -> int:
        """Own tokens that a row must have."""
        if self.ctx.capture:
            return 1
        spans = {segment.request_id: segment.span for segment in self.step.segments}
        return max([1, *(self.step.tokens.get(rid, spans[rid]) for rid in self.ctx.request_ids)])


class Streams(RuleBasedStateMachine):
    """Every call of the interface, in any order, with right and wrong arguments."""

    make_pair = causal = attends = None

    @initialize(data=st.data())
    def begin(self, data):
        self.config = data.draw(configs(self.causal))
        self.pair = self.make_pair(self.config)
        self.poisoned = data.draw(st.sampled_from([False, True, False]))
        self.forget()
        self.steps: list[tuple[BoundedKVStep, StepContext]] = []
        self.made: list[Made] = []
        self.on_lease: dict[SlotLease, Made] = {}
        self.exported: list[dict] = []

    def forget(self):
        """Let the slots hold what no position says was written: NaN, or numbers that are all different."""
        for layer_idx in range(self.config.num_layers):
            slots = self.pair.layer(layer_idx)
            junk = torch.full(slots.shape, NAN) if self.poisoned else torch.arange(slots.numel()).view(slots.shape) / 64
            for manager in (self.pair.left, self.pair.right):
                manager.layer(layer_idx).copy_(junk)

    def known(self):
        """Where the requests stand, as the oracle has it: what makes a drawn step a right one."""
        held = self.pair.left._requests.items()
        return {rid: StreamPosition(request.source_len, request.written, request.source) for rid, request in held}

    def attempt(self, call, *arguments, **options):
        """Make a call that may be refused; None where it was. That it was so twice alike, the pair has seen."""
        try:
            return call(*arguments, **options)
        except REFUSALS:
            return None

    def plan(self, step, ctx):
        """Plan it and keep the plan. Not a span that no tensor could bring: the reference lists its positions."""
        if any(isinstance(segment.span, int) and segment.span > 1000 for segment in step.segments):
            return
        plan = self.attempt(self.pair.plan, step, ctx)
        if plan is not None:
            self.made.append(Made(plan, step, ctx))
            if ctx.slot_lease is not None:
                self.on_lease[ctx.slot_lease] = self.made[-1]

    def attend(self, data, made, layer_idx):
        """One layer. A plan of a capture runs whatever its lease's table holds by now, as a replay does."""
        if not self.attends:
            return
        config, batch = self.config, len(made.plan.rows)
        live = self.on_lease.get(made.lease, made)
        positions = [*live.positions, *[None] * batch][:batch]
        unknown_source = any(position is not None and position.source >= SOURCES for position in positions)
        if live is not made and (not made.ctx.capture or unknown_source or live.tokens > LONGEST):
            return  # nothing checks a replay against its arguments
        if live.ctx.capture and data.draw(st.integers(0, 3)) != 3:
            return  # all its rows are empty
        tokens = min(live.tokens, LONGEST) + data.draw(st.integers(0, 2))
        options = {"plan": data.draw(st.sampled_from([made.plan, None])) if made is self.made[-1] else made.plan}
        source, row_source = data.draw(sources(config, positions))
        if live is made and data.draw(st.integers(0, 9)) == 0:
            tokens, source = 1, None
        fitting = not config.reverse_step_order and not (self.causal and any(kept.sink for kept in config.retentions))
        if data.draw(st.integers(0, 1 if fitting else 9)) == 1 and (fitting or not made.ctx.capture):
            biased = batch * config.rows_per_request, tokens, made.plan.max_retained
            options["rel_bias"] = data.draw(biases(config, *biased))
        lanes = batch * config.rows_per_request * config.query_heads * tokens
        options["ieee"] = lanes <= 8 and data.draw(st.booleans())
        size = batch * config.rows_per_request, config.num_heads, tokens, config.head_dim
        q = data.draw(tensors(size[0], config.query_heads, *size[2:]))
        k, v = data.draw(tensors(*size)), data.draw(tensors(*size))
        self.attempt(self.pair.attend, layer_idx, q, k, v, source=source, row_source=row_source, **options)

    # Steps.

    @rule(data=st.data())
    def run_a_step(self, data):
        step, ctx = data.draw(right_steps(self.config, self.known())).frozen()
        self.steps.append((step, ctx))
        if self.pair.admit(step, ctx).ok:
            self.plan(step, ctx)
            for layer_idx in range(self.config.num_layers):
                self.attend(data, self.made[-1], layer_idx)
            self.pair.commit(step, ctx)

    @rule(data=st.data())
    def admit_a_step(self, data):
        self.steps.append(data.draw(right_steps(self.config, self.known())).frozen())
        self.pair.admit(*self.steps[-1])

    @rule(data=st.data())
    def admit_a_wrong_step(self, data):
        self.steps.append(data.draw(wrong_steps(self.config, self.known())).frozen())
        self.pair.admit(*self.steps[-1])

    @precondition(lambda self: self.steps)
    @rule(data=st.data(), calls=st.lists(st.sampled_from(STEP_CALLS), min_size=1, max_size=3), copy=st.booleans())
    def go_on_with_a_step(self, data, calls, copy):
        """Calls out of turn or for the second time, with an earlier step or another one of the same numbers."""
        step, ctx = self.steps[-1 - data.draw(st.integers(0, min(len(self.steps), KEPT) - 1))]
        if copy:
            step = BoundedKVStep(step.segments, step.positions, step.tokens)
        for call in calls:
            self.plan(step, ctx) if call == "plan" else self.attempt(getattr(self.pair, call), step, ctx)

    @precondition(lambda self: self.made)
    @rule(data=st.data())
    def attend_again(self, data):
        made = self.made[-1 - data.draw(st.integers(0, min(len(self.made), KEPT) - 1))]
        self.attend(data, made, data.draw(st.integers(0, self.config.num_layers - 1)))

    @rule(rid=st.sampled_from(IDS), boundary=st.sampled_from(BOUNDARIES), beside=st.integers(-4, 1))
    def jump(self, rid, boundary, beside):
        """Commit a span that was never planned, to stand before a tile's, a split's or the last position."""
        position = self.known().get(rid, StreamPosition(0, 0))
        span = boundary + beside - position.source_len - position.written
        step, ctx = BoundedKVStep((Segment(rid, span),), {rid: position}), StepContext((rid,))
        if self.pair.admit(step, ctx).ok:
            self.pair.commit(step, ctx)

    @rule(data=st.data(), rows=st.integers(0, 3), lease=st.sampled_from([None, *LEASES]))
    def capture(self, data, rows, lease):
        step, ctx = (
            BoundedKVStep((), {}),
            StepContext((), capture=True, padded_request_ids=PADS[:rows], slot_lease=lease),
        )
        if data.draw(st.booleans()):
            step, ctx = data.draw(right_steps(self.config, self.known())).frozen()
            ctx = replace(ctx, capture=True)
        self.pair.admit(step, ctx)
        self.plan(step, ctx)
        self.pair.commit(step, ctx)

    # Requests.

    @rule(rid=st.sampled_from(IDS), call=st.sampled_from(["remove", "reset", "free", "ingest"]))
    def end_or_start_over(self, rid, call):
        if call == "ingest":
            self.pair.ingest_request(rid, {"anything": 1})
        elif call == "remove":
            self.pair.remove_request(rid)
        else:
            self.pair.reset_request(rid, free=call == "free")
        if self.pair.free_slots == self.config.max_slots:
            self.forget()

    @rule(data=st.data())
    def rewind(self, data):
        rid = data.draw(st.sampled_from([*self.known(), *IDS]))
        written = self.known().get(rid, StreamPosition(0, 0)).written
        back = data.draw(st.integers(-1, self.config.spare + 1))
        self.attempt(self.pair.rewind_request, rid, data.draw(st.sampled_from([written - back, written, 0])))

    @rule(data=st.data(), leave=st.booleans())
    def export(self, data, leave):
        rid = data.draw(st.sampled_from([*self.known(), *IDS]))
        state = self.attempt(self.pair.export_request, rid)
        if state is not None:
            self.exported.append(state)
        if leave:
            self.pair.remove_request(rid)

    @precondition(lambda self: self.exported)
    @rule(data=st.data(), wrongly=st.integers(0, 5))
    def bring_in(self, data, wrongly):
        state = data.draw(st.sampled_from(self.exported[-KEPT:]))
        rid = data.draw(st.sampled_from([rid for rid in IDS if rid not in self.known()] or IDS))
        if wrongly == 1:
            rid = data.draw(st.sampled_from(IDS))
        if wrongly == 2:
            state = state | {data.draw(st.sampled_from([*state])): data.draw(ODD_NUMBERS)}
        self.attempt(self.pair.import_request, rid, state)

    @rule(number=st.integers(0, 2))
    def size_the_leases(self, number):
        self.pair.build_accelerator_graph_buffers([GraphSlotSpec(*lease[::-1]) for lease in LEASES[:number]], 3, 4)

    @rule()
    def look(self):
        self.pair.post_warmup_validate()
        assert self.pair.free_slots == self.config.max_slots - sum(map(self.pair.holds, IDS))


@pytest.mark.parametrize("attends", [True, False], ids=["attended", "planned"])
@pytest.mark.parametrize("causal", [False, True], ids=["step", "query"])
def test_streams(make_pair, causal, attends):
    """Most of them without `attend`, which takes nearly all the time. A GPU compiles each new mixture of types."""
    attributes = {"make_pair": staticmethod(make_pair), "causal": causal, "attends": attends}
    machine = type("DrawnStreams", (Streams,), attributes)
    examples = settings().max_examples
    attended = examples // (2 if device_of("fast") == "cpu" else 8)
    run_state_machine_as_test(machine, settings=settings(max_examples=attended if attends else 4 * examples))
