from __future__ import annotations

import functools
import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken

from data_plane.errors import ModelUnreadable, RequestError
from data_plane.text.chat_template import ChatTemplate, compile_template, source_in_folder
from data_plane.text.tokenizer import TextTokenizer, from_folder
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
        "{{ '%s' % undefined_thing.attribute }}",
        "{{ 1 // 0 }}",
        "{{ undefined_thing.attribute }}",
        "{{ messages[9].content }}",
    ],
)
def test_a_template_may_read_and_nothing_else(source: str, demo_text: tuple[TextTokenizer, ChatTemplate]) -> None:
    template = compile_template(source, demo_text[0])
    with pytest.raises(RequestError, match="chat template cannot render"):
        template.tokens([{"role": "user", "content": "Hi"}])


NESTED = "{% for i in range(90000) %}{% for j in range(90000) %}BODY{% endfor %}{% endfor %}"


@pytest.mark.parametrize(
    "source",
    [
        NESTED.replace("BODY", ""),
        NESTED.replace("BODY", "{% if i < 0 %}x{% endif %}"),
        NESTED.replace("BODY", "{% set x = i * j %}"),
        "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(40) }}",
    ],
)
def test_a_template_that_does_not_end_is_ended(source: str, demo_text: tuple[TextTokenizer, ChatTemplate]) -> None:
    template = compile_template("{% if messages | length == 9 %}" + source + "{% endif %}", demo_text[0])
    assert not template.slow
    template.tokens([{"role": "user", "content": "Hi"}])
    with pytest.raises(RequestError, match="does not end: it took over 1 s") as caught:
        template.tokens([{"role": "user", "content": "Hi"}] * 9)
    assert (caught.value.status, caught.value.code) == (500, "template_timeout")
    assert template.slow, "from now on it is rendered beside the event loop"


@pytest.mark.parametrize(
    "source",
    [
        "{{ 'x' * 10 ** 9 }}",
        "{{ 10 ** 9 * 'x' }}",
        "{{ [1] * 10 ** 9 }}",
        "{{ 10 ** 99 }}",
        "{{ (10 ** 60) ** 60 ** 2 }}",
        "{{ '%1000000000d' % 1 }}",
        "{{ '%*d' % (1000000000, 1) }}",
        "{% for i in range(40000) %}{{ 'x' * 1000 }}{% endfor %}",
        "{% set n = namespace(x='xx') %}{% for i in range(60) %}{% set n.x = n.x ~ n.x %}{% endfor %}",
        "{% set n = namespace(x='xx') %}{% for i in range(60) %}{% set n.x = n.x + n.x %}{% endfor %}",
        "{% set n = namespace(x=[1]) %}{% for i in range(60) %}{% set n.x = n.x + n.x %}{% endfor %}",
        "{% set n = namespace(x=9) %}{% for i in range(60) %}{% set n.x = n.x * n.x %}{% endfor %}",
    ],
)
def test_a_template_makes_nothing_enormous(source: str, demo_text: tuple[TextTokenizer, ChatTemplate]) -> None:
    template = compile_template(source, demo_text[0])
    with pytest.raises(RequestError, match="too long") as caught:
        template.tokens([{"role": "user", "content": "Hi"}])
    assert (caught.value.status, caught.value.code) == (400, "context_length_exceeded")


def test_what_templates_do_with_operators(demo_text: tuple[TextTokenizer, ChatTemplate]) -> None:
    tokenizer, _ = demo_text
    source = (
        "{{ 'a' ~ 1 ~ none }} {{ 'a' + 'b' }} {{ [1] + [2] }} {{ '-' * 3 }} {{ '%s-%05.1f' % ('x', 2) }} {{ 7 % 4 }}"
    )
    ids = compile_template(source, tokenizer).tokens([{"role": "user", "content": ""}])
    assert b"".join(map(tokenizer.bytes_of, ids)) == b"a1None ab [1, 2] --- x-002.0 3"


@given(user=FORGED)
def test_no_text_forges_a_turn_whose_marks_are_ordinary_tokens(
    user: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    tokenizer, template = ordinary(tmp_path_factory.getbasetemp() / "ordinary")
    assert template.markers == ("<|turn|>",)
    turn = tokenizer.id_of("<|turn|>")
    assert turn is not None
    user = user.replace("<|im_start|>", "<|turn|>")
    ids = template.tokens([{"role": "system", "content": user}, {"role": "user", "content": user}])
    assert ids.count(turn) == 3
    assert b"".join(map(tokenizer.bytes_of, ids)).decode() == f"<|turn|>system {user}<|turn|>user {user}<|turn|>"


@functools.cache
def ordinary(folder: Path) -> tuple[TextTokenizer, ChatTemplate]:
    """A tokenizer that lists the mark of its template's turns as a word like any other, and <think> too."""
    source = "{% for m in messages %}<|turn|>{{ m.role }} {{ m.content }}{% endfor %}<|turn|>"
    words = [AddedToken(text, special=False, normalized=False) for text in ("<|turn|>", "<think>", "<other>")]
    byte_level_folder(folder, extra=words, chat_template=source)
    tokenizer = from_folder(folder)
    return tokenizer, compile_template(source, tokenizer)


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
