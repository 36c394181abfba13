"""How many programs, and of what shape: chosen from the plan and the config, never from the device.

Every kernel is launched from here, with fusion off. Tile and split are the contract's and are not chosen.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
import triton
from torch import Tensor

from boundedkv.attend_checks import RowSource
from boundedkv.config import BoundedKVConfig
from boundedkv.fast.kernels import attention_kernel, merge_kernel, write_kernel
from boundedkv.fast.runtime import interpreted
from boundedkv.numerics import SPLIT, score_factor
from boundedkv.plan import BoundedPlan

_TYPES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}
_BITS = {torch.float32: torch.int32, torch.float16: torch.int16, torch.bfloat16: torch.int16}

# Fewer programs than this leave a large GPU idle: then a program takes one split instead of all.
_ENOUGH_PROGRAMS = 256
_MERGE_LANES = 16
_WRITE_TOKENS = 16


class Inputs(NamedTuple):
    """One layer's step, checked."""

    q: Tensor  # [B * rows, Hq, T, D]
    k: Tensor  # [B * rows, H, T, D]
    v: Tensor  # [B * rows, H, T, D]
    pool: Tensor  # [max_slots, rows, H, cap, 2D]
    source: Tensor | None  # [sources, rows, H, L, 2D]
    row_source: RowSource | None  # [slots, rows, H, L, 2D], [>= B]
    rel_bias: Tensor | None  # [B * rows, Hq, T, R]


class Shape(NamedTuple):
    """The part of a launch that a kernel is compiled for, but for element types."""

    block_d: int
    block_q: int
    threads: int


def attention_shape(head_dim: int, lanes: int, ieee: bool, bias: bool, alike: bool) -> Shape:
    """Choose a program's block. Free of the bits: a query's arithmetic does not depend on the lanes beside it.

    The largest that leaves a variant its registers. Tensor cores share 32 elements among four warps, not 16.
    """
    block_d = max(32, 1 << (head_dim - 1).bit_length())
    if ieee:
        return Shape(block_d, 1, 128 if block_d <= 64 else 256)
    if lanes > 16 and alike and (block_d == 64 or (block_d == 128 and not bias)):
        return Shape(block_d, 32, 256)
    return Shape(block_d, 16, 128 if block_d == 32 or (block_d == 64 and alike) else 256)


def attend(config: BoundedKVConfig, plan: BoundedPlan, inputs: Inputs, ieee: bool) -> Tensor:
    """Launch the attention of one step: [B * rows, T, Hq, D] in q's element type."""
    q, k, v, pool, source, row_source, bias = inputs
    batch_rows, query_heads, own_tokens, head_dim = q.shape
    out = torch.empty((batch_rows, own_tokens, query_heads, head_dim), dtype=q.dtype, device=q.device)
    if batch_rows == 0:
        return out
    group = query_heads // config.num_heads
    storage, row_slots = row_source if row_source is not None else (None, None)
    alike = _alike(pool, k, v, *(tensor for tensor in (source, storage) if tensor is not None))
    shape = attention_shape(head_dim, own_tokens * group, ieee, bias is not None, alike)
    blocks = _cdiv(own_tokens * group, shape.block_q)
    programs = batch_rows * config.num_heads * blocks
    # The sinks and the window fill splits apart, and the window may begin inside one.
    splits = _cdiv(plan.max_retained + own_tokens, SPLIT) + 2
    by_split = splits > 3 and programs < _ENOUGH_PROGRAMS
    lanes = batch_rows * own_tokens * query_heads
    part = torch.empty(splits * lanes * (head_dim + 3) if by_split else 0, dtype=torch.float32, device=q.device)
    _launch(
        attention_kernel,
        (batch_rows * config.num_heads, blocks, splits if by_split else 1),
        plan.table,
        *map(_floats, (q, k, v, pool)),
        *(_floats(_or(tensor, pool)) for tensor in (source, storage)),
        _or(row_slots, plan.table),
        _floats(_or(bias, q)),
        out.view(_BITS[out.dtype]),
        part,
        *(tensor.stride() for tensor in (q, k, v, pool)),
        *(_or(tensor, pool).stride() for tensor in (source, storage)),
        1 if row_slots is None else row_slots.stride(0),
        _or(bias, q).stride(),
        own_tokens,
        config.query_window or 0,
        score_factor(config.score_scale),
        ROWS=config.rows_per_request,
        H=config.num_heads,
        G=group,
        D=head_dim,
        BLOCK_D=shape.block_d,
        BLOCK_Q=shape.block_q,
        CAUSAL=config.query_window is not None,
        IEEE=ieee,
        HAS_BIAS=bias is not None,
        HAS_SOURCE=source is not None and plan.reads_source,
        HAS_ROW_SOURCE=storage is not None and plan.reads_row_source,
        ALIKE=alike,
        BY_SPLIT=by_split,
        **{f"{name}_TYPE": _TYPES[t.dtype] for name, t in (("Q", q), ("K", k), ("V", v), ("POOL", pool))},
        SOURCE_TYPE=_TYPES[_or(source, pool).dtype],
        ROW_SOURCE_TYPE=_TYPES[_or(storage, pool).dtype],
        BIAS_TYPE=_TYPES[_or(bias, q).dtype],
        threads=shape.threads,
    )
    if by_split:
        _launch(
            merge_kernel,
            (batch_rows, _cdiv(own_tokens * query_heads, _MERGE_LANES)),
            plan.table,
            part,
            out.view(_BITS[out.dtype]),
            own_tokens,
            splits,
            ROWS=config.rows_per_request,
            QUERY_HEADS=query_heads,
            D=head_dim,
            BLOCK_D=shape.block_d,
            BLOCK_Q=_MERGE_LANES,
            Q_TYPE=_TYPES[q.dtype],
        )
    return out


