"""Kernels touch no memory but the elements of their arguments.

On a GPU a read beside them is an error of the device now and then, and no bit shows it before. Triton's interpreter
shows each address.
"""

import numpy as np
import pytest
import torch
from streams import Drive, Own, normal, random_own, random_source, stack
from torch import Tensor

from boundedkv import SinkWindow, StreamPosition
from boundedkv.fast import launch
from boundedkv.fast.runtime import interpreted

pytestmark = pytest.mark.skipif(not interpreted(), reason="addresses are seen in Triton's interpreter only")


def addresses(tensor):
    """The address of each element."""
    steps = (torch.arange(size) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    offsets = torch.zeros((), dtype=torch.int64)
    for step in steps:
        offsets = offsets[..., None] + step
    return tensor.data_ptr() + offsets.flatten().unique() * tensor.element_size()


@pytest.fixture
def launched(monkeypatch):
    """The kernels launched under guard: an access beside the arguments of its kernel is an error."""
    interpreter = pytest.importorskip("triton.runtime.interpreter")
    builder, plain_launch, kernels, allowed = interpreter.InterpreterBuilder, launch._launch, [], []

    def guard(name, mask_of):
        plain = getattr(builder, name)

        def access(self, pointers, *rest):
            touched = np.asarray(pointers.data)[np.asarray(mask_of(rest).data)]
            beside = touched[~np.isin(touched, allowed)]
            assert not beside.size, f"{name} of {kernels[-1]} at {beside[0]:#x}, beside its arguments"
            return plain(self, pointers, *rest)

        monkeypatch.setattr(builder, name, access)

    def guarded_launch(kernel, grid, *args, **constants):
        kernels.append(kernel.__name__)
        allowed[:] = torch.cat([addresses(arg) for arg in args if isinstance(arg, Tensor)]).tolist()
        plain_launch(kernel, grid, *args, **constants)

    guard("create_masked_load", lambda rest: rest[0])
    guard("create_masked_store", lambda rest: rest[1])
    monkeypatch.setattr(launch, "_launch", guarded_launch)
    return kernels


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("ieee", [False, True])
def test_nothing_beside_the_arguments_is_touched(launched, causal, ieee):
    """Rows of all kinds: with a source of either sort and none, a ring that wraps, fewer tokens than the step has."""
    settings = {"retention": SinkWindow(0 if causal else 3, 4), "query_window": 2 if causal else None}
    drive = Drive("fast", max_source_len=3, head_dim=5, num_query_heads=2, **settings)
    own, source = random_own(drive.config, 8), random_source(drive.config, 2, 3)
    drive.positions = {"a": StreamPosition(3, 0, 1), "b": StreamPosition(0, 0), "c": StreamPosition(2, 0, -1)}
    storage = random_source(drive.config, 1, 3, seed=1), torch.zeros(4, dtype=torch.int32)[::2]
    for start, spans in ((0, {"b": 5}), (5, {"b": 2, "a": 1, "c": 2}), (6, {"c": 1, "a": 1})):
        cut = stack(own.cut(start, start + span, 5) for span in spans.values()).to(torch.bfloat16)
        bias = normal(3, len(spans), 2, 5, 3 if causal else 16)
        rows = (storage[0], storage[1].new_zeros(2 * len(spans))[::2])
        drive.step(spans, Own(*cut), tokens=spans, source=source, row_source=rows, rel_bias=bias, ieee=ieee)
    assert launched == ["attention_kernel", "write_kernel"] * 3


def test_nothing_beside_the_arguments_is_touched_where_splits_are_merged(launched):
    drive = Drive("fast", retention=SinkWindow(2, 1100), max_source_len=1200, max_slots=1)
    drive.positions["a"] = StreamPosition(1150, 0)
    drive.step({"a": 3}, random_own(drive.config, 3), source=random_source(drive.config, 1, 1150))
    assert launched == ["attention_kernel", "merge_kernel", "write_kernel"]


def test_an_address_beside_the_arguments_is_seen(launched):
    """The write of a token into slots that have no entry."""
    drive = Drive("fast", retention=SinkWindow(0, 2), max_slots=1)
    plan, own = drive.plan({"a": 1}), random_own(drive.config, 1)
    none = drive.manager.layer(0)[:, :, :, :0]
    with pytest.raises(Exception, match=r"create_masked_store of write_kernel at 0x.*, beside its arguments"):
        launch.write(drive.config, plan, launch.Inputs(own.q, own.k, own.v, none, None, None, None))
