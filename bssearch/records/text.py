"""Text of words and values."""

from __future__ import annotations

import re

NOTHING = "–"


def sentence(words: str) -> str:
    """Capitalize the first letter."""
    return words[:1].upper() + words[1:]


def plural(count: int, noun: str) -> str:
    """Count and noun: "2 trials"."""
    return f"{count} {noun}{'' if count == 1 else 's'}"


def in_words(value: object) -> str:
    """Format any value for display."""
    if value is None:
        return NOTHING
    if isinstance(value, float):
        return f"{value:.4g}"
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) and value >= 10_000 else str(value)


def without_passwords(text: str) -> str:
    """Mask passwords in URLs as ``***``; users paste URLs in unexpected places."""
    return re.sub(r"([A-Za-z][\w+.-]*:/{1,2}[^\s:/@]*):\S*@", r"\1:***@", text)


def visible(text: str) -> str:
    """Replace control characters and lone surrogates by U+FFFD."""
    return "".join(
        "\ufffd"
        if (ord(one) < 32 and one not in "\n\t") or 127 <= ord(one) < 160 or "\ud800" <= one <= "\udfff"
        else one
        for one in text
    )
