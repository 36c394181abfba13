"""How the shipped weights were made: `python -m boundedkv.demo.train weights.npz`.

Plain causal attention over streams of `STREAM_LENGTH`, each opened by `BEGIN`: no window, and no word of sinks. About
a quarter of an hour on one core.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from boundedkv.demo.model import STREAM_LENGTH, CharModel
from boundedkv.demo.quality import bits_per_character
from boundedkv.demo.text import BEGIN, HELD_OUT, encode, streams, training_text

BATCH = 8
WARM_UP = 100
RATE = 0.004
WEIGHT_DECAY = 0.1
GRADIENT_NORM = 1.0


def rate(step: int, steps: int) -> float:
    """The learning rate's factor: a short rise, a plateau, and a straight fall over the last half."""
    return min(1.0, (step + 1) / WARM_UP, 2.0 * (steps - step) / steps)


def draw_batch(symbols: Tensor, generator: torch.Generator) -> Tensor:
    """Random pieces of the training text as streams, int64 `[BATCH, STREAM_LENGTH]`."""
    starts = torch.randint(len(symbols) - STREAM_LENGTH, (BATCH, 1), generator=generator)
    bodies = symbols[starts + torch.arange(STREAM_LENGTH - 1)]
    return torch.cat([torch.full((BATCH, 1), BEGIN), bodies], dim=1)


def train(steps: int, seed: int = 0) -> CharModel:
    """A model trained for `steps` batches, reporting now and then."""
    torch.manual_seed(seed)
    generator = torch.Generator().manual_seed(seed)
    symbols = encode(training_text())
    model = CharModel()
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, betas=(0.9, 0.95), weight_decay=WEIGHT_DECAY)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: rate(step, steps))
    positions = torch.arange(STREAM_LENGTH - 1).expand(BATCH, -1)
    started, total = time.monotonic(), 0.0
    for step in range(steps):
        batch = draw_batch(symbols, generator)
        loss = cross_entropy(model(batch[:, :-1], positions).flatten(0, 1), batch[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), GRADIENT_NORM)
        optimizer.step()
        schedule.step()
        total += loss.item()
        if (step + 1) % 100 == 0:
            print(
                f"step {step + 1}: training loss {total / 100:.4f} nats, {time.monotonic() - started:.0f} s", flush=True
            )
            total = 0.0
    return model.eval().requires_grad_(False)


def save(model: CharModel, file: Path) -> None:
    """Write the weights as float16, uncompressed, so that any NumPy reads them."""
    np.savez(file, **{name: tensor.numpy().astype(np.float16) for name, tensor in model.state_dict().items()})


def main(arguments: Sequence[str] | None = None) -> None:
    """Train, save, and report the loss on text the model has not seen."""
    parser = argparse.ArgumentParser(prog="python -m boundedkv.demo.train", description="Train the demo's model.")
    parser.add_argument("file", type=Path, help="where to write the weights, a .npz file")
    parser.add_argument("--steps", type=int, default=2600)
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    model = train(options.steps)
    save(model, options.file)
    unseen = torch.cat([streams(module, STREAM_LENGTH) for module in HELD_OUT])
    print(f"held-out text: {bits_per_character(model, unseen):.3f} bits per character")


if __name__ == "__main__":
    main()
