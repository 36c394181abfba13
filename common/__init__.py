"""Bounded KV caches for streaming models: one interface, two backends, the same bits.

The names are those of `boundedkv.public`, which is imported with the first of them that is asked for: the pytest plugin
lives in this package, and must not make every run of pytest wait for torch.
"""

from typing import TYPE_CHECKING

from boundedkv.lazy import lazily

if TYPE_CHECKING:
    from boundedkv.public import *  # noqa: F403

__version__ = "0.1.0"

__getattr__, __dir__ = lazily(__name__)
