"""A user's own training loop as a trial; see `bssearch guide own-training`."""

import math
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from types import TracebackType
from typing import Any, Self, TypeVar

import torch
from torch import nn

from bssearch.errors import TrialStopped, UsageError, require
from bssearch.executors.loops.assignment import HOW_TO_EVALUATE, Assignment, Evaluate, Metrics
from bssearch.executors.loops.following import (
    AskedParameters,
    BatchRows,
    FieldsRead,
    Followed,
    OptimizerSteps,
    has_rows_of_ids,
    in_words,
    rates_of,
)
from bssearch.executors.loops.passes import Given, GrowingSampler, Passes, SeededSampler, TokenSampler
from bssearch.executors.loops.pitfalls import Averages, about_batch_norm, about_ranks, trained_modules
from bssearch.executors.loops.trial_run import kept_random_numbers, unmoved
from bssearch.records import Configuration
from bssearch.records.text import plural
from bssearch.training.batches import TokenBatches
from bssearch.training.optimizers import take_over_states

T = TypeVar("T")

READINGS_PER_MICRO_BATCH = 1000  # reads of ``should_stop`` before bssearch refuses a loop without steps

MOST_SKIPPED = 100  # batches in a row without an optimizer step; a gradient scaler settles within about 20 batches

# Members for a user's loop, which `dir` lists. All other members serve Trainers and the search.
PUBLIC = (
    *(
        "accumulation_steps",
        "batch_size",
        "batch_tokens",
        "batches",
        "checkpoint",
        "close",
        "device",
        "evaluation_due",
        "given",
    ),
    *("is_look", "is_over", "is_searched", "learning_rate", "load_optimizer", "micro_batch_size", "parameters"),
    *("no_sync", "rank", "report", "sampler", "seed", "should_stop", "state", "step", "steps", "test"),
    *("token_batches", "world_size"),
)


