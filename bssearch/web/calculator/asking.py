"""What a part of the page asks of a command: the texts of its options, the command line, and refusals in words."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Generic, TypeVar

from bssearch.errors import BSSearchError
from bssearch.pages.chart import Chart
from bssearch.pages.plans import Shown
from bssearch.planning.requests import Request, RequestError, read, type_of
from bssearch.web.calculator.fields import FIELDS, field_name

# The parts of the calculator's results, each a plan with its figures and its command line, or a refusal.


@dataclass(frozen=True, slots=True, kw_only=True)
class DrawnFigure:
    """A figure with its name in the page, its title and what it shows in a sentence."""

    name: str
    title: str
    text: str
    figure: Chart


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """Why something is refused: of a field if it is known which. The message has the page's own labels."""

    field: str | None
    label: str
    message: str
    hint: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """A part of the results: how to read it and what was found; if nothing was, ``absent`` says why.

    ``command`` is the command line that prints the same numbers, empty if there is none. ``refusals`` say what is
    wrong with the entries.
    """

    name: str
    title: str
    text: str
    shown: Shown = field(default_factory=Shown)
    figures: Sequence[DrawnFigure] = ()
    command: str = ""
    absent: str = ""
    refusals: Sequence[Refusal] = ()


LONGEST_VALUE = 64
"""Characters of a value that is read, far above what any number or name here has."""

YES, NO = frozenset({"on", "yes", "true", "1"}), frozenset({"no", "off", "false", "0"})

Asked = TypeVar("Asked", bound=Request)


@dataclass(frozen=True, slots=True, kw_only=True)
class Asking(Generic[Asked]):
    """A command with the texts of its options.

    ``options`` are those that have a field; ``set_by_page`` are values that the page itself gives. ``needed`` are
    options without which there is nothing to plan.
    """

    part: Part
    command: str
    request: type[Asked]
    typed: Mapping[str, str]
    options: Sequence[str]
    needed: Sequence[str]
    set_by_page: Mapping[str, str] = field(default_factory=dict)

    @property
    def texts(self) -> dict[str, str]:
        """The texts of the options that are given."""
        given = {option: self.typed[field_name(self.request, option)].strip() for option in self.options}
        return {**{option: text for option, text in given.items() if text}, **self.set_by_page}

    @property
    def line(self) -> str:
        """The command line with the texts as typed; empty if one of them has no place on it."""
        words = [word for option, text in self.texts.items() for word in self._words(option, text)]
        return "" if self._unreadable() else shlex.join(["bssearch", "plan", self.command, *words])

    @property
    def missing(self) -> list[str]:
        """The options that are needed and not given."""
        return [option for option in self.needed if option not in self.texts]

    def answered(self, answer: Callable[[Asked], Mapping[str, Any]]) -> Part:
        """Return the part with an answer to the request; without it if a field is missing or wrong."""
        part = replace(self.part, command=self.line)
        fill_in = " and ".join(f"“{self.field_of(option).label}”" for option in self.missing)
        absent = f"fill in {fill_in}" if fill_in else "what is wrong stands above the results"
        without = replace(part, absent=f"Not calculated: {absent}.")
        try:
            if unreadable := self._unreadable():
                raise RequestError(unreadable)
            asked = read(self.request, self.texts, are_texts=True)
            if self.missing:
                return without
            found = replace(part, **answer(asked))
        except BSSearchError as error:
            return replace(without, refusals=list(self._refusals(error)))
        notes = [self.in_page_words(note) for note in found.shown.notes]
        return replace(found, shown=replace(found.shown, notes=notes))

    def field_of(self, option: str) -> Any:
        """Return the field of an option."""
        return FIELDS[field_name(self.request, option)]

    def in_page_words(self, message: str) -> str:
        """Return a message with the page's labels instead of a command's options."""
        return self._pattern.sub(lambda match: f"“{self.field_of(_option(match)).label}”", message)

    def _refusals(self, error: BSSearchError) -> Iterator[Refusal]:
        """Yield what is wrong with each field; what is only missing is told by the part."""
        problems: dict[str | None, str] = {} if self.missing else {None: error.message}
        if isinstance(error, RequestError):
            problems = {name: problem for name, problem in error.problems.items() if name not in self.missing}
        for option, message in problems.items():
            named = next((_option(match) for match in self._pattern.finditer(message)), None)
            about = None if (option or named) is None else self.field_of(option or named or "")
            yield Refusal(
                field=None if about is None else about.name,
                label=self.part.title if about is None else about.label,
                message=self.in_page_words(message),
                hint=None if error.hint is None else self.in_page_words(error.hint),
            )

    def _unreadable(self) -> dict[str, str]:
        """Return what is wrong with texts that no request is made of."""
        found: dict[str, str] = {}
        for option, text in self.texts.items():
            if len(text) > LONGEST_VALUE:
                found[option] = f"has {len(text):,} characters; at most {LONGEST_VALUE} are read"
            elif not text.isprintable():
                found[option] = "has characters that cannot be printed"
            elif type_of(self.request, option) is bool and text.lower() not in YES | NO:
                found[option] = f"{text!r} must be yes or no"
        return found

    def _words(self, option: str, text: str) -> list[str]:
        """Return the words of an option on the command line."""
        flag = f"--{option.replace('_', '-')}"
        if type_of(self.request, option) is bool:
            is_tri_state = self.request.model_fields[option].default is None
            negated = [flag.replace("--", "--no-")] if is_tri_state else []
            return negated if text.lower() in NO else [flag]
        return [f"{flag}={text}"] if text.startswith("-") else [flag, text]

    @property
    def _pattern(self) -> re.Pattern[str]:
        """Match ``--option``, ``option =`` and, of names that are no words of the language, the name alone."""
        names = "|".join(sorted(self.options, key=len, reverse=True))
        flags = names.replace("_", "-")
        words = "|".join(name for name in names.split("|") if "_" in name)
        return re.compile(rf"(?<![\w-])(?:--(?:{flags})(?![\w-])|(?:{names})(?= = )|(?:{words})(?!\w))")


def _option(match: re.Match[str]) -> str:
    return match[0].removeprefix("--").replace("-", "_")
