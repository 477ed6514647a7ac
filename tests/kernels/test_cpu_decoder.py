"""The C decoder: any processor's build, any number of threads and any chunking give what the plain build gives."""

from __future__ import annotations

import platform
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kernels.cpu import Decoder, DecoderShape, LayerWeights, PackedMatrix, pack
from kernels.cpu.build import FLAGS, CompilerMissing, compile_library, library, load_library
from kernels.errors import InvalidInput

BLOCK, TOKENS, VOCABULARY = 16, 75, 203
Array = np.ndarray[Any, Any]


def matrix(chance: np.random.Generator, outputs: int, inputs: int, bits: int, *, bias: bool = False) -> PackedMatrix:
    scale = (chance.random((outputs, inputs // 32)) * 0.02).astype(np.float32)
    return pack(
        chance.integers(0, 1 << bits, (outputs, inputs), dtype=np.uint8),
        scale,
        -scale * (1 << (bits - 1)),
        bits,
        chance.standard_normal(outputs).astype(np.float32) if bias else None,
    )


def make(threads: int, bits: int, window: int = 0, native: Any = None, loudness: float = 0, dim: int = 32) -> Decoder:
    """A random model of two layers: 6 query heads on 2 key heads, biases and QK-norm."""
    chance = np.random.default_rng(7)
    hidden, heads, kv_heads, inner = 96, 6, 2, 160

    def vector(width: int) -> Array:
        return (1 + 0.1 * chance.standard_normal(width)).astype(np.float32)

    layers = [
        LayerWeights(
            vector(hidden), vector(hidden), vector(dim), vector(dim),
            matrix(chance, (heads + 2 * kv_heads) * dim, hidden, bits, bias=True),
            matrix(chance, hidden, heads * dim, bits),
            matrix(chance, 2 * inner, hidden, bits),
            matrix(chance, hidden, inner, bits),
            window,
        )
        for _ in range(2)
    ]  # fmt: skip
    angles = np.arange(256)[:, None] * (100.0 ** -(np.arange(0, dim, 2) / dim))[None]
    table = np.concatenate([np.cos(angles), np.sin(angles)], axis=1).astype(np.float32)
    shape = DecoderShape(hidden, heads, kv_heads, dim, dim, inner, VOCABULARY, BLOCK, 128, threads, 1e-5, loudness)
    return Decoder(shape, layers, vector(hidden), matrix(chance, VOCABULARY, hidden, 8), None, table, native)


def new_cache(piece: int = BLOCK * (2 * 32 + 8)) -> Array:
    return np.full((20, 2, 2, piece), 255, np.uint8)  # as floats: not a number


def run(decoder: Decoder, chunks: list[int], table: Array, kv: Array) -> Array:
    """Logits of every token of one sequence, computed in chunks of these sizes."""
    ids = np.random.default_rng(1).integers(0, VOCABULARY, TOKENS)
    logits, at = [], 0
    for count in chunks:
        positions = np.arange(at, at + count)
        slots = table[positions // BLOCK].astype(np.int64) * BLOCK + positions % BLOCK
        part = decoder.step(
            ids[at : at + count], positions, slots, np.ascontiguousarray(table[None, : -(-(at + count) // BLOCK)]),
            np.array([0, count], np.int32), np.array([at + count], np.int32), np.arange(count), kv,
        )  # fmt: skip
        logits.append(part.copy())
        at += count
    return np.concatenate(logits)


TABLE = np.array([3, 11, 0, 7, 19], np.int32)
WHOLE = [TOKENS]


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("window", [0, 20])
def test_chunks_threads_and_placement_change_no_bit(bits: int, window: int) -> None:
    expected = run(make(1, bits, window), WHOLE, TABLE, new_cache())
    assert np.isfinite(expected).all()
    for threads, chunks in ((1, [1] * TOKENS), (2, WHOLE), (3, [5, 30, 1, 1, 38]), (2, [64, 11])):
        found = run(make(threads, bits, window), chunks, TABLE[::-1].copy(), new_cache())
        np.testing.assert_array_equal(found, expected)


@pytest.fixture(scope="module")
def old_build(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The code as a processor without vector extensions of its own gets it: on x86-64, one without AVX."""
    compiler = shutil.which("cc")
    assert compiler is not None
    target = tmp_path_factory.mktemp("old") / "old.so"
    basic = "-march=x86-64-v2" if platform.machine() == "x86_64" else "-O1"
    plain = tuple({"-march=native": basic, "-O3": "-O1"}.get(flag, flag) for flag in FLAGS)
    compile_library(compiler, target, plain)
    return load_library(target)


@pytest.mark.parametrize("loudness", [0.0, 1.0, 1e9])
@pytest.mark.parametrize("bits", [4, 8])
def test_a_build_without_avx512_agrees(old_build: Any, bits: int, loudness: float) -> None:
    old = run(make(2, bits, native=old_build, loudness=loudness), WHOLE, TABLE, new_cache())
    new = run(make(2, bits, loudness=loudness), WHOLE, TABLE, new_cache())
    # a rounding at the edge of two levels may fall either way
    np.testing.assert_allclose(old, new, rtol=2e-2, atol=2e-2 if loudness else 2e-3)


@pytest.mark.parametrize("dim", [16, 48, 128])
def test_heads_of_any_size(old_build: Any, dim: int) -> None:
    """Heads are padded to whole groups of 32 in the cache."""
    decoders = make(1, 4, dim=dim), make(2, 4, dim=dim), make(2, 4, native=old_build, dim=dim)
    piece = decoders[0].shape.kv_piece
    whole, chunks, old = (
        run(decoder, sizes, TABLE, new_cache(piece))
        for decoder, sizes in zip(decoders, (WHOLE, [5, 30, 1, 1, 38], WHOLE), strict=True)
    )
    np.testing.assert_array_equal(chunks, whole)
    np.testing.assert_allclose(old, whole, rtol=2e-2, atol=2e-2)


def test_sequences_of_one_step_do_not_see_each_other() -> None:
    decoder, kv = make(2, 4), new_cache()
    alone = run(make(2, 4), WHOLE, TABLE, new_cache())
    ids = np.random.default_rng(1).integers(0, VOCABULARY, TOKENS)
    lengths = [40, 1, 33]
    starts = np.array([0, 40, 41, 74], np.int32)
    positions = np.concatenate([np.arange(length) for length in lengths])
    tables = np.array([[1, 2, 3], [4, 0, 0], [5, 6, 8]], np.int32)
    owner = np.repeat(np.arange(3), lengths)
    slots = tables[owner, positions // BLOCK].astype(np.int64) * BLOCK + positions % BLOCK
    logits = decoder.step(
        ids[positions], positions, slots, tables, starts, np.array(lengths, np.int32), np.array([39, 40, 73]), kv
    )
    np.testing.assert_array_equal(logits, alone[[39, 0, 32]])


def test_what_does_not_fit_is_refused() -> None:
    decoder, many = make(1, 4), np.zeros(129, np.int64)
    starts, lengths = np.array([0, 129], np.int32), np.array([129], np.int32)
    with pytest.raises(InvalidInput, match="allotted"):
        decoder.step(many, many, many, TABLE[None], starts, lengths, many[:1], new_cache())
    with pytest.raises(InvalidInput, match="hidden size 40"):
        Decoder(DecoderShape(40, 1, 1, 32, 32, 32, 8, 16, 8, 1, 1e-5), [], None, None, None, None)  # type: ignore[arg-type]
    with pytest.raises(InvalidInput, match="packed"):
        pack(np.zeros((2, 33), np.uint8), np.zeros((2, 1), np.float32), np.zeros((2, 1), np.float32), 4)


def test_no_compiler_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("INGLE_CC", "none")
    with pytest.raises(CompilerMissing, match="no C compiler"):
        library.__wrapped__()
    with pytest.raises(CompilerMissing, match="could not compile"):
        compile_library("/bin/false", tmp_path / "x.so")
