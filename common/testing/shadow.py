"""An engine's own manager, with the reference beside it: watched in production, and nothing of what it does changed."""

from __future__ import annotations

import logging
import re
import threading
from collections import deque
from collections.abc import Generator, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from boundedkv.manager import BoundedKVManager
from boundedkv.plan import BoundedPlan
from boundedkv.step import StepContext
from boundedkv.testing.compare import differences, told
from boundedkv.testing.differential import Difference
from boundedkv.testing.follower import Follower, slots_named
from boundedkv.testing.repro import Call, write_repro
from boundedkv.testing.traces import require_safetensors
from boundedkv.testing.wrapper import Answer, Wrapper, ask

REMEMBERED_CALLS = 4096
_NAMES = ("reference", "judged")
_ENDS = ("remove_request", "reset_request", "rollback_admit")
_INDEX = re.compile(r"result\[(\d+), (\d+), (\d+), \d+\]")
_log = logging.getLogger(__name__)

Watch = Generator[None, Answer, None]  # a comparison: what comes before the judged manager's call, and what after it


class Shadow(Wrapper):
    """A manager to use in the place of another: it returns what that one returns, and compares with the reference.

    The reference lives in the host's memory and is told of every step and request, which is cheap, and compared. The
    plan and the attends are compared in one step of `every`: the slots that the plan names are brought over first, so
    the other steps cost next to nothing. A slot that was compared before and has changed since without a call that may
    change it is a difference too.

    No attend is compared while a graph is captured, since nothing may be copied then, and replays are seen by nobody:
    with a plan on a lease all slots count as changed. After a difference nothing is compared any more.

    Args:
        manager: the manager that is judged, none of its slots held.
        every: 1 compares everything. From 2 on, one step in so many is compared: its plan, and its attends of one
            layer, the layers by turns.
        on_difference: "raise" a `Difference` from the call in which it shows, which has been made; or "log" it.
        folder: where a folder that shows the difference again is put; None for none.

    Raises:
        ValueError: an argument is out of range, or a request holds a slot.
        ImportError: `folder` is given and safetensors is not installed.
        Difference: from any call, with `on_difference="raise"`, once.

    Examples:
        >>> from boundedkv import BoundedKVConfig, SinkWindow, build
        >>> pool = BoundedKVConfig(1, 1, 8, SinkWindow(sink=2, window=4))
        >>> manager = Shadow(build(pool, backend="reference"), every=10_000, on_difference="log")
        >>> manager.free_slots, manager.difference
        (32, None)
    """

    def __init__(
        self,
        manager: BoundedKVManager,
        every: int = 1,
        on_difference: str = "raise",
        folder: str | Path | None = None,
    ) -> None:
        """See the class."""
        if not isinstance(every, int) or isinstance(every, bool) or every < 1:
            raise ValueError(f"every is {every!r}, but should be an integer at least 1")
        if on_difference not in ("raise", "log"):
            raise ValueError(f"on_difference is {on_difference!r}, but should be 'raise' or 'log'")
        if manager.free_slots != manager.config.max_slots:
            raise ValueError(
                f"manager has {manager.free_slots} free slots, but should have all {manager.config.max_slots}: "
                "the reference starts with none held"
            )
        if folder is not None:
            require_safetensors()
        super().__init__(manager)
        self._reference = Follower(manager.config)
        self._every = every
        self._raises = on_difference == "raise"
        self._folder = None if folder is None else Path(folder)
        self._order = threading.RLock()
        self._found: str | None = None
        self._steps = 0
        self._layers: range = range(manager.config.num_layers if every == 1 else 0)  # those compared in this step
        self._slot_of: dict[str, int] = {}  # as last planned; one that was never planned wrote no slot by attend
        self._history: deque[Call] = deque(maxlen=REMEMBERED_CALLS)  # lifecycle calls since no slot was held

    @property
    def difference(self) -> str | None:
        """The difference that was found; None as long as there is none."""
        return self._found

    def _call(self, name: str, arguments: dict[str, Any]) -> Any:
        if name == "layer":
            self._reference.lose_slots()  # whoever has them may write to them
        if self._found is not None or name in ("layer", "post_warmup_validate"):
            return ask(self._manager, name, arguments).given()
        if name == "attend" and not self._is_due(arguments):
            self._reference.lose_slots()
            return ask(self._manager, name, arguments).given()
        with self._order:
            watch = self._watched_attend(arguments) if name == "attend" else self._watched(name, arguments)
            failure = _advance(watch)
            judged = ask(self._manager, name, arguments)
            failure = failure or _advance(watch, judged)
            if failure is not None:
                self._tell(name, arguments, f"it could not be compared: {failure!r}", [])
            return judged.given()

    # The lifecycle.

    def _watched(self, name: str, arguments: dict[str, Any]) -> Watch:
        rid = arguments.get("rid")
        slot = self._slot_of.get(rid) if name == "export_request" and isinstance(rid, str) else None
        found = [] if slot is None else [*self._followed(range(self.config.num_layers), [slot], "before it")]
        judged = yield
        if name == "plan" and judged.error is None and not self._starts_sample(arguments["ctx"]):
            self._reference.defer_plan(**arguments)
        elif name != "current" or self._reference.current_is_known:
            reference = self._reference.ask(name, arguments)
            found += differences("error", reference.error, judged.error, _NAMES)
            found += differences("result", reference.value, judged.value, _NAMES)
            if found:
                before = [] if slot is None else self._contents(range(self.config.num_layers), [slot])
                calls = [*self._history, *before, Call(name, arguments, judged, reference)]
                self._tell(name, arguments, found[0], calls)
                return
            if name == "plan" and judged.error is None:
                self._reference.pair_plans(judged.value, reference.value, arguments["ctx"])
        self._remember(name, arguments, judged)

    def _starts_sample(self, ctx: StepContext) -> bool:
        """Whether the step that is planned is compared; a capture is always, and counts for none."""
        if ctx.capture:
            return True
        sample, turn = divmod(self._steps, self._every)
        self._steps += 1
        num_layers = self.config.num_layers
        if self._every > 1:
            self._layers = range(0) if turn else range(sample % num_layers, sample % num_layers + 1)
        return turn == 0

    def _remember(self, name: str, arguments: Mapping[str, Any], judged: Answer) -> None:
        self._history.append(Call(name, _without_entries(arguments)))
        if name == "plan" and judged.error is None and not arguments["ctx"].capture:
            rows = zip(arguments["ctx"].row_ids, judged.value.rows, strict=True)
            self._slot_of.update({rid: slot for rid, (slot, _, _) in rows})
        if name in _ENDS and judged.error is None:
            self._slot_of = {rid: slot for rid, slot in self._slot_of.items() if self._reference.holds(rid)}
            if self._reference.free_slots == self.config.max_slots:
                self._history.clear()

    # Attends.

    def _is_due(self, arguments: Mapping[str, Any]) -> bool:
        """Whether an attend is compared: the reference must be able to take it, and a capture be over."""
        layer_idx = arguments["layer_idx"]
        if layer_idx not in self._layers and self._every > 1:
            return False
        if self._is_capturing():
            return False
        slots = ask(self._manager, "layer", {"layer_idx": layer_idx}).value
        return all(tensor.device == self.device for tensor in _tensors_in(arguments)) and not (
            # Of an attend to the slots themselves only the manager they belong to can tell.
            isinstance(slots, Tensor)
            and any(_same_memory(slots, tensor) for tensor in _tensors_in((arguments["k"], arguments["v"])))
        )

    def _is_capturing(self) -> bool:
        return bool(self.device.type == "cuda" and torch.cuda.is_current_stream_capturing())

    def _watched_attend(self, arguments: dict[str, Any]) -> Watch:
        layer_idx, plan = arguments["layer_idx"], arguments["plan"]
        given = {key: _on_host(value) for key, value in arguments.items() if key != "plan"}
        plan = ask(self._manager, "current", {}).value if plan is None else plan
        found: list[str] = []
        layers, slots = range(0), list[int]()
        if isinstance(plan, BoundedPlan):
            mine = self._reference.plan_for(plan)
            found += differences("plan", mine, plan, _NAMES)
            slots = slots_named(mine, self.config.max_slots)
            layers = range(layer_idx, layer_idx + 1) if layer_idx in range(self.config.num_layers) else layers
            given["plan"] = mine
        else:
            given["plan"] = plan
        found += self._followed(layers, slots, "before it")
        calls = [*self._contents(layers, slots), Call("attend", {key: _on_host(value) for key, value in given.items()})]
        judged = yield
        reference = self._reference.ask("attend", given)
        calls[-1] = calls[-1]._replace(judged=judged, reference=reference)
        found += differences("error", reference.error, judged.error, _NAMES)
        for words in differences("result", reference.value, judged.value, _NAMES):
            found.append(words + self._place_told(words, plan))
        for each in layers:
            answers = [Answer(manager.layer(each)[slots].cpu()) for manager in (self._manager, self._reference)]
            calls.append(Call("read_slots", {"layer_idx": each, "slots": tuple(slots)}, *answers))
        found += self._followed(layers, slots, "after it")
        if found:
            self._tell("attend", arguments, found[0], calls)

    def _followed(self, layers: range, slots: list[int], when: str) -> Iterator[str]:
        for layer_idx in layers:
            for slot, mine, theirs in self._reference.follow(layer_idx, slots, self._manager.layer(layer_idx)):
                yield from differences(f"layer({layer_idx})[{slot}] {when}", mine, theirs, _NAMES)

    def _contents(self, layers: range, slots: list[int]) -> list[Call]:
        """The calls that put the slots as they are for the reference."""
        return [
            Call(
                "write_slots",
                {"layer_idx": each, "slots": tuple(slots), "entries": self._reference.layer(each)[slots]},
            )
            for each in layers
        ]

    # What is told of a difference.

    def _place_told(self, words: str, plan: Any) -> str:
        """Whose element it is that the words name, as the engine thinks of it."""
        index = _INDEX.match(words)
        if index is None or not isinstance(plan, BoundedPlan):
            return ""
        line, query, head = map(int, index.groups())
        row = line // self.config.rows_per_request
        slot, layout, _ = plan.rows[row]
        owners = [rid for rid, number in self._slot_of.items() if number == slot] if layout.tokens else []
        whose = f"request {owners[0]!r}" if owners else "a row without a request"
        return f"; that is {whose} (row {row}), query {query} at stream position {layout.length + query}, head {head}"

    def _tell(self, name: str, arguments: Mapping[str, Any], found: str, calls: list[Call]) -> None:
        words = ", ".join(f"{key}={told(value)}" for key, value in arguments.items() if value is not None)
        message = f"{name}({words}): {found}"
        if self._folder is not None and calls:
            try:
                message += f"; to see it again: {write_repro(self._folder, message, self.config, calls)}"
            except Exception as error:  # the difference must be told whatever becomes of the folder
                message += f"; what shows it again could not be written: {error!r}"
        self._found = message
        if self._raises:
            raise Difference(message)
        _log.error(message)


