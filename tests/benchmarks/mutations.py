"""How many of a hundred seeded mutations of the package the default tests catch.

Run as ``python tests/benchmarks/mutations.py TREE [--seed 0] [--count 100] [--jobs 1] [--only FILE]``, with
``coverage`` installed beside the tests' own packages. TREE is any checkout; it is copied, never touched. First its
default tests run once under coverage, subprocesses too, which tells what test executes which line and how long each
takes (kept in ``--work`` and used again for the same tree). Then each mutant runs the tests that execute the mutated
line, quickest first, until one fails; a line that runs at import time, or in no test, gets the tests of its file. What
has been run is kept in ``--work``, too: the same command goes on where it was cut off.

Mutations: a comparison weakened or turned round, + for −, × for ÷, ``and`` for ``or``, a ``not`` dropped, a number
changed (n + 1, 2 x), a returned value replaced by None, an ``if`` negated, a call statement deleted. Places are drawn
from all of ``bssearch/**/*.py`` but templates and the guide, in the order of path and position.
"""

from __future__ import annotations

if not __package__:
    __import__("from_clone")

import ast
import contextlib
import hashlib
import importlib
import io
import json
import os
import random
import shutil
import signal
import sys
import time
import traceback
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path, PurePosixPath
from types import FrameType
from typing import Annotated, Any

import psutil
import pytest
import typer

from tests.benchmarks.harness import TEMPORARY, script

THREADS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
"""Set to 1: threads that wait for each other make small models slow where others compute beside them."""

BUDGET_SECONDS = 60.0
"""Seconds of tests a mutant gets at most, as measured under coverage: a choice that keeps a hundred under an hour."""

SLOW_SECONDS = 0.25
"""Tests that take longer come after all that take less, and must fail twice: those that wait for others may flake."""

LEFT_OUT = ("templates", "guide")
HEAVY = (
    "torch numpy scipy.stats scipy.optimize sklearn.datasets pandas optuna sqlalchemy alembic.command pydantic typer "
    "rich.table yaml tenacity psutil jinja2 psycopg jsonschema threadpoolctl"
)
"""What is imported once, before each mutant's process forks off: third parties alone, nothing of the tree."""

MARK = "BSSEARCH_MUTATIONS"
"""The environment variable by which the processes a mutant leaves behind are known, and ended."""

COVERED_TEST = "BSSEARCH_MUTATIONS_TEST"
"""The environment variable that names the running test to subprocesses under coverage."""

SITE = """
import os
if os.environ.get("BSSEARCH_MUTATIONS_TEST") and os.environ.get("BSSEARCH_MUTATIONS_DATA"):
    import atexit, coverage
    measured = coverage.Coverage(
        data_file=os.environ["BSSEARCH_MUTATIONS_DATA"], data_suffix=True, config_file=False, messages=False,
        source=[os.environ["BSSEARCH_MUTATIONS_SOURCE"]], context="child|" + os.environ["BSSEARCH_MUTATIONS_TEST"],
    )
    measured.set_option("run:sigterm", True)
    measured._warn_no_data = measured._warn_unimported_source = False
    measured.start()
    atexit.register(lambda: (measured.stop(), measured.save()))
"""


@dataclass(frozen=True)
class Mutation:
    """One change of the source: the text between two offsets (in bytes) of a file gives way to another."""

    path: str
    line: int
    last_line: int
    start: int
    end: int
    kind: str
    before: str
    after: str

    def applied(self, source: bytes) -> bytes:
        """Return the file's content with the change made."""
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
        if isinstance(node, ast.Return) and node.value and not _is_none(node.value):
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
    """Yield what runs, each with its statement: no annotation, no f-string (its positions are wrong before 3.12)."""
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


