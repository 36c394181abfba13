"""Drawn streams until a difference is found, then shorter ones until none is shorter."""

from __future__ import annotations

import contextlib
import re
import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from hypothesis import HealthCheck, Phase, Verbosity, reject, seed, settings
from hypothesis.stateful import run_state_machine_as_test

from boundedkv.backends import build
from boundedkv.config import BoundedKVConfig
from boundedkv.manager import BoundedKVManager
from boundedkv.testing.closeness import Close, Verdict, judge
from boundedkv.testing.differential import Difference
from boundedkv.testing.machine import Streams
from boundedkv.testing.probe import unwritten_entries
from boundedkv.testing.prune import simpler
from boundedkv.testing.script import Call, RecordedPair, script_told
from boundedkv.testing.strategies import Scope

SHRINKING_PATIENCE = 2.0  # seconds without anything simpler, or the time of 10 streams
PRUNING_PATIENCE = 5.0  # seconds without anything simpler
PRUNING_SECONDS = 30.0

_SETTINGS = settings(
    deadline=None,
    database=None,
    report_multiple_bugs=False,
    print_blob=False,
    suppress_health_check=list(HealthCheck),
    verbosity=Verbosity.quiet,
    phases=[Phase.generate, Phase.shrink],
)


class Found(NamedTuple):
    """A difference, and how it was come to.

    Attributes:
        config: the pool.
        script: the calls, the last of them the one that differs.
        message: the difference as the pair told it.
        unwritten: entries that the last attend is to see although no attend has brought them.
        verdict: in close mode, how an attend was judged; None elsewhere.
    """

    config: BoundedKVConfig
    script: tuple[Call, ...]
    message: str
    unwritten: int = 0
    verdict: Verdict | None = None

    @property
    def place(self) -> str:
        """The difference alone, without the call."""
        return self.message.split("): ", 1)[-1]

    @property
    def kind(self) -> tuple[str, str]:
        """The call that differs, and what of it: its result, its error, the state afterwards."""
        what = re.match(r"(then |text of |bytes of )?\w+", self.place)
        return self.script[-1].name if self.script else "", what[0] if what else ""

    @property
    def size(self) -> tuple[int, int, int]:
        """What a simpler one has less of."""
        return self.unwritten, len(self.script), len(script_told(self.config, self.script))


class JudgedPair(RecordedPair):
    """A recorded pair whose attends may differ as `Close` allows.

    Attributes:
        verdict: how the last attend was judged, in close mode.
    """

    def __init__(self, left: BoundedKVManager, right: BoundedKVManager, hunt: Hunt) -> None:
        """Compare the managers as they are given."""
        self._hunt = hunt
        self._slots: torch.Tensor | None = None
        self.verdict: Verdict | None = None
        super().__init__(left, right)

    def _both(self, name: str, **arguments: Any) -> tuple[Any, Any]:
        self._slots = self.verdict = None
        if name == "attend" and self._hunt.close is not None:
            self._slots = self.left.layer(arguments["layer_idx"]).clone()
        return super()._both(name, **arguments)

    def _compared(self, name: str, arguments: dict[str, Any], left: Any, right: Any) -> Iterator[str]:
        if name != "attend" or self._hunt.close is None or not isinstance(right, torch.Tensor):
            return super()._compared(name, arguments, left, right)
        plan = arguments["plan"] or self.left.current
        self.verdict = judge(self._hunt.close, self.left.config, plan, self._slots, arguments, left, right)
        self._hunt.nearest = max(self._hunt.nearest or 0.0, self.verdict.nearness)
        return iter(self.verdict.problems)

    def _refuse(self, call: str, found: Iterator[str], cause: Exception | None = None) -> None:
        try:
            super()._refuse(call, found, cause)
        except Difference as difference:
            unwritten = unwritten_entries(self.script, self.results)
            self._hunt.keep(Found(self.left.config, tuple(self.script), str(difference), unwritten, self.verdict))
            raise


