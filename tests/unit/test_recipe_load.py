from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from marin_build.errors import RecipeError
from marin_build.recipe.load import RecipeBook
from marin_build.recipe.target import parse_target

TINY = "checkpoints/tiny/2026.06.28"


def problem(recipe_tree, target: str = TINY) -> list[str]:
    """The lines of the error that loading `target` gives, without the folder of the test."""
    with pytest.raises(RecipeError) as caught:
        recipe_tree.book.load(parse_target(target))
    return str(caught.value).replace(f"{recipe_tree.folder}/", "").split("\n")


FILE = f"{TINY}.yaml"


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("learning_rate: 3e-3", "learning_rate: -1", "30: optimizer.learning_rate: needs a number above 0, seen -1"),
        ("beta1: 0.9", "beta1: 1.0", "31: optimizer.beta1: needs a number of at least 0 and below 1, seen 1.0"),
        (
            "min_lr_ratio: 0.1",
            "min_lr_ratio: 1.5",
            "37: optimizer.schedule.min_lr_ratio: needs a number from 0 to 1, seen 1.5",
        ),
        ("steps: 100", "steps: many", "38: steps: needs a whole number of at least 1, seen 'many'"),
        ("steps: 100", "steps: 1e3", "38: steps: needs a whole number of at least 1, seen 1000.0; write 1000"),
        ("steps: 100", "steps: 1_000", "38: steps: needs a whole number of at least 1, seen '1_000'; write 1000 wit"),
        ("seed: 0", "seed: true", "42: seed: needs a whole number of at least 0, seen true"),
        ("seed: 0", "seed:", "42: seed: needs a whole number of at least 0, seen null"),
        ("documents: false", "documents: no", "8: data.attention_across_documents: needs true or false, seen 'no'; "),
        ("documents: false", "documents: 0", "8: data.attention_across_documents: needs true or false, seen 0"),
        ("type: adamw", "type: adam", "29: optimizer.type: needs adamw, seen 'adam'"),
        ("[norms, em", "[norm, em", "35: optimizer.no_weight_decay[0]: needs one of norms, embeddings, lm_head, seen"),
        ("norms, embeddings", "norms, norms", "35: optimizer.no_weight_decay: names a group twice"),
        (
            "max_grad_norm: 1",
            "max_grad_norm: none",
            "36: optimizer.max_grad_norm: needs a number above 0 or null, seen",
        ),
        ("compute: bf", "compute: BF", "41: precision.compute: needs one of float32, bfloat16, seen 'BFloat16'"),
        ("tie_word_embeddings: true", "tie_word_embeddings: [1]", "27: model.tie_word_embeddings: needs true or false"),
        ("head_dim: 8", "head_dim: 7", "17: model: head_dim 7 is odd"),
        (
            "value_heads: 2",
            "value_heads: 3",
            "15: model: num_attention_heads 4 is not a multiple of num_key_value_head",
        ),
        ("warmup_steps: 10", "warmup_steps: 101", "37: optimizer.schedule.warmup_steps 101 exceeds steps 100"),
        ("weight: 3}", "weight: -3}", "4: data.train.train.weight: needs a number of at least 0, seen -3"),
        ("    train: {", "    a train: {", "4: data.train: the name 'a train' is not allowed; needs letters, digits"),
        ("tokenizers/bpe/", "tokenized/bpe/", "2: data.tokenizer: needs a target of kind tokenizers, seen 'tokenized/"),
        (
            "bpe/2026.06.28",
            "bpe/2026.02.30",
            "2: data.tokenizer: 'tokenizers/bpe/2026.02.30' is not a target: the vers",
        ),
        ("mixture_block: 16", "mixture_block: 2", "7: data.mixture_block: a block of 2 has no sequence for 'more/note"),
        ("mixture_block: 16", "mixture_block: 2000000", "7: data.mixture_block: 2000000 is not allowed, a block has 1"),
        ("weight: 3}", "weight: 0, max_epochs: 0}", "4: data.train.train.max_epochs: needs a number above 0 or null"),
        ("fsdp: 1", "fsdp: -1", "50: execution.default.mesh: axis sizes are at least 1, or -1 on at most one axis"),
        ("every_steps: 50", "every_steps: 0", "46: measure.validation.every_steps: needs a whole number of at least 1"),
    ],
)
def test_a_wrong_value_is_named_with_line_field_need_and_what_was_seen(recipe_tree, old, new, message):
    recipe_tree.edit(TINY, old, new)
    assert problem(recipe_tree)[0].startswith(f"{FILE}:{message}")


