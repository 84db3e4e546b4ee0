"""YAML written by others, read as plain data in bounded time and memory; imported only if there is a file of it.

Deep nesting ends a recursive parser. Aliases multiply: nine lists that each name the one
before nine times are 600 bytes and four hundred million values. And YAML 1.1 reads `1:0:0` as an integer of base 60,
which takes quadratic time.
"""

from __future__ import annotations

from typing import Any

import yaml

MAX_YAML_BYTES = 1 << 20
"""Most bytes of a YAML file: its parser takes ten seconds for this size."""
MAX_YAML_VALUES = 100_000
"""Most values in a YAML file, with each alias expanded."""
MAX_NUMBER_CHARACTERS = 100
"""Most characters of a number in YAML."""


def to_yaml(content: Any) -> bytes:
    """YAML with the keys in their given order."""
    return yaml.safe_dump(content, sort_keys=False).encode()


def yaml_of(content: bytes, loader: type[BoundedLoader] | None = None) -> Any:
    """The value of a YAML text, by default as SafeLoader reads it. Raises ValueError."""
    try:
        return yaml.load(content.decode("utf-8"), loader or BoundedLoader)
    except RecursionError:
        raise ValueError("it is nested too deep") from None
    except (yaml.YAMLError, AttributeError, KeyError, TypeError) as error:
        raise ValueError(str(error)) from error


class BoundedLoader(yaml.SafeLoader):
    """A safe loader of bounded time: it expands at most `MAX_YAML_VALUES` values. Raises YAMLError for more."""

    def __init__(self, text: str) -> None:
        if len(text) > MAX_YAML_BYTES:
            raise yaml.YAMLError(f"{len(text):,} characters, where a config has at most {MAX_YAML_BYTES:,}")
        super().__init__(text)

    def construct_document(self, node: yaml.Node) -> Any:
        """The value of a complete file."""
        _count(node, {})
        return super().construct_document(node)

    def construct_number(self, node: yaml.ScalarNode) -> int | float:
        """An integer or a float, of limited length."""
        if len(node.value) > MAX_NUMBER_CHARACTERS:
            line = node.start_mark.line + 1
            raise yaml.YAMLError(f"a number of {len(node.value)} characters, on line {line}")
        is_integer = node.tag.endswith(":int")
        return self.construct_yaml_int(node) if is_integer else self.construct_yaml_float(node)


for _tag in ("tag:yaml.org,2002:int", "tag:yaml.org,2002:float"):
    BoundedLoader.add_constructor(_tag, BoundedLoader.construct_number)


class UntaggedLoader(BoundedLoader):
    """Reads YAML with any tags; keeps the mapping, sequence or text of a tagged node, and ignores its tag."""

    def construct_untagged(self, _: str, node: yaml.Node) -> Any:
        """The content of a node, without its tag."""
        if isinstance(node, yaml.MappingNode):
            return self.construct_mapping(node, deep=True)
        if isinstance(node, yaml.SequenceNode):
            return self.construct_sequence(node, deep=True)
        return node.value


UntaggedLoader.add_multi_constructor("", UntaggedLoader.construct_untagged)


def _count(node: yaml.Node, counted: dict[yaml.Node, int | None]) -> int:
    """The number of values in a node, aliases expanded. Raises YAMLError for too many, and if it contains itself."""
    if node not in counted:
        counted[node] = None
        children: list[yaml.Node] = []
        if isinstance(node, yaml.MappingNode):
            children = [each for pair in node.value for each in pair]
        elif isinstance(node, yaml.SequenceNode):
            children = node.value
        counted[node] = 1 + sum(_count(child, counted) for child in children)
    known = counted[node]
    if known is None:
        raise yaml.YAMLError(f"the value on line {node.start_mark.line + 1} contains itself")
    if known > MAX_YAML_VALUES:
        raise yaml.YAMLError(f"its aliases expand to more than {MAX_YAML_VALUES:,} values")
    return known
