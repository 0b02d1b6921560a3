"""One picture of a study as an SVG file: the objective's figure by batch size, light or dark as its reader's screen.

It needs no script, no font and no network, so that it can stand in a README or a slide.
"""

from __future__ import annotations

import html
import math
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import date

from bssearch.analysis.answer import Answer, Batch, objective_in
from bssearch.analysis.numbers import number
from bssearch.errors import UsageError
from bssearch.pages.axes import MOST_TICKS, PADDING, round_numbers

WIDTH, HEIGHT = 880, 470
LEFT, RIGHT, TOP, BOTTOM = 84, 24, 100, 66
"""The frame's distances from the picture's edges, in the units of its view box: a choice, as all sizes here."""
ROOM_BELOW, ROOM_ABOVE = 0.2, 0.12
"""Room under the lowest figure and above the highest for their names, as shares of the span between them."""

STYLE = """
svg { --page: #ffffff; --ink: #1b1f24; --muted: #5b6470; --grid: #dde1e6; --accent: #0067a5; --second: #c44601;
  --third: #00785a; --band: rgba(0, 120, 90, 0.13); font: 14px system-ui, -apple-system, "Segoe UI", Roboto,
  "Helvetica Neue", Arial, sans-serif; }
@media (prefers-color-scheme: dark) { svg { --page: #14171b; --ink: #e7eaee; --muted: #9aa4b1; --grid: #343b44;
  --accent: #5ab4ea; --second: #ff9a52; --third: #3fc79f; --band: rgba(63, 199, 159, 0.16); } }
text { fill: var(--ink); }
.title { font-size: 19px; font-weight: 600; }
.muted { fill: var(--muted); }
.name { font-weight: 600; paint-order: stroke; stroke: var(--page); stroke-width: 4px; stroke-linejoin: round; }
.best { fill: var(--second); stroke: var(--second); }
text.best { stroke: var(--page); }
.point { fill: var(--accent); stroke: var(--accent); }
.single { fill: var(--page); stroke: var(--accent); }
.default { fill: var(--page); stroke: var(--ink); }
.missed { fill: none; stroke: var(--muted); }
.flat { fill: var(--third); }
.mark { stroke-width: 2; }
.grid { stroke: var(--grid); }
""".strip()


@dataclass(frozen=True, slots=True)
class _Frame:
    """Where values lie in the picture: batch sizes on a logarithmic axis, figures on one that may be linear."""

    sizes: list[int]
    low: float
    high: float
    is_log: bool

    def x(self, size: float) -> float:
        first, last = math.log(self.sizes[0]), math.log(self.sizes[-1])
        share = 0.5 if first == last else (math.log(size) - first) / (last - first)
        return LEFT + (WIDTH - LEFT - RIGHT) * (PADDING + (1 - 2 * PADDING) * share)

    def y(self, value: float) -> float:
        low, high, here = (math.log(one) if self.is_log else one for one in (self.low, self.high, value))
        return HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * (here - low) / (high - low)

    @property
    def ticks(self) -> list[float]:
        """Return the figures that a line is drawn at."""
        if self.is_log:
            return round_numbers(self.low, self.high)
        return [self.low + (self.high - self.low) * part / 4 for part in range(5)]


def svg(answer: Answer, *, default_batch_size: int | None, measured_on: date) -> str:
    """Return the objective's figure by batch size as an SVG document.

    It shows medians with their 95 % intervals, the optimum, the range within 5 %, the default as it was run, the
    largest batch size that fits, and lower bounds where the target was missed. ``default_batch_size``: None where
    nobody said what the default is. Raises `UsageError` where no batch size has a figure.
    """
    rows = [row for row in answer.batches if row.objective_value is not None]
    if not rows:
        raise UsageError(f"study {answer.study} has no figure to draw: no trial reached the target")
    frame = _frame(answer, rows, default_batch_size)
    parts = [
        *_head(answer),
        *_band(answer, frame),
        *_axes(answer, frame),
        _text(WIDTH - RIGHT, HEIGHT - 18, _where(answer, measured_on), "muted", "end"),
        *(part for row in answer.batches for part in _mark(row, row.batch_size == answer.optimal.batch_size, frame)),
        *_default(answer, default_batch_size, frame),
        *_largest(answer, frame),
        *_optimum(answer, frame),
    ]
    return "\n".join([*parts, "</svg>", ""])


