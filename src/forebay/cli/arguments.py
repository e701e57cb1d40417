"""What the verbs share: their options, the cache that they open, entries by name and filter, URLs with braces, and completion."""

from __future__ import annotations

import itertools
import operator
import os
import re
import stat
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, closing, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

import click
from click.shell_completion import BashComplete, CompletionItem, add_completion_class, split_arg_string

from forebay._config import EnvironmentSettings, default_root, parse_age, parse_size, without_limits
from forebay.cli.hints import ABSENT, NoCache, NoSuchSpace
from forebay.cli.output import print_error, shown_name
from forebay.errors import ConfigError, NotCached

if TYPE_CHECKING:
    from forebay._engine.store import Store
    from forebay._model import Entry
    from forebay.cache import Cache

# -- completion: verbs and options by click, names of entries and spaces from the catalog ------------------------------

MOST_NAMES = 100
"""Names that are offered at once. If there are more, their common beginnings up to a slash are offered."""

LINE = "COMP_LINE"
"""The variable in which the script for bash passes the line up to the cursor."""

_LAST = chr(0x10FFFF)

# bash cuts words at ":" and "=", so that a URL is several. The whole line is passed on, and of each completion what bash takes for earlier
# words is cut off again.
_BASH = r"""
%(complete_func)s() {
    local line="${COMP_LINE:0:COMP_POINT}" breaks="" head="" word type value reply
    word="${line##*[[:space:]]}"
    [[ $COMP_WORDBREAKS == *:* ]] && breaks+=":"
    [[ $COMP_WORDBREAKS == *=* ]] && breaks+="="
    [[ -n $breaks && $word != [\'\"]* ]] && head="${word%%"${word##*[$breaks]}"}"
    COMPREPLY=()
    while IFS=, read -r type value; do
        case $type in
            dir) compopt -o dirnames ;;
            file) compopt -o default ;;
            plain)
                case $word in  # names are others' choice: none may end a quotation, or be executed within one
                    \'*) reply=${value//\'/\'\\\'\'} ;;
                    \"*)
                        [[ $value == *!* ]] && continue  # no quoting there stops the history from being expanded
                        reply=${value//\\/\\\\} reply=${reply//\"/\\\"} reply=${reply//\$/\\\$} reply=${reply//\`/\\\`}
                        ;;
                    *) printf -v reply %%q "$value" ;;
                esac
                COMPREPLY+=("${reply#"$head"}")
                [[ $value == */ ]] && compopt -o nospace
                ;;
        esac
    done < <(%(complete_var)s=bash_complete COMP_LINE="$line" "$1" 2>/dev/null)
}

complete -F %(complete_func)s %(prog_name)s
"""


class _Bash(BashComplete):
    source_template = _BASH

    def get_completion_args(self) -> tuple[list[str], str]:
        if LINE not in os.environ:  # a script that an earlier version printed
            return super().get_completion_args()
        words = split_arg_string(os.environ[LINE] + "x")  # so that a blank at the end begins a word
        return words[1:-1], words[-1][:-1]


add_completion_class(_Bash, "bash")


def complete_names(context: click.Context, parameter: click.Parameter, incomplete: str) -> list[CompletionItem[str]]:
    """Complete the name of an entry, in a shell."""
    return _completed(context, lambda store: _common(store, incomplete))


def _complete_spaces(context: click.Context, parameter: click.Parameter, incomplete: str) -> list[CompletionItem[str]]:
    return _completed(context, lambda store: [space.name for space in store.seeing.usage().spaces if space.name.startswith(incomplete)])


def _completed(context: click.Context, find: Callable[[Store], list[str]]) -> list[CompletionItem[str]]:
    """Complete what ``find`` finds in the catalog of the cache that the line is about, which is opened read-only."""
    try:
        from forebay._engine.store import Settings, Store  # here: verbs and options complete without it

        root = context.params.get("root") or context.find_root().params.get("root")
        with closing(Store.open(existing(Path(root) if root else None), Settings(), shared=True, read_only=True)) as store:
            return [CompletionItem(name) for name in find(store) if name.isprintable()]
    except Exception:  # noqa: BLE001 (no completion is better than a message in the line that someone types)
        return []


def _common(store: Store, prefix: str) -> list[str]:
    """The names that begin with ``prefix``; of more than `MOST_NAMES`, their beginnings up to the next slash."""
    while True:
        found = list(itertools.islice(_names(store, prefix), MOST_NAMES + 1))
        if len(found) <= MOST_NAMES:
            return found
        groups = list(itertools.islice(_groups(store, prefix), MOST_NAMES))
        if len(groups) > 1 or groups[0] == prefix:
            return groups
        prefix = groups[0]


