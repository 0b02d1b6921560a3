"""``probe branch``: the local critical batch size of a large run, from branches at checkpoints."""

import hashlib
import itertools
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

from bssearch.analysis.law.branches import (
    FEWEST_REPEATS,
    BranchedSize,
    BranchPlan,
    LocalCriticalBatch,
    bound_of,
    holds,
    is_rising,
    local_critical_batch,
    plan_branches,
    why_unknown,
)
from bssearch.commands.launch import Launch
from bssearch.commands.opening import OpenStudy, opened
from bssearch.commands.probes import ProbeReport, run_request
from bssearch.errors import LaunchError, NotFoundError, UsageError, require, required
from bssearch.records import (
    RULES_OF_OPTIMIZERS,
    Branch,
    BranchMeasurement,
    Configuration,
    LearningRateRule,
    Phase,
    TrialPlan,
    TrialRequest,
    TrialState,
    learning_rate_factor,
    rule_of_optimizer,
    to_json,
)
from bssearch.records.text import plural
from bssearch.registry import Option
from bssearch.search.history import trial_seed
from bssearch.spec import StudySpec, choose_micro_batch, split_batch

MOST_SAMPLES = 2**63 - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class BranchPoint:
    """A checkpoint to branch from; ``samples`` counts the samples before the checkpoint, if known."""

    path: Path
    digest: str
    samples: int | None
    step: int | None
    has_optimizer: bool | None = None  # None if only the user's program reads the file
    learning_rate: float | None = None

    @property
    def where(self) -> str:
        return self.path.name if self.samples is None else f"after {self.samples} samples ({self.path.name})"


def branch_points(spec: StudySpec, paths: Sequence[Path], at: Sequence[int] | None) -> list[BranchPoint]:
    """Return the checkpoints in training order; ``at`` overrides the sample counts in the files.

    Raises `UsageError` if two sample counts are equal, or if a necessary sample count is unknown.
    """
    require(
        not at or len(at) == len(paths),
        f"--at has {plural(len(at or ()), 'value')}, but --checkpoint has {len(paths)}; give --at once for each "
        "--checkpoint",
    )
    points = [_point(spec, path, at[index] if at else None) for index, path in enumerate(paths)]
    for point in points:
        _check_known(spec, point, several=len(points) > 1)
    ordered = sorted(points, key=lambda point: point.samples or 0)
    for before, after in itertools.pairwise(ordered):
        require(
            before.samples != after.samples,
            f"checkpoints {before.path} and {after.path} are both after {after.samples} samples; leave out one "
            "checkpoint",
        )
    return ordered


def check_room(spec: StudySpec, points: Sequence[BranchPoint], samples: int) -> None:
    """Raise `UsageError` if branches end after the learning-rate schedule."""
    horizon = _horizon(spec)
    for point in points:
        if horizon is not None and point.samples is not None and point.samples + samples > horizon:
            raise UsageError(
                f"checkpoint {point.path}: {point.samples} samples + {samples} of a branch must be <= "
                f"schedule.horizon_samples = {horizon:g}",
                hint="shorten the branches with --tokens, or leave this checkpoint out",
            )


def _point(spec: StudySpec, path: Path, at: int | None) -> BranchPoint:
    batch_size = spec.default.batch_size
    require(path.exists(), f"checkpoint {path}: the file does not exist; correct --checkpoint", error=NotFoundError)
    from bssearch.training.trial_checkpoint import read_checkpoint

    saved = None if spec.is_program else read_checkpoint(path)
    samples = saved.samples_at(batch_size) if saved and at is None else at
    step = None if samples is None else samples // batch_size
    return BranchPoint(
        path=path,
        digest=_file_digest(path),
        samples=samples,
        step=step if saved is None or saved.step is None else saved.step,
        has_optimizer=None if saved is None else saved.optimizer is not None,
        learning_rate=None if saved is None else saved.learning_rate,
    )


def _check_known(spec: StudySpec, point: BranchPoint, *, several: bool) -> None:
    require(
        point.samples is None or point.samples <= MOST_SAMPLES,
        f"checkpoint {point.path}: {point.samples} samples must be <= {MOST_SAMPLES}; correct --at or the file",
    )
    if point.samples is None and (several or _horizon(spec) is not None):
        why = "to distinguish several checkpoints" if several else "for the learning-rate schedule"
        save = "" if spec.is_program else ", or save the samples in the file"
        raise UsageError(
            f"the samples before checkpoint {point.path} are unknown, but necessary {why}",
            hint=f"give the samples before each checkpoint with --at{save}",
        )


