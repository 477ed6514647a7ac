"""A sequence: one choice of one request, from its prompt to its last token."""

from __future__ import annotations

import hashlib
from array import array
from dataclasses import dataclass, field
from typing import Any

from data_plane.engine.messages import SamplingParams, TokenLogprob


@dataclass(eq=False)
class Sequence:
    """`num_computed` tokens have their keys and values in `blocks`; the scheduler chases `len(tokens)`.

    tokens: the prompt, then what was generated. blocks: ids of cache blocks in order. hashes: the chain over full
    blocks, as far as it was asked for. matcher: llguidance's state of a constrained reply.
    scored: the log-probabilities of the prompt's tokens from the second on, as far as they are known.
    chunks: when parts of the prompt ran, and of how many tokens. preempted: how often since its last output.
    """

    id: str
    tokens: list[int]
    prompt_len: int
    params: SamplingParams
    salt: bytes
    num_computed: int = 0
    cached_tokens: int = 0
    scheduled_at: float = 0.0
    row: int = -1
    published: int = 0
    reported: bool = False
    preempted: int = 0
    matcher: Any = None
    blocks: list[int] = field(default_factory=list)
    hashes: list[bytes] = field(default_factory=list)
    scored: list[TokenLogprob] = field(default_factory=list)
    chunks: list[tuple[float, int]] = field(default_factory=list)

    @property
    def unscored(self) -> bool:
        """Whether log-probabilities of the prompt are wanted that have not been computed."""
        return self.params.prompt_logprobs >= 0 and len(self.scored) < self.prompt_len - 1

    @property
    def num_tokens(self) -> int:
        return len(self.tokens)

    @property
    def num_generated(self) -> int:
        return len(self.tokens) - self.prompt_len

    def hash_blocks(self, count: int, block_size: int) -> list[bytes]:
        """The hashes of the first `count` full blocks: SHA-256 over the parent's hash, the salt and the block's tokens.

        The parts are framed by length and the tokens are 32-bit, so that no two inputs write the same bytes.
        """
        while len(self.hashes) < count:
            at = len(self.hashes) * block_size
            parent = self.hashes[-1] if self.hashes else b""
            digest = hashlib.sha256()
            for part in (parent, self.salt, array("i", self.tokens[at : at + block_size]).tobytes()):
                digest.update(len(part).to_bytes(4, "little"))
                digest.update(part)
            self.hashes.append(digest.digest())
        return self.hashes[:count]
