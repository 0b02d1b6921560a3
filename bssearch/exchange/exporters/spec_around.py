"""``export --to spec``: a spec around the optimum of an imported study."""

import shlex
from pathlib import Path

import yaml

from bssearch.analysis.missing_runs import missing_runs
from bssearch.errors import UsageError, require
from bssearch.exchange.exporters.exports import Exported
from bssearch.records import learning_rate_factor, rule_of_optimizer
from bssearch.records.text import plural
from bssearch.search.finding import answer
from bssearch.spec import SCRATCH_RATES, TRAINING_PARAMETERS, spec_of
from bssearch.storage.repository import Store

AROUND = 4  # factor around the best batch size and learning rate; see `BRACKET_OCTAVES` of the search
TRIALS_PER_SIZE = 5  # as in `bssearch plan start`
LIMIT = 3.0  # a trial's limit / the seconds to the target at the imported optimum
UNKNOWN_LIMIT_S = 600.0
ROUNDING = 1.01  # keeps carried learning rates inside the written bounds


def export_spec(store: Store, name: str, file: str | None = None) -> Exported:
    """Write a spec around an imported study's optimum, by default to ``my-NAME.yaml``. Notes propose runs to add."""
    spec, trials, found = spec_of(store.studies.get(name)), store.trials.of(name), answer(store, name)
    require(
        spec.is_imported,
        f"study {name!r} was not imported, so the study already has a spec",
        hint=f"resume the study with `bssearch run {name}`",
    )
    best = next(one.configuration for one in trials if one.number in found.optimal.trial_numbers)
    missing = missing_runs(trials, found.batches, best.batch_size, found.worse)
    own = f"my-{name}"
    near = {size for one in trials if 1 / AROUND <= (size := one.configuration.batch_size) / best.batch_size <= AROUND}
    optimizer = max((one for one in SCRATCH_RATES if best.optimizer.lower().startswith(one)), key=len, default="")
    rule = rule_of_optimizer(optimizer)
    is_known = "learning_rate" not in best.parameters
    rate = best.learning_rate if is_known else SCRATCH_RATES[optimizer or "sgd"]
    rates = [rate / AROUND, rate * AROUND]
    for one in missing:
        if one.learning_rate is not None:
            rates.append(one.learning_rate / learning_rate_factor(rule, one.batch_size, best.batch_size))
    known = {field: getattr(best, field) for field in TRAINING_PARAMETERS if field not in best.parameters}
    seconds = found.optimal.time_to_target_s
    document = {
        "schema_version": 1,
        "name": own,
        "workload": "my_training.py:MyTraining",
        "target": {"metric": spec.target.metric, "value": spec.target.value, "goal": spec.target.goal.value},
        "space": {
            "batch_size": sorted(near | {one.batch_size for one in missing}),
            "learning_rate": {
                "reference_batch": best.batch_size,
                "low": float(f"{min(rates) / ROUNDING:.3g}"),
                "high": float(f"{max(rates) * ROUNDING:.3g}"),
                "rule": rule.value,
            },
            **known,
            "optimizer": {"name": optimizer or "sgd"},
        },
        "default": {"batch_size": best.batch_size, "learning_rate": rate, **known},
        "budget": {
            "trials": TRIALS_PER_SIZE * len(near),
            "trial_train_seconds": UNKNOWN_LIMIT_S if seconds is None else float(f"{LIMIT * seconds.median:.2g}"),
        },
        "confirm": {"top": 2, "runs": 3},
    }
    path = Path(file or f"{own}.yaml")
    header = (
        f"# This spec surrounds the optimum of {plural(len(trials), 'imported run')} of study {name}.\n"
        f"# YOURS: workload (`bssearch guide own-training`), {'' if optimizer else 'optimizer, '}and\n"
        "# trial_train_seconds, the limit of a trial in seconds on your device.\n"
        f"# Next: bssearch run {shlex.quote(str(path))} --from {name}\n"
    )
    try:
        with path.open("x", encoding="utf-8") as opened:
            opened.write(header + yaml.safe_dump(document, sort_keys=False, default_flow_style=None))
    except OSError as error:
        raise UsageError(f"{path} cannot be written: {error.strerror}", hint="name another file with --file") from None
    adds = [" ".join(f"{key}={value}" for key, value in one.values.items()) for one in missing]
    return Exported(
        [str(path)],
        [
            f"note: missing run: {one.in_words}; once study {own} exists, add the run: "
            f"bssearch trial add {own} {values}"
            for one, values in zip(missing, adds, strict=True)
        ],
    )
