"""How large the code is: statements without docstrings, by room, of the product and of its tests.

    python tests/benchmarks/statements.py

Statements are nodes of Python's syntax tree, so that formatting and comments do not count.
"""

import argparse
import ast
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parents[2]
PRODUCT, TESTS = ("bssearch", "migrations"), ("tests",)


def statements_in(source: str) -> int:
    """Return the number of statements of a module, docstrings left out."""
    nodes = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.stmt)]
    return sum(not _is_text(node) for node in nodes)


def counts(*folders: str) -> dict[str, dict[str, int]]:
    """Return statements, lines and files of each room below some folders of the repository."""
    found: dict[str, Counter[str]] = {}
    for path in sorted(file for folder in folders for file in (ROOT / folder).rglob("*.py")):
        parts = path.relative_to(ROOT).parts
        room = "/".join(parts[: 2 if len(parts) > 2 else 1])
        source = path.read_text(encoding="utf-8")
        counted = {"statements": statements_in(source), "lines": source.count("\n"), "files": 1}
        found.setdefault(room, Counter()).update(counted)
    return {room: dict(counted) for room, counted in found.items()}


def _is_text(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


def main() -> None:
    """Print the table."""
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    for part, rooms in {"product": counts(*PRODUCT), "tests": counts(*TESTS)}.items():
        total: Counter[str] = Counter()
        for room, counted in rooms.items():
            total.update(counted)
            print(f"{room:32}{counted['statements']:8,}{counted['lines']:9,}{counted['files']:6}")
        print(f"{part:32}{total['statements']:8,} statements, {total['lines']:,} lines, {total['files']} files\n")


if __name__ == "__main__":
    main()
