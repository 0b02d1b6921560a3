"""Charts as SVG without scripts, in a wide and a narrow version for pages or as a picture."""

from __future__ import annotations

import html
import itertools
import math
import re
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Literal, NamedTuple

from bssearch.records.text import number

INK, MUTED, PAGE = "var(--ink)", "var(--muted)", "var(--page)"
ACCENT, SECOND, THIRD = "var(--accent)", "var(--second)", "var(--third)"

STOPS = 4  # colours in ``colours.css``, from ``--sequence-0`` (best) to ``--sequence-3`` (worst)

PADDING = 0.06  # empty space at each end of an axis, as a share of the length

MOST_TICKS = 7  # steps between the ticks of a linear axis
LONGEST_NAME = 40

Tick = tuple[float, str]
Symbol = Literal["circle", "square", "diamond", "cross", "triangle", "star", "arrow", "x"]
Dash = Literal["solid", "dash", "dot"]
Shape = Literal["straight", "hv", "vh"]


@dataclass(frozen=True, slots=True)
class Axis:
    """An axis from ``low`` to ``high``. The chart leaves out ticks that do not fit."""

    title: str
    low: float
    high: float
    ticks: Sequence[Tick]
    is_log: bool = False
    has_grid: bool = True

    def share(self, value: float) -> float:
        if self.is_log:
            return math.log(value / self.low) / math.log(self.high / self.low)
        return (value - self.low) / (self.high - self.low)

    def clamped(self, value: float) -> float:
        return min(max(value, self.low), self.high)


@dataclass(frozen=True, slots=True)
class Point:
    """A point with an optional interval, tooltip (``about``) and label."""

    x: float
    y: float
    about: str = ""
    label: str = ""
    low: float | None = None
    high: float | None = None
    colour: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    """Points as a line, symbols, or a line with symbols. The legend has only named series."""

    points: Sequence[Point]
    name: str = ""
    colour: str = ACCENT
    width: float = 0
    dash: Dash = "solid"
    shape: Shape = "straight"  # hv steps first horizontally, vh first vertically
    symbol: Symbol | None = None
    size: float = 10
    is_hollow: bool = False


@dataclass(frozen=True, slots=True)
class Band:
    """A shaded range of the x axis."""

    name: str
    low: float
    high: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ReferenceLine:
    """A dotted line at a value of the y axis, or of the x axis if upright."""

    at: float
    name: str = ""
    colour: str = MUTED
    is_upright: bool = False


@dataclass(frozen=True, slots=True)
class ColourScale:
    """A legend of point colours, with labels at shares from 0 to 1 of the colour sequence."""

    title: str
    ticks: Sequence[Tick]


@dataclass(frozen=True, slots=True, kw_only=True)
class Chart:
    """Series on two axes. Symbols cover lines, and wide lines cover narrow lines."""

    x: Axis
    y: Axis
    series: Sequence[Series]
    bands: Sequence[Band] = ()
    rules: Sequence[ReferenceLine] = ()
    colours: ColourScale | None = None


def batch_axis(sizes: Sequence[int], title: str = "batch size") -> Axis:
    room = max(10**0.1, (sizes[-1] / sizes[0]) ** PADDING)
    return Axis(
        title,
        sizes[0] / room,
        sizes[-1] * room,
        [(float(size), str(size)) for size in sizes],
        is_log=True,
        has_grid=False,
    )


def value_axis(title: str, values: Iterable[float], *, log: bool, room: float = PADDING) -> Axis:
    known = [value for value in values if math.isfinite(value) and (value > 0 or not log)]
    low, high = min(known), max(known)
    if log:
        factor = max(10**0.04, (high / low) ** room)
        low, high = low / factor, high * factor
        return Axis(title, low, high, [(tick, number(tick)) for tick in round_numbers(low, high)], is_log=True)
    pad = room * ((high - low) or abs(high) or 1.0)
    low, high = low - (pad if low else 0.0), high + pad
    return Axis(title, low, high, linear_ticks(low, high))


