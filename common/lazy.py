"""Packages whose public names are imported when the first of them is asked for."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any


def lazily(package: str) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """The `__getattr__` and `__dir__` of a package whose module `public` has its names, listed in `__all__`.

    Args:
        package: its dotted name.

    Returns:
        Both functions. The package's modules are had as attributes too.
    """

    def attribute(name: str) -> Any:
        if name.startswith("__") and name != "__all__":
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        if find_spec(f"{package}.{name}") is not None:
            return importlib.import_module(f"{package}.{name}")
        public = importlib.import_module(f"{package}.public")
        if name == "__all__" or name in public.__all__:
            return getattr(public, name)
        raise AttributeError(f"module {package!r} has no attribute {name!r}")

    def names() -> list[str]:
        return sorted(importlib.import_module(f"{package}.public").__all__)

    return attribute, names
