"""What holds for every test: which profile, which device, and where a comparison of both backends is had.

`BOUNDEDKV_PROFILE` chooses how much hypothesis does: "ci" (the default: the same modest run each time) or "deep" (many
random ones, for half an hour or more).
"""

import os

import hypothesis
import pytest
import torch

GPU = torch.cuda.is_available()
if not GPU:
    os.environ.setdefault("TRITON_INTERPRET", "1")  # chosen, so that the fast backend need not warn of it
torch.set_num_threads(1)  # workers share the cores

# Triton's interpreter is slow and machines differ: a test fails for what it finds, never for how long that took.
hypothesis.settings.register_profile("house", deadline=None, print_blob=True)
hypothesis.settings.register_profile(
    "ci", hypothesis.settings.get_profile("house"), derandomize=True, database=None, max_examples=30
)
hypothesis.settings.register_profile("deep", hypothesis.settings.get_profile("house"), max_examples=500)
hypothesis.settings.load_profile(os.environ.get("BOUNDEDKV_PROFILE", "ci"))

CALLS = "calls compared"


def device_of(backend):
    """Where a backend is tested: the fast one on the GPU where there is one, the reference on the CPU."""
    compiled = GPU and os.environ.get("TRITON_INTERPRET", "0") == "0"
    return "cuda" if backend == "fast" and compiled else "cpu"


@pytest.fixture(params=["reference", "fast"])
def backend(request):
    """Each of our backends by name; `device_of` says where it runs."""
    return request.param


@pytest.fixture
def make_pair(record_property):
    """Makes pairs of the reference and the fast backend from a config. What they compare is told at the end."""
    from boundedkv import build
    from boundedkv.testing import Pair

    pairs = []

    def make(config, kv_dtype=None):
        pairs.append(Pair(*(build(config, device_of(name), kv_dtype, backend=name) for name in ("reference", "fast"))))
        return pairs[-1]

    yield make
    record_property(CALLS, sum(pair.calls for pair in pairs))


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """With a GPU, every test that runs the fast backend there is a `gpu` test; without one, `gpu` tests are skipped."""
    for item in items:
        parameters = item.callspec.params.values() if hasattr(item, "callspec") else ()
        if item.get_closest_marker("interpreted"):
            if device_of("fast") == "cuda":
                item.add_marker(pytest.mark.skip(reason="kernels are compiled: TRITON_INTERPRET=1 runs this test"))
        elif GPU and ("fast" in parameters or "make_pair" in item.fixturenames):
            item.add_marker(pytest.mark.gpu)
        elif not GPU and item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="torch sees no GPU"))


def pytest_terminal_summary(terminalreporter):
    """How many calls were compared in all, whichever worker did."""
    properties = [
        count
        for reports in terminalreporter.stats.values()
        for report in reports
        if getattr(report, "when", None) == "teardown"
        for name, count in report.user_properties
        if name == CALLS
    ]
    if properties:
        terminalreporter.write_line(f"{sum(properties)} {CALLS}")