def _frame(answer: Answer, rows: list[Batch], default_batch_size: int | None) -> _Frame:
    """Return axes wide enough for every figure, interval, lower bound and the default."""
    figures = [row.objective_value for row in rows if row.objective_value is not None]
    values = [end for one in figures for end in (one.median, one.low, one.high) if end is not None]
    values += [row.objective_lower_bound for row in answer.batches if row.objective_lower_bound]
    default = _default_figure(answer)
    sizes = {row.batch_size for row in answer.batches}
    if default is not None and default_batch_size is not None:
        values.append(default)
        sizes.add(default_batch_size)
    is_log = objective_in(answer).stops_at_target
    low, high = min(values), max(values)
    if is_log:
        span = max(math.log(high / low), math.log(2))
        return _Frame(sorted(sizes), low * math.exp(-ROOM_BELOW * span), high * math.exp(ROOM_ABOVE * span), is_log)
    span = (high - low) or abs(high) or 1.0
    return _Frame(sorted(sizes), low - ROOM_BELOW * span, high + ROOM_ABOVE * span, is_log)


def _where(answer: Answer, measured_on: date) -> str:
    return f"study {answer.study}, {answer.device.name}, {measured_on.isoformat()}"


def _head(answer: Answer) -> Iterator[str]:
    """Yield the start of the document, with its description in words and its title."""
    target, unit = answer.target, objective_in(answer).unit
    best = answer.optimal.objective_value
    title = f"{objective_in(answer).axis_title.capitalize()} by batch size"
    if objective_in(answer).stops_at_target:
        title += f": {target.metric} {target.goal.sign} {target.value:g}"
    figure = "" if best is None else f" at {number(best.median)}{unit}"
    told = f"{title}. Optimal: batch {answer.optimal.batch_size}{figure}."
    yield (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}" '
        f'role="img" aria-label="{html.escape(told)}">'
    )
    yield f"<style>\n{STYLE}\n</style>"
    yield f'<rect width="{WIDTH}" height="{HEIGHT}" rx="8" fill="var(--page)"/>'
    yield _text(24, 34, title, "title")
    told = "median and 95 % interval over fresh seeds, with the learning rate and the rest tuned at each batch size"
    yield _text(24, 58, told, "muted")


def _axes(answer: Answer, frame: _Frame) -> Iterator[str]:
    """Yield lines at round figures, the batch sizes, and the names of the axes."""
    unit = objective_in(answer).unit
    for tick in frame.ticks:
        y = frame.y(tick)
        yield f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>'
        yield _text(LEFT - 10, y + 5, f"{number(tick)}{unit}", "muted", "end")
    every = math.ceil(len(frame.sizes) / MOST_TICKS)
    for size in frame.sizes[::every]:
        yield _text(frame.x(size), HEIGHT - BOTTOM + 22, str(size), "", "middle")
    yield _text(LEFT, HEIGHT - 18, "batch size", "muted")


def _band(answer: Answer, frame: _Frame) -> Iterator[str]:
    """Yield the range of batch sizes within 5 %, half a notch wider than its ends."""
    low, high = answer.flat_range
    near = 0.2 * math.log(2)
    left, right = frame.x(low * math.exp(-near)), frame.x(high * math.exp(near))
    span = str(low) if low == high else f"{low} to {high}"
    yield (
        f'<rect x="{left:.1f}" width="{right - left:.1f}" y="{TOP}" height="{HEIGHT - TOP - BOTTOM}" '
        'fill="var(--band)"/>'
    )
    yield _text((left + right) / 2, TOP - 8, f"within 5 %: {span}", "flat", "middle")


