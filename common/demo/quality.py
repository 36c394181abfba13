"""How well the model reads when it remembers only a part: bits per character under a retention.

These numbers come from plain PyTorch attention with the mask that the retention means, over much more text than the
two backends stream in a demo's minute. The demo checks the mask against the backends on what they did stream.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, scaled_dot_product_attention

from boundedkv.demo.model import HEAD_DIM, Attend, CharModel, causal

BATCH = 16


def visible(length: int, sink: int, window: int) -> Tensor:
    """Which key each query of one stream sees, bool `[length, length]`: the sinks, `window` before it, itself.

    >>> visible(5, 1, 2).int()[4].tolist()
    [1, 0, 1, 1, 1]
    """
    query, key = torch.arange(length)[:, None], torch.arange(length)[None, :]
    return (key <= query) & ((key < sink) | (query - key <= window))


def bounded(length: int, sink: int, window: int) -> Attend:
    """Attention that forgets as a bounded cache with `sink` and `window` does."""
    mask = visible(length, sink, window)

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        k, v = k.expand_as(q), v.expand_as(q)
        return scaled_dot_product_attention(q, k, v, attn_mask=mask).transpose(1, 2)

    return attend


def bits_per_character(model: CharModel, streams: Tensor, attend: Attend = causal) -> float:
    """The mean cost of every symbol after the first, of `streams` int64 `[count, length]`, in bits."""
    total = 0.0
    positions = torch.arange(streams.shape[1] - 1)
    for batch in streams.split(BATCH):
        scores = model(batch[:, :-1], positions.expand(len(batch), -1), attend)
        total += cross_entropy(scores.flatten(0, 1), batch[:, 1:].flatten(), reduction="sum").item()
    return total / (streams.shape[0] * (streams.shape[1] - 1)) / math.log(2)


def share_on_first(model: CharModel, streams: Tensor, after: int) -> float:
    """The share of attention that goes to the first entry when nothing is forgotten, mean over layers and heads.

    Args:
        model: the model.
        streams: int64 `[count, length]`.
        after: only queries from this stream position on are counted.
    """
    length = streams.shape[1]
    unseen = ~visible(length, 0, length)
    shares: list[Tensor] = []

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = (q @ k.transpose(-1, -2)) * HEAD_DIM**-0.5
        weights: Tensor = scores.masked_fill(unseen, -math.inf).softmax(dim=-1)  # [B, NUM_QUERY_HEADS, T, T]
        shares.append(weights[:, :, after:, 0].mean())
        return (weights @ v).transpose(1, 2)

    model(streams, torch.arange(length).expand(len(streams), -1), attend)
    return torch.stack(shares).mean().item()
