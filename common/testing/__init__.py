"""The oracle: managers held to one another, for this project's tests and for anybody's own manager.

    check_manager(factory)       drawn streams on your manager and on the reference, everything compared
    check_attention(fn)          the same for an attention function that has no manager
    Close                        for kernels whose last bits are their own
    Shadow(manager)              your manager in production, the reference beside it
    record, replay, read_trace   calls and answers as a file

`docs/oracle.md` tells the rest. The names are those of `boundedkv.testing.public`, imported with the first of them that
is asked for: see `boundedkv`.
"""

from typing import TYPE_CHECKING

from boundedkv.lazy import lazily

if TYPE_CHECKING:
    from boundedkv.testing.public import *  # noqa: F403

__getattr__, __dir__ = lazily(__name__)
