"""Which entries a query sees, found out from outside: with q = 0 all keys weigh alike, one-hot values tell whose.

A script is played again with such tensors. Every entry gets a label, the stream position of a request, whose negative
number rides in the first element of its key too, so that the slots tell what lies in them.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from boundedkv.config import BoundedKVConfig
from boundedkv.manager import BoundedKVManager
from boundedkv.plan import SINK_SLOT, SINK_SOURCE, WINDOW_SOURCE, BoundedPlan, decode
from boundedkv.testing.samples import Sample
from boundedkv.testing.script import Call, Result, play

MOST_LABELS = 255  # a bfloat16 tells these apart
MOST_PASSES = 64
MOST_ENTRIES = 40  # of rel_bias, tried one by one


class Label(NamedTuple):
    """An entry.

    Attributes:
        owner: the request that wrote it, or the source that holds it.
        position: its stream position.
        part: the layer, row and head it belongs to.
    """

    owner: str
    position: int
    part: tuple[int, int, int]


class Sight(NamedTuple):
    """What a query sees.

    Attributes:
        entries: how many times it sees each entry.
        unwritten: how many entries it sees beside these, that nobody wrote.
    """

    entries: Counter[Label]
    unwritten: int


class Row(NamedTuple):
    """A row of the last attend.

    Attributes:
        request: whose it is.
        length: entries of its stream when the step starts.
        source: what the labels of its source call it.
        reads_source: whether it reads any of it.
        padding: whether it is a padding row.
        slot: its slot.
    """

    request: str
    length: int
    source: str
    reads_source: bool = False
    padding: bool = False
    slot: int = -1


def rows_of(script: Sequence[Call], number: int, results: Mapping[int, Any]) -> list[Row]:
    """The rows that an attend serves, as the plan's table has them when it is called."""
    planned = _plan_of(script, number, results)
    if planned is None:
        return []
    plan: BoundedPlan = results[planned]
    ctx = script[planned].arguments["ctx"]
    rows = []
    for b, (slot, layout, source) in enumerate(decode(plan.table[: len(plan.rows)].cpu().numpy())):
        request = ctx.row_ids[b] if b < len(ctx.row_ids) else "padding"
        name = f"source {source}" if source >= 0 else f"row_source of row {b}"
        rows.append(Row(request, layout.length, name, layout.source_entries > 0, ctx.is_padding_row(request), slot))
    return rows


def _plan_of(script: Sequence[Call], number: int, results: Mapping[int, Any]) -> int | None:
    """The call that made the plan of an attend; of a lease, the last that wrote to its table."""
    plans = [i for i in range(number) if script[i].name == "plan" and isinstance(results.get(i), BoundedPlan)]
    given = script[number].arguments.get("plan")
    if not plans or (given is not None and (not isinstance(given, Result) or given.number not in plans)):
        return None
    at = plans[-1] if given is None else given.number
    lease = script[at].arguments["ctx"].slot_lease
    return at if lease is None else max(i for i in plans if script[i].arguments["ctx"].slot_lease == lease)


def unwritten_entries(script: Sequence[Call], results: Sequence[Any]) -> int:
    """How many entries the last call, an attend, is to read from a slot that no attend of the script has brought."""
    numbered = dict(enumerate(results))
    last = len(script) - 1
    planned = _plan_of(script, last, numbered) if script[last].name == "attend" else None
    if planned is None:
        return 0
    layer = script[last].arguments["layer_idx"]
    brought = {
        (row.request, row.length + t)
        for number, call in enumerate(script[:last])
        if call.name == "attend" and call.arguments["layer_idx"] == layer
        for row in rows_of(script, number, numbered)
        for t in range(call.arguments["q"].shape[2])
    }
    missing = 0
    plan = results[planned]
    lines = decode(plan.table[: len(plan.rows)].numpy())
    for row, (_, layout, _) in zip(rows_of(script, last, numbered), lines, strict=True):
        sinks = layout.reads[SINK_SOURCE].length + layout.reads[SINK_SLOT].length
        window = range(layout.length - layout.retained + sinks, layout.length)
        in_slot = [
            *range(layout.reads[SINK_SOURCE].length, sinks),
            *window[layout.reads[WINDOW_SOURCE].length :],
        ]
        missing += sum((row.request, position) not in brought for position in in_slot)
    return missing


