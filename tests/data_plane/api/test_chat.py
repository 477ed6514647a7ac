"""Chat and completions on the demo model, over HTTP: the same text whatever the way, and OpenAI's shapes."""

from __future__ import annotations

import asyncio
import codecs
import json
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.data_plane import tiny
from tests.data_plane.replica import PATIENCE, Replica, Stream, eventually, running, strict
from tests.data_plane.text.tokenizers_made import sentencepiece_fields

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
ALPHABET = "Write the English alphabet in capitals, no spaces."


def chat_body(content: str, **fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": content}], **fields}


def said(answer: dict[str, Any], index: int = 0) -> str:
    choice = answer["choices"][index]
    text: str = choice["message"]["content"] if "message" in choice else choice["text"]
    return text


def test_a_plain_reply(demo: Replica) -> None:
    answer = demo.chat("What is the capital of France?", max_tokens=40)
    choice = answer["choices"][0]
    assert "Paris" in choice["message"]["content"]
    assert (answer["object"], answer["model"], choice["index"]) == ("chat.completion", "demo", 0)
    assert (choice["message"]["role"], choice["finish_reason"], choice["logprobs"]) == ("assistant", "stop", None)
    usage = answer["usage"]
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    assert 0 < usage["completion_tokens"] < 40


def test_a_stream_by_the_letter(demo: Replica) -> None:
    body = chat_body("Count to five.", max_tokens=12, stream_options={"include_usage": True})
    stream = demo.stream(CHAT, body, x_ingle_usage="1")
    assert stream.headers["content-type"].startswith("text/event-stream")
    assert stream.done
    assert stream.raw.endswith(b"data: [DONE]\n\n")
    heads = {(frame["id"], frame["created"], frame["model"], frame["object"]) for frame in stream.frames}
    assert len(heads) == 1
    assert next(iter(heads))[2:] == ("demo", "chat.completion.chunk")
    *chunks, last = stream.frames
    assert chunks[0]["choices"][0]["delta"]["role"] == "assistant"
    assert all({"index", "delta", "finish_reason"} <= choice.keys() for chunk in chunks for choice in chunk["choices"])
    assert all(chunk["usage"] is None for chunk in chunks)
    assert stream.finishes() == ["length"]
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] == 12
    cached = last["usage"]["prompt_tokens_details"]["cached_tokens"]
    meter = {"prompt_tokens": last["usage"]["prompt_tokens"], "completion_tokens": 12, "cached_tokens": cached}
    begun = {**meter, "completion_tokens": 1}
    wanted = [": usage " + json.dumps(each, separators=(",", ":")) for each in (begun, meter)]
    assert stream.comments == wanted
    bare = demo.stream(CHAT, chat_body("Count to five.", max_tokens=12))
    assert bare.comments == []
    assert not any("usage" in frame for frame in bare.frames)
    assert bare.text() == stream.text()


@pytest.mark.parametrize("content", ["Count to five.", "Write a line of emoji and é.", ALPHABET])
def test_a_stream_joined_is_the_plain_reply(content: str, demo: Replica) -> None:
    for fields in ({}, {"temperature": 1.0, "seed": 3, "top_p": 0.95}):
        body = {**chat_body(content, max_tokens=40), **fields}
        plain = demo.post(CHAT, {"temperature": 0, **body}).json()
        stream = demo.stream(CHAT, body)
        assert stream.text() == said(plain)
        assert stream.finishes() == [plain["choices"][0]["finish_reason"]]
        prompt = {"prompt": content, "max_tokens": 24, **fields}
        assert demo.stream(COMPLETIONS, prompt).text() == said(
            demo.post(COMPLETIONS, {"temperature": 0, **prompt}).json()
        )


def test_stop_strings_across_tokens(demo: Replica) -> None:
    """G01: nothing of a stop leaks, a near miss is given back, and what is no stop is refused."""
    whole = said(demo.chat(ALPHABET, max_tokens=40))
    stop = whole[5:15]
    body = chat_body(ALPHABET, max_tokens=40, stop=[stop])
    stream = demo.stream(CHAT, body)
    assert (stream.text(), stream.finishes()) == (whole[:5], ["stop"])
    plain = demo.chat(ALPHABET, max_tokens=40, stop=stop)
    assert (said(plain), plain["choices"][0]["finish_reason"]) == (whole[:5], "stop")
    near = chat_body(ALPHABET, max_tokens=40, stop=[stop[:-1] + "\u0001"])
    assert demo.stream(CHAT, near).text() == whole
    for wrong in ([], [""], ["a", "b", "c", "d", "e"], [1], {"a": 1}):
        response = demo.post(CHAT, chat_body(ALPHABET, max_tokens=4, stop=wrong))
        assert (response.status_code, response.json()["error"]["param"]) == (400, "stop")


