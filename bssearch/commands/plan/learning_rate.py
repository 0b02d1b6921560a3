"""``plan lr``: a configuration for another batch size by each rule, and what one's own audits said of the rules."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from bssearch.commands.audit import audit_stored
from bssearch.errors import TargetNotReachedError
from bssearch.planning.learning_rate import AuditedRule, LearningRatePlan, Tuned, plan_rules
from bssearch.settings import DEFAULT_DATABASE_URL, database_url
from bssearch.storage.repository import open_store

JUDGED = ("held", "broke", "undecided")


def plan_learning_rate(
    *,
    from_batch: int,
    learning_rate: float,
    batch: int,
    rule: str | Sequence[str] | None = None,
    rate_rule: str | None = None,
    optimizer: str = "sgd",
    warmup_epochs: float = 0.0,
    weight_decay: float = 0.0,
    dropout: float = 0.0,
    label_smoothing: float = 0.0,
    beta1: float | None = None,
    beta2: float | None = None,
    epsilon: float | None = None,
    ema_decay: float | None = None,
    db: str | None = None,
) -> LearningRatePlan:
    """Return what each rule of thumb makes at ``batch`` of a configuration that was tuned at ``from_batch``.

    ``rule`` names one or several (default: all, see `bssearch.planning.learning_rate.RULES_OF_THUMB`), ``rate_rule``
    how the learning rate goes under rules about something else. β and ε are by default those of the optimizer. With a
    database what the audits of its studies said stands beside each rule; without ``db`` the file in this folder is
    asked, where there is one. Raises `UsageError` for wrong input and `DatabaseError` for a database that is not there.
    """
    tuned = Tuned(
        batch=from_batch,
        learning_rate=learning_rate,
        optimizer=optimizer,
        warmup_epochs=warmup_epochs,
        weight_decay=weight_decay,
        dropout=dropout,
        label_smoothing=label_smoothing,
        beta1=beta1,
        beta2=beta2,
        epsilon=epsilon,
        ema_decay=ema_decay,
    )
    rules = list(rule or ()) if rule is None or isinstance(rule, list | tuple) else [str(rule)]
    plan_rules(tuned, batch, rules, rate_rule=rate_rule)  # wrong input is told before a database is opened
    return plan_rules(tuned, batch, rules, rate_rule=rate_rule, audits=list(audited_rules(db)))


def audited_rules(db: str | None = None) -> Iterator[AuditedRule]:
    """Yield the verdicts that the stored runs of a database's studies give on the rules; nothing is run."""
    if db is None and _is_missing_default():
        return
    with open_store(db, write=False) as store:
        for study in store.studies():
            try:
                found = audit_stored(store, study.name)
            except TargetNotReachedError:
                continue
            for one in found.rules:
                if one.verdict in JUDGED:
                    yield AuditedRule(
                        study=study.name,
                        rule=one.rule.name,
                        batch_size=one.batch_size,
                        verdict=one.verdict,
                        regret=None if one.regret is None else one.regret.value,
                        reason=one.reason,
                    )


def _is_missing_default() -> bool:
    """Return whether nobody named a database and there is no file of the default name in this folder."""
    is_default = database_url() == DEFAULT_DATABASE_URL
    return is_default and not Path(DEFAULT_DATABASE_URL.removeprefix("sqlite:///")).exists()
