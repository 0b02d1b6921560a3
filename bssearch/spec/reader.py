"""Read specs from YAML, TOML or dicts."""

import math
import re
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import yaml
from pydantic import TypeAdapter, ValidationError
from yaml.composer import ComposerError
from yaml.constructor import ConstructorError

from bssearch import settings
from bssearch.errors import (
    DatabaseError,
    NotFoundError,
    SpecError,
    UnknownFieldError,
    UsageError,
    problem_in_words,
    require,
)
from bssearch.records import StudyRecord
from bssearch.records.text import nearest, plural
from bssearch.spec.model import StudySpec
from bssearch.spec.space import UNKNOWN_KEY

MOST_NODES = 20_000  # most values of a document, aliases expanded; large specs have a few hundred

MOST_LEVELS = 50

MOST_BITS = 1024  # bits of the largest double

LONGEST_SHOWN = 120

TAGS = frozenset(f"tag:yaml.org,2002:{name}" for name in ("map", "seq", "str", "int", "float", "bool", "null", "merge"))


class Loader(yaml.SafeLoader):
    """A `yaml.SafeLoader` that reads 1e-3 as a number and dates as strings, and rejects duplicate keys.

    Raises `yaml.MarkedYAMLError` for invalid YAML, more than `MOST_NODES` values or more than `MOST_LEVELS` levels.
    """

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self._nodes = self._levels = self._deepest = 0
        self._sizes: dict[int, tuple[int, int]] = {}

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        event: Any = self.peek_event()  # type: ignore[no-untyped-call]
        if self.check_event(yaml.AliasEvent):
            node = super().compose_node(parent, index)
            if id(node) not in self._sizes:
                problem = (
                    f"the value of anchor {event.anchor!r} contains its own alias *{event.anchor}; remove the alias"
                )
                raise ComposerError(None, None, problem, event.start_mark)
            self._count(*self._sizes[id(node)], event)
            return node
        before, deepest = self._nodes, self._deepest
        self._deepest = self._levels
        self._count(1, 1, event)
        self._levels += 1
        node = super().compose_node(parent, index)
        self._levels -= 1
        self._sizes[id(node)] = self._nodes - before, self._deepest - self._levels
        self._deepest = max(deepest, self._deepest)
        return node

    def _count(self, nodes: int, levels: int, event: Any) -> None:
        self._nodes += nodes
        self._deepest = max(self._deepest, self._levels + levels)
        if self._deepest > MOST_LEVELS:
            raise ComposerError(None, None, f"more than {MOST_LEVELS} nested levels", event.start_mark)
        if self._nodes > MOST_NODES:
            raise ComposerError(None, None, f"the document holds more than {MOST_NODES:,} values", event.start_mark)

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen = set()
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode):
                raise ConstructorError(None, None, "a key must be a string, not a list or a mapping", key.start_mark)
            if key.value in seen:
                raise ConstructorError(None, None, f"the key {shortened(key.value)} appears twice", key.start_mark)
            seen.add(key.value)
        return super().construct_mapping(node, deep)

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        if node.tag not in TAGS:
            raise ConstructorError(None, None, f"unknown tag {shortened(node.tag)}; remove the tag", node.start_mark)
        try:
            value = super().construct_object(node, deep)
        except (ValueError, OverflowError, TypeError):  # !!int x, and numbers of thousands of digits
            kind = node.tag.rpartition(":")[2]
            problem = (
                f"{shortened(node.value) if isinstance(node, yaml.ScalarNode) else 'the value'} is not of type {kind}"
            )
            raise ConstructorError(None, None, problem, node.start_mark) from None
        if isinstance(value, int) and value.bit_length() > MOST_BITS:
            problem = f"the number {shortened(node.value)} has more than {MOST_BITS} bits"
            raise ConstructorError(None, None, problem, node.start_mark)
        if isinstance(value, str) and not is_unicode(value):
            raise ConstructorError(None, None, f"{shortened(value)} is not valid Unicode", node.start_mark)
        return value


Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"^[-+]?(\d[\d_]*)(\.[\d_]*)?[eE][-+]?\d+$"),
    list("-+0123456789"),
)
Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag in TAGS]
    for first, resolvers in Loader.yaml_implicit_resolvers.items()
}


