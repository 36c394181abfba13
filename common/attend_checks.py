"""What a caller may hand to `attend`: looked at here before a backend touches anything."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from boundedkv.config import FLOAT_DTYPES, BoundedKVConfig
from boundedkv.numerics import MAX_POSITION
from boundedkv.plan import ALL_TOKENS, RING, ROW_INTS, SINK_SLOT, BoundedPlan, Row, RowLayout, decode

RowSource = tuple[Tensor, Tensor]

_SMALLEST_NORMAL = np.finfo(np.float32).tiny
_HALF = np.float32(0.5)


def check_subnormals() -> None:
    """Raise `RuntimeError` where this thread's processor flushes subnormals to zero: it would give other bits.

    The flag belongs to a thread, and libraries set it (`torch.set_flush_denormal`, compilers' fast-math start-up code).
    """
    if _SMALLEST_NORMAL * _HALF == 0:
        raise RuntimeError(
            "this thread flushes subnormal numbers to zero, but should honour them: torch.set_flush_denormal(False)"
        )


def check_layer(config: BoundedKVConfig, layer_idx: object) -> None:
    """Raise `ValueError` where there is no such layer."""
    if not isinstance(layer_idx, int) or isinstance(layer_idx, bool) or not 0 <= layer_idx < config.num_layers:
        raise ValueError(f"layer_idx is {layer_idx!r}, but should be an integer from 0 to {config.num_layers - 1}")


class PlanNeeds(NamedTuple):
    """What a plan asks of the other arguments of `attend`; looked up once a plan, not once a layer."""

    sources: int  # sources that the shared bank must have
    source_entries: int  # entries that each of them must have
    row_sources: tuple[int, ...]  # rows that read from row_source
    row_source_entries: int  # entries that its storage must have
    sinks: int  # the most sinks of any row, or of any replay


def plan_needs(config: BoundedKVConfig, device: torch.device, plan: BoundedPlan, own_tokens: int) -> PlanNeeds:
    """Raise `ValueError` where a plan does not fit the pool or a step of `own_tokens` tokens a row."""
    table, num_rows = plan.table, len(plan.rows)
    if table.dtype != torch.int32 or table.ndim != 2 or table.shape[1] != ROW_INTS or table.shape[0] < num_rows:
        raise ValueError(
            f"plan.table is {table.dtype} {list(table.shape)}, but should be torch.int32 [>= {num_rows}, {ROW_INTS}]"
        )
    _check_device("plan.table", table, device)
    if plan.max_span > own_tokens and any(layout.tokens for _, layout, _ in plan.rows):
        raise ValueError(f"plan.max_span is {plan.max_span}, but should be at most the {own_tokens} tokens of q")
    rows = plan.rows
    for row, line in enumerate(rows):
        _check_row(config, plan, row, line, own_tokens)
    if device.type == "cpu":  # there the table itself can be looked at: a lease's may have been planned again
        rows = decode(table[:num_rows].numpy())
        for row, line in enumerate(rows):
            if line != plan.rows[row]:
                _check_row(config, plan, row, line, own_tokens)
    most_sinks = max(kept.sink for kept in config.retentions)  # of a launch of padding rows alone: a capture
    shared = [(layout, source) for _, layout, source in rows if layout.source_entries and source >= 0]
    own = [row for row, (_, layout, source) in enumerate(rows) if layout.source_entries and source < 0]
    return PlanNeeds(
        sources=max((source + 1 for _, source in shared), default=0),
        source_entries=max((layout.source_entries for layout, _ in shared), default=0),
        row_sources=tuple(own),
        row_source_entries=max((rows[row][1].source_entries for row in own), default=0),
        sinks=max((layout.sink for _, layout, _ in rows if layout.tokens), default=most_sinks),
    )


def _check_row(config: BoundedKVConfig, plan: BoundedPlan, row: int, line: Row, own_tokens: int) -> None:
    slot, layout, source = line
    if not 0 <= slot < config.max_slots:
        raise ValueError(f"plan row {row} has slot {slot}, but should have one from 0 to {config.max_slots - 1}")
    tokens = own_tokens if layout.tokens == ALL_TOKENS else layout.tokens
    if tokens > own_tokens:
        raise ValueError(f"plan row {row} has {tokens} tokens, but q brings {own_tokens} a row")
    if layout.length + tokens - 1 > MAX_POSITION:
        raise ValueError(
            f"plan row {row} takes its stream to position {layout.length + tokens - 1}, "
            f"but should stay within {MAX_POSITION}"
        )
    _check_runs(config, row, layout, own_tokens)
    _check_bounds(plan, row, layout, source)


def _check_runs(config: BoundedKVConfig, row: int, layout: RowLayout, own_tokens: int) -> None:
    """A plan of another pool would read and write the neighbours' slots."""
    for read in (layout.reads[SINK_SLOT], *layout.reads[RING:]):
        if read.start < 0 or read.length < 0 or read.start + read.length > config.slot_tokens:
            raise ValueError(f"plan row {row} has {read}, but should stay within the {config.slot_tokens} of a slot")
    for write in layout.writes:
        last = write.token + (1 - write.length if config.reverse_step_order else write.length - 1)
        in_slot = write.start >= 0 and write.length >= 0 and write.start + write.length <= config.slot_tokens
        if write.length and not (in_slot and 0 <= min(write.token, last) and max(write.token, last) < own_tokens):
            raise ValueError(
                f"plan row {row} has {write}, but should stay within the {config.slot_tokens} entries of a slot and "
                f"the {own_tokens} tokens of q"
            )


def _check_bounds(plan: BoundedPlan, row: int, layout: RowLayout, source: int) -> None:
    """A lease's table may have been planned again since; the launch is chosen from the plan at hand."""
    written = sum(write.length for write in layout.writes)
    reads = plan.reads_source if source >= 0 else plan.reads_row_source
    if layout.retained > plan.max_retained or written > plan.max_span or (layout.source_entries and not reads):
        raise ValueError(
            f"plan.table has row {row} read {layout.retained} entries, write {written} and read "
            f"{layout.source_entries} of a source, but should stay within the plan's max_retained {plan.max_retained}, "
            f"max_span {plan.max_span} and reads: its lease was planned again since"
        )


def check_qkv(
    config: BoundedKVConfig, device: torch.device, num_rows: int, q: object, k: object, v: object
) -> tuple[Tensor, Tensor, Tensor]:
    """Raise `ValueError` where q, k or v do not fit the pool, the plan's rows or each other."""
    batch = num_rows * config.rows_per_request
    q = _check_tensor("q", q, (batch, config.query_heads, None, config.head_dim), device)
    if q.shape[2] == 0:
        raise ValueError("q has 0 tokens, but should have at least one")
    expected = (batch, config.num_heads, q.shape[2], config.head_dim)
    return q, _check_tensor("k", k, expected, device), _check_tensor("v", v, expected, device)


def check_apart(slots: Tensor, k: Tensor, v: Tensor) -> None:
    """Raise `ValueError` where k or v lie in the slots themselves: they are read while the slots are written."""
    for name, tensor in (("k", k), ("v", v)):
        if tensor.untyped_storage().data_ptr() == slots.untyped_storage().data_ptr() and slots.numel():
            raise ValueError(f"{name} is a view of the layer's slots, but should be a tensor of its own")


def check_source(
    config: BoundedKVConfig,
    device: torch.device,
    plan: BoundedPlan,
    needs: PlanNeeds,
    source: object,
    row_source: object,
) -> Tensor | None:
    """Raise `ValueError` where the shared source bank is missing or does not hold what the plan reads of it."""
    if source is None and row_source is None and plan.reads_source and plan.reads_row_source:
        raise ValueError("source and row_source are None, but one should be given: a replay of the plan may read it")
    if source is None:
        if needs.sources:
            raise ValueError("source is None, but should be given: the plan reads it")
        return None
    bank = _check_bank("source", source, config, device)
    if bank.shape[0] < needs.sources or bank.shape[3] < needs.source_entries:
        raise ValueError(
            f"source is {list(bank.shape)}, but should have at least {needs.sources} sources of "
            f"{needs.source_entries} entries: the plan reads them"
        )
    return bank


def check_row_source(
    config: BoundedKVConfig, device: torch.device, plan: BoundedPlan, needs: PlanNeeds, row_source: object
) -> RowSource | None:
    """Raise `ValueError` where `row_source` is missing or does not hold what the plan reads of it.

    Its slot numbers are looked at where that costs no synchronisation: on the CPU.
    """
    if row_source is None:
        if needs.row_sources:
            raise ValueError("row_source is None, but should be given: the plan reads it")
        return None
    if not isinstance(row_source, tuple) or len(row_source) != 2:
        raise ValueError(f"row_source is {type(row_source).__name__}, but should be a tuple (storage, slots)")
    storage = _check_bank("row_source storage", row_source[0], config, device)
    slots = row_source[1]
    if not isinstance(slots, Tensor) or slots.dtype not in (torch.int32, torch.int64) or slots.ndim != 1:
        raise ValueError(f"row_source slots is {_told(slots)}, but should be an int32 or int64 tensor [>= rows]")
    if slots.shape[0] < len(plan.rows):
        raise ValueError(f"row_source slots has {slots.shape[0]} entries, but the plan has {len(plan.rows)} rows")
    _check_device("row_source slots", slots, device)
    if storage.shape[3] < needs.row_source_entries:
        raise ValueError(
            f"row_source storage is {list(storage.shape)}, but should have at least {needs.row_source_entries} "
            "entries: the plan reads them"
        )
    if needs.row_sources and device.type == "cpu":
        for row in needs.row_sources:
            if not 0 <= int(slots[row]) < storage.shape[0]:
                raise ValueError(
                    f"row_source slots has {int(slots[row])} for row {row}, but should have one from 0 to "
                    f"{storage.shape[0] - 1}"
                )
    return storage, slots


def check_rel_bias(
    config: BoundedKVConfig,
    device: torch.device,
    plan: BoundedPlan,
    needs: PlanNeeds,
    own_tokens: int,
    rel_bias: object,
) -> Tensor | None:
    """Raise `ValueError` where the per-distance score term does not fit."""
    if rel_bias is None:
        return None
    if config.reverse_step_order:
        raise ValueError("rel_bias is given, but should be None with reverse_step_order")
    batch = len(plan.rows) * config.rows_per_request
    if config.query_window is not None:
        if needs.sinks:
            raise ValueError(
                f"rel_bias is given, but a row has {needs.sinks} sinks, which have no entry in it: beside a "
                "query_window it needs a retention without sinks"
            )
        expected = (batch, config.query_heads, own_tokens, config.query_window + 1)
        return _check_tensor("rel_bias", rel_bias, expected, device)
    bias = _check_tensor("rel_bias", rel_bias, (batch, config.query_heads, own_tokens, None), device)
    least = plan.max_retained + 2 * own_tokens - 1
    if bias.shape[3] < least:
        raise ValueError(
            f"rel_bias has {bias.shape[3]} entries a query, but should have at least {least}: "
            f"{plan.max_retained} retained and {own_tokens} own tokens"
        )
    return bias


def _check_bank(name: str, bank: object, config: BoundedKVConfig, device: torch.device) -> Tensor:
    expected = (None, config.rows_per_request, config.num_heads, None, 2 * config.head_dim)
    return _check_tensor(name, bank, expected, device)


def _check_tensor(name: str, value: object, expected: tuple[int | None, ...], device: torch.device) -> Tensor:
    shape = "[" + ", ".join("*" if size is None else str(size) for size in expected) + "]"
    if not isinstance(value, Tensor):
        raise ValueError(f"{name} is {_told(value)}, but should be a tensor {shape}")
    fits = value.ndim == len(expected) and all(
        size is None or size == got for size, got in zip(expected, value.shape, strict=True)
    )
    if not fits:
        raise ValueError(f"{name} is {list(value.shape)}, but should be {shape}")
    if value.dtype not in FLOAT_DTYPES:
        raise ValueError(f"{name} is {value.dtype}, but should be one of {', '.join(map(str, FLOAT_DTYPES))}")
    _check_device(name, value, device)
    return value.resolve_neg()


def _check_device(name: str, value: Tensor, device: torch.device) -> None:
    if value.device != device:
        raise ValueError(f"{name} is on {value.device}, but should be on {device}, the manager's")


def _told(value: object) -> str:
    if isinstance(value, Tensor):
        return f"{value.dtype} {list(value.shape)}"
    return type(value).__name__
