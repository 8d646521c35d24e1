"""Where settings come from, which ones win, and what jobs are told."""

from __future__ import annotations

import re
import shlex

import pytest

TOKENS = "tokenized/play/2026.01.01"
BYTES = "tokenizers/bytes/2026.01.01"


@pytest.fixture
def job(snakemake):
    """The words of a job's command line, as a dry run shows it."""

    def words(*arguments):
        found = snakemake("-n", "-p", *arguments)
        assert found.code == 0, found.text
        commands = re.findall(r"Shell command: (.*-m marin_build build \S+.*)", found.out)
        commands = commands or re.findall(r"^\s*(\S+ -m marin_build build \S+.*)", found.out, re.MULTILINE)
        assert len(commands) == 1, found.out
        return shlex.split(commands[0])

    return words


def after(words, option):
    return words[words.index(option) + 1]


def overrides(words):
    if "--config" not in words:
        return {}
    return dict(word.split("=", 1) for word in words[words.index("--config") + 1 : words.index("--run")])


def test_a_job_is_one_plain_command_with_resolved_settings(job):
    words = job(BYTES)
    assert words[1:5] == ["-m", "marin_build", "build", BYTES]
    assert after(words, "--prefix") == "artifacts"
    assert after(words, "--recipes") == "config"
    assert re.fullmatch("[0-9a-f]{12}", after(words, "--run"))


def test_each_run_has_an_id_of_its_own(job):
    assert after(job(BYTES), "--run") != after(job(BYTES), "--run")


def test_the_prefix_rises_from_file_to_environment_to_command_line(repository, job, monkeypatch):
    settings = repository.folder / "config/config.yaml"
    settings.write_text("prefix: from_file\nrecipes: config\n")
    assert after(job(BYTES), "--prefix") == "from_file"
    monkeypatch.setenv("MARIN_PREFIX", "from_environment")
    assert after(job(BYTES), "--prefix") == "from_environment"
    assert after(job(BYTES, "--config", "prefix=from_command"), "--prefix") == "from_command"
    assert after(job(BYTES, "-C", "prefix=from_command"), "--prefix") == "from_command"


def test_a_profile_stands_between_the_file_and_the_environment(repository, job, monkeypatch):
    profile = repository.folder / "mine"
    profile.mkdir()
    (profile / "profile.yaml").write_text("config:\n  prefix: from_profile\n  wandb: disabled\n")
    words = job(BYTES, "--profile", "mine")
    assert after(words, "--prefix") == "from_profile"
    assert overrides(words)["wandb"] == "disabled"
    monkeypatch.setenv("MARIN_PREFIX", "from_environment")
    assert after(job(BYTES, "--profile", "mine"), "--prefix") == "from_environment"


def test_another_prefix_is_another_world(repository, snakemake):
    repository.finish_all()
    assert snakemake(TOKENS).is_idle
    assert TOKENS in snakemake("-n", TOKENS, "--config", "prefix=elsewhere").table
    assert snakemake(TOKENS).is_idle
    assert snakemake(TOKENS, "--config", f"prefix={repository.folder}/artifacts").is_idle


def test_overrides_reach_the_job_as_yaml(job):
    words = job(BYTES, "--config", "wait=true", "wandb_project=two words", "mesh={data: 2, fsdp: 1}")
    assert overrides(words) == {
        "wait": "true",
        "wandb_project": "two words",
        "mesh": '{"data": 2, "fsdp": 1}',
    } | {"processes": overrides(words)["processes"]}


def test_a_job_may_use_the_cores_of_its_rule_unless_told_otherwise(job):
    assert overrides(job(BYTES, "--cores", "2"))["processes"] == "2"
    assert overrides(job(BYTES, "--cores", "2", "--config", "processes=7"))["processes"] == "7"


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("prefx=a", "Error: unknown setting 'prefx'; did you mean 'prefix'?"),
        ("lease_seconds=-1", "Error: setting lease_seconds"),
        ("prefix=s3://user:secret@bucket/a", "Error: setting prefix: holds credentials"),
    ],
)
def test_a_wrong_setting_is_one_clear_line(snakemake, given, said):
    found = snakemake("-n", BYTES, "--config", given)
    assert found.code == 1
    assert said in found.text
    assert "Traceback" not in found.text
    assert "Snakefile" not in found.text.split("Error: ")[1]


def test_recipes_may_live_in_another_folder(repository, snakemake):
    (repository.folder / "config").rename(repository.folder / "experiments")
    (repository.folder / "config").mkdir()
    (repository.folder / "config/config.yaml").write_text("recipes: experiments\n")
    assert TOKENS in snakemake("-n", TOKENS).table
    assert TOKENS in snakemake("-n", f"experiments/{TOKENS}.yaml").table
