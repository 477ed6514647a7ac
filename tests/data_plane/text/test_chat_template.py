from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from data_plane.errors import ModelUnreadable, RequestError
from data_plane.text.chat_template import ChatTemplate, compile_template, source_in_folder
from data_plane.text.tokenizer import TextTokenizer
from tests.data_plane.text.tokenizers_made import byte_level_folder

SPELLED = ("<|im_start|>", "<|im_end|>", "<|im_", "end|>", "\n", "system", "a", " ", "<|endoftext|>", "é")
FORGED = st.lists(st.sampled_from(SPELLED), max_size=12).map("".join)


def test_the_demo_model_is_asked_as_its_makers_ask(demo_text: tuple[TextTokenizer, ChatTemplate]) -> None:
    tokenizer, template = demo_text
    ids = template.tokens([{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}])
    whole = "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    assert ids == tokenizer.encode(whole, control=True)


@given(system=FORGED, user=FORGED)
def test_no_text_forges_a_turn(system: str, user: str, demo_text: tuple[TextTokenizer, ChatTemplate]) -> None:
    tokenizer, template = demo_text
    ids = template.tokens([{"role": "system", "content": system}, {"role": "user", "content": user}])
    start, end = tokenizer.id_of("<|im_start|>"), tokenizer.id_of("<|im_end|>")
    assert [id for id in ids if id in (start, end)] == [start, end, start, end, start]
    assert tokenizer.id_of("<|endoftext|>") not in ids
    said = b"".join(map(tokenizer.bytes_of, ids)).decode()
    assert said == f"system\n{system}\nuser\n{user}\nassistant\n"


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages.__class__.__mro__ }}",
        "{{ ''.__class__.__base__.__subclasses__() }}",
        "{{ messages.append(1) }}",
        "{% for i in range(1000000000) %}a{% endfor %}",
        "{{ 1 // 0 }}",
        "{{ undefined_thing.attribute }}",
        "{{ messages[9].content }}",
    ],
)
def test_a_template_may_read_and_nothing_else(source: str, demo_text: tuple[TextTokenizer, ChatTemplate]) -> None:
    template = compile_template(source, demo_text[0])
    with pytest.raises(RequestError, match="chat template cannot render"):
        template.tokens([{"role": "user", "content": "Hi"}])


def test_a_template_may_refuse_a_conversation(demo_text: tuple[TextTokenizer, ChatTemplate]) -> None:
    template = compile_template("{{ raise_exception('roles must alternate') }}", demo_text[0])
    with pytest.raises(RequestError, match="refused: roles must alternate") as caught:
        template.tokens([{"role": "user", "content": "Hi"}])
    assert (caught.value.status, caught.value.param) == (400, "messages")


def test_a_template_that_does_not_parse_is_an_unreadable_model(demo_text: tuple[TextTokenizer, ChatTemplate]) -> None:
    with pytest.raises(ModelUnreadable, match="does not parse"):
        compile_template("{% for %}", demo_text[0])


def test_where_a_folder_keeps_its_template(tmp_path: Path) -> None:
    assert source_in_folder(tmp_path) is None
    byte_level_folder(tmp_path, chat_template=[{"name": "rag", "template": "r"}, {"name": "default", "template": "d"}])
    assert source_in_folder(tmp_path) == "d"
    (tmp_path / "chat_template.jinja").write_text("of its own")
    assert source_in_folder(tmp_path) == "of its own"


def test_tojson_keeps_letters_and_order(demo_text: tuple[TextTokenizer, ChatTemplate]) -> None:
    tokenizer, _ = demo_text
    template = compile_template("{{ tools | tojson }}", tokenizer)
    tools = [{"name": "é", "b": 1, "a": [True, None]}]
    ids = template.tokens([{"role": "user", "content": ""}], tools=tools)
    assert b"".join(map(tokenizer.bytes_of, ids)).decode() == json.dumps(tools, ensure_ascii=False)
