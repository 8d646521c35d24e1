"""The one module that meets Snakemake: what a user typed becomes records that Snakemake can make.

Snakemake resolves targets in `Workflow._prepare_dag` in every mode (`-n`, `--dag`, `--summary`, real runs). `Build`
steps in just before: it turns typed artifacts into mirrored records, stops for typos and drift with a clean message,
decides what runs and why, and pins what the semantics rest on: no locks (leases guard the prefix), no incomplete
markers (a record is written whole or not at all), no rerun triggers (fingerprints decide).

A mirror, `.marin/records/<target>.json`, is a copy of an artifact's record and the only file that rules declare, so
whatever Snakemake deletes is never the truth.
"""

from __future__ import annotations

import inspect
import logging
import os
import shlex
import sys
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import Any

from snakemake import __version__ as snakemake_version
from snakemake.exceptions import CliException
from snakemake.io import ancient
from snakemake.logging import logger
from snakemake.settings.enums import RerunTrigger

from marin_build import refusals, shares
from marin_build.artifact import forced, mirror
from marin_build.artifact.attempt import read_attempt
from marin_build.artifact.claims import Claims
from marin_build.artifact.examine import State, Status, examine, examine_all
from marin_build.artifact.store import open_store
from marin_build.errors import MarinError, RequestError
from marin_build.foreign import printable
from marin_build.recipe.dependencies import closure
from marin_build.recipe.derived import base_of, part_target
from marin_build.recipe.load import RecipeBook
from marin_build.recipe.target import TARGET_PATTERN, Target, is_target, parse_target
from marin_build.runs import Plan, decide, restrict, table
from marin_build.settings import Settings, as_options, resolve
from marin_build.typed import as_target

SNAKEMAKE_VERSIONS = ">=9.19,<10"
RUN_VARIABLE = "MARIN_RUN_ID"
PREFIX_VARIABLE = "MARIN_PREFIX"
SHOWN_LINES = 20
"""Lines of a log that are shown when its job failed."""
WAIT_SECONDS = 0.5
SHOWN_PARTS = 200
"""Part jobs that a plan or a picture shows one by one."""


class AdapterError(CliException):
    """Prints as `Error: …`. Without a traceback to search, Snakemake adds no line of a Snakefile, whoever raises it."""

    __traceback__ = None

    def __init__(self, text: object) -> None:
        super().__init__(printable(text))


def record(target: str | Target) -> str:
    """The file that stands for an artifact in rules: the mirror of its record."""
    return f"{mirror.FOLDER}/{target}.json"


