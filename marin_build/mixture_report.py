"""What `marin-build mixture` says: of every stage and component what a run draws, and whether there is enough of it.

It reads the recipe and the records of the token sets, no data; nothing has to be built for it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from marin_build.artifact.record import Record, read_record
from marin_build.errors import DamageError, RequestError
from marin_build.looks import console, make_table, shown
from marin_build.recipe.mixture_needs import Need, needs_of
from marin_build.recipe.mixture_schedule import Schedule, schedule_of
from marin_build.recipe.schema import CheckpointRecipe, TokenizedRecipe
from marin_build.recipe.target import Target, parse_target

if TYPE_CHECKING:
    from marin_build.artifact.store import Store
    from marin_build.recipe.load import RecipeBook

FINISHED, BUDGET, UNKNOWN = "finished", "token_budget", "not built"
MAX_TOKENS = 1 << 60
STAGE_COLUMNS = ("steps", "component", "weight", "share", "in a block", "sequences", "tokens")
RUN_COLUMNS = ("component", "set", "tokens read", "tokens there", "epochs", "limit", "")


@dataclass(frozen=True)
class Supply:
    """How many tokens a set has, and who says so."""

    tokens: int | None
    origin: str
    """FINISHED: its record; BUDGET: its recipe, and it is not built yet; UNKNOWN: nobody."""


@dataclass(frozen=True)
class MixtureReport:
    """The mixture of one run."""

    target: Target
    recipe: CheckpointRecipe
    schedule: Schedule
    needs: tuple[Need, ...]
    supplies: Mapping[str, Supply]
    """By component, of those that a stage draws from."""

    @property
    def problems(self) -> list[str]:
        """What is wrong, for people."""
        return [need.problem for need in self.needs if need.problem]

    def to_dict(self) -> dict[str, Any]:
        recipe = self.recipe
        return {
            "target": str(self.target),
            "feasible": not self.problems,
            "problems": self.problems,
            "steps": recipe.steps,
            "global_batch_size": recipe.global_batch_size,
            "sequence_length": recipe.data.sequence_length,
            "mixture_block": recipe.data.mixture_block,
            "tokens": sum(need.tokens for need in self.needs),
            "stages": [self._stage(number) for number in range(len(self.schedule.stages))],
            "components": [
                {
                    "name": need.name,
                    "target": need.target,
                    "sequences": sum(need.sequences),
                    "tokens": need.tokens,
                    "available_tokens": need.available_tokens,
                    "available_from": self.supplies[need.name].origin,
                    "epochs": need.epochs,
                    "max_epochs": need.max_epochs,
                    "problem": need.problem,
                }
                for need in self.needs
            ],
        }

    def _stage(self, number: int) -> dict[str, Any]:
        stage = self.schedule.stages[number]
        total = sum(stage.weights.values())
        drawn = {need.name: need.sequences[number] for need in self.needs}
        later = self.schedule.stages[number + 1 :]
        return {
            "from_step": stage.from_step,
            "to_step": later[0].from_step if later else self.recipe.steps,
            "components": [
                {
                    "name": name,
                    "weight": stage.weights[name],
                    "share": stage.weights[name] / total,
                    "sequences_a_block": count,
                    "sequences": drawn[name],
                    "tokens": drawn[name] * self.recipe.data.sequence_length,
                }
                for name, count in stage.counts.items()
            ],
        }


def report_mixture(store: Store, book: RecipeBook, target: Target) -> MixtureReport:
    """Look at the mixture of a run, and at its token sets as far as they are finished.

    Raises:
        RequestError: the target is no checkpoint.
        RecipeError: its recipe is wrong, or asks for a mixture that cannot be.
    """
    recipe = book.load(target)
    if not isinstance(recipe, CheckpointRecipe):
        raise RequestError(f"{target} has no mixture: it is of kind {target.kind}, needs one of kind checkpoints")
    schedule = schedule_of(recipe)
    supplies = {name: supply_of(store, book, recipe.data.train[name].target) for name in schedule.names}
    needs = needs_of(recipe, {name: supply.tokens for name, supply in supplies.items()})
    return MixtureReport(target, recipe, schedule, tuple(needs), supplies)


def supply_of(store: Store, book: RecipeBook, text: str) -> Supply:
    """The tokens of a set: as its record says, or else as much as its recipe asks for."""
    target = parse_target(text)
    if record := _readable_record(store, target):
        tokens = record.metrics.get("tokens")
        if isinstance(tokens, int) and 0 <= tokens < MAX_TOKENS:
            return Supply(tokens, FINISHED)
    recipe = book.load(target) if book.exists(target) else None
    if isinstance(recipe, TokenizedRecipe) and recipe.token_budget:
        return Supply(recipe.token_budget.tokens, BUDGET)
    return Supply(None, UNKNOWN)


def _readable_record(store: Store, target: Target) -> Record | None:
    try:
        return read_record(store, target)
    except DamageError:
        return None


# ---- as a table ------------------------------------------------------------------------------------------------------


def show_mixture(report: MixtureReport) -> None:
    """Two tables, of the stages and of the whole run, and what is wrong."""
    out, recipe = console(), report.recipe
    block = recipe.data.mixture_block
    length, tokens = recipe.data.sequence_length, sum(need.tokens for need in report.needs)
    out.print(
        f"[bold]{shown(report.target)}[/]: {recipe.steps:,} steps of {recipe.global_batch_size:,} sequences of "
        f"{length:,} tokens: {tokens:,} tokens, in blocks of {block:,} sequences"
    )
    table = make_table(*STAGE_COLUMNS, numbers=STAGE_COLUMNS[2:])
    for stage in report.to_dict()["stages"]:
        steps = f"{stage['from_step']:,} to {stage['to_step']:,}"
        for row in stage["components"]:
            count = row["sequences_a_block"]
            cells = (f"{row['weight']:g}", f"{row['share']:.4%}", f"{count:,} ({count / block:.4%})")
            table.add_row(steps, shown(row["name"]), *cells, f"{row['sequences']:,}", f"{row['tokens']:,}")
            steps = ""
    out.print(table)
    out.print()
    table = make_table(*RUN_COLUMNS, numbers=RUN_COLUMNS[2:6])
    for need in report.needs:
        table.add_row(*_row_of(need, report.supplies[need.name]))
    out.print(table)
    for problem in report.problems:
        first, *rest = problem.split("\n")
        out.print("\n" + "\n".join([f"[red]{shown(first)}[/]", *map(shown, rest)]))


def _row_of(need: Need, supply: Supply) -> tuple[str, ...]:
    there = "" if supply.tokens is None else f"{supply.tokens:,}"
    if supply.origin != FINISHED:
        there = f"not built, budget {there}" if there else "not built"
    epochs = "" if need.epochs is None else f"{need.epochs:.4g}"
    limit = "" if need.max_epochs is None else f"{need.max_epochs:g}"
    verdict = "[red]not possible[/]" if need.problem else "[green]ok[/]" if supply.origin == FINISHED else ""
    return (shown(need.name), shown(need.target), f"{need.tokens:,}", there, epochs, limit, verdict)
