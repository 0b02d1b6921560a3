"""The number of seeded mutations of the package, of a hundred, that the default tests catch.

Run as ``python tests/benchmarks/mutations.py TREE [--seed 0] [--count 100] [--only FILE]``, with
``pytest-cov`` and the tests' packages installed. TREE is any checkout; a copy is mutated. First its default tests run
once under coverage, with subprocesses. This shows the tests of each line and their seconds (kept in ``--work`` for the
same tree). Then each mutant runs the tests of the mutated line, quickest first, until a test fails. A line that runs at
import time, or in no test, gets the tests of its file. ``--work`` also keeps results: the same command resumes.

Mutations: a comparison weakened or inverted, + for −, × for ÷, ``and`` for ``or``, a ``not`` dropped, a number changed
(n + 1, 2 x), None returned, an ``if`` negated, a call statement deleted. Places are drawn from all of
``bssearch/**/*.py`` except templates and the guide, in the order of path and position.
"""

if not __package__:
    __import__("from_clone")

import ast
import contextlib
import hashlib
import importlib
import io
import json
import multiprocessing
import os
import random
import shutil
import signal
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from multiprocessing.process import BaseProcess
from pathlib import Path, PurePosixPath
from typing import Annotated, Any

import psutil
import pytest
import typer

from tests.benchmarks.harness import TEMPORARY, script

THREADS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
"""Set to 1: threads make small models slow beside other programs."""

BUDGET_SECONDS = 60.0
"""Most seconds of tests for a mutant, as measured under coverage: a hundred mutants then take less than an hour."""

SLOW_SECONDS = 0.25
"""Slower tests run last and must fail twice, because tests with timeouts may flake."""

LEFT_OUT = ("templates", "guide")
HEAVY = (
    "torch numpy scipy.stats scipy.optimize sklearn.datasets pandas optuna sqlalchemy alembic.command pydantic typer "
    "rich.table yaml tenacity psutil jinja2 psycopg jsonschema threadpoolctl"
)
"""Imported once, before each mutant's process forks: third parties only, no module of the tree."""

MARK = "BSSEARCH_MUTATIONS"
"""Environment variable that marks the processes of a mutant, to kill them."""

MEASURED = """
[run]
parallel = true
sigterm = true
source = {copy}/bssearch
data_file = {data}/coverage
context = ${{PYTEST_CURRENT_TEST-}}
"""
"""Coverage settings for a copy of the tree: lines of a subprocess belong to the running test."""

OPTIONS = ["-n", "0", "--dist", "no", "-q", "-p", "no:cacheprovider", "--disable-warnings"]


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
    failed: list[str] = field(default_factory=list)
    lines: dict[str, dict[str, list[str]]] = field(default_factory=dict)
    """Tests by file and line; test files for lines that run in a fixture or a subprocess."""
    wall_seconds: float = 0.0