def _horizon(spec: StudySpec) -> float | None:
    horizon = spec.default_configuration.parameters.get("horizon_samples")
    return None if horizon is None or spec.is_program else float(horizon)


def _file_digest(path: Path) -> str:
    if path.is_file():
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    return hashlib.sha256(
        repr(
            [
                (str(one.relative_to(path)), one.stat().st_size, one.stat().st_mtime_ns)
                for one in sorted(path.rglob("*"))
                if one.is_file()
            ]
        ).encode()
    ).hexdigest()


@dataclass(frozen=True, slots=True, kw_only=True)
class BranchedCheckpoint:
    """The branches from one checkpoint, and the local critical batch size."""

    point: BranchPoint
    plan: BranchPlan
    start: float  # the metric at the checkpoint
    sizes: tuple[BranchedSize, ...]
    found: LocalCriticalBatch
    notice: str | None = None  # the reason that the range ended


def rate_rule(spec: StudySpec) -> tuple[LearningRateRule, bool]:
    """Return the learning-rate rule of the space, else of the optimizer, and whether this rule is known."""
    rate = spec.space.learning_rate
    if "rule" in getattr(rate, "model_fields_set", ()) and (written := getattr(rate, "rule", None)) is not None:
        return written, True
    optimizer = spec.default_configuration.optimizer
    return rule_of_optimizer(optimizer), optimizer in RULES_OF_OPTIMIZERS


def configuration_at(spec: StudySpec, batch_size: int, micro_batch_size: int, rule: LearningRateRule) -> Configuration:
    """Scale the default configuration to ``batch_size`` by ``rule`` and ``space.batch_rules``."""
    default = spec.default_configuration
    factor = learning_rate_factor(rule, batch_size, default.batch_size)
    carried = spec.space.batch_rules.carried(
        {**default.parameters, "weight_decay": default.weight_decay}, batch_size / default.batch_size, factor
    )
    weight_decay = carried.pop("weight_decay")
    micro, accumulation_steps = split_batch(batch_size, micro_batch_size)
    return replace(
        default,
        batch_size=batch_size,
        micro_batch_size=micro,
        accumulation_steps=accumulation_steps,
        learning_rate=default.learning_rate * factor,
        weight_decay=weight_decay,
        parameters=carried,
    )


def report(
    spec: StudySpec,
    found: Sequence[BranchedCheckpoint],
    rule: LearningRateRule,
    repeats: int,
    tokens_per_sample: int | None,
    notes: Sequence[str],
) -> ProbeReport:
    plan, rules = found[0].plan, spec.space.batch_rules
    rows = [row for one in found for row in _rows(spec, one, rule)]
    return ProbeReport(
        document={
            "schema_version": 1,
            "study": spec.name,
            "metric": spec.target.metric,
            "goal": spec.record_target.goal.value,
            "batch_size": plan.batch_sizes[0],
            "branch_samples": plan.samples,
            "branch_tokens": None if tokens_per_sample is None else plan.samples * tokens_per_sample,
            "repeats": repeats,
            "rules": {"learning_rate": rule.value, "betas": rules.betas, "weight_decay": rules.weight_decay},
            "checkpoints": [_checkpoint(spec, one, rule) for one in found],
            "schedule": [
                {"step": one.point.step, "samples": one.point.samples, "batch_size": one.found.batch_size}
                for one in found
                if one.found.batch_size is not None
            ],
            "rises": is_rising([one.found for one in found]),
            "warnings": [{"code": "branches", "message": note} for note in notes]
            + [{"code": "range_ended", "message": one.notice} for one in found if one.notice is not None],
        },
        rows=rows,
        table=[
            {
                "checkpoint": row["checkpoint"],
                "samples": row["samples"],
                "batch": str(row["batch_size"]),
                "learning_rate": row["learning_rate"],
                "end": "diverged" if row["diverged"] else row["mean"],
                "holds": {True: "yes", False: "no", None: None}[row["holds"]],
            }
            for row in rows
        ],
        columns=("checkpoint", "samples", "batch", "learning_rate", "end", "holds"),
        sentences=list(sentences(spec, found, repeats)),
    )


