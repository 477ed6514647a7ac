"""What is refused, with what: each names its field, and nobody else notices."""

from __future__ import annotations

import gzip
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.data_plane import tiny
from tests.data_plane.replica import Replica, Stream, running
from tests.data_plane.text.tokenizers_made import byte_level_fields

CHAT, COMPLETIONS, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
HELLO = [{"role": "user", "content": "Hello"}]
BIG = 9223372036854775808

CHAT_REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": -1}, "max_tokens"),
    ({"max_tokens": "8"}, "max_tokens"),
    ({"max_tokens": 1_000_000_000}, "max_tokens"),
    ({"max_tokens": 1.5}, "max_tokens"),
    ({"max_tokens": True}, "max_tokens"),
    ({"max_completion_tokens": 0}, "max_completion_tokens"),
    ({"logit_bias": {"99999999": 5}}, "logit_bias"),
    ({"logit_bias": {"-1": 5}}, "logit_bias"),
    ({"logit_bias": {"abc": 5}}, "logit_bias"),
    ({"logit_bias": {"²": 5}}, "logit_bias"),
    ({"logit_bias": {"5": 101}}, "logit_bias"),
    ({"logit_bias": {"5": "1"}}, "logit_bias"),
    ({"logit_bias": [5]}, "logit_bias"),
    ({"logit_bias": {str(n): 1 for n in range(2000)}}, "logit_bias"),
    ({"temperature": 3}, "temperature"),
    ({"temperature": -0.1}, "temperature"),
    ({"temperature": "warm"}, "temperature"),
    ({"top_p": 1.0001}, "top_p"),
    ({"top_p": -0.1}, "top_p"),
    ({"min_p": 2}, "min_p"),
    ({"top_k": 1 << 40}, "top_k"),
    ({"repetition_penalty": 0}, "repetition_penalty"),
    ({"frequency_penalty": 2.1}, "frequency_penalty"),
    ({"presence_penalty": -2.1}, "presence_penalty"),
    ({"seed": BIG}, "seed"),
    ({"seed": 1.5}, "seed"),
    ({"n": "2"}, "n"),
    ({"n": 1_000_000_000}, "n"),
    ({"n": 129}, "n"),
    ({"n": 0}, "n"),
    ({"n": -1}, "n"),
    ({"stream": "yes"}, "stream"),
    ({"stream_options": {"include_usage": True}}, "stream_options"),
    ({"stream": True, "stream_options": {"include_usage": 1}}, "stream_options"),
    ({"stream": True, "stream_options": []}, "stream_options"),
    ({"top_logprobs": 3}, "top_logprobs"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    ({"logprobs": 2}, "logprobs"),
    ({"stop_token_ids": [1 << 40]}, "stop_token_ids"),
    ({"stop_token_ids": [1] * 100}, "stop_token_ids"),
    ({"functions": [{"name": "f"}]}, "functions"),
    ({"audio": {"voice": "x"}}, "audio"),
    ({"modalities": ["audio"]}, "modalities"),
    ({"messages": []}, "messages"),
    ({"messages": "Hello"}, "messages"),
    ({"messages": None}, "messages"),
    ({"messages": [1]}, "messages[0]"),
    ({"messages": [{"role": "wizard", "content": "x"}]}, "messages[0].role"),
    ({"messages": [*HELLO, {"role": "user"}]}, "messages[1].content"),
    ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
     "messages[0].content[0]"),
    ({"messages": [{"role": "user", "content": [{"type": "text", "text": 1}]}]}, "messages[0].content[0].text"),
    ({"messages": HELLO * 5000}, "messages"),
    ({"model": 7}, "model"),
    ({"model": ""}, "model"),
]  # fmt: skip

COMPLETIONS_REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"prompt": ["a", "b"], "n": 2, "best_of": 3}, "best_of"),
    ({"best_of": 1, "n": 2}, "best_of"),
    ({"best_of": 2, "stream": True}, "best_of"),
    ({"logprobs": 6}, "logprobs"),
    ({"logprobs": True}, "logprobs"),
    ({"suffix": "end"}, "suffix"),
    ({"prompt": None}, "prompt"),
    ({"prompt": []}, "prompt"),
    ({"prompt": 5}, "prompt"),
    ({"prompt": [1, "a"]}, "prompt"),
    ({"prompt": [[1], "a", {}]}, "prompt"),
    ({"prompt": [1 << 40]}, "prompt"),
    ({"prompt": [-1]}, "prompt"),
    ({"prompt": [True]}, "prompt"),
    ({"prompt": ["a"] * 300}, "prompt"),
    ({"prompt": ["a"] * 100, "n": 2}, "n"),
]