class Build:
    """What the Snakefile needs to know, and the hook in front of the DAG."""

    def __init__(self, workflow: Any, config: Mapping[str, Any]) -> None:
        inner = _hooked_method(workflow)
        logger.addFilter(_clean_record)
        self._workflow = workflow
        self._plan = Plan()
        self._shares: dict[Target, list[Target]] = {}
        """Of each token set that runs: the parts of the work that are to be made first."""
        self._statuses: dict[Target, Status] = {}
        with _clean_errors():
            self._given = dict(config)
            self._settings = resolve(config, command_line=_typed_settings(workflow, config))
            self._book = RecipeBook(self._settings.recipes, self._settings.encoder)
            self._store = open_store(self._settings.prefix, self._settings.object_cache)
        self._run = uuid.uuid4().hex[:12] if workflow.is_main_process else os.environ.get(RUN_VARIABLE)
        if workflow.is_main_process:  # a spawned job gets concrete files: leave them alone
            self._claims = Claims(self._run)
            workflow._prepare_dag = self._in_front_of(inner)

    # ---- for rules ---------------------------------------------------------------------------------------------------

    python = shlex.quote(sys.executable)
    """The interpreter that has marin_build, whether or not its environment is activated."""

    @staticmethod
    def targets(kind: str) -> str:
        """What the wildcard `target` may be in the rule of `kind`."""
        return f"(?={kind}/){TARGET_PATTERN}"

    def dependencies(self, wildcards: Any) -> list[str]:
        """Records that must be there before a target is built; of one that stays as it is, those that are there.

        They are `ancient`, so that neither age nor a rebuild upstream makes anything run; except between two targets
        that both run, because Snakemake drops a job that it would only run for its own sake behind an ancient input.
        """
        files = {need: record(need) for need in self._inputs(parse_target(wildcards.target))}
        return [file if need in self._plan.runs else ancient(file) for need, file in files.items()]

    def parts(self, wildcards: Any) -> list[str]:
        """Records of the parts that a token set is joined from, as far as they are not there yet."""
        return [record(part) for part in self._shares.get(parse_target(wildcards.target), ())]

    def cores(self, wildcards: Any) -> int:
        """All cores of this run: a job that fills the machine runs alone."""
        return self._workflow.resource_settings.cores or len(os.sched_getaffinity(0))

    def arguments(self, wildcards: Any, threads: int) -> str:
        """Options that make a job use this run's settings, resolved here, whatever it would find where it runs."""
        chosen = {key: getattr(self._settings, key) for key in self._given}
        if self._workflow.is_main_process and self._workflow.local_exec and self._settings.processes is None:
            chosen["processes"] = threads
        return shlex.join([*as_options(self._settings, chosen), *(["--run", self._run] if self._run else [])])

    # ---- in front of the DAG -----------------------------------------------------------------------------------------

    def _in_front_of(self, inner: Callable[..., Any]) -> Callable[..., Any]:
        def prepare(*arguments: Any, **options: Any) -> Any:
            with _clean_errors():
                self._prepare()
            return inner(*arguments, **{**options, "nolock": True, "ignore_incomplete": True})

        return prepare

    def _prepare(self) -> None:
        """Plan, and tell Snakemake and people about it."""
        workflow, settings = self._workflow, self._workflow.dag_settings
        settings.rerun_triggers = frozenset({RerunTrigger.MTIME})  # inputs are ancient, so that it never fires
        meant = self._translate()
        targets = self._artifacts(meant["targets"] or [workflow.default_target])
        typed = [*targets, *self._artifacts(meant["forcerun"] + meant["until"] + meant["prioritytargets"])]
        order = closure(self._book, typed)
        force = set(self._members(meant["forcerun"], order))
        force |= set(targets if settings.forcetargets else ()) | set(order if settings.forceall else ())
        until, omit_from = (self._members(meant[option], order) for option in ("until", "omit_from"))

        def plan() -> Plan:
            """What is to do, as things are now."""
            self._look(order, force)
            self._plan = decide(list(self._statuses.values()), {t: self._needs(t) for t in order}, typed, force)
            return restrict(self._plan, {target: self._inputs(target) for target in order}, until, omit_from)

        left = plan()
        if workflow.dryrun:
            print(printable(table(left, len(order), self._share_out(left))), end="", file=sys.stderr)
        elif not self._is_looking and not workflow.touch:
            left = self._claimed(left, plan)
            self._share_out(left)
            self._begin(left)
        else:
            self._share_out(left)
        settings.forcerun = [*settings.forcerun, *map(record, self._mirrored_but_run())]

    def _share_out(self, plan: Plan) -> dict[Target, int]:
        """Note the parts of the work on each token set that runs, and say how many there are.

        Snakemake takes milliseconds for a job. So in a plan or a picture with very many of them one part stands for
        all of its set.
        """
        counts = {target: shares.parts_of(self._book.load(target), self._settings) for target in plan.runs}
        shared = {target: count for target, count in counts.items() if count > 1}
        is_real = not (self._workflow.dryrun or self._is_looking or self._workflow.touch)
        is_short = not is_real and sum(shared.values()) > SHOWN_PARTS
        for target, count in shared.items():
            forced = target in plan.forced
            if is_short:
                self._shares[target] = [part_target(target, 0, count)]
            else:
                self._shares[target] = shares.missing(self._store, self._book, target, count, forced=forced)
            for part in self._shares[target]:
                mirror.remove(part)
        return shared

    @property
    def _is_looking(self) -> bool:
        """True for `--dag`, `--summary`, `--delete-all-output` and the like."""
        return self._workflow.execution_settings is None

    def _look(self, order: Sequence[Target], force: set[Target]) -> None:
        """See what is there, bring the mirrors in line, and stop for drift; a picture of it may still be drawn."""
        self._statuses = {status.target: status for status in examine_all(self._store, self._book, order)}
        for target, status in self._statuses.items():
            mirror.refresh(self._store, target, status.record)
        text = refusals.drift(self._book, self._statuses.values(), force)
        if text and self._is_looking:
            print(printable(f"Warning: {text}"), file=sys.stderr)
        elif text:
            raise AdapterError(text)

    def _translate(self) -> dict[str, list[Target | str]]:
        """What was typed, by option. Snakemake is given records for artifacts; names of rules and other files stay."""
        meant: dict[str, list[Target | str]] = {"prioritytargets": []}
        options = [(self._workflow.dag_settings, name) for name in ("targets", "forcerun", "until", "omit_from")]
        if self._workflow.scheduling_settings is not None:
            options.append((self._workflow.scheduling_settings, "prioritytargets"))
        for settings, name in options:
            meant[name] = [self._meant(text, name) for text in getattr(settings, name)]
            setattr(settings, name, [record(item) if isinstance(item, Target) else item for item in meant[name]])
        return meant

    def _meant(self, typed: str, option: str) -> Target | str:
        """An artifact, or what is none: the name of a rule, or a file that another rule makes.

        Raises:
            RequestError: neither; with what may have been meant.
        """
        workflow = self._workflow
        if workflow.is_rule(typed):
            if option == "targets" and workflow.get_rule(typed).has_wildcards():
                raise RequestError(f"{typed!r} is a rule for many artifacts: name one\n{self._book.suggest(typed)}")
            return typed
        name = as_target(typed, self._settings)
        try:
            target = parse_target(name)
        except RequestError as error:
            if typed.isprintable() and self._producers(typed):  # `$` of a rule's expression also means before a "\n"
                return typed
            raise RequestError(f"{error}\n{self._book.suggest(name)}") from None
        self._book.load(target)
        return target

    def _artifacts(self, items: Iterable[Target | str | None]) -> list[Target]:
        """The artifacts among `items`, and those that the rules and files among them say they need."""
        found: dict[Target, None] = {}
        seen: set[str] = set()
        todo = [item for item in items if item is not None]
        while todo:
            item = todo.pop(0)
            name = item if isinstance(item, Target) else as_target(item, self._settings)
            if isinstance(name, Target) or (is_target(name) and not self._workflow.is_rule(name)):
                found[name if isinstance(name, Target) else parse_target(name)] = None
            elif item not in seen:
                seen.add(item)
                rules = [self._workflow.get_rule(item)] if self._workflow.is_rule(item) else self._producers(item)
                plain = [rule for rule in rules if not rule.has_wildcards()]
                todo += [str(file) for rule in plain for file in rule.input if not file.is_callable()]
        return list(found)

    def _members(self, items: Iterable[Target | str], order: Sequence[Target]) -> list[Target]:
        """The members of the closure that are named, or made by a rule that is named, in `items`."""
        names = [item for item in items if isinstance(item, str) and self._workflow.is_rule(item)]
        rules = [self._workflow.get_rule(name) for name in names]
        return [t for t in order if t in items or any(rule.is_producer(record(t)) for rule in rules)]

    def _producers(self, file: str) -> list[Any]:
        return [rule for rule in self._workflow.rules if rule.is_producer(os.path.normpath(file))]

    def _mirrored_but_run(self) -> list[Target]:
        """Targets that run although their record, and so its mirror, is there, or although nothing asks for them."""
        statuses = (self._statuses[target] for target in self._plan.runs)
        return [s.target for s in statuses if s.record is not None or s.state is State.damaged]

    def _inputs(self, target: Target) -> list[Target]:
        """What a target is joined to in the graph: what runs is never upstream of what stays as it is."""
        needed = self._needs(target)
        if target in self._plan.runs or base_of(target) in self._plan.runs or not self._workflow.is_main_process:
            return needed
        return [n for n in needed if n not in self._plan.runs and self._status(n).record is not None]

    def _needs(self, target: Target) -> list[Target]:
        return [parse_target(text) for text in self._book.needs(target)]

    def _status(self, target: Target) -> Status:
        if target not in self._statuses:
            self._statuses[target] = examine(self._store, self._book, target)
        return self._statuses[target]

    # ---- a real run --------------------------------------------------------------------------------------------------

    def _claimed(self, left: Plan, plan: Callable[[], Plan]) -> Plan:
        """The plan, once no other run of this working directory makes what is in it; waits for that if asked to."""
        told = ""
        while new := [target for target in left.runs if target not in self._claims.targets]:
            text = refusals.leased(self._claims.add(new))
            if text and not self._settings.wait:
                raise AdapterError(text)
            if text and text != told:
                print(printable(f"waiting: {text}"), file=sys.stderr)
            if text:
                time.sleep(WAIT_SECONDS)
            told = text
            left = plan()  # what another run has made since the look is not to do any more
        return left

    def _begin(self, plan: Plan) -> None:
        """The last things before jobs: refuse what cannot be built, write down what is forced."""
        if self._settings.platform == "tpu" and not self._workflow.local_exec:
            raise RequestError(
                "launching TPU slices is not built yet; on a TPU host itself use: snakemake --profile local TARGET"
            )
        if not self._workflow.local_exec:
            _refuse_quotes(self._settings)
        if text := refusals.unpinned(self._book, plan.runs):
            raise RequestError(text)
        for target, status in self._statuses.items():
            if target in plan.forced:
                for member in (target, *self._shares.get(target, ())):
                    forced.write(member, self._run)
            elif status.owner is None:
                forced.clear(target)  # left by a run that died
        self._export(RUN_VARIABLE, self._run)
        if not self._workflow.local_exec:
            self._export(PREFIX_VARIABLE, self._settings.prefix)
        # Registered here and not in the Snakefile, so that they also work through `module:`.
        for event, ours in (("onstart", self._refuse_leased), ("onerror", self._show_logs)):
            theirs = getattr(self._workflow, f"_{event}")
            getattr(self._workflow, event)(_both(ours, theirs))

    def _export(self, name: str, value: str) -> None:
        """Let the processes of this run see a variable, wherever its executor starts them."""
        os.environ[name] = value
        self._workflow.register_envvars(name)

    def _refuse_leased(self) -> None:
        """Before a first job starts: stop when somebody else builds what would run, unless waiting was asked for.

        A job that the executor takes up again, because a former run submitted it, is our own.
        """
        workflow = self._workflow
        jobs = {str(file): job for job in workflow.dag.needrun_jobs() for file in job.output}
        due = [status for target, status in self._statuses.items() if record(target) in jobs]
        foreign = [s for s in due if not workflow.persistence.external_jobids(jobs[record(s.target)])]
        owners = {status.target: status.owner for status in foreign if status.owner is not None}
        shared = [part for part in chain(*self._shares.values()) if record(part) in jobs]
        owners |= shares.builders(
            self._store, [p for p in shared if not workflow.persistence.external_jobids(jobs[record(p)])]
        )
        if (text := refusals.leased(owners)) and not self._settings.wait:
            for target in self._plan.forced:
                for member in (target, *self._shares.get(target, ())):
                    forced.clear(member, self._run)
            raise AdapterError(text)

    def _show_logs(self) -> None:
        """The last lines of the log of each target that this run began and did not finish."""
        for target in [*chain(*self._shares.values()), *self._plan.runs]:
            attempt = read_attempt(self._store, target)
            if attempt and attempt.run == self._run and not os.path.exists(record(target)):
                log, lines = self._store.last_lines(attempt, SHOWN_LINES)
                shown = "\n".join(f"  {line}" for line in lines)
                print(printable(f"{target} was not finished; the last lines of {log}:\n{shown}"), file=sys.stderr)


