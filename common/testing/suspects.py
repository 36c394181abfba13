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


def _tiles_by_index(manager: Any) -> None:
    _change_rows(manager, lambda q, positions, *others: (q, torch.arange(len(positions)), *others))


def _other_path(manager: Any) -> None:
    _change_rows(manager, lambda *arguments: (*arguments[:-1], not arguments[-1]))


def _unscaled(manager: Any) -> None:
    _scaled(manager, 1.0)


def _scaled_by_head_dim(manager: Any) -> None:
    _scaled(manager, manager.config.head_dim**-0.5)


def _scaled(manager: Any, factor: float) -> None:
    scale = manager.config.score_scale or 1.0
    _change_rows(manager, lambda q, *others: (q * (factor / scale), *others))


def _change_rows(manager: Any, change: Callable[..., tuple[Any, ...]]) -> None:
    """Change what attention over one row is called with."""
    attend_row = manager._attend_row
    manager._attend_row = lambda *arguments: attend_row(*change(*arguments))


def _own_not_rounded(manager: Any) -> None:
    attend, entries = manager._attend, manager._entries

    def attend_as_they_came(layer_idx: int, q: Tensor, k: Tensor, v: Tensor, *others: Any) -> Any:
        own = iter(torch.cat([k.float(), v.float()], dim=-1).split(manager.config.rows_per_request))
        manager._entries = lambda slot, layout, prefix, _: entries(slot, layout, prefix, next(own))
        return attend(layer_idx, q, k, v, *others)

    manager._attend = attend_as_they_came


_SUSPECTS: dict[str, Callable[[Any], None]] = {
    "tiles counted by index among the keys read, instead of by stream position": _tiles_by_index,
    "the step's own keys and values taken as they came, instead of rounded to the slots' type": _own_not_rounded,
    "the other path: `ieee` taken for the default, or the default for `ieee`": _other_path,
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
    manager: BoundedKVManager = importlib.import_module("boundedkv.reference").ReferenceManager(config, "cpu")
    suspect(manager)
    return play(manager, script).get(len(script) - 1)
