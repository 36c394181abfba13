"""A Triton kernel with TF32 dots, judged in close mode.

TF32 keeps 10 bits behind the leading one of each operand. The oracle's limit is float32's: the kernel is far beyond it,
and the report says how far. With `Close(operands="tf32")` it is held to what TF32 operands make of the same sums, and
passes. The interpreter multiplies in float32, so the kernel rounds its operands itself; on a GPU a tensor core would.

    TRITON_INTERPRET=1 python tutorials/oracle/tf32_kernel.py
"""

from __future__ import annotations

import os

import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

import triton
import triton.language as tl

from boundedkv.testing import Close, check_attention


@triton.jit
def tf32(x):
    """Round to nearest even at bit 13: what a tensor core makes of a float32 operand."""
    word = x.to(tl.int32, bitcast=True)
    word = (word + 0xFFF + ((word >> 13) & 1)) & -0x2000
    return word.to(tl.float32, bitcast=True)


@triton.jit
def attend_one_head(
    q_ptr, k_ptr, v_ptr, out_ptr, T, N, scale, D: tl.constexpr, TILE_T: tl.constexpr, TILE_N: tl.constexpr
):
    """One program: the queries [T, D] of one row and head over all of its keys [N, D], in one tile."""
    program = tl.program_id(0)
    t, n, d = tl.arange(0, TILE_T), tl.arange(0, TILE_N), tl.arange(0, D)
    q = tl.load(q_ptr + program * T * D + t[:, None] * D + d[None, :], mask=t[:, None] < T, other=0.0)
    here = program * N * D + n[:, None] * D + d[None, :]
    k = tl.load(k_ptr + here, mask=n[:, None] < N, other=0.0)
    v = tl.load(v_ptr + here, mask=n[:, None] < N, other=0.0)
    scores = tl.dot(tf32(q), tf32(tl.trans(k)), input_precision="tf32") * scale
    scores = tl.where(n[None, :] < N, scores, float("-inf"))
    weights = tl.exp(scores - tl.max(scores, 1)[:, None])
    out = tl.dot(tf32(weights), tf32(v), input_precision="tf32") / tl.sum(weights, 1)[:, None]
    tl.store(out_ptr + program * T * D + t[:, None] * D + d[None, :], out, mask=t[:, None] < T)


def tf32_attention(q, k, v, pool, table, config, **others):
    """Gather each row's keys by the plan's reads, then launch a program a head."""
    out = torch.empty(q.shape[0], q.shape[1], q.shape[2], q.shape[3], device=q.device)
    for b, line in enumerate(table.tolist()):
        slot, reads = line[0], [line[7:9], *(line[11:13], line[13:15])]  # sinks, ring, ring where it wraps
        old = [pool[slot, 0, :, start : start + length] for start, length in reads]
        keys, values = torch.cat([*old, torch.cat([k[b], v[b]], -1)], 1).chunk(2, -1)
        heads, tokens, dim = q[b].shape
        attend_one_head[(heads,)](
            q[b].contiguous(), keys.contiguous(), values.contiguous(), out[b], tokens, keys.shape[1],
            config.score_scale, D=dim, TILE_T=max(16, triton.next_power_of_2(tokens)),
            TILE_N=max(16, triton.next_power_of_2(keys.shape[1])),
        )  # fmt: skip
    return out.transpose(1, 2)


def main(examples=2):
    """Judge it twice."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    options = {"features": (), "examples": examples, "device": device}
    print("1. As if it computed in float32.\n")
    before = check_attention(tf32_attention, "close", **options, first_only=True)
    print(before)
    print('\n2. As what it is: operands="tf32".\n')
    after = check_attention(tf32_attention, Close(operands="tf32"), **options)
    print(after)
    return before, after


if __name__ == "__main__":
    main()
