"""A sandbox for chat templates, which come from elsewhere: text in, text out, within bounds of size and steps.

A template reaches its variables, some methods of text and dictionaries and some filters, and nothing else: no other
attributes, files, modules, clocks or chance. Every loop, call and piece of text is counted, so no template goes on for
ever or fills the memory.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from functools import wraps
from typing import Any, ClassVar

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.filters import FILTERS, make_attrgetter
from jinja2.parser import Parser
from jinja2.runtime import LoopContext
from jinja2.sandbox import ImmutableSandboxedEnvironment, SecurityError
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer

MAX_CHARACTERS = 1 << 26
"""Of any text that a template makes; the longest documents have about as many."""
MAX_WRITTEN = 2 * MAX_CHARACTERS
"""In one rendering, also into blocks and macros, of which others are then made."""
MAX_STEPS = 1_000_000
"""Rounds of loops and calls for one conversation; a message takes about ten."""
MAX_INDENT = 16
TEXT_METHODS = frozenset(
    {"capitalize", "count", "endswith", "find", "isalnum", "isalpha", "isdigit", "islower", "isspace", "isupper"}
    | {"join", "lower", "lstrip", "partition", "removeprefix", "removesuffix", "replace", "rfind", "rpartition"}
    | {"rsplit", "rstrip", "split", "splitlines", "startswith", "strip", "title", "upper"}
)
DICTIONARY_METHODS = frozenset({"get", "items", "keys", "values"})
USED_FILTERS = frozenset(
    {"abs", "capitalize", "count", "d", "default", "dictsort", "e", "escape", "first", "float", "int", "items"}
    | {"last", "length", "list", "lower", "map", "max", "min", "reject", "rejectattr", "reverse", "round", "safe"}
    | {"select", "selectattr", "sort", "string", "title", "trim", "unique", "upper"}
)
TEXT_FILTERS = frozenset({"capitalize", "e", "escape", "lower", "string", "title", "trim", "upper"})
"""Filters that make a text of whatever they are given."""
COUNTED, CONCATENATED, WEIGHED, DATA = "_counted", "_concatenated", "_weighed", "_data"


class Refused(jinja2.TemplateError):
    """The template itself refuses a conversation, by raise_exception."""


class Sandbox(ImmutableSandboxedEnvironment):
    """The environment in which templates are compiled and rendered, with the settings of `transformers`."""

    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols], finalize=self._written
        )
        self.generation_marks = ("", "")
        """What is put before and after the text of a generation block."""
        self.steps = self.characters = 0
        """Rounds and calls, and characters that were written, also into blocks, since a rendering began."""
        self.filters = {name: FILTERS[name] for name in USED_FILTERS} | {
            "tojson": _tojson,
            "replace": _replace,
            "join": _join,
            COUNTED: self._counted,
            CONCATENATED: _concatenated,
            WEIGHED: _weighed,
            DATA: _data,
        }
        self.filters |= {name: _of_bounded(FILTERS[name]) for name in TEXT_FILTERS}
        self.globals = {
            "range": self.globals["range"],
            "dict": _dictionary,
            "namespace": _Names,
            "raise_exception": _raise_exception,
        }

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        return _Bounds().visit(super()._parse(source, name, filename))

    def wrap_str_format(self, value: Any) -> None:
        """Text is not formatted: a width of a thousand million is written in ten characters."""

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        if isinstance(obj, str):
            return attr in TEXT_METHODS
        if isinstance(obj, dict):
            return attr in DICTIONARY_METHODS
        return isinstance(obj, LoopContext | Namespace) and super().is_safe_attribute(obj, attr, value)

    def call(self, context: Any, obj: Any, *args: Any, **kwargs: Any) -> Any:
        self.step()
        owner, name = getattr(obj, "__self__", None), getattr(obj, "__name__", None)
        if isinstance(owner, str) and name == "replace":
            return _replace(owner, *args, **kwargs)
        if isinstance(owner, str) and name == "join":
            args = (_within_bounds(args[0], len(owner)),)
        return super().call(context, obj, *args, **kwargs)

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        sized = [value for value in (left, right) if isinstance(value, str | list | tuple)]
        if operator == "%" and sized:
            raise SecurityError("text is not formatted with %")
        if operator == "*" and sized:
            times = right if sized[0] is left else left
            _check_size(_weight(sized[0]) * max(times, 0))
            if not isinstance(sized[0], str) and len(sized[0]) * times > MAX_STEPS:
                raise SecurityError(f"the template makes a list of more than {MAX_STEPS:,} entries")
        elif operator == "+" and len(sized) == 2:
            _check_size(_weight(left) + _weight(right))
        elif operator in "**" and any(abs(value) > 1 << 64 for value in (left, right)):
            raise SecurityError("a number is too large")
        if operator == "**" and right > 64:
            raise SecurityError("a power is too high")
        return super().call_binop(context, operator, left, right)

    def step(self) -> None:
        self.steps += 1
        if self.steps > MAX_STEPS:
            raise SecurityError(f"the template takes more than {MAX_STEPS:,} steps")

    def _written(self, value: Any) -> Any:
        """A value that the template writes."""
        value = _weighed(value)
        self.characters += len(value) if isinstance(value, str) else 0
        if self.characters > MAX_WRITTEN:
            raise SecurityError(f"the template writes more than {MAX_WRITTEN:,} characters")
        return value

    def _counted(self, iterable: Iterable[Any]) -> list[Any]:
        """What a loop goes through, of which every round is a step."""
        if isinstance(iterable, jinja2.Undefined):
            return []
        items = list(iterable)
        for _ in items:
            self.step()
        return items


def rendered(template: jinja2.Template, variables: Mapping[str, Any], marks: tuple[str, str]) -> str:
    """What a template of the sandbox makes of variables, with marks before and after each generation block.

    Raises:
        Refused: the template says so.
        jinja2.TemplateError, or what Python raises for a mistake: it fails, or leaves the bounds.
    """
    sandbox = template.environment
    sandbox.generation_marks, sandbox.steps, sandbox.characters = marks, 0, 0  # type: ignore[attr-defined]
    pieces, size = [], 0
    for piece in template.generate(**variables):
        size += len(piece)
        _check_size(size)
        pieces.append(piece)
    return "".join(pieces)


class Generation(Extension):
    """`{% generation %}…{% endgeneration %}`: the text in it is the assistant's, which is trained on."""

    tags: ClassVar[set[str]] = {"generation"}

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_marked"), [], [], body).set_lineno(line)

    def _marked(self, caller: Callable[[], str]) -> str:
        before, after = self.environment.generation_marks  # type: ignore[attr-defined]
        return f"{before}{caller()}{after}"


