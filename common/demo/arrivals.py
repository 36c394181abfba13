"""When each request of the demo joins, and in what chunks its text arrives.

Nothing is uniform, on purpose: prompts of different lengths, long runs token by token, bursts in between, requests
that wait until another one leaves. A fixed seed makes every run the same.
"""

from __future__ import annotations

import random
from typing import NamedTuple

MAX_SLOTS = 4


class Request(NamedTuple):
    """One stream of the demo.

    Attributes:
        module: the held-out module whose docstrings it reads; also its name.
        joins: the step at which it asks for a slot.
        chunks: symbols it brings, step by step, once it holds one.
    """

    module: str
    joins: int
    chunks: tuple[int, ...]


def requests(quick: bool) -> tuple[Request, ...]:
    """The demo's requests in order of arrival; `quick` gives a run of seconds for tests."""
    draw = random.Random(0)
    if quick:
        return (
            Request("argparse", 0, _chunks(draw, prompt=9, steps=3)),
            Request("textwrap", 1, _chunks(draw, prompt=70, steps=2)),
        )
    return (
        Request("argparse", 0, _chunks(draw, prompt=24, steps=34)),
        Request("statistics", 2, _chunks(draw, prompt=61, steps=10)),
        Request("threading", 4, _chunks(draw, prompt=7, steps=15)),
        Request("ipaddress", 6, _chunks(draw, prompt=40, steps=13)),
        Request("shutil", 9, _chunks(draw, prompt=15, steps=17)),
        Request("textwrap", 15, _chunks(draw, prompt=90, steps=9)),
    )


def _chunks(draw: random.Random, prompt: int, steps: int) -> tuple[int, ...]:
    return (prompt, *draw.choices((1, 2, 3, 5, 9, 16), weights=(12, 1, 1, 2, 2, 2), k=steps))
