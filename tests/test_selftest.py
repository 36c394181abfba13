"""The self test passes where the arithmetic is right, names the place where it is not, and bars the device then."""

import pytest
import torch

from boundedkv import NUMERICS_VERSION, DeviceSelfTestError, self_test
from boundedkv.fast import launch, runtime


def test_this_machine_computes_as_the_contract_says():
    device = "cuda" if torch.cuda.is_available() else "cpu"
    report = self_test(device)
    assert (report.device, report.numerics_version) == (device, NUMERICS_VERSION)
    assert report.results >= 10_000
    assert len(report.families) == 13


def off_by_one_bit(attend):
    def wrong(*args):
        out = attend(*args)
        out.view(torch.int32)[0, 1, 0, 0] ^= 1
        return out

    return wrong


def test_one_wrong_bit_is_named(monkeypatch):
    monkeypatch.setattr(launch, "attend", off_by_one_bit(launch.attend))
    message = (
        r"numerics version 1 says: gaussian, head_dim 1, default path, element \[0, 1, 0, 0\] is .* \(0x[0-9a-f]{8}\)"
    )
    with pytest.raises(DeviceSelfTestError, match=message):
        self_test("cpu")


def test_a_device_that_fails_is_barred_and_tried_once(monkeypatch):
    tried = []

    def fails(device):
        runtime.require_device(device)
        tried.append(device)
        raise DeviceSelfTestError("wrong bits")

    monkeypatch.setattr(runtime, "interpreted", lambda: False)
    monkeypatch.setattr(runtime, "self_test", fails)
    monkeypatch.setattr(runtime, "_failures", {})
    gpu = torch.device("cuda", 0)
    for _ in range(2):
        with pytest.raises(DeviceSelfTestError, match="wrong bits"):
            runtime.require_device(gpu)
    assert tried == [gpu]


def test_compiled_kernels_need_a_gpu(monkeypatch):
    monkeypatch.setattr(runtime, "interpreted", lambda: False)
    with pytest.raises(ValueError, match="device is cpu, but should be a GPU: kernels are compiled"):
        runtime.require_device(torch.device("cpu"))
