"""Whatever bytes come in whatever pieces, whatever ends them: a stream is the plain reply, with nothing left behind."""

from __future__ import annotations

import codecs
import functools
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from data_plane.api.pipeline import Delta, Reading, _Choice
from data_plane.api.sampling import Generation
from data_plane.engine.messages import Output, SamplingParams
from data_plane.text.tokenizer import TextTokenizer, from_folder
from tests.data_plane.replica import Replica, eventually
from tests.data_plane.text.tokenizers_made import byte_level_folder

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
PARAMS = SamplingParams(max_tokens=100)
TEXT = st.text(max_size=40)
BYTES = st.one_of(
    TEXT.map(str.encode),
    st.binary(max_size=30),
    st.lists(st.one_of(TEXT.map(str.encode), st.binary(max_size=3)), max_size=6).map(b"".join),
)


@functools.cache
def byte_tokens(folder: Path) -> tuple[TextTokenizer, dict[int, int]]:
    """A tokenizer, and its token for each byte."""
    byte_level_folder(folder)
    tokenizer = from_folder(folder)
    ids = {tokenizer.bytes_of(id)[0]: id for id in range(tokenizer.vocab_size) if len(tokenizer.bytes_of(id)) == 1}
    assert len(ids) == 256
    return tokenizer, ids


def expected(raw: bytes, stops: tuple[str, ...]) -> tuple[str, str]:
    """What is right, by other means: decoded at once, cut before the stop that is complete first."""
    text = codecs.getincrementaldecoder("utf-8")("replace").decode(raw)
    for end in range(len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            return text[: end - max(map(len, found))], "stop"
    return text, "length"


@given(data=st.data(), raw=BYTES)
def test_any_bytes_in_any_pieces_with_any_stops(
    data: st.DataObject, raw: bytes, tmp_path_factory: pytest.TempPathFactory
) -> None:
    tokenizer, ids = byte_tokens(tmp_path_factory.getbasetemp() / "bytes")
    text = raw.decode("utf-8", "replace")
    within = st.tuples(st.integers(0, len(text)), st.integers(1, 6)).map(lambda cut: text[cut[0] :][: cut[1]])
    stops = tuple(data.draw(st.lists(st.one_of(within, st.text(min_size=1, max_size=4)), max_size=4)))
    assume(all(stops))
    choice = _Choice(0, tokenizer, Generation(PARAMS, 1, stops, False, False), Reading())
    deltas: list[Delta] = []
    rest = list(raw)
    while rest:
        count = data.draw(st.integers(1, len(rest)))
        tokens, rest = [ids[byte] for byte in rest[:count]], rest[count:]
        deltas.append(choice.feed(Output("0", tokens, None if rest else "length")))
        if deltas[-1].finish is not None:
            break
    if not raw:
        deltas.append(choice.feed(Output("0", [], "length")))
    assert ("".join(delta.text for delta in deltas), deltas[-1].finish) == expected(raw, stops)
    assert [delta.finish for delta in deltas[:-1]] == [None] * (len(deltas) - 1)


REQUEST: dict[str, st.SearchStrategy[Any]] = {
    "seed": st.integers(0, 1 << 40),
    "temperature": st.sampled_from([0, 0.7, 1.5]),
    "max_tokens": st.integers(1, 40),
    "n": st.integers(1, 3),
    "top_p": st.sampled_from([1, 0.9]),
    "ignore_eos": st.booleans(),
}
QUIET = settings(max_examples=25, suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture])


@QUIET
@given(prompt=st.text(min_size=1, max_size=60), fields=st.fixed_dictionaries(REQUEST), data=st.data())
def test_a_stream_is_the_plain_reply(prompt: str, fields: dict[str, Any], data: st.DataObject, small: Replica) -> None:
    """With stops out of the reply itself; and no U+FFFD that is not in the model's own bytes."""
    body = {"model": "tiny", "messages": [{"role": "user", "content": prompt}], **fields}
    told = small.post(CHAT, {**body, "logprobs": True}).json()["choices"]
    for choice in told:
        raw = b"".join(bytes(entry["bytes"]) for entry in choice["logprobs"]["content"])
        assert choice["message"]["content"] == codecs.getincrementaldecoder("utf-8")("replace").decode(raw)
    text = told[0]["message"]["content"]
    cuts = st.tuples(st.integers(0, max(len(text) - 1, 0)), st.integers(1, 5))
    stops = [text[at : at + size] for at, size in data.draw(st.lists(cuts, max_size=4))]
    stops = [stop for stop in stops if stop]
    if stops:
        body["stop"] = stops
    plain = small.post(CHAT, body).json()
    stream = small.stream(CHAT, {**body, "stream_options": {"include_usage": True}})
    for choice in plain["choices"]:
        assert stream.text(choice["index"]) == choice["message"]["content"]
        assert stream.finishes(choice["index"]) == [choice["finish_reason"]]
        assert not any(stop in choice["message"]["content"] for stop in stops)
    assert stream.frames[-1]["usage"]["prompt_tokens"] == plain["usage"]["prompt_tokens"]
    eventually(small.idle)


@QUIET
@given(
    fields=st.fixed_dictionaries({**REQUEST, "max_tokens": st.integers(50, 3000), "ignore_eos": st.just(True)}),
    read=st.integers(0, 20_000), others=st.integers(0, 6),
)  # fmt: skip
def test_a_client_may_leave_at_any_byte(fields: dict[str, Any], read: int, others: int, small: Replica) -> None:
    body = {"messages": [{"role": "user", "content": "Write."}], **fields}
    connections = [small.open_stream({**body, "seed": number}, "Connection: close") for number in range(1 + others)]
    left = read
    while left and (piece := connections[0].recv(left)):
        left -= len(piece)
    for connection in connections:
        connection.close()
    eventually(small.idle)
    assert len(small.chat("Hello", max_tokens=3, ignore_eos=True)["choices"]) == 1
