from __future__ import annotations

import os
import stat
from datetime import date

import pytest

from marin_build.errors import RecipeError, RequestError
from marin_build.recipe.dependencies import closure
from marin_build.recipe.edit import bump, new, replace_value
from marin_build.recipe.header import plain
from marin_build.recipe.load import RecipeBook
from marin_build.recipe.presets import SIZES, preset
from marin_build.recipe.target import parse_target

TINY = parse_target("checkpoints/tiny/2026.06.28")
DAY = date(2026, 7, 1)


@pytest.fixture
def empty_book(tmp_path):
    return RecipeBook(tmp_path / "config")


def comments(text: str) -> list[str]:
    return [line for line in text.split("\n") if line.startswith("#")]


# ---- new -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("model", [None, *SIZES])
def test_every_preset_writes_a_page_that_loads(empty_book, model):
    target = parse_target("checkpoints/mine/2026.07.01")
    path = new(empty_book, target, model)
    recipe = empty_book.load(target)
    size = SIZES[model or "quickstart"]
    assert path == empty_book.path(target)
    assert recipe.data.sequence_length == size.sequence_length
    assert recipe.model.hidden_size == size.hidden_size
    assert recipe.model.head_dim * recipe.model.num_attention_heads == size.hidden_size
    assert max(map(len, path.read_text().split("\n"))) <= 120


def test_the_literals_of_the_150m_preset_are_the_published_ones(empty_book):
    target = parse_target("checkpoints/mine/dev")
    new(empty_book, target, "150m")
    recipe = empty_book.load(target)
    assert (recipe.model.hidden_size, recipe.model.intermediate_size, recipe.model.num_hidden_layers) == (512, 1792, 6)
    assert (recipe.model.num_attention_heads, recipe.model.num_key_value_heads, recipe.model.rope_theta) == (8, 8, 1e4)
    assert (recipe.global_batch_size, recipe.steps, recipe.data.sequence_length) == (512, 20_000, 1024)
    assert (recipe.optimizer.learning_rate, recipe.optimizer.weight_decay) == (3e-3, 0.1)
    assert recipe.optimizer.schedule.warmup_steps == 200


def test_llama3_presets_scale_their_rotary_embeddings(empty_book):
    target = parse_target("checkpoints/mine/dev")
    new(empty_book, target, "LLAMA3.1-8b")
    model = empty_book.load(target).model
    assert (model.rope_theta, model.rope_scaling.factor, model.tie_word_embeddings) == (5e5, 8, False)


@pytest.mark.parametrize(
    ("model", "billions"),
    [
        ("1.4b", 1.4),
        ("1.9b", 1.9),
        ("llama3.2-1B", 1.24),
        ("llama3.1-8B", 8.03),
        ("13b", 12.3),
        ("24b", 24),
        ("70b", 70.6),
    ],
)
def test_presets_have_the_sizes_of_their_names(model, billions):
    assert SIZES[model].parameters(128_256) == pytest.approx(billions * 1e9, rel=0.03)


def test_a_run_without_known_steps_reads_twenty_tokens_a_parameter():
    chosen = preset("600m")
    tokens = chosen.steps(128_256) * chosen.training.global_batch_size * chosen.size.sequence_length
    assert tokens / chosen.size.parameters(128_256) == pytest.approx(20, rel=0.01)


def test_an_unknown_preset_lists_the_known_ones(empty_book):
    with pytest.raises(RequestError, match=r"--model '150n': no such preset; did you mean '150m'\?\n  presets are: "):
        new(empty_book, parse_target("checkpoints/mine/dev"), "150n")


def test_a_model_is_for_checkpoints(empty_book):
    with pytest.raises(RequestError, match="--model '150m' is for checkpoints"):
        new(empty_book, parse_target("raw/mine/dev"), "150m")


def test_pages_of_one_name_fit_together(empty_book):
    for text in (
        "raw/mine",
        "tokenizers/mine",
        "tokenized/mine/train",
        "tokenized/mine/validation",
        "checkpoints/mine",
    ):
        new(empty_book, parse_target(f"{text}/dev"))
    run = parse_target("checkpoints/mine/dev")
    assert [str(target) for target in closure(empty_book, [run])] == [
        "raw/mine/dev",
        "tokenizers/mine/dev",
        "checks/encoder/mine/dev",
        "tokenized/mine/train/dev",
        "tokenized/mine/validation/dev",
        "checkpoints/mine/dev",
    ]
    recipe = empty_book.load(run)
    assert list(recipe.data.train) == ["train"]
    assert list(recipe.measure.validation.sets) == ["validation"]