class _Names(Namespace):
    """Variables that outlive a loop; none of Python's own names."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        self, given = args[0], dict(*args[1:], **kwargs)
        for name, value in given.items():
            _Names._check(name, value)
        Namespace.__init__(self, given)

    def __setitem__(self, name: str, value: Any) -> None:
        _Names._check(name, value)
        Namespace.__setitem__(self, name, value)

    @staticmethod
    def _check(name: Any, value: Any) -> None:
        if not isinstance(name, str) or name.startswith("_"):
            raise SecurityError(f"a namespace has no {name!r}")
        if isinstance(value, Namespace):
            raise SecurityError("a namespace is put into another one")


class _Bounds(NodeTransformer):
    """Lets loops be counted, and lists and `~` be bounded."""

    def visit_For(self, node: nodes.For) -> nodes.Node:
        self.generic_visit(node)
        node.iter = _filtered(node.iter, COUNTED)
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return _filtered(nodes.List(node.nodes, lineno=node.lineno), CONCATENATED)

    def visit_TemplateData(self, node: nodes.TemplateData) -> nodes.Node:
        """Text of the template itself is written like all other."""
        return _filtered(nodes.Const(node.data, lineno=node.lineno), DATA)

    def visit_List(self, node: nodes.List) -> nodes.Node:
        self.generic_visit(node)
        return _filtered(node, WEIGHED)

    def visit_Tuple(self, node: nodes.Tuple) -> nodes.Node:
        self.generic_visit(node)
        return _filtered(node, WEIGHED) if node.ctx == "load" else node

    def visit_Dict(self, node: nodes.Dict) -> nodes.Node:
        self.generic_visit(node)
        return _filtered(node, WEIGHED)


def _filtered(node: nodes.Expr, name: str) -> nodes.Expr:
    return nodes.Filter(node, name, [], [], None, None, lineno=node.lineno)


def _check_size(characters: int) -> None:
    if characters > MAX_CHARACTERS:
        raise SecurityError(f"the template makes a text of more than {MAX_CHARACTERS:,} characters")


def _weight(value: Any) -> int:
    """Characters and entries of a value, as often as they are in it: a list may hold another many times over."""
    known: dict[int, int] = {}

    def weight(value: Any) -> int:
        if isinstance(value, str):
            return 1 + len(value)
        if isinstance(value, Namespace):
            raise SecurityError("a namespace is put into a list")
        if not isinstance(value, list | tuple | dict):
            return 1
        if len(value) > MAX_STEPS:
            raise SecurityError(f"the template makes a list of more than {MAX_STEPS:,} entries")
        if (found := known.get(id(value))) is None:
            inner = [*value, *value.values()] if isinstance(value, dict) else value
            found = known[id(value)] = 1 + sum(map(weight, inner))
        return found

    return weight(value)


def _weighed(value: Any) -> Any:
    """A value that is no more than may be written out."""
    if isinstance(value, list | tuple | dict):
        _check_size(_weight(value))
    return value


@jinja2.pass_context
def _data(context: Any, text: str) -> str:
    """The same text, at the time of writing and not of compiling."""
    return text


def _of_bounded(filter: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(filter)
    def bounded(value: Any, *args: Any, **kwargs: Any) -> Any:
        return filter(_weighed(value), *args, **kwargs)

    return bounded


def _within_bounds(parts: Iterable[Any], between: int) -> list[str]:
    texts = [str(_weighed(part)) for part in parts]
    _check_size(sum(map(len, texts)) + between * len(texts))
    return texts


def _concatenated(parts: list[Any]) -> str:
    return "".join(_within_bounds(parts, 0))


@jinja2.pass_environment
def _join(environment: Sandbox, parts: Iterable[Any], between: Any = "", attribute: Any = None) -> str:
    if attribute is not None:
        parts = map(make_attrgetter(environment, attribute), parts)
    between = str(between)
    return between.join(_within_bounds(parts, len(between)))


def _replace(text: Any, old: str, new: str, count: int = -1) -> str:
    text = str(text)
    found = text.count(old) if count is None or count < 0 else min(count, text.count(old))
    _check_size(len(text) + found * len(new))
    return text.replace(old, new, -1 if count is None else count)


def _tojson(
    value: Any, ensure_ascii: bool = False, indent: int | None = None, separators: Any = None, sort_keys: bool = False
) -> str:
    if indent is not None and indent > MAX_INDENT:
        raise SecurityError(f"tojson is indented by {indent}, at most {MAX_INDENT}")
    return json.dumps(
        _weighed(value), ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _dictionary(*args: Any, **kwargs: Any) -> dict[Any, Any]:
    made = dict(*args, **kwargs)
    _check_size(_weight(made))
    return made


def _raise_exception(message: object) -> None:
    raise Refused(str(message))
