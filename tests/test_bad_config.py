"""Settings no stream could be served with, and pools that cannot be built: refused with the setting's name."""

import dataclasses

import pytest
import torch

from boundedkv import (
    BoundedKVConfig,
    BoundedKVManager,
    BoundedKVSpec,
    EngineResourceInfo,
    SinkWindow,
    available_backends,
    build,
)

GOOD = {"num_layers": 1, "num_heads": 2, "head_dim": 4, "retention": SinkWindow(1, 3), "max_source_len": 2}

BAD_SETTINGS = [
    ({"num_layers": 0}, "num_layers is 0, but should be an integer at least 1"),
    ({"num_layers": True}, "num_layers is True, but should be an integer at least 1"),
    ({"num_heads": -1}, "num_heads is -1, but should be an integer at least 1"),
    ({"head_dim": 0}, "head_dim is 0, but should be an integer from 1 to 256"),
    ({"head_dim": 257}, "head_dim is 257, but should be an integer from 1 to 256"),
    ({"head_dim": 4.0}, "head_dim is 4.0, but should be an integer from 1 to 256"),
    ({"rows_per_request": 0}, "rows_per_request is 0, but should be an integer at least 1"),
    ({"max_slots": "8"}, "max_slots is '8', but should be an integer at least 1"),
    ({"max_source_len": -1}, "max_source_len is -1, but should be an integer at least 0"),
    ({"spare": -1}, "spare is -1, but should be an integer at least 0"),
    ({"spare": None}, "spare is None, but should be an integer at least 0"),
    (
        {"dtype": torch.float64},
        "dtype is torch.float64, but should be one of torch.float32, torch.float16, torch.bfloat16",
    ),
    ({"dtype": "float32"}, "dtype is float32, but should be one of torch.float32"),
    ({"num_query_heads": 3}, "num_query_heads is 3, but should be a multiple of num_heads 2"),
    ({"num_query_heads": 0}, "num_query_heads is 0, but should be an integer at least 1"),
    ({"scale": float("nan")}, "scale is nan, but should be finite"),
    ({"scale": float("-inf")}, "scale is -inf, but should be finite"),
    ({"scale": 1e39}, r"scale is 1e\+39, but should be finite, in float32"),
    ({"scale": True}, "scale is True, but should be finite"),
    ({"scale": "1"}, "scale is '1', but should be finite"),
    ({"reverse_step_order": 1}, "reverse_step_order is 1, but should be True or False"),
    (
        {"retention": (1, 3)},
        r"retention is \(1, 3\), but should be a SinkWindow or a function from source length to one",
    ),
    ({"retention": None}, "retention is None, but should be a SinkWindow or a function"),
    ({"retention": lambda length: (1, length)}, r"retention gives \(1, 0\) for source length 0, .* give a SinkWindow"),
    ({"retention": SinkWindow(-1, 3)}, "sink for source length 0 is -1, but should be an integer at least 0"),
    (
        {"retention": lambda length: SinkWindow(1, 1 - length)},
        "window for source length 2 is -1, but should be an integer",
    ),
    ({"retention": SinkWindow(1, 2.5)}, "window for source length 0 is 2.5, but should be an integer at least 0"),
    ({"retention": SinkWindow(1, 3, 1)}, "window_includes_step for source length 0 is 1, but should be True or False"),
    ({"query_window": -1}, "query_window is -1, but should be an integer at least 0"),
    ({"query_window": 1.0}, "query_window is 1.0, but should be an integer at least 0"),
    (
        {"query_window": 4},
        "query_window is 4, but should be at most the retained window, which is 3 for source length 0",
    ),
    (
        {"query_window": 3, "retention": lambda length: SinkWindow(0, 4 - length)},
        "query_window is 3, but should be at most the retained window, which is 2 for source length 2",
    ),
    ({"query_window": 2, "reverse_step_order": True}, "reverse_step_order is True, but should be False beside a query"),
    ({"query_window": 2, "retention": SinkWindow(1, 3, True)}, "window_includes_step is True .*, but should be False"),
]


@pytest.mark.parametrize(("settings", "words"), BAD_SETTINGS, ids=[words.split(",")[0] for _, words in BAD_SETTINGS])
def test_bad_setting(settings, words):
    with pytest.raises(ValueError, match=f"^{words}"):
        BoundedKVConfig(**GOOD | settings)


def test_good_settings_at_their_ends():
    config = BoundedKVConfig(
        **GOOD | {"head_dim": 256, "query_window": 3, "spare": 0, "scale": -1, "num_query_heads": 2}
    )
    assert (config.sink_capacity, config.ring_capacity) == (1, 3)
    empty = BoundedKVConfig(**GOOD | {"head_dim": 1, "retention": SinkWindow(0, 0), "query_window": 0})
    assert (empty.slot_tokens, empty.slot_bytes) == (0, 0)


# Building.


def test_not_a_config(backend):
    with pytest.raises(TypeError, match=r"^config is dict, but should be a BoundedKVConfig"):
        build(GOOD, backend=backend)


def test_bad_kv_dtype(backend):
    with pytest.raises(ValueError, match=r"^dtype is torch.int8, but should be one of torch.float32"):
        build(BoundedKVConfig(**GOOD), kv_dtype=torch.int8, backend=backend)


def test_a_gpu_that_is_not_there(backend, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match=r"^device is 'cuda:1', but torch sees no GPU; it should be 'cpu'"):
        build(BoundedKVConfig(**GOOD), "cuda:1", backend=backend)


def test_unknown_backend():
    with pytest.raises(ValueError, match=r"^backend is 'quick', but should be one of 'auto', 'reference', 'fast'"):
        build(BoundedKVConfig(**GOOD), backend="quick")
    spec = BoundedKVSpec(BoundedKVConfig(**GOOD), backend="quick")
    with pytest.raises(ValueError, match=r"^backend is 'quick', but should be one of 'auto', 'reference', 'fast'"):
        BoundedKVManager.build(spec, EngineResourceInfo("cpu"))
    assert "quick" not in available_backends()


def test_bad_override_leaves_the_spec():
    spec = BoundedKVSpec(BoundedKVConfig(**GOOD))
    with pytest.raises(ValueError, match=r"^max_slots is 0, but should be an integer at least 1"):
        spec.apply_yaml_overrides(max_slots=0)
    assert spec.config == BoundedKVConfig(**GOOD)
    spec.apply_yaml_overrides(max_slots=5)
    assert spec.config == dataclasses.replace(BoundedKVConfig(**GOOD), max_slots=5)
