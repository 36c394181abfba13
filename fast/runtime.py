"""How kernels run in this process: compiled for a GPU, or in Triton's interpreter."""

from __future__ import annotations

import importlib.util
import os
import sys
import warnings

import torch

from boundedkv.selftest import DeviceSelfTestError, self_test

_VARIABLE = "TRITON_INTERPRET"
_failures: dict[torch.device, DeviceSelfTestError | None] = {}


def require_triton() -> None:
    """Make Triton ready to be imported. Without a GPU, ask it for its interpreter and warn of it once.

    Sets the environment variable TRITON_INTERPRET where it is not set: Triton reads it when kernels are defined.

    Raises:
        ImportError: Triton is not installed.
        RuntimeError: Triton was imported before, without its interpreter, and there is no GPU.
    """
    if importlib.util.find_spec("triton") is None:
        raise ImportError("the fast backend needs Triton: pip install triton (Linux), or use backend='reference'")
    if _VARIABLE not in os.environ and not torch.cuda.is_available():
        if "triton" in sys.modules:
            raise RuntimeError(
                "triton was imported before the fast backend, and without a GPU that needs Triton's interpreter: set "
                f"{_VARIABLE}=1 in the environment, or build a fast manager before triton is imported"
            )
        os.environ[_VARIABLE] = "1"
        warnings.warn(
            "no GPU found: the fast backend runs in Triton's interpreter, with the same bits but slowly",
            RuntimeWarning,
            stacklevel=2,
        )


def _require_numpy_of_interpreter() -> None:
    import numpy
    import triton

    versions = [tuple(map(int, module.__version__.split(".")[:2])) for module in (triton, numpy)]
    if versions[0] < (3, 7) and versions[1] >= (2, 4):
        raise ImportError(
            f"triton is {triton.__version__} and numpy {numpy.__version__}, but this Triton's interpreter needs numpy "
            "before 2.4: install 'numpy<2.4' or 'triton>=3.7'"
        )


def interpreted() -> bool:
    """Whether kernels run in Triton's interpreter."""
    return os.environ.get(_VARIABLE, "0").lower() in ("1", "true", "yes", "on", "y")


def require_device(device: torch.device) -> None:
    """Refuse a device that this process's kernels cannot run on, or that failed the self test.

    A GPU is tried once a process, when it is first asked for: that compiles a dozen kernels, which Triton keeps.

    Raises:
        ValueError: a CPU device while kernels are compiled for a GPU.
        DeviceSelfTestError: the device does not compute as the contract says.
        ImportError: Triton's interpreter does not work with this numpy.
    """
    if interpreted():
        _require_numpy_of_interpreter()
        return
    if device.type != "cuda":
        raise ValueError(
            f"device is {device}, but should be a GPU: kernels are compiled in this process. To run them on the CPU, "
            f"set {_VARIABLE}=1 before boundedkv.fast is imported"
        )
    if device not in _failures:
        _failures[device] = None  # the managers that the test builds find the device tried
        try:
            self_test(device)
        except DeviceSelfTestError as error:
            _failures[device] = error
    failure = _failures[device]
    if failure is not None:
        raise failure
