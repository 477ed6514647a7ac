"""Log-probabilities in OpenAI's chat shape."""

from __future__ import annotations

from typing import Any

from data_plane.engine.messages import TokenLogprob
from data_plane.text.tokenizer import TextTokenizer


def entries(tokenizer: TextTokenizer, logprobs: list[TokenLogprob]) -> list[dict[str, Any]]:
    """One entry a token, with its bytes and its likeliest rivals."""

    def entry(token: int, logprob: float) -> dict[str, Any]:
        raw = tokenizer.bytes_of(token)
        return {"token": raw.decode("utf-8", "replace"), "logprob": logprob, "bytes": list(raw)}

    return [
        {**entry(item.token, item.logprob), "top_logprobs": [entry(*rival) for rival in item.top]} for item in logprobs
    ]
