"""A small chat tokenizer, its template and some conversations: as of Llama 3 and Marin, with hardly a vocabulary."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from builders import Workbench
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from marin_build.artifact.context import Dependency
from marin_build.data import tokenizer
from marin_build.data.encoder import byte_characters
from marin_build.data.sources import files_digest, find
from marin_build.recipe import schema
from marin_build.recipe.sources import Chat, FilesSource

SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
LLAMA = ("<|begin_of_text|>", "<|end_of_text|>", "<|reserved_special_token_0|>", "<|reserved_special_token_1|>")
MARIN = (*LLAMA[:2], "<|start_think|>", "<|end_think|>")
FIRST_SPECIAL = 300
"""Ids below are of text."""
TURNS = ("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>")
ROLES = schema.SpecialTokens(bos=LLAMA[0], eos=LLAMA[1], pad=None)
TEMPLATE = """{{- bos_token }}
{%- for message in messages %}
{{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' }}
{%- if message['role'] == 'assistant' %}
{%- generation %}{{ message['content'] | trim }}<|eot_id|>{% endgeneration %}
{%- else %}
{{- message['content'] | trim + '<|eot_id|>' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}
"""
FORMAT = Chat(type="chat", messages_key="messages", roles=["system", "user", "assistant"])
TEXTS = [
    "The capital of Norway is Oslo, and its currency is the krone.",
    "Which natural resources does Chile have? Copper, timber, iron ore, nitrates and lithium.",
    "It's 12345.67 o'clock   here,\n\nand  there.\n",
]


def turns(*contents: str, system: str | None = None) -> dict[str, Any]:
    """A record of a conversation in which user and assistant take turns."""
    messages = [] if system is None else [{"role": "system", "content": system}]
    roles = ("user", "assistant")
    return {"messages": messages + [{"role": roles[n % 2], "content": text} for n, text in enumerate(contents)]}


def lines(*records: Any) -> bytes:
    return b"".join(json.dumps(record, ensure_ascii=False).encode() + b"\n" for record in records)


CONVERSATIONS = [
    turns("What is the capital of Norway?", "Oslo."),
    turns("Hi", "Hello! ", "And Chile?", "\n Santiago de Chile 🇨🇱\n", system="Answer in a word."),
    turns("  क्षि 中文\u2028 עברית  ", "\ttabs\tand\r\nlines\r\n\r\n", "", "It's 12345.67 o'clock"),
]


def write_tokenizer(folder: Path, special: tuple[str, ...] = LLAMA, template: str | None = TEMPLATE) -> list[str]:
    """The files of a byte-level BPE of a few merges with special tokens last; returns their paths."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=FIRST_SPECIAL, initial_alphabet=byte_characters(), show_progress=False)
    made.train_from_iterator(TEXTS * 3, trainer)
    made.add_special_tokens([*special, *TURNS])
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tokenizer.json").write_text(made.to_str())
    config = {"bos_token": special[0], "eos_token": special[1], "tokenizer_class": "PreTrainedTokenizerFast"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config | {"clean_up_tokenization_spaces": False}))
    if template is not None:
        (folder / "chat_template.jinja").write_text(template)
    return sorted(str(path) for path in folder.iterdir())


def chat_tokenizer(
    workbench: Workbench, name: str = "chat", fields: Mapping[str, Any] = {}, **changes: Any
) -> Dependency:
    """Adopted from such files by the builder of tokenizers; `fields` are more of the recipe."""
    paths = write_tokenizer(workbench.folder / f"given-{name}", **changes)
    source = FilesSource(type="files", paths=paths, digest=files_digest(find(paths)))
    size = Tokenizer.from_file(str(workbench.folder / f"given-{name}/tokenizer.json")).get_vocab_size()
    wanted = schema.AdoptedTokenizer(
        method="adopt", source=source, vocabulary_size=size, special_tokens=ROLES, **fields
    )
    context = workbench.context(f"tokenizers/{name}/dev", schema.TokenizerRecipe(tokenizer=wanted))
    tokenizer.build(context)
    return workbench.finished(f"tokenizers/{name}/dev", context.folder)