def _is_none(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and node.value is None


def _is_never_run(node: ast.AST) -> bool:
    """Return whether a node is an ``if`` for type checkers, or for running the file as a script."""
    return isinstance(node, ast.If) and ast.unparse(node.test) in ("TYPE_CHECKING", "__name__ == '__main__'")


# Which tests run a line ----------------------------------------------------------------------------------------------


@dataclass
class Coverage:
    """What a run of the default tests has shown."""

    seconds: dict[str, float] = field(default_factory=dict)
    """Seconds of each test that passed, by node id, its set-up included."""
    failed: list[str] = field(default_factory=list)
    lines: dict[str, dict[str, list[str]]] = field(default_factory=dict)
    """By file and line, the tests that run it, or the test files that do in a fixture or a subprocess."""
    wall_seconds: float = 0.0


class Recorder:
    """A pytest plugin that tells coverage which test runs, and keeps what each took."""

    def __init__(self, measured: Any) -> None:
        self._measured = measured
        self.seconds: dict[str, float] = defaultdict(float)
        self.failed: set[str] = set()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> Iterator[None]:
        """Count what fixtures run for the whole file: another of its tests may be the one that looks."""
        os.environ[COVERED_TEST] = item.nodeid
        self._measured.switch_context(f"file|{item.nodeid}")
        return (yield)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Iterator[None]:
        """Count what the test itself runs for it alone."""
        self._measured.switch_context(f"test|{item.nodeid}")
        return (yield)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_teardown(self, item: pytest.Item) -> Iterator[None]:
        """Count what ends a fixture for the whole file."""
        self._measured.switch_context(f"file|{item.nodeid}")
        return (yield)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Keep seconds and failures."""
        if report.when != "teardown":
            self.seconds[report.nodeid] += report.duration
        if report.outcome != "passed":
            self.failed.add(report.nodeid)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """Keep the files that cannot be collected."""
        if report.failed:
            self.failed.add(report.nodeid)


def measure_coverage(tree: Path, work: Path, jobs: int) -> Coverage:
    """Run the default tests of a tree under coverage, in as many processes as there are jobs."""
    began = time.monotonic()
    data = work / "data"
    shutil.rmtree(data, ignore_errors=True)
    data.mkdir(parents=True)
    site = work / "site"
    site.mkdir(exist_ok=True)
    (site / "sitecustomize.py").write_text(SITE)
    files = sorted(file.relative_to(tree).as_posix() for file in (tree / "tests").rglob("test_*.py"))
    forked = []
    for job in range(jobs):
        copy = copy_of(tree, work / f"tree{job}")
        measuring = partial(_measure, copy, data, site, files[job::jobs], job)
        forked.append(fork(copy, work / f"coverage{job}.log", measuring))
    for process in forked:
        ended(process, None)
    result = Coverage(wall_seconds=time.monotonic() - began)
    for job in range(jobs):
        told = json.loads((data / f"tests{job}.json").read_text())
        result.seconds.update(told["seconds"])
        result.failed += told["failed"]
    _read_lines(result, data)
    return result


def _measure(copy: Path, data: Path, site: Path, files: Sequence[str], job: int) -> int:
    """Run test files under coverage."""
    coverage = importlib.import_module("coverage")
    os.environ["BSSEARCH_MUTATIONS_DATA"] = str(data / f"child{job}")
    os.environ["BSSEARCH_MUTATIONS_SOURCE"] = str(copy / "bssearch")
    os.environ["PYTHONPATH"] = f"{copy}{os.pathsep}{site}"
    os.environ[COVERED_TEST] = ""
    measured = coverage.Coverage(data_file=str(data / f"own{job}"), config_file=False, source=[str(copy / "bssearch")])
    recorder = Recorder(measured)
    measured.start()
    pytest.main([*files, *OPTIONS], plugins=[recorder])
    measured.stop()
    measured.save()
    told = {"seconds": recorder.seconds, "failed": sorted(recorder.failed)}
    (data / f"tests{job}.json").write_text(json.dumps(told))
    return 0


OPTIONS = ["-n", "0", "-q", "-p", "no:cacheprovider", "--disable-warnings"]


def _read_lines(result: Coverage, data: Path) -> None:
    """Fill in which tests run which line, from all of coverage's files."""
    coverage = importlib.import_module("coverage")
    lines: dict[str, dict[str, set[str]]] = defaultdict(lambda: defaultdict(set))
    for file in sorted(data.iterdir()):
        if file.suffix == ".json":
            continue
        kept = coverage.CoverageData(str(file))
        try:
            kept.read()
        except coverage.exceptions.CoverageException:  # of a process that was killed while it wrote
            continue
        for path in kept.measured_files():
            name = "bssearch/" + path.rpartition("/bssearch/")[2]
            for line, contexts in kept.contexts_by_lineno(path).items():
                for context in contexts:
                    how, _, test = context.partition("|")
                    if test:
                        lines[name][str(line)].add(test if how == "test" else test.partition("::")[0])
    result.lines = {name: {line: sorted(tests) for line, tests in by.items()} for name, by in sorted(lines.items())}


def tests_for(mutation: Mutation, coverage: Coverage) -> list[str]:
    """Return the tests that may catch a mutation, the likeliest first, within the budget."""
    by_file = defaultdict(list)
    for test in coverage.seconds:
        if test not in coverage.failed:
            by_file[test.partition("::")[0]].append(test)
    lines = coverage.lines.get(mutation.path, {})
    found = {test for line in range(mutation.line, mutation.last_line + 1) for test in lines.get(str(line), ())}
    own = {file for file in by_file if _is_test_of(file, mutation.path)}
    if not found:  # it runs at import time, or in no test at all
        found = {test.partition("::")[0] for tests in lines.values() for test in tests}
        found |= {
            file for file in by_file if PurePosixPath(file).parent.name == PurePosixPath(mutation.path).parent.name
        }
    found |= own
    named = {test for name in found for test in (by_file.get(name, []) if "::" not in name else [name])}
    room = PurePosixPath(mutation.path).parent.name

    def rank(test: str) -> tuple[bool, bool, bool, str, float]:
        file = test.partition("::")[0]
        is_slow = coverage.seconds[test] > SLOW_SECONDS
        return is_slow, file not in own, PurePosixPath(file).parent.name != room, file, coverage.seconds[test]

    chosen, spent = [], 0.0
    for test in sorted((test for test in named if test in coverage.seconds and test not in coverage.failed), key=rank):
        if spent + coverage.seconds[test] <= BUDGET_SECONDS:
            chosen.append(test)
            spent += coverage.seconds[test]
    return chosen


def _is_test_of(file: str, path: str) -> bool:
    """Return whether a test file is named after a module."""
    return PurePosixPath(file).name == f"test_{PurePosixPath(path).name}"


# Running -------------------------------------------------------------------------------------------------------------


class Chosen:
    """A pytest plugin that runs the chosen tests in their order, each for so long at most, and keeps what fails."""

    def __init__(self, tests: Sequence[str], seconds: dict[str, float]) -> None:
        self._order = {test: index for index, test in enumerate(tests)}
        self._seconds = seconds
        self.failed: str | None = None

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Leave the chosen alone, in their order."""
        items[:] = sorted((item for item in items if item.nodeid in self._order), key=lambda i: self._order[i.nodeid])

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        """End a test that takes ten times what it took, and twenty seconds: it hangs."""

        def hangs(signum: int, frame: FrameType | None) -> None:
            pytest.fail("hangs")

        signal.signal(signal.SIGALRM, hangs)
        signal.setitimer(signal.ITIMER_REAL, 20.0 + 10 * self._seconds.get(item.nodeid, 0.0))
        try:
            return (yield)
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0.0)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Keep the first failure."""
        if report.failed and self.failed is None:
            self.failed = report.nodeid

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """Keep a file that cannot be imported."""
        if report.failed and self.failed is None:
            self.failed = f"{report.nodeid} (import)"


def killer(copy: Path, work: Path, tests: Sequence[str], coverage: Coverage) -> str | None:
    """Return the first test that fails in a copy of the tree, or None."""
    if not tests:
        return None
    told = work / "killer.json"
    told.unlink(missing_ok=True)

    def run() -> int:
        chosen = Chosen(tests, coverage.seconds)
        files = dict.fromkeys(test.partition("::")[0] for test in tests)
        code = pytest.main([*files, *OPTIONS, "-x"], plugins=[chosen])
        # Where already a conftest cannot be imported no test is reported on: the exit code alone tells.
        has_ended = code in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED)
        told.write_text(json.dumps(chosen.failed or (None if has_ended else f"exit code {int(code)}")))
        return 0

    limit = 60.0 + 4 * sum(coverage.seconds[test] for test in tests)
    if not ended(fork(copy, work / "tests.log", run), limit):
        return "time limit"
    return json.loads(told.read_text()) if told.exists() else "the tests' process died"


