"""Simpler scripts than a given one: what hypothesis, which works on what it drew, does not try."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

from boundedkv.config import BoundedKVConfig
from boundedkv.testing.samples import Sample
from boundedkv.testing.script import Call, Result

Simpler = tuple[BoundedKVConfig, tuple[Call, ...]]
_PLAINER: dict[str, Any] = {"num_layers": 1, "scale": None, "spare": 0, "max_source_len": 0}


def simpler(config: BoundedKVConfig, script: Sequence[Call]) -> Iterator[Simpler]:
    """Every script that is one thing simpler, those that lack most first.

    Args:
        config: the pool.
        script: the calls.

    Yields:
        A config and a script. It may mean something else: whether it still shows a difference is to be tried.
    """
    size = len(script) // 2
    while size:
        for start in range(0, len(script) - size, size):
            yield from ((config, shorter) for shorter in _without(script, start, start + size))
        size //= 2
    for name, value in _PLAINER.items():
        if getattr(config, name) != value:
            try:
                yield dataclasses.replace(config, **{name: value}), tuple(script)
            except ValueError:
                continue
    for number, call in enumerate(script):
        for name, value in call.arguments.items():
            for plainer in _plainer(name, value):
                arguments = call.arguments | {name: plainer}
                yield config, (*script[:number], call._replace(arguments=arguments), *script[number + 1 :])


def _without(script: Sequence[Call], start: int, stop: int) -> Iterator[tuple[Call, ...]]:
    """The script without some calls, unless a later one needs what they give."""
    kept = []
    for call in (*script[:start], *script[stop:]):
        arguments = dict(call.arguments)
        for name, value in arguments.items():
            if isinstance(value, Result) and start <= value.number < stop:
                return
            if isinstance(value, Result) and value.number >= stop:
                arguments[name] = value._replace(number=value.number - (stop - start))
        kept.append(call._replace(arguments=arguments))
    yield tuple(kept)


def _plainer(name: str, value: object) -> Iterator[object]:
    """Plainer arguments."""
    if isinstance(value, Sample):
        for field in dataclasses.fields(Sample)[1:]:
            if getattr(value, field.name) != field.default and field.name != "ends":
                plainer: dict[str, Any] = {field.name: field.default}
                yield dataclasses.replace(value, **plainer)
    if name in ("source", "row_source", "rel_bias", "plan", "overrides") and value is not None:
        yield None
    if value is True:
        yield False
