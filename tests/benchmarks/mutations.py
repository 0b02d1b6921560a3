"""The number of seeded mutations of the package, of a hundred, that the default tests catch.

Run as ``python tests/benchmarks/mutations.py TREE [--seed 0] [--count 100] [--only FILE]``, with
``pytest-cov`` and the tests' packages installed. TREE is any checkout; a copy is mutated. First its default tests run
once under coverage, with subprocesses. This shows the tests of each line and their seconds (kept in ``--work`` for the
same tree). Then each mutant runs the tests of the mutated line, quickest first, until a test fails. A line that runs at
import time, or in no test, gets the tests of its file.

Mutations: a comparison weakened or inverted, + for −, × for ÷, ``and`` for ``or``, a ``not`` dropped, a number changed
(n + 1, 2 x), None returned, an ``if`` negated, a call statement deleted. Places are drawn from all of
``bssearch/**/*.py`` except templates and the guide, in the order of path and position.
"""

if not __package__:
    __import__("from_clone")

import ast
import hashlib
import importlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path, PurePosixPath
from typing import Annotated

import typer

from bssearch.errors import BSSearchError
from tests.benchmarks.harness import TEMPORARY, script

THREADS = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
"""Threads make small models slow beside other programs."""

BUDGET_SECONDS = 60.0
"""Most seconds of tests for a mutant, as measured under coverage: a hundred mutants then take less than an hour."""

SLOW_SECONDS = 0.25
"""Slower tests run last and must fail twice, because tests with timeouts may flake."""

LEFT_OUT = ("templates", "guide")

MEASURED = """
[run]
parallel = true
sigterm = true
source = {copy}/bssearch
data_file = {work}/coverage
context = ${{PYTEST_CURRENT_TEST-}}
"""
"""Coverage settings for a copy of the tree: lines of a subprocess belong to the running test."""

OPTIONS = ["-n", "0", "--dist", "no", "-q", "-p", "no:cacheprovider", "--disable-warnings", "-o", "junit_family=xunit1"]


@dataclass(frozen=True)
class Mutation:
    """One change of the source: replaces the text between two offsets (in bytes) of a file."""

    path: str
    line: int
    last_line: int
    start: int
    end: int
    kind: str
    before: str
    after: str

    def applied(self, source: bytes) -> bytes:
        return source[: self.start] + self.after.encode() + source[self.end :]


# Which mutations there are -------------------------------------------------------------------------------------------

COMPARISONS: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}
OPERATORS: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Div,
    ast.Div: ast.Mult,
}


def mutations_of(path: str, source: bytes) -> list[Mutation]:
    """Return every mutation of a file, in the order of the places."""
    starts = [0]
    for text in source.splitlines(keepends=True):
        starts.append(starts[-1] + len(text))
    found = []
    for node, lines, kind, after in _changes(ast.parse(source)):
        start = starts[node.lineno - 1] + node.col_offset
        assert node.end_lineno is not None and node.end_col_offset is not None
        end = starts[node.end_lineno - 1] + node.end_col_offset
        found.append(Mutation(path, lines[0], lines[1], start, end, kind, source[start:end].decode(), after))
    return sorted(found, key=lambda mutation: (mutation.start, mutation.end, mutation.kind))


def all_mutations(tree: Path, only: Sequence[str] = ()) -> list[Mutation]:
    """Return every mutation of a tree's package, or of the files named, by path and position."""
    found = []
    for file in sorted((tree / "bssearch").rglob("*.py")):
        path = file.relative_to(tree).as_posix()
        if file.relative_to(tree).parts[1] not in LEFT_OUT and (not only or path in only):
            found += mutations_of(path, file.read_bytes())
    return found


def _changes(root: ast.Module) -> Iterator[tuple[ast.expr | ast.stmt, tuple[int, int], str, str]]:
    """Yield the node to replace, the lines on which it runs, the kind of change and the new text."""
    for node, statement in _mutable(root):
        lines = (node.lineno, node.end_lineno or node.lineno)
        if isinstance(statement, ast.Expr | ast.Return | ast.Assign | ast.AnnAssign | ast.AugAssign):
            lines = (min(statement.lineno, lines[0]), lines[1])
        for kind, after in _expression_changes(node) if isinstance(node, ast.expr) else ():
            yield node, lines, kind, f"({after})"
        if isinstance(node, ast.Return) and node.value and ast.unparse(node.value) != "None":
            yield node.value, lines, "returns None", "None"
        if isinstance(node, ast.If) and not _is_never_run(node):
            test = (node.test.lineno, node.test.end_lineno or node.test.lineno)
            yield node.test, test, "if negated", f"(not ({ast.unparse(node.test)}))"
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
            yield node, lines, "call deleted", "pass"