def test_several_choices(demo: Replica) -> None:
    """G06 A: each index once to its end; the prompt counted once, the replies together."""
    fields = {"n": 3, "max_tokens": 7, "temperature": 1, "seed": 11, "ignore_eos": True}
    stream = demo.stream(CHAT, chat_body("Pick a number.", stream_options={"include_usage": True}, **fields))
    assert {choice["index"] for frame in stream.frames for choice in frame["choices"]} == {0, 1, 2}
    assert [stream.finishes(index) for index in range(3)] == [["length"]] * 3
    usage = stream.frames[-1]["usage"]
    assert usage["completion_tokens"] == 21
    assert usage["prompt_tokens"] == demo.chat("Pick a number.", max_tokens=1)["usage"]["prompt_tokens"]
    plain = demo.chat("Pick a number.", **fields)
    assert [said(plain, index) for index in range(3)] == [stream.text(index) for index in range(3)]
    assert len({stream.text(index) for index in range(3)}) > 1


def test_several_prompts(demo: Replica) -> None:
    prompts = ["The sky is", "Two plus two is"]
    answer = demo.complete(prompts, n=2, max_tokens=5, temperature=0)
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
    alone = [said(demo.complete(prompt, max_tokens=5)) for prompt in prompts]
    assert [said(answer, index) for index in range(4)] == [alone[0], alone[0], alone[1], alone[1]]
    stream = demo.stream(COMPLETIONS, {"prompt": prompts, "n": 2, "max_tokens": 5})
    assert [stream.text(index) for index in range(4)] == [said(answer, index) for index in range(4)]


def test_echo_with_logprobs(demo: Replica) -> None:
    """G05's first. The prompt's tokens come with theirs, the first with none; streamed the same; of each choice."""
    body = {"prompt": ["correct horse battery staple", "The capital of France is"], "n": 2, "echo": True, "logprobs": 5,
            "temperature": 1, "top_p": 0.01, "seed": 1, "max_tokens": 8}  # fmt: skip
    answer = demo.post(COMPLETIONS, body)
    assert answer.status_code == 200, answer.text
    choices = strict(answer.content)["choices"]
    frames = demo.stream(COMPLETIONS, body).frames
    alone = demo.complete("The capital of France is", max_tokens=8, logprobs=5)["choices"][0]
    for index, choice in enumerate(choices):
        told = choice["logprobs"]
        assert len({len(column) for column in told.values()}) == 1
        assert "".join(told["tokens"]) == choice["text"]
        assert [choice["text"][at:][: len(token)] for at, token in zip(told["text_offset"], told["tokens"], strict=True)
                ] == told["tokens"]  # fmt: skip
        assert (told["token_logprobs"][0], told["top_logprobs"][0]) == (None, None)
        assert all(number <= 0 for number in told["token_logprobs"][1:])
        assert all(max(top.values()) >= own for top, own in zip(told["top_logprobs"][1:], told["token_logprobs"][1:],
                                                                strict=True))  # fmt: skip
        parts = [part for frame in frames for part in frame["choices"] if part["index"] == index]
        for column, entries in told.items():
            assert [entry for part in parts if part["logprobs"] for entry in part["logprobs"][column]] == entries
    assert choices[2]["text"].endswith(alone["text"])
    assert choices[2]["logprobs"]["token_logprobs"][-8:] == pytest.approx(alone["logprobs"]["token_logprobs"])
    refused = demo.post(COMPLETIONS, {**body, "prompt": [[5] * 2000] * 5})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "echo")


def test_a_prompt_as_text_or_as_tokens_and_its_echo(demo: Replica) -> None:
    text = "The planets are"
    ids = [504, 9244, 359]
    answer = demo.complete(text, max_tokens=6, echo=True)
    assert said(answer).startswith(text)
    same = demo.complete(ids, max_tokens=6, echo=True)
    assert answer["usage"]["prompt_tokens"] == same["usage"]["prompt_tokens"] == 3
    assert said(same) == said(answer)
    assert said(demo.complete([ids, ids], max_tokens=6), 1) == said(answer)[len(text) :]
    assert demo.stream(COMPLETIONS, {"prompt": text, "max_tokens": 6, "echo": True}).text() == said(answer)


