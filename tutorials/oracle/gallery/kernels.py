"""Attention functions without a manager, and kernels of another arithmetic.

`check_attention` lends them the reference's plans and slots. In close mode a result may err as much as the arithmetic
makes it, and no more.
"""

import torch

from boundedkv.testing.exact import exact

from .planted import check_attention, found_with


def softmax(q, k, v, pool, source, table, config, row_source, rel_bias, ieee):
    """Right: softmax in float64, the results in float32."""
    return exact(config, table, pool, q, k, v, source, row_source, rel_bias).out.to(q.dtype)


@found_with(judge=check_attention, numerics="close")
def second_part_of_the_ring_missing(table, **others):
    """Where the ring wraps, the part behind the wrap is not read."""
    table = table.clone()
    table[:, 14] = 0
    return softmax(table=table, **others)


@found_with(judge=check_attention, numerics="close")
def writes_into_the_pool(pool, **others):
    """It uses the pool's first entry as a scratch pad."""
    out = softmax(pool=pool, **others)
    pool[:, :, :, :1] = 1.0
    return out


@found_with(judge=check_attention, numerics="close")
def scale_forgotten(q, config, **others):
    """The scores are not scaled."""
    return softmax(q=q / config.score_scale if config.score_scale else q, config=config, **others)


@found_with("ragged", "lookahead", judge=check_attention, numerics="close")
def almost_zero(q, table, **others):
    """Queries that are padding get a very small number instead of 0."""
    out = softmax(q=q, table=table, **others)
    padding = torch.arange(q.shape[2]) >= table[:, 2:3]
    return torch.where(padding[..., None, None], 1e-9, out).to(q.dtype)


@found_with(judge=check_attention, numerics="close")
def bfloat16_inside(q, k, v, **others):
    """Operands are rounded to bfloat16, and `operands` does not say so."""
    return softmax(q=q.bfloat16().float(), k=k.bfloat16().float(), v=v.bfloat16().float(), **others).to(q.dtype)
