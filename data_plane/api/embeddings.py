"""POST /v1/embeddings: vectors of unit length, from an encoder or from a decoder's last token."""

from __future__ import annotations

import asyncio
import base64
import itertools
import time
from typing import Any

import numpy as np
from aiohttp import web

from data_plane.api.context import ALWAYS, REPLICA, Replica, dump, header_bytes
from data_plane.api.fields import Fields
from data_plane.api.pipeline import failure
from data_plane.api.sampling import check_token
from data_plane.engine.messages import Output, SamplingParams
from data_plane.errors import RequestError
from data_plane.observe import RequestTimes

MOST_INPUTS = 2048
MOST_TOKENS = 300_000
FORMS = ("float", "base64")
_numbers = itertools.count()


async def embeddings(request: web.Request) -> web.Response:
    replica = request.app[REPLICA]
    fields = Fields.parse(await request.read())
    model = fields.string("model")
    replica.check_model(model, request.headers)
    form = fields.raw("encoding_format") or "float"
    if form not in FORMS:
        raise RequestError("encoding_format must be float or base64", param="encoding_format")
    fields.refuse("dimensions", (), "this model's vectors cannot be shortened: leave dimensions out")
    texts = await _read_inputs(fields, replica)
    span = replica.telemetry.start_span("embeddings", replica.name, request.headers)
    request["accounted"] = True
    error, started = "", request["received_at"]
    total = sum(map(len, texts))
    try:
        vectors = await _embed(replica, texts, header_bytes(request.headers.get("x-ingle-cache-salt", "")))
    except RequestError as failure:
        error = failure.code or "invalid_request"
        raise
    except asyncio.CancelledError:
        error = "cancelled"
        raise
    finally:
        times = RequestTimes(started, 0.0, 0.0, time.monotonic())
        replica.telemetry.finish(span, "embeddings", times, total, 0, error)
    data = [
        {"object": "embedding", "index": index, "embedding": _encoded(vector, form)}
        for index, vector in enumerate(vectors)
    ]
    usage = {"prompt_tokens": total, "total_tokens": total}
    metered = {"prompt_tokens": total, "completion_tokens": 0, "cached_tokens": 0}
    headers = {"x-ingle-usage": dump(metered)} if request.headers.get("x-ingle-usage") else {}
    body = {"object": "list", "data": data, "model": model, "usage": usage}
    return web.json_response(body, headers=headers, dumps=dump)


async def _read_inputs(fields: Fields, replica: Replica) -> list[list[int]]:
    """A string, an array of strings, an array of token ids, or an array of such arrays; as token ids."""
    value = fields.raw("input")
    if isinstance(value, str) or (isinstance(value, list) and value and not isinstance(value[0], str | list)):
        value = [value]
    if not isinstance(value, list) or not value:
        raise RequestError("input must be a string or an array of strings or token ids", param="input")
    if len(value) > MOST_INPUTS:
        raise RequestError(f"input must hold at most {MOST_INPUTS} texts, not {len(value)}", param="input")
    for item in value:
        if isinstance(item, str):
            replica.check_characters(item, "input")

    def encode() -> list[list[int]]:
        return [_tokens(item, replica) for item in value]

    texts: list[list[int]] = await replica.off_loop(ALWAYS, encode)
    if sum(map(len, texts)) > MOST_TOKENS:
        raise RequestError(f"input must hold at most {MOST_TOKENS} tokens in all", param="input")
    return texts


def _tokens(item: Any, replica: Replica) -> list[int]:
    if isinstance(item, str):
        if not item:
            raise RequestError("input must not hold empty texts", param="input")
        tokens = replica.tokenizer.encode_whole(item)
    elif isinstance(item, list) and item:
        tokens = [check_token(token, replica.limits, "input") for token in item]
    else:
        raise RequestError("input must be a string or an array of strings or token ids", param="input")
    replica.check_tokens(tokens, "input")
    most = replica.ready.max_model_len
    if len(tokens) > most:
        raise RequestError(
            f"this model takes {most} tokens a text; one has {len(tokens)}",
            param="input",
            code="context_length_exceeded",
        )
    return tokens


async def _embed(replica: Replica, texts: list[list[int]], salt: bytes) -> list[Any]:
    """One vector a text, in order. Whatever ends this, nothing is left running."""
    outputs: asyncio.Queue[Output] = asyncio.Queue()
    params = SamplingParams(max_tokens=1, temperature=0.0, embed=True)
    pending: dict[str, int] = {}
    vectors: list[Any] = [None] * len(texts)
    try:
        for index, tokens in enumerate(texts):
            id = f"e{next(_numbers)}"
            pending[id] = index
            replica.engine.submit(id, tokens, params, salt, outputs.put_nowait)
        while pending:
            output = await outputs.get()
            if output.finish == "error":
                raise failure(output)
            vectors[pending.pop(output.id)] = _unit(np.frombuffer(output.vector, np.float32))
        return vectors
    finally:
        replica.engine.abort(list(pending))


def _unit(vector: Any) -> Any:
    length = float(np.linalg.norm(vector))
    return vector / length if length > 0 else vector


def _encoded(vector: Any, form: str) -> Any:
    if form == "base64":
        return base64.b64encode(np.ascontiguousarray(vector, "<f4").tobytes()).decode()
    return [float(value) for value in vector]
