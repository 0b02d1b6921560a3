"""YAML restricted to values of bounded size."""

from __future__ import annotations

import re
from typing import Any

import yaml
from yaml.composer import ComposerError
from yaml.constructor import ConstructorError

MOST_NODES = 20_000  # most values of a document, aliases expanded; large specs have a few hundred

MOST_LEVELS = 50

MOST_BITS = 1024  # bits of the largest double

LONGEST_SHOWN = 120

TAGS = frozenset(f"tag:yaml.org,2002:{name}" for name in ("map", "seq", "str", "int", "float", "bool", "null", "merge"))


class Loader(yaml.SafeLoader):
    """YAML 1.1 as `yaml.SafeLoader` reads it, but 1e-3 is a number, a date is text, and a duplicate key is an error.

    So are non-scalar keys, other tags, recursive aliases, invalid Unicode, and exceeding `MOST_NODES` or `MOST_LEVELS`.
    All are `yaml.MarkedYAMLError`.
    """

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self._nodes = self._levels = 0
        self._deepest = 0
        self._sizes: dict[int, tuple[int, int]] = {}

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        """Count nodes."""
        event: Any = self.peek_event()  # type: ignore[no-untyped-call]
        if self.check_event(yaml.AliasEvent):
            node = super().compose_node(parent, index)
            if id(node) not in self._sizes:
                raise ComposerError(None, None, f"the alias {event.anchor!r} leads into itself", event.start_mark)
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
            raise ComposerError(None, None, f"more than {MOST_LEVELS} levels lie in each other", event.start_mark)
        if self._nodes > MOST_NODES:
            raise ComposerError(None, None, f"it holds more than {MOST_NODES:,} values", event.start_mark)

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        """Allow only distinct scalar keys."""
        seen = set()
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode):
                raise ConstructorError(None, None, "a key must be a text, not a list or a mapping", key.start_mark)
            if key.value in seen:
                raise ConstructorError(None, None, f"the key {shortened(key.value)} appears twice", key.start_mark)
            seen.add(key.value)
        return super().construct_mapping(node, deep)

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        """Allow only types in `TAGS`."""
        if node.tag not in TAGS:
            raise ConstructorError(None, None, f"the tag {shortened(node.tag)} is not known here", node.start_mark)
        try:
            value = super().construct_object(node, deep)
        except (ValueError, OverflowError, TypeError):  # !!int x, and numbers of thousands of digits
            kind = node.tag.rpartition(":")[2]
            problem = (
                f"{shortened(node.value)} is no {kind}" if isinstance(node, yaml.ScalarNode) else f"it is no {kind}"
            )
            raise ConstructorError(None, None, problem, node.start_mark) from None
        if isinstance(value, int) and value.bit_length() > MOST_BITS:
            raise ConstructorError(None, None, f"a number of more than {MOST_BITS} bits", node.start_mark)
        if isinstance(value, str) and not is_unicode(value):
            raise ConstructorError(None, None, f"{shortened(value)} is no Unicode text", node.start_mark)
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
    """Document's value and node (None if empty); raises `yaml.YAMLError`."""
    loader = Loader(text)
    try:
        node = loader.get_single_node()
        return (None if node is None else loader.construct_document(node)), node
    finally:
        loader.dispose()


def is_unicode(text: str) -> bool:
    """True if a text has no lone surrogates."""
    return not any("\ud800" <= one <= "\udfff" for one in text)


def shortened(value: object) -> str:
    """Value shortened for an error."""
    text = ascii(value) if isinstance(value, str) and not is_unicode(value) else repr(value)
    return text if len(text) <= LONGEST_SHOWN else f"{text[:LONGEST_SHOWN]}…"