def outcome(mutation: Mutation, copy: Path, work: Path, coverage: Coverage, index: int) -> str | None:
    """Return what kills a mutant, or None where it survives."""
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


def fork(folder: Path, log: Path, work: Callable[[], int]) -> tuple[int, str]:
    """Run a function in a process of its own, in a folder whose package is the one imported; return its id and mark."""
    mark = f"{os.getpid()}-{time.monotonic_ns()}"
    pid = os.fork()
    if pid:
        return pid, mark
    code = 1
    try:
        os.setsid()
        output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(output, 1)
        os.dup2(output, 2)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.chdir(folder)
        os.environ[MARK] = mark
        os.environ["PYTHONPATH"] = str(folder)
        sys.path.insert(0, str(folder))
        for name in [*sys.modules]:
            if name.partition(".")[0] in {"bssearch", "tests"}:
                del sys.modules[name]  # those of this checkout: the folder's own are imported
        code = work()
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def ended(process: tuple[int, str], limit: float | None) -> bool:
    """Wait for a forked process; return whether it ended in time. It is ended otherwise, with all it has started."""
    pid, mark = process
    deadline = None if limit is None else time.monotonic() + limit
    in_time = True
    while os.waitpid(pid, os.WNOHANG)[0] == 0:
        if deadline is not None and time.monotonic() > deadline:
            if not in_time:
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
                break
            os.kill(pid, signal.SIGINT)  # so that the fixtures clear up
            in_time, deadline = False, time.monotonic() + 20.0
        time.sleep(0.02)
    for left in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if f"{MARK}={mark}" in [f"{name}={value}" for name, value in left.environ().items()]:
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


