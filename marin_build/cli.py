"""`marin-build`: look at artifacts, edit recipes, build one target without Snakemake.

Each verb is one function below. Targets are written as for Snakemake; verbs that only look take `--json`.
"""

from __future__ import annotations

import argparse
import json
import os
import secrets
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

from marin_build.errors import MarinError, RequestError
from marin_build.foreign import printable
from marin_build.workplace import Workplace

if TYPE_CHECKING:
    from marin_build.artifact.examine import Status


# ---- run -------------------------------------------------------------------------------------------------------------


def build(options: argparse.Namespace) -> int:
    from marin_build.artifact import forced, publish
    from marin_build.build import builder_of, tune_malloc

    place = Workplace(options)
    target = place.existing(options.target)
    if target.kind == "checkpoints":
        tune_malloc(options.arguments)
    noted = forced.read(target)
    forced_here = f"command-{secrets.token_hex(6)}" if options.force else None
    forced_run = forced_here or (noted if noted == options.run else None)  # another run's note forces nothing
    publish.build(
        target,
        place.book,
        place.store,
        place.settings,
        builder_of(target.kind),
        forced_run=forced_run,
        run=options.run,
        command=[sys.argv[0], *options.arguments],
    )
    return 0


# ---- look ------------------------------------------------------------------------------------------------------------


def show(options: argparse.Namespace) -> int:
    from marin_build.artifact.examine import examine
    from marin_build.artifact.record import read_record

    place = Workplace(options)
    target = place.finished_or_existing(options.target)
    record = read_record(place.store, target)
    if record is None:
        raise RequestError(
            f"{target} is not finished: it has no record under {place.settings.prefix}\n  snakemake {target}"
        )
    if options.json:
        return print_json(record.to_dict())
    from marin_build.looks import show_record

    status = examine(place.store, place.book, target) if place.book.exists(target) else None
    show_record(record, place.store.files(record).shown, status)
    return 0


def why(options: argparse.Namespace) -> int:
    from marin_build.artifact.examine import examine_all
    from marin_build.looks import show_reasons

    place = Workplace(options)
    statuses = examine_all(place.store, place.book, place.closure(options.targets))
    if options.json:
        return print_json([describe(status) for status in statuses])
    show_reasons(statuses)
    return 0


def status(options: argparse.Namespace) -> int:
    from marin_build.artifact.examine import examine_all
    from marin_build.looks import show_states

    place = Workplace(options)
    statuses = examine_all(place.store, place.book, place.closure(options.targets))
    if options.json:
        return print_json([describe(status) for status in statuses])
    show_states(statuses)
    return 0


def mixture(options: argparse.Namespace) -> int:
    from marin_build.mixture_report import report_mixture, show_mixture

    place = Workplace(options)
    report = report_mixture(place.store, place.book, place.existing(options.target))
    if options.json:
        print_json(report.to_dict())
    else:
        show_mixture(report)
    return RequestError.exit_code if report.problems else 0


def peek(options: argparse.Namespace) -> int:
    from marin_build.peek import peek as peek_into

    place = Workplace(options)
    is_training = place.target(options.target).kind == "checkpoints"
    found = place.existing if is_training else place.finished_or_existing
    body = peek_into(options, place, found(options.target))
    return 0 if body is None else print_json(body)


def describe(status: Status) -> dict[str, Any]:
    return {
        "target": str(status.target),
        "state": str(status.state),
        "reasons": list(status.reasons),
        "changes": [{"field": change.field, "old": change.old, "new": change.new} for change in status.changes],
        "fingerprint": status.record.fingerprint if status.record else None,
        "digest": status.record.digest if status.record else None,
    }


def verify(options: argparse.Namespace) -> int:
    from marin_build.artifact.verify import verify as verify_target
    from marin_build.looks import show_verification

    place = Workplace(options)
    if options.rebuild:
        return _rebuild(options, place)
    targets = [place.finished_or_existing(typed) for typed in options.targets]
    reports = [verify_target(place.store, target, full=options.full) for target in targets]
    if options.json:
        print_json([report.to_dict() for report in reports])
    else:
        for report in reports:
            show_verification(report)
    return 0 if all(report.ok for report in reports) else 4


def _rebuild(options: argparse.Namespace, place: Workplace) -> int:
    """Make a part of each target again and compare; an artifact that is not whole is not begun with."""
    from marin_build.artifact.proof import Sample, prove
    from marin_build.build import remaker_of
    from marin_build.looks import said_of

    seed = secrets.randbelow(1 << 32) if options.seed is None else options.seed
    same, found = True, {}
    for target in map(place.existing, options.targets):
        sample = Sample(options.rebuild, seed)
        certificate = prove(place.store, place.book, target, place.settings, remaker_of(target.kind), sample)
        same, found[str(target)] = same and certificate["equal"] is not None, certificate
        if not options.json:
            print(printable(f"{target}: made again: {said_of(certificate)}"))
    if options.json:
        print_json(found)
    return 0 if same else 4


