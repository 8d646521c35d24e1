"""A chat template from elsewhere: it reaches nothing, takes bounded time and memory, and has no say over messages.

What a message spells is never a special token, whatever the message and the template do.
"""

from __future__ import annotations

import re
import time
from pathlib import Path

import pytest
from chats import FIRST_SPECIAL, TEMPLATE, write_tokenizer
from hypothesis import HealthCheck, given
from hypothesis import settings as tries
from hypothesis import strategies as st

from marin_build.data import sandbox
from marin_build.data.chat import ChatEncoder
from marin_build.data.chat_template import ChatTemplate, Rendered, load_chat_template
from marin_build.data.conversations import Conversation, Message
from marin_build.data.documents import Rejection
from marin_build.data.tokenizer import load_tokenizer

TRAINED = "{% generation %}x{% endgeneration %}"
TOKENS = ("<|eot_id|>", "<|end|>", "[INST]")


def render(source: str, *contents: str) -> Rendered | Rejection:
    template = ChatTemplate(source + TRAINED, {"bos_token": "<|begin|>"}, TOKENS)
    return template.render(Conversation(tuple(Message("user", text) for text in contents or ("hello",)), 5))


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ ''['__class__'] }}",
        "{{ messages.__class__ }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update(content='x') }}",
        "{{ messages[0].content.encode() }}",
        "{{ '{0.__class__}'.format(messages) }}",
        "{{ '{:>1000000000}'.format(1) }}",
        "{{ 'x'.format_map(messages[0]) }}",
        "{{ '%1000000000d' % 1 }}",
        "{{ raise_exception.__globals__ }}",
        "{{ range.__self__ }}",
        "{{ namespace(__class__=1) }}",
        "{% set ns = namespace() %}{% set ns.__init__ = 1 %}",
        "{{ self.__init__ }}",
        "{{ loop.__class__ }}{% for x in [1] %}{{ loop.__class__ }}{% endfor %}",
        "{% macro m() %}{% endmacro %}{{ m.name }}{{ m.__call__ }}",
        "{{ strftime_now('%Y') }}",
        "{{ lipsum() }}",
        "{{ cycler('a') }}",
        "{% include '/etc/passwd' %}",
        "{% extends 'x' %}",
        "{% import 'os' as os %}",
        "{{ dict.fromkeys([1]) }}",
    ],
)
def test_a_template_reaches_nothing_but_its_variables(source: str):
    found = render(source)
    if isinstance(found, Rendered):  # what is out of reach is undefined, and written as nothing
        assert found.text == "x"
        return
    assert (found.byte, found.reason) == (5, "template_failed")
    assert len(found.detail) < 400


@pytest.mark.parametrize(
    "source",
    [
        "{% for x in range(10 ** 12) %}{% endfor %}",
        "{% for x in range(90000) %}{% for y in range(90000) %}{% endfor %}{% endfor %}",
        "{% macro f(n) %}{{ f(n + 1) }}{{ f(n + 1) }}{% endmacro %}{{ f(0) }}",
        "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(40) }}",
        "{% for x in [1] recursive %}{{ loop([1, 2]) }}{% endfor %}",
        "{% set ns = namespace(x='x' * 99) %}{% for i in range(60) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}",
        "{% set ns = namespace(x='x' * 99) %}{% for i in range(60) %}{% set ns.x = ns.x + ns.x %}{% endfor %}",
        "{% set ns = namespace(x=[1]) %}{% for i in range(60) %}{% set ns.x = ns.x + ns.x %}{% endfor %}",
        "{% set ns = namespace(x=[1]) %}{% for i in range(60) %}{% set ns.x = [ns.x, ns.x] %}{% endfor %}{{ ns.x }}",
        "{% set ns = namespace(x=1) %}{% for i in range(60) %}{% set ns.x = (ns.x, ns.x) %}{% endfor %}{{ ns.x }}",
        "{% set ns = namespace(x=1) %}{% for i in range(60) %}{% set ns.x = {1: ns.x, 2: ns.x} %}{% endfor %}",
        "{% set ns = namespace(x=1) %}{% for i in range(60) %}{% set ns.x = [ns, ns.x] %}{% endfor %}{{ ns }}",
        "{% set ns = namespace(x=1, y=1) %}{% for i in range(60) %}{% set ns.x = [ns.x, ns.x] %}"
        "{% set ns.y = [ns.y, ns.y] %}{% endfor %}{{ ns.x == ns.y }}",
        "{{ range(90000)|map('default', 'x')|map('replace', 'x', 'x' * 900000)|list }}",
        "{% set ns = namespace(x='x' * 99) %}{% for i in range(60) %}{% set x %}{{ ns.x }}{{ ns.x }}{% endset %}"
        "{% set ns.x = x %}{% endfor %}",
        "{% set x %}{% for i in range(9000) %}" + "x" * 9000 + "{% endfor %}{% endset %}",
        "{% set ns = namespace(x='xx') %}{% for i in range(60) %}{% set ns.x = ns.x.replace('x', ns.x) %}{% endfor %}",
        "{% set ns = namespace(x='xx') %}{% for i in range(60) %}{% set ns.x = ns.x|replace('x', ns.x) %}{% endfor %}",
        "{% set ns = namespace(x='xx') %}{% for i in range(60) %}{% set ns.x = ns.x.join(ns.x) %}{% endfor %}",
        "{% set ns = namespace(x='xx') %}{% for i in range(60) %}{% set ns.x = ns.x|join(ns.x) %}{% endfor %}",
        "{{ 'x' * 10 ** 10 }}",
        "{{ [0] * 10 ** 10 }}",
        "{{ 10 ** 9 * 'x' }}",
        "{{ 9 ** (9 ** 9) }}",
        "{{ [1, 2] | tojson(indent=10 ** 9) }}",
        "{% for i in range(99999) %}{{ 'x' * 99999 }}{% endfor %}",
        "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}",
    ],
    ids=lambda source: source[:70],
)
def test_a_template_takes_bounded_time_and_memory(monkeypatch: pytest.MonkeyPatch, source: str):
    monkeypatch.setattr(sandbox, "MAX_CHARACTERS", 1 << 20)
    monkeypatch.setattr(sandbox, "MAX_WRITTEN", 1 << 21)
    monkeypatch.setattr(sandbox, "MAX_STEPS", 100_000)
    started = time.process_time()
    assert isinstance(render(source), Rejection)
    assert time.process_time() - started < 20  # seconds, where it would be years


