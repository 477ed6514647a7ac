"""A language model of a few lines whose every token depends on every token before it, read through the paged cache.

Its cache holds token and position of each slot. The next token is a checksum of the context, so any slip of a block
table, a slot, a position or a reused block changes the text from there on, and `continuation` says what is right.
"""

from __future__ import annotations

import zlib
from pathlib import Path
from typing import Any

import numpy as np

from data_plane.engine.grammar import Grammars
from data_plane.engine.loader import Loaded
from data_plane.engine.runner import Runner
from data_plane.engine.scheduler import SchedulerLimits
from data_plane.models.batch import Array, Batch
from data_plane.models.spec import ModelSpec, RopeSpec
from kernels.sampling import Draws, draw

BLOCK = 8
VOCABULARY = 1000
POISON = 666
UNWRITTEN = -1


class PoisonedStep(RuntimeError):
    """What the model raises for a batch that holds the poison token."""


class ContextModel:
    """See `registry.Model`."""

    def __init__(self) -> None:
        self.kv_token_bytes = self.own_kv_token_bytes = 16
        self.steps = 0
        self.spec = ModelSpec(
            architecture="llama", hidden_size=32, num_layers=1, num_heads=1, num_kv_heads=1, head_dim=2,
            intermediate_size=32, vocab_size=VOCABULARY, norm_eps=1e-5, max_model_len=4096, rope=RopeSpec(rotary_dim=2),
            tied_head=True, eos_token_ids=(2,),
        )  # fmt: skip

    def check(self) -> None:
        pass

    def new_cache(self, num_blocks: int, block_size: int) -> Array:
        return np.full((num_blocks * block_size, 2), UNWRITTEN, np.int64)

    def __call__(self, batch: Batch, kv: Array) -> Array:
        self.steps += 1
        if POISON in batch.tokens:
            raise PoisonedStep
        assert len(set(batch.slot_mapping.tolist())) == len(batch.slot_mapping), "two tokens share a slot"
        kv[batch.slot_mapping, 0] = batch.tokens
        kv[batch.slot_mapping, 1] = batch.positions
        logits = np.zeros((len(batch.logit_rows), VOCABULARY), np.float32)
        for place, row in enumerate(batch.logit_rows):
            owner = int(np.searchsorted(batch.cu_seqlens_q, row, side="right")) - 1
            positions = np.arange(int(batch.positions[row]) + 1)
            slots = batch.block_tables[owner, positions // BLOCK].astype(np.int64) * BLOCK + positions % BLOCK
            assert (kv[slots, 1] == positions).all(), "the context holds what is not of this place"
            logits[place, next_token(kv[slots, 0].tolist())] = 10
        return logits

    def hidden(self, row: int) -> Array:
        return np.zeros(self.spec.hidden_size, np.float32)

    def draw(self, logits: Array, draws: Draws) -> list[int]:
        return draw(logits, draws)

    def weight_bytes(self) -> int:
        return 0

    def release(self) -> None: ...

    def restore(self) -> None: ...


def next_token(context: list[int]) -> int:
    """10 … 659: neither the end-of-text token nor the poison."""
    return 10 + zlib.crc32(np.array(context, np.int64).tobytes()) % 650


def continuation(prompt: list[int], count: int) -> list[int]:
    """What `count` greedy tokens after `prompt` must be."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(next_token(tokens))
    return tokens[len(prompt) :]


def load_context_model(*, tokens: int = 4096, **limits: Any) -> Loaded:
    settings = {"max_num_seqs": 16, "max_batched_tokens": 96, "prefill_chunk": 32, **limits}
    model = ContextModel()
    grammars = Grammars(Path("unused.gguf"), model.spec.vocab_size, model.spec.eos_token_ids)
    runner = Runner(
        model,
        grammars,
        num_blocks=tokens // BLOCK,
        block_size=BLOCK,
        max_num_seqs=settings["max_num_seqs"],
        max_len=tokens,
    )
    return Loaded(
        runner=runner,
        grammars=grammars,
        limits=SchedulerLimits(block_size=BLOCK, **settings),
        spec=model.spec,
        device="cpu",
        precision="exact",
        kernels="none",
        max_model_len=tokens,
        num_blocks=tokens // BLOCK,
    )
