"""A pool with a naive ring: right for as long as there are no sinks.

The attention function of some engine reads and writes a ring of its own, `position % window`. `check_attention` lends
it plans and slots, so no manager is needed. The bug is one that ships: the author's tests had no sinks.

    python tutorials/oracle/naive_ring.py
"""

from __future__ import annotations

import torch

from boundedkv.testing import check_attention


def ring_attention(place, q, k, v, pool, table, config):
    """Softmax over the sinks, the whole ring in whatever order it lies, and the step's own tokens; then the writes.

    Args:
        place: (position, config) -> where in its ring an entry lies.
        q: [B, H, T, D], and so are k and v; the others as in `check_attention`.
    """
    own = torch.cat([k, v], -1).to(pool.dtype)
    out = torch.empty(q.shape[0], q.shape[2], q.shape[1], q.shape[3], dtype=q.dtype)
    lines = [(line[0], line[3], line[4], line[15:]) for line in table.tolist()]  # slot, length, sink, writes
    for b, (slot, length, sink, _) in enumerate(lines):
        sinks = pool[slot, 0, :, : min(length, sink)]
        in_ring = min(max(0, length - sink), config.retention.window)
        ring = pool[slot, 0, :, config.sink_capacity :][:, :in_ring]
        keys, values = torch.cat([sinks, ring, own[b]], 1).float().chunk(2, -1)
        out[b] = ((q[b] @ keys.mT * config.score_scale).softmax(-1) @ values).transpose(0, 1)
    for b, (slot, length, sink, writes) in enumerate(lines):
        for first, _, count in zip(*[iter(writes)] * 3, strict=True):
            for token in range(first, first + count):
                position = length + token
                entry = position if position < sink else config.sink_capacity + place(position, config)
                pool[slot, 0, :, entry] = own[b, :, token]
    return out


def naive(q, k, v, pool, table, config, **others):
    """As it shipped."""
    return ring_attention(lambda position, config: position % config.retention.window, q, k, v, pool, table, config)


def mended(q, k, v, pool, table, config, **others):
    """The ring starts behind the sinks, and so does its count."""
    return ring_attention(
        lambda position, config: (position - config.retention.sink) % config.retention.window,
        q, k, v, pool, table, config,
    )  # fmt: skip


def main(examples=12):
    """Judge both."""
    options = {"features": ["batch"], "writes": True, "examples": examples}
    print("1. The ring as it shipped.\n")
    before = check_attention(naive, "close", **options, first_only=True)
    print(before)
    print("\n2. The ring mended.\n")
    after = check_attention(mended, "close", **options)
    print(after)
    return before, after


if __name__ == "__main__":
    main()
