"""The `forebay` command: its verbs, and how errors that reach the top are shown."""

from __future__ import annotations

import importlib
import logging
import os
import sys
import threading
from pathlib import Path
from typing import NoReturn

import click

import forebay
from forebay._config import EnvironmentSettings
from forebay._logs import logger
from forebay.cli import streams
from forebay.cli.hints import COMPLETE, INTERRUPTED, OK, PIPE, USAGE, command, hint_for, is_expected, set_verb
from forebay.cli.options import json_option, root_option, verb
from forebay.cli.render import LOG_LINES, Output, note, print_error, print_two_lines

log = logger("forebay.cli")

LOOKING = frozenset({"claims", "completion", "doctor", "du", "ls", "path", "report", "stats", "top", "verify"})
"""Verbs that apply no limits, and change nothing without an option that does."""

VERBS = {
    "pull": "fetching", "push": "push", "ls": "listing", "du": "listing", "stats": "listing", "report": "report", "top": "top",
    "rm": "removing", "prune": "removing", "clear": "removing", "verify": "checking", "path": "listing", "pin": "removing",
    "unpin": "removing", "warm": "fetching", "claims": "listing", "doctor": "checking", "completion": "main", "demo": "demo",
}  # fmt: skip
"""The verbs, in the order of the help, and the module of each."""


@verb
@click.argument("shell", metavar="bash|zsh|fish", type=click.Choice(["bash", "zsh", "fish"]))
@json_option
def completion(shell: str, as_json: bool) -> None:
    """Print a script that completes verbs and options: `eval "$(forebay completion bash)"`."""
    from click.shell_completion import get_completion_class

    kind = get_completion_class(shell)
    assert kind is not None
    script = kind(top, {}, "forebay", COMPLETE).source()
    output = Output(as_json)
    output.document({"shell": shell, "script": script})
    output.raw(script)


class _Verbs(click.Group):
    """All verbs. The module of a verb is imported when it runs; for the help, those of all."""

    def list_commands(self, context: click.Context) -> list[str]:
        return list(VERBS)

    def get_command(self, context: click.Context, name: str) -> click.Command | None:
        if name in VERBS and name not in self.commands:
            self.add_command(getattr(importlib.import_module(f"forebay.cli.{VERBS[name]}"), name))
        return self.commands.get(name)


@click.command(cls=_Verbs, invoke_without_command=True, context_settings={"help_option_names": ["-h", "--help"]})
@root_option
@click.option("--version", is_flag=True, help="Show the version and exit.")
@click.pass_context
def top(context: click.Context, root: Path | None, version: bool) -> None:
    """The local cache of a training node: remote data, fetched once, within one budget."""
    if version or context.invoked_subcommand is None:
        click.echo(f"forebay {forebay.__version__}" if version else context.get_help())
        context.exit()
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
            top.main(arguments, prog_name="forebay", complete_var=COMPLETE)  # prints what completes the line, and exits
        code = _invoke(sys.argv[1:] if arguments is None else list(arguments))
        sys.stdout.flush()
    except click.UsageError as error:
        _print_usage(error)
        return USAGE
    except KeyboardInterrupt:
        code = INTERRUPTED
        note("interrupted")
    except BrokenPipeError:
        raise
    except Exception as error:  # noqa: BLE001 - the top: every error becomes two lines and a code, the log has the rest
        return _print_failure(error)
    return code


def _invoke(arguments: list[str]) -> int:
    # Not by `main`, which ends the process where the reader of the output has closed the pipe.
    try:
        with top.make_context("forebay", arguments) as context:
            top.invoke(context)
    except click.exceptions.Exit as ending:
        return ending.exit_code
    return OK


def _print_usage(error: click.UsageError) -> None:
    context = error.ctx  # None for an option without its value
    path = context.command_path if context else command()
    print_two_lines(" ".join(error.format_message().split()), f"`{path} --help` lists its arguments and options")


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