def test_a_new_run_follows_the_smallest_run_that_reads_enough(recipe_tree):
    recipe_tree.write(
        "checkpoints/large/2026.06.28", recipe_tree.text(str(TINY)).replace("steps: 100", "steps: 1000000")
    )
    target = parse_target("checkpoints/mine/2026.07.01")
    path = new(recipe_tree.book, target, "nano")
    recipe = recipe_tree.book.load(target)
    assert recipe.data.train == recipe_tree.book.load(TINY).data.train
    assert recipe.measure.validation.sets == recipe_tree.book.load(TINY).measure.validation.sets
    assert recipe.model.vocab_size == 2048
    assert "As in checkpoints/large/2026.06.28." in path.read_text()
    assert closure(recipe_tree.book, [target])


def test_a_new_run_that_reads_more_than_any_other_says_so(recipe_tree):
    path = new(recipe_tree.book, parse_target("checkpoints/mine/2026.07.01"), "8b")
    assert "of what this run does: check their token budgets" in path.read_text()


def test_a_fixed_page_names_no_dev_version(recipe_tree):
    recipe_tree.write("tokenizers/bpe/dev", recipe_tree.text("tokenizers/bpe/2026.06.28"))
    target = parse_target("tokenized/bpe/more/2026.07.01")
    new(recipe_tree.book, target)
    assert recipe_tree.book.load(target).tokenizer == "tokenizers/bpe/2026.06.28"


def test_a_broken_run_is_no_example_and_no_obstacle(recipe_tree):
    recipe_tree.write("checkpoints/broken/2026.06.28", "steps: [")
    new(recipe_tree.book, parse_target("checkpoints/mine/2026.07.01"), "nano")


def test_pages_open_with_what_source_cost_result_and_command(empty_book):
    text = new(empty_book, parse_target("checkpoints/mine/dev"), "30m").read_text()
    assert [line.split()[1] for line in text.split("\n")[2:7]] == ["What", "Source", "Cost", "Expected", "Build"]
    assert text.split("\n")[0] == "# checkpoints/mine/dev"
    assert text.split("\n")[6].endswith("snakemake checkpoints/mine/dev")
    order = [text.index(f"\n{block}:") for block in ("data", "model", "optimizer", "measure", "execution")]
    assert order == sorted(order)


@pytest.mark.parametrize(
    "name", ["4chan", "1984", "null", "1e5", "true", "a/b-c.d", "x: y", "{a}", "#", "größer\n", "-"]
)
def test_names_are_quoted_where_yaml_would_read_something_else(name):
    from marin_build.recipe.document import parse_document

    assert parse_document(f"{plain(name)}: {plain(name)}\n".encode(), "").value == {name: name}
    assert (plain(name) == name) is (name in ("4chan", "a/b-c.d"))


# ---- nothing is overwritten ------------------------------------------------------------------------------------------


def test_new_refuses_to_overwrite(recipe_tree):
    before = recipe_tree.text(str(TINY))
    with pytest.raises(RequestError, match=r"exists and is not overwritten\n  marin-build bump checkpoints/tiny"):
        new(recipe_tree.book, TINY, "nano")
    assert recipe_tree.text(str(TINY)) == before


def test_bump_refuses_to_overwrite(recipe_tree):
    with pytest.raises(RequestError, match="exists and is not overwritten"):
        bump(recipe_tree.book, TINY, "2026.06.28.1")


def test_a_dangling_link_is_not_written_through(recipe_tree):
    path = recipe_tree.book.path(parse_target("raw/mine/dev"))
    path.parent.mkdir()
    path.symlink_to(recipe_tree.folder / "elsewhere")
    with pytest.raises(RequestError, match="exists"):
        new(recipe_tree.book, parse_target("raw/mine/dev"))


def test_a_folder_that_cannot_be_written_is_one_line(recipe_tree):
    (recipe_tree.folder / "raw" / "mine").write_text("a file where the folder should be")
    with pytest.raises(RequestError, match=r"raw/mine/dev\.yaml: cannot be written: "):
        new(recipe_tree.book, parse_target("raw/mine/dev"))


# ---- bump ------------------------------------------------------------------------------------------------------------


def test_bump_copies_to_todays_date_and_numbers_later_ones(recipe_tree):
    paths = [bump(recipe_tree.book, TINY, today=DAY) for _ in range(3)]
    assert [path.name for path in paths] == ["2026.07.01.yaml", "2026.07.01.1.yaml", "2026.07.01.2.yaml"]
    assert {path.read_text() for path in paths} == {recipe_tree.text(str(TINY))}