def extent(series: Iterable[Series]) -> list[float]:
    return [
        value
        for one in series
        for point in one.points
        for value in (point.y, point.low, point.high)
        if value is not None
    ]


def linear_ticks(low: float, high: float) -> list[Tick]:
    """Return ticks at multiples of 1, 2 or 5 times a power of ten, in at most `MOST_TICKS` steps."""
    least = (high - low) / MOST_TICKS
    power = 10 ** math.floor(math.log10(least))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= least * (1 - 1e-9))
    decimals = max(0, -math.floor(math.log10(step) + 1e-9))
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [(index * step, f"{index * step:,.{decimals}f}".replace("-", "−")) for index in range(first, last + 1)]


def round_numbers(low: float, high: float) -> list[float]:
    """Return at most nine numbers for a logarithmic axis, round if possible."""
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    found: list[float] = []
    for steps in ((1,), (1, 3), (1, 2, 5), (1, 1.5, 2, 3, 4, 5, 7), tuple(step / 10 for step in range(10, 100))):
        found = [float(f"{step * 10.0**decade:.6g}") for decade in decades for step in steps]
        found = [value for value in found if low <= value <= high]
        if len(found) >= 3:
            break
    return found[:: math.ceil(len(found) / 9)] if len(found) > 1 else sorted({low, high})


def sequence_colour(share: float) -> str:
    """Return the colour at a share of the colour sequence, from 0 (best) to 1 (worst)."""
    place = round(min(1.0, max(0.0, share)), 2) * (STOPS - 1)
    before = min(int(place), STOPS - 2)
    percent = round(100 * (place - before))
    return f"color-mix(in srgb,var(--sequence-{before + 1}) {percent}%,var(--sequence-{before}))"


def short_name(text: object) -> str:
    words = " ".join(str(text).split())
    return words if len(words) <= LONGEST_NAME else f"{words[: LONGEST_NAME - 1]}…"


Anchor = Literal["start", "middle", "end"]
Corners = Sequence[tuple[float, float]]
Place = tuple[float, float, Anchor]  # position, baseline and anchor of a text

NARROW_WIDTH, WIDE_WIDTH = 340, 560
PICTURE_WIDTH, PICTURE_EDGE = 880, 24
MOST_TOOLTIPS = 200  # series with more points have no tooltips, which would double the page's size
TOOLTIP_RADIUS = 6
TICK, GAP, AWAY = 4, 4, 9  # pixels: length of a tick, distance from tick to text, distance from point to text
SWATCH, SWATCH_GAP, BETWEEN_NAMES = 24, 6, 16
BAR_WIDTH, BAR_HEIGHT = 180, 10
CAP = 5  # half the width of an interval's cap

# Corners of symbols, in half sizes; y grows downward
POLYGONS: dict[str, Corners] = {
    "square": [(-0.9, -0.9), (0.9, -0.9), (0.9, 0.9), (-0.9, 0.9)],
    "diamond": [(0, -1.3), (1.3, 0), (0, 1.3), (-1.3, 0)],
    "triangle": [(0, -1), (1.15, 0.8), (-1.15, 0.8)],
    "cross": [
        *((1.2, 0.4), (0.4, 0.4), (0.4, 1.2), (-0.4, 1.2), (-0.4, 0.4), (-1.2, 0.4)),
        *((-1.2, -0.4), (-0.4, -0.4), (-0.4, -1.2), (0.4, -1.2), (0.4, -0.4), (1.2, -0.4)),
    ],
    "star": [
        (radius * math.sin(corner * math.pi / 5), -radius * math.cos(corner * math.pi / 5))
        for corner, radius in enumerate((1.3, 0.55) * 5)
    ],
}
STROKES: dict[str, Sequence[Corners]] = {
    "x": [[(-1, -1), (1, 1)], [(-1, 1), (1, -1)]],
    "arrow": [[(-0.6, 0), (0.6, 0)], [(0, 0), (0, -2)], [(-0.6, -1.3), (0, -2), (0.6, -1.3)]],
}

