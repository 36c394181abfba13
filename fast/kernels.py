"""The kernels: attention over one line of the plan, the merge of its splits, and the write of a step's span.

Strides are tuples in elements, one a axis. Shapes: Q query lanes (a row's own tokens times the G query heads that share
a key/value head), J = 64 positions of a tile, D elements of a vector, padded to a power of two, as C pieces of P.
"""

import triton
import triton.language as tl

from boundedkv import numerics
from boundedkv import plan as fmt
from boundedkv.fast.arithmetic import (
    INF,
    MIN_EXPONENT,
    MIN_IEEE_EXPONENT,
    TILE,
    finish,
    fold,
    load_float,
    poisoned,
    store_float,
)
from boundedkv.fast.entries import at, load_vectors, merged_pointers, overlay_others, whole
from boundedkv.fast.tiles import (
    RING,
    RING_WRAPPED,
    SINK,
    SINK_SOURCE,
    bias_entries,
    finite_values,
    fixed_query,
    fixed_scores,
    fixed_values,
    ieee_scores,
    ieee_values,
    locate,
    retained_bounds,
    visible_pairs,
)

CHUNK: tl.constexpr = tl.constexpr(numerics.CHUNK)
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
    ALIKE: tl.constexpr,
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
    q_pointers = q_base + q_index
    WIDTH: tl.constexpr = BLOCK_D if IEEE or BLOCK_D < CHUNK else CHUNK  # of a vector's elements, taken at a time
    q = load_vectors(q_pointers, q_strides[3], t < tokens, 0, D, WIDTH, 16, Q_TYPE)  # [C, Q, P]
    if not IEEE:
        q_exponent, q_high, q_mid, q_low = fixed_query(q)

    slot = tl.load(line_ptr + SLOT).to(tl.int64)
    pool_base = pool_ptr + slot * pool_strides[0] + row * pool_strides[1] + head * pool_strides[2]
    k_base = k_ptr + batch_row64 * k_strides[0] + head * k_strides[1]
    v_base = v_ptr + batch_row64 * v_strides[0] + head * v_strides[1]
    shared = tl.maximum(source_index, 0).to(tl.int64)
    source_base = source_ptr + shared * source_strides[0] + row * source_strides[1] + head * source_strides[2]
    row_base = row_source_ptr + row * row_source_strides[1] + head * row_source_strides[2]
    if HAS_ROW_SOURCE:  # noqa: SIM102  known when it is compiled; what follows is not
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
            in_source, in_slot, slot_entry = locate(
                s, length, sinks, window_low, ring_low, source_sinks, ring_start, straight, wrapped_start
            )
            in_own = (s >= length) & (s - length < tokens)
            present = in_source | in_slot | in_own
            index = source_index + tl.zeros_like(s)  # the interpreter's `&` wants a mask of the same shape
            from_source = in_source & (index >= 0)
            from_row_source = in_source & (index < 0)
            k_pointers, v_pointers = (
                at(pool_base, slot_entry, pool_strides[3]),
                at(pool_base + D, slot_entry, pool_strides[3]),
            )
            own_k_pointers, own_v_pointers = at(k_base, s - length, k_strides[2]), at(v_base, s - length, v_strides[2])
            source_pointers = at(source_base, s, source_strides[3])
            row_pointers = at(row_base, s, row_source_strides[3])
            if ALIKE:
                k_pointers, v_pointers = merged_pointers(
                    k_pointers,
                    source_pointers,
                    row_pointers,
                    own_k_pointers,
                    own_v_pointers,
                    from_source,
                    from_row_source,
                    in_own,
                    D,
                    HAS_SOURCE,
                    HAS_ROW_SOURCE,
                )
                in_slot = present
            has_own = tile * TILE + (TILE - 1) >= length

            visible = visible_pairs(s, present, length + t, t < tokens, sink, query_window, CAUSAL)
            if HAS_BIAS:
                first, entry = bias_entries(s, t, length, sinks, window_low, own_tokens, CAUSAL)
                offsets = (bias_index + first * bias_strides[3])[:, None] - (entry * bias_strides[3])[None, :]
                bias = load_float(bias_ptr + offsets, visible, BIAS_TYPE)  # [Q, J]
                visible = visible & (bias != -INF)

            x = tl.zeros((BLOCK_Q, TILE), tl.float32)  # [Q, J]
            for first_d in range(0, D, WIDTH):
                k = load_vectors(k_pointers, 1, in_slot, first_d, D, WIDTH, 16, POOL_TYPE)  # [C, J, P]
                if not ALIKE:
                    k = overlay_others(
                        k,
                        source_pointers,
                        row_pointers,
                        own_k_pointers,
                        source_strides[4],
                        row_source_strides[4],
                        k_strides[3],
                        from_source,
                        from_row_source,
                        in_own,
                        has_own,
                        first_d,
                        D,
                        WIDTH,
                        HAS_SOURCE,
                        HAS_ROW_SOURCE,
                        POOL_TYPE,
                        SOURCE_TYPE,
                        ROW_SOURCE_TYPE,
                        K_TYPE,
                    )
                if IEEE:
                    x = ieee_scores(q, k, BLOCK_D)
                elif WIDTH >= D:
                    x += fixed_scores(q_exponent, q_high, q_mid, q_low, k)
                else:
                    chunk = load_vectors(q_pointers, q_strides[3], t < tokens, first_d, D, WIDTH, 16, Q_TYPE)
                    chunk_exponent, chunk_high, chunk_mid, chunk_low = fixed_query(chunk)
                    x += fixed_scores(chunk_exponent, chunk_high, chunk_mid, chunk_low, k)

            if HAS_BIAS:
                x = x + bias
            v = load_vectors(v_pointers, 1, in_slot, 0, D, BLOCK_D, 16, POOL_TYPE)  # [C, J, P]
            if not ALIKE:
                v = overlay_others(
                    v,
                    source_pointers + D * source_strides[4],
                    row_pointers + D * row_source_strides[4],
                    own_v_pointers,
                    source_strides[4],
                    row_source_strides[4],
                    v_strides[3],
                    from_source,
                    from_row_source,
                    in_own,
                    has_own,
                    0,
                    D,
                    BLOCK_D,
                    HAS_SOURCE,
                    HAS_ROW_SOURCE,
                    POOL_TYPE,
                    SOURCE_TYPE,
                    ROW_SOURCE_TYPE,
                    V_TYPE,
                )
            v, v_exponent, v_finite = finite_values(v, MIN_IEEE_EXPONENT if IEEE else MIN_EXPONENT)
            y = poisoned(x * factor, visible, v_finite[None, :])
            if IEEE:
                tile_m, tile_l, tile_e, tile_a = ieee_values(y, v, v_exponent)
            else:
                tile_m, tile_l, tile_e, tile_a = fixed_values(y, v, v_exponent)
            part_m, part_l, part_e, part_a = fold(part_m, part_l, part_e, part_a, tile_m, tile_l, tile_e, tile_a)
        if BY_SPLIT:
            m, l, e, a = part_m, part_l, part_e, part_a  # noqa: E741
        else:
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
    own_tokens,
    num_splits,
    ROWS: tl.constexpr,
    QUERY_HEADS: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    Q_TYPE: tl.constexpr,
):
    """Fold the splits' partial softmaxes of each lane in order. Grid: (B * ROWS, blocks of Q lanes of [T, Hq])."""
    lane = tl.program_id(1) * BLOCK_Q + tl.arange(0, BLOCK_Q)  # [Q]
    in_step = lane < own_tokens * QUERY_HEADS
    tokens = tl.load(table_ptr + (tl.program_id(0) // ROWS) * ROW_INTS + TOKENS)
    t = lane // QUERY_HEADS
    lane_index = tl.program_id(0).to(tl.int64) * own_tokens * QUERY_HEADS + lane  # of [B * ROWS, T, Hq]
    d = tl.arange(0, BLOCK_D)
    a_mask = in_step[:, None] & (d < D)[None, :]
    m, l, e, a = nothing_seen(BLOCK_Q, BLOCK_D)  # noqa: E741
    index = lane_index
    for _ in range(0, num_splits):
        pointers = part_ptr + index * (D + 3)
        part_m = tl.load(pointers, mask=in_step, other=-INF)
        part_l = tl.load(pointers + 1, mask=in_step, other=0.0)
        part_e = tl.load(pointers + 2, mask=in_step, other=-INF)
        part_a = tl.load(pointers[:, None] + 3 + d[None, :], mask=a_mask, other=0.0)
        m, l, e, a = fold(m, l, e, a, part_m, part_l, part_e, part_a)  # noqa: E741
        index += tl.num_programs(0).to(tl.int64) * own_tokens * QUERY_HEADS
    store_result(out_ptr, lane_index, finish(m, l, e, a), t < tokens, in_step, d, D, Q_TYPE)


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
        k = whole(load_vectors(at(k_base, own, k_strides[2]), k_strides[3], some, 0, D, BLOCK_D, BLOCK_D, K_TYPE))
        v = whole(load_vectors(at(v_base, own, v_strides[2]), v_strides[3], some, 0, D, BLOCK_D, BLOCK_D, V_TYPE))
        pointers = pool_base + (start + i).to(tl.int64)[:, None] * pool_strides[3] + d[None, :]
        mask = some[:, None] & (d < D)[None, :]
        store_float(pointers, k, mask, POOL_TYPE)
        store_float(pointers + D, v, mask, POOL_TYPE)