def _names(store: Store, prefix: str) -> Iterator[str]:
    for space, head, rest in _sources(store, prefix):
        if rest and store.entry(space, rest) is not None:
            yield head + rest
        after = rest
        while keys := store.seeing.key_page(space, after):
            yield from (head + key for key in keys if key.startswith(rest))
            after = keys[-1]
            if not after.startswith(rest):
                break


def _groups(store: Store, prefix: str) -> Iterator[str]:
    """The distinct beginnings of names, up to the next slash, or the colon behind the name of a space."""
    for space, head, rest in _sources(store, prefix):
        if len(prefix) < len(head):
            if store.seeing.key_page(space, None):
                yield head
            continue
        after = rest
        while keys := store.seeing.key_page(space, after):
            key = keys[0]
            if not key.startswith(rest):
                break
            start = max(len(rest), key.find("://") + 3 if "://" in key else 0)
            end = key.find("/", start)
            group = key if end < 0 else key[: end + 1]
            yield head + group
            after = group + _LAST if end >= 0 else group


def _sources(store: Store, prefix: str) -> Iterator[tuple[str, str, str]]:
    """The spaces that may have names with this beginning: the space, what its names have before the keys, how these keys begin."""
    for space in sorted(space.name for space in store.seeing.usage().spaces):
        head = "" if space == "urls" else f"{space}:"
        if prefix.startswith(head):
            yield space, head, prefix[len(head) :]
        elif head.startswith(prefix):
            yield space, head, ""


# -- options and the cache ---------------------------------------------------------------------------------------------

OPTIONS = {
    "root": click.Option(
        ["--root", "-C"], metavar="DIR", callback=lambda context, option, text: Path(text) if text else None,
        shell_complete=lambda context, option, text: [CompletionItem(text, type="dir")],
        help="The cache's directory (default: $FOREBAY_HOME, else ~/.cache/forebay).",
    ),
    "json": click.Option(["--json", "as_json"], is_flag=True, help="Print one JSON document on standard output."),
    "refresh": click.Option(["--refresh"], is_flag=True, help="Ask the source now, even if the copy is fresh."),
    "yes": click.Option(["--yes", "-y"], is_flag=True, help="Do not ask for confirmation."),
    "dry-run": click.Option(["--dry-run", "-n"], is_flag=True, help="Only show what would be done."),
    "space": click.Option(["--space"], metavar="SPACE", shell_complete=_complete_spaces, help="Only this space."),
    "filter": click.Option(
        ["--filter", "-f", "filters"], multiple=True, metavar="TERM", help="Such as 'size>1GB', 'used>30d', 'space=urls'; all must match."
    ),
}  # fmt: skip
"""Options that several verbs have."""
names_argument = click.argument("names", nargs=-1, required=True, metavar="NAME...", shell_complete=complete_names)


def verb(*examples: str, options: str = "") -> Callable[[Callable[..., None]], click.Command]:
    """Make a verb of a function. The first sentence of its docstring is its line in the list of verbs, and ``examples`` end its help.
    ``options``: names of `OPTIONS`, which follow its own."""

    def make(function: Callable[..., None]) -> click.Command:
        first = " ".join((function.__doc__ or "").split()).split(". ")[0].rstrip(".") + "."
        epilog = "\n".join(["\b", f"{'Example' if len(examples) == 1 else 'Examples'}:", *(f"  {example}" for example in examples)])
        command = click.command(function.__name__, short_help=first, epilog=epilog)(function)  # else the first line of the help is cut
        command.params += [OPTIONS[name] for name in options.split()]
        return command

    return make


def jobs_option(default: int) -> Callable[[Callable[..., None]], Callable[..., None]]:
    return click.option(
        "--jobs", "-j", type=click.IntRange(min=1), default=default, show_default=True, metavar="N", help="Transfers at a time."
    )


def root_path(root: Path | None) -> Path:
    """Return the cache's directory: ``root``, else ``$FOREBAY_HOME``, else the default."""
    return root or EnvironmentSettings.with_faults(limits=False)[0].home or default_root(is_network=_is_network)


def _is_network(path: Path) -> bool:
    from forebay._kernel import host

    return not host.is_local(host.fs_kind(path))


def existing(root: Path | None) -> Path:
    """Return the directory of an existing cache. Raises `NoCache`, since a mistyped path must not create one."""
    base = root_path(root)
    for path in (base, base / f"forebay-{os.geteuid()}", base / f"forebay-g{os.getegid()}"):
        if (path / "FORMAT").exists():
            return path
    raise NoCache.of(str(base))