STAGES = """  mixture_block: 16
  stages:
    - from_step: 4
      weights: {train: 0, more/notes: 1}
    - from_step: 8
      weights: {train: 1, more/notes: 1}
"""


def test_stages_are_read_with_their_names_sorted(recipe_tree):
    recipe_tree.edit(TINY, "  mixture_block: 16\n", STAGES)
    stages = recipe_tree.book.load(parse_target(TINY)).data.stages
    assert [(stage.from_step, list(stage.weights.items())) for stage in stages] == [
        (4, [("more/notes", 1), ("train", 0)]),
        (8, [("more/notes", 1), ("train", 1)]),
    ]


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("from_step: 8", "from_step: 4", "11: data: stages[1].from_step 4 is not after that of the stage before, 4"),
        ("from_step: 8", "from_step: 0", "11: data.stages[1].from_step: needs a whole number of at least 1, seen 0"),
        ("from_step: 8", "from_step: 100", "11: data.stages[1].from_step 100 is not before steps 100"),
        ("from_step: 4", "from_step: 5", "9: data.stages[0].from_step: step 5 begins no block of mixture_block 16; th"),
        (
            "train: 0, more",
            "trane: 0, more",
            "10: data: stages[0].weights names 'trane'; train has 'more/notes', 'train",
        ),
        ("train: 1, ", "", "12: data: stages[1].weights lacks 'train'; write 0 for what this stage does not draw from"),
        ("train: 0, more/notes: 1", "train: 0, more/notes: 0", "10: data: stages[0].weights needs a weight above 0"),
        (
            "train: 0, more",
            "train: -1, more",
            "10: data.stages[0].weights.train: needs a number of at least 0, seen -1",
        ),
        (
            "{train: 1, more/notes: 1}",
            "{train: 99, more/notes: 1}",
            "7: data.mixture_block: a block of 16 has no sequence for 'more/notes' in data.stages[1] (share 0.01); "
            "no block up to",
        ),
    ],
)
def test_a_wrong_stage_is_named_with_its_line(recipe_tree, old, new, message):
    recipe_tree.edit(TINY, "  mixture_block: 16\n", STAGES)
    recipe_tree.edit(TINY, old, new)
    assert problem(recipe_tree)[0].startswith(f"{FILE}:{message}")


def test_a_misspelt_key_is_one_problem_with_the_nearest_name_and_all_names(recipe_tree):
    recipe_tree.edit(TINY, "learning_rate:", "lerning_rate:")
    assert problem(recipe_tree) == [
        f"{FILE}:30: optimizer.lerning_rate: unknown key; did you mean 'learning_rate'?",
        "  optimizer has: type, learning_rate, beta1, beta2, epsilon, weight_decay, no_weight_decay, max_grad_norm, "
        "schedule",
    ]


def test_a_key_in_the_wrong_block_is_told_where_it_belongs(recipe_tree):
    recipe_tree.edit(TINY, "  sequence_length: 64\n", "")
    recipe_tree.edit(TINY, "seed: 0", "seed: 0\nsequence_length: 64")
    first, *rest = problem(recipe_tree)
    assert first == f"{FILE}:42: sequence_length: does not belong here, but in the block 'data'"
    assert len(rest) == 1


def test_an_unknown_key_near_nothing_lists_the_known_ones(recipe_tree):
    recipe_tree.edit(TINY, "seed: 0", "seed: 0\nfrobnicate: 1")
    first, names = problem(recipe_tree)
    assert first == f"{FILE}:43: frobnicate: unknown key"
    assert names.startswith("  a recipe of this kind has: data, model, optimizer, steps")


@pytest.mark.parametrize(
    ("gone", "message"),
    [
        ("seed: 0\n", "1: seed: missing at the top level; needs a whole number of at least 0"),
        ("  epsilon: 1e-8\n", "28: optimizer.epsilon: missing from the block 'optimizer'; needs a number above 0"),
        (", warmup_steps: 10", "37: optimizer.schedule.warmup_steps: missing from the block 'optimizer.schedule'"),
        (
            "    type: llama3\n",
            "19: model.rope_scaling.type: missing from the block 'model.rope_scaling'; needs llama3",
        ),
    ],
)
def test_a_missing_field_says_where_it_belongs_and_what_it_needs(recipe_tree, gone, message):
    recipe_tree.edit(TINY, gone, "")
    assert problem(recipe_tree)[0].startswith(f"{FILE}:{message}")


