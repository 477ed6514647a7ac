"""The sampling fields that chat and completions share, checked against OpenAI's documented ranges.

The rule for length: `max_tokens` up to the context length is accepted and clamped to the room that the prompt leaves;
more is refused.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass

import msgspec

from data_plane.api.fields import Fields
from data_plane.api.parameters import Bound, Flag, Integer, ModelLimits, Number, OptionalInteger, Parameter
from data_plane.engine.messages import SamplingParams
from data_plane.errors import RequestError

MOST_CHOICES = 128
MOST_STOPS = 4
MOST_STOP_CHARACTERS = 1024
MOST_BIASES = 1024
_NEARLY_GREEDY = 1e-4
_INT64 = 1 << 63
MOST_STOP_TOKENS = 64
LARGEST_BIAS = 100

TEMPERATURE = Number("temperature", 1.0, 0.0, 2.0)
TOP_P = Number("top_p", 1.0, 0.0, 1.0)
TOP_K = Integer("top_k", 0, -1, Bound.VOCABULARY)
MIN_P = Number("min_p", 0.0, 0.0, 1.0)
REPETITION_PENALTY = Number("repetition_penalty", 1.0, 0.01, 10.0)
PRESENCE_PENALTY = Number("presence_penalty", 0.0, -2.0, 2.0)
FREQUENCY_PENALTY = Number("frequency_penalty", 0.0, -2.0, 2.0)
SEED = OptionalInteger("seed", -_INT64, _INT64 - 1)
N = Integer("n", 1, 1, MOST_CHOICES)
MAX_TOKENS = OptionalInteger("max_tokens", 1, Bound.CONTEXT)
MAX_COMPLETION_TOKENS = OptionalInteger("max_completion_tokens", 1, Bound.CONTEXT)
STREAM = Flag("stream")
IGNORE_EOS = Flag("ignore_eos")
# what Responses takes of these, and what the other two do
COMMON: tuple[Parameter, ...] = (TEMPERATURE, TOP_P, TOP_K, MIN_P, REPETITION_PENALTY, SEED, STREAM)
SAMPLING: tuple[Parameter, ...] = (
    *COMMON, PRESENCE_PENALTY, FREQUENCY_PENALTY, N, MAX_TOKENS, MAX_COMPLETION_TOKENS, IGNORE_EOS,
)  # fmt: skip


@dataclass(frozen=True)
class Generation:
    """How to generate: the parameters of choice 0, how many choices, and what ends the text."""

    params: SamplingParams
    choices: int
    stops: tuple[str, ...]
    stream: bool
    include_usage: bool

    def for_choice(self, choice: int, room: int) -> SamplingParams:
        """The parameters of one choice, with max_tokens cut to `room`."""
        cut = min(self.params.max_tokens, room)
        return msgspec.structs.replace(self.params, choice=choice, max_tokens=cut)


def read_generation(
    fields: Fields,
    limits: ModelLimits,
    *,
    logprobs: int,
    default_max_tokens: int,
    grammar: str = "",
    score_prompt: bool = False,
) -> Generation:
    """Raises RequestError naming the first field that is off. `logprobs`: how many alternatives, -1 for none.

    score_prompt: the same for the prompt's tokens.
    """
    temperature = TEMPERATURE.read(fields)
    seed = SEED.read(fields, limits)
    stream = STREAM.read(fields)
    params = SamplingParams(
        max_tokens=_max_tokens(fields, limits, default_max_tokens),
        temperature=0.0 if temperature < _NEARLY_GREEDY else temperature,
        top_p=TOP_P.read(fields),
        top_k=max(TOP_K.read(fields, limits), 0),
        min_p=MIN_P.read(fields),
        repetition_penalty=REPETITION_PENALTY.read(fields),
        presence_penalty=PRESENCE_PENALTY.read(fields),
        frequency_penalty=FREQUENCY_PENALTY.read(fields),
        seed=secrets.randbits(63) if seed is None else seed,
        logprobs=logprobs,
        stop_token_ids=_stop_token_ids(fields, limits),
        ignore_eos=IGNORE_EOS.read(fields),
        logit_bias=_logit_bias(fields, limits),
        grammar=grammar,
        prompt_logprobs=logprobs if score_prompt else -1,
    )
    return Generation(
        params=params,
        choices=N.read(fields, limits),
        stops=_stops(fields),
        stream=stream,
        include_usage=_include_usage(fields, stream),
    )


def _max_tokens(fields: Fields, limits: ModelLimits, default: int) -> int:
    newer = MAX_COMPLETION_TOKENS.read(fields, limits)
    older = MAX_TOKENS.read(fields, limits)
    if newer is not None:
        return newer
    return default if older is None else older


def _stops(fields: Fields) -> tuple[str, ...]:
    value = fields.raw("stop")
    if value is None:
        return ()
    stops = [value] if isinstance(value, str) else value
    if not isinstance(stops, list) or not all(isinstance(stop, str) for stop in stops):
        raise RequestError("stop must be a string or an array of strings", param="stop")
    if not 1 <= len(stops) <= MOST_STOPS:
        raise RequestError(f"stop must hold 1 to {MOST_STOPS} strings, not {len(stops)}", param="stop")
    if any(not 1 <= len(stop) <= MOST_STOP_CHARACTERS for stop in stops):
        raise RequestError(f"each stop string must have 1 to {MOST_STOP_CHARACTERS} characters", param="stop")
    return tuple(dict.fromkeys(stops))


def _stop_token_ids(fields: Fields, limits: ModelLimits) -> tuple[int, ...]:
    value = fields.raw("stop_token_ids")
    if value is None:
        return ()
    if not isinstance(value, list) or len(value) > MOST_STOP_TOKENS:
        raise RequestError(
            f"stop_token_ids must be an array of at most {MOST_STOP_TOKENS} integers", param="stop_token_ids"
        )
    return tuple(check_token(token, limits, "stop_token_ids") for token in value)


def check_token(token: object, limits: ModelLimits, param: str) -> int:
    if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < limits.vocab_size:
        raise RequestError(f"{param} must hold token ids from 0 to {limits.vocab_size - 1}", param=param)
    return token


def _logit_bias(fields: Fields, limits: ModelLimits) -> dict[int, float]:
    value = fields.raw("logit_bias")
    if value is None:
        return {}
    if not isinstance(value, dict) or len(value) > MOST_BIASES:
        raise RequestError(f"logit_bias must be an object of at most {MOST_BIASES} entries", param="logit_bias")
    biases: dict[int, float] = {}
    for key, bias in value.items():
        if not (key.isascii() and key.isdecimal() and int(key) < limits.vocab_size):
            raise RequestError(f"logit_bias keys must be token ids below {limits.vocab_size}", param="logit_bias")
        if isinstance(bias, bool) or not isinstance(bias, int | float) or not abs(bias) <= LARGEST_BIAS:
            raise RequestError(
                f"logit_bias values must be numbers from -{LARGEST_BIAS} to {LARGEST_BIAS}", param="logit_bias"
            )
        biases[int(key)] = float(bias)
    return biases


def _include_usage(fields: Fields, stream: bool) -> bool:
    options = fields.raw("stream_options")
    if options is None:
        return False
    if not stream:
        raise RequestError("stream_options needs stream: true", param="stream_options")
    if not isinstance(options, dict):
        raise RequestError("stream_options must be an object", param="stream_options")
    include = options.get("include_usage")
    if include is not None and not isinstance(include, bool):
        raise RequestError("stream_options.include_usage must be true or false", param="stream_options")
    return bool(include)