def sentences(spec: StudySpec, found: Sequence[BranchedCheckpoint], repeats: int) -> Iterator[str]:
    for one in found:
        yield f"{one.point.where}: {answer(one.found, one.plan.batch_sizes[0])}"
        if one.notice is not None:
            yield f"note: {one.notice}"
    rises, plan = is_rising([one.found for one in found]), found[0].plan
    if rises is not None and len({one.found.batch_size for one in found} - {None}) == 1:
        yield (
            "The largest batch size that holds is equal at all checkpoints with an answer, so a growing schedule gains "
            "nothing."
        )
    elif rises:
        yield (
            "The largest batch size that holds grows along the checkpoints and never falls. Train with this schedule: "
            f"`bssearch trial add {spec.name} {schedule_words(found)}`."
        )
    elif rises is not None:
        yield "The largest batch size that holds falls between two checkpoints, so bssearch suggests no schedule."
    yield (
        f"Each branch trains on {plan.samples} samples. A branch's end is the mean validation {spec.target.metric} "
        f"over the last quarter. A batch size holds if no branch diverges and the mean end of {repeats} branches is "
        f"within the one-sided 95 % bound of batch size {plan.batch_sizes[0]}."
    )


def schedule_words(found: Sequence[BranchedCheckpoint]) -> str:
    """Return a batch schedule that grows from the default's batch size, as arguments of ``bssearch trial add``."""
    begins = [(0, found[0].plan.batch_sizes[0])]
    for one in found:
        size, samples = one.found.batch_size, one.point.samples
        if size is not None and samples is not None and size > begins[-1][1]:
            begins = [*(begin for begin in begins if begin[0] < samples), (samples, size)]
    (_, first), *later = begins
    return f"batch_size={first} batch_stages='{' '.join(f'{samples}:{size}' for samples, size in later)}'"


def answer(found: LocalCriticalBatch, base: int) -> str:
    match found.verdict:
        case "found":
            return f"the local critical batch size is {found.low}, because batch size {found.high} does not hold."
        case "at_least":
            return f"the local critical batch size is at least {found.low}, because all tried batch sizes hold."
        case "below":
            return (
                f"the local critical batch size is below {found.high}, which does not hold; the smallest tried "
                f"batch size is {base}."
            )
        case "cannot_tell":
            return f"cannot tell: {found.reason}."


def _checkpoint(spec: StudySpec, one: BranchedCheckpoint, rule: LearningRateRule) -> dict[str, Any]:
    found = one.found
    return {
        "checkpoint": str(one.point.path),
        "step": one.point.step,
        "samples": one.point.samples,
        "start_metric": one.start,
        "verdict": found.verdict,
        "reason": found.reason,
        "batch_size": found.batch_size,
        "interval": [found.low, found.high],
        "mean": found.mean,
        "spread": found.spread,
        "bound": found.bound,
        "branches": [
            {name: value for name, value in row.items() if name not in {"checkpoint", "samples"}}
            for row in _rows(spec, one, rule)
        ],
    }


def _rows(spec: StudySpec, one: BranchedCheckpoint, rule: LearningRateRule) -> Iterator[dict[str, Any]]:
    bound, goal = one.found.bound, spec.record_target.goal
    for size in one.sizes:
        yield {
            "checkpoint": str(one.point.path),
            "samples": one.point.samples,
            "batch_size": size.batch_size,
            "learning_rate": configuration_at(spec, size.batch_size, size.batch_size, rule).learning_rate,
            "ends": list(size.ends),
            "mean": size.mean,
            "diverged": None in size.ends,
            "holds": None if bound is None or size is one.sizes[0] else holds(size, bound, goal),
        }


OCTAVES = 6  # default number of doublings of the batch size

NO_LIMIT_SECONDS = 1e9  # train seconds; never reached, because branches end after a number of samples

SAME_RATE = 1.1  # learning rates within this factor count as equal

RAN = frozenset({TrialState.REACHED, TrialState.EXHAUSTED, TrialState.CAPPED})