# Character widths in font sizes, from DejaVu Sans, which is wider than most fonts; 0.62 for other characters
CHARACTER_WIDTHS = {0.34: "fijlt.,:;'!|I()[]/ -·", 0.85: "mwMW%@—→≥≤±×", 0.7: "ABCDEFGHJKLNOPQRSTUVXYZ&"}
WIDTH_OF = {character: width for width, characters in CHARACTER_WIDTHS.items() for character in characters}
# Characters that XML 1.0 (section 2.2) forbids
NO_XML = re.compile("[^\t\n\r\u0020-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
HALO = f' paint-order="stroke" stroke="{PAGE}" stroke-width="3" stroke-linejoin="round"'
MUTED_TEXT = ' fill="var(--muted)"'


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """The width, plot height and font size of a chart, in pixels."""

    kind: str
    width: float
    plot_height: float
    font: float = 13
    has_tooltips: bool = True

    @property
    def row(self) -> float:
        return 1.55 * self.font


class Box(NamedTuple):
    """A rectangle."""

    left: float
    top: float
    right: float
    bottom: float

    def meets(self, other: Box) -> bool:
        return (
            self.left < other.right and other.left < self.right and self.top < other.bottom and other.top < self.bottom
        )

    def _is_inside(self, other: Box) -> bool:
        return (
            other.left <= self.left
            and self.right <= other.right
            and other.top <= self.top
            and self.bottom <= other.bottom
        )


class Placed(NamedTuple):
    """A point with its position in pixels."""

    point: Point
    x: float
    y: float


@dataclass(frozen=True, slots=True)
class Frame:
    """The axes of a chart in pixels, with the ticks that fit."""

    box: Box
    x_axis: Axis
    y_axis: Axis
    x_ticks: Sequence[Tick]
    y_ticks: Sequence[Tick]

    def x(self, value: float) -> float:
        return self.box.left + self.x_axis.share(value) * (self.box.right - self.box.left)

    def y(self, value: float) -> float:
        return self.box.bottom - self.y_axis.share(value) * (self.box.bottom - self.box.top)

    def placed(self, series: Series) -> list[Placed]:
        places = [Placed(point, self.x(point.x), self.y(point.y)) for point in series.points]
        left, top, right, bottom = self.box
        return [one for one in places if left <= one.x + 0.1 <= right + 0.2 and top <= one.y + 0.1 <= bottom + 0.2]


def svg(chart: Chart, name: str, title: str, width: float = WIDE_WIDTH) -> str:
    """Draw a wide ``svg`` element, and a narrow element that the style sheet shows on a phone.

    Args:
        name: Unique prefix of ids on the page.
        title: Text alternative.
    """
    sizes = (
        Size(kind="wide", width=width, plot_height=290 if width <= WIDE_WIDTH else 330),
        Size(kind="narrow", width=NARROW_WIDTH, plot_height=220, font=12, has_tooltips=False),
    )
    about = f"{title}: {chart.y.title} by {chart.x.title}"
    drawn = []
    for size in sizes:
        elements, height = _drawn(chart, _escaped(f"{name}-{size.kind}"), size)
        head = f'<svg class="{size.kind}" viewBox="0 0 {short(size.width)} {short(height)}"'
        drawn += [f"{head} {_attributes(about, size)}>", *elements, "</svg>"]
    return "\n".join(drawn)


def picture(chart: Chart, *, title: str, subtitle: str, footnote: str, about: str) -> str:
    """Draw an SVG document with the text alternative ``about``."""
    size = Size(kind="wide", width=PICTURE_WIDTH - 2 * PICTURE_EDGE, plot_height=310, font=14)
    # ids differ between pictures in a notebook; rounded coordinates are equal on all processors
    digest = zlib.crc32("".join([title, *_drawn(chart, "", size)[0]]).encode())
    elements, height = _drawn(chart, f"chart-{digest:08x}", size)
    top, bottom = 74, 74 + height + 34
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" class="bssearch-chart" viewBox="0 0 {PICTURE_WIDTH} '
            f'{short(bottom)}" width="{PICTURE_WIDTH}" height="{short(bottom)}" {_attributes(about, size)}>',
            "<style>\nsvg.bssearch-chart { max-width: 100%; height: auto; }",
            f"{stylesheet('colours.css').replace(':root', 'svg.bssearch-chart')}</style>",
            f'<rect width="{PICTURE_WIDTH}" height="{short(bottom)}" rx="8" fill="{PAGE}"/>',
            _text_at(PICTURE_EDGE, 34, cut(title, 19, size.width), more=' font-size="19" font-weight="600"'),
            _text_at(PICTURE_EDGE, 58, cut(subtitle, size.font, size.width), more=MUTED_TEXT),
            f'<g transform="translate({PICTURE_EDGE} {top})">',
            *elements,
            "</g>",
            _text_at(
                PICTURE_WIDTH - PICTURE_EDGE, bottom - 14, cut(footnote, size.font, size.width), "end", MUTED_TEXT
            ),
            "</svg>",
            "",
        ]
    )


