"""`python -m boundedkv size` says what the tensors really take."""

import pytest
import torch

from boundedkv import BoundedKVConfig, SinkWindow, build
from boundedkv.cli import main
from boundedkv.sizing import report

WORDS = (
    "size --layers 2 --heads 3 --head-dim 5 --sink 4 --window 6 --slots 7 --rows 2 --spare 1 --dtype float16".split()
)


def test_bytes_are_those_of_the_slots(capsys):
    assert main([*WORDS, "--stream", "100"]) == 0
    slot, pool, growing = capsys.readouterr().out.splitlines()
    config = BoundedKVConfig(2, 3, 5, SinkWindow(4, 6), 2, max_slots=7, dtype=torch.float16, spare=1)
    manager = build(config, backend="reference")
    taken = sum(manager.layer(layer).nbytes for layer in (0, 1))
    assert taken == 7 * config.slot_bytes
    assert "11 entries" in slot
    assert f" {config.slot_bytes:,} bytes" in slot
    assert f" {taken:,} bytes" in pool
    assert f" {taken // 11 * 100:,} bytes" in growing


def test_gibibytes_are_told_too():
    config = BoundedKVConfig(32, 8, 128, SinkWindow(4, 1020), max_slots=64, dtype=torch.bfloat16)
    assert report(config, 1024).splitlines()[1].endswith("8,589,934,592 bytes       8.000 GiB")


def test_numbers_that_make_no_pool(capsys):
    assert main([*WORDS[:-2], "--spare", "-1"]) == 2
    assert capsys.readouterr().out == "spare is -1, but should be an integer at least 0\n"
    with pytest.raises(SystemExit):
        main(["size"])
