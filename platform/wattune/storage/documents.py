"""JSON and YAML of files, read with bounds: whatever a file holds, reading it is quick and fails by `ValueError`."""

import json
import math
import re
from collections.abc import Mapping
from typing import Any, Final

import yaml

MOST_BYTES: Final = 64 * 2**20
"""Largest JSON file that is read. The manifest of a node with eight devices has some 50 kB."""

MOST_DEPTH: Final = 32
"""Most levels of a JSON or YAML file. A manifest has 6."""

MOST_YAML_BYTES: Final = 2**18
"""Largest YAML file that is read. A search space has some 2 kB, and YAML is read at about 200 kB a second."""

MOST_DIGITS: Final = 400
"""Most characters of a number in YAML: a float has at most 309 digits before its point."""

MOST_YAML_NODES: Final = 100_000
"""Most values of a YAML file with its aliases written out: a few lines of aliases to aliases stand for billions."""


def parse_json(content: bytes | str, *, any_depth: bool = False) -> Any:
    """Reads a JSON text. With `any_depth` the number of levels is left to the reader, who takes only plain values.

    Raises `ValueError`: it is not UTF-8, not JSON, too large or too deep.
    """
    from pydantic_core import from_json  # takes a sixth of a sampler's start, which reads no JSON

    if len(content) > MOST_BYTES:
        raise ValueError(f"{len(content):,} bytes, allowed: {MOST_BYTES:,}")
    try:
        data = from_json(content)  # faster than `json.loads`: a user waits for ten thousand results
    except ValueError as error:
        if "recursion" in str(error):
            raise ValueError(f"more than {MOST_DEPTH} levels") from None
        raise
    if not any_depth:
        check_depth(data)
    return data


def check_depth(data: Any) -> None:
    """Makes sure that plain data has at most `MOST_DEPTH` levels, so that whatever walks it ends.

    Raises `ValueError`: it has more.
    """
    level = [data]
    for _ in range(MOST_DEPTH + 1):
        level = [
            each
            for one in level
            if type(one) in (dict, list)
            for each in (one.values() if type(one) is dict else one)
            if type(each) in (dict, list)
        ]
        if not level:
            return
    raise ValueError(f"more than {MOST_DEPTH} levels")


def finite(data: Any) -> Any:
    """Returns plain data with null in the place of every number that JSON does not have: infinity and not-a-number."""
    if isinstance(data, float):
        return data if math.isfinite(data) else None
    if isinstance(data, Mapping):
        return {name: finite(value) for name, value in data.items()}
    return [finite(value) for value in data] if isinstance(data, list | tuple) else data


def json_text(data: Any, **layout: Any) -> str:
    """Writes plain data as JSON, with the `layout` of `json.dumps`. A number that JSON does not have is null."""
    try:
        return json.dumps(data, allow_nan=False, **layout)
    except ValueError:
        return json.dumps(finite(data), allow_nan=False, **layout)


def parse_yaml(text: str) -> Any:
    """Reads a YAML text. Its size with all aliases written out is known before anything is made of it.

    Raises `ValueError`: it is not YAML, too large or too deep, or has a value that does not exist.
    """
    return yaml_tree(text)[1]


def yaml_tree(text: str) -> tuple[yaml.Node | None, Any]:
    """Reads a YAML text as its tree of nodes, which knows lines and repeated keys, and as plain data.

    Raises `ValueError`: as of `parse_yaml`.
    """
    if len(text) > MOST_YAML_BYTES:
        raise ValueError(f"{len(text):,} characters, allowed: {MOST_YAML_BYTES:,}")
    try:
        loader = yaml.SafeLoader(text)
        root = loader.get_single_node()
        if root is None:
            return None, None
        _check_size(root)
        data = loader.construct_document(root)
        # Keys that `<<` merges are in the tree from then on, where they would look repeated: it is made anew then.
        return yaml.compose(text, Loader=yaml.SafeLoader) if "<<" in text else root, data
    except RecursionError:
        raise ValueError(f"more than {MOST_DEPTH} levels") from None
    except yaml.YAMLError as error:
        raise ValueError(" ".join(str(error).split())) from error
    except (TypeError, KeyError, AttributeError, ArithmeticError, LookupError) as error:
        # PyYAML's constructors raise what Python does on a date, number or tag that cannot exist.
        raise ValueError(f"a value that does not exist ({type(error).__name__}: {error})") from error


def _check_size(root: yaml.Node) -> None:
    """Makes sure that a tree with its aliases written out is neither too large nor too deep, nor holds itself."""
    sizes: dict[int, int] = {}
    begun: set[int] = set()

    def size_of(node: yaml.Node, depth: int) -> int:
        if depth > MOST_DEPTH:
            raise ValueError(f"more than {MOST_DEPTH} levels")
        if isinstance(node, yaml.ScalarNode):
            if len(node.value) > MOST_DIGITS and not node.tag.endswith(":str"):
                raise ValueError(f"a number of {len(node.value):,} characters, allowed: {MOST_DIGITS}")
            return 1
        if id(node) not in sizes:
            if id(node) in begun:
                raise ValueError("a value that holds itself")
            begun.add(id(node))
            inside = (
                node.value if isinstance(node, yaml.SequenceNode) else [each for pair in node.value for each in pair]
            )
            sizes[id(node)] = 1 + sum(size_of(each, depth + 1) for each in inside)
            if sizes[id(node)] > MOST_YAML_NODES:
                raise ValueError(f"more than {MOST_YAML_NODES:,} values with all aliases written out")
        return sizes[id(node)]

    size_of(root, 0)


class _Dumper(yaml.SafeDumper):
    """Quotes every text that a reader of YAML 1.1 or 1.2 takes for something else."""


def _quoted(dumper: _Dumper, text: str) -> yaml.ScalarNode:
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="'" if _AMBIGUOUS.fullmatch(text) else None)


_AMBIGUOUS: Final = re.compile(r"[yYnN]|[-+]?\.?\d[\d.]*([eE][-+]?\d+)?|0o[0-7]+|0x[0-9a-fA-F]+")
"""Texts that PyYAML, which reads YAML 1.1 in part, leaves unquoted, and that others read as a number or truth value."""

_Dumper.add_representer(str, _quoted)


def yaml_line(value: object) -> str:
    """Writes a value in one line of YAML."""
    text = yaml.dump(value, Dumper=_Dumper, default_flow_style=True, sort_keys=False, width=10**6).strip()
    return text.removesuffix("...").strip()
