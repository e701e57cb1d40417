"""The `forebay` command: its verbs, and what an error that reaches the top looks like."""

from __future__ import annotations

import logging
import os
import sys
import threading
from typing import Annotated, NoReturn

import typer
from typer.completion import completion_init  # type: ignore[attr-defined]  # the only door to it

import forebay
from forebay._config import EnvironmentSettings
from forebay._logs import logger
from forebay.cli import (
    claims,
    clear,
    completion,
    demo,
    doctor,
    du,
    ls,
    path,
    pin,
    prune,
    pull,
    push,
    rm,
    stats,
    streams,
    unpin,
    verify,
    warm,
)
from forebay.cli.hints import COMPLETE, INTERRUPTED, OK, PIPE, USAGE, command, hint_for, is_expected, say_verb
from forebay.cli.options import RootOption
from forebay.cli.render import LOG_LINES, note, say_error, say_two_lines

log = logger("forebay.cli")

LOOKING = frozenset({"claims", "completion", "doctor", "du", "ls", "path", "stats", "verify"})
"""Verbs that set no limits, and change nothing unless an option says so."""

UsageError: type[Exception] = typer.BadParameter.__bases__[0]  # of click, or of the copy inside newer typers

app = typer.Typer(
    name="forebay", help="The local cache of a training node.", no_args_is_help=False, add_completion=False, rich_markup_mode=None,
    pretty_exceptions_enable=False, context_settings={"help_option_names": ["-h", "--help"]},
)  # fmt: skip
for verb in (pull, push, ls, du, stats, rm, prune, clear, verify, path, pin, unpin, warm, claims, doctor, completion, demo):
    name = verb.__name__.rsplit(".", 1)[-1]
    function = getattr(verb, name)
    first = " ".join(function.__doc__.split()).split(". ")[0].rstrip(".") + "."
    app.command(name, short_help=first)(function)  # without one the first line of the help is cut


def _version(asked: bool) -> None:
    if asked:
        typer.echo(f"forebay {forebay.__version__}")
        raise typer.Exit


@app.callback(invoke_without_command=True)
def top(
    context: typer.Context,
    root: RootOption = None,
    version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version and exit.")] = False,
) -> None:
    """The local cache of a training node: remote data, fetched once, within one budget."""
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())
        return
    say_verb(context.invoked_subcommand)
    context.default_map = {context.invoked_subcommand: {"root": root}}  # what the verb itself says wins
    _log_to_stderr(context.invoked_subcommand)


def _log_to_stderr(verb: str) -> None:
    above = logging.getLogger("forebay")
    if LOG_LINES not in above.handlers:
        above.addHandler(LOG_LINES)
    above.setLevel(_settings_for(verb).verbosity or logging.WARNING)


def _settings_for(verb: str) -> EnvironmentSettings:
    """What the environment says to a verb. Raises `ConfigError` for what makes no sense, but for limits where none are set by it."""
    if verb == "doctor":  # which tells what makes no sense
        return EnvironmentSettings.with_faults()[0]
    return EnvironmentSettings.from_environment(limits=verb not in LOOKING)


def run(arguments: list[str] | None = None) -> int:
    """Run one command line; its exit code. No exception of our own gets out."""
    try:
        with streams.named():
            return _run(arguments)
    except BrokenPipeError:  # whoever reads has had enough (`forebay ls | head`)
        streams.write_nowhere(sys.stdout, sys.stderr)
        return PIPE


def _run(arguments: list[str] | None) -> int:
    say_verb(None)
    try:
        if COMPLETE in os.environ:
            completion_init()
        code: int = app(arguments, prog_name="forebay", complete_var=COMPLETE, standalone_mode=False) or OK
        sys.stdout.flush()
    except UsageError as error:
        _say_usage(error)
        return USAGE
    except (KeyboardInterrupt, typer.Abort):
        code = INTERRUPTED
    except SystemExit as ending:
        if isinstance(ending.__context__, BrokenPipeError):  # typer would end the process there, with 1
            raise ending.__context__ from None
        raise
    except BrokenPipeError:
        raise
    except Exception as error:  # noqa: BLE001 - the top: every fault becomes two lines and a code, the log has the rest
        return _say_failure(error)
    if code == INTERRUPTED:  # some typers give the code, others raise
        note("interrupted")
    return code


def _say_usage(error: Exception) -> None:
    context = getattr(error, "ctx", None)  # an option without its value has none
    where = context.command_path if context else command()
    what = getattr(error, "format_message", error.__str__)()
    say_two_lines(" ".join(what.split()).replace("Value error, ", ""), f"`{where} --help` lists what it takes")


def _say_failure(error: Exception) -> int:
    if not is_expected(error):
        log.debug("an error that nobody expected", exc_info=error)
        error = RuntimeError(f"{type(error).__name__}: {error}")
    say_error(error)
    return hint_for(error).code


def main() -> NoReturn:
    """The console script."""
    for name in ("stdin", "stdout", "stderr"):
        if getattr(sys, name) is None:  # closed by the shell (`>&-`): the next file of ours must not get its number
            setattr(sys, name, open(os.devnull, "r" if name == "stdin" else "w"))
    code = run()
    sys.stderr.flush()
    if code == INTERRUPTED and threading.active_count() > 1:
        # A thread that reads a stalled remote would hold the exit. Ending here is safe: the kernel lets go of all locks.
        os._exit(code)
    sys.exit(code)
