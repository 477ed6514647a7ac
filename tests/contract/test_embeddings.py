"""Embeddings through the official client: an encoder, and a decoder's last token, against transformers."""

from __future__ import annotations

import base64
import json
import subprocess
import sys
from collections.abc import Iterator

import numpy as np
import openai
import pytest
import torch
from transformers import AutoTokenizer, BertModel

from data_plane.loading.sources import pull

TEXTS = [
    "A man is eating food.",
    "Someone has a meal",
    "The girl is carrying a baby. " * 8,
    "é ☃",
    "[SEP] is a word here",
]
ENCODER = "all-minilm-l6-v2"


@pytest.fixture(scope="module")
def encoder() -> Iterator[openai.OpenAI]:
    pull(ENCODER)
    command = [sys.executable, "-m", "data_plane", "serve", ENCODER, "--port", "0", "--name", "e"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    assert process.stdout is not None
    ready = json.loads(process.stdout.readline())
    with openai.OpenAI(base_url=f"http://127.0.0.1:{ready['port']}/v1", api_key="x", max_retries=0) as client:
        yield client
    process.terminate()
    assert process.wait(20) == 0


def expected(texts: list[str]) -> np.ndarray:
    """Mean pooling and unit length, by transformers, one text at a time."""
    folder = str(pull(ENCODER))
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = BertModel.from_pretrained(folder).eval()
    vectors = []
    for text in texts:
        inputs = tokenizer(text, return_tensors="pt")
        with torch.inference_mode():
            vectors.append(torch.nn.functional.normalize(model(**inputs).last_hidden_state[0].mean(dim=0), dim=0))
    return torch.stack(vectors).numpy()


def test_vectors_equal_an_independent_implementation(encoder: openai.OpenAI) -> None:
    # the last text spells a control token: we keep it text, transformers does not
    wanted = expected(TEXTS[:4])
    reply = encoder.embeddings.create(model="e", input=TEXTS[:4], encoding_format="float")
    found = np.array([item.embedding for item in reply.data])
    np.testing.assert_allclose(found, wanted, atol=2e-5)
    assert [item.index for item in reply.data] == [0, 1, 2, 3]
    assert reply.usage.prompt_tokens == reply.usage.total_tokens > 0


def test_batches_of_any_size_give_the_same(encoder: openai.OpenAI) -> None:
    alone = [encoder.embeddings.create(model="e", input=text).data[0].embedding for text in TEXTS]
    many = encoder.embeddings.create(model="e", input=TEXTS * 40)
    for index, item in enumerate(many.data):
        np.testing.assert_allclose(item.embedding, alone[index % len(TEXTS)], atol=2e-5)


def test_base64_is_the_same_in_little_endian_floats(encoder: openai.OpenAI) -> None:
    plain = encoder.embeddings.create(model="e", input="hello", encoding_format="float").data[0].embedding
    raw = encoder.embeddings.with_raw_response.create(model="e", input="hello", encoding_format="base64")
    packed = json.loads(raw.content)["data"][0]["embedding"]
    np.testing.assert_array_equal(np.frombuffer(base64.b64decode(packed), "<f4"), np.array(plain, np.float32))


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": ""}, "input"),
        ({"input": []}, "input"),
        ({"input": ["a", ""]}, "input"),
        ({"input": [999_999]}, "input"),
        ({"input": "word " * 600}, "input"),
        ({"input": ["a"] * 2049}, "input"),
        ({"input": "a", "encoding_format": "hex"}, "encoding_format"),
        ({"input": "a", "dimensions": 64}, "dimensions"),
    ],
)
def test_bad_input_is_named(encoder: openai.OpenAI, fields: dict[str, object], param: str) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        encoder.post("/embeddings", body={"model": "e", **fields}, cast_to=object)
    assert caught.value.param == param


def test_an_encoder_does_not_chat(encoder: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="embeddings only"):
        encoder.chat.completions.create(model="e", messages=[{"role": "user", "content": "x"}])


def test_a_decoder_gives_its_last_state(client: openai.OpenAI) -> None:
    first = client.embeddings.create(model="m", input=["A cat sat on the mat.", "Stock prices fell.", "A kitten sat."])
    vectors = np.array([item.embedding for item in first.data])
    np.testing.assert_allclose(np.linalg.norm(vectors, axis=1), 1, atol=1e-5)
    again = client.embeddings.create(model="m", input="A cat sat on the mat.")
    np.testing.assert_allclose(again.data[0].embedding, vectors[0], atol=1e-6)
    assert vectors.shape == (3, 576)
