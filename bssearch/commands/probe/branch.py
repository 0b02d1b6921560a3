"""``probe branch``: the local critical batch size of a run that is too large to search, from its checkpoints."""

from __future__ import annotations

import hashlib
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated

from bssearch.analysis.law.branches import (
    FEWEST_REPEATS,
    BranchedSize,
    BranchPlan,
    bound_of,
    holds,
    local_critical_batch,
    plan_branches,
    why_unknown,
)
from bssearch.commands.opening import Launch, OpenStudy, opened
from bssearch.commands.probe.branch_points import BranchPoint, branch_points, check_room
from bssearch.commands.probe.branch_report import BranchedCheckpoint, configuration_at, rate_rule, report
from bssearch.commands.probe.report import ProbeReport
from bssearch.commands.unstored import run_request
from bssearch.errors import LaunchError, UsageError
from bssearch.options import Option
from bssearch.records import (
    Branch,
    BranchMeasurement,
    Observation,
    Phase,
    TrialRequest,
    TrialState,
    to_json,
)
from bssearch.scaling import LearningRateRule
from bssearch.search.seeds import trial_seed
from bssearch.space import choose_micro_batch
from bssearch.spec import StudySpec

OCTAVES = 6
"""How far batch sizes are doubled where nobody says otherwise: a choice; the range mostly ends before."""

NO_LIMIT_SECONDS = 1e9
"""Train seconds that no branch takes: its samples end it."""

SAME_RATE = 1.1
"""Learning rates within this factor pass for the same: a choice."""

RAN = frozenset({TrialState.REACHED, TrialState.EXHAUSTED, TrialState.CAPPED})


def branch(
    spec: StudySpec,
    launch: Launch,
    *,
    checkpoint: Annotated[
        list[Path], Option("A checkpoint of the run; repeat it for a schedule of batch sizes.", metavar="PATH")
    ],
    tokens: Annotated[
        int, Option("The length of each branch in tokens, or in samples where the workload counts no tokens.", min=1)
    ],
    octaves: Annotated[int, Option("Double the default's batch size at most so often.", min=1)] = OCTAVES,
    repeats: Annotated[int, Option("Branches at each batch size, in other orders of the data.", min=3)] = (
        FEWEST_REPEATS
    ),
    at: Annotated[
        list[int] | None,
        Option("Samples seen at each checkpoint, where its file does not say.", min=0, metavar="SAMPLES"),
    ] = None,
    warmup_steps: Annotated[
        int, Option("Let the learning rate rise over so many steps of B: for an optimizer that begins anew.", min=0)
    ] = 0,
) -> ProbeReport:
    """Find the local critical batch size of a run too large to search, by branches from its checkpoints.

    Each branch goes on from the checkpoint for the same samples, at the default's batch size B, at 2B, 4B, … with the
    learning rate by the optimizer's rule. The answer is the largest batch size that loses nothing by it.
    """
    if spec.command:
        raise UsageError(
            "a command cannot be told of a checkpoint: there is no placeholder for it",
            hint="a script that asks for its trial reads trial.checkpoint",
        )
    rule, is_known = rate_rule(spec)
    points = branch_points(spec, checkpoint, at)
    with opened(spec, launch) as study:
        description = study.executor.describe()
        samples = samples_of(tokens, description.tokens_per_sample, 2 * spec.default.batch_size)
        plan = plan_branches(spec.default.batch_size, samples, octaves, largest=description.train_samples)
        check_room(spec, points, plan.samples)
        notes = list(notices(spec, rule, is_known, points, description.tokens_per_sample))
        for note in notes:
            study.listener.note(note)
        branching = Branching(study, rule, plan, repeats, rise_samples=warmup_steps * spec.default.batch_size)
        found = [branching.at(point) for point in points]
    return report(spec, found, rule, repeats, description.tokens_per_sample, notes)