def read_yaml(text: str) -> tuple[Any, yaml.Node | None]:
    """The value and root node of a document, both None if empty. Raises `yaml.YAMLError`."""
    loader = Loader(text)
    try:
        node = loader.get_single_node()
        return (None if node is None else loader.construct_document(node)), node
    finally:
        loader.dispose()


def is_unicode(text: str) -> bool:
    """True if a string has no lone surrogates."""
    return not any("\ud800" <= one <= "\udfff" for one in text)


def shortened(value: object, most: int = LONGEST_SHOWN) -> str:
    text = "null" if value is None else repr(value)
    return text if len(text) <= most else f"{text[:most]}…"


# How users write each kind of `bssearch.spec.space.domains.domain_kind`.
WRITTEN = {"fixed": "a value", "range": "a mapping", "choices": "a list"}

Location = tuple[str | int, ...]
SUFFIXES = (".yaml", ".yml", ".toml")
MOST_BYTES = 2**20  # largest spec file; large specs have ten thousand bytes

MOST_NAMED = 10

IN_PYTHON = "given in Python"

EVERY_FIELD = "see every field with `bssearch schema spec`"

# Fields of these groups replace single fields of the preset's group; any other field replaces the preset's field.
GROUPS = frozenset({"space", "training", "confirm", "pruner", "sampler", "budget", "executor", "target"})


def find_spec(path_or_name: str | Path) -> Path:
    """Return a spec's file by path or shipped name. Raises `NotFoundError`, or `UsageError` for a folder."""
    path = Path(path_or_name)
    try:
        if path.is_file():
            return path
    except OSError as error:  # a name that is too long for a file
        raise NotFoundError(f"no spec {shortened(str(path))}: {error.strerror}; correct the path") from None
    shipped = settings.shipped_studies()
    if str(path_or_name) in shipped:
        return shipped[str(path_or_name)]
    inside = _specs_in(path if path.is_dir() else path.parent)
    if path.is_dir():
        raise UsageError(
            f"{str(path_or_name)!r} is a folder; a spec is a file ending in {', '.join(SUFFIXES)}",
            hint=f"choose from {', '.join(inside[:MOST_NAMED])}"
            if inside
            else "write a spec with `bssearch init NAME`",
        )
    advice = nearest(str(path), inside, "") or nearest(
        str(path_or_name),
        shipped,
        f"write a spec with `bssearch init NAME`, or choose from {', '.join(shipped)}",
        what="the shipped study ",
    )
    raise NotFoundError(f"no spec {str(path_or_name)!r}: neither a file nor a shipped study", hint=advice)


def _specs_in(folder: Path) -> list[str]:
    try:
        return sorted(str(one) for one in folder.iterdir() if one.suffix in SUFFIXES)
    except OSError:
        return []


def check_study_name(name: str) -> None:
    try:
        TypeAdapter(Annotated[str, StudySpec.model_fields["name"]]).validate_python(name)
    except ValidationError:
        raise UsageError(
            f"invalid study name {name!r}",
            hint="use letters, digits, '.', '_' and '-'; start with a letter or digit; use at most 100 characters",
        ) from None


def load_spec(source: str | Path | Mapping[str, Any], overrides: Sequence[str] = ()) -> StudySpec:
    """Read a spec from a file, a shipped study's name or a dict. An override has the form ``a.b=c``.

    ``preset: NAME`` fills missing fields from ``studies/presets``. Raises `NotFoundError`, `UsageError`
    for a folder, or `SpecError` with the file, line and field if known.

    Example: ``spec = bssearch.load_spec("study.yaml", ["budget.trials=40"])``
    """
    if isinstance(source, Mapping):
        _check_values(source, IN_PYTHON)
        return _spec_of(_copied(source), {}, IN_PYTHON, overrides)
    path = find_spec(source)
    data, lines = _read(path)
    require(data is not None, f"{path} is empty", hint=EVERY_FIELD, error=SpecError)
    require(
        isinstance(data, dict),
        f"{path}: a spec is a mapping of fields, not {type(data).__name__}",
        hint=EVERY_FIELD,
        error=SpecError,
    )
    return _spec_of(data, {location: f"{path}:{line}" for location, line in lines.items()}, str(path), overrides)