def coverage_of(tree: Path, work: Path, jobs: int) -> Coverage:
    """Return what the default tests run, measured unless it is known."""
    kept = work / f"coverage-{fingerprint(tree)}.json"
    if not kept.exists():
        kept.write_text(json.dumps(asdict(measure_coverage(tree, work, jobs))))
    return Coverage(**json.loads(kept.read_text()))


def outcomes_in(file: Path) -> dict[int, dict[str, Any]]:
    """Return the mutants that have been run, by their places among all."""
    told = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    return {one["index"]: one for one in told}


def share(mutants: Sequence[tuple[int, Mutation]], own: Path, tree: Path, coverage: Coverage, outcomes: Path) -> int:
    """Run mutants, each with its place among all, and write a line for each as it is done."""
    own.mkdir(exist_ok=True)
    copy = copy_of(tree, own / "tree")
    with outcomes.open("a") as lines:
        for index, mutation in mutants:
            began = time.monotonic()
            killed = outcome(mutation, copy, own, coverage, index)
            told = {"index": index, "killed_by": killed, "seconds": round(time.monotonic() - began, 1)}
            lines.write(json.dumps(told) + "\n")
            lines.flush()
    return 0


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
    jobs: int = 1,
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
    coverage = coverage_of(tree, work, jobs)
    total = sum(coverage.seconds.values())
    print(f"{len(places)} places; {len(coverage.seconds)} tests, {total:.0f} s under coverage", file=sys.stderr)
    print(f"left out, for they fail: {coverage.failed}", file=sys.stderr, flush=True)
    drawn = hashlib.sha256(repr(mutations).encode()).hexdigest()[:16]
    outcomes = work / f"outcomes-{fingerprint(tree)}-{drawn}.jsonl"
    known = outcomes_in(outcomes)
    left = [(index, mutation) for index, mutation in enumerate(mutations) if index not in known]
    forked = []
    for job in range(jobs):
        working = partial(share, left[job::jobs], work / f"job{job}", tree, coverage, outcomes)
        forked.append(fork(work, work / f"job{job}.log", working))
    for process in forked:
        ended(process, None)
    print(table(mutations, outcomes_in(outcomes)), end="")


if __name__ == "__main__":
    script(main, __doc__)
