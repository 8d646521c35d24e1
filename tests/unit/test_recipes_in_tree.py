"""The recipes that ship: each loads, its closure is whole, and its numbers are those of the runs they reproduce."""

from __future__ import annotations

import json
import math
import re
import zlib
from pathlib import Path

import pytest
import zstandard

from marin_build.artifact.digest import file_entries, list_files, root_digest
from marin_build.recipe.dependencies import closure, unresolved, validation_sets
from marin_build.recipe.document import parse_document
from marin_build.recipe.load import RecipeBook, validate
from marin_build.recipe.mixture_counts import block_counts
from marin_build.recipe.schema import CheckpointRecipe, LlamaModel
from marin_build.recipe.target import Target, parse_target

ROOT = Path(__file__).parents[2]
CORPORA = ROOT / "marin_build" / "data" / "corpora"
BOOK = RecipeBook(ROOT / "config")
TARGETS = BOOK.targets()
SHIPPED = [target for target in TARGETS if target.version == "2026.06.28"]
CHECKPOINTS = [target for target in SHIPPED if target.kind == "checkpoints"]
DCLM = ["checkpoints/dclm_1b_1x/2026.06.28", "checkpoints/dclm_7b_1x/2026.06.28", "checkpoints/dclm_smoke/2026.06.28"]
MARIN = parse_target("tokenizers/marin/2026.06.28")
TRAINING_SETS = ("dclm_baseline", "starcoderdata", "proofpile_2")


def checkpoint(text: str) -> CheckpointRecipe:
    recipe = BOOK.load(parse_target(text))
    assert isinstance(recipe, CheckpointRecipe)
    return recipe


def parameters(model: LlamaModel) -> int:
    attention = 2 * model.hidden_size * model.head_dim * (model.num_attention_heads + model.num_key_value_heads)
    layer = attention + 3 * model.hidden_size * model.intermediate_size + 2 * model.hidden_size
    tables = (1 if model.tie_word_embeddings else 2) * model.vocab_size * model.hidden_size
    return tables + model.num_hidden_layers * layer + model.hidden_size


def tokens(recipe: CheckpointRecipe) -> int:
    return recipe.steps * recipe.global_batch_size * recipe.data.sequence_length


def sequences_of_a_block(recipe: CheckpointRecipe) -> dict[str, int]:
    weights = {name: component.weight for name, component in recipe.data.train.items()}
    return block_counts(weights, recipe.data.mixture_block)


# ---- all recipes -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("target", TARGETS, ids=str)
def test_every_recipe_loads_with_a_closure_and_a_fingerprint(target: Target) -> None:
    assert closure(BOOK, [target])[-1] == target
    assert len(BOOK.fingerprint(target)) == 32


@pytest.mark.parametrize("target", SHIPPED, ids=str)
def test_every_page_opens_with_its_target_and_the_command_that_builds_it(target: Target) -> None:
    lines = BOOK.path(target).read_text().splitlines()
    assert lines[0] == f"# {target}"
    assert any(line.startswith(f"# Build     snakemake {target}") for line in lines)


def test_every_recipe_is_needed_by_a_checkpoint_but_the_tokenizer_for_chat_data() -> None:
    assert set(SHIPPED) == {target for target in closure(BOOK, CHECKPOINTS) if not target.is_derived} | {MARIN}


def test_the_tokenizer_for_chat_data_is_llama3s_but_for_two_special_tokens_and_the_template() -> None:
    marin, llama = (BOOK.load(target).tokenizer for target in (MARIN, parse_target("tokenizers/llama3/2026.06.28")))
    assert (marin.vocabulary_size, marin.special_tokens) == (llama.vocabulary_size, llama.special_tokens)
    assert (marin.token_ids["<|start_think|>"], marin.token_ids["<|end_think|>"]) == (128002, 128003)
    assert marin.chat_data
    assert BOOK.fingerprint(MARIN) != BOOK.fingerprint(parse_target("tokenizers/llama3/2026.06.28"))


def test_only_sources_without_a_known_commit_are_unresolved() -> None:
    assert {str(target): unresolved(BOOK.load(target)) for target in SHIPPED if unresolved(BOOK.load(target))} == {
        "raw/uncheatable_eval/2026.06.28": ["source.revision"],
        "tokenized/llama3/dclm_1b_1x/starcoderdata/2026.06.28": ["source.revision"],
        "tokenized/llama3/dclm_7b_1x/starcoderdata/2026.06.28": ["source.revision"],
        "tokenizers/llama3/2026.06.28": ["tokenizer.source.revision"],
        str(MARIN): ["tokenizer.source.revision"],
    }