# ---- small parts -----------------------------------------------------------------------------------------------------


def _hooked_method(workflow: Any) -> Callable[..., Any]:
    """The method that Snakemake prepares its DAG with, once it is known to be the one that we know.

    Raises:
        AdapterError: unsupported Snakemake version.
    """
    method = getattr(workflow, "_prepare_dag", None)
    expected = {"nolock", "ignore_incomplete"}
    attributes = ("is_main_process", "config_settings", "resource_settings", "_onstart", "_onerror")
    if method is None or not expected <= inspect.signature(method).parameters.keys():
        raise _unsupported()
    if not all(hasattr(workflow, name) for name in attributes):
        raise _unsupported()
    return method


def _unsupported() -> AdapterError:
    return AdapterError(f"unsupported Snakemake version {snakemake_version}: marin_build needs {SNAKEMAKE_VERSIONS}")


def _typed_settings(workflow: Any, config: Mapping[str, Any]) -> dict[str, Any]:
    """The part of `config` that comes from `--config`, and so wins over the environment.

    Snakemake keeps a profile's `config:` in the same place; `--config` replaces that altogether.
    """
    typed = any(word.startswith(("-C", "--config=")) or word == "--config" for word in sys.argv)
    if not workflow.is_main_process or not typed:
        return {}
    return {key: config[key] for key in workflow.config_settings.config if key in config}


def _clean_record(record: logging.LogRecord) -> bool:
    """A filter that lets everything pass, as `printable`: Snakemake logs its own command line and those of jobs."""
    for name, value in vars(record).items():
        if isinstance(value, str):
            setattr(record, name, printable(value))
    return True


def _refuse_quotes(settings: Settings) -> None:
    """Refuse settings that would run something where a job starts: Snakemake gives them to a shell as Python writes
    text, which is in double quotes where the text holds a single one.
    """
    for key, value in settings:
        if isinstance(value, str) and "'" in value and set(value) & set('$`"\\'):
            raise RequestError(
                f"setting {key}: holds quotes beside what a shell would run, seen {value!a}\n"
                "  choose another name: this executor starts its jobs through a shell"
            )


@contextmanager
def _clean_errors() -> Iterator[None]:
    try:
        yield
    except MarinError as error:
        raise AdapterError(error) from None


def _both(ours: Callable[[], None], theirs: Callable[[str], Any]) -> Callable[[str], None]:
    def hook(log: str) -> None:
        with _clean_errors():
            ours()
        theirs(log)

    return hook