SPARK_WIDTH, SPARK_HEIGHT, SPARK_EDGE = 120, 32, 5


def sparkline(values: Mapping[int, float], best: int) -> str:
    """Draw values by batch size, with a mark at ``best``. The scale is logarithmic if all values are positive."""
    sizes = sorted(values)
    on = math.log if min(values.values()) > 0 else float
    low, high = on(min(values.values())), on(max(values.values()))
    step = (SPARK_WIDTH - 2 * SPARK_EDGE) / max(1, len(sizes) - 1)
    room = (SPARK_HEIGHT - 2 * SPARK_EDGE) / (high - low if high > low else 1.0)
    points = [
        (SPARK_EDGE + step * place, SPARK_HEIGHT - SPARK_EDGE - room * (on(values[size]) - low))
        for place, size in enumerate(sizes)
    ]
    line = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    dots = "".join(
        f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{4 if size == best else 2}" fill="{ACCENT if size == best else MUTED}"/>'
        for size, (x, y) in zip(sizes, points, strict=True)
    )
    about = _escaped(", ".join(f"batch {size}: {number(values[size])}" for size in sizes))
    return (
        f'<svg class="spark" role="img" aria-label="{about}" width="{SPARK_WIDTH}" height="{SPARK_HEIGHT}">'
        f'<title>{about}</title><polyline points="{line}" fill="none" stroke="{MUTED}"/>{dots}</svg>'
    )


@cache
def stylesheet(name: str) -> str:
    return resources.files("bssearch.figures").joinpath(name).read_text(encoding="utf-8")


def _attributes(about: str, size: Size) -> str:
    return (
        f'role="img" aria-label="{_escaped(about)}" font-family="system-ui, sans-serif" font-size="{size.font}" '
        f'fill="{INK}"'
    )


def _description(chart: Chart) -> str:
    axes = " ".join(
        f"{which}: {axis.title}, {axis.low:.3g} to {axis.high:.3g}{', logarithmic' if axis.is_log else ''}."
        for which, axis in (("Across", chart.x), ("Upward", chart.y))
    )
    names = [one.name for one in chart.rules if one.name] + [one.name for one in _named(chart)]
    return f"{axes} Shown: {'; '.join(names)}." if names else axes


def _named(chart: Chart) -> list[Band | Series]:
    return [*chart.bands, *(series for series in chart.series if series.name)]


