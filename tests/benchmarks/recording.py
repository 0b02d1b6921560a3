"""Records the terminal output of a real `bssearch run` as an animated SVG of text, of at most 400 kB.

The study runs in a pseudo-terminal, in an empty folder. The animation shortens the run to `--seconds` and holds
the last frame, the answer. Colours follow the reader's dark or light scheme. Needs the package pyte, a terminal.
Run: python tests/benchmarks/recording.py digits --out bssearch/guide/pictures/run.svg
"""

if not __package__:
    __import__("from_clone")

import codecs
import fcntl
import importlib
import os
import pty
import struct
import sys
import tempfile
import termios
import time
from collections.abc import Iterable
from html import escape
from pathlib import Path
from typing import Annotated

import typer

from bssearch.spec import find_spec
from tests.benchmarks.harness import script

COLUMNS, ROWS = 100, 32
FRAMES = 40
HOLD_SHARE = 0.4
"""Share of the animation that shows the last frame."""

SIZE_BAR = 400_000

Chunk = tuple[float, str]
"""Seconds since the start, and the output."""


def record(command: list[str], folder: str) -> tuple[list[Chunk], int]:
    """Run a command in a pseudo-terminal; return its output and its exit code."""
    child, terminal = pty.fork()
    if child == 0:
        os.chdir(folder)
        os.execvpe(command[0], command, {**os.environ, "TERM": "xterm-256color", "NO_COLOR": "1"})
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, COLUMNS, 0, 0))
    start, decoder, chunks = time.monotonic(), codecs.getincrementaldecoder("utf-8")("replace"), []
    while True:
        try:
            data = os.read(terminal, 65536)
        except OSError:  # Linux reports the end of a pseudo-terminal as EIO
            break
        if not data:
            break
        chunks.append((time.monotonic() - start, decoder.decode(data)))
    os.close(terminal)
    return chunks, os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def frames(chunks: Iterable[Chunk]) -> list[tuple[float, tuple[str, ...]]]:
    """Return at most `FRAMES` different screens, evenly over the run, each with its second; the last one is kept."""
    pyte = importlib.import_module("pyte")
    screen = pyte.Screen(COLUMNS, ROWS)
    stream = pyte.Stream(screen)
    states: list[tuple[float, tuple[str, ...]]] = []
    for second, text in chunks:
        stream.feed(text)
        shown = tuple("\n".join(line.rstrip() for line in screen.display).rstrip().splitlines())
        if shown and (not states or shown != states[-1][1]):
            states.append((second, shown))
    if len(states) <= FRAMES:
        return states
    chosen = sorted({round(index * (len(states) - 1) / (FRAMES - 1)) for index in range(FRAMES)})
    return [states[index] for index in chosen]


def svg(shown: list[tuple[float, tuple[str, ...]]], title: str, seconds: float) -> str:
    """Return the animation as a document; frame after frame is visible, without scripts."""
    tall = 18 * max(len(lines) for _, lines in shown) + 24
    first, last = shown[0][0], shown[-1][0]
    share = [(second - first) / max(last - first, 1e-9) * (1 - HOLD_SHARE) * 100 for second, _ in shown]
    rules, groups = [], []
    for index, (_, lines) in enumerate(shown):
        begin, end = share[index], share[index + 1] if index + 1 < len(shown) else 100.0
        is_last = index + 1 == len(shown)
        hidden = [] if index == 0 else ["0%{visibility:hidden}"]
        rules.append(
            f"@keyframes k{index}{{{''.join(hidden)}{begin:.2f}%{{visibility:visible}}"
            + ("100%{visibility:visible}}" if is_last else f"{end:.2f}%,100%{{visibility:hidden}}}}")
            + f"#f{index}{{animation:k{index} {seconds:g}s step-end infinite"
            + ("" if is_last else ";visibility:hidden")
            + "}"
        )
        rows = "".join(
            f'<text x="12" y="{24 + 18 * row}">{escape(line)}</text>' for row, line in enumerate(lines) if line
        )
        groups.append(f'<g id="f{index}">{rows}</g>')
    style = (
        "text{font:14px/18px ui-monospace,Menlo,Consolas,'DejaVu Sans Mono',monospace;white-space:pre;fill:#1f2328}"
        ".back{fill:#f6f8fa;stroke:#d0d7de}"
        "@media (prefers-color-scheme:dark){text{fill:#e6edf3}.back{fill:#0d1117;stroke:#30363d}}"
        "@media (prefers-reduced-motion:reduce){g{animation:none!important}}"
    )
    wide = 8.6 * COLUMNS + 24
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {wide:g} {tall}" role="img">'
        f"<title>{escape(title)}</title><style>{style}{''.join(rules)}</style>"
        f'<rect class="back" x="0.5" y="0.5" width="{wide - 1:g}" height="{tall - 1}" rx="8"/>{"".join(groups)}</svg>\n'
    )


def main(
    spec: str,
    out: Path = Path("run.svg"),
    seconds: Annotated[float, typer.Option(help="how long the animation takes")] = 20.0,
) -> bool:
    """Record the run and write the picture; return False if it is too large."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "bssearch", "run", str(find_spec(spec).resolve())]
        chunks, code = record(command, folder)
    if code:
        sys.exit(f"the run ended with {code}: {''.join(text for _, text in chunks)[-2000:]}")
    shown = frames(chunks)
    picture = svg(shown, f"bssearch run {spec}, {time.strftime('%Y-%m-%d')}", seconds)
    out.write_text(picture, encoding="utf-8")
    size = len(picture.encode())
    print(f"{out}: {size / 1000:.0f} kB (bar {SIZE_BAR / 1000:.0f}), {len(shown)} frames, {chunks[-1][0]:.0f} s")
    return size <= SIZE_BAR


if __name__ == "__main__":
    script(main, __doc__)