def check_refusal(replica: Replica, path: str, body: dict[str, Any], param: str) -> None:
    response = replica.post(path, body)
    assert response.status_code == 400, (body, response.text)
    error = response.json()["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    assert error["param"] == param, error
    assert error["message"]
    assert response.headers["content-type"].startswith("application/json")


@pytest.fixture(scope="module")
def beside(demo: Replica) -> Iterator[None]:
    """Streams that run while the refusals of this module rain, and must not notice."""
    body = {"messages": [{"role": "user", "content": "Tell me a long story."}], "max_tokens": 300, "ignore_eos": True}
    expected = demo.stream(CHAT, body).text()
    got: list[Stream] = []
    threads = [threading.Thread(target=lambda: got.append(demo.stream(CHAT, body))) for _ in range(3)]
    for thread in threads:
        thread.start()
    yield
    for thread in threads:
        thread.join()
    assert [stream.text() for stream in got] == [expected] * 3
    assert demo.process.poll() is None


@pytest.mark.usefixtures("beside")
def test_chat_fields(demo: Replica) -> None:
    for body, param in CHAT_REFUSED:
        check_refusal(demo, CHAT, {"messages": HELLO, "max_tokens": 4, **body}, param)
    assert demo.chat("Say ok.", max_tokens=4)["choices"][0]["message"]["content"]


@pytest.mark.usefixtures("beside")
def test_completions_fields(demo: Replica) -> None:
    for body, param in COMPLETIONS_REFUSED:
        check_refusal(demo, COMPLETIONS, {"prompt": "Hello", "max_tokens": 4, **body}, param)


def test_what_is_at_the_edge_and_allowed(demo: Replica) -> None:
    greedy = demo.chat("Hello", max_tokens=8)["choices"][0]["message"]["content"]
    for fields in ({"temperature": 1e-320}, {"temperature": 1, "top_p": 0}, {"temperature": 1, "top_k": 1}):
        assert demo.chat("Hello", max_tokens=8, **fields)["choices"][0]["message"]["content"] == greedy
    allowed: list[dict[str, Any]] = [
        {"temperature": 2}, {"seed": BIG - 1}, {"seed": -BIG}, {"top_k": -1}, {"stop": None}, {"n": None},
        {"logit_bias": {}}, {"tools": []}, {"tool_choice": "none"}, {"response_format": {"type": "text"}},
        {"user": "somebody"}, {"metadata": {"a": "b"}}, {"frequency_penalty": -2, "presence_penalty": 2},
    ]  # fmt: skip
    for fields in allowed:
        demo.chat("Hello", max_tokens=2, **fields)


@pytest.mark.parametrize("stream", [True, False])
def test_a_prompt_over_the_context(stream: bool, demo: Replica) -> None:
    """G02: said before any byte of a stream, the same every time, with both numbers."""
    context = demo.ready["max_model_len"]
    texts = ("fox " * (2 * context), "x" * 3_000_000)
    for text in texts:
        for path, body, param in (
            (CHAT, {"messages": [{"role": "user", "content": text}]}, "messages"),
            (COMPLETIONS, {"prompt": text}, "prompt"),
        ):
            response = demo.post(path, {**body, "stream": stream, "max_tokens": 8})
            error = response.json()["error"]
            assert (response.status_code, error["code"], error["param"]) == (400, "context_length_exceeded", param)
            assert str(context) in error["message"]
    answer = demo.complete([5] * (context - 1), max_tokens=8)
    assert answer["usage"]["completion_tokens"] == 1
    check_refusal(demo, COMPLETIONS, {"prompt": [5] * context}, "prompt")


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"[]", b"null", b'"text"', b'{"model": NaN}', b'{"model": "demo", "temperature": Infinity}',
     b'{"model": "demo", "temperature": 1e400}', b'{"model": "demo\xff"}', b'{"a":' * 100_000, b"\x00"],
)  # fmt: skip
def test_bodies_that_are_no_json_object(content: bytes, demo: Replica) -> None:
    response = demo.client.post(CHAT, content=content)
    assert response.status_code == 400
    error = response.json()["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    assert error["message"].startswith("the body")


def test_lone_surrogates_are_no_text(demo: Replica) -> None:
    for path, body in ((CHAT, '"messages":[{"role":"user","content":"\\ud800"}]'), (COMPLETIONS, '"prompt":"\\ud800"')):
        response = demo.client.post(path, content='{"model":"demo","max_tokens":1,' + body + "}")
        assert response.status_code in (200, 400)


def test_what_is_not_there(demo: Replica) -> None:
    for method, path, status in (("GET", "/v1/nothing", 404), ("GET", CHAT, 405), ("POST", "/health", 405)):
        response = demo.client.request(method, path)
        assert response.status_code == status
        assert response.json()["error"].keys() == {"message", "type", "param", "code"}


def test_compressed_bodies_are_refused(demo: Replica) -> None:
    bomb = gzip.compress(b"0" * 50_000_000)
    response = demo.client.post(CHAT, content=bomb, headers={"Content-Encoding": "gzip"})
    assert (response.status_code, response.json()["error"]["code"]) == (415, "unsupported_encoding")


@pytest.fixture(scope="module")
def guarded(tiny_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Replica]:
    """A replica with a token, small bodies and few places."""
    log = tmp_path_factory.mktemp("guarded") / "log"
    flags = ("--name", "tiny", "--max-body", "2048", "--max-num-seqs", "2", "--max-waiting", "2")
    with running(tiny_path, log, *flags, INGLE_REPLICA_TOKEN="secret-4711") as replica:
        yield replica
    assert "secret-4711" not in log.read_text()


def test_the_token_is_asked_for(guarded: Replica) -> None:
    body = {"messages": HELLO, "max_tokens": 1}
    for header in (None, "", "Bearer", "Bearer secret", "secret-4711x", b"Bearer \xff\xfe"):
        headers = {} if header is None else {"Authorization": header}
        response = guarded.client.post(CHAT, json={"model": "tiny", **body}, headers=headers)  # type: ignore[arg-type]
        assert (response.status_code, response.json()["error"]["code"]) == (401, "invalid_api_key"), header
    assert guarded.client.get("/metrics").status_code == 401
    assert guarded.client.post("/drain").status_code == 401
    assert guarded.client.get("/health").status_code == 200
    assert guarded.post(CHAT, body, authorization="Bearer secret-4711").status_code == 200


def test_a_body_over_the_limit(guarded: Replica) -> None:
    token = {"authorization": "Bearer secret-4711"}
    body = {"messages": [{"role": "user", "content": "x" * 4000}]}
    response = guarded.post(CHAT, body, **token)
    assert (response.status_code, response.json()["error"]["code"]) == (413, "body_too_large")
    chunks = iter([json.dumps(body).encode()] * 3)
    response = guarded.client.post(CHAT, content=chunks, headers=token)
    assert response.status_code == 413


def test_more_than_fits_is_refused_at_once_and_the_rest_served(guarded: Replica) -> None:
    """Two run, two wait; the fifth sequence of a request is one too many, and leaves nothing behind."""
    token = {"authorization": "Bearer secret-4711"}
    body = {"messages": HELLO, "max_tokens": 5}
    response = guarded.post(CHAT, {**body, "n": 5}, **token)
    assert (response.status_code, response.json()["error"]["code"]) == (503, "overloaded")
    assert int(response.headers["retry-after"]) >= 1
    assert guarded.post(CHAT, {**body, "n": 4}, **token).status_code == 200


def test_odd_headers_do_no_harm(demo: Replica) -> None:
    body = {"model": "demo", "messages": HELLO, "max_tokens": 1}
    odd = {
        "x-request-id": b"\xff\xfe", "x-ingle-cache-salt": b"\xff", "traceparent": b"\xff-nonsense",
        "authorization": b"\xff",
    }  # fmt: skip
    response = demo.client.post(CHAT, json=body, headers=odd)  # type: ignore[arg-type]
    assert response.status_code == 200
    assert response.headers["x-request-id"].startswith("req-")
    long = demo.client.post(CHAT, json=body, headers={"x-request-id": "a" * 5000})
    assert len(long.headers["x-request-id"]) < 200


def test_a_model_of_loose_ends(tmp_path: Path) -> None:
    """No template, no end-of-text token, and a tokenizer that knows a token more than the model has weights for."""
    fields = byte_level_fields(tiny.VOCABULARY + 1)
    del fields["tokenizer__ggml__eos_token_id"], fields["tokenizer__chat_template"]
    fields["tokenizer__ggml__tokens"][-1] = "<beyond>"
    fields["tokenizer__ggml__token_type"][-1] = 4
    tiny.write_gguf(tiny.make("llama"), tmp_path / "model.gguf", **fields)
    with running(tmp_path / "model.gguf", tmp_path / "log", "--name", "loose") as replica:
        check_refusal(replica, CHAT, {"messages": HELLO}, "messages")
        check_refusal(replica, COMPLETIONS, {"prompt": ""}, "prompt")
        check_refusal(replica, COMPLETIONS, {"prompt": "a <beyond> b"}, "prompt")
        assert replica.complete("a fox", max_tokens=3)["usage"]["completion_tokens"] == 3