def samples_of(tokens: int, tokens_per_sample: int | None, least: int) -> int:
    """Return the samples of so many tokens; raise `UsageError` where they are fewer than ``least``, a step of 2B."""
    if tokens_per_sample is None:
        return tokens
    if tokens < least * tokens_per_sample:
        raise UsageError(
            f"--tokens {tokens} must be >= {least * tokens_per_sample}, one step of the batch size 2B = {least} at "
            f"{tokens_per_sample} tokens a sample"
        )
    return tokens // tokens_per_sample


class Branching:
    """Trains the branches of checkpoints one by one, and stores each; what is stored is not trained again."""

    def __init__(
        self, study: OpenStudy, rule: LearningRateRule, plan: BranchPlan, repeats: int, *, rise_samples: int
    ) -> None:
        self._study = study
        self._rule = rule
        self._plan = plan
        self._repeats = repeats
        self._rise_samples = rise_samples
        self._goal = study.spec.record_target.goal
        self._memory = study.store.memory_boundary(study.spec.name, study.environment)
        self._most_at_once = study.spec.space.max_micro_batch_size

    def at(self, point: BranchPoint) -> BranchedCheckpoint:
        """Branch at B, 2B, 4B, … until one does not hold; raise `LaunchError` where B itself does not run."""
        base_size, *larger = self._plan.batch_sizes
        measured = self._size(point, base_size)
        if isinstance(measured, str):
            raise LaunchError(
                f"the branch at batch size {base_size} {measured}",
                hint="bssearch probe memory finds the largest micro-batch that fits",
            )
        start = next((one.start_metric for one in measured if one.start_metric is not None), None)
        if start is None:
            raise UsageError(f"checkpoint {point.path}: {self._study.spec.target.metric} is not finite there")
        sizes, notice = [_ends(base_size, measured)], None
        bound = bound_of(sizes[0], self._repeats, self._goal)
        if bound is not None and why_unknown(start, sizes[0], self._goal) is None:
            notice = self._double(point, larger, sizes, bound)
        found = local_critical_batch(start, sizes, self._goal)
        return BranchedCheckpoint(
            point=point, plan=self._plan, start=start, sizes=tuple(sizes), found=found, notice=notice
        )

    def _double(self, point: BranchPoint, larger: Sequence[int], sizes: list[BranchedSize], bound: float) -> str | None:
        """Add larger batch sizes until one does not hold; return what ended the range before that."""
        for batch_size in larger:
            measured = self._size(point, batch_size)
            if isinstance(measured, str):
                return f"batch size {batch_size} {measured}: the range ends at {sizes[-1].batch_size}"
            sizes.append(_ends(batch_size, measured))
            if not holds(sizes[-1], bound, self._goal):
                return None
        return None

    def _size(self, point: BranchPoint, batch_size: int) -> list[BranchMeasurement] | str:
        """Return the repeated branches at a batch size; in words where memory ran out."""
        found = []
        for repeat in range(self._repeats):
            one = self._branch(point, batch_size, repeat)
            if isinstance(one, str):
                return one
            found.append(one)
            if one.metric is None:
                break  # one that diverges decides
        return found

    def _branch(self, point: BranchPoint, batch_size: int, repeat: int) -> BranchMeasurement | str:
        request = self._request(point, batch_size, repeat)
        spec, store = self._study.spec, self._study.store
        digest = _digest(point, request)
        stored = store.branches(spec.name, self._study.environment, [digest])
        if stored:
            return stored[0]
        outcome, curve = run_request(self._study.executor, request)
        if outcome.state is TrialState.OOM and request.configuration.micro_batch_size > self._plan.batch_sizes[0]:
            self._most_at_once = self._plan.batch_sizes[0]  # in micro-batches of what B fits, all fit
            return self._branch(point, batch_size, repeat)
        if outcome.state is TrialState.OOM:
            return f"ran out of memory ({outcome.reason})"
        is_whole = bool(curve) and curve[-1].samples >= self._plan.samples
        if outcome.state is not TrialState.DIVERGED and not (outcome.state in RAN and is_whole):
            short = "" if outcome.state not in RAN else f" after {outcome.samples} of {self._plan.samples} samples"
            raise UsageError(f"the branch at batch size {batch_size} from {point.path} ended{short}: {outcome.reason}")
        measured = BranchMeasurement(
            digest=digest,
            checkpoint=str(point.path),
            start_samples=point.samples,
            samples=self._plan.samples,
            batch_size=batch_size,
            micro_batch_size=request.configuration.micro_batch_size,
            learning_rate=request.configuration.learning_rate,
            seed=request.seed,
            start_metric=next((one.metric for one in curve if one.samples == 0), None),
            metric=None if outcome.state is TrialState.DIVERGED else self._end(curve),
        )
        store.save_branch(spec.name, self._study.environment, measured)
        end = "diverged" if measured.metric is None else f"ends at {measured.metric:.5g}"
        self._study.listener.note(f"{point.path.name}, batch {batch_size}, branch {repeat + 1}: {end}")
        return measured

    def _end(self, curve: Sequence[Observation]) -> float:
        return statistics.fmean(one.metric for one in curve if self._plan.is_in_window(one.samples))

    def _request(self, point: BranchPoint, batch_size: int, repeat: int) -> TrialRequest:
        spec = self._study.spec
        micro = choose_micro_batch(batch_size, self._most_at_once, self._memory) or 1
        return TrialRequest(
            number=1,
            configuration=configuration_at(spec, batch_size, micro, self._rule),
            seed=trial_seed(spec.seed, Phase.PROBE, repeat),
            target=spec.record_target,
            train_seconds_limit=NO_LIMIT_SECONDS,
            limit_state=TrialState.CAPPED,
            eval_every_steps=self._plan.samples_between // batch_size,
            stop_at_target=False,
            threads=spec.executor.threads,
            branch=Branch(
                checkpoint=str(point.path.resolve()),
                samples=self._plan.samples,
                start_samples=point.samples,
                rise_samples=self._rise_samples,
            ),
        )


