"""A small character model whose attention is somebody else's.

The forward pass hands every layer's queries, keys and values to a callable. Training gives it causal attention, the
demo gives it two cache managers at once: the model cannot tell the difference. Keys are rotated by their absolute
stream position before they are handed over, because a bounded cache never encodes a position again.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib.resources import files
from typing import cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import linear, relu, rms_norm, scaled_dot_product_attention

from boundedkv.demo.text import NUM_SYMBOLS

Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]
"""`attend(layer, q, k, v)`: q `[B, NUM_QUERY_HEADS, T, HEAD_DIM]`, k, v `[B, NUM_HEADS, T, HEAD_DIM]` to `[B, T,
NUM_QUERY_HEADS, HEAD_DIM]`."""

NUM_LAYERS = 3
NUM_QUERY_HEADS = 4
NUM_HEADS = 1
"""Key/value heads: all query heads share one, so the cache is a quarter as large."""

HEAD_DIM = 32
WIDTH = 96
STREAM_LENGTH = 512
"""The longest stream the model was trained on. Longer ones are outside its experience, whatever the cache."""

ROTATED = 16
"""Elements of a head that carry the position; the others compare content alone, at any distance."""

ROTATION_BASE = 10000.0
WEIGHTS = "weights.npz"


def rotate(x: Tensor, positions: Tensor) -> Tensor:
    """Rotary position encoding of `x` `[B, H, T, D]` at the stream `positions` `[B, T]`."""
    half = ROTATED // 2
    frequency = ROTATION_BASE ** (-torch.arange(half, dtype=torch.float32) / half)
    angle = positions[:, None, :, None] * frequency  # [B, 1, T, ROTATED / 2]
    cos, sin = angle.cos(), angle.sin()
    left, right, content = x.split((half, half, HEAD_DIM - ROTATED), dim=-1)
    return torch.cat([left * cos - right * sin, left * sin + right * cos, content], dim=-1)


def causal(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The attention of training: every query sees itself and everything before it."""
    k, v = k.expand_as(q), v.expand_as(q)
    return scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)


class Block(nn.Module):
    """One layer: attention, then a two-matrix network, each added to what came in."""

    def __init__(self) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(WIDTH)
        self.query = nn.Linear(WIDTH, NUM_QUERY_HEADS * HEAD_DIM)
        self.key_value = nn.Linear(WIDTH, 2 * NUM_HEADS * HEAD_DIM, bias=False)
        self.out = nn.Linear(NUM_QUERY_HEADS * HEAD_DIM, WIDTH, bias=False)
        self.network_norm = nn.RMSNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 4 * WIDTH, bias=False)
        self.down = nn.Linear(4 * WIDTH, WIDTH, bias=False)
        nn.init.zeros_(self.out.weight)
        nn.init.zeros_(self.down.weight)

    def forward(self, x: Tensor, positions: Tensor, layer: int, attend: Attend) -> Tensor:
        """`x` `[B, T, WIDTH]` to the same shape."""
        batch, tokens, _ = x.shape
        seen = self.attention_norm(x)
        q = self.query(seen).view(batch, tokens, NUM_QUERY_HEADS, HEAD_DIM).transpose(1, 2)
        key_value = self.key_value(seen).view(batch, tokens, 2, NUM_HEADS, HEAD_DIM)
        k, v = key_value.permute(2, 0, 3, 1, 4).unbind(0)  # [B, NUM_HEADS, T, HEAD_DIM]
        read = attend(layer, rotate(q, positions), rotate(k, positions), v)  # [B, T, NUM_QUERY_HEADS, HEAD_DIM]
        x = x + self.out(read.flatten(2))
        return cast(Tensor, x + self.down(relu(self.up(self.network_norm(x))).square()))


class CharModel(nn.Module):
    """Predicts the next symbol. One matrix embeds symbols and reads them out.

    `BEGIN` is the zero vector, and as only queries have a bias its key and value are zero in every layer. So a head
    that has nothing to say can rest on the first entry of the stream and add nothing. Training is free to use that;
    where it does, the first entry is an attention sink, and a cache that drops it disturbs every head that rests.
    """

    def __init__(self) -> None:
        super().__init__()
        self.letters = nn.Parameter(torch.randn(NUM_SYMBOLS - 1, WIDTH) * 0.02)
        self.blocks = nn.ModuleList(Block() for _ in range(NUM_LAYERS))
        self.norm = nn.RMSNorm(WIDTH)

    def forward(self, symbols: Tensor, positions: Tensor, attend: Attend = causal) -> Tensor:
        """Scores of the next symbol.

        Args:
            symbols: int64 `[B, T]`.
            positions: Their stream positions, int64 `[B, T]`.
            attend: Called once per layer, in order.

        Returns:
            float32 `[B, T, NUM_SYMBOLS]`.
        """
        embedding = torch.cat([self.letters.new_zeros(1, WIDTH), self.letters])
        x = rms_norm(embedding[symbols], (WIDTH,))
        for layer, block in enumerate(self.blocks):
            x = block(x, positions, layer, attend)
        return linear(self.norm(x), embedding)


def load_model() -> CharModel:
    """The shipped model: float16 in the package, float32 in memory."""
    model = CharModel()
    with files("boundedkv.demo").joinpath(WEIGHTS).open("rb") as file, np.load(file) as arrays:
        state = {name: torch.from_numpy(arrays[name].astype(np.float32)) for name in arrays.files}
    model.load_state_dict(state)
    return model.eval().requires_grad_(False)