def test_a_prefix_that_was_seen_is_counted_and_changes_nothing(demo: Replica) -> None:
    content = "Here is a long sentence that fills some blocks of the cache so that it can be found again. " * 3
    first = demo.chat(content, max_tokens=8)
    again = demo.chat(content, max_tokens=8)
    assert said(again) == said(first)
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] > 32
    body = {**chat_body(content, max_tokens=8), "temperature": 0}
    other = demo.post(CHAT, body, x_ingle_cache_salt="tenant-2", x_ingle_usage="1")
    assert said(other.json()) == said(first)
    assert json.loads(other.headers["x-ingle-usage"]) == {
        "prompt_tokens": first["usage"]["prompt_tokens"], "completion_tokens": 8, "cached_tokens": 0,
    }  # fmt: skip


def test_logprobs(demo: Replica) -> None:
    answer = demo.chat("yes or no?", logprobs=True, top_logprobs=20, max_tokens=4, ignore_eos=True)
    entries = answer["choices"][0]["logprobs"]["content"]
    assert len(entries) == 4
    for entry in entries:
        values = [item["logprob"] for item in entry["top_logprobs"]]
        assert len(values) == 20
        assert values == sorted(values, reverse=True)
        assert entry["logprob"] == values[0], "greedy takes the likeliest"
        assert bytes(entry["bytes"]).decode("utf-8", "replace") == entry["token"]
    assert "".join(entry["token"] for entry in entries).startswith(said(answer))
    stream = demo.stream(CHAT, chat_body("yes or no?", logprobs=True, top_logprobs=20, max_tokens=4, ignore_eos=True))
    streamed = [
        item for frame in stream.frames for choice in frame["choices"] if choice["logprobs"]
        for item in choice["logprobs"]["content"]
    ]  # fmt: skip
    assert streamed == entries
    top = demo.chat("yes or no?", max_tokens=1, logprobs=True)["choices"][0]["logprobs"]["content"][0]
    banned = demo.complete(said(demo.complete("a", max_tokens=1)), max_tokens=3, logprobs=5, top_p=0.01, temperature=1)
    arrays = banned["choices"][0]["logprobs"]
    assert [len(arrays[key]) for key in ("tokens", "token_logprobs", "top_logprobs", "text_offset")] == [3] * 4
    assert "".join(arrays["tokens"]) == said(banned)
    assert arrays["text_offset"][0] == 0
    assert top["top_logprobs"] == []


def test_a_bias_bans_and_forces(demo: Replica) -> None:
    first = demo.complete("The sky is", max_tokens=1, logprobs=1)
    text = said(first)
    forced = demo.complete("The sky is", max_tokens=3, logit_bias={"260": 100})
    assert said(forced) == " the the the"
    banned = demo.complete("The sky is", max_tokens=1, logit_bias={"260": 100, "253": -100})
    assert said(banned) == " the"
    assert text


def test_max_tokens(demo: Replica) -> None:
    """G03: up to the context it is cut to the room there is; both names, the newer wins."""
    context = demo.ready["max_model_len"]
    one = demo.chat("Hello", max_tokens=1)
    assert (one["usage"]["completion_tokens"], one["choices"][0]["finish_reason"]) == (1, "length")
    both = demo.chat("Hello", max_completion_tokens=5, max_tokens=50, ignore_eos=True)
    assert both["usage"]["completion_tokens"] == 5
    assert demo.chat("Say ok.", max_tokens=context)["usage"]["completion_tokens"] > 0
    assert demo.chat("Say ok.", max_tokens=None)["choices"][0]["finish_reason"] == "stop"


def test_contents_in_parts(demo: Replica) -> None:
    """G08: parts, null and the developer role give the tokens that plain strings give."""
    parts = [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "Weather "}, {"type": "text", "text": "in Oslo?"}]},
        {"role": "assistant", "content": None},
        {"role": "user", "content": "Well?"},
    ]
    plain = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Weather in Oslo?"},
        {"role": "assistant", "content": ""},
        {"role": "user", "content": "Well?"},
    ]
    answers = [demo.post(CHAT, {"messages": m, "max_tokens": 4, "temperature": 0}).json() for m in (parts, plain)]
    assert answers[0]["usage"]["prompt_tokens"] == answers[1]["usage"]["prompt_tokens"]
    assert said(answers[0]) == said(answers[1])


