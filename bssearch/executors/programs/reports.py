r"""Parse a program's progress from JSON lines, or from the log by regular expressions.

A JSON line is an object such as ``{"step": 100, "accuracy": 0.91, "seconds": 3.2, "loss": 0.4}``. If ``seconds``
(training seconds) is missing, the wall clock counts. If ``samples`` (trained so far) is missing, steps count as full
batches. Each expression has one group::

    step: 'step (\d+)'
    accuracy: 'acc=([0-9.]+)'

The matches form a report when the line with the step arrives.
"""

import json
import math
import re
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from bssearch.errors import UsageError, require, required

STEP, SECONDS, SAMPLES, LOSS = "step", "seconds", "samples", "loss"

# Norms of the mean gradient of a micro-batch (root mean square over the micro-batches) and of a step, in one report.
NORMS = ("micro_gradient_norm", "gradient_norm")

LONGEST_LINE = 2**16  # the most bytes of a JSON line

LONGEST_LOG_LINE = 2**12  # bytes of a line for expressions, many of which take quadratic time

LONGEST_NAME = 100  # the most characters of a printable name

LARGEST_STEP = 2**40  # a step per microsecond for twelve days, whose samples fit 64 bits

LARGEST_SECONDS = 1e9  # thirty years

_OF_GROUPS = "; let the group match only a number"

_ENDS_OF_LINES = re.compile(rb"([\r\n])")

# start of an object whose step is not only in a nested object
_JSON_WITH_STEP = re.compile(rf'\{{[^{{\[]*"{STEP}"\s*:')

_WITH_THOUSANDS = re.compile(r"[-+]?[1-9]\d{0,2}(,\d{3})+(\.\d*)?")
_AMBIGUOUS = re.compile(r"[-+]?[1-9]\d{0,2},\d{3}")  # may have a decimal comma, unless an integer

# text after a truncated number, such as the 1 of 1,000, the 9 of 9e-05 or the 1 of 1.2k
_REST_OF_NUMBER = re.compile(r"\d|[,_'’\u00a0\u202f]\d{3}(?!\d)|[eE][-+]?\d|[kKM]\b|\.\d")

_REST_OF_STEP = re.compile(r"[ .]\d{3}(?!\d)")  # 1 of 1 000

# a number in any form, because an expression may take only some forms
_ANY_NUMBER = r"[-+]?(?:\.?\d[\w.,'’\u00a0\u202f]*(?<![.,])(?:(?<=[eE])[-+]\d+)?|(?i:nan|inf(?:inity)?)\b)"

_STEP_WITH_DOTS = re.compile(r"[1-9]\d{0,2}(\.\d{3})+")  # 10.000 may be 10 or 10,000


REPORTS_TIMED = 4  # least reports to time a step

SECONDS_TIMED = 1.0  # least seconds to time a step, because the program has another clock

SECONDS_ENOUGH = 10.0  # seconds after which fewer reports suffice


@dataclass(frozen=True, slots=True)
class Report:
    """A report after ``step`` optimizer steps. ``values`` holds metrics, loss and samples by name."""

    step: int
    values: Mapping[str, float]
    seconds: float | None = None


@dataclass(frozen=True, slots=True)
class ReportPace:
    """The ``seconds`` that ``steps`` took. ``is_own`` says whether the program's clock measured the time."""

    seconds: float
    steps: int
    is_own: bool


def pace_of(reports: Iterator[Report]) -> tuple[ReportPace | None, int]:
    """Return the pace and the number of reports.

    The pace is None if no report has more steps and seconds than the first.
    """
    began, count, pace = 0.0, 0, None
    first: Report | None = None
    for report in reports:
        now = time.monotonic()
        count += 1
        if first is None:
            first, began = report, now
            continue
        pace = _pace_between(first, report, now - began) or pace
        least_seconds = SECONDS_TIMED if count > REPORTS_TIMED else SECONDS_ENOUGH
        if pace is not None and now - began >= least_seconds:
            break
    return pace, count