def _drawn(chart: Chart, name: str, size: Size) -> tuple[list[str], float]:
    head, top = _legend(_named(chart), size)
    if chart.colours is not None:
        scale, height = _colour_scale(chart.colours, name, size)
        head += [f'<g transform="translate(0 {short(top + 4)})">', *scale, "</g>"]
        top += height + 4
    frame = _frame(chart, size, top + 2.4 * size.font)
    plot, by_width = frame.box, sorted(chart.series, key=lambda series: series.width)
    placed = [(series, frame.placed(series)) for series in chart.series]
    elements = [
        f"<desc>{_escaped(_description(chart))}</desc>",
        *head,
        f'<clipPath id="{name}-plot"><rect x="{short(plot.left)}" y="{short(plot.top)}" '
        f'width="{short(plot.right - plot.left)}" height="{short(size.plot_height)}"/></clipPath>',
        f'<g clip-path="url(#{name}-plot)">',
        *(_band(band, frame) for band in chart.bands),
        *_grid(frame),
        *(_rule(rule, frame) for rule in chart.rules),
        *(_line(series, frame) for series in by_width if series.width and len(series.points) > 1),
        "</g>",
        *_axes(frame, size),
        *(
            part
            for series, points in placed
            for part in (*_intervals(series, points, frame), *_symbols(series, points))
        ),
        *_texts(chart.rules, placed, frame, size),
    ]
    if size.has_tooltips:
        elements += [part for series, points in placed for part in _tooltips(series, points)]
    return elements, plot.bottom + TICK + GAP + 2.9 * size.font


def _frame(chart: Chart, size: Size, top: float) -> Frame:
    bottom = top + size.plot_height

    def half(tick: Tick) -> float:
        return width_of(tick[1], size.font) / 2

    upward = _fitting(
        chart.y.ticks, lambda tick: bottom - chart.y.share(tick[0]) * (bottom - top), lambda tick: 0.65 * size.font
    )
    across = chart.x.ticks
    left = max([*(2 * half(tick) + TICK + GAP for tick in upward), *(half(tick) for tick in across[:1])])
    right = size.width - max(10, *(half(tick) + 2 for tick in across[-1:]))
    ticks = _fitting(
        across,
        lambda tick: left + chart.x.share(tick[0]) * (right - left),
        lambda tick: half(tick) + 0.25 * size.font,
    )
    return Frame(Box(left, top, right, bottom), chart.x, chart.y, ticks, upward)


def _fitting(ticks: Sequence[Tick], place: Callable[[Tick], float], half: Callable[[Tick], float]) -> Sequence[Tick]:
    # Every n-th tick, with the smallest n without overlapping texts
    for every in range(1, len(ticks)):
        shown = ticks[::every]
        if all(abs(place(one) - place(two)) >= half(one) + half(two) for one, two in itertools.pairwise(shown)):
            return shown
    return ticks[:1]


def _grid(frame: Frame) -> Iterator[str]:
    box = frame.box
    lines = [f"M{short(box.left)} {short(frame.y(value))}H{short(box.right)}" for value, _ in frame.y_ticks]
    if frame.x_axis.has_grid:
        lines += [f"M{short(frame.x(value))} {short(box.bottom)}V{short(box.top)}" for value, _ in frame.x_ticks]
    yield f'<path d="{"".join(lines)}" fill="none" stroke="var(--grid)"/>'


def _axes(frame: Frame, size: Size) -> Iterator[str]:
    box, font = frame.box, size.font
    ticks = "".join(f"M{short(frame.x(value))} {short(box.bottom)}v{TICK}" for value, _ in frame.x_ticks)
    corner = f"M{short(box.left)} {short(box.top)}V{short(box.bottom)}H{short(box.right)}"
    yield f'<path d="{corner}{ticks}" fill="none" stroke="var(--grid)"/>'
    for value, text in frame.x_ticks:
        yield _text_at(frame.x(value), box.bottom + TICK + GAP + 0.8 * font, text, "middle")
    for value, text in frame.y_ticks:
        yield _text_at(box.left - TICK - GAP / 2, frame.y(value) + 0.35 * font, text, "end")
    across = cut(frame.x_axis.title, font, size.width)
    half = width_of(across, font) / 2
    yield _text_at(
        min(max((box.left + box.right) / 2, half), size.width - half),
        box.bottom + TICK + GAP + 2.5 * font,
        across,
        "middle",
        MUTED_TEXT,
    )
    yield _text_at(0, box.top - 0.8 * font, cut(frame.y_axis.title, font, size.width), more=MUTED_TEXT)