def _read(path: Path) -> tuple[Any, dict[Location, int]]:
    text = text_of(path, "spec")
    if path.suffix in {".yaml", ".yml"}:
        return lined_yaml(path, text)
    if path.suffix == ".toml":
        return _read_toml(path, text)
    raise SpecError(f"{path}: a spec's suffix must be .yaml, .yml or .toml, not {path.suffix!r}")


def text_of(path: Path, what: str, hint: str | None = None) -> str:
    """The text of a file of at most `MOST_BYTES`. Raises `SpecError`, or `NotFoundError` with ``hint``."""
    try:
        with path.open("rb") as file:
            content = file.read(MOST_BYTES + 1)
        require(
            len(content) <= MOST_BYTES,
            f"{path} has more than {MOST_BYTES:,} bytes, too many for a {what}; correct the path",
            error=SpecError,
        )
        return content.decode("utf-8")
    except FileNotFoundError:
        raise NotFoundError(f"no {what} {str(path)!r}", hint=hint) from None
    except (OSError, UnicodeDecodeError) as error:
        raise SpecError(
            f"{path} cannot be read: {error}", hint="save the file as UTF-8, or correct its permissions"
        ) from error


def _spec_of(data: dict[str, Any], origins: dict[Location, str], source: str, overrides: Sequence[str]) -> StudySpec:
    preset: str | None = None
    if "preset" in data:
        preset = str(data["preset"])
        data, of_preset = _with_preset(source, data)
        origins = {**of_preset, **origins}
    for override in overrides:
        location = _override(data, override)
        origins = {known: line for known, line in origins.items() if known[: len(location)] != location}
        for depth in range(1, len(location)):
            origins.setdefault(location[:depth], f"--set {override}")
        origins[location] = f"--set {override}"
    _check_values(data, source)
    return _validated(data, origins, source).from_preset(preset)


def _check_values(data: Any, source: str) -> None:
    left: list[tuple[Any, Location]] = [(data, ())]
    while left:
        value, location = left.pop()
        field = ".".join(map(str, location[:MOST_NAMED])) or "spec"
        require(
            len(location) <= MOST_LEVELS,
            f"{field} has more than {MOST_LEVELS} nested levels; nest fewer levels ({source})",
            error=SpecError,
        )
        if isinstance(value, Mapping):
            left += [
                (inner, (*location, key if isinstance(key, str) and is_unicode(key) else shortened(key)))
                for key, inner in value.items()
            ]
        elif isinstance(value, list | tuple):
            left += [(inner, (*location, index)) for index, inner in enumerate(value)]
        elif isinstance(value, int) and value.bit_length() > MOST_BITS:
            raise SpecError(f"{field} must be a number of at most {MOST_BITS} bits ({source})")
        elif isinstance(value, float) and not math.isfinite(value):
            raise SpecError(f"{field} = {value} must be a finite number ({source})")
        elif isinstance(value, str) and not is_unicode(value):
            raise SpecError(f"{field} = {shortened(value)} is not valid Unicode ({source})")


def _copied(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _copied(inner) for key, inner in value.items()}
    return [_copied(inner) for inner in value] if isinstance(value, list | tuple) else value


def checked(spec: StudySpec) -> StudySpec:
    """Validate a spec made in Python, because pydantic's ``model_copy`` does not validate."""
    return _validated(spec.model_dump(warnings=False), {}, IN_PYTHON).from_preset(spec.preset)


def _validated(data: Mapping[str, Any], origins: Mapping[Location, str], source: str) -> StudySpec:
    try:
        return StudySpec.model_validate(data)
    except ValidationError as error:
        problems = [_explain(problem, data, origins, source) for problem in error.errors()]
        kind = UnknownFieldError if any(one["type"] == UNKNOWN_KEY for one in error.errors()) else SpecError
        raise kind("\n".join(dict.fromkeys(problems)), hint=EVERY_FIELD) from None