class Probe:
    """A script that ends in an attend or in a difference of slots, played with telling tensors.

    Attributes:
        labels: the entries, in the order in which they were met.
    """

    def __init__(self, config: BoundedKVConfig, script: Sequence[Call]) -> None:
        """Play nothing yet."""
        self._config, self._script = config, script
        self.labels: dict[Label, int] = {}
        self._first = 0
        self._bias: Tensor | None = None
        self._tensors: dict[int, dict[str, Any]] = {}

    def sights(self, make: Any, others: Any, query: tuple[int, int, int]) -> tuple[Sight, Sight] | None:
        """What a query of the last call sees, for the reference and for the other manager.

        Args:
            make: makes a fresh reference.
            others: makes a fresh other manager.
            query: [row, query, head].

        Returns:
            Both sights, or None where it cannot be told.
        """
        shares: tuple[list[float], list[float]] = ([], [])
        for number in range(MOST_PASSES):
            self._first = number * self._config.head_dim
            for side, results in zip(shares, self._play_both(make(), others()), strict=True):
                out = results.get(len(self._script) - 1)
                if not isinstance(out, Tensor):
                    return None
                side += out[query].double().tolist()
            if self._first + self._config.head_dim >= len(self.labels):
                left, right = (self._sight(side) for side in shares)
                return None if left is None or right is None else (left, right)
        return None

    def bias_entries(
        self, make: Any, others: Any, query: tuple[int, int, int]
    ) -> tuple[dict[Label, int], dict[Label, int]] | None:
        """Which entry of rel_bias each key takes, for both: masking an entry takes its key out of sight.

        Args:
            make: makes a fresh reference.
            others: makes a fresh other manager.
            query: [row, query, head].

        Returns:
            Key -> entry, twice, or None where it cannot be told.
        """
        bias = self._script[-1].arguments.get("rel_bias")
        whole = self.sights(make, others, query)
        if not isinstance(bias, Sample) or whole is None or bias.shape[-1] > MOST_ENTRIES:
            return None
        taken: tuple[dict[Label, int], dict[Label, int]] = ({}, {})
        for entry in range(bias.shape[-1]):
            self._bias = torch.zeros(bias.shape, dtype=bias.dtype)
            self._bias[..., entry] = -torch.inf
            masked = self.sights(make, others, query)
            for side, before, after in zip(taken, whole, masked or whole, strict=True):
                side.update(dict.fromkeys(before.entries - after.entries, entry))
        self._bias = None
        return taken

    def held(self, make: Any, others: Any, layer_idx: int, entry: tuple[int, ...]) -> tuple[str, str]:
        """What lies in an entry of a layer's slots, [slot, row, head, entry], for both, in words."""
        managers: tuple[BoundedKVManager, BoundedKVManager] = make(), others()
        self._play_both(*managers)
        names = {-number - 1: label for label, number in self.labels.items()}
        left, right = (manager.layer(layer_idx)[entry][: self._config.head_dim].cpu() for manager in managers)
        return _held_told(left, names), _held_told(right, names)

    def _play_both(self, left: BoundedKVManager, right: BoundedKVManager) -> tuple[dict[int, Any], dict[int, Any]]:
        """The same tensors for both: the labels are made by the reference's plans."""
        self._tensors = {}
        return play(left, self._script, self._telling), play(right, self._script, self._told_again)

    def _telling(self, number: int, call: Call, results: Mapping[int, Any]) -> dict[str, Any] | None:
        if call.name == "fill":
            return None
        if call.name != "attend" or not isinstance(call.arguments["q"], Sample):
            return call.arguments
        rows = rows_of(self._script, number, results)
        self._tensors[number] = self._attended(call, rows)
        self._tensors[number]["rel_bias"] = self._bias if number == len(self._script) - 1 else None
        return call.arguments | self._tensors[number]

    def _told_again(self, number: int, call: Call, results: Mapping[int, Any]) -> dict[str, Any] | None:
        return None if call.name == "fill" else call.arguments | self._tensors.get(number, {})

    def _attended(self, call: Call, rows: Sequence[Row]) -> dict[str, Any]:
        q, k, v = (call.arguments[name] for name in "qkv")
        layer = call.arguments["layer_idx"]
        per_request = self._config.rows_per_request
        keys, values = torch.zeros(k.shape), torch.zeros(v.shape)
        for line in range(k.shape[0] if rows else 0):
            row = rows[line // per_request]
            for head in range(k.shape[1]):
                for t in range(k.shape[2]):
                    label = Label(row.request, row.length + t, (layer, line % per_request, head))
                    self._tell(label, keys[line, head, t], values[line, head, t])
        told = {"q": torch.zeros(q.shape, dtype=q.dtype), "k": keys.to(k.dtype), "v": values.to(v.dtype)}
        source, row_source = call.arguments.get("source"), call.arguments.get("row_source")
        if isinstance(source, Sample):
            told["source"] = self._bank(source, layer, [f"source {i}" for i in range(source.shape[0])])
        if row_source is not None and isinstance(row_source[0], Sample):
            storage, slots = row_source
            owners = [f"storage {i}" for i in range(storage.shape[0])]
            for b, slot in enumerate(slots.tolist()):
                if slot < len(owners):
                    owners[slot] = f"row_source of row {b}"
            told["row_source"] = (self._bank(storage, layer, owners), slots)  # type: ignore[assignment]
        return told

    def _bank(self, bank: Sample, layer: int, owners: Sequence[str]) -> Tensor:
        x = torch.zeros(bank.shape)
        dim = self._config.head_dim
        for i, row, head, s in torch.cartesian_prod(*(torch.arange(n) for n in bank.shape[:4])).tolist():
            self._tell(Label(owners[i], s, (layer, row, head)), x[i, row, head, s, :dim], x[i, row, head, s, dim:])
        return x.to(bank.dtype)

    def _tell(self, label: Label, key: Tensor, value: Tensor) -> None:
        number = self.labels.setdefault(label, len(self.labels))
        if number < MOST_LABELS:
            key[0] = -number - 1
        if 0 <= number - self._first < self._config.head_dim:
            value[number - self._first] = 1.0

    def _sight(self, shares: Sequence[float]) -> Sight | None:
        """Shares are multiples of that of one entry seen once."""
        if not all(map(math.isfinite, shares)):
            return None
        there = {label: shares[number] for label, number in self.labels.items() if shares[number] > 1e-6}
        if not there:
            return Sight(Counter(), 0) if all(share == 0 for share in shares) else None
        one = min(there.values())
        counts = Counter({label: round(share / one) for label, share in there.items()})
        even = all(abs(share / one - counts[label]) < 0.1 for label, share in there.items())
        return Sight(counts, max(0, round((1 - sum(there.values())) / one))) if even else None


def _held_told(key: Tensor, names: Mapping[int, Label]) -> str:
    first, *others = key.tolist()
    if first == 0 and not any(others):
        return "what was there before"
    if first not in names or any(others):
        return "what no request brought"
    label = names[int(first)]
    return f"stream position {label.position} of {label.owner!r}"