@pytest.mark.parametrize(
    ("target", "old", "new", "message"),
    [
        (
            "raw/hub/2026.06.28",
            "type: huggingface",
            "type: hugingface",
            "2: source.type: needs one of embedded, files, github, huggingface, seen 'hugingface'; did you mean "
            "'huggingface'?",
        ),
        (
            "raw/hub/2026.06.28",
            "  type: huggingface\n",
            "",
            "1: source.type: missing from the block 'source'; needs one of embedded, files, github, huggingface",
        ),
        (
            "raw/files/2026.06.28",
            "paths:",
            "files:",
            "3: source.files: unknown key; did you mean 'paths', which is missing?",
        ),
        (
            "raw/files/2026.06.28",
            "digest: unresolved",
            "digest: latest",
            "4: source.digest: needs 32 hex digits, or unresolved, seen 'latest'",
        ),
        (
            "raw/hub/2026.06.28",
            "revision: 65cd6fc",
            "revision: 1234567",
            "4: source.revision: needs a commit of 7 to 40 hex digits, or unresolved, seen 1234567; put quotes around",
        ),
        (
            "raw/hub/2026.06.28",
            '["c4_en/val/val*.jsonl.gz"]',
            "[../secret]",
            "5: source.files[0]: needs a relative path or glob without '..', seen '../secret'",
        ),
        (
            "raw/hub/2026.06.28",
            '["c4_en/val/val*.jsonl.gz"]',
            "[]",
            "5: source.files: needs a list of at least one item, each a relative path",
        ),
        (
            "raw/hub/2026.06.28",
            "source:\n  type: huggingface",
            "source: embedded\nx:\n  type: huggingface",
            "1: source: needs a block whose 'type' is one of embedded, files, github, huggingface, seen 'embedded'",
        ),
        (
            "tokenizers/bpe/2026.06.28",
            "document: paragraph",
            "document: sentence",
            "9: tokenizer.text[1].format.document: needs one of file, line, paragraph, seen 'sentence'",
        ),
        (
            "tokenizers/bpe/2026.06.28",
            "eos: <eos>",
            "eos: <bos>",
            "12: tokenizer.special_tokens: special tokens must be distinct and not empty",
        ),
    ],
)
def test_errors_inside_choices_name_the_written_path(recipe_tree, target, old, new, message):
    recipe_tree.edit(target, old, new)
    assert problem(recipe_tree, target)[0].startswith(f"{target}.yaml:{message}")


def test_all_problems_are_told_in_the_order_of_the_file(recipe_tree):
    recipe_tree.edit(TINY, "seed: 0", "seed: -1")
    recipe_tree.edit(TINY, "hidden_size: 32", "hidden_size: 0")
    recipe_tree.edit(TINY, "beta2: 0.95", "beta2: x")
    assert [line.split(":")[1] for line in problem(recipe_tree)] == ["12", "32", "42"]


def test_a_file_of_nonsense_gives_a_short_message(recipe_tree):
    recipe_tree.write(TINY, "".join(f"k{i}: {i}\n" for i in range(1000)))
    lines = problem(recipe_tree)
    assert len(lines) < 40
    assert lines[-1].endswith("more")


def test_a_whole_number_is_a_number(recipe_tree):
    recipe_tree.edit(TINY, "learning_rate: 3e-3", "learning_rate: 1")
    assert type(recipe_tree.book.load(parse_target(TINY)).optimizer.learning_rate) is float


def test_a_missing_recipe_names_the_path_and_the_nearest_target(recipe_tree):
    lines = problem(recipe_tree, "checkpoints/tinny/2026.06.28")
    assert lines[0] == "checkpoints/tinny/2026.06.28 has no recipe: checkpoints/tinny/2026.06.28.yaml does not exist"
    assert "  did you mean checkpoints/tiny/2026.06.28?" in lines


def test_a_missing_version_names_the_versions_there_are(recipe_tree):
    lines = problem(recipe_tree, "checkpoints/tiny/2026.06.29")
    assert lines[1:] == [
        "  did you mean checkpoints/tiny/2026.06.28?",
        "  versions: 2026.06.28, 2026.06.28.1",
    ]


def test_a_name_without_its_kind_is_found():
    book = RecipeBook(Path(__file__).parent.parent / "golden" / "recipes")
    assert book.suggest("tiny/2026.06.28") == "  did you mean checkpoints/tiny/2026.06.28?"


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("checkpoints/tiny", "checkpoints/tiny/2026.06.28.1"),
        ("checkpoint/tiny/2026.06.28", "checkpoints/tiny/2026.06.28"),
        ("tokenized/train/2026.06.28", "tokenized/bpe/train/2026.06.28"),
        ("tokenized/bpe/validaton/dev", "tokenized/bpe/validation/2026.06.28"),
        ("checkpoints/tiny/2026-06-28/", "checkpoints/tiny/2026.06.28"),
    ],
)
def test_what_was_meant_is_found(recipe_tree, typed, meant):
    assert recipe_tree.book.suggest(typed).splitlines()[0] == f"  did you mean {meant}?"


