"""Names calls: makes tags, digests, and the keys of outputs, from the code of a function and its arguments."""

from __future__ import annotations

import importlib.util
import inspect
import re
import string
import types
import weakref
from _blake2 import blake2b  # of hashlib, which would load OpenSSL into every process
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, NoReturn, Self

from forebay import errors
from forebay._kernel.interrupts import guarded, unless_of_handler
from forebay._logs import logger
from forebay._model import exact_str
from forebay.tasks.code import arrived, chain_of, codes_in, definition_of, functions_of, identity_of, names_read_by, shape_of
from forebay.tasks.hashing import QUICK, ConstantWriter, Unstable, as_own, brought, digest, encoded, kind_text, text

log = logger("forebay.tasks")

TagRule = str | Callable[..., str] | None
_CODE = -2
"""The value of `Unstable.index` where a function's code cannot be determined."""
_VAR = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


class Tag(str):
    """A tag: a str that also knows the key under which the output of its call is stored.

    ``given``: False if the tag is the digest of the arguments, since none was given: it fits no pattern of a configuration. Picklable."""

    __slots__ = ("given", "key")
    key: str
    given: bool

    def __new__(cls, tag: str, key: str | None = None, given: bool = True) -> Self:
        self = super().__new__(cls, tag)
        self.key = str(tag) if key is None else key
        self.given = given
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return Tag, (str(self), self.key, self.given)


QUICK[Tag] = lambda value: text(str(value))


class BoundCall(NamedTuple):
    """One call: ``tag``, with its key; ``digest`` of its arguments."""

    tag: Tag
    digest: str


