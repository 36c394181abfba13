"""The state that wrong calls are made in, and short ways to write them down.

`prepared` leaves a pool in which requests a (2 written), b (a shared source of 3 entries, 1 written) and c (a source of
2 entries in `row_source`, nothing written) hold the slots 0, 1 and 2. Slot 3 is free. A step of one token for each of
the three is planned.
"""

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from boundedkv import (
    AdmitOutcome,
    BoundedKVConfig,
    BoundedKVStep,
    BoundedPlan,
    Segment,
    SinkWindow,
    StepContext,
    StreamPosition,
)
from boundedkv.reference import ReferenceManager
from boundedkv.testing import Pair

COMMON: dict[str, Any] = {
    "num_layers": 2,
    "num_heads": 1,
    "num_query_heads": 2,
    "head_dim": 3,
    "retention": SinkWindow(1, 3),
    "max_source_len": 4,
    "max_slots": 4,
    "spare": 1,
}
CONFIGS = {
    "step rule": BoundedKVConfig(**COMMON),
    "query rule": BoundedKVConfig(**COMMON | {"query_window": 2, "retention": SinkWindow(0, 3)}),
    "query rule, sinks": BoundedKVConfig(**COMMON | {"query_window": 2}),
    "reverse": BoundedKVConfig(**COMMON | {"reverse_step_order": True}),
}
POSITIONS = {"a": StreamPosition(0, 2), "b": StreamPosition(3, 1, 1), "c": StreamPosition(2, 0, -1)}


@dataclass
class Prepared:
    """A pair ready for a wrong call, and the arguments of a right `attend` and a right `import_request`."""

    pair: Pair
    attend: dict[str, Any]
    state: dict[str, Any]
    plan: BoundedPlan


def step_of(rids, spans=None, tokens=None, more=(), ctx=None, **positions):
    """A step of one token for each of these requests, and its context: right, but for what is given."""
    segments = tuple(Segment(rid, (spans or {}).get(rid, 1)) for rid in rids)
    known = {rid: position for rid, position in (POSITIONS | positions).items() if position is not None}
    context = {"request_ids": tuple(rids)} | (ctx or {})
    return BoundedKVStep((*segments, *more), known, tokens or {}), StepContext(**context)


def normal(seed, *shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def prepare(manager):
    """Admit, commit and plan as the docstring of this file says; of a manager or a pair."""
    for rid, position in POSITIONS.items():
        step, ctx = step_of(rid, {rid: position.written}, **{rid: position._replace(written=0)})
        assert manager.admit(step, ctx).ok
        manager.commit(step, ctx)
    assert manager.admit(*step_of("abc")).ok
    return manager.plan(*step_of("abc"))


def fill(manager):
    """Give every slot contents of its own."""
    for layer_idx in range(manager.config.num_layers):
        slots = manager.layer(layer_idx)
        slots.copy_(normal(layer_idx, *slots.shape))


def prepared(pair):
    fill(pair.left)
    fill(pair.right)
    plan = prepare(pair)
    q, k, v = normal(10, 3, 2, 1, 3), normal(11, 3, 1, 1, 3), normal(12, 3, 1, 1, 3)
    row_source = normal(14, 2, 1, 1, 2, 6), torch.tensor([9, 9, 1])
    attend = {"layer_idx": 0, "q": q, "k": k, "v": v, "source": normal(13, 2, 1, 1, 4, 6), "row_source": row_source}
    return Prepared(pair, attend | {"plan": plan}, pair.export_request("b"), plan)


# What must be as if there had been no wrong call.


def follow_up(manager):
    """A right step of a, then a new request: the result, and the rows of the plans."""
    step, ctx = step_of("a")
    assert manager.admit(step, ctx).ok
    first = manager.plan(step, ctx)
    out = manager.attend(0, normal(20, 1, 2, 1, 3), normal(21, 1, 1, 1, 3), normal(22, 1, 1, 1, 3))
    manager.commit(step, ctx)
    step, ctx = step_of("z", z=StreamPosition(0, 0))
    assert manager.admit(step, ctx).ok
    return out, first.rows + manager.plan(step, ctx).rows


@cache
def undisturbed(rule):
    """The same right steps in a pool that never saw a wrong call."""
    manager = ReferenceManager(CONFIGS[rule], "cpu")
    fill(manager)
    prepare(manager)
    return *follow_up(manager), [manager.layer(layer_idx) for layer_idx in range(2)]


def seen_of(pair):
    """All that public calls show, in copies."""
    layers = [manager.layer(layer_idx).cpu().clone() for manager in (pair.left, pair.right) for layer_idx in range(2)]
    held = {rid: pair.holds(rid) for rid in "abcyz"}
    exports = [pair.export_request(rid) for rid in POSITIONS]
    return layers, held, exports, pair.free_slots, pair.current._replace(table=pair.current.table.clone())


def refusal_of(make_call, x):
    """The error, or the reason of the outcome; None where the call was not refused."""
    try:
        result = make_call(x)
    except (RuntimeError, ValueError, TypeError) as error:
        return error
    return result.reason if isinstance(result, AdmitOutcome) else None


# Calls: functions of a `Prepared`.


def call(name, *arguments):
    return lambda x: getattr(x.pair, name)(*arguments)


def admit(*arguments, **options):
    return lambda x: x.pair.admit(*step_of(*arguments, **options))


def plan(*arguments, **options):
    return lambda x: x.pair.plan(*step_of(*arguments, **options))


def commit(*arguments, **options):
    return lambda x: x.pair.commit(*step_of(*arguments, **options))


def rollback(*arguments, **options):
    return lambda x: x.pair.rollback_admit(*step_of(*arguments, **options))


def changed(right, changes):
    """Arguments with some of them changed: to something, or by a function of the right one."""
    return right | {name: new(right.get(name)) if callable(new) else new for name, new in changes.items()}


def attend(**changes):
    return lambda x: x.pair.attend(**changed(x.attend, changes))


def bring(rid="z", **changes):
    """Import what was exported of b."""
    return lambda x: x.pair.import_request(rid, changed(x.state, changes))


def of_table(change):
    return lambda plan: plan._replace(table=change(plan.table))


def of_row(number, **changes):
    """A plan with a row that is laid out otherwise; its slot and source count as part of it."""

    def change(plan):
        slot, layout, source = plan.rows[number]
        slot, source = changes.get("slot", slot), changes.get("source", source)
        layout = layout._replace(**{name: new for name, new in changes.items() if name in layout._fields})
        return plan._replace(rows=(*plan.rows[:number], (slot, layout, source), *plan.rows[number + 1 :]))

    return change


def of_storage(change):
    return lambda row_source: (change(row_source[0]), row_source[1])


def of_numbers(change):
    return lambda row_source: (row_source[0], change(row_source[1]))


def meta(tensor):
    return tensor.to("meta")