@pytest.mark.parametrize("target", CHECKPOINTS, ids=str)
def test_all_sets_of_a_checkpoint_use_its_tokenizer_and_vocabulary(target: Target) -> None:
    recipe = checkpoint(str(target))
    sets = [component.target for component in recipe.data.train.values()] + list(validation_sets(recipe))
    assert {BOOK.load(parse_target(name)).tokenizer for name in sets} == {recipe.data.tokenizer}
    tokenizer = BOOK.load(parse_target(recipe.data.tokenizer)).tokenizer
    specials = tokenizer.special_tokens.model_dump().values()
    size = (
        256 + sum(token is not None for token in specials) if tokenizer.method == "bytes" else tokenizer.vocabulary_size
    )
    assert recipe.model.vocab_size == size


def test_the_examples_of_the_guide_are_valid() -> None:
    examples = re.findall(r"^```yaml\n(.*?)^```$", (ROOT / "docs" / "recipes.md").read_text(), re.MULTILINE | re.DOTALL)
    complete = [text for text in examples if "…" not in text and not text.startswith("#")]
    for kind, text in zip(("raw", "tokenizers", "tokenized"), complete, strict=True):
        validate(parse_document(text.encode(), "docs/recipes.md"), kind)


# ---- the DCLM reproductions ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", DCLM)
def test_dclm_recipes_have_3_training_16_paloma_and_7_uncheatable_sets(text: str) -> None:
    recipe = checkpoint(text)
    assert recipe.measure.validation is not None
    groups = [name.partition("/")[0] for name in recipe.measure.validation.sets]
    assert set(recipe.data.train) == set(TRAINING_SETS)
    assert {group: groups.count(group) for group in groups} == {"paloma": 16, "uncheatable_eval": 7}
    needed = [target for target in closure(BOOK, [parse_target(text)]) if target.kind == "tokenized"]
    assert len(needed) == 26


@pytest.mark.parametrize("text", DCLM)
def test_dclm_recipes_name_every_validation_set_after_its_target(text: str) -> None:
    recipe = checkpoint(text)
    assert recipe.measure.validation is not None
    for name, target in recipe.measure.validation.sets.items():
        assert target.endswith(f"/{name}/2026.06.28")


