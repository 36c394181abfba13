"""The demo: its weights, its text, its model, a quick run, and that a single flipped bit is found and named."""

import importlib.resources
import subprocess
import sys

import pytest
import torch

from boundedkv import build
from boundedkv.cli import main as command
from boundedkv.reference import ReferenceManager
from boundedkv.testing import Pair

pytest.importorskip("rich", reason="the demo needs the extra 'demo'")
pytest.importorskip("matplotlib", reason="the demo needs the extra 'demo'")

from boundedkv.demo import arrivals, main, quality, streaming, text
from boundedkv.demo.model import STREAM_LENGTH, WEIGHTS, load_model

FLIPPED_CALL, FLIPPED_PLACE = 5, (1, 2, 3, 4)


def growing_cache():
    """Attention over everything an earlier call brought, and causally over the call's own keys."""
    held = {}

    def attend(layer, q, k, v):
        if layer in held:
            k, v = (torch.cat(pair, dim=2) for pair in zip(held[layer], (k, v), strict=True))
        held[layer] = k, v
        mask = torch.ones(k.shape[2], k.shape[2], dtype=torch.bool).tril()[-q.shape[2] :]
        k, v = k.expand(*q.shape[:2], *k.shape[2:]), v.expand(*q.shape[:2], *v.shape[2:])
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask).transpose(1, 2)

    return attend


class OneBitOff(ReferenceManager):
    """The reference, but for the lowest bit of one element of one attend."""

    attends = 0

    def _attend(self, *args, **kwargs):
        out = super()._attend(*args, **kwargs)
        self.attends += 1
        if self.attends == FLIPPED_CALL:
            out.view(torch.int32)[FLIPPED_PLACE] ^= 1
        return out


def test_weights_are_small_and_load():
    file = importlib.resources.files("boundedkv.demo").joinpath(WEIGHTS)
    assert len(file.read_bytes()) < 1_000_000
    assert all(torch.isfinite(weight).all() for weight in load_model().parameters())


def test_text_is_unseen():
    training = text.training_text()
    assert len(training) > 500_000
    assert not {file.name for file in text.training_files()} & {f"{module}.py" for module in text.HELD_OUT}
    for module in text.HELD_OUT:
        unseen = text.docstrings(text.library_folder() / f"{module}.py")
        assert not [each for each in unseen if f"\n\n{each}\n\n" in training]


def test_every_request_has_text_enough():
    for quick in (False, True):
        requests = arrivals.requests(quick)
        assert len({request.module for request in requests}) == len(requests)
        for request in requests:
            stream = streaming.open_stream(request)
            assert len(stream.symbols) == sum(request.chunks) + 1 <= STREAM_LENGTH
            assert stream.symbols[0] == text.BEGIN


def test_streaming_equals_one_shot():
    """In float arithmetic of PyTorch, so to a tolerance: the sums of one shot are ordered otherwise."""
    model, symbols = load_model(), text.streams("statistics", 200)[:2]
    positions = torch.arange(200).expand(2, -1)
    attend = growing_cache()
    chunks = (1, 7, 60, 1, 1, 100, 30)
    pieces = zip(symbols.split(chunks, dim=1), positions.split(chunks, dim=1), strict=True)
    streamed = torch.cat([model(*piece, attend) for piece in pieces], dim=1)
    torch.testing.assert_close(streamed, model(symbols, positions), rtol=1e-4, atol=1e-4)


def test_bits_per_character_of_english():
    """The model has learnt something: a uniform guess costs 6.6 bits, letters by their frequency about 4.5."""
    unseen = text.streams("statistics", STREAM_LENGTH)[:4]
    assert 1.0 < quality.bits_per_character(load_model(), unseen) < 3.0


def test_mask_is_the_retention():
    """Sinks, the window before the query, the query itself; checked against the words of the definition."""
    seen = quality.visible(9, sink=2, window=3)
    for query in range(9):
        keys = {key for key in range(query + 1) if key < 2 or query - key <= 3}
        assert set(seen[query].nonzero().flatten().tolist()) == keys


def test_quick_demo(tmp_path):
    picture = tmp_path / "slots.svg"
    words = [sys.executable, "-m", "boundedkv", "demo", "--quick", "--out", str(picture)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    assert "calls, all bits equal" in done.stdout
    assert picture.read_text(encoding="utf-8").rstrip().endswith("</svg>")


def test_one_flipped_bit_is_found(tmp_path, capsys):
    picture = tmp_path / "slots.svg"
    status = main.demo(picture, quick=True, managers=lambda config: Pair(build(config), OneBitOff(config, "cpu")))
    said = capsys.readouterr().out
    assert status == 1
    assert "NOT EQUAL" in said
    assert "attend(layer_idx=1" in said
    assert f"result{list(FLIPPED_PLACE)}" in said
    assert "1 is 'textwrap'" in said
    assert "1 of" in said
    assert not picture.exists()


@pytest.mark.parametrize(("out", "said"), [("nowhere/slots.svg", "no folder"), ("slots.txt", "slots.txt")])
def test_place_of_the_picture_is_checked_first(out, said, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as stopped:
        command(["demo", "--out", out])
    assert stopped.value.code == 2
    assert said in capsys.readouterr().err


def test_missing_extra_is_said(monkeypatch, capsys, tmp_path):
    monkeypatch.delitem(sys.modules, "boundedkv.demo.main")
    monkeypatch.setitem(sys.modules, "rich.console", None)
    assert command(["demo", "--out", str(tmp_path / "slots.svg")]) == 2
    assert "boundedkv[demo]" in capsys.readouterr().out
