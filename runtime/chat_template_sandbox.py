"""A Jinja environment for chat templates, which come with a model and are not trusted to be harmless or to end.

Jinja's immutable sandbox keeps a template from reaching the interpreter or changing its input. The bound on time and
memory rests on two rules:

- No value larger than MAX_VALUE characters and elements (counted through lists and dicts) comes into being, and all
  results together stay under MAX_TOTAL. Whatever can make a larger value of smaller ones goes through a check: the
  results of operators, calls, filters, literals and `~`, and all output. What could overshoot within one step
  (repetition, powers, `%` formats, replace, join, indent) is checked before; other amplifying filters, string methods
  and globals are left out.
- Every pass of a loop and every call checks the time. Between two checks runs no more than the text of the template
  once, each operation on values of bounded size.
"""

from __future__ import annotations

import functools
import json
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import datetime
from typing import Any

import jinja2
import jinja2.ext
import jinja2.sandbox
from jinja2 import nodes
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer

MAX_VALUE = 1 << 24
MAX_TOTAL = 1 << 28
MAX_SECONDS = 10.0
_MAX_INT_BITS = 4096

_STRING_METHODS = frozenset(
    """
    strip lstrip rstrip split rsplit splitlines partition rpartition startswith endswith removeprefix removesuffix find
    rfind index rindex count replace join upper lower title capitalize casefold swapcase isdigit isalpha isalnum isspace
    isupper islower isnumeric isdecimal istitle isidentifier isascii
    """.split()  # noqa: SIM905
)
_METHODS: dict[type, frozenset[str]] = {
    str: _STRING_METHODS,
    dict: frozenset({"get", "items", "keys", "values", "copy"}),
    list: frozenset({"index", "count", "copy"}),
    tuple: frozenset({"index", "count"}),
    int: frozenset(),
    bool: frozenset(),
    float: frozenset(),
}
_FILTERS = """
    abs capitalize count d default dictsort e escape first float groupby indent int items join last length list lower
    map max min reject rejectattr replace reverse round safe select selectattr sort string striptags title trim unique
    upper urlencode wordcount
""".split()  # noqa: SIM905


class TemplateRefusal(jinja2.TemplateError):
    """The template called raise_exception: the conversation is not one that it accepts."""


class TemplateTooCostly(jinja2.TemplateError):
    """The template would take too much time or memory."""


class _Budget:
    def __init__(self) -> None:
        self._deadline = time.monotonic() + MAX_SECONDS
        self._total = 0

    def step(self) -> None:
        if time.monotonic() > self._deadline:
            raise TemplateTooCostly(f"it runs longer than {MAX_SECONDS:g} seconds")

    def charge(self, value: Any) -> Any:
        self.step()
        if not isinstance(value, Namespace):
            self._total += _size(value)
            if self._total > MAX_TOTAL:
                raise TemplateTooCostly(f"it makes more than {MAX_TOTAL} characters in all")
        return value


def _limit(size: int) -> int:
    if size > MAX_VALUE:
        raise TemplateTooCostly(f"it makes a value of more than {MAX_VALUE} characters")
    return size


def _size(value: Any) -> int:
    """Characters and elements of a value, through lists and dicts, each as often as it occurs."""
    size = 0
    waiting = [value]
    while waiting:
        item = waiting.pop()
        size += 1
        if isinstance(item, str):
            size += len(item)
        elif isinstance(item, int):
            if item.bit_length() > _MAX_INT_BITS:
                raise TemplateTooCostly("it makes a number that is too long")
        elif isinstance(item, Mapping):
            waiting += item.keys()
            waiting += item.values()
        elif isinstance(item, list | tuple):
            waiting += item
        elif isinstance(item, Namespace):
            raise TemplateTooCostly("it uses a namespace as a value")
        _limit(size + len(waiting))
    return size


