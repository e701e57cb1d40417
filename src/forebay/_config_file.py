"""The settings that a user keeps in ``forebay.toml``, in the configuration directory: read, and ignored where another user could write
them."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from forebay.errors import ConfigError

NAME = "forebay.toml"
LARGEST = 1 << 20
PATHS = frozenset({"home", "client_cert", "client_key"})
_SHORT = (errno.EMFILE, errno.ENFILE, errno.ENOMEM)  # what the process, or the machine, has run out of


class ConfigFile(NamedTuple):
    """The content of the file, as text by key. ``path``: None where there is no directory for it. ``is_there``: whether it exists.
    ``ignored``: why it is not used. ``faults``: values that are no text, number or boolean."""

    path: Path | None
    is_there: bool = False
    values: Mapping[str, str] = {}
    ignored: str = ""
    faults: tuple[ConfigError, ...] = ()


def location(environ: Mapping[str, str]) -> Path | None:
    """``$XDG_CONFIG_HOME/forebay/forebay.toml``, else ``~/.config/forebay/forebay.toml``; None for a user without a home directory."""
    given, home = environ.get("XDG_CONFIG_HOME", ""), environ.get("HOME", "")
    if os.path.isabs(given):  # the XDG standard says to ignore relative paths
        return Path(given, "forebay", NAME)
    return Path(home, ".config", "forebay", NAME) if os.path.isabs(home) else None


def read(environ: Mapping[str, str]) -> ConfigFile:
    """Read the file now. Raises `ConfigError` for one that cannot be read, or is not valid TOML."""
    path = location(environ)
    if path is None:
        return ConfigFile(None)
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)  # a FIFO would wait for its writer
    except (FileNotFoundError, NotADirectoryError):
        return ConfigFile(path)
    except OSError as error:
        if error.errno in _SHORT:  # whether the file is there is not known: a job goes on without it
            return ConfigFile(path, ignored=f"it cannot be read now: {error.strerror}")
        raise _invalid(path, f"cannot be read: {error.strerror}") from error
    with open(fd, "rb") as file:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode) or status.st_size > LARGEST:
            raise _invalid(path, "is not a plain file of at most 1 MiB")
        why = _why_untrusted(path, status)
        return ConfigFile(path, True, ignored=why) if why else _parsed(path, file.read(LARGEST))


def _parsed(path: Path, data: bytes) -> ConfigFile:
    import tomllib  # here: most users have no such file

    try:
        content = tomllib.loads(data.decode())
    except (ValueError, RecursionError) as error:
        raise _invalid(path, f"is not valid TOML: {error}") from error
    values, faults = {}, []
    for key, value in content.items():
        text = _text(value)
        if text is None:
            message = f"{path}: {key} must be text, a number, true or false: a setting has no tables, lists or dates"
            faults.append(ConfigError(message, name=f"{path}: {key}", value=str(value)))
        elif key in PATHS and text and not (os.path.isabs(text) or text.startswith("~")):
            message = f"{path}: {key}={text!r} is not valid: use an absolute path, or one that begins with ~"
            faults.append(ConfigError(message, name=f"{path}: {key}", value=text))
        else:
            values[key] = text
    return ConfigFile(path, True, values, faults=tuple(faults))


def _text(value: object) -> str | None:
    """A value as a variable would have it."""
    if isinstance(value, bool):
        return "1" if value else "0"
    return str(value) if isinstance(value, (str, int, float)) else None


def _why_untrusted(path: Path, status: os.stat_result) -> str:
    """Why a user other than this one and the superuser could have written the file, or replaced it; empty: none could."""
    directories = {path.parent, Path(os.path.realpath(path)).parent}  # it may be a link
    for name, facts in ((path, status), *((directory, os.stat(directory)) for directory in directories)):
        if facts.st_uid not in (os.geteuid(), 0):
            return f"{name} belongs to another user"
        if facts.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            return f"others can write to {name}: `chmod go-w {name}` changes that"
    return ""


def _invalid(path: Path, why: str) -> ConfigError:
    return ConfigError(f"{path} {why}", name=str(path), value="")