def branch(
    spec: StudySpec,
    launch: Launch,
    *,
    checkpoint: Annotated[
        list[Path], Option("A checkpoint of the run; repeat the option for a schedule of batch sizes.", metavar="PATH")
    ],
    tokens: Annotated[
        int, Option("Length of each branch in tokens, or in samples if the workload counts no tokens.", min=1)
    ],
    octaves: Annotated[int, Option("Largest number of doublings of the default's batch size.", min=1)] = OCTAVES,
    repeats: Annotated[
        int, Option("Number of branches per batch size; each branch shuffles the data differently.", min=3)
    ] = FEWEST_REPEATS,
    at: Annotated[
        list[int] | None,
        Option(
            "Number of samples before each checkpoint, by default the number in the checkpoint's file.",
            min=0,
            metavar="SAMPLES",
        ),
    ] = None,
    warmup_steps: Annotated[
        int,
        Option(
            "Learning-rate warmup in steps of the default batch size, for a checkpoint without optimizer state.", min=0
        ),
    ] = 0,
) -> ProbeReport:
    """Find a run's local critical batch size with branches from checkpoints.

    Branches at the default batch size B, 2B, 4B, … train on equally many samples. The answer is the largest size that
    does not worsen the metric.
    """
    require(
        not spec.command,
        "a command cannot receive a checkpoint, because no placeholder exists for checkpoints",
        hint="use a Python script that calls bssearch.current_trial() and reads trial.checkpoint",
    )
    rule, is_known = rate_rule(spec)
    points = branch_points(spec, checkpoint, at)
    with opened(spec, launch) as study:
        description = study.executor.describe()
        plan = plan_branches(
            spec.default.batch_size,
            samples_of(tokens, description.tokens_per_sample, 2 * spec.default.batch_size),
            octaves,
            largest=description.train_samples,
        )
        check_room(spec, points, plan.samples)
        notes = list(notices(spec, is_known, points, description.tokens_per_sample))
        for note in notes:
            study.listener.note(note)
        branching = Branching(study, rule, plan, repeats, rise_samples=warmup_steps * spec.default.batch_size)
        found = [branching.at(point) for point in points]
    return report(spec, found, rule, repeats, description.tokens_per_sample, notes)


def samples_of(tokens: int, tokens_per_sample: int | None, least: int) -> int:
    """Convert ``tokens`` to samples; return ``tokens`` if ``tokens_per_sample`` is None.

    Raises `UsageError` for fewer than ``least`` samples.
    """
    if tokens_per_sample is None:
        return tokens
    require(
        tokens >= least * tokens_per_sample,
        f"--tokens {tokens} must be >= {least * tokens_per_sample}, which is one step at batch size {least} (twice the "
        f"default) with {tokens_per_sample} tokens a sample",
    )
    return tokens // tokens_per_sample


class Branching:
    """Trains and stores missing branches."""

    def __init__(
        self, study: OpenStudy, rule: LearningRateRule, plan: BranchPlan, repeats: int, *, rise_samples: int
    ) -> None:
        self._study = study
        self._rule = rule
        self._plan = plan
        self._repeats = repeats
        self._rise_samples = rise_samples
        self._goal = study.spec.record_target.goal
        self._memory = study.store.probes.memory_boundary(study.spec.name, study.environment)
        self._most_at_once = study.spec.space.max_micro_batch_size

    def at(self, point: BranchPoint) -> BranchedCheckpoint:
        """Branch at batch sizes B, 2B, 4B, … until a size worsens the metric or exceeds the memory.

        Runs only B if the branches at B give no answer. Raises `LaunchError` if B does not fit, and `UsageError` if a
        branch fails or the checkpoint's metric is unknown.
        """
        base_size, *larger = self._plan.batch_sizes
        measured = self._size(point, base_size)
        if isinstance(measured, str):
            raise LaunchError(
                f"the branch at batch size {base_size} {measured}",
                hint="run `bssearch probe memory` to measure the largest micro-batch, then run this probe again",
            )
        start = required(
            next((one.start_metric for one in measured if one.start_metric is not None), None),
            f"checkpoint {point.path} has no finite {self._study.spec.target.metric} before the first step; evaluate "
            "before the first step, or branch from another checkpoint",
        )
        sizes, notice = [_ends(base_size, measured)], None
        bound = bound_of(sizes[0], self._goal)
        if bound is not None and why_unknown(start, sizes[0], self._goal) is None:
            notice = self._double(point, larger, sizes, bound)
        return BranchedCheckpoint(
            point=point,
            plan=self._plan,
            start=start,
            sizes=tuple(sizes),
            found=local_critical_batch(start, sizes, self._goal),
            notice=notice,
        )

    def _double(self, point: BranchPoint, larger: Sequence[int], sizes: list[BranchedSize], bound: float) -> str | None:
        for batch_size in larger:
            measured = self._size(point, batch_size)
            if isinstance(measured, str):
                return f"batch size {batch_size} {measured}, so the range ends at {sizes[-1].batch_size}"
            sizes.append(_ends(batch_size, measured))
            if not holds(sizes[-1], bound, self._goal):
                return None
        return None

    def _size(self, point: BranchPoint, batch_size: int) -> list[BranchMeasurement] | str:
        found = []
        for repeat in range(self._repeats):
            one = self._branch(point, batch_size, repeat)
            if isinstance(one, str):
                return one
            found.append(one)
            if one.metric is None:
                break  # one diverged branch decides against the batch size
        return found

    def _branch(self, point: BranchPoint, batch_size: int, repeat: int) -> BranchMeasurement | str:
        request = self._request(point, batch_size, repeat)
        spec, store = self._study.spec, self._study.store
        digest = _digest(point, request)
        if stored := store.probes.branches(spec.name, [digest]):
            return stored[0]
        outcome, curve = run_request(self._study.executor, request)
        if outcome.state is TrialState.OOM and request.plan.configuration.micro_batch_size > self._plan.batch_sizes[0]:
            self._most_at_once = self._plan.batch_sizes[0]  # branches at B fit, so no micro-batch exceeds B
            return self._branch(point, batch_size, repeat)
        if outcome.state is TrialState.OOM:
            return f"ran out of memory ({outcome.reason})"
        is_whole = bool(curve) and curve[-1].samples >= self._plan.samples
        if outcome.state is not TrialState.DIVERGED and not (outcome.state in RAN and is_whole):
            short = "" if outcome.state not in RAN else f" after {outcome.samples} of {self._plan.samples} samples"
            raise UsageError(
                f"the branch at batch size {batch_size} from {point.path} ended{short}: {outcome.reason}",
                hint="correct the cause and run the probe again; bssearch reuses the finished branches",
            )
        ends = [one.metric for one in curve if self._plan.is_in_window(one.samples)]
        measured = BranchMeasurement(
            digest=digest,
            checkpoint=str(point.path),
            start_samples=point.samples,
            samples=self._plan.samples,
            batch_size=batch_size,
            micro_batch_size=request.plan.configuration.micro_batch_size,
            learning_rate=request.plan.configuration.learning_rate,
            seed=request.plan.seed,
            start_metric=next((one.metric for one in curve if one.samples == 0), None),
            metric=None if outcome.state is TrialState.DIVERGED else statistics.fmean(ends),
        )
        store.probes.add_branch(spec.name, self._study.environment, measured)
        end = "diverged" if measured.metric is None else f"ends at {measured.metric:.5g}"
        self._study.listener.note(f"{point.path.name}, batch {batch_size}, branch {repeat + 1}: {end}")
        return measured

    def _request(self, point: BranchPoint, batch_size: int, repeat: int) -> TrialRequest:
        spec = self._study.spec
        micro = choose_micro_batch(batch_size, self._most_at_once, self._memory) or 1
        return TrialRequest(
            number=1,
            plan=TrialPlan(
                configuration=configuration_at(spec, batch_size, micro, self._rule),
                sampled=None,
                phase=Phase.PROBE,
                seed=trial_seed(spec.seed, Phase.PROBE, repeat),
                train_seconds_limit=NO_LIMIT_SECONDS,
                limit_state=TrialState.CAPPED,
                eval_every_steps=self._plan.samples_between // batch_size,
                stop_at_target=False,
                threads=spec.executor.threads,
            ),
            target=spec.record_target,
            branch=Branch(
                checkpoint=str(point.path.resolve()),
                samples=self._plan.samples,
                start_samples=point.samples,
                rise_samples=self._rise_samples,
            ),
        )