def test_the_1b_run_has_the_reference_size() -> None:
    recipe = checkpoint(DCLM[0])
    assert (recipe.steps, tokens(recipe)) == (28_800_000_000 // (256 * 2048), 28_799_664_128)
    assert parameters(recipe.model) == 2_136_049_664
    schedule = recipe.optimizer.schedule
    assert (schedule.warmup_steps, recipe.steps - schedule.warmup_steps) == (5000, 49_931)
    assert schedule.min_lr_ratio * recipe.optimizer.learning_rate == pytest.approx(3e-4)


def test_the_7b_run_has_the_reference_size() -> None:
    recipe = checkpoint(DCLM[1])
    assert (recipe.steps, tokens(recipe)) == (140_000_000_000 // (2048 * 2048), 139_997_478_912)
    assert parameters(recipe.model) == 7_526_944_768


@pytest.mark.parametrize("text", DCLM)
def test_dclm_mixtures_have_the_reference_shares(text: str) -> None:
    weights = {name: component.weight for name, component in checkpoint(text).data.train.items()}
    shares = {name: round(100 * weight / sum(weights.values()), 2) for name, weight in weights.items()}
    assert shares == {"dclm_baseline": 92.57, "starcoderdata": 6.09, "proofpile_2": 1.34}


@pytest.mark.parametrize(
    ("text", "counts"), list(zip(DCLM, [(1896, 125, 27), (1896, 125, 27), (59, 4, 1)], strict=True))
)
def test_dclm_pages_state_the_sequences_of_a_block(text: str, counts: tuple[int, int, int]) -> None:
    recipe = checkpoint(text)
    assert tuple(sequences_of_a_block(recipe)[name] for name in TRAINING_SETS) == counts
    assert " + ".join(map(str, counts)) in BOOK.path(parse_target(text)).read_text()


@pytest.mark.parametrize("text", DCLM)
def test_token_budgets_are_a_little_above_what_the_run_reads(text: str) -> None:
    recipe = checkpoint(text)
    blocks = math.ceil(recipe.steps * recipe.global_batch_size / recipe.data.mixture_block)
    for name, count in sequences_of_a_block(recipe).items():
        tokenized = BOOK.load(parse_target(recipe.data.train[name].target))
        read = blocks * count * recipe.data.sequence_length
        assert read < tokenized.token_budget.tokens < 1.25 * read
        page = BOOK.path(parse_target(recipe.data.train[name].target)).read_text()
        assert f"{read:,} tokens at most" in page


def test_the_7b_training_sets_begin_with_the_files_of_the_1b_ones() -> None:
    small, large = (
        [BOOK.load(parse_target(component.target)) for component in checkpoint(text).data.train.values()]
        for text in DCLM[:2]
    )
    for one, other in zip(small, large, strict=True):
        assert one.token_budget.seed == other.token_budget.seed
        budgets = {"token_budget": {"tokens"}, "measure": True, "execution": True}
        assert one.model_dump(exclude=budgets) == other.model_dump(exclude=budgets)


def test_the_smoke_recipe_differs_from_the_reference_only_where_it_says_so() -> None:
    reference, smoke = (checkpoint(text).model_dump(exclude={"measure", "execution"}) for text in (DCLM[0], DCLM[2]))
    assert set(differences(reference, smoke)) == {
        "data.tokenizer",
        "data.train.dclm_baseline.target",
        "data.train.starcoderdata.target",
        "data.train.proofpile_2.target",
        "data.sequence_length",
        "data.mixture_block",
        "model.vocab_size",
        "model.hidden_size",
        "model.intermediate_size",
        "model.num_hidden_layers",
        "model.num_attention_heads",
        "model.num_key_value_heads",
        "model.head_dim",
        "optimizer.schedule.warmup_steps",
        "steps",
        "global_batch_size",
    }


def differences(one: dict, other: dict, path: str = "") -> list[str]:
    found = []
    for key in one.keys() | other.keys():
        a, b, here = one.get(key), other.get(key), f"{path}{key}"
        if isinstance(a, dict) and isinstance(b, dict):
            found += differences(a, b, f"{here}.")
        elif a != b:
            found.append(here)
    return found


@pytest.mark.parametrize(("text", "devices"), [(DCLM[0], {"tpu": 64, "gpu": 8}), (DCLM[1], {"tpu": 256, "gpu": 8})])
def test_dclm_batches_divide_among_the_devices_of_their_pages(text: str, devices: dict[str, int]) -> None:
    recipe = checkpoint(text)
    assert set(recipe.execution) == {*devices, "default"}
    for platform, count in devices.items():
        execution = recipe.execution[platform]
        micro = execution.micro_batch_size or recipe.global_batch_size
        assert recipe.global_batch_size % micro == 0
        assert micro % count == 0
        assert (execution.validation_batch_size or micro) % count == 0


# ---- the corpora that ship -------------------------------------------------------------------------------------------


def lines_of(path: Path) -> list[dict]:
    content = path.read_bytes()
    if path.suffix == ".gz":
        content = zlib.decompress(content, 31)
    if path.suffix == ".zst":
        content = zstandard.ZstdDecompressor().decompress(content)
    return [json.loads(line) for line in content.decode().splitlines()]


def documents(folder: Path) -> list[str]:
    rows = [row for path in sorted(folder.rglob("*.jsonl*")) for row in lines_of(path)]
    return [row["content"] if "content" in row else row["text"] for row in rows]


@pytest.mark.parametrize("corpus", ["quickstart", "dclm_smoke"])
def test_embedded_recipes_state_the_digest_of_the_files_that_ship(corpus: str) -> None:
    recipe = BOOK.load(parse_target(f"raw/{corpus}/2026.06.28"))
    entries = file_entries(CORPORA / corpus, list_files(CORPORA / corpus))
    assert recipe.source.corpus == corpus
    assert recipe.source.digest == root_digest(entries)


@pytest.mark.parametrize(
    "place",
    [
        "quickstart/train.jsonl",
        "quickstart/validation.jsonl",
        "dclm_smoke/dclm_baseline",
        "dclm_smoke/starcoderdata",
        "dclm_smoke/proofpile_2",
        "dclm_smoke/paloma",
        "dclm_smoke/uncheatable_eval",
    ],
)
def test_the_note_on_a_corpus_states_its_documents_and_bytes(place: str) -> None:
    corpus, _, name = place.partition("/")
    texts = documents(CORPORA / place) or [row["text"] for row in lines_of(CORPORA / place)]
    counts = f"| {len(texts)} | {sum(len(text.encode()) for text in texts):,} |"
    rows = [line for line in (CORPORA / corpus / "SOURCE.md").read_text().splitlines() if f"`{name}" in line]
    assert [row.endswith(counts) for row in rows] == [True]


def test_no_document_of_the_corpora_occurs_twice() -> None:
    texts = documents(CORPORA)
    assert all(len(text) >= 200 for text in texts)
    assert len(set(texts)) == len(texts) == 381


def test_every_stand_in_of_the_smoke_recipe_holds_what_its_run_reads() -> None:
    recipe = checkpoint(DCLM[2])
    for name, component in recipe.data.train.items():
        texts = documents(CORPORA / "dclm_smoke" / name)
        held = sum(len(text.encode()) + 2 for text in texts)  # a byte is a token; BOS and EOS
        assert held > BOOK.load(parse_target(component.target)).token_budget.tokens
