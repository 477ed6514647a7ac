"""The door to decoder.c: a Llama-family step over a paged 8-bit KV cache, all layers in one call."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any

import numpy as np

from kernels.cpu.build import library
from kernels.cpu.packing import GROUP, Array, PackedMatrix
from kernels.errors import InvalidInput, KernelError
from kernels.sampling import Draws

_LANES = 16
_MOST_HEAD_DIM = 256
_MOST_THREADS = 64  # as in pool.h


class _Matrix(ctypes.Structure):
    _fields_ = (
        ("values", ctypes.c_void_p), ("scales", ctypes.c_void_p), ("bias", ctypes.c_void_p),
        ("outputs", ctypes.c_int32), ("inputs", ctypes.c_int32), ("bits", ctypes.c_int32),
        ("half_scales", ctypes.c_int32),
    )  # fmt: skip


class _Layer(ctypes.Structure):
    _fields_ = (
        ("attn_norm", ctypes.c_void_p), ("mlp_norm", ctypes.c_void_p),
        ("q_norm", ctypes.c_void_p), ("k_norm", ctypes.c_void_p),
        ("qkv", _Matrix), ("out", _Matrix), ("gate_up", _Matrix), ("down", _Matrix),
        ("window", ctypes.c_int32),
    )  # fmt: skip


class _Shape(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_int32) for name in (
            "hidden", "layers", "heads", "kv_heads", "head_dim", "rotary_dim", "intermediate", "vocabulary",
            "block_size", "most_tokens", "threads")),
        ("eps", ctypes.c_float), ("loudness", ctypes.c_float),
        ("layer", ctypes.c_void_p), ("norm", ctypes.c_void_p), ("cos_sin", ctypes.c_void_p),
        ("head", _Matrix), ("embedding", ctypes.c_void_p),
    )  # fmt: skip


class _Step(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_int32) for name in ("tokens", "sequences", "table_width", "logit_rows")),
        *((name, ctypes.c_void_p) for name in (
            "ids", "positions", "slots", "logit_row", "tables", "starts", "lengths")),
        ("kv", ctypes.c_void_p), ("block_stride", ctypes.c_int64), ("logits", ctypes.c_void_p),
    )  # fmt: skip


class _Draw(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_void_p) for name in (
            "logits", "tokens", "temperature", "top_p", "min_p", "top_k", "uniforms")),
        ("rows", ctypes.c_int32), ("vocabulary", ctypes.c_int32),
    )  # fmt: skip


@dataclass(frozen=True)
class LayerWeights:
    """Norms in float32; window 0 sees everything."""

    attn_norm: Array
    mlp_norm: Array
    q_norm: Array | None
    k_norm: Array | None
    qkv: PackedMatrix
    out: PackedMatrix
    gate_up: PackedMatrix
    down: PackedMatrix
    window: int


@dataclass(frozen=True)
class DecoderShape:
    """Sizes in elements; most_tokens bounds a step. loudness: groups of inputs whose largest square exceeds
    this times the row's mean of such have 15 bits, others 8."""

    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    rotary_dim: int
    intermediate: int
    vocabulary: int
    block_size: int
    most_tokens: int
    threads: int
    eps: float
    loudness: float = 0.0

    @property
    def kv_piece(self) -> int:
        """Bytes that a layer and a key head have of a block: keys, values and their scales (see attention.h)."""
        groups = -(-self.head_dim // GROUP)
        return self.block_size * (2 * groups * GROUP + 4 * (groups + 1))

    def why_not(self) -> str | None:
        """What keeps the C code from running this shape, or None."""
        widths = {
            "hidden size": self.hidden,
            "MLP size": self.intermediate,
            "attention width": self.heads * self.head_dim,
        }
        for name, width in widths.items():
            if width % 32:
                return f"the {name} {width} is no multiple of 32"
        if self.head_dim % _LANES or self.head_dim > _MOST_HEAD_DIM or self.rotary_dim % 2:
            return f"the head size {self.head_dim} is no multiple of {_LANES} up to {_MOST_HEAD_DIM}"
        if self.block_size % _LANES:
            return f"the block size {self.block_size} is no multiple of {_LANES}"
        return None


class Decoder:
    """Weights and scratch of one model on the CPU. One caller at a time.

    A row's results depend on its own tokens alone: not on the batch, on chunks, or on the number of threads.
    """

    def __init__(
        self,
        shape: DecoderShape,
        layers: list[LayerWeights],
        norm: Array,
        head: PackedMatrix,
        embedding: Array | None,
        cos_sin: Array,
        build: ctypes.CDLL | None = None,
    ) -> None:
        """norm: float32 [hidden]; embedding: float16 [vocabulary, hidden], or None to use the head; cos_sin: float32.

        Raises InvalidInput for a shape the code does not serve, CompilerMissing without a compiler.
        """
        self._handle: int | None = None
        reason = shape.why_not()
        if reason:
            raise InvalidInput(reason)
        self._library = _bind(build or library())
        if self._library.ingle_kv_piece(shape.head_dim, shape.block_size) != shape.kv_piece:
            raise KernelError("the layout of the KV cache differs between Python and C")
        self._kept: list[Any] = [layers, norm, head, embedding, cos_sin]
        self.shape = shape
        self._logits = np.empty((0, shape.vocabulary), np.float32)
        rows = (_Layer * len(layers))(*(_layer(layer) for layer in layers))
        self._kept.append(rows)
        native = _Shape(
            shape.hidden, len(layers), shape.heads, shape.kv_heads, shape.head_dim, shape.rotary_dim,
            shape.intermediate, shape.vocabulary, shape.block_size, shape.most_tokens,
            min(shape.threads, _MOST_THREADS),
            shape.eps, shape.loudness,
            ctypes.addressof(rows), _address(norm), _address(cos_sin), _matrix(head), _address(embedding),
        )  # fmt: skip
        self._handle = self._library.ingle_decoder_open(ctypes.byref(native))
        if not self._handle:
            raise KernelError("the CPU decoder got no memory or threads")

    def close(self) -> None:
        """End the threads, which may look at the weights for a moment after a step: they must go first."""
        if self._handle:
            self._library.ingle_decoder_close(self._handle)
            self._handle = None

    __del__ = close

    def step(
        self,
        ids: Array,
        positions: Array,
        slots: Array,
        tables: Array,
        starts: Array,
        lengths: Array,
        logit_rows: Array,
        kv: Array,
    ) -> Array:
        """float32 logits [R, vocabulary], good until the next step.

        ids, positions, slots: int64 [T]; tables: int32 [S, M]; starts: int32 [S + 1]; lengths: int32 [S]; logit_rows:
        int64 [R]; kv: uint8 [blocks, layers, Hk, kv_piece].
        """
        wanted = logit_rows.shape[0]
        if wanted > len(self._logits):
            # kept between steps: pages that are mapped anew each time cost more than the logits
            self._logits = np.empty((wanted, self.shape.vocabulary), np.float32)
        logits = self._logits[:wanted]
        native = _Step(
            ids.shape[0], lengths.shape[0], tables.shape[1], logit_rows.shape[0],
            _address(ids), _address(positions), _address(slots), _address(logit_rows),
            _address(tables), _address(starts), _address(lengths),
            _address(kv), kv.strides[0], _address(logits),
        )  # fmt: skip
        if self._library.ingle_decoder_step(self._handle, ctypes.byref(native)):
            raise InvalidInput(f"a step of {ids.shape[0]} tokens is over the {self.shape.most_tokens} allotted")
        return logits

    def hidden(self, row: int) -> Array:
        """float32 [hidden]: the last step's normed state behind logits row `row`."""
        out = np.empty(self.shape.hidden, np.float32)
        if self._library.ingle_decoder_hidden(self._handle, row, _address(out)):
            raise InvalidInput(f"the last step had no logits row {row}")
        return out

    def draw(self, logits: Array, draws: Draws) -> list[int]:
        """A token for each row of contiguous float32 logits [R, vocabulary]; see `kernels.sampling.draw`."""
        tokens = np.empty(logits.shape[0], np.int64)
        native = _Draw(
            _address(logits), _address(tokens), _address(draws.temperature), _address(draws.top_p),
            _address(draws.min_p), _address(draws.top_k), _address(draws.uniforms), *logits.shape,
        )  # fmt: skip
        if self._library.ingle_decoder_draw(self._handle, ctypes.byref(native)):
            raise InvalidInput(f"logits of {logits.shape[1]} tokens, not {self.shape.vocabulary}")
        return tokens.tolist()  # type: ignore[no-any-return]


def _address(array: Array | None) -> int | None:
    return None if array is None else array.ctypes.data


def _matrix(matrix: PackedMatrix) -> _Matrix:
    return _Matrix(
        _address(matrix.values), _address(matrix.scales), _address(matrix.bias),
        matrix.outputs, matrix.inputs, matrix.bits, matrix.scales.dtype == np.float16,
    )  # fmt: skip


def _layer(layer: LayerWeights) -> _Layer:
    return _Layer(
        _address(layer.attn_norm), _address(layer.mlp_norm), _address(layer.q_norm), _address(layer.k_norm),
        _matrix(layer.qkv), _matrix(layer.out), _matrix(layer.gate_up), _matrix(layer.down), layer.window,
    )  # fmt: skip


def _bind(native: ctypes.CDLL) -> ctypes.CDLL:
    native.ingle_decoder_open.restype = ctypes.c_void_p
    native.ingle_decoder_open.argtypes = [ctypes.c_void_p]
    native.ingle_decoder_close.argtypes = [ctypes.c_void_p]
    native.ingle_decoder_hidden.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_void_p]
    native.ingle_decoder_draw.argtypes = [ctypes.c_void_p, ctypes.c_void_p]
    native.ingle_decoder_step.argtypes = [ctypes.c_void_p, ctypes.c_void_p]
    native.ingle_kv_piece.restype = ctypes.c_int64
    native.ingle_kv_piece.argtypes = [ctypes.c_int, ctypes.c_int]
    for which, structure in enumerate((_Matrix, _Layer, _Shape, _Step, _Draw)):
        if native.ingle_sizes(which) != ctypes.sizeof(structure):
            raise KernelError(f"{structure.__name__} differs between Python and C")
    return native
