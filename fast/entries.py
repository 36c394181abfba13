"""Keys and values of one tile, read from wherever they lie: a slot, a source, the step's own tensors.

Shapes: N vectors (J = 64 of a tile, or Q queries) of D elements, padded to a power of two, as C pieces of P.
"""

import triton
import triton.language as tl

from boundedkv.fast.arithmetic import FLOAT32, as_stored, load_float


@triton.jit
def at(base_ptr, index, stride):
    """Pointers to the vectors at `index` [N] of an array."""
    return base_ptr + index.to(tl.int64) * stride


@triton.jit
def load_vectors(
    pointers, d_stride, mask, first_d, D: tl.constexpr, WIDTH: tl.constexpr, P: tl.constexpr, DTYPE: tl.constexpr
):
    """WIDTH elements from `first_d` on of the vectors at `pointers` [N], in pieces [WIDTH / P, N, P].

    Zero where masked and beyond D. In pieces a thread holds much of few vectors instead of little of many: fewer
    addresses, fewer steps to a maximum.
    """
    d = first_d + tl.arange(0, WIDTH // P)[:, None, None] * P + tl.arange(0, P)[None, None, :]
    return load_float(pointers[None, :, None] + d.to(tl.int64) * d_stride, mask[None, :, None] & (d < D), DTYPE)


@triton.jit
def merged_pointers(
    pointers,
    source_pointers,
    row_pointers,
    own_k_pointers,
    own_v_pointers,
    from_source,
    from_row_source,
    in_own,
    D: tl.constexpr,
    HAS_SOURCE: tl.constexpr,
    HAS_ROW_SOURCE: tl.constexpr,
):
    """Pointers to the keys and the values of a tile [J], where all arrays are alike: one load then reads any of them.

    Alike: of one element type, their vectors contiguous and starting at multiples of 16 bytes.
    """
    if HAS_SOURCE:
        pointers = tl.where(from_source, source_pointers, pointers)
    if HAS_ROW_SOURCE:
        pointers = tl.where(from_row_source, row_pointers, pointers)
    k_pointers = tl.where(in_own, own_k_pointers, pointers)
    v_pointers = tl.where(in_own, own_v_pointers, pointers + D)
    return tl.multiple_of(k_pointers, 16), tl.multiple_of(v_pointers, 16)


@triton.jit
def overlay(x, others, mask, HELD_TYPE: tl.constexpr):
    """The vectors x [C, N, P], and where masked [N] others instead, as elements of HELD_TYPE hold them."""
    return tl.where(mask[None, :, None], as_stored(others, HELD_TYPE), x)


@triton.jit
def overlay_others(
    x,
    source_pointers,
    row_pointers,
    own_pointers,
    source_d_stride,
    row_d_stride,
    own_d_stride,
    from_source,
    from_row_source,
    in_own,
    has_own,
    first_d,
    D: tl.constexpr,
    WIDTH: tl.constexpr,
    HAS_SOURCE: tl.constexpr,
    HAS_ROW_SOURCE: tl.constexpr,
    POOL_TYPE: tl.constexpr,
    SOURCE_TYPE: tl.constexpr,
    ROW_SOURCE_TYPE: tl.constexpr,
    OWN_TYPE: tl.constexpr,
):
    """A slot's vectors, and over them those of a source and of the step, each read by a load of its own."""
    if HAS_SOURCE:
        others = load_vectors(source_pointers, source_d_stride, from_source, first_d, D, WIDTH, 16, SOURCE_TYPE)
        x = overlay(x, others, from_source, FLOAT32)
    if HAS_ROW_SOURCE:
        others = load_vectors(row_pointers, row_d_stride, from_row_source, first_d, D, WIDTH, 16, ROW_SOURCE_TYPE)
        x = overlay(x, others, from_row_source, FLOAT32)
    if has_own:
        others = load_vectors(own_pointers, own_d_stride, in_own, first_d, D, WIDTH, 16, OWN_TYPE)
        x = overlay(x, others, in_own, POOL_TYPE)
    return x


@triton.jit
def whole(x):
    """Vectors in pieces [C, N, P] as rows [N, D]."""
    return tl.reshape(tl.permute(x, (1, 0, 2)), (x.shape[1], x.shape[0] * x.shape[2]))


@triton.jit
def crossed(x):
    """Vectors in pieces of 16 [C, N, 16] as columns [D, N], element 4a + 2b + c of a piece at 8b + 2a + c.

    That is how the registers of a tensor core hold a piece, so no element changes its thread. An exact dot does not ask
    for an order, as long as both sides have the same.
    """
    C: tl.constexpr = x.shape[0]
    N: tl.constexpr = x.shape[1]
    return tl.reshape(tl.permute(tl.reshape(x, (C, N, 4, 2, 2)), (0, 3, 2, 4, 1)), (C * 16, N))