def test_a_wrong_ending_is_noticed(recipe_tree):
    path = recipe_tree.book.path(parse_target(TINY))
    path.rename(path.with_suffix(".yml"))
    assert "but recipes end in .yaml" in problem(recipe_tree)[1]


def test_an_empty_folder_says_where_recipes_are_looked_for(tmp_path):
    with pytest.raises(RecipeError, match="--config recipes=FOLDER"):
        RecipeBook(tmp_path / "nothing").load(parse_target(TINY))


def test_what_is_no_readable_file_is_refused_without_waiting(recipe_tree):
    path = recipe_tree.book.path(parse_target(TINY))
    path.unlink()
    os.mkfifo(path)
    assert problem(recipe_tree) == [f"{FILE}: is not a file"]
    path.unlink()
    path.mkdir()
    assert problem(recipe_tree) == [f"{FILE}: is not a file"]
    path.rmdir()
    path.symlink_to(path)
    assert problem(recipe_tree)[0].startswith(f"{FILE}: cannot be read: ")


def test_paths_in_messages_are_relative_to_the_working_directory(recipe_tree, monkeypatch):
    recipe_tree.edit(TINY, "seed: 0", "seed: -1")
    monkeypatch.chdir(recipe_tree.folder.parent)
    for folder in ("config", recipe_tree.folder):
        with pytest.raises(RecipeError, match=rf"^config/{FILE}:42: seed"):
            RecipeBook(folder).load(parse_target(TINY))


def test_only_the_recipe_asked_for_is_read(recipe_tree, monkeypatch):
    for name in ("raw/hub", "tokenized/bpe/train", "tokenizers/bpe"):
        recipe_tree.write(f"{name}/2026.06.28", "not: [a recipe")
    assert recipe_tree.book.load(parse_target(TINY)).steps == 100


def test_loading_a_recipe_takes_about_a_millisecond(recipe_tree):
    book, target = recipe_tree.book, parse_target(TINY)
    book.load(target)
    times = []
    for _ in range(20):
        fresh = recipe_tree.book
        start = time.process_time()
        fresh.load(target)
        times.append(time.process_time() - start)
    assert min(times) < 0.005  # 0.6 ms on an idle core; the bound holds on a slow and busy machine


def test_targets_lists_recipes_and_nothing_else(recipe_tree):
    (recipe_tree.folder / "checkpoints" / "tiny" / "notes.yaml").write_text("x")
    (recipe_tree.folder / "checkpoints" / "tiny" / "2026.13.28.yaml").write_text("x")
    (recipe_tree.folder / "schema").mkdir()
    (recipe_tree.folder / "config.yaml").write_text("prefix: x")
    found = [str(target) for target in recipe_tree.book.targets()]
    assert len(found) == 15
    assert found[:2] == [TINY, f"{TINY}.1"]
    assert TINY in found


def test_versions_are_listed_by_date_and_number(recipe_tree):
    for version in ("2026.06.28.10", "2026.06.28.2", "dev", "2025.12.31"):
        recipe_tree.write(f"raw/hub/{version}", recipe_tree.text("raw/hub/2026.06.28"))
    found = [target.version for target in recipe_tree.book.targets() if target.name == "raw/hub"]
    assert found == ["dev", "2025.12.31", "2026.06.28", "2026.06.28.2", "2026.06.28.10"]


def test_a_key_cannot_break_the_message_into_lines(recipe_tree):
    recipe_tree.edit(TINY, "  beta1: 0.9", '  "beta\\n\\u2028x": 0.9')
    assert any(r"optimizer.'beta\n\u2028x': unknown key; did you mean 'beta1'" in line for line in problem(recipe_tree))


def test_of_many_versions_the_newest_are_listed(recipe_tree):
    for number in range(1, 31):
        recipe_tree.write(f"raw/many/2026.07.01.{number}", recipe_tree.text("raw/hub/2026.06.28"))
    last = recipe_tree.book.suggest("raw/many/2026.08.01").splitlines()[-1]
    assert last.startswith("  versions: 18 older, 2026.07.01.19, ")
    assert last.endswith(", 2026.07.01.30")