def notices(
    spec: StudySpec,
    is_known: bool,
    points: Sequence[BranchPoint],
    tokens_per_sample: int | None,
) -> Iterator[str]:
    if tokens_per_sample is None:
        yield "the workload has no tokens_per_sample, so --tokens counts samples"
    optimizer = spec.default_configuration.optimizer
    if not is_known:
        yield (
            f"optimizer {optimizer} has no known learning-rate rule, so the rate scales with √batch; "
            "set space.learning_rate.rule for another rule"
        )
    for point in points:
        if point.has_optimizer is False:
            yield (
                f"{point.path.name} has no optimizer state, so {optimizer} starts without state; "
                "check that --warmup-steps warms up the learning rate long enough"
            )
        rate, default = point.learning_rate, spec.default.learning_rate
        falls = spec.default_configuration.parameters.get("schedule", "constant") != "constant"
        if rate is not None and (rate > SAME_RATE * default or (rate * SAME_RATE < default and not falls)):
            yield (
                f"{point.path.name} has learning rate {rate:g}, but the branches at the default batch size use the "
                f"spec's learning rate {default:g} and schedule; correct default.learning_rate to "
                "branch at the checkpoint's learning rate"
            )


def _ends(batch_size: int, measured: Sequence[BranchMeasurement]) -> BranchedSize:
    return BranchedSize(batch_size=batch_size, ends=tuple(one.metric for one in measured))


def _digest(point: BranchPoint, request: TrialRequest) -> str:
    # The checkpoint's content identifies a branch, not the checkpoint's path.
    assert request.branch is not None, "the request has a branch"
    request = replace(request, branch=replace(request.branch, checkpoint=point.digest))
    return hashlib.sha256(to_json(request).encode()).hexdigest()[:32]
