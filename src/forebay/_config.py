"""Sizes, ages and settings: parsed from arguments and the environment, and checked once, with a clear error for an invalid value."""

from __future__ import annotations

import contextvars
import math
import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from forebay import _config_file
from forebay._logs import logger
from forebay.errors import ConfigError

log = logger("forebay.config")

DEFAULT_MAX_AGE = 300.0
"""Seconds for which an entry is served without asking the remote again after it was validated."""

LEAST_BUDGET = 64 << 20
"""A smaller budget, given as text, is taken for a typing error."""

MOST_RATE, MOST_CONNECTIONS = 200 * 10**12, 65_535
"""The largest limits of transfers: one word holds both."""

_SIZE = r"(?i)([0-9][0-9_]*(?:\.[0-9]+)?|\.[0-9]+)\s*(%|[a-z]*)"
_POWERS = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4, "p": 5}
_UNITS: dict[str, int] = {
    f"{letter}{end}": int(base**power)
    for letter, power in _POWERS.items()
    for end, base in (("", 1000), ("b", 1000), ("i", 1024), ("ib", 1024))
}

_AGE = r"(?i)([0-9]+(?:\.[0-9]+)?)\s*([a-z]*)"
_SECONDS = {"": 1, "s": 1, "m": 60, "min": 60, "h": 3600, "d": 86400, "w": 7 * 86400, "y": 365 * 86400}

_SHA256 = "[0-9a-fA-F]{64}"

T = TypeVar("T")
_limits_ignored: contextvars.ContextVar[bool] = contextvars.ContextVar("forebay_limits_ignored", default=False)

_TRUE = frozenset({"1", "on", "yes", "true"})
_FALSE = frozenset({"", "0", "off", "no", "false"})
_LEVELS = ("debug", "info", "warning", "error", "critical")


def parse_size(value: int | str, *, total: int | None = None, name: str = "size") -> int:
    """Bytes: an int, or text such as ``"500GB"`` (10^9), ``"500GiB"`` (2^30), ``"100G"`` (10^9), ``"80%"`` (of ``total``).

    ``name`` is what an error calls the value. Raises `ConfigError` for anything else, and for ``%`` where ``total`` is None.
    """
    if isinstance(value, int) and not isinstance(value, bool):
        if value < 0:
            raise _wrong(name, value, "a size must not be negative")
        return int.__index__(value)
    match = re.fullmatch(_SIZE, value.strip()) if isinstance(value, str) else None
    unit = match[2].lower() if match else ""
    if match is None or (unit != "%" and unit not in _UNITS):
        raise _wrong(name, value, 'a size is bytes as an int, or text such as "500GB" (10^9), "500GiB" (2^30) or "80%"')
    number = float(match[1])
    if unit == "%":
        return _share(number, total, name, value)
    if "." not in match[1]:
        return int(match[1]) * _UNITS[unit]  # exact where a float is not
    return int(number * _UNITS[unit])


