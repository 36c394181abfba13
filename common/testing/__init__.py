"""The oracle: managers held to one another, for this project's tests and for anybody's own manager.

The names are those of `boundedkv.testing.public`, imported with the first of them that is asked for: see `boundedkv`.
"""

from typing import TYPE_CHECKING

from boundedkv.lazy import lazily

if TYPE_CHECKING:
    from boundedkv.testing.public import *  # noqa: F403

__getattr__, __dir__ = lazily(__name__)
