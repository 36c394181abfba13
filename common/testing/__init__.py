"""The oracle: managers held to one another, for this project's tests and for anybody's own manager.

The names are those of `boundedkv.testing.public`, imported with the first of them that is asked for: see `boundedkv`.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from boundedkv.testing.public import *  # noqa: F403


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
