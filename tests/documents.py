"""The README and the guide as text: their code blocks, commands and names."""

import re
import shlex
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
GUIDE = ROOT / "bssearch" / "guide"
DOCUMENTS = {path.stem: path.read_text(encoding="utf-8") for path in [ROOT / "README.md", *sorted(GUIDE.glob("*.md"))]}
README = DOCUMENTS["README"]
BENCHMARKS = ROOT / "tests" / "benchmarks"
OWN_TRAINING = ROOT / "tests" / "data" / "own_training"
"""Scripts that the guide names instead of showing."""

SCRIPTS = sorted(path for path in BENCHMARKS.rglob("*.py") if "if __name__ ==" in path.read_text(encoding="utf-8"))
"""Benchmarks that run as files."""


def blocks(text: str, language: str) -> list[str]:
    """Code blocks of a language."""
    return re.findall(rf"^```{language}\n(.*?)^```", text, flags=re.DOTALL | re.MULTILINE)


def spans(text: str) -> list[str]:
    """Code within sentences."""
    return re.findall(r"`([^`]+)`", re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE))


def code(text: str) -> str:
    """All code, in blocks and within sentences."""
    return "\n".join([*re.findall(r"^```\w*\n(.*?)^```", text, flags=re.DOTALL | re.MULTILINE), *spans(text)])


def block_commands(text: str) -> list[list[str]]:
    """Commands of bssearch in code blocks, as the words after ``bssearch``."""
    lines = [line for block in blocks(text, "sh") for line in block.replace("\\\n", " ").splitlines()]
    found = [part.strip() for line in lines for part in re.sub(r"\s+#.*", "", line).split("&&")]
    return [shlex.split(re.sub(r" > \S+$", "", one))[1:] for one in found if one.startswith("bssearch ")]


def span_commands(text: str) -> list[list[str]]:
    """Commands of bssearch within sentences, as the words after ``bssearch``."""
    return [span.split()[1:] for span in spans(text) if re.match(r"bssearch\s", span)]
