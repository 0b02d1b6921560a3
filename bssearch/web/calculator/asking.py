"""What a part of the page asks of a command: its options from the fields, the command line, and refusals in words."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from bssearch.errors import BSSearchError
from bssearch.web.calculator.fields import FIELDS
from bssearch.web.calculator.parts import Heading, Options, Part, Refusal
from bssearch.web.calculator.typed import LONGEST_VALUE, Typed


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """A command with the values of its options.

    ``options`` maps each to its field; ``set_by_page`` are values that other parts of the page have found; ``fixed``
    are words that the command line has besides. ``needed`` are fields without which there is nothing to plan.
    """

    heading: Heading
    command: str
    typed: Typed
    options: Options
    needed: Sequence[str]
    set_by_page: Mapping[str, int] = field(default_factory=dict)
    fixed: Sequence[str] = ()

    @property
    def values(self) -> dict[str, Any]:
        """Return the values of the options that are given."""
        given = {option: self.typed.values.get(name) for option, name in self.options.items()}
        return {**{option: value for option, value in given.items() if value is not None}, **self.set_by_page}

    @property
    def line(self) -> str:
        """Return the command line with the values as typed; empty where one of them has no place on it."""
        words = ["bssearch", "plan", self.command]
        for option, name in self.options.items():
            text = self.typed.texts[name].strip()
            is_flag = FIELDS[name].kind in ("flag", "yes_no")
            if len(text) > LONGEST_VALUE or not text.isprintable() or (is_flag and name in self.typed.errors):
                return ""
            words += _flag_words(option, self.typed.values.get(name)) if is_flag else _words(option, text)
        for option, value in self.set_by_page.items():
            words += _words(option, str(value))
        return shlex.join([*words, *self.fixed])

    def unready(self) -> Part | None:
        """Return the part without results where a field is wrong or missing, None where it can be planned."""
        if wrong := [name for name in self.options.values() if name in self.typed.errors]:
            return self.heading.part(absent=f"Not calculated: mend {_labels(wrong)}.", command=self.line)
        if missing := [name for name in self.needed if name not in self.typed.values]:
            return self.heading.part(absent=f"Not calculated: fill in {_labels(missing)}.", command=self.line)
        return None

    def refused(self, error: BSSearchError) -> Part:
        """Return the part of a request that was refused."""
        named = list(self._named(error.message))
        empty = [name for name in named if not (self.typed.texts[name].strip() or FIELDS[name].empty)]
        name = next(iter(empty or named), None)
        hint = None if error.hint is None else self.in_page_words(error.hint)
        refusal = Refusal(
            field=name,
            label=self.heading.title if name is None else FIELDS[name].label,
            message=self.in_page_words(error.message),
            hint=hint,
        )
        return self.heading.part(
            refusal=refusal, absent="Not calculated: what is wrong stands above the results.", command=self.line
        )

    def in_page_words(self, message: str) -> str:
        """Return a message with the page's labels in place of a command's options."""
        message = message.replace(", or --model NAME", "").replace(", or --model", "")
        return self._pattern.sub(lambda match: f"“{FIELDS[self.options[_option(match)]].label}”", message)

    def _named(self, message: str) -> Sequence[str]:
        found = (self.options[_option(match)] for match in self._pattern.finditer(message))
        return list(dict.fromkeys(found))

    @property
    def _pattern(self) -> re.Pattern[str]:
        """Match ``--option``, ``option =`` and, of names that are no words of the language, the name alone."""
        names = sorted(self.options, key=len, reverse=True)
        flags = "|".join(_flag(name) for name in names)
        assigned = "|".join(names)
        words = "|".join(name for name in names if "_" in name)
        alone = rf"|(?<![\w-])(?:{words})(?!\w)" if words else ""
        return re.compile(rf"(?<![\w-])(?:{flags})(?![\w-])|(?<![\w-])(?:{assigned})(?= = ){alone}")


def _words(option: str, text: str) -> list[str]:
    if not text:
        return []
    return [f"{_flag(option)}={text}"] if text.startswith("-") else [_flag(option), text]


def _flag_words(option: str, value: bool | None) -> list[str]:
    if value is None:
        return []
    return [_flag(option) if value else f"--no-{option.replace('_', '-')}"]


def _flag(option: str) -> str:
    return f"--{option.replace('_', '-')}"


def _option(match: re.Match[str]) -> str:
    return match[0].removeprefix("--").replace("-", "_")


def _labels(names: Sequence[str]) -> str:
    labels = [f"“{FIELDS[name].label}”" for name in dict.fromkeys(names)]
    return " and ".join(filter(None, (", ".join(labels[:-1]), labels[-1])))