def _pace_between(first: Report, last: Report, wall_seconds: float) -> ReportPace | None:
    is_own = first.seconds is not None and last.seconds is not None
    seconds = (last.seconds or 0.0) - (first.seconds or 0.0) if is_own else wall_seconds
    steps = last.step - first.step
    return ReportPace(seconds, steps, is_own) if steps > 0 and seconds > 0 else None


class ReportReader:
    """Parses reports from a byte stream.

    ``expressions`` map names, including ``step``, to regular expressions with one group. If ``expressions`` is empty,
    the lines are JSON. ``step`` must be a number. ``metric``, ``seconds``, ``samples`` and ``loss`` may also be null.
    """

    def __init__(self, expressions: Mapping[str, str], metric: str | None = None) -> None:
        self._expressions = {name: re.compile(text) for name, text in expressions.items()}
        self._of_any_number = {name: _of_any_number(text) for name, text in expressions.items()}
        self._longest = LONGEST_LOG_LINE if expressions else LONGEST_LINE
        self._deciding = {STEP, SECONDS, SAMPLES, metric}
        self._numbers = self._deciding | {LOSS}
        self.lines = 0
        self.unmatched = dict(expressions)  # expressions without a match
        self._found: dict[str, float] = {}
        self._rest = bytearray()
        self._follows_return = False

    def feed(self, chunk: bytes) -> Iterator[Report]:
        """Yield the reports that a chunk completes. A carriage return also ends a line."""
        *whole, rest = _ENDS_OF_LINES.split(chunk)
        for part, end in zip(whole[::2], whole[1::2], strict=True):
            line, follows_return = bytes(self._rest + part), self._follows_return
            self._rest, self._follows_return = bytearray(), end == b"\r"
            self.lines += bool(line)
            if len(line) > self._longest:
                self._refuse_long_report(line[: self._longest].decode(errors="replace"))
            elif line:
                text = line.decode(errors="replace")
                found = self._search(text) if self._expressions else self._read_json(text.strip(), follows_return)
                if found is not None:
                    yield _report(found)
        # One extra byte detects an overlong line.
        self._rest += rest[: self._longest + 1 - len(self._rest)]

    def _search(self, line: str) -> dict[str, float] | None:
        for name, expression in self._expressions.items():
            match = expression.search(line)
            if match is None:
                match = self._of_any_number[name].search(line)
                if match is not None and not re.search(r"[^\W\d]", line[match.start() : match.start(1)]):
                    match = None  # a match without a name may be another number
            if match is not None:
                self._found[name] = _number_in(match, name)
                self.unmatched.pop(name, None)
                # the expression may also match another metric, such as val_accuracy
                for other in expression.finditer(line, match.end()) if name in self._deciding else ():
                    require(
                        other[1] == match[1],
                        f"report.{name} matches {_shown(match[0])} and {_shown(other[0])} in one line; let the "
                        "expression match only one metric",
                    )
        if STEP not in self._found:
            return None
        found, self._found = self._found, {}
        return found

    def _read_json(self, line: str, follows_return: bool) -> dict[str, float] | None:
        if follows_return:  # progress bars leave text before the object
            line = line[max(0, line.find("{")) :]
        if not line.startswith("{"):
            return None
        try:
            data = json.loads(line)
        except (ValueError, RecursionError) as error:
            reason = (
                f"{error.msg} at character {error.colno}" if isinstance(error, json.JSONDecodeError) else str(error)
            )
            require(
                not _JSON_WITH_STEP.match(line),
                f"a line with a step is not JSON: {_shown(line)}: {reason.partition(';')[0]}; print valid JSON",
            )
            return None
        return self._numbers_of(data) if STEP in data else None

    def _numbers_of(self, data: Mapping[str, object]) -> dict[str, float]:
        found = {}
        for name, one in data.items():
            if one is None and name != STEP:
                continue
            value = _number(one, is_whole=name == STEP)
            if value is None and name in self._numbers:
                shown = _shown(json.dumps(one), quoted=False)
                raise UsageError(
                    f"a JSON line of the command has {name} = {shown}, not a number{_remedy(one) or '; print a number'}"
                )
            if value is not None and (name in self._numbers or (len(name) <= LONGEST_NAME and name.isprintable())):
                found[name] = value
        return found

    def _refuse_long_report(self, beginning: str) -> None:
        names = [f"a match of report.{name}" for name, one in self._expressions.items() if one.search(beginning)]
        if not self._expressions and _JSON_WITH_STEP.match(beginning):
            names = [f"a JSON object with a {STEP}"]
        require(
            not names,
            f"a line of more than {self._longest} bytes has {', '.join(names)}: {_shown(beginning)}; "
            "let the command print shorter lines",
        )