def _band(band: Band, frame: Frame) -> str:
    left, right = frame.x(band.low), frame.x(band.high)
    return (
        f'<rect x="{short(left)}" y="{short(frame.box.top)}" width="{short(right - left)}" '
        f'height="{short(frame.box.bottom - frame.box.top)}" fill="var(--band)"/>'
    )


def _rule(rule: ReferenceLine, frame: Frame) -> str:
    box = frame.box
    path = (
        f"M{short(frame.x(rule.at))} {short(box.bottom)}V{short(box.top)}"
        if rule.is_upright
        else f"M{short(box.left)} {short(frame.y(rule.at))}H{short(box.right)}"
    )
    return f'<path d="{path}" fill="none" stroke="{rule.colour}" stroke-width="1.25" stroke-dasharray="3"/>'


def _line(series: Series, frame: Frame) -> str:
    step = {"straight": "L{0} {1}", "hv": "H{0}V{1}", "vh": "V{1}H{0}"}[series.shape]
    first, *others = [(short(frame.x(point.x)), short(frame.y(point.y))) for point in series.points]
    path = f"M{first[0]} {first[1]}" + "".join(step.format(x, y) for x, y in others)
    return f'<path d="{path}" fill="none" stroke-linejoin="round" {_stroke(series)}/>'


def _stroke(series: Series) -> str:
    unit = max(series.width, 3)
    dashes = {"solid": "", "dot": short(unit), "dash": short(3 * unit)}[series.dash]
    return f'stroke="{series.colour}" stroke-width="{series.width:g}"' + (
        f' stroke-dasharray="{dashes}"' if dashes else ""
    )


def _ends(point: Point, frame: Frame) -> tuple[float, float] | None:
    if point.low is None or point.high is None:
        return None
    return frame.y(frame.y_axis.clamped(point.low)), frame.y(frame.y_axis.clamped(point.high))


def _intervals(series: Series, points: Sequence[Placed], frame: Frame) -> Iterator[str]:
    if found := [(one.x, ends) for one in points if (ends := _ends(one.point, frame)) is not None]:
        path = "".join(
            f"M{short(x - CAP)} {short(low)}h{2 * CAP}m{-CAP} 0V{short(high)}m{-CAP} 0h{2 * CAP}"
            for x, (low, high) in found
        )
        yield f'<path d="{path}" fill="none" stroke="{series.colour}" stroke-width="1.5"/>'


def _symbols(series: Series, points: Sequence[Placed]) -> Iterator[str]:
    if series.symbol is None:
        return
    paths: dict[str, dict[str, None]] = {}
    for point, x, y in points:
        paths.setdefault(point.colour or series.colour, {})[_outline(series.symbol, series.size, x, y)] = None
    for colour, outlines in paths.items():
        yield _symbol("".join(outlines), series, colour)


def _symbol(path: str, series: Series, colour: str) -> str:
    if series.is_hollow or series.symbol in STROKES:
        inside = PAGE if series.symbol not in STROKES else "none"
        return f'<path d="{path}" fill="{inside}" stroke="{colour}" stroke-width="1.75"/>'
    return f'<path d="{path}" fill="{colour}" stroke="{PAGE}"/>'


