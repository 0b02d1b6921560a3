"""Words and values as a page has them."""

from __future__ import annotations

import re

NOTHING = "–"
"""What stands for a value that is not known."""


def sentence(words: str) -> str:
    """Return words that begin with a capital."""
    return words[:1].upper() + words[1:]


def plural(count: int, noun: str) -> str:
    """Return a count of something."""
    return f"{count} {noun}{'' if count == 1 else 's'}"


def in_words(value: object) -> str:
    """Return a value of any kind for people."""
    if value is None:
        return NOTHING
    if isinstance(value, float):
        return f"{value:.4g}"
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) and value >= 10_000 else str(value)


def without_passwords(text: str) -> str:
    """Return a text with the password of each URL in it as ``***``: people put URLs where no URL belongs."""
    return re.sub(r"([A-Za-z][\w+.-]*:/{1,2}[^\s:/@]*):\S*@", r"\1:***@", text)


def visible(text: str) -> str:
    """Return a text without what a terminal would obey, or nobody can write, as U+FFFD; lines and tabs stay."""
    return "".join(
        "\ufffd"
        if (ord(one) < 32 and one not in "\n\t") or 127 <= ord(one) < 160 or "\ud800" <= one <= "\udfff"
        else one
        for one in text
    )
