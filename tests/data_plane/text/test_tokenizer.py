from __future__ import annotations

import codecs
import re
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from gguf import GGUFReader
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers

from data_plane.errors import UnsupportedModel
from data_plane.text import tokenizer as module
from data_plane.text.chat_template import ChatTemplate
from data_plane.text.detokenizer import Detokenizer
from data_plane.text.load import load_text
from data_plane.text.tokenizer import TextTokenizer, from_folder, from_gguf
from tests.data_plane.text.tokenizers_made import byte_level_folder, sentencepiece_fields

TEXTS = (
    "Hello, world!", "  leading and   inner spaces \n\n\ttabs", "1234567890 3.14 2024-11-30", "naïve café Ünïcödé",
    "def f(x):\n    return x ** 2  # done", "日本語のテキスト", "🎉👩‍👩‍👧‍👦 é", "it's we'll I'd CAN'T", "", " ",
    "<|im_start|>user",
)  # fmt: skip
ANY_TEXT = st.text(st.characters(codec="utf-8"), max_size=40)


@pytest.fixture(scope="module")
def sentencepiece() -> TextTokenizer:
    return from_gguf(sentencepiece_fields(), Path("made.gguf"))


@pytest.fixture(scope="module")
def independent(demo_path: Path) -> Tokenizer:
    """The demo model's tokenizer from the gguf package's reading of the file: single digits, then byte-level BPE."""
    fields = {name: field.contents() for name, field in GGUFReader(demo_path).fields.items()}
    vocabulary = {token: id for id, token in enumerate(fields["tokenizer.ggml.tokens"])}
    merges = [tuple(merge.split(" ")) for merge in fields["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    return tokenizer


@given(text=st.one_of(st.sampled_from(TEXTS), ANY_TEXT))
def test_the_demo_model_reads_text_as_the_independent_tokenizer_does_and_loses_nothing(
    text: str, demo_text: tuple[TextTokenizer, ChatTemplate], independent: Tokenizer
) -> None:
    ours = demo_text[0]
    ids = ours.encode(text)
    assert ids == independent.encode(text, add_special_tokens=False).ids
    # the model knows no token for bytes that never occurred in what it was trained on
    known = {byte for id in range(17, 300) for byte in ours.bytes_of(id)}
    assert b"".join(map(ours.bytes_of, ids)) == bytes(byte for byte in text.encode() if byte in known)
    assert known >= {*range(32, 127), *range(0x80, 0xC0)}


def test_what_splits_the_text_of_known_families() -> None:
    """The patterns as transformers has them."""
    from transformers.convert_slow_tokenizer import TikTokenConverter
    from transformers.models.qwen2.tokenization_qwen2 import PRETOKENIZE_REGEX

    assert module._SPLITS["qwen2"] == PRETOKENIZE_REGEX
    assert module._SPLITS["llama-bpe"] == TikTokenConverter().pattern


def naive_sentencepiece(text: str, fields: dict[str, Any]) -> list[int]:
    """Join the neighbours that make the best piece, leftmost first, until none do; bytes for what is no piece."""
    tokens, types = fields["tokenizer.ggml.tokens"], fields["tokenizer.ggml.token_type"]
    score = {
        token: value
        for token, type, value in zip(tokens, types, fields["tokenizer.ggml.scores"], strict=True)
        if type == 1
    }
    symbols = list("▁" + text.replace(" ", "▁"))
    while True:
        joined = [(score[a + b], -at) for at, (a, b) in enumerate(pairwise(symbols)) if a + b in score]
        if not joined:
            break
        at = -max(joined)[1]
        symbols[at : at + 2] = ["".join(symbols[at : at + 2])]
    ids = []
    for symbol in symbols:
        ids += [tokens.index(symbol)] if symbol in score else [3 + byte for byte in symbol.encode()]
    return ids


@given(text=st.text(st.sampled_from("thequickbrown  .,s>é日"), min_size=1, max_size=24))
def test_a_llama_tokenizer_reads_text_as_sentencepiece_does(text: str, sentencepiece: TextTokenizer) -> None:
    ids = sentencepiece.encode(text)
    assert ids == naive_sentencepiece(text, sentencepiece_fields())
    assert b"".join(map(sentencepiece.bytes_of, ids)) == b" " + text.encode()


@pytest.mark.parametrize("text", ["<s>", "</s>", "<unk>", "<0x41>", "a</s>b<s>"])
def test_in_a_llama_tokenizer_text_never_becomes_a_control_or_byte_token(
    text: str, sentencepiece: TextTokenizer
) -> None:
    ids = sentencepiece.encode(text)
    assert not {0, 1, 2, 3 + 0x41} & {*ids}
    assert b"".join(map(sentencepiece.bytes_of, ids)) == b" " + text.encode()
    assert sentencepiece.encode("</s>", control=True)[-1] == 2


def test_added_tokens_that_are_text_are_tokens_in_anyones_text(sentencepiece: TextTokenizer) -> None:
    keep = sentencepiece.id_of("<keep>")
    assert keep is not None
    assert keep in sentencepiece.encode("a <keep> b")
    assert sentencepiece.bytes_of(keep) == b"<keep>"


def test_a_folders_tokenizer_with_control_and_other_added_tokens(tmp_path: Path) -> None:
    extra = [AddedToken("<think>", special=False), AddedToken("crème", special=False)]
    whole = byte_level_folder(tmp_path, extra=extra)
    ours = from_folder(tmp_path)
    for text in (*TEXTS, "a<think>b crème", "<|im_end|> <think>"):
        assert ours.encode(text, control=True) == whole.encode(text).ids
        assert b"".join(map(ours.bytes_of, ours.encode(text))) == text.encode()
    start, end, think = (whole.token_to_id(text) for text in ("<|im_start|>", "<|im_end|>", "<think>"))
    assert not {start, end} & {*ours.encode("<|im_start|>system<|im_end|>")}
    assert ours.encode("<think>") == [think]
    assert end is not None
    assert ours.bytes_of(end) == b""
    assert (ours.tokens.eos, ours.bos_ids, ours.strips_first_space) == ("<|im_end|>", (), False)
    _, template = load_text(tmp_path)
    assert template is not None


def test_an_unknown_split_is_refused() -> None:
    fields = {"model": "gpt2", "tokens": ["a"], "pre": "gpt-9"}
    with pytest.raises(UnsupportedModel, match="splits text by 'gpt-9'"):
        from_gguf({f"tokenizer.ggml.{key}": value for key, value in fields.items()}, Path("made.gguf"))


@given(ids=st.lists(st.integers(0, 49_151), max_size=30))
def test_detokenizing_is_decoding_the_joined_bytes(
    ids: list[int], demo_text: tuple[TextTokenizer, ChatTemplate]
) -> None:
    """A character that the end cuts short is dropped; U+FFFD stands only for bytes that are no text."""
    tokenizer = demo_text[0]
    detokenizer = Detokenizer(tokenizer)
    text = "".join(detokenizer.feed(id) for id in ids)
    raw = b"".join(map(tokenizer.bytes_of, ids))
    assert text == codecs.getincrementaldecoder("utf-8")("replace").decode(raw)
    if re.search(rb"[\x80-\xff]", raw) is None:
        assert text == raw.decode()


@given(text=ANY_TEXT, borders=st.lists(st.integers(0, 200), max_size=6))
def test_bytes_in_any_pieces_give_the_same_text(
    text: str, borders: list[int], demo_text: tuple[TextTokenizer, ChatTemplate]
) -> None:
    raw = text.encode()
    places = sorted({0, len(raw), *(border % (len(raw) + 1) for border in borders)})
    pieces = {place: raw[start:end] for place, (start, end) in enumerate(pairwise(places))}
    detokenizer = Detokenizer(demo_text[0], shown=pieces)
    sent = [detokenizer.feed(place) for place in pieces]
    assert "".join(sent) == text
    assert text.count("\ufffd") == "".join(sent).count("\ufffd")


def test_the_space_before_a_first_word(sentencepiece: TextTokenizer) -> None:
    """A text of its own loses the one that the tokenizer put there; one that goes on from a prompt keeps its own."""
    ids = sentencepiece.encode("the fox")
    own, continued = Detokenizer(sentencepiece), Detokenizer(sentencepiece, continues=True)
    assert "".join(map(own.feed, ids)) == "the fox"
    assert "".join(map(continued.feed, ids)) == " the fox"