def _of_any_number(text: str) -> re.Pattern[str]:
    is_in_set, opened = False, list[int]()
    for place in (one.start() for one in re.finditer(r"\\.|.", text, re.DOTALL)):
        match text[place]:
            case "[" if not is_in_set:
                is_in_set = True
            case "]":
                is_in_set = False
            case "(" if not is_in_set:
                opened.append(place)
            case ")" if not is_in_set:
                begin = opened.pop()
                if (group := re.compile(r"\((?!\?)|\(\?P<\w+>").match(text, begin)) is not None:
                    return re.compile(text[: group.end()] + _ANY_NUMBER + text[place:])
    return re.compile(text)


def _number_in(match: re.Match[str], name: str) -> float:
    text: str = required(
        match[1],
        f"report.{name}: the group is empty in the match {_shown(match[0])}; let the group match a number",
    )
    value = required(
        _number(text, is_whole=name == STEP),
        f"report.{name} found {_shown(text)}, not a number{_remedy(text) or _OF_GROUPS}",
    )
    joined = text.replace(".", "")
    require(
        name != STEP or not _STEP_WITH_DOTS.fullmatch(text),
        f"report.{name} found {_shown(text)}, which may be {value:g} or {joined}: print the step without a dot",
    )
    rest = _REST_OF_NUMBER.match(match.string, match.end(1))
    if rest is None and name == STEP and len(text) <= len("100"):
        rest = _REST_OF_STEP.match(match.string, match.end(1))
    if rest is not None and match.end() == match.end(1):
        whole = match.string[match.start(1) :][: rest.end() - match.start(1) + LONGEST_NAME]
        raise UsageError(
            f"report.{name} found {_shown(text)}, perhaps the beginning of a number in {_shown(whole)}; let the group "
            "match the whole number, or the expression match the text after the number"
        )
    return value


def _number(value: object, *, is_whole: bool) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    if isinstance(value, str):
        value = value.strip()
        if _WITH_THOUSANDS.fullmatch(value) and (is_whole or not _AMBIGUOUS.fullmatch(value)):
            value = value.replace(",", "")
    try:
        return float(value)
    except ValueError:
        return None
    except OverflowError:
        return math.inf


def _remedy(value: object) -> str:
    has_comma = isinstance(value, str) and "," in value
    rule = ": a comma may only separate thousands, as in 1,000,000 or 1,000.5 (in a step, also 1,000)"
    return rule if has_comma else ""


def _shown(text: str, *, quoted: bool = True) -> str:
    cut = text if len(text) <= LONGEST_NAME else f"{text[:LONGEST_NAME]}…"
    return repr(cut) if quoted else cut


def _report(found: Mapping[str, float]) -> Report:
    step, seconds = found[STEP], found.get(SECONDS)
    require(
        0 <= step <= LARGEST_STEP and step == math.floor(step),
        f"the command reports step {step:g}: a step must be a whole number from 0 to {LARGEST_STEP:g}",
    )
    require(
        seconds is None or 0 <= seconds <= LARGEST_SECONDS,
        f"the command reports {seconds or 0:g} seconds: seconds must be from 0 to {LARGEST_SECONDS:g}",
    )
    return Report(int(step), {name: value for name, value in found.items() if name not in {STEP, SECONDS}}, seconds)
