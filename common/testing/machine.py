"""Random streams: a pair driven by whatever calls hypothesis draws, misuse included."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any, ClassVar, NamedTuple, TypeVar

import hypothesis.strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from boundedkv.config import BoundedKVConfig
from boundedkv.plan import BoundedPlan
from boundedkv.step import (
    AdmitRuntimeError,
    AllocationFailed,
    BoundedKVStep,
    GraphSlotSpec,
    Segment,
    SlotLease,
    StepContext,
    StreamPosition,
)
from boundedkv.testing.script import RecordedPair
from boundedkv.testing.strategies import (
    IDS,
    LAST,
    LEASES,
    ODD_NUMBERS,
    PADS,
    SOURCES,
    Positions,
    Scope,
    biases,
    configs,
    right_steps,
    samples,
    sources,
    wrong_steps,
)
from boundedkv.testing.usage import features_of_attend, features_of_config, features_of_plan

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
        """The lease whose table it stands in."""
        return self.ctx.slot_lease

    @property
    def positions(self) -> Positions:
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


Rule = TypeVar("Rule", bound=Callable[..., Any])


def _with(feature: str) -> Callable[[Rule], Rule]:
    """A rule for scopes with this feature alone."""
    return precondition(lambda self: self.scope.has(feature))


class Streams(RuleBasedStateMachine):
    """Every call of the interface, in any order, with right and wrong arguments.

    Attributes:
        make_pair: makes the pair that is driven.
        scope: what is drawn.
        attends: whether attend, which takes nearly all the time, is among the calls.
        used: how many calls had to do with each feature; shared by all examples.
    """

    make_pair: Callable[[BoundedKVConfig], RecordedPair]
    scope: ClassVar[Scope]
    attends: ClassVar[bool]
    used: ClassVar[Counter[str]]

    @initialize(data=st.data())
    def begin(self, data: st.DataObject) -> None:
        """A pool, its memory full of what nobody wrote, and a first step."""
        self.config = data.draw(configs(self.scope))
        self.pair = self.make_pair(self.config)
        self.poison = "nan" if data.draw(self.scope.some("poisoned_memory", 3)) else "numbers"
        self.pair.fill_all(self.poison)
        self.steps: list[tuple[BoundedKVStep, StepContext]] = []
        self.made: list[Made] = []
        self.on_lease: dict[SlotLease, Made] = {}
        self.exported: list[dict[str, Any]] = []
        self.run(data, *data.draw(right_steps(self.scope, self.config, {})).frozen())

    def known(self) -> dict[str, StreamPosition]:
        """Where the requests stand, as the oracle has it: what makes a drawn step a right one."""
        held = self.pair.left._requests.items()  # type: ignore[attr-defined]
        return {rid: StreamPosition(request.source_len, request.written, request.source) for rid, request in held}

    def attempt(self, call: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        """Make a call that may be refused; None where it was. That it was so twice alike, the pair has seen."""
        try:
            return call(*arguments, **options)
        except REFUSALS:
            self.used["refusals"] += 1
            return None

    def admit(self, step: BoundedKVStep, ctx: StepContext) -> bool:
        """Admit it, or see it refused."""
        admitted = self.pair.admit(step, ctx).ok
        self.used["refusals"] += not admitted
        return admitted

    def plan(self, step: BoundedKVStep, ctx: StepContext) -> bool:
        """Plan it and keep the plan. Not a span that no tensor could bring: the reference lists its positions."""
        if any(isinstance(segment.span, int) and segment.span > 1000 for segment in step.segments):
            return False
        plan = self.attempt(self.pair.plan, step, ctx)
        if plan is not None:
            self.made.append(Made(plan, step, ctx))
            self.used.update(features_of_config(self.config) | features_of_plan(self.config, *self.made[-1]))
            if ctx.slot_lease is not None:
                self.on_lease[ctx.slot_lease] = self.made[-1]
        return plan is not None

    def attend(self, data: st.DataObject, made: Made, layer_idx: int) -> None:
        """One layer. A plan of a capture runs whatever its lease's table holds by now, as a replay does."""
        if not self.attends:
            return
        config, scope, batch = self.config, self.scope, len(made.plan.rows)
        live = self.on_lease.get(made.lease, made) if made.lease is not None else made
        positions = [*live.positions, *[None] * batch][:batch]
        unknown_source = any(position is not None and position.source >= SOURCES for position in positions)
        if live is not made and (not made.ctx.capture or unknown_source or live.tokens > LONGEST):
            return  # nothing checks a replay against its arguments
        if live.ctx.capture and data.draw(st.integers(0, 3)) != 3:
            return  # all its rows are empty
        tokens = min(live.tokens, LONGEST) + (data.draw(st.integers(0, 2)) if scope.has("lookahead") else 0)
        options: dict[str, Any] = {
            "plan": data.draw(st.sampled_from([made.plan, None])) if made is self.made[-1] else made.plan
        }
        source, row_source = data.draw(sources(scope, config, positions))
        if live is made and scope.has("refusals") and data.draw(st.integers(0, 9)) == 9:
            tokens, source = 1, None
        sinks = any(kept.sink for kept in config.retentions)
        fitting = not config.reverse_step_order and not (config.query_window is not None and sinks)
        misfit = scope.has("refusals") and not made.ctx.capture
        if (fitting or misfit) and data.draw(scope.some("rel_bias", 2 if fitting else 10)):
            biased = batch * config.rows_per_request, tokens, made.plan.max_retained
            options["rel_bias"] = data.draw(biases(scope, config, *biased))
        lanes = batch * config.rows_per_request * config.query_heads * tokens
        options["ieee"] = lanes <= 8 and data.draw(scope.some("ieee"))
        size = batch * config.rows_per_request, config.num_heads, tokens, config.head_dim
        q = data.draw(samples(scope, config, size[0], config.query_heads, *size[2:]))
        k, v = data.draw(samples(scope, config, *size)), data.draw(samples(scope, config, *size))
        arguments = {"q": q, "k": k, "v": v, "source": source, "row_source": row_source} | options
        if self.attempt(self.pair.attend, layer_idx, **arguments) is not None:
            self.used.update(features_of_config(config) | features_of_plan(config, live.plan, live.step, live.ctx))
            self.used.update(features_of_attend(config, live.step, live is not made, self.poison, arguments))
            self.used["layers"] += layer_idx > 0

    # Steps.

    @rule(data=st.data(), steps=st.integers(1, 3))
    def run_steps(self, data: st.DataObject, steps: int) -> None:
        """The whole lifecycle of some steps."""
        for _ in range(steps):
            self.run(data, *data.draw(right_steps(self.scope, self.config, self.known())).frozen())

    def run(self, data: st.DataObject, step: BoundedKVStep, ctx: StepContext) -> None:
        """Admit, plan, attend each layer, commit."""
        self.steps.append((step, ctx))
        if self.admit(step, ctx):
            planned = self.plan(step, ctx)
            for layer_idx in range(self.config.num_layers if planned else 0):
                self.attend(data, self.made[-1], layer_idx)
            self.pair.commit(step, ctx)

    @rule(data=st.data())
    def admit_a_step(self, data: st.DataObject) -> None:
        """A step that something else may come before."""
        self.steps.append(data.draw(right_steps(self.scope, self.config, self.known())).frozen())
        self.admit(*self.steps[-1])

    @_with("refusals")
    @rule(data=st.data())
    def admit_a_wrong_step(self, data: st.DataObject) -> None:
        """A step that most often contradicts something."""
        self.steps.append(data.draw(wrong_steps(self.scope, self.config, self.known())).frozen())
        self.admit(*self.steps[-1])

    @_with("refusals")
    @precondition(lambda self: self.steps)
    @rule(data=st.data(), calls=st.lists(st.sampled_from(STEP_CALLS), min_size=1, max_size=3), copy=st.booleans())
    def go_on_with_a_step(self, data: st.DataObject, calls: list[str], copy: bool) -> None:
        """Calls out of turn or for the second time, with an earlier step or another one of the same numbers."""
        step, ctx = self.steps[-1 - data.draw(st.integers(0, min(len(self.steps), KEPT) - 1))]
        if copy:
            step = BoundedKVStep(step.segments, step.positions, step.tokens)
        for call in calls:
            self.plan(step, ctx) if call == "plan" else self.attempt(getattr(self.pair, call), step, ctx)

    @precondition(lambda self: self.made)
    @rule(data=st.data())
    def attend_again(self, data: st.DataObject) -> None:
        """A layer of an earlier plan."""
        made = self.made[-1 - data.draw(st.integers(0, min(len(self.made), KEPT) - 1))]
        self.attend(data, made, data.draw(st.integers(0, self.config.num_layers - 1)))

    @_with("far_positions")
    @rule(data=st.data(), rid=st.sampled_from(IDS), to=st.sampled_from(BOUNDARIES), beside=st.integers(-4, 1))
    def jump(self, data: st.DataObject, rid: str, to: int, beside: int) -> None:
        """Commit a span that was never planned, to stand before a tile's, a split's or the last position; then step."""
        known = self.known()
        if rid not in known and len(known) == self.config.max_slots and not self.scope.has("refusals"):
            return
        position = known.get(rid, StreamPosition(0, 0))
        span = to + beside - position.source_len - position.written
        if not 0 <= span <= LAST - position.source_len - position.written and not self.scope.has("refusals"):
            return
        step, ctx = BoundedKVStep((Segment(rid, span),), {rid: position}), StepContext((rid,))
        if self.admit(step, ctx):
            self.pair.commit(step, ctx)
            position = position._replace(written=position.written + span)
            self.run(data, BoundedKVStep((Segment(rid, data.draw(st.integers(1, 3))),), {rid: position}), ctx)

    @_with("capture")
    @rule(data=st.data(), rows=st.integers(0, 3), lease=st.sampled_from([None, *LEASES]))
    def capture(self, data: st.DataObject, rows: int, lease: SlotLease | None) -> None:
        """A plan without a stream."""
        lease = lease if self.scope.has("leases") else None
        step = BoundedKVStep((), {})
        ctx = StepContext((), capture=True, padded_request_ids=PADS[:rows], slot_lease=lease)
        if data.draw(st.booleans()):
            step, ctx = data.draw(right_steps(self.scope, self.config, self.known())).frozen()
            ctx = replace(ctx, capture=True)
        self.pair.admit(step, ctx)
        planned = self.plan(step, ctx)
        self.pair.commit(step, ctx)
        if planned and ctx.slot_lease is not None and (self.scope.focus == "capture" or data.draw(st.booleans())):
            self.replay(data, self.made[-1])

    @_with("capture")
    @precondition(lambda self: any(made.ctx.capture and made.lease for made in self.made[-KEPT:]))
    @rule(data=st.data())
    def replay_again(self, data: st.DataObject) -> None:
        """The plan of an earlier capture."""
        captured = [made for made in self.made[-KEPT:] if made.ctx.capture and made.lease]
        self.replay(data, data.draw(st.sampled_from(captured)))

    def replay(self, data: st.DataObject, captured: Made) -> None:
        """A step planned on the lease of a captured plan, then the captured plan attended, as its graph would."""
        declared = data.draw(right_steps(self.scope, self.config, self.known()))
        declared.lease = captured.lease
        step, ctx = declared.frozen()
        if self.admit(step, ctx) and self.plan(step, ctx):
            self.attend(data, captured, data.draw(st.integers(0, self.config.num_layers - 1)))
            self.pair.commit(step, ctx)

    # Requests.

    @rule(rid=st.sampled_from(IDS), call=st.sampled_from(["remove", "reset", "free", "ingest"]))
    def end_or_start_over(self, rid: str, call: str) -> None:
        """A request's end, or another beginning."""
        if call == "ingest":
            self.pair.ingest_request(rid, {"anything": 1})
        elif call == "remove":
            self.pair.remove_request(rid)
        else:
            self.pair.reset_request(rid, free=call == "free")
        if self.pair.free_slots == self.config.max_slots:
            self.pair.fill_all(self.poison)

    @_with("spare")
    @rule(data=st.data())
    def rewind(self, data: st.DataObject) -> None:
        """A stream taken back, as far as it goes or further."""
        known = self.known()
        if not known and not self.scope.has("refusals"):
            return
        rid = data.draw(st.sampled_from([*known, *(IDS if self.scope.has("refusals") else ())]))
        written = known.get(rid, StreamPosition(0, 0)).written
        back = data.draw(st.integers(-1, self.config.spare + 1))
        self.attempt(self.pair.rewind_request, rid, data.draw(st.sampled_from([written - back, written, 0])))
        self.used["spare"] += 1

    @_with("export")
    @rule(data=st.data(), leave=st.booleans())
    def export(self, data: st.DataObject, leave: bool) -> None:
        """A stream's copy; the request may end."""
        rid = data.draw(st.sampled_from([*self.known(), *(IDS if self.scope.has("refusals") else IDS[:1])]))
        state = self.attempt(self.pair.export_request, rid)
        if state is not None:
            self.exported.append(state)
            self.used["export"] += 1
        if leave:
            self.pair.remove_request(rid)

    @_with("export")
    @precondition(lambda self: self.exported)
    @rule(data=st.data(), wrongly=st.integers(0, 5))
    def bring_in(self, data: st.DataObject, wrongly: int) -> None:
        """A copied stream, perhaps with one thing changed."""
        state = data.draw(st.sampled_from(self.exported[-KEPT:]))
        rid = data.draw(st.sampled_from([rid for rid in IDS if rid not in self.known()] or IDS))
        if wrongly == 1 and self.scope.has("refusals"):
            rid = data.draw(st.sampled_from(IDS))
        if wrongly == 2 and self.scope.has("refusals"):
            state = state | {data.draw(st.sampled_from([*state])): data.draw(ODD_NUMBERS)}
        self.attempt(self.pair.import_request, rid, state)

    @_with("leases")
    @rule(number=st.integers(0, 2))
    def size_the_leases(self, number: int) -> None:
        """The tables of captured graphs."""
        self.pair.build_accelerator_graph_buffers([GraphSlotSpec(*lease[::-1]) for lease in LEASES[:number]], 3, 4)

    @rule()
    def look(self) -> None:
        """The pool as a whole."""
        self.pair.post_warmup_validate()
        assert self.pair.free_slots == self.config.max_slots - sum(map(self.pair.holds, IDS))
