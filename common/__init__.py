"""Bounded KV caches for streaming models: one interface, two backends, the same bits.

The names are those of `boundedkv.public`, which is imported with the first of them that is asked for: the pytest plugin
lives in this package, and must not make every run of pytest wait for torch.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from boundedkv.public import *  # noqa: F403

__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    if name.startswith("__") and name != "__all__":
        raise AttributeError(name)
    public = importlib.import_module(f"{__name__}.public")
    if name == "__all__" or name in public.__all__:
        return getattr(public, name)
    if name in globals():  # a module that came with the public names
        return globals()[name]
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*globals(), *importlib.import_module(f"{__name__}.public").__all__]