class Hunt:
    """A search for a difference between the reference and a factory's managers.

    Attributes:
        found: the shortest difference; None if there was none.
        calls: how many calls were compared.
        examples: how many streams were drawn.
        nearest: the nearest that an error came to its limit, in close mode.
    """

    def __init__(
        self, factory: Callable[..., BoundedKVManager], device: torch.device, close: Close | None = None
    ) -> None:
        """Hunt with these managers."""
        self._factory, self._device, self.close = factory, device, close
        self.found: Found | None = None
        self.calls = self.examples = 0
        self.nearest: float | None = None
        self._begun = time.perf_counter()
        self._patience = SHRINKING_PATIENCE
        self._until: float | None = None  # when shrinking ends, if nothing simpler is found before
        self._longest: float | None = None
        self._kind: tuple[str, str] | None = None  # of the difference that is being pruned
        self._pair: JudgedPair | None = None

    def run(self, scope: Scope, attends: bool, examples: int, steps: int, seed_words: str, used: Counter[str]) -> None:
        """Draw streams.

        Args:
            scope: what may be drawn.
            attends: whether attend is among the calls.
            examples: how many streams.
            steps: how many draws of calls each of them is long, at most.
            seed_words: which streams.
            used: counts the calls that had to do with each feature.
        """
        attributes = {"make_pair": staticmethod(self.pair), "scope": scope, "attends": attends, "used": used}
        machine = seed(seed_words)(type("DrawnStreams", (Streams,), attributes))
        more = examples + 1  # the first that hypothesis draws is the simplest there is
        try:
            run_state_machine_as_test(
                machine, settings=settings(_SETTINGS, max_examples=more, stateful_step_count=steps)
            )
        except Exception:
            if self.found is None:
                raise
        self.prune()
        self._count()

    def pair(self, config: BoundedKVConfig) -> JudgedPair:
        """The pair of one stream. Once shrinking has had its time, there are no more."""
        if self._until is not None and time.perf_counter() > self._until:
            reject()
        self.examples += self.found is None
        return self._fresh(config)

    def _fresh(self, config: BoundedKVConfig) -> JudgedPair:
        self._count()
        self._begun = time.perf_counter()
        left = build(config, "cpu", backend="reference")
        try:
            right = self._factory(config, self._device, None)
        except Exception as error:
            self.keep(Found(config, (), f"the factory raises {type(error).__name__}: {error}"))
            raise
        self._pair = JudgedPair(left, right, self)
        return self._pair

    def prune(self) -> None:
        """Leave out what the difference does not need: calls, then what goes beyond the plainest arguments."""
        start = latest = time.perf_counter()
        tried: set[str] = set()
        changed = True
        self._kind = None if self.found is None else self.found.kind
        while changed and self.found is not None:
            changed = False
            for config, script in simpler(self.found.config, self.found.script):
                words = script_told(config, script)
                now = time.perf_counter()
                if now - latest > PRUNING_PATIENCE or now - start > PRUNING_SECONDS:
                    return
                if words in tried or (0, len(script), len(words)) >= self.found.size:
                    continue
                tried.add(words)
                before = self.found
                with contextlib.suppress(Difference):
                    self._fresh(config).repeat(script)
                if self.found is not before:
                    changed, latest = True, time.perf_counter()
                    break

    def keep(self, found: Found) -> None:
        """Remember a difference if it is the shortest so far; while it is pruned, only if it is the same one."""
        if self._kind is not None and found.kind != self._kind:
            return
        now = time.perf_counter()
        if self._longest is None:
            self._patience = max(SHRINKING_PATIENCE, 10 * (now - self._begun))
            self._longest = now + 4 * self._patience
        if self.found is None or found.size < self.found.size:
            self.found = found
            self._until = min(now + self._patience, self._longest)

    def _count(self) -> None:
        if self._pair is not None:
            self.calls += self._pair.calls
            self._pair = None
