"""Format words and values as text."""

import difflib
import re
from collections.abc import Collection, Sequence

NOTHING = "–"

LONGEST_TEXT = 50_000  # characters of a stored text; a traceback of a deep recursion keeps its start and its end

_HIDDEN = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff]")


def sentence(words: str) -> str:
    return words[:1].upper() + words[1:]


def plural(count: int, noun: str) -> str:
    return f"{count} {noun if count == 1 else plural_of(noun)}"


def plural_of(noun: str) -> str:
    return f"{noun}{'es' if noun.endswith(('ch', 's')) else 's'}"


def in_words(value: object) -> str:
    if value is None:
        return NOTHING
    if isinstance(value, float):
        return f"{value:.4g}"
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) and value >= 10_000 else str(value)


def nearest(name: str, known: Collection[str], otherwise: str, *, cutoff: float = 0.6, what: str = "") -> str:
    """Return a question about the most similar name, or ``otherwise`` if no name is similar."""
    near = difflib.get_close_matches(name, known, n=1, cutoff=cutoff)
    return f"did you mean {what}{near[0]!r}?" if near else otherwise


def without_passwords(text: str) -> str:
    return re.sub(r"([A-Za-z][\w+.-]*:/{1,2}[^\s:/@]*):\S*@", r"\1:***@", text)


def device_in_words(name: str | None) -> str | None:
    return "device unknown" if name == "unknown" else name


def with_precision(device: str | None, precision: str | None) -> str:
    """Return the device, and the precision if known and not set by the user's program."""
    return ", ".join(filter(None, (device_in_words(device), None if precision in {"own", "unknown"} else precision)))


def visible(text: str) -> str:
    """Replace control characters except tab and newline, and lone surrogates, by U+FFFD."""
    return _HIDDEN.sub("\ufffd", text)


def shortened(text: str, most: int = LONGEST_TEXT) -> str:
    """Cut the middle out of a text of over ``most`` characters."""
    if len(text) <= most:
        return text
    cut = f"… ({len(text):,} characters) …"
    kept = max(most - len(cut), 0)
    return f"{text[: kept - kept // 4]}{cut}{text[len(text) - kept // 4 :]}"


def storable(text: str) -> str:
    """Replace NUL and lone surrogates, and shorten the text to `LONGEST_TEXT`."""
    return shortened(text.replace("\0", "\N{REPLACEMENT CHARACTER}").encode("utf-8", "replace").decode("utf-8"))


def percent(share: float, digits: int = 0) -> str:
    return f"{100 * share:.{digits}f} %"


def number(value: float, digits: int = 3) -> str:
    short = f"{value:.{digits}g}"
    return f"{float(short):,.0f}" if abs(float(short)) >= 1000 and abs(value) < 1e9 else short


def ends(low: float | None, high: float | None, digits: int = 3) -> str:
    """Return an interval in brackets, or "" if a bound is unknown."""
    return "" if low is None or high is None else f" [{number(low, digits)}, {number(high, digits)}]"


def noise_scale(scale: float | None, low: float, high: float | None) -> str:
    """Return the gradient noise scale with its 95 % interval, or the lower bound if the scale is unknown."""
    if scale is None:
        return f"≥ {samples(low)}"
    return f"{samples(scale)} [{samples(low)}, {'∞' if high is None else samples(high)}]"


def samples(value: float) -> str:
    return f"{float(f'{value:.3g}'):,.0f}" if value >= 100 else f"{value:.3g}"


def memory(value: int) -> str:
    return f"{number(value / 2**30)} GiB" if value >= 2**30 else f"{number(value / 2**20)} MiB"


def span(sizes: Sequence[int]) -> str:
    low, high = sizes
    return str(low) if low == high else f"{low}–{high}"


def gib(size: float) -> str:
    return f"{size / 2**30:.3g} GiB"
