"""The usual suspects: one thing done otherwise in the reference, to see whether that gives the judged bits.

Where the right keys take part and the numbers made of them are wrong, such a match names the cause.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from boundedkv.config import BoundedKVConfig
from boundedkv.manager import BoundedKVManager
from boundedkv.testing.compare import differences
from boundedkv.testing.script import Call, play

NEARER = 0.01  # of the distance


def _tiles_by_index(q: Any, positions: Any, entries: Any, layout: Any, rel_bias: Any, ieee: bool) -> tuple[Any, ...]:
    return q, torch.arange(len(positions)), entries, layout, rel_bias, ieee


def _unscaled(manager: Any) -> Callable[..., tuple[Any, ...]]:
    def change(q: Any, *others: Any) -> tuple[Any, ...]:
        return q / manager.config.score_scale if manager.config.score_scale else q, *others

    return change


def _scaled_by_head_dim(manager: Any) -> Callable[..., tuple[Any, ...]]:
    def change(q: Any, *others: Any) -> tuple[Any, ...]:
        config = manager.config
        return q / config.score_scale * config.head_dim**-0.5 if config.score_scale else q, *others

    return change


def _other_path(q: Any, positions: Any, entries: Any, layout: Any, rel_bias: Any, ieee: bool) -> tuple[Any, ...]:
    return q, positions, entries, layout, rel_bias, not ieee


_SUSPECTS: dict[str, Callable[[Any], Callable[..., tuple[Any, ...]]]] = {
    "tiles counted by index among the keys read, instead of by stream position": lambda manager: _tiles_by_index,
    "the other path: `ieee` taken for the default, or the default for `ieee`": lambda manager: _other_path,
    "scores that are not scaled": _unscaled,
    "scores scaled by head_dim ** -0.5, whatever the config says": _scaled_by_head_dim,
}


def suspects(config: BoundedKVConfig, script: Sequence[Call], right: Tensor, judged: Tensor, close: bool) -> list[str]:
    """Which changes of the reference give a result.

    Args:
        config: the pool.
        script: the calls, the last of them an attend.
        right: what the reference gives.
        judged: what the judged manager gave.
        close: whether coming much nearer to it counts, instead of every bit.

    Returns:
        What each of them does, in words.
    """

    def gives(suspect: Callable[..., Any]) -> bool:
        given = _played(config, script, suspect)
        if not isinstance(given, Tensor):
            return False
        if close:
            return _distance(given, judged) < NEARER * _distance(right, judged)
        return next(differences("", given, judged), None) is None

    return [words for words, suspect in _SUSPECTS.items() if gives(suspect)]


def _distance(left: Tensor, right: Tensor) -> float:
    return float((left.double() - right.double()).abs().nan_to_num(torch.inf).amax())


def _played(config: BoundedKVConfig, script: Sequence[Call], suspect: Callable[..., Any]) -> object:
    reference = importlib.import_module("boundedkv.reference").ReferenceManager
    manager: BoundedKVManager = reference(config, "cpu")
    attend_row, change = manager._attend_row, suspect(manager)  # type: ignore[attr-defined]
    manager._attend_row = lambda *arguments: attend_row(*change(*arguments))  # type: ignore[attr-defined]
    return play(manager, script).get(len(script) - 1)