# ---- recipes and store -----------------------------------------------------------------------------------------------


def new(options: argparse.Namespace) -> int:
    from marin_build.recipe import edit

    place = Workplace(options)
    target = place.target(options.target)
    path = edit.new(place.book, target, options.model)
    print(printable(f"wrote {path}\n  edit it, then: snakemake {target}"))
    return 0


def bump(options: argparse.Namespace) -> int:
    from marin_build.recipe import edit

    place = Workplace(options)
    path = edit.bump(place.book, place.existing(options.target), options.version)
    target = path.relative_to(place.book.folder).with_suffix("")
    print(printable(f"wrote {path}\n  snakemake {target}"))
    return 0


def pin(options: argparse.Namespace) -> int:
    from marin_build.pin import pin as pin_source

    place = Workplace(options)
    print(printable(pin_source(place.book, place.existing(options.target), options.revision)))
    return 0


def accept(options: argparse.Namespace) -> int:
    from marin_build.artifact.accept import accept as accept_target

    place = Workplace(options)
    for line in accept_target(place.store, place.book, place.existing(options.target), options.reason):
        print(printable(line))
    return 0


def adopt(options: argparse.Namespace) -> int:
    from marin_build.adopt import adopt as adopt_files

    place = Workplace(options)
    target, command = place.existing(options.target), [sys.argv[0], *options.arguments]
    record = adopt_files(place.store, place.book, place.settings, options.source, target, options.reason, command)
    print(printable(f"adopted {target}: {len(record.files):,} files in {record.external}, digest {record.digest}"))
    for claim in record.provenance["adopted"].get("unproven", ()):
        print(printable(f"  not proven: {claim}"))
    return 0


def gc(options: argparse.Namespace) -> int:
    from marin_build.artifact.attempt_log import terminal_logger
    from marin_build.artifact.gc import Sweeper
    from marin_build.artifact.reach import unmatched
    from marin_build.artifact.sightings import DAY
    from marin_build.looks import show_unneeded

    place = Workplace(options)
    for pattern in unmatched(place.store, place.settings.keep):
        print(printable(f"keep: {pattern!r} matches nothing under {place.settings.prefix}"), file=sys.stderr)
    sweeper = Sweeper(place.store, place.settings, options.grace_days * DAY, terminal_logger())
    items = sweeper.look()
    if options.delete:
        items = sweeper.delete(items)
    if options.json:
        return print_json([item.to_dict() for item in items])
    show_unneeded(items, options.grace_days, deleted=options.delete)
    return 0


def du(options: argparse.Namespace) -> int:
    from marin_build.artifact.usage import measure, selected
    from marin_build.typed import as_target
    from marin_build.usage_report import Progress, show_usage

    place = Workplace(options)
    targets = selected(place.store, [as_target(typed, place.settings) for typed in options.targets])
    report = measure(place.store, targets, Progress())
    if options.json:
        return print_json(report.to_dict())
    show_usage(report)
    return 0


def days(text: str) -> float:
    value = float(text)
    if not 0 <= value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r}: needs a number of days, 0 or more")
    return value


# ---- the command line ------------------------------------------------------------------------------------------------


def print_json(value: Any) -> int:
    json.dump(value, sys.stdout, indent=2, sort_keys=True)
    print()
    return 0


class _Parser(argparse.ArgumentParser):
    """Shows what was typed without obeying it."""

    def error(self, message: str) -> NoReturn:
        super().error(printable(message))


def count(text: str) -> int:
    return _at_least(1, text)


def number(text: str) -> int:
    return _at_least(0, text)


def _at_least(least: int, text: str) -> int:
    value = int(text)
    if value < least:
        raise argparse.ArgumentTypeError(f"{text!r}: needs a whole number, {least} or more")
    return value