@contextmanager
def opened(root: Path | None, *, change: bool = False) -> Iterator[Cache]:
    """Open the existing cache at ``root``, and close it at the end: read-only, or with ``change`` to remove, pin or repair entries.

    Reading changes nothing in it, and ignores limits in the environment: only verbs that fetch (`filled`) apply those, and create a
    cache if there is none. Raises `CacheFault` if it cannot be read, `ConfigError`."""
    from forebay.cache import Cache, fault_of  # here, so that `forebay --help` need not load the engine

    if change:
        EnvironmentSettings.from_environment()  # invalid settings, limits included, prevent any change
    path = existing(root)
    read_only = not (change and os.access(path, os.W_OK))  # another user's: operations that are not allowed raise
    # No opt-in is needed for a group's cache: no verb executes what others wrote.
    with without_limits(Cache, path, shared=bool(path.stat().st_mode & stat.S_IWGRP), read_only=read_only) as cache:
        fault = fault_of(cache)
        if fault is not None:  # a job bypasses it; here an empty result would be wrong
            raise type(fault)(f"the cache in {path} cannot be read: {fault}")
        yield cache


def looked_into(root: Path | None, *, change: bool = False) -> AbstractContextManager[Cache]:
    """As `opened`; where there is no cache yet, one that keeps nothing."""
    from forebay.cache import Cache

    try:
        existing(root)
    except NoCache:
        return Cache(enabled=False)
    return opened(root, change=change)


def filled(root: Path | None) -> Cache:
    """Open the cache at ``root`` as a job does: created if there is none, with the limits of the environment."""
    from forebay.cache import Cache

    return Cache(root_path(root))


def store_of(cache: Cache) -> Store:
    """The store of a cache that is `opened`."""
    from forebay.cache import fetcher_of

    store = fetcher_of(cache).store
    assert store.keeps  # else the cache could not be opened
    return store


# -- entries by name and by filter -------------------------------------------------------------------------------------


def check_space(cache: Cache, name: str | None) -> None:
    """Raise `NoSuchSpace` for an unknown name: a mistyped name must not look like an empty space."""
    if name is not None and name not in (spaces := sorted(cache.stats().spaces)):
        raise NoSuchSpace.of(name, spaces)


def matching(cache: Cache, entries: Iterable[Entry], names: Sequence[str]) -> Iterator[Entry]:
    """Yield the entries whose names begin with one of ``names``, or whose key is one; all if ``names`` is empty."""
    from forebay import remote
    from forebay.cache import fetcher_of

    heads = list(names)
    for name in names:
        with suppress(ConfigError, UnicodeError):
            heads.append(remote.canonical(name, fetcher_of(cache).naming))  # as it is stored: a query as its hash, a path as a URL
    values = {f"values:{name}" for name in names}
    prefixes = tuple(heads)

    def is_named(name: str) -> bool:
        return name.startswith(prefixes) or name in values or remote.without_user(name).startswith(prefixes)

    return (entry for entry in entries if not names or is_named(entry.name))


def find_each(cache: Cache, names: Sequence[str]) -> tuple[list[Entry], dict[str, NotCached]]:
    """Return the entries of these names, each once, and an error for each name with no entry, or several."""
    entries: dict[int, Entry] = {}
    missing: dict[str, NotCached] = {}
    for name in dict.fromkeys(names):
        try:
            entry = cache.entry(name)
            if entry is None:
                raise NotCached.of(shown_name(name))
            entries[entry.id] = entry
        except NotCached as error:
            missing[name] = error
    return list(entries.values()), missing


def end_if_missing(missing: Mapping[str, NotCached], code: int = ABSENT) -> None:
    """Print the errors of `find_each`, and exit if there are any."""
    for error in missing.values():
        print_error(error)
    if missing:
        raise click.exceptions.Exit(code)


_TERM = re.compile(r"\s*([a-z]+)\s*(>=|<=|!=|>|<|=)\s*(.*?)\s*")
_COMPARE = {">": operator.gt, ">=": operator.ge, "<": operator.lt, "<=": operator.le, "=": operator.eq, "!=": operator.ne}
_AGES = ("used", "created", "validated")
_WORDS = ("space", "kind", "life")


def parse_filters(terms: Sequence[str], *, now: float | None = None) -> Callable[[Entry], bool]:
    """Return a predicate that is true for entries that match every term.

    ``size`` compares with a size; ``used``, ``created`` and ``validated`` compare ages (``used>30d``: not used
    for 30 days); ``space``, ``kind`` and ``life`` compare words. Raises `ConfigError`.
    """
    moment = time.time() if now is None else now
    tests = [_parse_term(term, moment) for term in terms]
    return lambda entry: all(test(entry) for test in tests)


