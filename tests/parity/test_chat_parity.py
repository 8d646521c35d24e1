"""Conversations in the hands of transformers: the same ids and the same mask of what the assistant says."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from chats import CONVERSATIONS, TEMPLATE, turns, write_tokenizer

from marin_build.data.chat import ChatEncoder
from marin_build.data.chat_template import Rendered, load_chat_template
from marin_build.data.conversations import Conversation, Message
from marin_build.data.tokenizer import load_tokenizer

pytest.importorskip("transformers", reason="needs the parity extra")
pytestmark = pytest.mark.parity

TEMPLATES = {
    "llama": TEMPLATE,
    "within a word": (
        "{% for m in messages %}{{ m.role }}:{% generation %}{{ m.content }}{% endgeneration %}x\n{% endfor %}"
    ),
    "one at the end": (
        "{{ bos_token }}{% for m in messages[:-1] %}\n"
        "  {{ m.content|trim|replace('\\t', ' ') }}{{ eos_token }}\n"
        "{% endfor %}{% generation %}{{ messages[-1].content }}{{ eos_token }}{% endgeneration %}"
    ),
    "controls": (
        "{% set ns = namespace(n=0) -%}\n  {%- for m in messages if m.content -%}\n{% set ns.n = ns.n + 1 %}\n"
        "[{{ ns.n ~ '/' ~ messages|length }}] {% if loop.last %}"
        "{% generation %}{{ m['content'].strip() + eos_token }}{% endgeneration %}"
        "{% else %}{{ m.content | replace('!', '?') | tojson }}{% continue %}{% endif %}  \n{% endfor %}"
    ),
    "tools": (
        "{% if tools is defined and tools %}T{% endif %}{% if x is not defined %}{{ x }}N{% endif %}"
        "{% for m in messages %}{% generation %}{{ m.role|title }} {{ m.content }}{% endgeneration %}{% endfor %}"
    ),
}


def conversations() -> list[dict]:
    dice = random.Random(0)
    letters = [*"aeot AB.,!?09\n\r\t'é", "中", "👩‍👩‍👧", "\u00a0", "क्षि", "<", "|", ">", "[", "]"]
    text = lambda: "".join(dice.choices(letters, k=dice.randrange(40)))  # noqa: E731
    return [*CONVERSATIONS, *(turns(*(text() + "." for _ in range(2 * dice.randrange(1, 4)))) for _ in range(100))]


@pytest.mark.parametrize("name", TEMPLATES)
def test_apply_chat_template_gives_the_same_ids_and_assistant_mask(name: str, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    write_tokenizer(tmp_path, template=TEMPLATES[name])
    theirs = AutoTokenizer.from_pretrained(str(tmp_path))
    template = load_chat_template(tmp_path, "this")
    ours = ChatEncoder(load_tokenizer(tmp_path), template)
    compared = 0
    for record in conversations():
        made = template.render(Conversation(tuple(Message(m["role"], m["content"]) for m in record["messages"]), 0))
        if not isinstance(made, Rendered):
            assert made.reason == "nothing_trained"
            continue
        expected = theirs.apply_chat_template(
            record["messages"], tokenize=True, return_dict=True, return_assistant_tokens_mask=True
        )
        ids, _, mask = ours.encode([made])
        assert ids.tolist() == expected["input_ids"]
        assert mask.tolist() == expected["assistant_masks"]
        compared += 1
    assert compared > 50
