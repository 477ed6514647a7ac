"""Packed weights that are kept between starts: the same model, never another one, and no harm from a spoilt cache."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pytest

from data_plane.engine.loader import Loaded
from data_plane.errors import StartError
from data_plane.loading import prepacked
from data_plane.models.batch import Array
from tests.data_plane import forward, tiny
from tests.data_plane.drive import load_model

TOKENS = tiny.tokens_for(2, 20)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache but for the compiled kernels."""
    folder = tmp_path / "cache"
    folder.mkdir()
    (folder / "kernels").symlink_to(Path(os.environ["INGLE_CACHE"]) / "kernels")
    monkeypatch.setenv("INGLE_CACHE", str(folder))
    return folder


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return save(tmp_path / "model", seed=1)


def save(folder: Path, seed: int) -> Path:
    tiny.make("llama", seed=seed).save_pretrained(folder)
    return folder


def start(model: Path) -> Loaded:
    return load_model(model, precision="packed", threads=1, kv_cache_tokens=64)


def logits(model: Path) -> Array:
    return forward.logits_of(start(model), TOKENS)


def entries(cache: Path) -> list[Path]:
    return [*(cache / "packed").iterdir()]


def test_the_second_start_reads_what_the_first_kept(cache: Path, model: Path) -> None:
    first = logits(model)
    (entry,) = entries(cache)
    kept = (entry / "weights.bin").stat().st_mtime_ns
    assert np.array_equal(logits(model), first)
    assert (entry / "weights.bin").stat().st_mtime_ns == kept


@pytest.mark.parametrize("spoilt", ["cut", "no weights", "no index", "index is no JSON", "index of another"])
def test_a_spoilt_entry_is_made_again(spoilt: str, cache: Path, model: Path) -> None:
    first = logits(model)
    (entry,) = entries(cache)
    weights, index = entry / "weights.bin", entry / "index.json"
    if spoilt == "cut":
        weights.write_bytes(weights.read_bytes()[:1000])
    elif spoilt == "no weights":
        weights.unlink()
    elif spoilt == "no index":
        index.unlink()
    elif spoilt == "index is no JSON":
        index.write_text("{")
    else:
        index.write_text(json.dumps({"norm": ["<f4", [1 << 40], 0]}))
    assert np.array_equal(logits(model), first)


def test_another_model_at_the_same_place_is_another_model(cache: Path, model: Path) -> None:
    first = logits(model)
    save(model, seed=2)
    assert not np.array_equal(logits(model), first)


def test_another_shape_over_the_same_weights_is_not_served_from_the_cache(cache: Path, model: Path) -> None:
    """The decoder trusts the sizes that it is told: they must be checked against the file, not against the cache."""
    logits(model)
    path = model / "config.json"
    whole = json.loads(path.read_text())
    for change in ({"num_hidden_layers": 3}, {"intermediate_size": 128}, {"vocab_size": 640}, {"head_dim": 32}):
        path.write_text(json.dumps({**whole, **change}))
        with pytest.raises(StartError, match="fetch it again"):
            start(model)


def test_a_cache_that_cannot_be_written_is_done_without(
    cache: Path, model: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    expected = logits(model)
    (cache / "packed").rename(cache / "gone")
    (cache / "packed").write_text("in the way")
    assert np.array_equal(logits(model), expected)
    assert "packed_cache_unwritable" in capfd.readouterr().err


def test_what_was_longest_unused_goes_first(cache: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    models = [save(tmp_path / f"model{seed}", seed) for seed in range(3)]
    start(models[0])
    (first,) = entries(cache)
    size = sum(file.stat().st_size for file in first.iterdir())
    monkeypatch.setattr(prepacked, "MOST_BYTES", 2 * size + size // 2)
    start(models[1])
    os.utime(first)
    second = next(entry for entry in entries(cache) if entry != first)
    os.utime(second, (1, 1))
    start(models[2])
    assert first in entries(cache)
    assert second not in entries(cache)
    assert len(entries(cache)) == 2
