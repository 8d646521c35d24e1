"""What `marin-build` shows to people: states, reasons, records and verifications as tables in the terminal."""

from __future__ import annotations

import re
import shlex
from collections.abc import Collection, Iterable, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from marin_build.artifact.examine import State, Status
from marin_build.artifact.gc import Item
from marin_build.artifact.provenance import PACKAGES, code_changed
from marin_build.artifact.record import Record, entry_target
from marin_build.artifact.verify import Report
from marin_build.foreign import one_line

COLOURS = {
    State.missing: "dim",
    State.partial: "yellow",
    State.building: "cyan",
    State.finished: "green",
    State.drifted: "red",
    State.outdated: "yellow",
    State.damaged: "bold red",
}
FILES_SHOWN = 12
CHECKED_SHOWN = 5
UNCUT_WIDTH = 1000


def console() -> Console:
    """As wide as its content, without colours, when the output is a file or a pipe, so that no word is cut."""
    out = Console(highlight=False, soft_wrap=True, emoji=False)
    return out if out.is_terminal else Console(highlight=False, soft_wrap=True, emoji=False, width=UNCUT_WIDTH)


def shown(foreign: object) -> str:
    """Text of others as markup that shows it, on one line, and does nothing else."""
    text = one_line(foreign)
    body = text.rstrip("\\")
    last = len(text) - len(body)
    return escape(_BACKSLASHES.sub(r"\1\\[", body)) + ("\\" * 2 * last + "[default][/default]" if last else "")


_BACKSLASHES = re.compile(r"(\\+)(?!\[[a-z#/@][^[]*?])\[")
"""Backslashes before a bracket that opens no tag: `rich` takes one of them away, which its `escape` does not know; nor
does it know of several at the end, of which a tag that follows takes half."""


def show_states(statuses: Sequence[Status]) -> None:
    table = make_table("target", "state", "bytes", "finished", "digest")
    for status in statuses:
        record = status.record
        table.add_row(
            shown(status.target),
            f"[{COLOURS[status.state]}]{status.state}[/]",
            readable_bytes(sum(entry["bytes"] for entry in record.files)) if record else "",
            shown(str(record.provenance.get("finished", ""))[:16].replace("T", " ")) if record else "",
            record.digest[:12] if record else "",
        )
    out = console()
    out.print(table)
    for record in (status.record for status in statuses if status.record):
        if record.external:
            out.print(f"{shown(record.target)} was adopted: it lies in {shown(record.external)}")
    if rebuilds := [str(status.target) for status in statuses if status.is_rebuild]:
        out.print(
            "a rebuild was interrupted and the old artifact is kept; only a run that names it, or builds what is made "
            f"from it, goes on:\n  snakemake {escape(' '.join(rebuilds))}"
        )


def show_reasons(statuses: Iterable[Status]) -> None:
    """Every target with what a plain run would do with it, and why; changes of code are told but rebuild nothing."""
    out = console()
    for status in statuses:
        out.print(f"[bold]{shown(status.target)}[/]  [{COLOURS[status.state]}]{status.state}[/]: {_verdict(status)}")
        for reason in status.reasons:
            out.print(f"  {shown(reason)}")
        for note in code_notes(status.record) if status.record else ():
            out.print(f"  [dim]{shown(note)} (this alone rebuilds nothing)[/]")


def code_notes(record: Record) -> list[str]:
    """How the code of now differs from the code that made the artifact: modules of ours, versions of packages."""
    notes = ["the modules of marin_build that made it have changed since"] if code_changed(record.provenance) else []
    for package, old in record.provenance.get("packages", {}).items():
        if package not in PACKAGES.values():
            continue
        try:
            new = version(package)
        except PackageNotFoundError:
            continue
        if new != old:
            notes.append(f"made with {package} {old}; {new} is installed now")
    return notes


def _verdict(status: Status) -> str:
    if status.state is State.building:
        return "a build stops here: somebody builds it now"
    if status.is_rebuild:
        return "the old one is kept; the interrupted rebuild goes on when this target is asked for, or is needed"
    if status.needs_build:
        return "would be built"
    return {
        State.drifted: "a build stops here: the recipe changed under the same version",
        State.outdated: "kept; -F rebuilds it",
    }.get(status.state, "nothing to do")


def show_record(record: Record, place: str, status: Status | None) -> None:
    """Everything that the record says; `status` is None where the recipe is gone."""
    out = console()
    state = f"[{COLOURS[status.state]}]{status.state}[/]" if status else "finished, but its recipe is gone"
    out.print(f"[bold]{shown(record.target)}[/]  {state}  {shown(place)}")
    for reason in status.reasons if status else ():
        out.print(f"  {shown(reason)}")
    facts = make_table("", "")
    facts.add_row("fingerprint", record.fingerprint)
    facts.add_row("digest", record.digest)
    for entry in (*record.dependencies, *record.measured):
        facts.add_row("made from" if entry in record.dependencies else "measured on", shown(entry_target(entry)))
    for key, value in record.provenance.items():
        facts.add_row(shown(key), shown(_short(key, value)))
    for claim in record.provenance.get("adopted", {}).get("unproven", ()):
        facts.add_row("not proven", shown(claim))
    for entry in record.lost:
        facts.add_row("lost", shown(f"{entry['path']} ({entry['problem']}, noted {entry['noted']})"))
    for entry in record.accepted:
        facts.add_row("accepted", shown(f"{entry['reason']} ({entry['user']}, {entry['time']})"))
    for entry in record.certificates:
        facts.add_row("made again", shown(f"{said_of(entry)} ({entry['user']}, {entry['time']})"))
    out.print(facts)
    _show_metrics(out, record)
    _show_files(out, record)