class SandboxedEnvironment(jinja2.sandbox.ImmutableSandboxedEnvironment):
    """The environment of one chat template. One rendering at a time: the budget belongs to it."""

    intercepted_binops = frozenset({"+", "-", "*", "/", "//", "**", "%"})

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            optimized=False,  # constants would be folded outside of the budget
            extensions=[_GenerationTag, jinja2.ext.loopcontrols],
        )
        self.budget = _Budget()
        known = self.filters
        self.filters = {name: self._guarded(name, known[name]) for name in _FILTERS}
        self.filters |= {"tojson": self._tojson, "_emit": self._emit, "_join": self._join}
        self.filters |= {"_loop": self._loop, "_check": self._check}
        self.globals = {"range": self.globals["range"], "dict": dict, "namespace": Namespace}
        self.globals |= {"raise_exception": _raise_exception, "strftime_now": _strftime_now}

    def render(self, template: jinja2.Template, variables: Mapping[str, Any]) -> str:
        """Render a template of this environment. Raises TemplateError and what Python raises for wrong types."""
        self.budget = _Budget()
        return template.render(variables)

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree = super()._parse(source, name, filename)
        guarded = _Guard().visit(tree)
        assert isinstance(guarded, nodes.Template)
        return guarded

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        methods = _METHODS.get(type(obj))
        allowed = attr in methods if methods is not None else not isinstance(obj, str | Mapping | list | tuple)
        return allowed and super().is_safe_attribute(obj, attr, value)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        return None  # str.format is no method that templates get

    def call(__self, __context: Any, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N805 (as in the base class)
        __self.budget.step()
        owner, name = getattr(__obj, "__self__", None), getattr(__obj, "__name__", "")
        if isinstance(owner, str):
            if name == "replace":
                _check_replace(owner, *args[:2])
            elif name == "join":
                args = (_check_join(owner, args[0]),)
        return __self.budget.charge(super().call(__context, __obj, *args, **kwargs))

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        if operator == "*":
            for value, times in ((left, right), (right, left)):
                if isinstance(value, str | list | tuple) and isinstance(times, int):
                    _limit(_size(value) * times)
        elif operator == "**" and isinstance(left, int) and isinstance(right, int):
            if left.bit_length() * right > _MAX_INT_BITS:
                raise TemplateTooCostly("it makes a number that is too long")
        elif operator == "%" and isinstance(left, str):
            if "*" in left or re.search(r"[0-9]{3}", left):
                raise TemplateTooCostly("it formats with a width")
            _limit(_size(left) + left.count("%") * _size(right))
        elif operator == "+":
            _limit(_size(left) + _size(right))
        return self.budget.charge(super().call_binop(context, operator, left, right))

    def _guarded(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        skip = 1 if hasattr(function, "jinja_pass_arg") else 0

        @functools.wraps(function)  # keeps Jinja's marks
        def guarded(*args: Any, **kwargs: Any) -> Any:
            own, rest = args[:skip], list(args[skip:])
            if name == "replace":
                rest[:3] = [str(value) for value in rest[:3]]
                _check_replace(*rest[:3])
            elif name == "join":
                separator = str(rest[1] if len(rest) > 1 else kwargs.get("d", ""))
                rest[0] = _check_join(separator, rest[0])
            elif name == "indent":
                width = rest[1] if len(rest) > 1 else kwargs.get("width", 4)
                rest[0] = str(rest[0])
                _limit((rest[0].count("\n") + 1) * (len(width) if isinstance(width, str) else int(width)))
            _size(rest)
            return self.budget.charge(function(*own, *rest, **kwargs))

        return guarded

    @jinja2.pass_context
    def _emit(self, _context: Any, value: Any) -> str:
        _size(value)
        if isinstance(value, Namespace):
            raise TemplateTooCostly("it writes a namespace")
        text = str(value)
        self.budget.charge(text)
        return text

    @jinja2.pass_context
    def _join(self, _context: Any, values: list[Any]) -> str:
        return "".join(map(str, values))  # a literal, checked already

    @jinja2.pass_context
    def _check(self, _context: Any, value: Any) -> Any:
        return self.budget.charge(value)

    @jinja2.pass_context
    def _loop(self, _context: Any, values: Iterable[Any]) -> Iterator[Any]:
        for value in values:
            self.budget.step()
            yield value

    def _tojson(self, value: Any, indent: int | None = None, **options: Any) -> str:
        """JSON without the escapes for HTML that Jinja's own filter makes."""
        if indent is not None and not 0 <= int(indent) <= 16:
            raise TemplateTooCostly("it indents JSON by more than 16")
        known = {"ensure_ascii": False, "separators": None, "sort_keys": False}
        if not options.keys() <= known.keys():
            raise TypeError(f"tojson takes indent, {', '.join(known)}, not {', '.join(options)}")
        _size(value)
        text = json.dumps(value, indent=indent, **(known | options))
        self.budget.charge(text)
        return text


class _Guard(NodeTransformer):
    """Sends loops, output, literals and `~` through the checks."""

    def visit_Output(self, node: nodes.Output) -> nodes.Node:  # noqa: N802 (Jinja's naming)
        self.generic_visit(node)
        node.nodes = [
            _filtered("_emit", nodes.Const(child.data) if isinstance(child, nodes.TemplateData) else child)
            for child in node.nodes
        ]
        return node

    def visit_For(self, node: nodes.For) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        if node.recursive:
            raise jinja2.TemplateSyntaxError("recursive loops are not supported", node.lineno)
        node.iter = _filtered("_loop", node.iter)
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        values = _filtered("_check", nodes.List(node.nodes, lineno=node.lineno))
        return _filtered("_check", _filtered("_join", values))

    def visit_List(self, node: nodes.List) -> nodes.Node:  # noqa: N802
        return _filtered("_check", self.generic_visit(node))

    def visit_Dict(self, node: nodes.Dict) -> nodes.Node:  # noqa: N802
        return _filtered("_check", self.generic_visit(node))

    def visit_Tuple(self, node: nodes.Tuple) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        return _filtered("_check", node) if node.ctx == "load" else node


def _filtered(name: str, node: nodes.Node) -> nodes.Filter:
    return nodes.Filter(node, name, [], [], None, None, lineno=node.lineno)


class _GenerationTag(jinja2.ext.Extension):
    """`{% generation %}` marks what the assistant wrote, for training; here its body is plain output."""

    tags = {"generation"}  # noqa: RUF012 (as Jinja declares it)

    def parse(self, parser: Any) -> nodes.Node | list[nodes.Node]:
        next(parser.stream)
        body: list[nodes.Node] = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return body


def _check_replace(text: str, old: Any = "", new: Any = "") -> None:
    count = len(text) + 1 if not old else text.count(str(old))
    _limit(len(text) + count * len(str(new)))


def _check_join(separator: str, values: Any) -> list[Any]:
    items = list(values)
    _limit(_size(items) + len(separator) * len(items))
    return items


def _raise_exception(message: Any) -> None:
    raise TemplateRefusal(str(message))


def _strftime_now(pattern: Any) -> str:
    if re.search(r"[0-9]", str(pattern)):
        raise TemplateTooCostly("it formats a date with a width")
    return datetime.now().strftime(str(pattern))
