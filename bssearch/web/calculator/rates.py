"""The part about learning rates: `bssearch plan lr`, without a database."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from bssearch.errors import BSSearchError
from bssearch.planning.learning_rate import LearningRatePlan, RuledConfiguration, Tuned, plan_rules
from bssearch.web.calculator.asking import Asked
from bssearch.web.calculator.parts import Cell, Heading, Part, Row, Table
from bssearch.web.calculator.typed import Typed

HEADING = Heading(
    name="rates",
    title="Learning rate at the wanted batch",
    text="What each rule of thumb makes of the tuned configuration. Rules are only sometimes right: beside each stands "
    "where it holds and where it breaks. “bssearch run” measures the best rate.",
)

OPTIONS = {
    "from_batch": "from_batch",
    "learning_rate": "learning_rate",
    "batch": "batch",
    "optimizer": "lr_optimizer",
    "weight_decay": "weight_decay",
    "warmup_epochs": "warmup_epochs",
    "rate_rule": "rate_rule",
    "dropout": "lr_dropout",
    "label_smoothing": "label_smoothing",
    "beta1": "beta1",
    "beta2": "beta2",
    "epsilon": "epsilon",
    "ema_decay": "ema_decay",
}

COLUMNS = {
    "learning_rate": "learning rate",
    "warmup_epochs": "warmup epochs",
    "weight_decay": "weight decay",
    "beta1": "β₁",
    "beta2": "β₂",
    "epsilon": "ε",
    "ema_decay": "averaging",
    "dropout": "dropout",
    "label_smoothing": "label smoothing",
}

ALWAYS = frozenset({"learning_rate", "warmup_epochs"})


def rates_part(typed: Typed) -> Part:
    """Return the part."""
    asked = Asked(
        heading=HEADING,
        command="lr",
        typed=typed,
        options=OPTIONS,
        needed=("batch", "from_batch", "learning_rate"),
    )
    if (unready := asked.unready()) is not None:
        return unready
    try:
        plan = _plan(asked.values)
    except BSSearchError as error:
        return asked.refused(error)
    said = [f"{name}: {caveat}" for name, one in plan.rules.items() for caveat in one.caveats]
    return HEADING.part(
        sentence=f"From batch {plan.from_batch} to {plan.batch}, κ = {plan.ratio:.4g}, with {plan.optimizer}.",
        tables=[_numbers(plan), _validity(plan)],
        notes=[*said, *(claim.message for claim in plan.claims)],
        command=asked.line,
    )


def _plan(given: dict[str, Any]) -> LearningRatePlan:
    batch, rate_rule, tuned_at = given.pop("batch"), given.pop("rate_rule", None), given.pop("from_batch")
    return plan_rules(Tuned(batch=tuned_at, **given), batch, rate_rule=rate_rule)


def _numbers(plan: LearningRatePlan) -> Table:
    shown = [name for name in COLUMNS if _is_worth_a_column(name, plan)]
    rows = [
        Row(cells=[Cell(_in_words(name)), *_cells(name, one, shown)], marked=not one.caveats)
        for name, one in plan.rules.items()
    ]
    return Table(
        caption="By rule; in bold those that nothing speaks against here",
        headings=["rule", *(COLUMNS[name] for name in shown)],
        rows=rows,
    )


def _cells(rule: str, one: RuledConfiguration, shown: list[str]) -> Iterator[Cell]:
    for name in shown:
        yield Cell.of(f"rules.{rule}.{name}", getattr(one, name))


def _is_worth_a_column(name: str, plan: LearningRatePlan) -> bool:
    """Return whether any rule has something to say of it, as for people on the command line."""
    values = [getattr(one, name) for one in plan.rules.values()]
    is_known = any(value is not None for value in values)
    return name in ALWAYS or (is_known if name in ("beta1", "beta2", "epsilon") else any(values))


def _validity(plan: LearningRatePlan) -> Table:
    rows = [
        Row(cells=[Cell(_in_words(name)), Cell(one.holds), Cell(one.breaks), Cell(one.source)])
        for name, one in plan.rules.items()
    ]
    headings = ["rule", "holds", "breaks", "source"]
    return Table(caption="Where each rule is right, and where not", headings=headings, rows=rows, folded=True)


def _in_words(rule: str) -> str:
    return rule.replace("_", " ")