def _outline(symbol: Symbol, size: float, x: float, y: float) -> str:
    half = size / 2
    if symbol == "circle":
        radii = f"{short(half)} {short(half)}"
        return f"M{short(x - half)} {short(y)}a{radii} 0 1 0 {short(size)} 0 {radii} 0 1 0{short(-size)} 0"
    end = "" if symbol in STROKES else "z"
    return "".join(
        f"M{'L'.join(f'{short(x + half * right)} {short(y + half * down)}' for right, down in corners)}{end}"
        for corners in STROKES.get(symbol) or [POLYGONS[symbol]]
    )


def _tooltips(series: Series, points: Sequence[Placed]) -> Iterator[str]:
    if len(series.points) > MOST_TOOLTIPS or not any(point.about for point in series.points):
        return
    radius = short(max(TOOLTIP_RADIUS, series.size / 2 if series.symbol else 0))
    yield '<g fill="none" pointer-events="all">'
    for point, x, y in points:
        yield f'<circle cx="{short(x)}" cy="{short(y)}" r="{radius}"><title>{_escaped(point.about)}</title></circle>'
    yield "</g>"


def _texts(
    rules: Sequence[ReferenceLine], placed: Sequence[tuple[Series, Sequence[Placed]]], frame: Frame, size: Size
) -> Iterator[str]:
    box = Box(frame.box.left, frame.box.top - 2, size.width, frame.box.bottom)
    width = frame.box.right - frame.box.left - 2 * GAP
    wanted = [
        *((cut(rule.name, size.font, width), rule.colour, _beside_rule(rule, frame, size)) for rule in rules),
        *(
            (one.point.label, series.colour, _beside_point(one, size))
            for series, points in placed
            for one in points
            if one.point.label
        ),
    ]
    if not wanted:
        return
    taken = [obstacle for series, points in placed for one in points for obstacle in _obstacles(series, one, frame)]
    for index, (text, colour, places) in enumerate(wanted):
        boxes = [(place, _box_of(text, size.font, *place)) for place in places]
        inside = [one for one in boxes if one[1]._is_inside(box)]
        free = (one for one in inside if not any(one[1].meets(other) for other in taken))
        if (found := next(free, (inside or boxes)[0] if index < len(rules) else None)) is not None:
            place, room = found
            taken.append(Box(room.left - GAP, room.top, room.right + GAP, room.bottom))
            yield _text_at(place[0], place[1], text, place[2], f' fill="{colour}"{HALO}')


def _obstacles(series: Series, placed: Placed, frame: Frame) -> Iterator[Box]:
    point, x, y = placed
    half = series.size / 2 if series.symbol else 0
    yield Box(x - half, y - half * (2 if series.symbol == "arrow" else 1), x + half, y + half)
    if (ends := _ends(point, frame)) is not None:
        yield Box(x - CAP, ends[1], x + CAP, ends[0])


def _beside_rule(rule: ReferenceLine, frame: Frame, size: Size) -> list[Place]:
    box = frame.box
    if rule.is_upright:
        x = frame.x(rule.at)
        sides: list[tuple[float, Anchor]] = [(x - GAP, "end"), (x + GAP, "start")]
        return [
            (side, row, anchor)
            for row in (box.top + (row + 1.1) * size.font for row in range(int((box.bottom - box.top) / size.font)))
            for side, anchor in sides
        ]
    y = frame.y(rule.at)
    ends: list[tuple[float, Anchor]] = [(box.left + GAP, "start"), (box.right - GAP, "end")]
    return [(x, height, anchor) for height in (y - 0.4 * size.font, y + 1.1 * size.font) for x, anchor in ends]


def _beside_point(placed: Placed, size: Size) -> list[Place]:
    _, x, y = placed
    aside, above, below = 0.6 * AWAY, y - AWAY - 0.2 * size.font, y + AWAY + 0.8 * size.font
    beside = y + 0.35 * size.font
    return [
        (x + aside, above, "start"),
        (x + aside, below, "start"),
        (x - aside, above, "end"),
        (x - aside, below, "end"),
        (x, above, "middle"),
        (x, below, "middle"),
        (x + AWAY, beside, "start"),
        (x - AWAY, beside, "end"),
    ]