def _with_preset(source: str, data: Mapping[str, Any]) -> tuple[dict[str, Any], dict[Location, str]]:
    known = settings.presets()
    name = str(data["preset"])
    if name not in known:
        advice = nearest(name, known, f"choose from {', '.join(known)}")
        raise SpecError(f"{source}: unknown preset {name!r}; {advice}")
    fragment, lines = lined_yaml(known[name], known[name].read_text(encoding="utf-8"))
    whole = _over(fragment, {field: value for field, value in data.items() if field != "preset"})
    return whole, {location: f"preset {name}" for location in lines if not _is_given(data, location)}


def file_schema() -> dict[str, Any]:
    schema = StudySpec.model_json_schema()
    schema["properties"]["preset"] = {"enum": sorted(settings.presets())}
    return schema


def _is_given(data: Any, location: Location) -> bool:
    for part in location:
        if not isinstance(data, Mapping) or part not in data:
            return False
        data = data[part]
        if part not in GROUPS or not isinstance(data, Mapping):
            return True
    return True


def _over(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    both = {
        field: _over(below[field], value)
        if field in GROUPS and isinstance(below.get(field), Mapping) and isinstance(value, Mapping)
        else value
        for field, value in above.items()
    }
    return {**below, **both}


def lined_yaml(path: Path, text: str) -> tuple[Any, dict[Location, int]]:
    """The value of a YAML file and the line of each field. Raises `SpecError` if invalid."""
    try:
        value, node = read_yaml(text)
        return value, dict(_yaml_lines(node, ()))
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 1
        hint = "indent with spaces, not with tabs" if "\\t" in (error.problem or "") else "correct this line"
        raise SpecError(f"{path}:{line}: unreadable YAML: {error.problem}", hint=hint) from None
    except yaml.YAMLError as error:
        raise SpecError(f"{path}: unreadable YAML: {' '.join(str(error).split())}", hint="correct the file") from None


def _yaml_lines(node: yaml.Node | None, location: Location) -> Iterable[tuple[Location, int]]:
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            yield (*location, key.value), key.start_mark.line + 1
            yield from _yaml_lines(value, (*location, key.value))
    elif isinstance(node, yaml.SequenceNode):
        for index, value in enumerate(node.value):
            yield (*location, index), value.start_mark.line + 1
            yield from _yaml_lines(value, (*location, index))


def _read_toml(path: Path, text: str) -> tuple[Any, dict[Location, int]]:
    try:
        return tomllib.loads(text), dict(_toml_lines(text))
    except RecursionError:
        raise SpecError(f"{path} has more than {MOST_LEVELS} nested levels; nest fewer levels") from None
    except ValueError as error:  # `TOMLDecodeError`, or a number of thousands of digits
        raise SpecError(f"{path}: not valid TOML: {error}", hint="correct the file") from None


def _toml_lines(text: str) -> Iterable[tuple[Location, int]]:
    # Keys in inline tables take the table's line.
    table: Location = ()
    for number, line in enumerate(text.splitlines(), start=1):
        if header := re.match(r"\s*\[+\s*([\w.\-]+)\s*\]+", line):
            table = tuple(header[1].split("."))
            yield table, number
        elif key := re.match(r"\s*([\w.\-]+)\s*=", line):
            yield (*table, *key[1].split(".")), number


def parse_value(text: str, origin: str) -> Any:
    """Parse a command-line value as in a spec, or raise `SpecError`."""
    try:
        require(
            len(text) <= MOST_BYTES and is_unicode(text),
            f"{shortened(origin)}: the value must be a Unicode string of at most {MOST_BYTES:,} characters",
            error=SpecError,
        )
        return read_yaml(text)[0]
    except yaml.YAMLError as error:
        problem = error.problem if isinstance(error, yaml.MarkedYAMLError) else None
        because = f": {problem}" if problem else ""
        raise SpecError(
            f"{shortened(origin)}: the value is not valid YAML{because}", hint="put the value in quotes"
        ) from None


def _override(data: dict[str, Any], override: str) -> Location:
    path, separator, text = override.partition("=")
    keys = path.strip().split(".")
    require(separator and all(keys), f"--set {override} must have the form field.name=value", error=SpecError)
    inner = data
    for depth, key in enumerate(keys[:-1]):
        inner = inner.setdefault(key, {})
        require(
            isinstance(inner, dict),
            f"{'.'.join(keys[: depth + 1])} is not a group of fields (--set {override})",
            hint=EVERY_FIELD,
            error=UnknownFieldError,
        )
    inner[keys[-1]] = parse_value(text, f"--set {override}")
    return tuple(keys)


def _explain(problem: Any, data: Any, origins: Mapping[Location, str], path: str) -> str:
    wanted = list(problem["loc"])
    if problem["type"] == UNKNOWN_KEY:
        wanted.append(problem["ctx"]["key"])
    location: Location = ()
    value = data
    for index, part in enumerate(wanted):
        if (isinstance(value, Mapping) and part in value) or (isinstance(value, list) and part in range(len(value))):
            value = value[part]
        elif index == len(wanted) - 1 and problem["type"] == "missing":
            value = None
        else:  # a tag of a pydantic union, not a field of the file
            continue
        location = (*location, part)
    field = ".".join(str(part) for part in location) or "spec"
    message = _said(problem)
    shown = ""
    if problem["type"] not in {UNKNOWN_KEY, "missing"} and isinstance(value, str | int | float | None):
        shown = f" = {shortened(value)}"
    while location and location not in origins:
        location = location[:-1]
    place = origins.get(location, path)
    if searched := re.fullmatch(r"(\S+) is searched but missing from the default; give the default a value", message):
        by = origins.get(("space", *searched[1].split(".")), "")
        if by.startswith("preset "):
            return f"{by} searches {searched[1]}: give default.{searched[1]} too ({place})"
    return f"{field}{shown}: {message[0].lower()}{message[1:]} ({place})"


def _said(problem: Any) -> str:
    if problem["type"] not in ("union_tag_invalid", "union_tag_not_found"):
        return problem_in_words(problem)
    context = problem["ctx"]
    expected = context.get("expected_tags", "").replace("'", "")
    if context["discriminator"] == "domain_kind()":
        return f"must be {' or '.join(WRITTEN[kind] for kind in expected.split(', '))}"
    field = context["discriminator"].strip("'")
    return f"{field} = {shortened(context['tag'])} must be one of {expected}" if expected else f"must have a {field}"


CORRECT_ROW = "correct the row with SQL, or delete the study"
NEWER = "upgrade bssearch, because a newer version may have written the spec"


def spec_of(study: StudyRecord) -> StudySpec:
    """Return a stored study's spec. Raises `DatabaseError` if the spec is invalid or another study's."""
    try:
        stored: dict[str, Any] = dict(study.spec)
        preset = stored.pop("preset", None)
        spec = StudySpec.model_validate(stored).from_preset(preset)
    except ValidationError as error:
        first, *more = error.errors()
        is_unknown = first["type"] == UNKNOWN_KEY
        place = ".".join(map(str, (*first["loc"], *([first["ctx"]["key"]] if is_unknown else ())))) or "spec"
        others = f" (and {plural(len(more), 'more problem')})" if more else ""
        raise DatabaseError(
            f"the spec stored with study {study.name!r} cannot be read: {place}: {problem_in_words(first)}{others}",
            hint=NEWER if is_unknown or place == "schema_version" else CORRECT_ROW,
        ) from None
    require(
        spec.name == study.name,
        f"the spec stored with study {study.name!r} belongs to {spec.name!r}",
        hint=CORRECT_ROW,
        error=DatabaseError,
    )
    return spec


def changed_fields(old: Any, new: Any, path: str = "") -> dict[str, tuple[object, object]]:
    """The dotted fields that differ between two JSON values, as (old, new) pairs."""
    if isinstance(old, Mapping) and isinstance(new, Mapping):
        return {
            field: both
            for key in sorted({*old, *new})
            for field, both in changed_fields(old.get(key), new.get(key), f"{path}.{key}" if path else key).items()
        }
    return {} if old == new else {path: (old, new)}