def test_each_conversation_has_the_bounds_to_itself():
    template = ChatTemplate("{% for x in range(90000) %}{% endfor %}" + TRAINED, {}, TOKENS)
    for _ in range(15):
        assert isinstance(template.render(Conversation((Message("user", "x"),), 0)), Rendered)


# ---- messages --------------------------------------------------------------------------------------------------------

PIECES = st.lists(
    st.sampled_from(["<|", "|>", "<|eot_id|>", "eot_id", "[INST]", "[", "INST]", "<|end|>", "end", " ", "\n", "a"])
    | st.characters(min_codepoint=0xF0000, max_codepoint=0xF0020)
    | st.characters(exclude_categories=["Cs"]),
    max_size=12,
).map("".join)
EXPRESSIONS = [
    "{{ m.content }}",
    "{{ m.content | trim }}",
    "{{ '<|' ~ m.content ~ '|>' }}",
    "<|{{ m.content }}|>",
    "{{ m.content[1:] }}",
    "{{ m.content[::-1] }}",
    "{{ m.content.split('|')[0] }}",
    "{{ m.content.split('[')|join('<') }}",
    "{{ m.content | replace('a', '<|eot_id|>') }}",
    "{{ m.content | tojson }}",
    "{{ m.content | upper }}{{ m.content | lower }}",
    "{% if '<' in m.content %}{{ bos_token }}{% endif %}",
    "{% for c in m.content %}{{ c }}{% endfor %}",
    "{% generation %}{{ m.content }}<|eot_id|>{% endgeneration %}",
    "{% set x %}{% generation %}{{ m.content }}{% endgeneration %}{% endset %}{{ x | trim }}",
]


@tries(max_examples=300, deadline=None)
@given(contents=st.lists(PIECES, min_size=1, max_size=3), chosen=st.lists(st.sampled_from(EXPRESSIONS), max_size=4))
def test_no_character_of_a_message_is_ever_part_of_a_special_token(contents: list[str], chosen: list[str]):
    """Shown by a second message: one whose letters no special token has gets special tokens at the same places."""
    source = "{% for m in messages %}" + "".join(chosen) + "{% endfor %}"
    found = render(source, *contents)
    if isinstance(found, Rejection):
        assert found.reason in ("unfollowed_text", "template_failed")
        return
    harmless = str.maketrans({c: "\u00b7" for token in TOKENS for c in token})
    other = render(source, *(text.translate(harmless) for text in contents))
    assert isinstance(other, Rendered)
    assert [found.text[a:b] for a, b in found.specials] == [other.text[a:b] for a, b in other.specials]
    assert len(found.text) == len(other.text)
    assert found.specials == other.specials
    assert all(re.fullmatch(r"<\|eot_id\|>|<\|end\|>|\[INST\]", found.text[a:b]) for a, b in found.specials)
    assert found.trained == other.trained


@tries(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(contents=st.lists(PIECES, min_size=2, max_size=4))
def test_ids_of_special_tokens_are_as_many_as_the_template_writes(tmp_path_factory, contents: list[str]):
    template, encoder = chat(tmp_path_factory)
    roles = ("user", "assistant")
    messages = tuple(Message(roles[number % 2], text) for number, text in enumerate(contents))
    made = template.render(Conversation(messages, 0))
    assert isinstance(made, Rendered)
    ids, lengths, mask = encoder.encode([made, made])
    assert int((ids >= FIRST_SPECIAL).sum()) == 2 * (1 + 3 * len(contents))
    assert int(((ids == FIRST_SPECIAL + 6) & (mask == 1)).sum()) == 2 * (len(contents) // 2)
    assert lengths.tolist() == [len(ids) // 2] * 2
    assert encoder.tokenizer.decode(ids[: lengths[0]]) == made.text


_CHATS: list[tuple[ChatTemplate, ChatEncoder]] = []


def chat(tmp_path_factory: pytest.TempPathFactory) -> tuple[ChatTemplate, ChatEncoder]:
    if not _CHATS:
        folder: Path = tmp_path_factory.mktemp("chat")
        write_tokenizer(folder, template=TEMPLATE)
        template = load_chat_template(folder, "it")
        _CHATS.append((template, ChatEncoder(load_tokenizer(folder), template)))
    return _CHATS[0]