class Naming:
    """Tells the calls of one function apart. Callable from any thread; pickles if the function does.

    ``name``: as a configuration calls it; ``identity``: as its keys do, with its code or the version that stands for it. ``code``: as
    computed by the process that sent the function here. Raises `ConfigError` for a rule that cannot work."""

    def __init__(
        self, function: Callable[..., Any], tag: TagRule, version: object = None, ignore: str | tuple[str, ...] = (),
        identity: str | None = None, code: Code | None = None,
    ) -> None:  # fmt: skip
        tag = tag if callable(tag) else exact_str(tag) or tag
        self.function, self.version = function, None if version is None else exact_str(version) or str(version)
        self.identity = identity or identity_of(function)
        self.name: str = getattr(function, "__name__", None) or self.identity.rpartition(".")[2]
        several = (ignore,) if isinstance(ignore, str) else tuple(ignore)
        self._rule, self._ignore = tag, tuple(exact_str(name) or name for name in several)
        self._sent = code
        # What keys begin with, the code, and what that depends on. With a version nothing is looked up; else at the first call.
        self._known: tuple[str, Code | None, tuple[Use, ...]] | None = None
        if self.version is not None:
            self._known = prefix_of(self.identity, self.version), None, ()
        self._reported: set[str] = set()
        self._own: bytes | None = None
        self._parameters = _parameters_of(function)
        self._bind = _binder(self.name, self._parameters)
        kinds = {parameter.kind: name for name, parameter in self._parameters.items()}
        self._rest, self._others = (kinds.get(kind) for kind in _VAR)
        self._places = sum(p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD) for p in self._parameters.values())
        self._counted, self._names, self._dropped = self._what_counts()
        self._head = "\0".join(self._names).encode("utf-8", "surrogatepass") + b"\0\0"
        if isinstance(tag, str):
            self._check_format(tag)
        elif tag is not None and not callable(tag):
            message = f"{self.identity}: tag={tag!r} is neither a format string over the arguments nor a function of them"
            raise errors.ConfigError(message, name="tag", value=repr(tag))
        self._parts = function, tag, self.version, self._ignore, self.identity
        _live.setdefault(_key(*self._parts), self)

    def __reduce__(self) -> tuple[Any, ...]:
        return _unpickle, (*self._parts, self.code)

    # -- code ------------------------------------------------------------------------------------------------------

    @property
    def code(self) -> Code | None:
        """The function's code, as it is now; None if a version replaces it, or it cannot be determined."""
        try:
            self._prefix()
        except Unstable:
            return None
        return self._known[1] if self._known is not None else None

    def content(self) -> tuple[str | None, ...]:
        """What represents the function as an argument. Raises `Unstable`."""
        self._prefix()
        code, own = self.code, as_own(self.function)
        return self.identity, self.version, code.digest if code is not None else "", *((digest(own).hex(),) if own else ())

    def _prefix(self) -> str:
        """What the keys of this function begin with. Raises `Unstable` if its code cannot be determined."""
        known = self._known
        if known is not None:
            for lived_in, name, value in known[2]:
                if lived_in.get(name) is not value:
                    break
            else:
                return known[0]
        return self._prefix_now()

    @guarded
    def _prefix_now(self) -> str:
        try:
            code, uses = code_of(self.function, self._sent)
        except Exception as error:
            raise Unstable(f"{type(error).__name__}: {error}", _CODE) from error
        prefix = prefix_of(self.identity, None, code.digest)
        self._known = prefix, code, uses
        return prefix

    def key_prefix(self) -> str | None:
        """What the keys of this function's outputs begin with, as its code is now; None if it cannot be determined."""
        try:
            return self._prefix()
        except Unstable:
            return None

    def report_if_changed(self, has_any: Callable[[str], bool]) -> None:
        """Log once, before a call runs, that outputs of other code are stored. ``has_any``: whether a key has this prefix."""
        if self.version is not None or not self._is_first("changed"):
            return
        prefix = self._prefix()
        if not has_any(prefix) and has_any(f"{_plain(self.identity)}#"):
            changed = "%s: its code has changed since its outputs were stored: it runs again, and they are no longer used (%s)"
            log.info(changed, self.identity, prefix)

    # -- calls -----------------------------------------------------------------------------------------------------

    def call(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], tag: str | None = None) -> BoundCall | None:
        """The call with these arguments; None, with one warning, if it cannot be told from other calls.

        ``tag``: replaces the tag that the rule gives. With a tag, an argument without content that stays counts by its type only.
        Raises `ConfigError` if the tag cannot be made."""
        parts = self.parts(args, kwargs, tag)
        if parts is None:
            return None
        key, digest, given = parts
        return BoundCall(Tag(digest if given is None else given, key, given is not None), digest)

    def parts(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], tag: str | None = None) -> tuple[str, str, str | None] | None:
        """Key, digest and given tag of `call`, without its objects: a hit has no time for them."""
        try:
            values = self._bind(*args, **kwargs)
        except unless_of_handler(TypeError) as error:
            # The call will raise it, too, unless another signature is shown than the function's own.
            is_its_own = isinstance(self.function, types.FunctionType) and not hasattr(self.function, "__wrapped__")
            if not is_its_own:
                self._warn_once("signature", "%s runs uncached where a call does not fit its signature: %s", self.identity, str(error))
            return None
        if tag is None and self._rule is not None:
            tag = self._tag_by_rule(values, args, kwargs)
        try:
            if tag is None:
                digest = self._digest(values)
                return self._prefix() + digest, digest, None
            try:
                digest = self._digest(values)
            except Unstable:
                digest = self._lenient_digest(values)
            return self._prefix() + _encodable(tag), digest, tag
        except Unstable as error:
            message = "%s runs uncached: %s has no content that stays: %s"
            self._warn_once("uncached", message, self.identity, self._where(error), self._cure(error))
            return None

    def tag_of(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Tag:
        """The tag of the call with these arguments. Raises `ConfigError` if there is none, TypeError as the call would."""
        values = self._bind(*args, **kwargs)
        try:
            is_given = self._rule is not None
            name = self._tag_by_rule(values, args, kwargs) if is_given else self._digest(values)
            return Tag(name, self._prefix() + _encodable(name), is_given)
        except Unstable as error:
            message = f"{self.identity}: {self._where(error)} has no content to make a tag of: {self._cure(error)}"
            raise errors.ConfigError(message, name="tag", value="") from error

    # -- digests ---------------------------------------------------------------------------------------------------

    def _digest(self, values: tuple[Any, ...]) -> str:
        if self._counted is not None or self._dropped:
            values = self._counting(values)
        own = self._own if self._own is not None else self._written_own()
        return blake2b(own + b"".join(encoded(values)), digest_size=16).hexdigest()

    def _lenient_digest(self, values: tuple[Any, ...]) -> str:
        parts = []
        for index, value in enumerate(self._counting(values)):
            try:
                parts += encoded((value,))
            except Unstable as error:
                error.index = index
                parts.append(b"?" + kind_text(type(value)))
                message = "%s: %s counts by its type only: it has no content that stays"
                self._warn_once(f"unstable {index}", message, self.identity, self._where(error))
        try:
            own = self._own if self._own is not None else self._written_own()
        except Unstable as error:
            own = self._own = self._head
            message = "%s: what it closes over does not count: %s has no content that stays"
            self._warn_once("own", message, self.identity, error.what)
        return blake2b(own + b"".join(parts), digest_size=16).hexdigest()

    def _written_own(self) -> bytes:
        """What distinguishes functions of the same name, as of the first call."""
        try:
            self._own = self._head + as_own(self.function)
        except Unstable as error:
            error.index = -1
            raise
        return self._own

    def _counting(self, values: tuple[Any, ...]) -> tuple[Any, ...]:
        """The values of the parameters that count."""
        if self._dropped:  # `**kwargs` comes last
            rest = {name: value for name, value in values[-1].items() if name not in self._dropped}
            values = (*values[:-1], rest)
        return values if self._counted is None else tuple([values[i] for i in self._counted])

    def _what_counts(self) -> tuple[tuple[int, ...] | None, tuple[str, ...], frozenset[str]]:
        """Which of the parameters count (None: all), their names, and which names among ``**kwargs`` do not."""
        names = tuple(self._parameters)
        unknown = frozenset(self._ignore) - frozenset(names)
        if unknown and self._others is None:
            message = f"{self.identity} has no parameter {', '.join(map(repr, sorted(unknown)))} to ignore: it has {_listed(names)}"
            raise errors.ConfigError(message, name="ignore", value=self._ignore)
        if not self._ignore:
            return None, names, frozenset()
        counted = tuple(i for i, name in enumerate(names) if name not in self._ignore)
        return counted, tuple(names[i] for i in counted), unknown

    # -- tags ------------------------------------------------------------------------------------------------------

    def _tag_by_rule(self, values: tuple[Any, ...], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> str:
        return self._formatted(self._rule, values) if isinstance(self._rule, str) else self._computed(values, args, kwargs)

    def _formatted(self, rule: str, values: tuple[Any, ...]) -> str:
        named = dict(zip(self._parameters, values, strict=True))
        listed: tuple[Any, ...] = values[: self._places]
        if self._rest is not None:
            listed += named[self._rest]
        if self._others is not None:
            named = {**named, **named[self._others]}
        try:
            tag = rule.format(*listed, **named)
        except unless_of_handler(Exception) as error:
            raise self._bad_format(f"{type(error).__name__}: {error}", tuple(named)) from error
        if _ADDRESS.search(tag):
            _Shown(self._refuse_address).vformat(rule, listed, named)
        return tag

    def _computed(self, values: tuple[Any, ...], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> str:
        assert callable(self._rule)
        given = self._rule(*args, **kwargs)
        tag = exact_str(given)
        if tag is None:
            message = f"{self.identity}: its tag= gave the {type(given).__name__} {given!r}, where a str is expected"
            raise errors.ConfigError(message, name="tag", value=repr(given))
        for address in set(_ADDRESS.findall(tag)):
            for name, value in zip(self._parameters, values, strict=True):
                if not isinstance(value, str) and address in f"{value} {value!r}":
                    self._refuse_address(value, name)
            if not any(isinstance(value, str) and address in value for value in values):
                raise self._shows_address(f"where an object lies in memory ({address})", "name what tells it apart", tag)
        return tag

    def _refuse_address(self, value: Any, field: str) -> NoReturn:
        kind = f"{type(value).__module__}.{type(value).__qualname__}".removeprefix("builtins.")
        shown, cure = f"where {field!r} (a {kind}) lies in memory", f"name what tells it apart, such as {{{field}.name}}"
        raise self._shows_address(shown, cure, kind)

    def _shows_address(self, shown: str, cure: str, value: str) -> errors.ConfigError:
        """Such a tag would be another one in each process, and could be that of another object later in this one."""
        rule = self._rule if isinstance(self._rule, str) else "function"
        message = (
            f"{self.identity}: the tag {rule!r} shows {shown}, which is elsewhere in each process: {cure}, give its class a __str__, or "
            "leave tag= out: then its content counts"
        )
        return errors.ConfigError(message, name="tag", value=value)

    def _check_format(self, rule: str) -> None:
        """What can be known before the first call: whether each field is an argument."""
        try:
            fields = _fields(rule)
        except unless_of_handler(ValueError) as error:
            raise self._bad_format(str(error), tuple(self._parameters)) from error
        unnumbered = 0
        for field in fields:
            if field.isdigit() or not field:
                known = self._rest is not None or int(field or unnumbered) < self._places
                unnumbered += not field
            else:
                known = self._others is not None or field in self._parameters
            if not known:
                raise self._bad_format(f"there is no argument {field!r}", tuple(self._parameters))

    def _bad_format(self, why: str, names: tuple[str, ...]) -> errors.ConfigError:
        message = f"{self.identity}: no tag can be made by {self._rule!r}: {why}. The arguments are {_listed(names)}"
        return errors.ConfigError(message, name="tag", value=self._rule)

    # -- words -----------------------------------------------------------------------------------------------------

    def _where(self, error: Unstable) -> str:
        if error.index == _CODE:
            return f"its code ({error.what})"
        if error.index < 0:
            return f"what it closes over ({error.what})"
        return f"argument {self._names[error.index]!r} ({error.what})"

    def _cure(self, error: Unstable) -> str:
        return "give a version" if error.index == _CODE else "give a tag, or ignore it"

    @guarded
    def _warn_once(self, topic: str, message: str, *facts: str) -> None:
        if self._is_first(topic):
            log.warning(message, *facts)

    def _is_first(self, topic: str) -> bool:
        """Whether this topic is reported for the first time."""
        first = topic not in self._reported
        self._reported.add(topic)
        return first


def _unpickle(
    function: Any, rule: TagRule, version: str | None, ignore: tuple[str, ...], identity: str, code: Code | None = None
) -> Naming:  # fmt: skip
    """The naming that this process already has for the function, else a new one: it analyses a function, and warns of it, only once."""
    arrived(function, identity)
    naming = _live.get(_key(function, rule, version, ignore, identity))
    return naming if naming is not None else Naming(function, rule, version, ignore, identity, code)


def _key(function: Any, rule: TagRule, *rest: Any) -> tuple[Any, ...]:
    # By their ids: a function that calls itself holds its naming, and would be held by this table for ever.
    return id(function), rule if rule is None or isinstance(rule, str) else id(rule), *rest


_live: weakref.WeakValueDictionary[tuple[Any, ...], Naming] = weakref.WeakValueDictionary()


def _parameters_of(function: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    try:
        return dict(inspect.signature(function).parameters)
    except unless_of_handler(ValueError, TypeError):  # some built-in functions have no signature
        kinds = zip(("args", "kwargs"), _VAR, strict=True)
        return {name: inspect.Parameter(name, kind) for name, kind in kinds}


def _binder(name: str, parameters: Mapping[str, inspect.Parameter]) -> Callable[..., tuple[Any, ...]]:
    """A function with these parameters that returns the values of a call for them: no other way is as quick."""
    heads, names, last = [], list(parameters), None
    for parameter in parameters.values():
        kind = parameter.kind
        if last is parameter.POSITIONAL_ONLY and kind is not parameter.POSITIONAL_ONLY:
            heads.append("/")
        if kind is parameter.KEYWORD_ONLY and last not in (parameter.KEYWORD_ONLY, parameter.VAR_POSITIONAL):
            heads.append("*")
        mark = "*" if kind is parameter.VAR_POSITIONAL else "**" if kind is parameter.VAR_KEYWORD else ""
        heads.append(f"{mark}{parameter.name}" + ("" if parameter.default is parameter.empty else "=None"))
        last = kind
    if last is inspect.Parameter.POSITIONAL_ONLY:
        heads.append("/")
    bind: types.FunctionType = eval(f"lambda {', '.join(heads)}: ({''.join(n + ', ' for n in names)})")  # names are identifiers
    defaulted = [p for p in parameters.values() if p.default is not p.empty]
    bind.__defaults__ = tuple(p.default for p in defaulted if p.kind is not p.KEYWORD_ONLY)
    bind.__kwdefaults__ = {p.name: p.default for p in defaulted if p.kind is p.KEYWORD_ONLY}
    bind.__name__ = bind.__qualname__ = name
    return bind


_ADDRESS = re.compile(r"\bat 0x[0-9a-fA-F]{4,}")


class _Shown(string.Formatter):
    """Formats as `str.format` does, and looks at each field: ``refuse`` is called for an object that is shown by its address."""

    def __init__(self, refuse: Callable[[Any, str], NoReturn]) -> None:
        self._refuse = refuse
        self._open: list[tuple[Any, str]] = []  # a field within a format specification is formatted before the one that it is of

    def get_field(self, field_name: str, args: Any, kwargs: Any) -> Any:
        field = super().get_field(field_name, args, kwargs)
        self._open.append((field[0], field_name))
        return field

    def format_field(self, value: Any, format_spec: str) -> Any:
        text = super().format_field(value, format_spec)
        shown, field = self._open.pop()
        if not isinstance(shown, str) and _ADDRESS.search(text):
            self._refuse(shown, field)
        return text


def _fields(rule: str) -> list[str]:
    """The arguments that a format string names, those within a format specification too. Raises ValueError."""
    names = []
    for _, field, spec, _ in string.Formatter().parse(rule):
        if field is not None:
            names += [re.split(r"[.\[]", field, maxsplit=1)[0], *_fields(spec or "")]
    return names


def _listed(names: tuple[str, ...]) -> str:
    return ", ".join(names) or "none"


def prefix_of(identity: str, version: str | None, code: str = "") -> str:
    """What the keys of a function begin with: ``module.qualname#code:``, or ``module.qualname@version:``. Two functions, or versions, never
    share it. ``code``: a digest; empty if there is no code."""
    if version is not None:
        return f"{_plain(identity)}@{_plain(version)}:"
    return f"{_plain(identity)}#{code}:" if code else f"{_plain(identity)}:"


def _encodable(key: str) -> str:
    """The key itself, with what is not valid Unicode in it (as in some file names) escaped."""
    return key if key.isascii() else key.encode("utf-8", "backslashreplace").decode()


def _plain(part: str) -> str:
    """A part of a key, with the characters escaped that separate parts."""
    return _encodable(part.replace("%", "%25").replace(":", "%3A").replace("@", "%40").replace("#", "%23"))


# -- the code of a function ---------------------------------------------------------------------------------------------

Use = tuple[dict[str, Any], str, Any]
"""A module's variables, the name of one, and its value."""


@dataclass(frozen=True, slots=True)
class Code:
    """``digest``: of the code, the same on every version of Python where there are sources; empty where there is no code.
    ``mark``: of the bytecode, constants and literals, by which a process of the same version knows that it has the same code. ``names``:
    what counts in the modules."""

    digest: str
    mark: str
    names: frozenset[str]


def code_of(function: Any, sent: Code | None = None) -> tuple[Code, tuple[Use, ...]]:
    """The code of a function, and what it uses of its module: while each is the same object, so is the code.

    What it wraps counts, and functions that it closes over; functions of installed packages only where there is nothing else.
    ``sent``: the code as computed by the process that sent the function here. It is valid if the same bytecode runs here, and that process
    may have had the source."""
    functions = functions_of(function)
    if not functions:
        return Code("", "", frozenset()), ()
    if sent is not None:
        uses = [use for one in functions for use in _uses_of(one, sent.names)]
        if _mark(functions, uses, sent.names) == sent.mark:
            return sent, tuple(uses)
    uses = [use for one in functions for use in _uses_of(one, None)]
    literals: dict[int, dict[str, types.CodeType]] = {}
    for one in functions:
        literals.setdefault(id(one.__globals__), {}).update(definition_of(one).literals)
    parts, names, known = [definition_of(one).code for one in functions], set(), dict[tuple[int, str], bytes]()
    for lived_in, name, value in uses:
        content = _content(lived_in, value, True)
        if not content and type(value) in _DISPLAYS and value:  # what is empty is filled later
            content = _as_written(literals.get(id(lived_in), {}), lived_in, name, known)
        if content:
            parts.append(text(name) + content)
            names.add(name)
    counted = frozenset(names)
    return Code(_digest(parts), _mark(functions, uses, counted), counted), tuple(uses)


def _mark(functions: list[types.FunctionType], uses: list[Use], names: frozenset[str]) -> str:
    """By the bytecode. ``names``: of what counts, as it is now; functions always do."""
    parts = [importlib.util.MAGIC_NUMBER, *(shape_of(one.__code__) for one in functions)]
    for lived_in, name, value in uses:
        content = _content(lived_in, value, False)
        if name in names or content:
            parts.append(text(name) + (content or _constant(value, False, within=True)))
    return _digest(parts)


def _digest(parts: list[bytes]) -> str:
    return digest(b"".join(b"%x:%b" % (len(part), part) for part in parts)).hex()[:16]


# -- what they use -----------------------------------------------------------------------------------------------------


def _uses_of(function: types.FunctionType, names: frozenset[str] | None) -> list[Use]:
    """The functions and constants of its module that a function names, in the order of their names."""
    lived_in, uses = function.__globals__, list[Use]()
    if names is None:
        names = definition_of(function).constants
    for name in sorted(names_read_by(function.__code__)):
        value = lived_in.get(name)
        counts = names is None or name in names
        is_own = any(one.__globals__ is lived_in for one in chain_of(value))
        if name in lived_in and (is_own or (counts and not issubclass(type(value), (types.ModuleType, type)))):
            uses.append((lived_in, name, value))
    return uses


def _content(lived_in: dict[str, Any], value: Any, by_source: bool) -> bytes:
    """What stands for the value of a module's variable: of a function its code and what it brings, of a constant the value; nothing for
    any other. ``by_source``: the code of functions, else their bytecode."""
    chain = list(chain_of(value))
    own = [one for one in chain if one.__globals__ is lived_in]
    if not own:
        return _constant(value, by_source)
    version = getattr(getattr(value, "_naming", None), "version", None)
    if version is not None:
        return text(str(version))
    code = (definition_of(one).code if by_source else shape_of(one.__code__) for one in own)
    return b"".join((*code, *(brought(one, by_source) for one in chain)))


def _constant(value: Any, by_source: bool = True, *, within: bool = False) -> bytes:
    """A value that cannot change; nothing for any other. ``within``: or a container of such values."""
    writer = ConstantWriter(by_source)
    try:
        return writer.write_container(value) if within else writer.write(value)
    except Exception:  # noqa: BLE001  # of whatever object it is: then it is no constant
        return b""


_DISPLAYS = (dict, list, set, tuple)


def _as_written(literals: dict[str, types.CodeType], lived_in: dict[str, Any], name: str, known: dict[tuple[int, str], bytes]) -> bytes:
    """A dict, list or set as long as it is what the module writes, of literals, of constants, and of others that are as written; else
    nothing. ``known``: of which this was asked already."""
    key, expression, value = (id(lived_in), name), literals.get(name), lived_in.get(name)
    if key in known or expression is None or type(value) not in _DISPLAYS:
        return known.get(key, b"")
    known[key] = b""  # of a circle
    names = {one for part in codes_in(expression) for one in part.co_names if one in lived_in}
    namespace = {one: lived_in[one] for one in names if _constant(lived_in[one]) or _as_written(literals, lived_in, one, known)}
    content = _constant(value, within=True)
    try:
        at_first = eval(expression, {"__builtins__": {}, **namespace}) if content else None  # it calls nothing
    except Exception:  # noqa: BLE001  # such as a name that is no constant
        return b""
    if content and _constant(at_first, within=True) == content:
        known[key] = content
    return known[key]