class Results:
    """A pytest plugin that records seconds and failures of tests."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self.failed: list[str] = []
        self.skipped: list[str] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when != "teardown":
            self.seconds[report.nodeid] += report.duration
        if report.skipped:
            self.skipped.append(report.nodeid)
        if report.failed:
            self.failed.append(report.nodeid)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self.failed.append(f"{report.nodeid} (import)")


def measure_coverage(tree: Path, work: Path) -> Coverage:
    """Run the default tests of a tree under coverage."""
    began = time.monotonic()
    data = work / "data"
    shutil.rmtree(data, ignore_errors=True)
    data.mkdir(parents=True)
    copy = copy_of(tree, work / "tree")
    ended(fork(copy, work / "coverage.log", partial(_measure, copy, data)), None)
    told = json.loads((data / "tests.json").read_text())
    return Coverage(told["seconds"], told["failed"], _lines(data / "coverage"), time.monotonic() - began)


def _measure(copy: Path, data: Path) -> None:
    settings = data / "settings"
    settings.write_text(MEASURED.format(copy=copy, data=data))
    os.environ["COVERAGE_PROCESS_START"] = str(settings)
    results = Results()
    measuring = ["--cov", "--cov-context=test", f"--cov-config={settings}", "--cov-report="]
    pytest.main([*OPTIONS, *measuring], plugins=[results])
    told = {"seconds": results.seconds, "failed": sorted({*results.failed, *results.skipped})}
    (data / "tests.json").write_text(json.dumps(told))


def _lines(data: Path) -> dict[str, dict[str, list[str]]]:
    """Return the tests of each line; for fixtures and subprocesses, all tests of the file."""
    kept = importlib.import_module("coverage").CoverageData(str(data))
    kept.read()
    found: dict[str, dict[str, list[str]]] = {}
    for path in kept.measured_files():
        found["bssearch/" + path.rpartition("/bssearch/")[2]] = {
            str(line): sorted(
                {
                    context.removesuffix("|run") if context.endswith("|run") else context.partition("::")[0]
                    for context in contexts
                }
                - {""}
            )
            for line, contexts in kept.contexts_by_lineno(path).items()
        }
    return found


def tests_for(mutation: Mutation, coverage: Coverage) -> list[str]:
    """Return the tests that may catch a mutation, the likeliest first, within the budget."""
    passed = [test for test in coverage.seconds if test not in coverage.failed]
    files = {test.partition("::")[0] for test in passed}
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
    for test in sorted((test for test in passed if {test, test.partition("::")[0]} & found), key=rank):
        if spent + coverage.seconds[test] <= BUDGET_SECONDS:
            chosen.append(test)
            spent += coverage.seconds[test]
    return chosen


# Running -------------------------------------------------------------------------------------------------------------


class Chosen(Results):
    """Runs only the chosen tests, in their order, each with a time limit."""

    def __init__(self, tests: Sequence[str], seconds: dict[str, float]) -> None:
        super().__init__()
        self._order = {test: index for index, test in enumerate(tests)}
        self._known_seconds = seconds

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Keep the chosen tests, in their order."""
        items[:] = sorted((item for item in items if item.nodeid in self._order), key=lambda i: self._order[i.nodeid])

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        """End a test after ten times its known seconds and 20 s more: it hangs."""
        signal.signal(signal.SIGALRM, lambda signum, frame: pytest.fail("hangs"))
        signal.setitimer(signal.ITIMER_REAL, 20.0 + 10 * self._known_seconds.get(item.nodeid, 0.0))
        try:
            return (yield)
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0.0)


def killer(copy: Path, work: Path, tests: Sequence[str], coverage: Coverage) -> str | None:
    """Return the first test that fails in a copy of the tree, or None."""
    if not tests:
        return None
    told = work / "killer.json"
    told.unlink(missing_ok=True)

    def run() -> None:
        chosen = Chosen(tests, coverage.seconds)
        files = dict.fromkeys(test.partition("::")[0] for test in tests)
        code = pytest.main([*files, *OPTIONS, "-x"], plugins=[chosen])
        # If a conftest cannot be imported, no test is reported, but the exit code shows the failure.
        has_ended = code in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED)
        trouble = [*chosen.failed, *([] if has_ended else [f"exit code {int(code)}"]), None]
        told.write_text(json.dumps(trouble[0]))

    limit = 60.0 + 4 * sum(coverage.seconds[test] for test in tests)
    if not ended(fork(copy, work / "tests.log", run), limit):
        return "time limit"
    return json.loads(told.read_text()) if told.exists() else "the tests' process died"


def outcome(mutation: Mutation, copy: Path, work: Path, coverage: Coverage, index: int) -> str | None:
    """Return the test that kills a mutant, or None if the mutant survives."""
    tests = tests_for(mutation, coverage)
    file = copy / mutation.path
    source = file.read_bytes()
    stamp = file.stat().st_mtime
    try:
        file.write_bytes(mutation.applied(source))
        # Compiled files are known by time and size: no mutant may share its time with another.
        os.utime(file, (stamp + index + 1, stamp + index + 1))
        killed = killer(copy, work, tests, coverage)
        if killed is not None and coverage.seconds.get(killed, 0.0) > SLOW_SECONDS:
            again = killer(copy, work, [killed], coverage)
            killed = again or killer(copy, work, [t for t in tests if t != killed], coverage)
        return killed
    finally:
        file.write_bytes(source)
        os.utime(file, (stamp, stamp))


def fork(folder: Path, log: Path, work: Callable[[], None]) -> tuple[BaseProcess, str]:
    """Run a function in a new process, in a folder whose package is imported; return the process and its mark."""
    mark = f"{os.getpid()}-{time.monotonic_ns()}"
    process = multiprocessing.get_context("fork").Process(target=_inside, args=(folder, log, work, mark))
    process.start()
    return process, mark


def _inside(folder: Path, log: Path, work: Callable[[], None], mark: str) -> None:
    os.setsid()
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.chdir(folder)
    os.environ |= {MARK: mark, "PYTHONPATH": str(folder)}
    sys.path.insert(0, str(folder))
    for name in [name for name in sys.modules if name.partition(".")[0] in {"bssearch", "tests"}]:
        del sys.modules[name]  # this checkout's: the folder's are imported
    work()


