"""``bssearch guide`` and ``schema``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from bssearch.cli.output import console, print_json, write
from bssearch.errors import NotFoundError

GUIDE = Path(__file__).resolve().parents[1] / "guide"


def guide(
    topic: Annotated[
        str | None, typer.Argument(metavar="TOPIC", help="Topic to print; without one, list the topics.")
    ] = None,
    form: Annotated[
        Literal["page", "text"],
        typer.Option("--format", "-f", help="page: formatted for a terminal; text: plain Markdown."),
    ] = "page",
) -> None:
    """Print a topic of the guide, or list the topics."""
    text = contents() if topic is None else topic_file(topic).read_text(encoding="utf-8")
    screen = console()
    if form == "page" and screen.is_terminal:
        from rich.markdown import Markdown

        screen.print(Markdown(text))
    else:
        write(text)


def topics() -> dict[str, Path]:
    """The guide's files by topic."""
    return {path.stem: path for path in sorted(GUIDE.glob("*.md"))}


def topic_file(topic: str) -> Path:
    """A topic's file; raise `NotFoundError` naming similar topics."""
    from difflib import get_close_matches

    there = topics()
    if topic not in there:
        near = get_close_matches(topic, there) or list(there)
        raise NotFoundError(f"the guide has no topic {topic!r}", hint=f"bssearch guide {' | '.join(near)}")
    return there[topic]


def contents() -> str:
    """Topics as Markdown, each with its first paragraph."""
    lines = [f"- `bssearch guide {name}`: {_first_paragraph(path)}" for name, path in topics().items()]
    return "\n".join(["# The guide", "", *lines, ""])


def _first_paragraph(path: Path) -> str:
    return " ".join(path.read_text(encoding="utf-8").split("\n\n")[1].split())


def schema(
    of: Annotated[
        Literal["spec", "best"], typer.Argument(metavar="spec|best", help="spec: a study file; best: an answer.")
    ],
) -> None:
    """Print the JSON Schema of a study file or of an answer."""
    if of == "spec":
        from bssearch.spec import StudySpec

        print_json(StudySpec.model_json_schema())
    else:
        from bssearch.analysis.answer import Answer

        print_json(Answer.model_json_schema(mode="serialization"))
