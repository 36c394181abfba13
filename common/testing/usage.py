"""Which features a call has to do with: coverage is counted, not claimed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from boundedkv.config import BoundedKVConfig
from boundedkv.plan import BoundedPlan
from boundedkv.step import BoundedKVStep, StepContext
from boundedkv.testing.samples import Sample

LONG = 64
_SMALLEST_KERNEL_DIM = 16


def features_of_config(config: BoundedKVConfig) -> set[str]:
    """What a pool has to do with, whatever is done with it."""
    dim = config.head_dim
    found = {
        "rows": config.rows_per_request > 1,
        "grouped_heads": config.query_heads > config.num_heads,
        "any_head_dim": dim < _SMALLEST_KERNEL_DIM or dim & (dim - 1) != 0,
        "query_window": config.query_window is not None,
        "reverse_step_order": config.reverse_step_order,
        "retention_by_length": len(set(config.retentions)) > 1,
        "window_includes_step": any(kept.window_includes_step for kept in config.retentions),
        "float16": config.dtype == torch.float16,
        "bfloat16": config.dtype == torch.bfloat16,
        "spare": config.spare > 0,
    }
    return {name for name, there in found.items() if there}


def features_of_plan(config: BoundedKVConfig, plan: BoundedPlan, step: BoundedKVStep, ctx: StepContext) -> set[str]:
    """What a plan has to do with."""
    layouts = [layout for _, layout, _ in plan.rows]
    found = {
        "batch": len(ctx.request_ids) > 1,
        "ragged": bool(step.tokens),
        "padding": any(map(ctx.is_padding_row, ctx.row_ids)) and not ctx.capture,
        "leases": ctx.slot_lease is not None,
        "sources": plan.reads_source and not ctx.capture,
        "row_source": plan.reads_row_source and not ctx.capture,
        "long_rows": any(layout.retained > LONG for layout in layouts),
        "far_positions": any(layout.length >= LONG - 4 for layout in layouts),
    }
    return {name for name, there in found.items() if there}


def features_of_attend(
    config: BoundedKVConfig, step: BoundedKVStep, replayed: bool, poison: str, arguments: Mapping[str, Any]
) -> set[str]:
    """What the arguments of `attend` have to do with, samples in place of tensors."""
    bank, storage = arguments["source"], (arguments["row_source"] or (None,))[0]
    given = [arguments["q"], arguments["k"], arguments["v"], bank, storage, arguments.get("rel_bias")]
    tensors = [x for x in given if isinstance(x, Sample)]
    dtypes = {config.dtype, *(x.dtype for x in tensors)}
    tokens = arguments["q"].shape[2]
    found = {
        "lookahead": any(segment.span < tokens for segment in step.segments),
        "rel_bias": arguments.get("rel_bias") is not None,
        "ieee": arguments.get("ieee", False),
        "float16": torch.float16 in dtypes,
        "bfloat16": torch.bfloat16 in dtypes,
        "mixed_types": len(dtypes) > 1,
        "strides": any(x.layout != "whole" for x in tensors),
        "extremes": any(x.kind in ("odd", "poison") for x in tensors),
        "poisoned_memory": poison == "nan",
        "capture": replayed,
    }
    return {name for name, there in found.items() if there}