def notices(
    spec: StudySpec,
    rule: LearningRateRule,
    is_known: bool,
    points: Sequence[BranchPoint],
    tokens_per_sample: int | None,
) -> Iterator[str]:
    """Yield what must be known of the branches before they run."""
    if tokens_per_sample is None:
        yield "the workload has no tokens_per_sample: --tokens counts samples"
    optimizer = spec.default_configuration.optimizer
    if not is_known:
        yield f"no rule for the learning rate of {optimizer} is known: it follows the square root of the batch size"
    for point in points:
        if point.has_optimizer is False:
            yield (
                f"{point.path.name} is without optimizer state: {optimizer} begins anew; "
                "--warmup-steps lets its learning rate rise"
            )
        rate, default = point.learning_rate, spec.default.learning_rate
        falls = spec.default_configuration.parameters.get("schedule", "constant") != "constant"
        if rate is not None and (rate > SAME_RATE * default or (rate * SAME_RATE < default and not falls)):
            yield (
                f"{point.path.name} was saved at a learning rate of {rate:g}; the branches at B have the spec's, "
                f"{default:g}, and its schedule"
            )


def _ends(batch_size: int, measured: Sequence[BranchMeasurement]) -> BranchedSize:
    return BranchedSize(batch_size=batch_size, ends=tuple(one.metric for one in measured))


def _digest(point: BranchPoint, request: TrialRequest) -> str:
    """Return a digest of all that decides how a branch ends; where the checkpoint lies does not."""
    assert request.branch is not None, "a branch is requested"
    anywhere = replace(request, branch=replace(request.branch, checkpoint=point.digest))
    return hashlib.sha256(to_json(anywhere).encode()).hexdigest()[:32]
