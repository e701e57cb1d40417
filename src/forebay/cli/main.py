"""The `forebay` command: its verbs, and how errors that reach the top are shown."""

from __future__ import annotations

import logging
import os
import sys
import threading
from enum import StrEnum
from typing import Annotated, NoReturn

import typer
from typer.completion import completion_init, get_completion_script  # type: ignore[attr-defined]  # not public otherwise

import forebay
from forebay._config import EnvironmentSettings
from forebay._logs import logger
from forebay.cli import streams
from forebay.cli.checking import doctor, verify
from forebay.cli.demo import demo
from forebay.cli.fetching import pull, warm
from forebay.cli.hints import COMPLETE, INTERRUPTED, OK, PIPE, USAGE, command, hint_for, is_expected, set_verb
from forebay.cli.listing import claims, du, ls, path, stats
from forebay.cli.options import JsonOption, RootOption, argument
from forebay.cli.push import push
from forebay.cli.removing import clear, pin, prune, rm, unpin
from forebay.cli.render import LOG_LINES, Output, note, print_error, print_two_lines

log = logger("forebay.cli")

LOOKING = frozenset({"claims", "completion", "doctor", "du", "ls", "path", "stats", "verify"})
"""Verbs that apply no limits, and change nothing without an option that does."""

UsageError: type[Exception] = typer.BadParameter.__bases__[0]  # of click, or of the copy inside newer typers


class Shell(StrEnum):
    BASH = "bash"
    ZSH = "zsh"
    FISH = "fish"


def completion(
    shell: Annotated[Shell, argument("bash|zsh|fish")],
    as_json: JsonOption = False,
) -> None:
    """Print a script that completes verbs and options: `eval "$(forebay completion bash)"`."""
    script = get_completion_script(prog_name="forebay", complete_var=COMPLETE, shell=shell.value)
    output = Output(as_json)
    output.document({"shell": shell.value, "script": script})
    output.raw(script)


app = typer.Typer(
    name="forebay", help="The local cache of a training node.", no_args_is_help=False, add_completion=False, rich_markup_mode=None,
    pretty_exceptions_enable=False, context_settings={"help_option_names": ["-h", "--help"]},
)  # fmt: skip
for verb in (pull, push, ls, du, stats, rm, prune, clear, verify, path, pin, unpin, warm, claims, doctor, completion, demo):
    first = " ".join((verb.__doc__ or "").split()).split(". ")[0].rstrip(".") + "."
    app.command(verb.__name__, short_help=first)(verb)  # without a short help the first line of the help is cut


def _version(requested: bool) -> None:
    if requested:
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
    set_verb(context.invoked_subcommand)
    context.default_map = {context.invoked_subcommand: {"root": root}}  # an option of the verb itself wins
    _log_to_stderr(context.invoked_subcommand)


def _log_to_stderr(verb: str) -> None:
    package = logging.getLogger("forebay")
    if LOG_LINES not in package.handlers:
        package.addHandler(LOG_LINES)
    package.setLevel(_settings_for(verb).verbosity or logging.WARNING)


def _settings_for(verb: str) -> EnvironmentSettings:
    """Return the environment's settings for a verb. Raises `ConfigError` for invalid ones; limits count only for verbs that apply them."""
    if verb == "doctor":  # it reports invalid settings
        return EnvironmentSettings.with_faults()[0]
    return EnvironmentSettings.from_environment(limits=verb not in LOOKING)


def run(arguments: list[str] | None = None) -> int:
    """Run one command line and return its exit code. No exception of Forebay's leaves this function."""
    try:
        with streams.replaced():
            return _run(arguments)
    except BrokenPipeError:  # the reader closed the pipe (`forebay ls | head`)
        streams.discard(sys.stdout, sys.stderr)
        return PIPE


def _run(arguments: list[str] | None) -> int:
    set_verb(None)
    try:
        if COMPLETE in os.environ:
            completion_init()
        code: int = app(arguments, prog_name="forebay", complete_var=COMPLETE, standalone_mode=False) or OK
        sys.stdout.flush()
    except UsageError as error:
        _print_usage(error)
        return USAGE
    except (KeyboardInterrupt, typer.Abort):
        code = INTERRUPTED
    except SystemExit as ending:
        if isinstance(ending.__context__, BrokenPipeError):  # typer would end the process there, with 1
            raise ending.__context__ from None
        raise
    except BrokenPipeError:
        raise
    except Exception as error:  # noqa: BLE001 - the top: every error becomes two lines and a code, the log has the rest
        return _print_failure(error)
    if code == INTERRUPTED:  # some versions of typer return the code, others raise
        note("interrupted")
    return code


def _print_usage(error: Exception) -> None:
    context = getattr(error, "ctx", None)  # None for an option without its value
    path = context.command_path if context else command()
    message = getattr(error, "format_message", error.__str__)()
    print_two_lines(" ".join(message.split()).replace("Value error, ", ""), f"`{path} --help` lists its arguments and options")


def _print_failure(error: Exception) -> int:
    if not is_expected(error):
        log.debug("unexpected error", exc_info=error)
        error = RuntimeError(f"{type(error).__name__}: {error}")
    print_error(error)
    return hint_for(error).code


def main() -> NoReturn:
    """The console script."""
    for name in ("stdin", "stdout", "stderr"):
        if getattr(sys, name) is None:  # closed by the shell (`>&-`): the next file that is opened must not get its number
            setattr(sys, name, open(os.devnull, "r" if name == "stdin" else "w"))
    code = run()
    sys.stderr.flush()
    if code == INTERRUPTED and threading.active_count() > 1:
        # A thread that reads from a stalled remote would delay the exit. Ending here is safe: the kernel releases all locks.
        os._exit(code)
    sys.exit(code)
