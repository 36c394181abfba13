"""The kernels: attention over one line of the plan, the merge of its splits, and the write of a step's span.

Strides are tuples in elements, one a axis. Shapes: Q query lanes (a row's own tokens times the G query heads that share
a key/value head), J = 64 positions of a tile, D elements of a vector, padded to a power of two, as C pieces of P.
"""

import triton
import triton.language as tl

from boundedkv import numerics
from boundedkv import plan as fmt
from boundedkv.fast.arithmetic import (
    FLOAT32,
    INF,
    MIN_EXPONENT,
    MIN_IEEE_EXPONENT,
    TILE,
    exponents,
    finish,
    fix,
    fold,
    load_float,
    poisoned,
    store_float,
)
from boundedkv.fast.tiles import (
    RING,
    RING_WRAPPED,
    SINK,
    SINK_SOURCE,
    bias_entries,
    crossed,
    exact_scores,
    exact_values,
    finite_values,
    ieee_scores,
    ieee_values,
    load_vectors,
    locate,
    overlay,
    retained_bounds,
    visible_pairs,
    whole,
)

TILES_PER_SPLIT: tl.constexpr = tl.constexpr(numerics.TILES_PER_SPLIT)
SPLIT: tl.constexpr = tl.constexpr(numerics.SPLIT)
SLOT: tl.constexpr = tl.constexpr(fmt.SLOT)
SOURCE: tl.constexpr = tl.constexpr(fmt.SOURCE)
TOKENS: tl.constexpr = tl.constexpr(fmt.TOKENS)
WRITES: tl.constexpr = tl.constexpr(fmt.WRITES)
NUM_WRITES: tl.constexpr = tl.constexpr(fmt.NUM_WRITES)
ROW_INTS: tl.constexpr = tl.constexpr(fmt.ROW_INTS)


@triton.jit
def nothing_seen(BLOCK_Q: tl.constexpr, BLOCK_D: tl.constexpr):
    """The neutral element of `fold`: m, l, e [Q] and a [Q, D]."""
    m = tl.full((BLOCK_Q,), -INF, tl.float32)
    l = tl.zeros((BLOCK_Q,), tl.float32)  # noqa: E741
    return m, l, m, tl.zeros((BLOCK_Q, BLOCK_D), tl.float32)


