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
from forebay._config import Settings
from forebay.cli import claims, clear, completion, demo, doctor, du, ls, path, pin, prune, pull, push, rm, stats, unpin, verify, warm
from forebay.cli.hints import COMPLETE, INTERRUPTED, OK, PIPE, USAGE, hint_for, is_expected
from forebay.cli.render import LOG_LINES, note, say_error, say_two_lines

log = logging.getLogger("forebay.cli")

UsageError: type[Exception] = typer.BadParameter.__bases__[0]  # of click, or of the copy inside newer typers

app = typer.Typer(
    name="forebay", help="The local cache of a training node.", no_args_is_help=False, add_completion=False, rich_markup_mode=None,
    pretty_exceptions_enable=False, context_settings={"help_option_names": ["-h", "--help"]},
)  # fmt: skip
for verb in (pull, push, ls, du, stats, rm, prune, clear, verify, path, pin, unpin, warm, claims, doctor, completion, demo):
    name = verb.__name__.rsplit(".", 1)[-1]
    app.command(name)(getattr(verb, name))


def _version(asked: bool) -> None:
    if asked:
        typer.echo(f"forebay {forebay.__version__}")
        raise typer.Exit


@app.callback(invoke_without_command=True)
def top(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version and exit.")] = False,
) -> None:
    """The local cache of a training node: remote data, fetched once, within one budget."""
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())
    _log_to_stderr()


def _log_to_stderr() -> None:
    root = logging.getLogger("forebay")
    root.setLevel(Settings.from_environment().verbosity or logging.WARNING)
    if LOG_LINES not in root.handlers:
        root.addHandler(LOG_LINES)


def run(arguments: list[str] | None = None) -> int:
    """Run one command line; its exit code. No exception of our own gets out."""
    try:
        return _run(arguments)
    except BrokenPipeError:
        # Whoever reads has had enough (`forebay ls | head`). The interpreter's last flush must not fail too.
        nowhere = os.open(os.devnull, os.O_WRONLY)
        for stream in (sys.stdout, sys.stderr):
            os.dup2(nowhere, stream.fileno())
        os.close(nowhere)
        return PIPE


def _run(arguments: list[str] | None) -> int:
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
    context = getattr(error, "ctx", None)
    where = context.command_path if context else "forebay"
    what = getattr(error, "format_message", error.__str__)().replace("Value error, ", "")
    say_two_lines(what, f"`{where} --help` lists what it takes")


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