def _parse_term(term: str, now: float) -> Callable[[Entry], bool]:
    match = _TERM.fullmatch(term)
    if match is None:
        raise _wrong(term, "a filter is FIELD OPERATOR VALUE, quoted: 'size>1GB'")
    field, sign, text = match.groups()
    compare = _COMPARE[sign]
    if field == "size":
        size = parse_size(text, name="size")
        return lambda entry: compare(entry.size, size)
    if field in _AGES:
        age = parse_age(text, name=field)
        return lambda entry: compare(now - getattr(entry, field), age)
    if field in _WORDS and sign in ("=", "!="):
        return lambda entry: compare(getattr(entry, field), text)
    raise _wrong(term, f"fields are size, {', '.join(_AGES)}, and with = or != {', '.join(_WORDS)}")


def _wrong(term: str, why: str) -> ConfigError:
    return ConfigError(f"--filter {term!r} is invalid: {why}", name="--filter", value=term)


# -- braces in URLs, written as in a shell: ``shard-{000..127}.tar``, ``{train,val}.parquet`` ---------------------------

MOST = 1_000_000
"""URLs that one argument may stand for: a longer list belongs in a file."""

_RANGE = re.compile(r"(?:(-?\d{1,18})\.\.(-?\d{1,18})|([A-Za-z])\.\.([A-Za-z]))(?:\.\.-?(\d{1,18}))?", re.ASCII)
_PADDED = re.compile(r"-?0\d")
_ESCAPED = re.compile(r"\\([{},])")


def expand(text: str) -> list[str]:
    """The texts that a text with braces stands for, in order; the text alone if it has none, or names a local file.

    A group is a list (``{a,b}``) or a range of numbers or letters (``{000..127}``, ``{1..9..2}``); groups may be nested. What bash leaves
    alone stays: ``{}``, ``{a}``, ``${a,b}``, a brace without its partner. A backslash makes ``{``, ``}`` and ``,`` literal.
    Raises `ConfigError` for more than `MOST` texts."""
    if "{" not in text or os.path.lexists(text):
        return [text]
    if _count(text) > MOST:
        raise _too_many(text)
    return [_ESCAPED.sub(r"\1", one) for one in _expanded(text)]


def _too_many(text: str) -> ConfigError:
    message = f"{text}: its braces stand for more than {MOST:,} URLs: write them to a file, for `forebay warm FILE`"
    return ConfigError(message, name="URL", value=text)


def _expanded(text: str) -> Iterator[str]:
    group = _first_group(text)
    if group is None:
        yield text
        return
    before, parts, behind = group
    tails = list(_expanded(behind))
    for part in parts:
        for middle in _expanded(part):
            for tail in tails:
                yield f"{before}{middle}{tail}"


def _count(text: str) -> int:
    """The number of texts, which may be too large to make them."""
    group = _first_group(text)
    return 1 if group is None else sum(map(_count, group[1])) * _count(group[2])


def _first_group(text: str) -> tuple[str, Sequence[str], str] | None:
    """The first pair of braces: the text before it, what it stands for, the text behind it."""
    for start, sign in _signs(text, 0):
        if sign == "{" and text[start - 1 : start] != "$":
            parts, end = _parts(text, start)
            if parts:
                return text[:start], parts, text[end + 1 :]
    return None


def _signs(text: str, start: int) -> Iterator[tuple[int, str]]:
    """The places of braces and commas without a backslash."""
    return ((at, text[at]) for at in range(start, len(text)) if text[at] in "{,}" and text[at - 1 : at] != "\\")


def _parts(text: str, start: int) -> tuple[Sequence[str], int]:
    """What the braces at ``start`` stand for, and where they close; nothing if they do not, or hold neither a list nor a range."""
    depth, cuts = 0, [start]
    for at, sign in _signs(text, start):
        depth += {"{": 1, "}": -1}.get(sign, 0)
        if sign == "," and depth == 1:
            cuts.append(at)
        if not depth:
            match = _RANGE.fullmatch(text, start + 1, at)
            if match is not None:
                return _range(match), at
            cuts.append(at)
            return [text[begin + 1 : end] for begin, end in itertools.pairwise(cuts)] if len(cuts) > 2 else [], at
    return [], -1


def _range(match: re.Match[str]) -> Sequence[str]:
    low, high, first_letter, last_letter, step = match.groups()
    first, last = (int(low), int(high)) if low else (ord(first_letter), ord(last_letter))
    step = max(int(step or 1), 1) * (1 if last >= first else -1)
    numbers = range(first, last + (1 if step > 0 else -1), step)
    if len(numbers) > MOST:
        raise _too_many(f"{{{match[0]}}}")
    if not low:
        return [chr(number) for number in numbers]
    width = max(len(low), len(high)) if _PADDED.match(low) or _PADDED.match(high) else 0
    return [f"{number:0{width}}" for number in numbers]
