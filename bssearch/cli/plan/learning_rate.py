"""``bssearch plan lr``: a configuration for another batch size."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from bssearch.cli.arguments import DatabaseOption
from bssearch.cli.output import Format, FormatOption, console, print_table, show

if TYPE_CHECKING:
    from bssearch.planning.learning_rate import LearningRatePlan

COLUMNS = ("rule", "learning_rate", "warmup_epochs", "weight_decay")
ADAMS = ("beta1", "beta2", "epsilon")
OPTIONAL_COLUMNS = (*ADAMS, "ema_decay", "dropout", "label_smoothing")


def lr(
    from_batch: Annotated[int, typer.Option(help="The batch size at which the configuration was tuned.")],
    learning_rate: Annotated[float, typer.Option(help="The learning rate there.")],
    batch: Annotated[int, typer.Option(help="The batch size to train with.")],
    rule: Annotated[
        list[str] | None,
        typer.Option(help="none, linear, sqrt, sde, half_life, … May be repeated.", show_default="all"),
    ] = None,
    rate_rule: Annotated[
        str | None,
        typer.Option(
            help="The learning rate under rules about something else: linear, sqrt or none.",
            show_default="linear with sgd and lars, else sqrt",
        ),
    ] = None,
    optimizer: Annotated[str, typer.Option(help="The optimizer, as a spec names it.")] = "sgd",
    warmup_epochs: Annotated[float, typer.Option(help="Epochs of warmup there.")] = 0.0,
    weight_decay: Annotated[float, typer.Option(help="Weight decay there.")] = 0.0,
    dropout: Annotated[float, typer.Option(help="Dropout there.")] = 0.0,
    label_smoothing: Annotated[float, typer.Option(help="Label smoothing there.")] = 0.0,
    beta1: Annotated[float | None, typer.Option(help="Adam's β₁.", show_default="the optimizer's")] = None,
    beta2: Annotated[float | None, typer.Option(help="Adam's β₂.", show_default="the optimizer's")] = None,
    epsilon: Annotated[float | None, typer.Option(help="Adam's ε.", show_default="the optimizer's")] = None,
    ema_decay: Annotated[float | None, typer.Option(help="Decay of the weights' average.")] = None,
    db: DatabaseOption = None,
    form: FormatOption = Format.TABLE,
) -> None:
    """Carry a tuned configuration over to another batch size by each rule, and say where the rule holds."""
    from bssearch.commands.plan.learning_rate import plan_learning_rate

    found = plan_learning_rate(
        from_batch=from_batch,
        learning_rate=learning_rate,
        batch=batch,
        rule=rule,
        rate_rule=rate_rule,
        optimizer=optimizer,
        warmup_epochs=warmup_epochs,
        weight_decay=weight_decay,
        dropout=dropout,
        label_smoothing=label_smoothing,
        beta1=beta1,
        beta2=beta2,
        epsilon=epsilon,
        ema_decay=ema_decay,
        db=db,
    )
    show(
        form,
        lambda: print_rules(found),
        found.document,
        lambda: [{"rule": name, **asdict(one)} for name, one in found.rules.items()],
    )


def print_rules(found: LearningRatePlan) -> None:
    """Print for people what each rule gives, where it holds, and what audits said."""
    out = console()
    out.print(f"from batch {found.from_batch} to {found.batch}, κ = {found.ratio:.4g}, with {found.optimizer}:")
    rows = [{"rule": name, **asdict(one)} for name, one in found.rules.items()]
    print_table(rows, [*COLUMNS, *(name for name in OPTIONAL_COLUMNS if _is_worth_a_column(name, rows))])
    for name, one in found.rules.items():
        out.print(f"{name} holds: {one.holds}; breaks: {one.breaks} ({one.source})")
        for caveat in one.caveats:
            out.print(f"  but here: {caveat}")
        for audit in one.audits:
            regret = "" if audit.regret is None else f", regret {audit.regret:.3g}"
            out.print(f"  audit of {audit.study}, batch {audit.batch_size}: {audit.verdict.upper()}{regret}")
    if not any(one.audits for one in found.rules.values()):
        out.print("No audit of the database has a verdict on these rules; `bssearch audit STUDY` makes one.")
    for claim in found.claims:
        out.print(f"note: {claim.message}")


def _is_worth_a_column(name: str, rows: Sequence[Mapping[str, Any]]) -> bool:
    """Return whether a rule speaks of it: a β of 0 is what a rule has made of it, a dropout of 0 is none."""
    return any(row[name] is not None if name in ADAMS else row[name] for row in rows)
