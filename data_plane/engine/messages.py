"""What the HTTP process and the engine process say to each other, as msgpack frames on a Unix socket.

A frame is a little-endian 32-bit length and one msgpack message. Nothing on this wire can run code.
"""

from __future__ import annotations

import struct
from typing import Literal

import msgspec

FRAME = struct.Struct("<I")
MOST_FRAME_BYTES = 256 << 20

Rung = Literal["ember", "asleep", "hot"]
"""ember: all is imported, nothing loaded. asleep: weights are in host memory, the KV cache is gone. hot: it serves."""

FinishReason = Literal["stop", "length", "abort", "error", "refused"]


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """How to choose tokens. temperature 0 is greedy; top_k 0, top_p 1 and min_p 0 are off; logprobs -1 is off.

    embed: no tokens are wanted but the hidden state of the prompt's last one. prompt_logprobs: as logprobs, for the
    prompt's own tokens.
    """

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int = 0
    choice: int = 0
    logprobs: int = -1
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logit_bias: dict[int, float] = {}
    grammar: str = ""
    embed: bool = False
    prompt_logprobs: int = -1


class Add(msgspec.Struct, frozen=True, tag="add", array_like=True):
    """A new sequence. `salt` keeps one tenant's prefix cache from another's."""

    id: str
    prompt: list[int]
    params: SamplingParams
    salt: bytes = b""


class Abort(msgspec.Struct, frozen=True, tag="abort", array_like=True):
    ids: list[str]


class Stop(msgspec.Struct, frozen=True, tag="stop", array_like=True):
    """End the engine process; whatever runs is dropped."""


class Warm(msgspec.Struct, frozen=True, tag="warm", array_like=True):
    """Go to a rung. Told only while nothing runs."""

    rung: Rung


class TokenLogprob(msgspec.Struct, frozen=True, array_like=True):
    """Natural log-probabilities of the chosen token and of the likeliest, by the model before sampling changes."""

    token: int
    logprob: float
    top: list[tuple[int, float]]


class Output(msgspec.Struct, frozen=True, tag="output", array_like=True):
    """A sequence's new tokens.

    finish: "error" is ours, "refused" is the request's own fault; both have an `error`. scheduled_at: CLOCK_MONOTONIC
    seconds of its first step, and prompt_logprobs, of the prompt's tokens but the first: on the first output only, as
    are chunks, the parts in which the prompt ran (when, how many tokens). preempted: how often since the last output.
    """

    id: str
    tokens: list[int]
    finish: FinishReason | None = None
    logprobs: list[TokenLogprob] | None = None
    cached_tokens: int = 0
    scheduled_at: float = 0.0
    error: str = ""
    vector: bytes = b""
    prompt_logprobs: list[TokenLogprob] | None = None
    chunks: list[tuple[float, int]] | None = None
    preempted: int = 0


class Ready(msgspec.Struct, frozen=True, tag="ready", array_like=True):
    """What was loaded. Sizes in tokens; `phases` in seconds."""

    device: str
    precision: str
    kernels: str
    max_model_len: int
    vocab_size: int
    num_blocks: int
    block_size: int
    eos_token_ids: list[int]
    phases: dict[str, float]
    generates: bool = True


class Warmed(msgspec.Struct, frozen=True, tag="warmed", array_like=True):
    """The engine is at a rung now. `ready` once anything was loaded; `phases`: seconds of the way to here."""

    rung: Rung
    ready: Ready | None
    phases: dict[str, float]


class Failed(msgspec.Struct, frozen=True, tag="failed", array_like=True):
    """The engine could not start: an `errors.StartError` by its code."""

    code: str
    message: str


class Counters(msgspec.Struct, kw_only=True, array_like=True):
    """Totals since start."""

    steps: int = 0
    prompt_tokens: int = 0
    generated_tokens: int = 0
    cached_tokens: int = 0
    prefix_queries: int = 0
    preemptions: int = 0
    step_errors: int = 0
    out_of_memory: int = 0


class Progress(msgspec.Struct, frozen=True, tag="progress", array_like=True):
    """Said after every step and at least twice a second when idle: proof that the loop turns."""

    running: int
    waiting: int
    blocks_used: int
    blocks_cached: int
    step_s: float
    batch_tokens: int
    bytes_moved: int
    counters: Counters


ToEngine = Add | Abort | Warm | Stop
FromEngine = Output | Warmed | Failed | Progress

encoder = msgspec.msgpack.Encoder()
to_engine_decoder = msgspec.msgpack.Decoder(ToEngine)
from_engine_decoder = msgspec.msgpack.Decoder(list[FromEngine])


def frame(message: object) -> bytes:
    body = encoder.encode(message)
    return FRAME.pack(len(body)) + body