def test_a_bumped_recipe_is_the_same_artifact_until_it_is_edited(recipe_tree):
    bump(recipe_tree.book, TINY, "dev")
    assert recipe_tree.fingerprint("checkpoints/tiny/dev") == recipe_tree.fingerprint(str(TINY))


def test_bump_renames_the_target_at_the_head_and_nowhere_else(recipe_tree):
    head = (
        "# checkpoints/tiny/2026.06.28\n#\n# Build   snakemake checkpoints/tiny/2026.06.28 --profile tpu\n"
        "# checkpoints/tiny/2026.06.28.1, config/checkpoints/tiny/2026.06.28.yaml a-checkpoints/tiny/2026.06.28\n\n"
        "# (checkpoints/tiny/2026.06.28)\n"
    )
    body = f"{recipe_tree.text(str(TINY))}# as checkpoints/tiny/2026.06.28 did\n"
    recipe_tree.write(str(TINY), head + body)
    assert (
        bump(recipe_tree.book, TINY, today=DAY).read_text()
        == (
            "# checkpoints/tiny/2026.07.01\n#\n# Build   snakemake checkpoints/tiny/2026.07.01 --profile tpu\n"
            "# checkpoints/tiny/2026.06.28.1, config/checkpoints/tiny/2026.07.01.yaml a-checkpoints/tiny/2026.06.28\n\n"
            "# (checkpoints/tiny/2026.07.01)\n"
        )
        + body
    )


@pytest.mark.parametrize("version", ["tomorrow", "2026.13.01", "../dev", "x/dev", "a b-dev", ""])
def test_bump_takes_versions_only(recipe_tree, version):
    if version:
        with pytest.raises(RequestError, match="is not a target"):
            bump(recipe_tree.book, TINY, version)
    else:
        assert bump(recipe_tree.book, TINY, version, today=DAY).name == "2026.07.01.yaml"


def test_a_recipe_that_does_not_load_is_not_copied(recipe_tree):
    recipe_tree.edit(str(TINY), "seed: 0", "seed: none")
    with pytest.raises(RecipeError, match=":42: seed"):
        bump(recipe_tree.book, TINY, today=DAY)


# ---- one value -------------------------------------------------------------------------------------------------------

HUB = parse_target("raw/hub/2026.06.28")


@pytest.mark.parametrize("ending", ["\n", "\r\n"])
@pytest.mark.parametrize("mark", ["", "\ufeff"])
@pytest.mark.parametrize("old", ["unresolved", '"unresolved"', "'unresolved'", "unresolved # größer 🎲"])
def test_one_value_is_replaced_and_every_other_byte_stays(recipe_tree, ending, mark, old):
    lines = [
        "# größer 🎲",
        "source:",
        "  type: github",
        "  repository: a/b",
        f"  revision: {old}",
        "  files: ['*']",
        "",
    ]
    path = recipe_tree.book.path(HUB)
    path.write_bytes((mark + ending.join(lines)).encode())
    replace_value(recipe_tree.book, HUB, ("source", "revision"), "0123456")
    lines[4] = lines[4].replace(old.partition(" #")[0], '"0123456"')
    assert path.read_bytes() == (mark + ending.join(lines)).encode()
    assert recipe_tree.book.load(HUB).source.revision == "0123456"


def test_a_value_within_a_list_is_replaced(recipe_tree):
    target = parse_target("tokenizers/bpe/2026.06.28")
    replace_value(recipe_tree.book, target, ("tokenizer", "text", 1, "files", 0), "*.text")
    assert recipe_tree.book.load(target).tokenizer.text[1].files == ["*.text"]


def test_a_value_that_the_schema_refuses_leaves_the_file_alone(recipe_tree):
    before = recipe_tree.text(str(HUB))
    with pytest.raises(RecipeError, match=r"source\.revision: needs a commit"):
        replace_value(recipe_tree.book, HUB, ("source", "revision"), "main")
    assert recipe_tree.text(str(HUB)) == before
    assert os.listdir(recipe_tree.book.path(HUB).parent) == ["2026.06.28.yaml"]


def test_permissions_and_links_stay(recipe_tree):
    path, real = recipe_tree.book.path(HUB), recipe_tree.folder / "real.yaml"
    path.rename(real)
    real.chmod(0o640)
    path.symlink_to(real)
    replace_value(recipe_tree.book, HUB, ("source", "revision"), "abcdef0")
    assert path.is_symlink()
    assert "abcdef0" in real.read_text()
    assert stat.S_IMODE(real.stat().st_mode) == 0o640