def _mark(row: Batch, is_best: bool, frame: _Frame) -> Iterator[str]:
    """Yield a batch size's figure with its interval; a single run is hollow, a lower bound an arrow upward."""
    x, figure = frame.x(row.batch_size), row.objective_value
    if figure is None:
        if row.objective_lower_bound:
            y = frame.y(row.objective_lower_bound)
            yield f'<path class="missed mark" d="M{x:.1f} {y:.1f}v-26m-6 8l6 -8l6 8m-12 18h12"/>'
            yield _text(x, y - 34, f"> {number(row.objective_lower_bound)}", "muted", "middle")
        return
    kind = "best" if is_best else "point" if figure.low is not None else "single"
    if figure.low is not None and figure.high is not None:
        low, high = frame.y(figure.low), frame.y(figure.high)
        yield f'<path class="{kind} mark" d="M{x - 6:.1f} {high:.1f}h12m-6 0V{low:.1f}m-6 0h12"/>'
    radius = 8 if is_best else 5.5
    yield f'<circle class="{kind} mark" cx="{x:.1f}" cy="{frame.y(figure.median):.1f}" r="{radius}"/>'
    if figure.runs == 1:
        yield _text(x, frame.y(figure.median) - 12, "1 run", "muted", "middle")


def _default_figure(answer: Answer) -> float | None:
    """Return the figure of the default as it was run; None where it is not known."""
    ratio, best = answer.speedup.over_default, answer.optimal.objective_value
    return None if ratio is None or best is None else best.median * ratio.value


def _default(answer: Answer, batch_size: int | None, frame: _Frame) -> Iterator[str]:
    """Yield the default as it was run, not the best that was tuned at its batch size."""
    figure, ratio = _default_figure(answer), answer.speedup.over_default
    if figure is None or ratio is None or batch_size is None:
        return
    x, y = frame.x(batch_size), frame.y(figure)
    yield f'<path class="default mark" d="M{x:.1f} {y - 8:.1f}l8 8l-8 8l-8 -8z"/>'
    more = "more than " if ratio.at_least else ""
    name = f"your default: {batch_size}, {more}{number(ratio.value, 2)}× the optimum"
    is_left = x > WIDTH / 2
    yield _text(x - 16 if is_left else x + 16, y + 5, name, "name", "end" if is_left else "start")


def _largest(answer: Answer, frame: _Frame) -> Iterator[str]:
    """Yield the name of the largest batch size that fits, or was tried, above its figure."""
    largest, ratio = answer.largest_that_fits, answer.speedup.over_largest
    size = largest.batch_size
    row = next((row for row in answer.batches if row.batch_size == size), None)
    if row is None or ratio is None or size == answer.optimal.batch_size:
        return
    figure = row.objective_value
    top = row.objective_lower_bound if figure is None else figure.high or figure.median
    if not top:
        return
    more = "more than " if ratio.at_least else ""
    y = frame.y(top) - (52 if figure is None else 12)
    name = f"the {largest.in_words}: {size}, {more}{number(ratio.value, 2)}× the optimum"
    is_left = frame.x(size) > WIDTH / 2
    x = frame.x(size) + (10 if is_left else -10)
    yield _text(x, y, name, "name", "end" if is_left else "start")


def _optimum(answer: Answer, frame: _Frame) -> Iterator[str]:
    """Yield the name of the optimum, under its interval."""
    best = answer.optimal.objective_value
    if best is None:
        return
    x, y = frame.x(answer.optimal.batch_size), frame.y(best.low or best.median)
    unit = objective_in(answer).unit
    end = "start" if x < WIDTH / 4 else "end" if x > 3 * WIDTH / 4 else "middle"
    yield _text(x, y + 26, f"optimal: {answer.optimal.batch_size}, {number(best.median)}{unit}", "best name", end)


def _text(x: float, y: float, text: str, kind: str, anchor: str = "start") -> str:
    return f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{html.escape(text)}</text>'