def parser() -> argparse.ArgumentParser:
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument("--prefix", help="folder of all artifacts (default: artifacts, or MARIN_PREFIX)")
    common.add_argument("--recipes", help="folder of all recipes (default: config)")
    common.add_argument(
        "--config", nargs="+", action="extend", default=[], metavar="KEY=VALUE", help="override settings"
    )
    looking = argparse.ArgumentParser(add_help=False)
    looking.add_argument("--json", action="store_true", help="print JSON")

    top = _Parser(prog="marin-build", description=__doc__.partition("\n")[0])
    verbs = top.add_subparsers(dest="verb", required=True, metavar="VERB")

    def verb(
        function: Callable[[argparse.Namespace], int], text: str, *parents: argparse.ArgumentParser
    ) -> argparse.ArgumentParser:
        added = verbs.add_parser(function.__name__, help=text, description=text, parents=[*parents, common])
        added.set_defaults(function=function)
        return added

    added = verb(build, "build one target whose dependencies are finished, without Snakemake")
    added.add_argument("target")
    added.add_argument("--force", action="store_true", help="build it from nothing; the old one stays until then")
    added.add_argument("--run", help="id of the run that asks, so that its retries know of each other")
    verb(show, "show a finished artifact: recipe, files, metrics, provenance", looking).add_argument("target")
    verb(why, "say for a target and all it needs why it would or would not be built", looking).add_argument(
        "targets", nargs="+", metavar="TARGET"
    )
    verb(status, "list the state of targets and all they need, or of every recipe", looking).add_argument(
        "targets", nargs="*", metavar="TARGET"
    )
    verb(
        mixture, "show what a training draws from each set, stage by stage; exit 0 only if it is possible", looking
    ).add_argument("target")
    added = verb(peek, "look into an artifact: documents with their special ids, rows of raw text, of a batch", looking)
    added.add_argument("target")
    added.add_argument("--rows", type=count, default=3, help="documents or rows to show (default: 3)")
    added.add_argument("--from", dest="first", type=number, metavar="N", help="the first of them, counted from 0")
    added.add_argument("--shard", help="of a token set: begin with this shard, by number or file")
    added.add_argument("--step", type=number, help="of a training: the step whose batch is shown (default: 0)")
    added.add_argument("--file", help="of raw text: the file, or a glob (default: the first with text)")
    added.add_argument("--ids", action="store_true", help="show the ids too")
    added.add_argument("--tokens", action="store_true", help="show where tokens begin")
    added.add_argument("--full", action="store_true", help="show long documents whole")
    added = verb(verify, "compare artifacts with their records; exit 0 only if all is well", looking)
    added.add_argument("targets", nargs="+", metavar="TARGET")
    depth = added.add_mutually_exclusive_group()
    depth.add_argument("--quick", action="store_false", dest="full", help="presence and size of each file (default)")
    depth.add_argument("--full", action="store_true", help="every byte; marks the record when something is wrong")
    depth.add_argument(
        "--rebuild",
        type=count,
        metavar="K",
        help="make K shards, or K steps of a training, again and compare them; the record keeps what was found",
    )
    added.add_argument("--seed", type=int, help="for --rebuild: which shards or steps (default: at random)")
    added.set_defaults(full=False)
    added = verb(new, "write a complete recipe to start from")
    added.add_argument("target")
    added.add_argument("--model", help="for a checkpoint: a model preset, for example 150m")
    added = verb(bump, "copy a recipe to a new version")
    added.add_argument("target")
    added.add_argument("--version", help="YYYY.MM.DD[.N] or <label>-dev (default: today)")
    added = verb(pin, "write the digest or commit of a recipe's source into the recipe")
    added.add_argument("target")
    added.add_argument("--revision", help="commit to pin instead of the newest")
    added = verb(
        accept, "accept a changed recipe for a finished artifact without rebuilding it; recorded with the reason"
    )
    added.add_argument("target")
    added.add_argument("--reason", required=True)
    added = verb(adopt, "make data that lies somewhere already a finished artifact, hashed and not copied")
    added.add_argument("source", help="the folder, or URL, that holds all files of the artifact")
    added.add_argument("target")
    added.add_argument("--reason", default="", help="for the record")
    added = verb(gc, "list what no recipe, pin, record or build needs any more; --delete deletes it", looking)
    added.add_argument("--delete", action="store_true", help="delete what has been listed for the grace period")
    added.add_argument(
        "--grace-days", type=days, default=7, help="days from the first listing to the deletion (default: 7)"
    )
    added = verb(du, "list the room that artifacts take, and what they share, the largest first", looking)
    added.add_argument(
        "targets", nargs="*", metavar="TARGET", help="a target, the front of a name, or a glob (default: all)"
    )
    return top


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one verb and return its exit code; errors of `marin_build.errors` print without a traceback."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    options = parser().parse_args(arguments)
    options.arguments = arguments
    try:
        return options.function(options)
    except MarinError as error:
        print(printable(f"marin-build: {error}"), file=sys.stderr)
        return error.exit_code
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