def _expression_changes(node: ast.expr) -> Iterator[tuple[str, str]]:
    if isinstance(node, ast.Compare) and type(node.ops[0]) in COMPARISONS:
        ops = [COMPARISONS[type(node.ops[0])](), *node.ops[1:]]
        yield "comparison", ast.unparse(ast.Compare(node.left, ops, node.comparators))
    if isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
        yield "arithmetic", ast.unparse(ast.BinOp(node.left, OPERATORS[type(node.op)](), node.right))
    if isinstance(node, ast.BoolOp):
        other = ast.Or() if isinstance(node.op, ast.And) else ast.And()
        yield "and/or", ast.unparse(ast.BoolOp(other, node.values))
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        yield "not dropped", ast.unparse(node.operand)
    if isinstance(node, ast.Constant) and isinstance(node.value, int) and not isinstance(node.value, bool):
        yield "number", str(node.value + 1)
    if isinstance(node, ast.Constant) and isinstance(node.value, float):
        yield "number", repr(2 * node.value if node.value else 1.0)


def _mutable(root: ast.AST, statement: ast.stmt | None = None) -> Iterator[tuple[ast.expr | ast.stmt, ast.stmt | None]]:
    """Yield executed nodes with their statements: no annotation, no f-string (its positions are wrong before 3.12)."""
    for name, value in ast.iter_fields(root):
        if name in ("annotation", "returns"):
            continue
        for child in value if isinstance(value, list) else [value]:
            if not isinstance(child, ast.AST) or isinstance(child, ast.JoinedStr) or _is_never_run(child):
                continue
            inside = child if isinstance(child, ast.stmt) else statement
            if isinstance(child, ast.expr | ast.stmt):
                yield child, inside
            yield from _mutable(child, inside)


def _is_never_run(node: ast.AST) -> bool:
    """Return whether a node is an ``if`` for type checkers, or for running the file as a script."""
    return isinstance(node, ast.If) and ast.unparse(node.test) in ("TYPE_CHECKING", "__name__ == '__main__'")


# Which tests run a line ----------------------------------------------------------------------------------------------


@dataclass
class Coverage:
    """Results of the default tests."""

    seconds: dict[str, float] = field(default_factory=dict)
    """Seconds of each test that passed, by node id, its set-up included."""
    lines: dict[str, dict[str, list[str]]] = field(default_factory=dict)
    """Tests by file and line; test files for lines that run in a fixture or a subprocess."""


def coverage_of(copy: Path, work: Path) -> Coverage:
    """Return the coverage of the default tests of a tree; measure it unless known."""
    digest = hashlib.sha256()
    for file in sorted(file for room in ("bssearch", "tests") for file in (copy / room).rglob("*.py")):
        digest.update(file.relative_to(copy).as_posix().encode() + file.read_bytes())
    kept = work / f"coverage-{digest.hexdigest()[:16]}.json"
    if not kept.exists():
        settings = work / "settings"
        settings.write_text(MEASURED.format(copy=copy, work=work))
        measuring = ["--cov", "--cov-context=test", f"--cov-config={settings}", "--cov-report="]
        seconds, failed = run_tests(copy, work, measuring, None, COVERAGE_PROCESS_START=str(settings))
        passed = {test: seconds[test] for test in seconds if test not in failed}
        kept.write_text(json.dumps(asdict(Coverage(passed, _lines(work / "coverage")))))
    return Coverage(**json.loads(kept.read_text()))