@triton.jit
def visible_range(
    length, low, sink, tokens, query_window, BLOCK_Q: tl.constexpr, G: tl.constexpr, CAUSAL: tl.constexpr
):
    """The stream positions that this program's queries can see: [0, sink_end) and [low, last]; and its splits.

    The splits are `sink_splits` from the start, then those from `window_split` on, `num_splits` in all.
    """
    first_t = tl.program_id(1) * BLOCK_Q // G
    last_t = tokens - 1
    if CAUSAL:
        last_t = tl.minimum((tl.program_id(1) * BLOCK_Q + (BLOCK_Q - 1)) // G, last_t)
        low = tl.maximum(low, length + first_t - query_window)
    last = length + last_t
    sink_end = tl.where(sink > last, last + 1, sink)
    sink_splits = (sink_end + (SPLIT - 1)) // SPLIT
    window_split = tl.maximum(low // SPLIT, sink_splits)
    num_splits = sink_splits + tl.maximum(last // SPLIT - window_split + 1, 0)
    return sink_end, low, last, sink_splits, window_split, tl.where(first_t < tokens, num_splits, 0)


@triton.jit
def attention_kernel(
    table_ptr,
    q_ptr,
    k_ptr,
    v_ptr,
    pool_ptr,
    source_ptr,
    row_source_ptr,
    row_slots_ptr,
    bias_ptr,
    out_ptr,
    part_ptr,
    q_strides,
    k_strides,
    v_strides,
    pool_strides,
    source_strides,
    row_source_strides,
    row_slots_stride,
    bias_strides,
    own_tokens,
    query_window,
    factor,
    ROWS: tl.constexpr,
    H: tl.constexpr,
    G: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    CAUSAL: tl.constexpr,
    IEEE: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_SOURCE: tl.constexpr,
    HAS_ROW_SOURCE: tl.constexpr,
    BY_SPLIT: tl.constexpr,
    Q_TYPE: tl.constexpr,
    K_TYPE: tl.constexpr,
    V_TYPE: tl.constexpr,
    POOL_TYPE: tl.constexpr,
    SOURCE_TYPE: tl.constexpr,
    ROW_SOURCE_TYPE: tl.constexpr,
    BIAS_TYPE: tl.constexpr,
):
    """Attention of one block of query lanes of one row and key/value head.

    Grid: (B * ROWS * H, blocks of Q, 1). With BY_SPLIT the last axis counts splits: each program folds one of them and
    writes its partial softmax for `merge_kernel`; without, a program folds them all and writes the result.
    """
    batch_row = tl.program_id(0) // H  # of B * ROWS
    batch_row64 = batch_row.to(tl.int64)
    row = (batch_row % ROWS).to(tl.int64)
    head = (tl.program_id(0) % H).to(tl.int64)
    line_ptr = table_ptr + (batch_row // ROWS) * ROW_INTS
    tokens = tl.minimum(tl.load(line_ptr + TOKENS), own_tokens)
    source_index = tl.load(line_ptr + SOURCE)
    sink = tl.load(line_ptr + SINK)
    length, sinks, window_low, ring_low = retained_bounds(line_ptr)
    source_sinks = tl.load(line_ptr + SINK_SOURCE + 1)
    ring_start = tl.load(line_ptr + RING)
    straight = tl.load(line_ptr + RING + 1)
    wrapped_start = tl.load(line_ptr + RING_WRAPPED)

    lane = tl.program_id(1) * BLOCK_Q + tl.arange(0, BLOCK_Q)  # [Q]
    t = lane // G
    query_head = head * G + lane % G
    d = tl.arange(0, BLOCK_D)
    q_base = q_ptr + batch_row64 * q_strides[0]
    q_index = query_head * q_strides[1] + t.to(tl.int64) * q_strides[2]
    P: tl.constexpr = BLOCK_D if IEEE else 16
    q = load_vectors(q_base, q_index, 1, q_strides[3], t < tokens, D, BLOCK_D, P, Q_TYPE)  # [C, Q, P]
    if not IEEE:
        q_exponent = exponents(q, MIN_EXPONENT)
        q_hi, q_lo = fix(q, q_exponent)
        q_hi, q_lo = tl.trans(crossed(q_hi)), tl.trans(crossed(q_lo))  # [Q, D]

    slot = tl.load(line_ptr + SLOT).to(tl.int64)
    pool_base = pool_ptr + slot * pool_strides[0] + row * pool_strides[1] + head * pool_strides[2]
    k_base = k_ptr + batch_row64 * k_strides[0] + head * k_strides[1]
    v_base = v_ptr + batch_row64 * v_strides[0] + head * v_strides[1]
    if HAS_SOURCE:
        source_s3, source_s4 = source_strides[3], source_strides[4]
        shared = tl.maximum(source_index, 0).to(tl.int64)
        source_base = source_ptr + shared * source_strides[0] + row * source_strides[1] + head * source_strides[2]
    if HAS_ROW_SOURCE:
        row_s3, row_s4 = row_source_strides[3], row_source_strides[4]
        row_base = row_source_ptr + row * row_source_strides[1] + head * row_source_strides[2]
        if source_index < 0:
            row_slot = tl.load(row_slots_ptr + (batch_row // ROWS) * row_slots_stride).to(tl.int64)
            row_base += row_slot * row_source_strides[0]
    if HAS_BIAS:
        bias_index = batch_row64 * bias_strides[0] + query_head * bias_strides[1] + t.to(tl.int64) * bias_strides[2]

    sink_end, low, last, sink_splits, window_split, num_splits = visible_range(
        length, window_low, sink, tokens, query_window, BLOCK_Q, G, CAUSAL
    )
    m, l, e, a = nothing_seen(BLOCK_Q, BLOCK_D)  # noqa: E741
    first_split = 0
    if BY_SPLIT:
        first_split = tl.program_id(2)
        num_splits = tl.minimum(num_splits, first_split + 1)
    for i in range(first_split, num_splits):
        split = tl.where(i < sink_splits, i, window_split + i - sink_splits)
        sink_tiles = tl.where(i < sink_splits, (sink_end + (TILE - 1)) // TILE, 0)
        window_tiles = tl.where(split >= low // SPLIT, last // TILE + 1, 0)
        first_tile = split * TILES_PER_SPLIT
        end_tile = tl.minimum(first_tile + TILES_PER_SPLIT, tl.maximum(sink_tiles, window_tiles))
        first_tile = tl.where(i < sink_splits, first_tile, tl.maximum(first_tile, low // TILE))

        part_m, part_l, part_e, part_a = nothing_seen(BLOCK_Q, BLOCK_D)
        for tile in range(first_tile, end_tile):
            s = tile * TILE + tl.arange(0, TILE)  # [J]
            in_source, in_slot, entry = locate(
                s, length, sinks, window_low, ring_low, source_sinks, ring_start, straight, wrapped_start
            )
            in_own = (s >= length) & (s - length < tokens)
            index = source_index + tl.zeros_like(s)  # the interpreter's `&` wants a mask of the same shape
            from_source = in_source & (index >= 0)
            from_row_source = in_source & (index < 0)
            has_own = tile * TILE + (TILE - 1) >= length

            k = load_vectors(pool_base, entry, pool_strides[3], 1, in_slot, D, BLOCK_D, P, POOL_TYPE)  # [C, J, P]
            if HAS_SOURCE:
                other = load_vectors(source_base, s, source_s3, source_s4, from_source, D, BLOCK_D, P, SOURCE_TYPE)
                k = overlay(k, other, from_source, FLOAT32)
            if HAS_ROW_SOURCE:
                other = load_vectors(row_base, s, row_s3, row_s4, from_row_source, D, BLOCK_D, P, ROW_SOURCE_TYPE)
                k = overlay(k, other, from_row_source, FLOAT32)
            if has_own:
                other = load_vectors(k_base, s - length, k_strides[2], k_strides[3], in_own, D, BLOCK_D, P, K_TYPE)
                k = overlay(k, other, in_own, POOL_TYPE)
            if IEEE:  # noqa: SIM108
                x = ieee_scores(q, k, BLOCK_D)  # [Q, J]
            else:
                x = exact_scores(q_hi, q_lo, q_exponent, k)  # [Q, J]

            distance = (length + t)[:, None] - s[None, :]  # [Q, J]
            visible = visible_pairs(s, in_source | in_slot | in_own, distance, sink, query_window, CAUSAL)
            if HAS_BIAS:
                bias_entry = bias_entries(s, t, distance, length, sinks, window_low, own_tokens, CAUSAL)
                bias_offsets = bias_index[:, None] + bias_entry.to(tl.int64) * bias_strides[3]
                bias = load_float(bias_ptr + bias_offsets, visible & (t < tokens)[:, None], BIAS_TYPE)  # [Q, J]
                x = x + bias
                visible = visible & (bias != -INF)

            v = load_vectors(pool_base + D, entry, pool_strides[3], 1, in_slot, D, BLOCK_D, P, POOL_TYPE)  # [C, J, P]
            if HAS_SOURCE:
                base = source_base + D * source_s4
                other = load_vectors(base, s, source_s3, source_s4, from_source, D, BLOCK_D, P, SOURCE_TYPE)
                v = overlay(v, other, from_source, FLOAT32)
            if HAS_ROW_SOURCE:
                base = row_base + D * row_s4
                other = load_vectors(base, s, row_s3, row_s4, from_row_source, D, BLOCK_D, P, ROW_SOURCE_TYPE)
                v = overlay(v, other, from_row_source, FLOAT32)
            if has_own:
                other = load_vectors(v_base, s - length, v_strides[2], v_strides[3], in_own, D, BLOCK_D, P, V_TYPE)
                v = overlay(v, other, in_own, POOL_TYPE)
            v, v_exponent, v_finite = finite_values(v, MIN_IEEE_EXPONENT if IEEE else MIN_EXPONENT)
            y = poisoned(x * factor, visible, v_finite[None, :])
            if IEEE:
                tile_m, tile_l, tile_e, tile_a = ieee_values(y, v, v_exponent)
            else:
                tile_m, tile_l, tile_e, tile_a = exact_values(y, v, v_exponent)
            part_m, part_l, part_e, part_a = fold(part_m, part_l, part_e, part_a, tile_m, tile_l, tile_e, tile_a)
        m, l, e, a = fold(m, l, e, a, part_m, part_l, part_e, part_a)  # noqa: E741

    in_step = t < own_tokens
    lane_index = (batch_row64 * own_tokens + t) * (H * G) + query_head  # of [B * ROWS, T, H * G]
    if BY_SPLIT:
        lanes = tl.num_programs(0).to(tl.int64) * own_tokens * G
        store_partial(part_ptr, tl.program_id(2) * lanes + lane_index, m, l, e, a, in_step, d, D)
    else:
        store_result(out_ptr, lane_index, finish(m, l, e, a), t < tokens, in_step, d, D, Q_TYPE)


@triton.jit
def store_result(out_ptr, lane_index, out, real, in_step, d, D: tl.constexpr, Q_TYPE: tl.constexpr):
    """Results [Q, D] of the lanes that are in the step; zeros for those past a row's real tokens."""
    out = tl.where(real[:, None], out, 0.0)
    mask = in_step[:, None] & (d < D)[None, :]
    store_float(out_ptr + lane_index[:, None] * D + d[None, :], out, mask, Q_TYPE)


@triton.jit
def store_partial(part_ptr, index, m, l, e, a, in_step, d, D: tl.constexpr):  # noqa: E741
    """A partial softmax of each lane: m, l, e, then a, float32."""
    pointers = part_ptr + index * (D + 3)
    tl.store(pointers, m, mask=in_step)
    tl.store(pointers + 1, l, mask=in_step)
    tl.store(pointers + 2, e, mask=in_step)
    tl.store(pointers[:, None] + 3 + d[None, :], a, mask=in_step[:, None] & (d < D)[None, :])


@triton.jit
def merge_kernel(
    table_ptr,
    part_ptr,
    out_ptr,
    num_lanes,
    own_tokens,
    num_splits,
    ROWS: tl.constexpr,
    QUERY_HEADS: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    Q_TYPE: tl.constexpr,
):
    """Fold the splits' partial softmaxes of each lane in order. Grid: (blocks of Q lanes of [B * ROWS, T, Hq],)."""
    lane = tl.program_id(0).to(tl.int64) * BLOCK_Q + tl.arange(0, BLOCK_Q)  # [Q]
    in_step = lane < num_lanes
    t = lane // QUERY_HEADS % own_tokens
    line = lane // QUERY_HEADS // own_tokens // ROWS
    tokens = tl.load(table_ptr + line * ROW_INTS + TOKENS, mask=in_step, other=0)
    d = tl.arange(0, BLOCK_D)
    a_mask = in_step[:, None] & (d < D)[None, :]
    m, l, e, a = nothing_seen(BLOCK_Q, BLOCK_D)  # noqa: E741
    index = lane
    for _ in range(0, num_splits):
        pointers = part_ptr + index * (D + 3)
        part_m = tl.load(pointers, mask=in_step, other=-INF)
        part_l = tl.load(pointers + 1, mask=in_step, other=0.0)
        part_e = tl.load(pointers + 2, mask=in_step, other=-INF)
        part_a = tl.load(pointers[:, None] + 3 + d[None, :], mask=a_mask, other=0.0)
        m, l, e, a = fold(m, l, e, a, part_m, part_l, part_e, part_a)  # noqa: E741
        index += num_lanes
    store_result(out_ptr, lane, finish(m, l, e, a), t < tokens, in_step, d, D, Q_TYPE)


@triton.jit
def write_kernel(
    table_ptr,
    k_ptr,
    v_ptr,
    pool_ptr,
    k_strides,
    v_strides,
    pool_strides,
    ROWS: tl.constexpr,
    H: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_T: tl.constexpr,
    REVERSE: tl.constexpr,
    K_TYPE: tl.constexpr,
    V_TYPE: tl.constexpr,
    POOL_TYPE: tl.constexpr,
):
    """Write the surviving part of each row's span into its slot. Grid: (B * ROWS * H, blocks of written entries)."""
    batch_row = tl.program_id(0) // H
    row = (batch_row % ROWS).to(tl.int64)
    head = (tl.program_id(0) % H).to(tl.int64)
    line_ptr = table_ptr + (batch_row // ROWS) * ROW_INTS
    slot = tl.load(line_ptr + SLOT).to(tl.int64)
    pool_base = pool_ptr + slot * pool_strides[0] + row * pool_strides[1] + head * pool_strides[2]
    k_base = k_ptr + batch_row.to(tl.int64) * k_strides[0] + head * k_strides[1]
    v_base = v_ptr + batch_row.to(tl.int64) * v_strides[0] + head * v_strides[1]
    i = tl.program_id(1) * BLOCK_T + tl.arange(0, BLOCK_T)  # [T]
    d = tl.arange(0, BLOCK_D)
    for write in tl.static_range(NUM_WRITES):
        token = tl.load(line_ptr + WRITES + 3 * write)
        start = tl.load(line_ptr + WRITES + 3 * write + 1)
        some = i < tl.load(line_ptr + WRITES + 3 * write + 2)
        own = token - i if REVERSE else token + i
        k = whole(load_vectors(k_base, own, k_strides[2], k_strides[3], some, D, BLOCK_D, BLOCK_D, K_TYPE))
        v = whole(load_vectors(v_base, own, v_strides[2], v_strides[3], some, D, BLOCK_D, BLOCK_D, V_TYPE))
        pointers = pool_base + (start + i).to(tl.int64)[:, None] * pool_strides[3] + d[None, :]
        mask = some[:, None] & (d < D)[None, :]
        store_float(pointers, k, mask, POOL_TYPE)
        store_float(pointers + D, v, mask, POOL_TYPE)