def _legend(entries: Sequence[Band | Series], size: Size) -> tuple[list[str], float]:
    elements, x, row = [], 0.0, 0
    for entry in entries:
        name = cut(entry.name, size.font, size.width - SWATCH - SWATCH_GAP)
        width = SWATCH + SWATCH_GAP + width_of(name, size.font)
        if x and x + width > size.width:
            x, row = 0.0, row + 1
        middle = (row + 0.5) * size.row
        elements += [*_sample(entry, x, middle), _text_at(x + SWATCH + SWATCH_GAP, middle + 0.35 * size.font, name)]
        x += width + BETWEEN_NAMES
    return elements, (row + 1) * size.row if entries else 0.0


def _sample(entry: Band | Series, x: float, y: float) -> Iterator[str]:
    if isinstance(entry, Band):
        yield f'<rect x="{short(x)}" y="{short(y - 6)}" width="{SWATCH}" height="12" fill="var(--band)"/>'
        return
    if entry.width:
        yield f'<path d="M{short(x)} {short(y)}h{SWATCH}" fill="none" {_stroke(entry)}/>'
    if entry.symbol is not None:
        below = entry.size / 2 if entry.symbol == "arrow" else 0
        yield _symbol(_outline(entry.symbol, entry.size, x + SWATCH / 2, y + below), entry, entry.colour)


def _colour_scale(scale: ColourScale, name: str, size: Size) -> tuple[list[str], float]:
    title = cut(scale.title, size.font, size.width)
    edge = max(width_of(text, size.font) for _, text in scale.ticks) / 2
    left, middle = width_of(title, size.font) + SWATCH_GAP + edge, size.row / 2
    if left + BAR_WIDTH + edge > size.width:
        left, middle = edge, 1.5 * size.row
    stops = "".join(
        f'<stop offset="{stop / (STOPS - 1):.3g}" stop-color="var(--sequence-{stop})"/>' for stop in range(STOPS)
    )
    return [
        f'<linearGradient id="{name}-scale">{stops}</linearGradient>',
        _text_at(0, size.row / 2 + 0.35 * size.font, title),
        f'<rect x="{short(left)}" y="{short(middle - BAR_HEIGHT / 2)}" width="{BAR_WIDTH}" height="{BAR_HEIGHT}" '
        f'fill="url(#{name}-scale)"/>',
        *(
            _text_at(left + BAR_WIDTH * share, middle + BAR_HEIGHT / 2 + size.font, text, "middle")
            for share, text in _fitting(
                scale.ticks,
                lambda tick: BAR_WIDTH * tick[0],
                lambda tick: (width_of(tick[1], size.font) + SWATCH_GAP) / 2,
            )
        ),
    ], middle + size.row / 2 + 1.1 * size.font


def short(value: float) -> str:
    return f"{value:z.1f}".removesuffix(".0")


def width_of(text: str, font: float) -> float:
    return font * sum(WIDTH_OF.get(character, 0.62) for character in text)


def cut(text: str, font: float, room: float) -> str:
    if width_of(text, font) <= room:
        return text
    while text and width_of(f"{text}…", font) > room:
        text = text[:-1]
    return f"{text.rstrip()}…"


def _escaped(text: str) -> str:
    return html.escape(NO_XML.sub("\ufffd", text))


def _text_at(x: float, baseline: float, text: str, anchor: Anchor = "start", more: str = "") -> str:
    placed = "" if anchor == "start" else f' text-anchor="{anchor}"'
    return f'<text x="{short(x)}" y="{short(baseline)}"{placed}{more}>{_escaped(text)}</text>'


def _box_of(text: str, font: float, x: float, baseline: float, anchor: Anchor) -> Box:
    width = width_of(text, font)
    left = x - {"start": 0.0, "middle": width / 2, "end": width}[anchor]
    return Box(left, baseline - 0.95 * font, left + width, baseline + 0.25 * font)