def run_tests(
    copy: Path, work: Path, arguments: Sequence[str], limit: float | None, **environment: str
) -> tuple[dict[str, float], list[str]]:
    """Run tests of a copy; return the seconds of all tests, and the tests that failed or were skipped.

    A run past the limit, or without results, counts as one failed test of that name.
    """
    results = work / "results.xml"
    results.unlink(missing_ok=True)
    tests = subprocess.Popen(
        [sys.executable, "-m", "pytest", *OPTIONS, f"--junitxml={results}", *arguments],
        cwd=copy,
        env={**os.environ, **THREADS, "PYTHONPATH": str(copy), **environment},
        stdin=subprocess.DEVNULL,
        stdout=(work / "tests.log").open("w"),
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    try:
        tests.wait(limit)
    except subprocess.TimeoutExpired:
        os.killpg(tests.pid, signal.SIGKILL)
        tests.wait()
        return {}, ["time limit"]
    if not results.exists():
        return {}, [f"exit code {tests.returncode}"]
    cases = {_node_id(case): case for case in ElementTree.parse(results).iter("testcase")}
    seconds = {name: float(case.get("time", 0)) for name, case in cases.items()}
    return seconds, [name for name, case in cases.items() if len(case)]


def _node_id(case: ElementTree.Element) -> str:
    file = case.get("file", "")
    within = case.get("classname", "").removeprefix(file.removesuffix(".py").replace("/", ".")).strip(".")
    return "::".join([file, *within.split(".")[: bool(within)], case.get("name", "")])


def _lines(data: Path) -> dict[str, dict[str, list[str]]]:
    """Return the tests of each line; for fixtures and subprocesses, all tests of the file."""
    kept = importlib.import_module("coverage").CoverageData(str(data))
    kept.read()
    found: dict[str, dict[str, list[str]]] = {}
    for path in kept.measured_files():
        lines = found["bssearch/" + path.rpartition("/bssearch/")[2]] = {}
        for line, contexts in kept.contexts_by_lineno(path).items():
            tests = {
                one.removesuffix("|run") if one.endswith("|run") else one.partition("::")[0] for one in contexts if one
            }
            lines[str(line)] = sorted(tests)
    return found


def tests_for(mutation: Mutation, coverage: Coverage) -> list[str]:
    """Return the tests that may catch a mutation, the likeliest first, within the budget."""
    files = {test.partition("::")[0] for test in coverage.seconds}
    lines = coverage.lines.get(mutation.path, {})
    found = {test for line in range(mutation.line, mutation.last_line + 1) for test in lines.get(str(line), ())}
    module = PurePosixPath(mutation.path)
    own = {file for file in files if PurePosixPath(file).name == f"test_{module.name}"}
    room = module.parent.name
    if not found:  # it runs at import time, or in no test at all
        found = {test.partition("::")[0] for tests in lines.values() for test in tests}
        found |= {file for file in files if PurePosixPath(file).parent.name == room}
    found |= own

    def rank(test: str) -> tuple[bool, bool, bool, str, float]:
        file = test.partition("::")[0]
        is_slow = coverage.seconds[test] > SLOW_SECONDS
        return is_slow, file not in own, PurePosixPath(file).parent.name != room, file, coverage.seconds[test]

    chosen, spent = [], 0.0
    for test in sorted((test for test in coverage.seconds if {test, test.partition("::")[0]} & found), key=rank):
        if spent + coverage.seconds[test] <= BUDGET_SECONDS:
            chosen.append(test)
            spent += coverage.seconds[test]
    return chosen


# Running -------------------------------------------------------------------------------------------------------------


def killer(copy: Path, work: Path, tests: Sequence[str], coverage: Coverage) -> str | None:
    """Return the first test that fails in a copy of the tree, or None. A slow test must fail twice."""
    if not tests:
        return None
    (work / "chosen").write_text("\n".join(tests))
    limit = 60.0 + 4 * sum(coverage.seconds[test] for test in tests)
    failed = run_tests(copy, work, ["-x", f"@{work / 'chosen'}"], limit)[1]
    if failed and len(tests) > 1 and coverage.seconds.get(failed[0], 0.0) > SLOW_SECONDS:
        return killer(copy, work, failed, coverage)
    return failed[0] if failed else None


def main(
    tree: Path,
    seed: int = 0,
    count: int = 100,
    only: Annotated[list[str] | None, typer.Option(help="a file to mutate, as bssearch/records/noise_scale.py")] = None,
    work: Path = TEMPORARY / "bssearch-mutations",
) -> None:
    """Measure coverage, run the mutants, and print a line for each."""
    work = work.resolve()
    work.mkdir(parents=True, exist_ok=True)
    copy = work / "tree"
    shutil.rmtree(copy, ignore_errors=True)
    ignored = shutil.ignore_patterns(".git", "__pycache__", ".*_cache", ".hypothesis")
    shutil.copytree(tree, copy, ignore=ignored, symlinks=True)
    places = all_mutations(copy, only or [])
    mutations = random.Random(seed).sample(places, min(count, len(places)))
    coverage, caught = coverage_of(copy, work), 0
    if not coverage.seconds:
        raise BSSearchError(f"no test of {tree} passed", hint=f"see {work / 'tests.log'}")
    print(f"{len(places)} places; {len(coverage.seconds)} tests, {sum(coverage.seconds.values()):.0f} s under coverage")
    for index, mutation in enumerate(mutations, start=1):
        file = copy / mutation.path
        source, stamp = file.read_bytes(), file.stat().st_mtime
        file.write_bytes(mutation.applied(source))
        # Compiled files are known by time and size: no mutant may share its time with another.
        os.utime(file, (stamp + index, stamp + index))
        killed = killer(copy, work, tests_for(mutation, coverage), coverage)
        file.write_bytes(source)
        os.utime(file, (stamp, stamp))
        caught += killed is not None
        change = f"{mutation.before} -> {mutation.after}".replace("\n", " ")
        change = change if len(change) <= 90 else change[:42] + " … " + change[-45:]
        print(f"{mutation.path}:{mutation.line}\t{mutation.kind}\t{change}\t{killed or 'SURVIVED'}", flush=True)
    print(f"caught {caught} of {len(mutations)}")


if __name__ == "__main__":
    script(main, __doc__)