def parse_budget(value: int | str, *, total: int | None = None, name: str = "budget") -> int:
    """The budget of a root in bytes: as `parse_size`, but text needs a unit and must be at least `LEAST_BUDGET`; a share of a small disk
    at least a hundredth of it.

    ``"500"`` instead of ``"500GB"`` would empty the cache of every process. Raises `ConfigError`."""
    size = parse_size(value, total=total, name=name)
    if isinstance(value, str):
        text = value.strip()
        if not text.endswith("%") and not text[-1].isalpha():
            meant = f"{text}GB" if len(text) < 6 else f"{text}B"
            raise _wrong(name, value, f'a budget needs a unit, such as "{meant}"')
        if size < (min(LEAST_BUDGET, (total or 0) // 100) if text.endswith("%") else LEAST_BUDGET):
            least = "below the minimum of 64 MiB" if name != "budget" else "below the 64 MiB minimum for text; pass an int for less"
            raise _wrong(name, value, least)
    return size


def parse_rate(value: int | str, *, name: str = "max_rate") -> int:
    """Bytes a second: as `parse_size`, but text needs a unit, and may end with ``/s``. 0: no limit. Raises `ConfigError`."""
    text = value.strip() if isinstance(value, str) else ""
    text = text[:-2].rstrip() if text.lower().endswith("/s") else text
    rate = parse_size(text or value, name=name)
    if text and rate and not text[-1].isalpha():
        raise _wrong(name, value, f'a rate needs a unit, such as "{text}MB"')
    if rate > MOST_RATE:
        raise _wrong(name, value, "at most 200 TB a second: 0 is no limit")
    return rate


def parse_connections(value: int | str, *, name: str = "max_connections") -> int:
    """A number of connections; 0: no limit. Raises `ConfigError`."""
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= MOST_CONNECTIONS:
        raise _wrong(name, value, f"a number from 1 to {MOST_CONNECTIONS:,}, or 0 for no limit")
    return value


def parse_count(value: int, *, name: str, least: int = 1) -> int:
    """A number of things, such as transfers at a time. Raises `ConfigError` for anything but an integer of at least ``least``."""
    if type(value) is not int or value < least:
        wanted = f"of at least {least}" if least else "that is not negative"
        raise ConfigError(f"{name} must be an integer {wanted}, not {value!r}", name=name, value=value)
    return value


def _share(percent: float, total: int | None, name: str, value: object) -> int:
    if total is None:
        raise _wrong(name, value, "a share of the disk is not allowed here: give bytes")
    if percent > 100:
        raise _wrong(name, value, "it exceeds the whole disk")
    return int(total * percent / 100)


def format_size(size: float) -> str:
    """``1_500_000`` as ``"1.5 MB"``: three digits, powers of 1000."""
    sign, size = ("-", -size) if size < 0 else ("", size)
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if size < 999.5:
            return f"{sign}{size:.0f} B" if unit == "B" else f"{sign}{size:.3g} {unit}"
        size /= 1000
    return f"{sign}{size:,.3g} PB" if size < 999.5 else f"{sign}{size:,.0f} PB"


def parse_age(value: float | str, *, name: str = "age") -> float:
    """Seconds: a number, or text such as ``"90s"``, ``"15m"``, ``"12h"``, ``"30d"``, ``"2w"``, ``"forever"`` (infinity).

    Raises `ConfigError` for anything else.
    """
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        if math.isnan(value) or value < 0:
            raise _wrong(name, value, "an age must not be negative")
        return float(value)
    text = value.strip().lower() if isinstance(value, str) else ""
    if text in ("forever", "inf"):
        return math.inf
    match = re.fullmatch(_AGE, text)
    if match is None or match[2] not in _SECONDS:
        raise _wrong(name, value, 'an age is seconds, or text such as "90s", "15m", "12h", "30d" or "forever"')
    return float(match[1]) * _SECONDS[match[2]]


def parse_timeout(value: float | None, *, name: str = "timeout") -> float | None:
    """Seconds to wait, or None for no limit. Raises `ConfigError` for anything but a number that is at least 0."""
    if value is None or (isinstance(value, (int, float)) and not isinstance(value, bool) and value >= 0):
        return value
    raise _wrong(name, value, "a timeout is a number of seconds that is at least 0, or None")


def parse_sha256(value: str, *, name: str = "sha256") -> str:
    """A SHA-256 as 64 lower-case hexadecimal digits. Raises `ConfigError` for anything else."""
    if isinstance(value, str) and re.fullmatch(_SHA256, value):
        return str.lower(value)
    raise _wrong(name, value, "a SHA-256 is 64 hexadecimal digits")


def parse_etag(value: str | None, *, name: str = "etag") -> str | None:
    """An expected ETag, or None. Raises `ConfigError` for anything but text."""
    if value is None or isinstance(value, str):
        return value
    raise _wrong(name, value, "an ETag is a text, or None")


def format_age(seconds: float) -> str:
    """``90`` as ``"1m"``: the largest unit that fits, rounded down."""
    for unit, length in (("d", 86400), ("h", 3600), ("m", 60)):
        if seconds >= length:
            return f"{int(seconds // length)}{unit}"
    return f"{max(int(seconds), 0)}s"


def parse_flag(value: str, *, name: str) -> bool:
    """``1 on yes true`` or ``0 off no false`` (or empty), in any case. Raises `ConfigError` for anything else."""
    word = value.strip().lower()
    if word not in _TRUE | _FALSE:
        raise _wrong(name, value, "use 1 or 0")
    return word in _TRUE


def _wrong(name: str, value: object, why: str) -> ConfigError:
    return ConfigError(f"{name}={value!r} is not valid: {why}", name=name, value=str(value))


class GivenSetting(NamedTuple):
    """A setting as text. ``name``: where it is set, as messages name it: a variable, or a file and a key."""

    text: str
    name: str


def given_settings(environ: Mapping[str, str] | None = None) -> tuple[dict[str, GivenSetting], list[ConfigError]]:
    """The settings in variables, and, where one is unset, in the user's ``forebay.toml``, by the names of `KNOWN` in lower case; and what
    is wrong with the file. Unknown ones are ignored, each with one warning, and so is a file that another user could write."""
    environ = os.environ if environ is None else environ
    variables, (file, faults) = given_by_variables(environ), given_by_file(environ)
    return file | variables, faults


def unused_budget(given: GivenSetting, path: Path, budget: int) -> str:
    """The message about a budget in a variable or a file that differs from that of an existing cache."""
    message = f"{given.name}={given.text} is not used: the cache in {path} has a budget of {format_size(budget)} already"
    return f"{message}; `forebay budget {given.text}` changes it for all processes"


def budget_beyond_disk(path: Path, budget: int, disk: int) -> str:
    """The message about a budget that the disk cannot hold."""
    message = f"the budget of the cache in {path}, {format_size(budget)}, is larger than its disk, {format_size(disk)}"
    return f"{message}: the disk will be full first; set less, or a share of it, such as budget='80%'"


def given_by_variables(environ: Mapping[str, str]) -> dict[str, GivenSetting]:
    """The settings in variables that are not empty."""
    names = [name for name, text in environ.items() if name.startswith("FOREBAY_") and text.strip()]
    given = {name.removeprefix("FOREBAY_").lower(): GivenSetting(environ[name], name) for name in names if name == name.upper()}
    if not _limits_ignored.get():
        for name in names:
            _warn_of_unknown(f"the variable {name}", name.removeprefix("FOREBAY_"), KNOWN, "FOREBAY_")
    return given


def given_by_file(environ: Mapping[str, str]) -> tuple[dict[str, GivenSetting], list[ConfigError]]:
    """The settings in the user's file, and what is wrong with it."""
    try:
        file = _config_file.read(environ)
    except ConfigError as error:
        return {}, [error]
    if file.ignored:
        warn_once(f"{file.path} is ignored: {file.ignored}")
    if not _limits_ignored.get():
        for key in file.values:
            _warn_of_unknown(f"{file.path}: the key {key}", key, IN_FILE)
    given = {key: GivenSetting(text, f"{file.path}: {key}") for key, text in file.values.items() if key in IN_FILE and text.strip()}
    return given, list(file.faults)


class EnvironmentSettings(NamedTuple):
    """The settings in the environment: in variables, and in the user's ``forebay.toml``. None: not set.

    ``budget`` and ``min_free`` stay text, since a share depends on the disk; `parse_size` has accepted them. ``max_rate``: bytes a second.
    ``progress``: False hides progress bars, True draws them without a terminal too. ``verbosity``: a level of `logging`.
    """

    home: Path | None = None
    budget: str | None = None
    min_free: str | None = None
    max_rate: int | None = None
    max_connections: int | None = None
    max_age: float = DEFAULT_MAX_AGE
    offline: bool = False
    shared: bool = False
    progress: bool | None = None
    verbosity: str | None = None

    @classmethod
    def from_environment(cls, environ: Mapping[str, str] | None = None, *, limits: bool = True) -> EnvironmentSettings:
        """Read and check the ``FOREBAY_*`` variables and the user's file now. What is empty counts as unset; without ``limits``, so do the
        limits of the root.

        Raises `ConfigError`, which names the variable, or the file and the key, and the value."""
        settings, faults = cls.with_faults(environ, limits=limits)
        if faults:
            raise faults[0]
        return settings

    @classmethod
    def with_faults(cls, environ: Mapping[str, str] | None = None, *, limits: bool = True) -> tuple[EnvironmentSettings, list[ConfigError]]:
        """As `from_environment`, but what is invalid counts as unset, and its error is returned."""
        given, faults = given_settings(environ)
        values = {}
        for field, read in _READERS.items():
            if field in given and (field not in _LIMITS or (limits and not _limits_ignored.get())):
                try:
                    values[field] = read(*given[field])
                except ConfigError as error:
                    faults.append(error)
        return cls(**values), faults


REMOTE = ("CONNECT_TIMEOUT", "READ_TIMEOUT", "TOTAL_TIMEOUT", "ATTEMPTS", "CONNECTIONS", "STREAMS", "CLIENT_CERT", "CLIENT_KEY")
"""The names of the variables from which `RemoteOptions` are made, without ``FOREBAY_``."""
KNOWN = frozenset({
    *("HOME", "BUDGET", "MIN_FREE", "MAX_RATE", "MAX_CONNECTIONS", "MAX_AGE", "OFFLINE", "SHARED", "PROGRESS", "VERBOSITY", "CLAIMS"),
    "S3_ANONYMOUS", *REMOTE,
})  # fmt: skip
"""The names of all variables that Forebay reads, without ``FOREBAY_``."""

IN_FILE = frozenset(name.lower() for name in KNOWN - {"CLAIMS", "S3_ANONYMOUS"})
"""The keys of the user's file. The registry of claims is one for all users of a node; credentials for S3 have files of their own."""

_warned: set[str] = set()  # messages that this process, or one that it was forked from, has logged


def _warn_of_unknown(label: str, word: str, known: frozenset[str], head: str = "") -> None:
    if word not in known and label not in _warned:
        import difflib

        near = difflib.get_close_matches(word, known, 1)
        warn_once(f"{label} is unknown and ignored" + (f": did you mean {head}{near[0]}?" if near else ""), label)


def warn_once(message: str, label: str = "") -> None:
    """Log a warning once per process. ``label``: what makes it the same one, if not its text."""
    if (label or message) not in _warned:
        _warned.add(label or message)
        log.warning("%s", message)


def without_limits(make: Callable[..., T], *args: Any, **kwargs: Any) -> T:
    """Call ``make`` while the limits in the environment count as unset: a handle that is unpickled must not set them for every process."""
    token = _limits_ignored.set(True)
    try:
        return make(*args, **kwargs)
    finally:
        _limits_ignored.reset(token)


def _level(text: str, name: str) -> str:
    if text.strip().lower() not in _LEVELS:
        raise _wrong(name, text, "use one of " + ", ".join(_LEVELS))
    return text.strip().upper()


def _checked(text: str, name: str, parse: Callable[..., int]) -> str:
    """The text, which ``parse`` accepts."""
    parse(text, total=1, name=name)
    return text


def _count(text: str, name: str) -> int:
    return parse_connections(int(text) if text.strip().isdecimal() else text, name=name)


_LIMITS = ("budget", "min_free", "max_rate", "max_connections")
_READERS: dict[str, Callable[[str, str], Any]] = {
    "home": lambda text, name: Path(expand_user(text, name)),
    "budget": lambda text, name: _checked(text, name, parse_budget),
    "min_free": lambda text, name: _checked(text, name, parse_size),
    "max_rate": lambda text, name: parse_rate(text, name=name),
    "max_connections": _count,
    "max_age": lambda text, name: parse_age(text, name=name),
    "offline": lambda text, name: parse_flag(text, name=name),
    "shared": lambda text, name: parse_flag(text, name=name),
    "progress": lambda text, name: parse_flag(text, name=name),
    "verbosity": _level,
}
"""By setting: makes its value from the text and the name of the variable."""


def default_root(*, is_network: Callable[[Path], bool], environ: Mapping[str, str] | None = None) -> Path:
    """The default directory of the cache: ``$XDG_CACHE_HOME/forebay``, else ``~/.cache/forebay``.

    If that is on a network file system (``is_network`` is asked about the nearest directory that exists): ``forebay-<uid>`` in
    ``$SLURM_TMPDIR``, else ``$TMPDIR``, else the system's temporary directory; each process logs one warning then.
    """
    import tempfile

    environ = os.environ if environ is None else environ
    usual = _user_cache(environ) / "forebay"
    if not is_network(_nearest(usual)):
        return usual
    temporary = [Path(text) for name in ("SLURM_TMPDIR", "TMPDIR") if (text := environ.get(name))] + [Path(tempfile.gettempdir())]
    local = [directory for directory in temporary if directory.is_dir() and not is_network(directory)] or temporary[-1:]
    root = local[0] / f"forebay-{os.geteuid()}"
    if root not in _warned_roots:
        _warned_roots.add(root)
        log.warning(
            "%s is on a network file system, so the cache is in %s: set FOREBAY_HOME to choose another local directory", usual, root
        )
    return root


_warned_roots: set[Path] = set()  # roots that this process has warned of


def _user_cache(environ: Mapping[str, str]) -> Path:
    given = environ.get("XDG_CACHE_HOME", "")
    if os.path.isabs(given):  # the XDG standard says to ignore relative paths
        return Path(given)
    if (home := home_directory(environ)) is not None:
        return Path(home, ".cache")
    message, todo = "this user has no home directory: set FOREBAY_HOME to a local directory", "run `export FOREBAY_HOME=/local/directory`"
    raise ConfigError(message, name="FOREBAY_HOME", value="", todo=f"{todo}, or select one with --root")


def home_directory(environ: Mapping[str, str] | None = None) -> str | None:
    """The user's home directory: ``$HOME`` if that is an absolute path, else the one in the list of users; None if there is neither."""
    home = (os.environ if environ is None else environ).get("HOME", "")
    if not os.path.isabs(home):
        import pwd

        try:
            home = pwd.getpwuid(os.geteuid()).pw_dir
        except KeyError:
            return None
    return home if os.path.isabs(home) else None


def expand_user(path: str, name: str = "path") -> str:
    """``path`` with the user's home directory in place of a ``~`` at its beginning. Raises `ConfigError` about ``name`` where the user has
    none: no directory is ever called ``~``."""
    tilde, slash, below = path.partition("/")
    if tilde != "~":
        return os.path.expanduser(path)
    if (home := home_directory()) is None:
        message = f"{name}={path!r} begins with ~, and this user has no home directory: give an absolute path, or set HOME"
        raise ConfigError(message, name=name, value=path, todo=f"give an absolute path for {name}, or set HOME")
    return os.path.join(home, below) if slash else home


def _nearest(path: Path) -> Path:
    """The path itself, or the closest of its parents that exists."""
    return next((directory for directory in (path, *path.parents) if directory.exists()), Path("/"))