def _show_metrics(out: Console, record: Record) -> None:
    if record.metrics:
        table = make_table("metric", "final value")
        for name, value in sorted(record.metrics.items()):
            table.add_row(
                shown(name),
                f"{value:,.6g}"
                if isinstance(value, float)
                else shown(f"{value:,}" if isinstance(value, int) else str(value)),
            )
        out.print(table)


def _show_files(out: Console, record: Record) -> None:
    table = make_table("file", "bytes", "xxh3_128")
    for entry in record.files[:FILES_SHOWN]:
        table.add_row(shown(entry["path"]), f"{entry['bytes']:,}", entry["xxh3_128"])
    out.print(table)
    if len(record.files) > FILES_SHOWN:
        out.print(f"and {len(record.files) - FILES_SHOWN} more files; --json lists all")


def show_verification(report: Report) -> None:
    out = console()
    depth = "every byte of" if report.full else "presence and size of"
    verdict = "[green]all is well[/]" if report.ok else f"[bold red]{len(report.problems)} problems[/]"
    out.print(
        f"[bold]{shown(report.target)}[/]: {verdict} ({depth} {report.files:,} files, {readable_bytes(report.bytes)})"
    )
    for problem in report.problems:
        out.print(f"  {shown(problem)}")
    if report.foreign:
        out.print(f"  [dim]{len(report.foreign)} files that no record names: {shown(', '.join(report.foreign[:5]))}[/]")
    if report.external:
        out.print(f"  adopted: it lies in {shown(report.external)}")
    if report.lost:
        out.print(f"  [dim]noted as lost earlier: {shown(', '.join(report.lost[:5]))}[/]")
    if not report.ok:
        out.print(f"  {shown(_advice(report))}")


def said_of(certificate: Mapping[str, Any]) -> str:
    """One line about what `verify --rebuild` found."""
    checked = certificate["checked"]
    more = f" and {len(checked) - CHECKED_SHOWN} more" if len(checked) > CHECKED_SHOWN else ""
    what = f"{certificate['what']} {', '.join(checked[:CHECKED_SHOWN])}{more}, seed {certificate['seed']}"
    return f"{what}: {certificate['equal'] or 'NOT THE SAME: ' + certificate['difference']}"


def _advice(report: Report) -> str:
    """What a person can do about the problems."""
    if all(problem.path == "metrics.jsonl" or problem.path.startswith("logs/") for problem in report.problems):
        lost = "what it tells of its making is lost and cannot be made again; its content is whole"
        noted = "the record says so from now on, and the next verification passes"
        return f"{lost}\n  {noted if report.full else f'to note it: marin-build verify --full {report.target}'}"
    if report.target.kind == "checkpoints":
        return (
            f"snakemake {report.target} falls back to its newest whole step; "
            f"where there is none, restore the files, or snakemake -f {report.target} trains it from nothing"
        )
    return f"to repair it: snakemake {report.target}"


def show_unneeded(items: Sequence[Item], grace_days: float, *, deleted: bool) -> None:
    """What housekeeping found, a line for each reason; and what to do about it."""
    out = console()
    if not items:
        out.print("everything is needed")
        return
    table = make_table("target", "what", "why", "files", "bytes", "when")
    for item in items:
        left = grace_days - item.seconds / 86400
        when = item.outcome or ("now" if item.due else f"in {left:.1f} days")
        files = item.names[0] if len(item.names) == 1 else f"{len(item.names):,}"
        row = (item.place, item.what, item.why, files, readable_bytes(item.bytes), when)
        table.add_row(*map(shown, row))
    out.print(table)
    due = [item for item in items if item.due]
    if due and not deleted:
        out.print(f"{readable_bytes(sum(item.bytes for item in due))} can go; to delete it: marin-build gc --delete")
    elif not due:
        out.print(f"nothing has been listed for {grace_days:g} days yet, so nothing can go")


def readable_bytes(count: int) -> str:
    size = float(count)
    for unit in ("B", "kB", "MB", "GB"):
        if size < 1000:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.1f} TB"


def _short(key: str, value: Any) -> str:
    """One line for a field of the provenance; `--json` has all of it."""
    if key == "command":
        text = shlex.join(value)
    elif key == "code":
        text = f"digest {value['digest']}, {len(value['modules'])} modules"
    elif key == "adopted":
        text = ", ".join(f"{name} {value[name]}" for name in ("reason", "user", "host", "time") if name in value)
    elif key == "attempts":
        text = ", ".join(attempt["id"] for attempt in value)
    elif isinstance(value, dict):
        text = ", ".join(f"{name} {item}" for name, item in value.items())
    else:
        text = "" if value is None else str(value)
    return text if len(text) <= 200 else text[:199] + "…"


def make_table(*headings: str, numbers: Collection[str] = ("bytes",)) -> Table:
    """A table without lines; the columns of `numbers` are set to the right."""
    table = Table(box=None, show_header=any(headings), header_style="bold", pad_edge=False)
    for heading in headings:
        table.add_column(heading, overflow="fold", justify="right" if heading in numbers else "left")
    return table