@torch.no_grad()
def _advance(watch: Watch, judged: Answer | None = None) -> Exception | None:
    """Go on with a comparison, to the judged manager's call or to its end; returns what it failed with, if it did."""
    try:
        if judged is None:
            next(watch)
        else:
            watch.send(judged)
    except StopIteration:
        pass
    except Difference:
        raise
    except Exception as error:
        return error
    return None


def _same_memory(left: Tensor, right: Tensor) -> bool:
    return left.untyped_storage().data_ptr() == right.untyped_storage().data_ptr()


def _tensors_in(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    for item in value.values() if isinstance(value, Mapping) else value if isinstance(value, tuple) else ():
        yield from _tensors_in(item)


def _on_host(value: Any) -> Any:
    """A copy of a value in the host's memory: of a tensor, or of a tuple with some in it, a plan say."""
    if isinstance(value, Tensor):
        return value.detach().to("cpu", copy=True)
    if isinstance(value, BoundedPlan):
        return value._replace(table=_on_host(value.table))
    return tuple(map(_on_host, value)) if type(value) is tuple else value


def _without_entries(value: Any) -> Any:
    """A value to remember: tensors become zeros that take no memory, and a context lets go of its engine's plans."""
    if isinstance(value, Tensor):
        return torch.zeros((), dtype=value.dtype).expand(value.shape)
    if isinstance(value, StepContext):
        return replace(value, plan_results={})
    if isinstance(value, Mapping):
        return {key: _without_entries(item) for key, item in value.items()}
    return value
