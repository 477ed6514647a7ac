"""Grammars inside the engine: compiled off the step loop, masks computed beside the model's step."""

from __future__ import annotations

import time
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from data_plane.engine.request import Sequence

Array = np.ndarray[Any, Any]
COMPILE_SECONDS = 10.0


class Grammars:
    """Compiles the grammars of waiting sequences. The tokenizer is loaded when there is time."""

    def __init__(self, model: Path, vocab_size: int, eos_token_ids: tuple[int, ...]) -> None:
        self._model = model
        self._vocab_size = vocab_size
        self._eos = eos_token_ids
        self._tokenizer: Any = None
        self._warmed = False
        self._compiler = ThreadPoolExecutor(1, "grammar-compiler")
        self._masks = ThreadPoolExecutor(1, "grammar-masks")
        self._pending: dict[str, tuple[Sequence, Future[Any], float]] = {}

    @property
    def pending(self) -> int:
        return len(self._pending)

    def warm(self) -> None:
        """Load the tokenizer beside an idle loop, once: the first grammar will then hold nobody up."""
        if not self._warmed:
            self._warmed = True
            self._compiler.submit(self._loaded)

    def compile(self, seq: Sequence) -> None:
        """Begin; the sequence comes back from `ready` when it is done."""
        future = self._compiler.submit(self._compile, seq.params.grammar)
        self._pending[seq.id] = (seq, future, time.monotonic() + COMPILE_SECONDS)

    def forget(self, id: str) -> bool:
        entry = self._pending.pop(id, None)
        if entry is not None:
            entry[1].cancel()
        return entry is not None

    def ready(self) -> list[tuple[Sequence, str]]:
        """Sequences whose grammar is compiled, with an empty string, or failed, with the reason."""
        done: list[tuple[Sequence, str]] = []
        now = time.monotonic()
        for id, (seq, future, deadline) in list(self._pending.items()):
            if not future.done() and now < deadline:
                continue
            del self._pending[id]
            if not future.done():
                future.cancel()
                done.append((seq, f"the grammar took over {COMPILE_SECONDS:.0f} s to compile"))
                continue
            error = future.exception()
            if error is None:
                seq.matcher = future.result()
                reason = seq.matcher.get_error()
            else:
                reason = type(error).__name__
            done.append((seq, f"the grammar cannot be compiled: {reason}"[:300] if reason else ""))
        return done

    def _compile(self, grammar: str) -> Any:
        from llguidance import LLMatcher

        from data_plane.text.grammars import limits

        return LLMatcher(self._loaded(), grammar, log_level=0, limits=limits())

    def _loaded(self) -> Any:
        if self._tokenizer is None:
            self._tokenizer = self._load()
        return self._tokenizer

    def _load(self) -> Any:
        from llguidance import LLTokenizer, TokenizerWrapper

        from data_plane.text.load import load_text

        tokenizer, _ = load_text(self._model)
        words = [tokenizer.bytes_of(id) for id in range(self._vocab_size)]
        special = [id for id, word in enumerate(words) if not word]
        eos = self._eos[0] if self._eos else 0

        class Vocabulary:
            eos_token_id = eos
            bos_token_id = None
            # a control token is no text: it gets a name that no text can spell
            tokens = [word or b"\xff<%d>" % id for id, word in enumerate(words)]  # noqa: RUF012
            special_token_ids = special

            def __call__(self, text: bytes | str) -> list[int]:
                return tokenizer.encode(text if isinstance(text, str) else text.decode("utf-8", "replace"))

        return LLTokenizer(TokenizerWrapper(Vocabulary()), n_vocab=self._vocab_size, eos_token=list(self._eos) or [eos])

    def begin_masks(self, seqs: list[Sequence]) -> dict[int, Future[bytes]]:
        """Start computing the masks of constrained rows while the model runs."""
        return {
            row: self._masks.submit(seq.matcher.compute_bitmask)
            for row, seq in enumerate(seqs)
            if seq.matcher is not None
        }


def apply_mask(row: Array, mask: bytes) -> None:
    """Make what the grammar excludes impossible. row: float32 [V]; mask: a bit a token, least significant first."""
    allowed = np.unpackbits(np.frombuffer(mask, np.uint8), bitorder="little")[: len(row)]
    if len(allowed) < len(row):
        row[len(allowed) :] = -np.inf
    row[: len(allowed)][allowed == 0] = -np.inf