class Trial:
    """A trial for a user's loop, from `current_trial` or `Study.ask`.

    ``rank`` is this process's number, below `world_size`. With a batch size schedule, ``learning_rate``, the batch
    sizes and ``accumulation_steps`` apply to the next step. ``parameters`` holds the other parameters of the study and
    of `current_trial`. ``given`` holds `current_trial`'s arguments except ``seed``. ``is_look`` says whether bssearch
    only describes or measures the loop. The loop must read a searched learning rate. bssearch warns about other
    searched parameters that the loop does not read.

    ``steps`` counts the steps of the optimizers given to `state`. If `state` gets no optimizer, ``steps`` counts
    batches or calls of `step`.

    ::

        trial: bssearch.Trial = bssearch.current_trial(batch_size=64, learning_rate=0.1)
        optimizer = SGD(model.parameters(), lr=trial.learning_rate)
        trial.state(model=model, optimizer=optimizer)
        for x, y in trial.batches(make_loader, evaluate=lambda: {"accuracy": accuracy(model)}):
            train_step(model, optimizer, x, y)
    """

    def __init__(self, assignment: Assignment, *, rank: int = 0, now: Callable[[], float] = time.perf_counter) -> None:
        self.rank = rank
        self._now_seconds = now
        self._assignment = assignment
        self.given: Mapping[str, Any] = {}
        self.is_searched, self.is_look = assignment.cycles, assignment.is_look
        self.seed = assignment.seed
        self.device = assignment.device
        self.parameters = AskedParameters(assignment.parameters)
        self.steps = 0
        self._stages = assignment.stages
        self._micro_batches = 0
        self._has_begun = self._is_in_batch = self._is_looping = self.has_state = False
        self._asked = FieldsRead(assignment.configuration, assignment.searched)
        self._followed = Followed(assignment, self._asked)
        self._sampler: SeededSampler | None = None
        self._token_sampler: TokenSampler | None = None
        self._skipped_in_all = 0
        self._counted = self._announced_at = self._evaluated_at = -1
        self._rows = BatchRows()
        self._samples: int | None = 0
        self._has_warned = False
        self._optimizer_steps = OptimizerSteps()
        self._averages = Averages({})
        self._taken_before = self._skipped = self._first_step = 0
        self._steps_before, self._samples_behind = -1, 0
        self._readings = 0
        self._rate_is_set = False  # True if a Trainer, not the script, sets the rate
        self._put_random_numbers_back: Callable[[], None] = lambda: None
        if self.world_size > 1:
            self._stages.refuse(f"a training of {self.world_size} ranks", "the ranks share batches of one size")

    @property
    def batch_size(self) -> int:
        """The number of samples (or tokens) per optimizer step, of all ranks together."""
        self._asked.note("batch_size")
        return self._now.batch_size

    @property
    def world_size(self) -> int:
        """The number of ranks that share each batch."""
        return self._now.world_size

    @property
    def micro_batch_size(self) -> int:
        """The number of samples (or tokens) per forward pass on each rank."""
        self._asked.note("micro_batch_size")
        return self._now.micro_batch_size

    @property
    def accumulation_steps(self) -> int:
        """The number of micro-batches per optimizer step. The loop must divide a mean loss by this number."""
        self._asked.note("accumulation_steps")
        return self._now.accumulation_steps

    @property
    def learning_rate(self) -> float:
        """The learning rate, or the peak of the learning-rate schedule."""
        self._asked.note("learning_rate")
        return self._now.learning_rate

    @property
    def rate_to_set(self) -> float:
        """The learning rate for a Trainer. `has_asked` ignores reads of this property."""
        return self._now.learning_rate

    def check_rates(self, optimizer: Any) -> None:
        """Raise `UsageError` if neither a Trainer's optimizer nor the script uses the learning rate."""
        if self.has_asked("learning_rate") or not self.is_searched:
            return
        rates = rates_of([optimizer], "lr", "initial_lr", "max_lr")
        require(
            any(math.isclose(one, self.rate_to_set) for one in rates),
            f"the Trainer's optimizer has the learning rate {in_words(rates)}, but the trial's learning "
            f"rate is {self.rate_to_set:.4g}",
            hint="make the optimizer with lr=trial.learning_rate, or let the Trainer make the optimizer",
        )
        self._asked.note("learning_rate")
        self._rate_is_set = True

    def check_scheduled(self, rates: Collection[float], scheduled: Collection[float], who: str) -> None:
        """Raise `UsageError` if a Trainer sets ``rates`` other than the ``scheduled`` rates."""
        require(
            not self._rate_is_set or all(any(math.isclose(one, two) for two in scheduled) for one in rates),
            f"{who} set the learning rate {in_words(rates)} after step {self.steps}; the trial and its schedule "
            f"have {in_words(scheduled)}",
            hint="set the optimizer's rate to trial.learning_rate, or use a learning-rate schedule",
        )

    @property
    def is_over(self) -> bool:
        """True if the trial has ended. Unlike `should_stop`, this property does not start the clock."""
        return self._assignment.is_over

    @property
    def checkpoint(self) -> str | None:
        """The path of the checkpoint to branch from, or None."""
        return self._assignment.checkpoint()

    def load_optimizer(self, optimizer: torch.optim.Optimizer, state: Mapping[str, Any]) -> None:
        """Load an optimizer's state, but keep options such as the learning rate.

        Raises `UsageError` if the state does not fit.
        """
        try:
            take_over_states((optimizer,), state)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise UsageError(
                f"load_optimizer(): the state does not fit the optimizer: {error}",
                hint="make the optimizer with the same class and parameters as in the run that saved the state",
            ) from error

    def has_asked(self, name: str) -> bool:
        """True if the script has read the parameter ``name``."""
        return name in (self._asked.fields if name == "learning_rate" else self.parameters.asked)

    def check_trainer(self, who: str) -> None:
        """Raise `UsageError` if the Trainer ``who`` cannot train this trial."""
        require(
            not self.has_state,
            "the script calls trial.state(...), but a Trainer cannot resume a paused trial",
            hint="remove trial.state(...), so that bssearch stops trials instead of pausing them",
        )
        require(
            self.world_size == 1 or self._sampler is None,
            f"{who} shares the samples among the ranks, but trial.sampler() already does",
            hint="remove trial.sampler(), so that the Trainer makes the sampler",
        )
        self._stages.refuse(who, "a Trainer makes its loader once")

    def check_device(self, found: torch.device, processes: int, hint: str) -> None:
        """Raise `UsageError` if the Trainer's device or number of processes differs from the trial's."""
        wanted = torch.device(self.device)
        require(
            processes == self.world_size,
            f"the Trainer's world size is {processes}, but the trial needs {self.world_size} (executor.devices)",
            hint="call torch.distributed.init_process_group() before current_trial(), and let the Trainer use "
            "trial.world_size devices",
        )
        require(
            wanted.type == found.type and (wanted.index or 0) == (found.index or 0),
            f"the Trainer trains on {found}, but the trial runs on {wanted}",
            hint=hint,
        )

    def warn(self, sentence: str) -> None:
        """Add a warning to the trial."""
        self._assignment.warned(sentence)

    @property
    def should_stop(self) -> bool:
        """True if training should end. The first read starts the clock.

        Raises `UsageError` after too many reads without a `step`.
        """
        self._begin()
        self._readings += 1
        most = READINGS_PER_MICRO_BATCH * self._now.accumulation_steps
        require(
            self._readings <= most or not self._assignment.cycles,
            f"the loop read trial.should_stop {most} times after step {self.steps} without trial.step()",
            hint="call trial.step() after each step of the optimizer",
        )
        return self._assignment.is_over

    @property
    def evaluation_due(self) -> bool:
        """True if the loop must evaluate and `report` now. A due evaluation stops the clock.

        Within `batches`, read this property after the optimizer's step.
        """
        step = self._step_at_hand
        if step is None or self._assignment.is_over or self._evaluated_at == step:
            return False
        self._begin()
        if self._announced_at != step:
            if not self._is_due(step):
                return False
            if self._is_in_batch:
                self._count(step)
            self._announced_at = step
            self._assignment.pause()
            self._put_random_numbers_back = kept_random_numbers()
        return True

    def report(self, *, loss: float | None = None, **metrics: float) -> None:
        """Report a due evaluation, resume the clock and restore the random state.

        Raises `UsageError` if no evaluation is due, or if the target's metric is missing or not a number.
        """
        self.report_all(metrics, loss)

    def report_all(self, metrics: Metrics, loss: float | None = None) -> None:
        """Report metrics of any name; see `report`."""
        step = self._step_at_hand
        if self._assignment.is_over:
            return
        if step is None or self._announced_at != step or self._evaluated_at == step:
            raise UsageError(
                f"the loop called report() after step {self.steps}, but trial.evaluation_due was not true",
                hint="write if trial.evaluation_due: trial.report(accuracy=...) at the end of the loop's body",
            )
        self._evaluated_at = step
        self._put_random_numbers_back()
        self._take_in(step, metrics, loss)

    def step(self, samples: int | None = None) -> None:
        """Record an optimizer step of a loop without `batches`.

        ``samples`` defaults to ``batch_size``, with a warning unless the loop uses `sampler` or counts tokens. A
        skipped optimizer step does not count.

        Raises:
            TrialStopped: the trial has already ended.
            UsageError: ``samples`` < 1, unknown ``samples`` with the objective ``samples_to_target``, a missing due
                evaluation, or a call in the body of `batches`.
        """
        require(
            samples is None or samples >= 1,
            f"trial.step(): samples = {samples} must be >= 1",
            hint="call trial.step(samples=len(x))",
        )
        if self._counts_tokens or (samples is None and self._sampler is not None):
            samples = self._now.batch_size  # the sampler leaves an incomplete batch out
        if samples is None:
            self._untold("trial.step() got no number of samples", "call trial.step(samples=len(x))")
        self.add_samples(samples)
        self.stepped()

    def stepped(self) -> None:
        """Record a step with the samples from `add_samples`; see `step`."""
        require(not self._is_in_batch, "do not call step() in the body of batches(), which counts the steps")
        if self._assignment.is_over:
            raise TrialStopped("the trial has ended; end the loop when trial.should_stop is true")
        if not self._has_begun:
            self._begin()
            self._taken_before -= min(1, self._optimizer_steps.taken)  # the step that this call records
            self._first_step += 1
        self._check_evaluated()
        step = self._step_at_hand_after(is_whole=True)
        if step is None:
            self._check_steps()
        else:
            self._count(step)
            self._go_on(step)
        self._settle()

    def batches(
        self, loader: Given[T], evaluate: Evaluate | None = None, *, test: Evaluate | None = None, epochs: int = 1
    ) -> Iterator[T]:
        """Yield micro-batches until the trial ends.

        Args:
            loader: a loader, or a function that makes a loader for a micro-batch size. If the batch grows, bssearch
                calls the function for each new micro-batch size. A loader keeps its micro-batch size.
            evaluate: a function that returns the metrics by name. In a search, the first call precedes the first step.
                If None, the body must `report`.
            test: a function that returns the test metrics, called at most once, and never in search trials.
            epochs: passes outside a search. A search repeats the data.

        The body must take the optimizer step at the last micro-batch of each step.
        """
        require(not self._is_looping, "do not call batches() in the body of batches(): a trial has one loop at a time")
        self._is_looping = True
        try:
            yield from self._looped(
                Passes(
                    loader,
                    self._assignment,
                    self._asked,
                    lambda: self._token_sampler or self._sampler,
                    self._now_seconds,
                ),
                evaluate,
                epochs,
            )
        finally:
            self._is_looping = self._is_in_batch = False
        if test is not None:
            self._assignment.test(test)

    def no_sync(self, model: nn.Module) -> AbstractContextManager[None]:
        """Return ``model.no_sync()``, or an empty context at a step's last micro-batch of `batches`."""
        require(
            self._is_in_batch,
            "the loop calls no_sync() outside the body of batches(), which counts a step's micro-batches",
            hint="use model.no_sync() for all but a step's last micro-batch",
        )
        if self._is_whole:
            return nullcontext()
        context: AbstractContextManager[None] = getattr(model, "no_sync", nullcontext)()
        return context

    def test(self, evaluate: Evaluate) -> None:
        """End the training of a loop without `batches`, and evaluate the test set.

        ``evaluate`` runs at most once, and never in search trials. Raises `UsageError` if called in the body of
        `batches`, if the loop took no step or skipped an evaluation, or if ``evaluate`` omits the target's metric.
        """
        require(
            not self._is_looping,
            "do not call test() in the body of batches(), whose loop is not over",
            hint="call batches(loader, evaluate=..., test=...)",
        )
        self.close()
        self._assignment.test(evaluate)

    def sampler(self, dataset: Any) -> SeededSampler:
        """Return this rank's sampler for a `DataLoader` with ``batch_size=trial.micro_batch_size``.

        Equal seeds give equal batches. The sampler drops an incomplete last batch. Raises `UsageError` if batch
        sizes count tokens or exceed the dataset.
        """
        require(
            not self._assignment.counts_tokens,
            "trial.sampler(): the study's batch sizes count tokens",
            hint="use DataLoader(..., batch_sampler=trial.token_batches(lengths))",
        )
        samples, size = len(dataset), self._stages.at(0).batch_size
        self._sampler = (
            GrowingSampler(samples, self._stages, self.seed, lambda: self.steps)
            if self._stages.grows
            else SeededSampler(
                samples,
                size,
                self.seed,
                after_steps=self._samples_behind // size,
                share=self._now.micro_batch_size,
                rank=self.rank,
                ranks=self.world_size,
            )
        )
        return self._sampler

    def token_batches(self, lengths: Sequence[int]) -> TokenSampler:
        """Return a batch sampler for ``training.batch_unit: tokens``. ``lengths`` holds each sample's number of tokens.

        A micro-batch has samples of similar length and, including padding, at most ``micro_batch_size`` tokens. Divide
        each micro-batch's summed loss by `batch_tokens`. Raises `UsageError` if batch sizes count samples or grow.

        ::

            loader = DataLoader(data, batch_sampler=trial.token_batches(lengths), collate_fn=pad)
        """
        require(
            self._assignment.counts_tokens is not False,
            "trial.token_batches(): the study's batch sizes count samples",
            hint="set training: {batch_unit: tokens} in the spec",
        )
        micro_batches = self.accumulation_steps * self.world_size
        self._stages.refuse("trial.token_batches()", "its batches have one size")
        batches = TokenBatches(lengths, self.micro_batch_size, micro_batches, self.seed)
        after_steps = self._samples_behind // self._now.batch_size
        self._skipped_in_all = after_steps - self.steps  # before a pause, whose skipped steps count no step
        self._token_sampler = TokenSampler(batches, self.rank, self.world_size, after_steps)
        return self._token_sampler

    def batch_tokens(self) -> float:
        """Return the step's number of tokens, excluding padding, divided by the number of ranks.

        DistributedDataParallel averages the ranks' gradients, which undoes the division.
        """
        tokens = [] if self._token_sampler is None else self._token_sampler.tokens(self._batch_number)
        require(
            tokens,
            "the loop called trial.batch_tokens(), but has drawn no token batch for this step",
            hint="call batch_tokens() in the loop's body, with DataLoader(..., "
            "batch_sampler=trial.token_batches(lengths))",
        )
        return sum(map(sum, tokens)) / self.world_size

    def state(self, **objects: Any) -> None:
        """Register the objects to checkpoint, so that the trial can pause.

        The trial then counts the optimizers' steps. Raises `UsageError` at a second call, after `sampler`,
        `token_batches` or the loop's start, or if an object lacks ``state_dict()`` or ``load_state_dict()``.
        """
        require(
            not self._has_begun and self._sampler is None and self._token_sampler is None,
            "the script calls trial.state() too late: call state() before sampler(), token_batches() and the loop",
        )
        require(not self.has_state, "the script called state() twice: pass all objects in one call")
        self._asked.optimizers = [one for one in objects.values() if isinstance(one, torch.optim.Optimizer)]
        self.count_steps_of(objects)
        self.look_at(objects)
        self.steps, self._samples_behind = self._assignment.keep(objects)
        self._steps_before = self.steps - 1
        self.has_state = True
        self._followed.resume(self.steps)
        self._followed.watch(lambda: self._is_in_batch and not self._is_whole)

    def __dir__(self) -> list[str]:
        return list(PUBLIC)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> bool:
        if error is None:
            self.close()
        return isinstance(error, TrialStopped)

    def close(self, because: str = "") -> None:
        """End the training. Raises `UsageError` if the loop took no step or skipped a due evaluation."""
        if self._has_begun:
            self._check_evaluated()
        if self._skipped and not self.steps and not self._assignment.is_over:
            raise self._no_steps()
        if not self._assignment.is_over:
            self._assignment.looped(self.steps, because)

    def look_at(self, objects: Mapping[str, Any]) -> None:
        """Warn about normalisation layers that distort the comparison of batch sizes, and watch averages of weights."""
        modules = trained_modules(objects)
        self._assignment.modelled(modules, self._tokens_at_hand)
        found = about_ranks(modules) if self.world_size > 1 else []
        for sentence in found if self.is_look else [*found, *about_batch_norm(modules, self._now)]:
            self.warn(sentence)
        self._averages = Averages(objects)

    def count_steps_of(self, optimizers: Mapping[str, Any]) -> None:
        """Count these optimizers' steps instead of batches."""
        self._optimizer_steps.watch(optimizers)

    @property
    def _counts_tokens(self) -> bool:
        return self._assignment.counts_tokens or self._token_sampler is not None

    def _tokens_at_hand(self) -> list[list[int]]:
        return [] if self._token_sampler is None else self._token_sampler.own_tokens(self._batch_number)

    @property
    def _batch_number(self) -> int:
        return self.steps + self._skipped_in_all

    @property
    def _step_at_hand(self) -> int | None:
        # None if the current body of the loop has not stepped
        return self._step_at_hand_after(is_whole=self._is_whole) if self._is_in_batch else self.steps

    @property
    def _is_whole(self) -> bool:
        return self._micro_batches % self._now.accumulation_steps == 0

    def _step_at_hand_after(self, *, is_whole: bool) -> int | None:
        if self._optimizer_steps.names:
            taken = self._optimizer_steps.taken - self._taken_before
            return self.steps + taken if taken > 0 else None
        return self.steps + 1 if is_whole else None

    @property
    def _now(self) -> Configuration:
        return self._stages.at(self.steps)

    def _count(self, step: int) -> None:
        if self._counted == step:
            return
        if self._counted < 0:
            for sentence in self._asked.first_step(self.parameters, self._now.learning_rate):
                self._assignment.warned(sentence)
            if rates := rates_of(self._asked.optimizers, "lr"):
                self._assignment.first_rate(any(math.isclose(one, self._now.learning_rate) for one in rates))
        self._counted, self._readings, self._skipped = step, 0, 0
        self._asked.check_accumulates()
        self._followed.check_step(self._now)
        samples, self._samples = self._samples, 0
        self._assignment.stepped(step, samples)

    def _go_on(self, steps: int) -> None:
        self._steps_before, self.steps, self._micro_batches = self.steps, steps, 0
        self._taken_before = self._optimizer_steps.taken
        self._followed.go_on(steps)

    def _begin(self) -> None:
        if self._has_begun:
            return
        self._has_begun = True
        self._stages.check()
        self._asked.check_begins(has_sampler=self._sampler is not None)
        self._taken_before = self._optimizer_steps.taken
        self._first_step = self.steps
        self._optimizer_steps.begin()
        self._assignment.begin()

    def _looped(self, passes: Passes[T], evaluate: Evaluate | None, epochs: int) -> Iterator[T]:
        passes.first(self._now.micro_batch_size, self.steps)
        self._begin()
        self._evaluate_if_due(evaluate)
        count = 0
        while not self._assignment.is_over and (self._assignment.cycles or count < epochs):
            if count:
                passes.begin(self._now.micro_batch_size)
            count += 1
            for batch in passes.batches():
                if self._followed.awaits_batch:
                    self.check_size(batch)
                self.add_samples(self.samples_in(batch))
                self._micro_batches += 1
                self._is_in_batch = True
                if self._micro_batches == 1 and self._now.accumulation_steps > 1:
                    self._averages.step_begins()
                yield batch
                self._after_batch(evaluate)
                if self.is_over or self._followed.awaits_batch:
                    break
            if evaluate is not None and self._assignment.evaluates_passes and self._evaluated_at != self.steps:
                self._evaluated_at = self.steps
                self._take_in(self.steps, unmoved(evaluate), None)
            passes.check(self._now.micro_batch_size)

    def check_size(self, batch: Any) -> None:
        """Check the size of a stage's first micro-batch."""
        if self._counts_tokens:
            self._followed.awaits_batch = False
            if self._token_sampler is None and has_rows_of_ids(batch, self._now.micro_batch_size):
                self.warn(
                    f"the loader's first batch has {self._now.micro_batch_size} samples, but the study's batch sizes "
                    "count tokens; use trial.token_batches(lengths)"
                )
            return
        self._followed.check_size(batch, self._now.micro_batch_size, self.steps)
        self._rows.first(batch, self._now.micro_batch_size)

    def samples_in(self, batch: Any) -> int | None:
        """Count all ranks' samples, or the tokens of full micro-batches if batch sizes count tokens.

        Returns None with a warning if the number is unknown, but raises `UsageError` if the objective counts samples.
        """
        if self._counts_tokens:
            return self._now.micro_batch_size * self.world_size
        if (found := self._rows.count(batch, self._now.micro_batch_size)) is not None:
            return found * self.world_size
        self._untold(
            f"bssearch cannot count the samples of a micro-batch of type {type(batch).__name__}",
            "use a loader whose batches are tensors with one row per sample, or tuples, lists or dicts of such tensors",
        )
        return None

    def _after_batch(self, evaluate: Evaluate | None) -> None:
        step = self._step_at_hand
        is_whole, self._is_in_batch = self._is_whole, False
        if step is None:
            if not is_whole and (changed := self._averages.changed()) is not None:
                self.warn(changed)
            if is_whole and self._optimizer_steps.names:
                self._check_steps()
            return
        self._count(step)
        self._go_on(step)
        self._evaluate_if_due(evaluate)
        self._settle()

    def add_samples(self, samples: int | None) -> None:
        """Add ``samples`` to the current step. None means unknown."""
        self._samples = None if samples is None or self._samples is None else self._samples + samples

    def _untold(self, problem: str, remedy: str) -> None:
        require(
            not self._assignment.needs_samples,
            f"{problem}, and the study's objective is samples_to_target",
            hint=remedy,
        )
        if self._assignment.cycles and not self._has_warned:
            self._has_warned = True
            self.warn(f"{problem}: each step counts as batch_size samples; {remedy}")

    def _check_steps(self) -> None:
        self._skipped += 1
        self._skipped_in_all += 1
        self._readings = 0
        if self._skipped < MOST_SKIPPED:
            return
        error = self._no_steps()
        why = "a gradient scaler skips steps with non-finite gradients"
        if not self.steps or not self._assignment.diverged(f"{error.message}: {why}"):
            raise error

    def _no_steps(self) -> UsageError:
        names = self._optimizer_steps.names
        who = f"the optimizer{'s' if len(names) > 1 else ''} {' and '.join(map(repr, names))}"
        calls = ", ".join(f"{name}.step()" for name in names)
        return UsageError(
            f"{who} took no step in {plural(self._skipped, 'batch')}, after step {self.steps}",
            hint=f"call {calls} in the loop; if a CUDA graph replays the step, leave the optimizer out of trial.state",
        )

    def _is_due(self, step: int) -> bool:
        first = min(step, 1 + max(self._evaluated_at, self.steps if step > self.steps else self._steps_before))
        return any(self._assignment.is_due(one) for one in range(first, step + 1))

    def _settle(self) -> None:
        if self._evaluated_at == self.steps or not self._is_due(self.steps):
            self._assignment.settle()

    def _evaluate_if_due(self, evaluate: Evaluate | None) -> None:
        if evaluate is None:
            self._check_evaluated()
        elif self.evaluation_due:
            self._evaluated_at = self.steps
            self._take_in(self.steps, unmoved(evaluate), None)

    def _take_in(self, step: int, metrics: Metrics, loss: float | None) -> None:
        taken = self._optimizer_steps.other_than(step - self._first_step)
        if taken is not None and step > self._first_step and self._assignment.cycles:
            self._assignment.warned(
                f"the optimizer took {taken} steps, but bssearch counted {step - self._first_step} steps: call "
                "trial.state(optimizer=...) to count the optimizer's steps"
            )
        self._assignment.evaluated(step, metrics, loss)
        if not self._is_in_batch:  # within a loop's body the trial cannot pause
            self._assignment.settle()
        if not self._assignment.is_over:
            self._assignment.resume()

    def _check_evaluated(self) -> None:
        step = self.steps
        if self._assignment.is_over or self._evaluated_at == step:
            return
        require(
            self._announced_at != step,
            f"the loop did not call report() after step {step}, but trial.evaluation_due was true",
            hint="call trial.report(accuracy=...) if trial.evaluation_due is true",
        )
        require(
            step == 0 or not self._is_due(step),  # at step 0 no body of `batches` has run
            f"the loop made no evaluation after step {step}, although an evaluation was due",
            hint=HOW_TO_EVALUATE,
        )