def write(config: BoundedKVConfig, plan: BoundedPlan, inputs: Inputs) -> None:
    """Launch the write of one step's span into the slots."""
    k, v, pool = inputs.k, inputs.v, inputs.pool
    entries = min(plan.max_span, config.slot_tokens)
    if k.shape[0] == 0 or entries == 0:
        return
    _launch(
        write_kernel,
        (k.shape[0] * config.num_heads, _cdiv(entries, _WRITE_TOKENS)),
        plan.table,
        _floats(k),
        _floats(v),
        pool.view(_BITS[pool.dtype]),
        k.stride(),
        v.stride(),
        pool.stride(),
        ROWS=config.rows_per_request,
        H=config.num_heads,
        D=config.head_dim,
        BLOCK_D=max(32, 1 << (config.head_dim - 1).bit_length()),
        BLOCK_T=_WRITE_TOKENS,
        REVERSE=config.reverse_step_order,
        K_TYPE=_TYPES[k.dtype],
        V_TYPE=_TYPES[v.dtype],
        POOL_TYPE=_TYPES[pool.dtype],
    )


def _launch(kernel: Any, grid: tuple[int, ...], *args: Any, threads: int = 128, **constants: Any) -> None:
    """Launch with fusion off: a fused multiply-add rounds once where the contract rounds twice.

    One tile in flight: a second one costs more registers and shared memory than a multiprocessor has. On NVIDIA the
    compiler may use all registers that a thread can have, instead of spilling some to fit one more program.

    The interpreter computes in numpy, which would warn of infinities that the contract has a meaning for.
    """
    options: dict[str, Any] = {"num_stages": 1, "enable_fp_fusion": False}
    if not interpreted():
        target = triton.runtime.driver.active.get_current_target()
        options["num_warps"] = threads // target.warp_size
        if target.backend == "cuda":
            options["maxnreg"] = 255
    with np.errstate(all="ignore"):
        kernel[grid](*args, **constants, **options)


def _floats(tensor: Tensor) -> Tensor:
    """The tensor as kernels load it: bfloat16 by its bits."""
    return tensor.view(torch.int16) if tensor.dtype == torch.bfloat16 else tensor


def _alike(*tensors: Tensor) -> bool:
    """Whether one load can read vectors of any of these: of one type, contiguous, from multiples of 16 bytes on."""
    first, size = tensors[0], tensors[0].element_size()
    return all(tensor.dtype == first.dtype and tensor.stride(-1) == 1 for tensor in tensors) and not any(
        start % 16
        for tensor in tensors
        for start in (tensor.data_ptr(), *(size * stride for stride in (first.shape[-1] // 2, *tensor.stride()[:-1])))
    )


def _or(tensor: Tensor | None, other: Tensor) -> Tensor:
    """An argument that the kernel does not read needs an address all the same."""
    return other if tensor is None else tensor


def _cdiv(a: int, b: int) -> int:
    return -(-a // b)
