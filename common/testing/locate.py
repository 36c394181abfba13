"""What the command line and the pytest plugin have in common: words that name what is to be judged, and how."""

from __future__ import annotations

import importlib
from collections.abc import Sequence

from boundedkv.testing.closeness import Close
from boundedkv.testing.conformance import Factory, Numerics

NUMERICS = ("bits", "close")


def factory_named(words: str) -> Factory:
    """The factory that `MODULE:FACTORY` names.

    Raises:
        ValueError: it names none.
    """
    module, colon, name = words.partition(":")
    if not (module and colon and name):
        raise ValueError(f"MODULE:FACTORY is {words!r}, but should be a module, a colon, and a name in it")
    try:
        factory = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(f"MODULE:FACTORY is {words!r}, but should name a callable: {error}") from None
    if not callable(factory):
        raise ValueError(f"MODULE:FACTORY is {words!r}, a {type(factory).__name__}, but should name a callable")
    found: Factory = factory
    return found


def names_in(words: str | None) -> Sequence[str] | None:
    """The names in a list with commas; None for no list."""
    return None if words is None else [word.strip() for word in words.split(",") if word.strip()]


def numerics_named(numerics: str, operands: str | None) -> Numerics:
    """How results are judged.

    Raises:
        ValueError: operands beside "bits", or unknown ones.
    """
    if operands is None:
        return numerics
    if numerics != "close":
        raise ValueError(f"operands is {operands!r}, but should be None unless numerics is 'close'")
    return Close(operands=operands)