def ended(forked: tuple[BaseProcess, str], limit: float | None) -> bool:
    """Wait for a forked process; return whether it ended in time. Afterwards kill all processes that it started."""
    process, mark = forked
    process.join(limit)
    in_time = process.exitcode is not None
    if not in_time:
        os.kill(process.pid or 0, signal.SIGINT)  # the fixtures clear up
        process.join(20.0)
        process.kill()
        process.join()
    for left in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if left.environ().get(MARK) == mark:
                left.kill()
    return in_time


def copy_of(tree: Path, place: Path) -> Path:
    """Copy a tree, without its history and its caches."""
    shutil.rmtree(place, ignore_errors=True)
    ignored = shutil.ignore_patterns(
        ".git", "__pycache__", ".mypy_cache", ".ruff_cache", ".pytest_cache", ".hypothesis"
    )
    shutil.copytree(tree, place, ignore=ignored, symlinks=True)
    return place


def fingerprint(tree: Path) -> str:
    """Return a hash of a tree's package and tests."""
    digest = hashlib.sha256()
    for room in ("bssearch", "tests"):
        for file in sorted((tree / room).rglob("*.py")):
            digest.update(file.relative_to(tree).as_posix().encode() + file.read_bytes())
    return digest.hexdigest()[:16]


def coverage_of(tree: Path, work: Path) -> Coverage:
    """Return the coverage of the default tests; measure it unless known."""
    kept = work / f"coverage-{fingerprint(tree)}.json"
    if not kept.exists():
        kept.write_text(json.dumps(asdict(measure_coverage(tree, work))))
    return Coverage(**json.loads(kept.read_text()))


def outcomes_in(file: Path) -> dict[int, dict[str, Any]]:
    """Return the finished mutants by their places among all."""
    told = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    return {one["index"]: one for one in told}


def table(mutations: Sequence[Mutation], outcomes: dict[int, dict[str, Any]]) -> str:
    """Return a line for each mutant, and the total."""
    text = io.StringIO()
    for index, mutation in enumerate(mutations):
        told = outcomes.get(index, {"killed_by": "not run", "seconds": 0.0})
        change = f"{mutation.before} -> {mutation.after}".replace("\n", " ")
        change = change if len(change) <= 90 else change[:42] + " … " + change[-45:]
        by = told["killed_by"] or "SURVIVED"
        print(f"{mutation.path}:{mutation.line}\t{mutation.kind}\t{change}\t{by}\t{told['seconds']} s", file=text)
    caught = sum(told["killed_by"] is not None for told in outcomes.values())
    print(f"caught {caught} of {len(mutations)}", file=text)
    return text.getvalue()


def main(
    tree: Path,
    seed: int = 0,
    count: int = 100,
    only: Annotated[list[str] | None, typer.Option(help="a file to mutate, as bssearch/records/noise_scale.py")] = None,
    work: Path = TEMPORARY / "bssearch-mutations",
) -> None:
    """Measure coverage, run the mutants, print the table."""
    tree, work = tree.resolve(), work.resolve()
    work.mkdir(parents=True, exist_ok=True)
    os.environ.update(dict.fromkeys(THREADS, "1"))
    for module in HEAVY.split():
        with contextlib.suppress(ImportError):
            importlib.import_module(module)
    places = all_mutations(tree, only or [])
    mutations = random.Random(seed).sample(places, min(count, len(places)))
    coverage = coverage_of(tree, work)
    total = sum(coverage.seconds.values())
    print(f"{len(places)} places; {len(coverage.seconds)} tests, {total:.0f} s under coverage", file=sys.stderr)
    print(f"left out, for they fail: {coverage.failed}", file=sys.stderr, flush=True)
    drawn = hashlib.sha256(repr(mutations).encode()).hexdigest()[:16]
    outcomes = work / f"outcomes-{fingerprint(tree)}-{drawn}.jsonl"
    copy = copy_of(tree, work / "tree")
    for index in range(len(outcomes_in(outcomes)), len(mutations)):
        began = time.monotonic()
        killed = outcome(mutations[index], copy, work, coverage, index)
        told = {"index": index, "killed_by": killed, "seconds": round(time.monotonic() - began, 1)}
        with outcomes.open("a") as lines:
            lines.write(json.dumps(told) + "\n")
    print(table(mutations, outcomes_in(outcomes)), end="")


if __name__ == "__main__":
    script(main, __doc__)