def test_unfinished_characters_are_never_sent(small: Replica) -> None:
    """The tiny model writes bytes at random: each piece is text, and their join is the decoding of all bytes."""
    body = {"prompt": "the fox", "max_tokens": 300, "ignore_eos": True, "logprobs": 0}
    plain = small.complete(**body)
    stream = small.stream(COMPLETIONS, body)
    assert stream.text() == said(plain)
    chat = small.chat("the fox", max_tokens=300, ignore_eos=True, logprobs=True)
    raw = b"".join(bytes(entry["bytes"]) for entry in chat["choices"][0]["logprobs"]["content"])
    assert said(chat) == codecs.getincrementaldecoder("utf-8")("replace").decode(raw)
    assert "\ufffd" in said(chat)


def test_a_llama_tokenizers_spaces(tmp_path: Path) -> None:
    """Its words carry the space before them: a completion keeps it, a message does not begin with one."""
    fields = sentencepiece_fields() | {"tokenizer.chat_template": "{{ messages[0].content }}"}
    tokens = fields["tokenizer.ggml.tokens"]
    model = tiny.make("llama", vocab_size=len(tokens))
    tiny.write_gguf(model, tmp_path / "model.gguf", **{key.replace(".", "__"): value for key, value in fields.items()})
    force = {str(tokens.index("▁the")): 100}
    with running(tmp_path / "model.gguf", tmp_path / "log", "--name", "spm") as replica:
        assert said(replica.complete("over", max_tokens=2, logit_bias=force)) == " the the"
        assert said(replica.complete("over", max_tokens=2, logit_bias=force, echo=True)) == "over the the"
        assert said(replica.chat("over", max_tokens=2, logit_bias=force)) == "the the"


async def test_64_at_once(demo: Replica) -> None:
    """Eight prompts at eight lengths each, together: every reply is whole, and a shorter one begins the longer."""
    prompts = [f"Tell me about the number {number}." for number in range(8)]
    lengths = [1, 2, 3, 5, 9, 17, 33, 40]

    async def ask(client: httpx.AsyncClient, prompt: str, length: int) -> dict[str, Any]:
        body = {"model": "demo", "temperature": 0, "ignore_eos": True, **chat_body(prompt, max_tokens=length)}
        answer: dict[str, Any] = (await client.post(CHAT, json=body)).json()
        return answer

    limits = httpx.Limits(max_connections=64)
    async with httpx.AsyncClient(base_url=demo.client.base_url, timeout=PATIENCE, limits=limits) as client:
        asked = [(prompt, length) for length in lengths for prompt in prompts]
        answers = dict(zip(asked, await asyncio.gather(*(ask(client, *one) for one in asked)), strict=True))
    for (prompt, length), answer in answers.items():
        assert (answer["usage"]["completion_tokens"], answer["choices"][0]["finish_reason"]) == (length, "length")
        assert said(answers[prompt, 40]).startswith(said(answer))
    eventually(demo.idle)


def test_models(demo: Replica) -> None:
    listed = demo.client.get("/v1/models").json()
    assert [card["id"] for card in listed["data"]] == ["demo"]
    assert demo.client.get("/v1/models/demo").json() == listed["data"][0]
    missing = demo.client.get("/v1/models/other")
    assert (missing.status_code, missing.json()["error"]["code"]) == (404, "model_not_found")


def test_which_model_is_asked(demo: Replica) -> None:
    body = {**chat_body("Hi", max_tokens=1), "model": "other"}
    refused = demo.post(CHAT, body)
    assert (refused.status_code, refused.json()["error"]["code"], refused.json()["error"]["param"]) == (
        404, "model_not_found", "model",
    )  # fmt: skip
    taken = demo.post(CHAT, body, x_ingle_model="override")
    assert (taken.status_code, taken.json()["model"]) == (200, "other")


def test_every_reply_has_an_id(demo: Replica) -> None:
    own = demo.post(CHAT, chat_body("Hi", max_tokens=1), x_request_id="mine-1")
    assert own.headers["x-request-id"] == "mine-1"
    assert demo.client.get("/health").headers["x-request-id"] != demo.client.get("/health").headers["x-request-id"]
    stream: Stream = demo.stream(CHAT, chat_body("Hi", max_tokens=1), x_request_id="mine-2")
    assert stream.headers["x-request-id"] == "mine-2"
