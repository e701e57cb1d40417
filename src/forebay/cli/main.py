"""The `forebay` command: its verbs, and how errors that reach the top are shown."""

from __future__ import annotations

import contextlib
import importlib
import logging
import os
import sys
import threading
from pathlib import Path
from typing import NoReturn

import click
from click.shell_completion import get_completion_class

import forebay
from forebay._config import EnvironmentSettings
from forebay._logs import logger
from forebay.cli.arguments import OPTIONS, verb
from forebay.cli.hints import COMPLETE, INTERRUPTED, OK, PIPE, USAGE, command, hint_for, is_expected
from forebay.cli.output import LOG_LINES, Output, argument_of_verbosity, discard, guarded_streams, print_error, print_two_lines

log = logger("forebay.cli")
package_log = logging.getLogger("forebay")

TASKS = {
    "Fetch and send": dict.fromkeys(("pull", "warm", "cat", "push"), "fetching"),
    "See what is there": dict.fromkeys(("ls", "which", "path", "du", "stats", "claims"), "listing") | {"report": "report", "top": "top"},
    "Decide what stays": dict.fromkeys(("budget", "pin", "unpin", "rm", "prune", "clear"), "removing"),
    "Check": dict.fromkeys(("config", "doctor", "verify"), "checkup"),
    "Begin": {"help": "main", "completion": "main", "demo": "demo"},
}
"""The verbs by task, in the order of the help, and the module of each."""

LOOKING = frozenset({*TASKS["See what is there"], *TASKS["Check"], "budget", "completion", "help"})
"""Verbs that apply no limits, and change nothing without an option that does."""

VERBS = {name: module for verbs in TASKS.values() for name, module in verbs.items()}


@verb('eval "$(forebay completion bash)"', options="json")
@click.argument("shell", metavar="bash|zsh|fish", type=click.Choice(["bash", "zsh", "fish"]))
def completion(shell: str, as_json: bool) -> None:
    """Print a script that completes verbs, options, and names of entries and spaces: `eval "$(forebay completion bash)"`."""
    kind = get_completion_class(shell)
    assert kind is not None
    script = kind(top, {}, "forebay", COMPLETE).source()
    output = Output(as_json)
    output.document({"shell": shell, "script": script})
    output.raw(script)


@click.command("help", short_help="List the verbs by task, or show the help of one.")
@click.argument("name", required=False, metavar="[VERB]")
@click.pass_context
def show_help(context: click.Context, name: str | None) -> None:
    """List the verbs by task, or show the help of one."""
    if name is None:
        click.echo(top.get_help(click.Context(top, info_name="forebay")))
        return
    command = top.get_command(context, name)
    if command is None:
        raise NoSuchVerb(name, context.parent)
    click.echo(command.get_help(click.Context(command, info_name=name, parent=context.parent)))


class NoSuchVerb(click.UsageError):
    """A verb that does not exist. ``todo``: the one that was perhaps meant."""

    def __init__(self, name: str, context: click.Context | None) -> None:
        from difflib import get_close_matches  # here: each start of the command would pay for it

        super().__init__(f"there is no verb {name!r}", context)
        near = get_close_matches(name, VERBS, 1)
        self.todo = f"did you mean `forebay {near[0]}`? " if near else ""
        self.todo += "`forebay help` lists all verbs"


class _Verbs(click.Group):
    """All verbs. The module of a verb is imported when it runs; for the help, those of all."""

    def list_commands(self, context: click.Context) -> list[str]:
        return list(VERBS)

    def format_commands(self, context: click.Context, formatter: click.HelpFormatter) -> None:
        width = max(map(len, VERBS))  # the same in each section
        for task, names in TASKS.items():
            with formatter.section(task):
                commands = {name: self.get_command(context, name) for name in names}
                formatter.write_dl([(name.ljust(width), command.get_short_help_str()) for name, command in commands.items() if command])

    def resolve_command(self, context: click.Context, args: list[str]) -> tuple[str | None, click.Command | None, list[str]]:
        if args[0] not in VERBS and not args[0].startswith("-"):
            raise NoSuchVerb(args[0], context)
        return super().resolve_command(context, args)

    def get_command(self, context: click.Context, name: str) -> click.Command | None:
        if name in VERBS and name not in self.commands:
            self.add_command(getattr(importlib.import_module(f"forebay.cli.{VERBS[name]}"), name))
        return self.commands.get(name)


@click.command(cls=_Verbs, invoke_without_command=True, context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--quiet", "-q", is_flag=True, help="Show errors only: no warnings, no notes, no progress bars.")
@click.option("--verbose", "-v", count=True, help="Show more of the log; -vv shows all of it.")
@click.option("--version", is_flag=True, help="Show the version and exit.")
@click.pass_context
def top(context: click.Context, root: Path | None, quiet: bool, verbose: int, version: bool) -> None:
    """The local cache of a training node: remote data, fetched once, within one budget."""
    if version or context.invoked_subcommand is None:
        click.echo(f"forebay {forebay.__version__}" if version else context.get_help())
        context.exit()
    if quiet and verbose:
        raise click.UsageError("-q and -v exclude each other", context)
    context.default_map = {context.invoked_subcommand: {"root": root}}  # an option of the verb itself wins
    _log_to_stderr(context.invoked_subcommand)


top.params.insert(0, OPTIONS["root"])
top.add_command(show_help)


def _log_to_stderr(verb: str) -> None:
    """Show the log as the settings say. Raises `ConfigError` for invalid ones; limits count only for verbs that apply them."""
    if LOG_LINES not in package_log.handlers:
        package_log.addHandler(LOG_LINES)
    if verb in ("config", "doctor", "help"):  # they report invalid settings, or need none
        settings = EnvironmentSettings.with_faults()[0]
    else:
        settings = EnvironmentSettings.from_environment(limits=verb not in LOOKING)
    argument = argument_of_verbosity()
    package_log.setLevel(argument[1].upper() if argument else settings.verbosity or logging.WARNING)


def run(arguments: list[str] | None = None) -> int:
    """Run one command line and return its exit code. No exception of Forebay's leaves this function."""
    try:
        with guarded_streams(), contextlib.ExitStack() as stack:
            return _run(arguments, stack)
    except BrokenPipeError:  # the reader closed the pipe (`forebay ls | head`)
        discard(sys.stdout, sys.stderr)
        return PIPE


def _run(arguments: list[str] | None, stack: contextlib.ExitStack) -> int:
    """``stack`` keeps the context of the command, by which errors name the verb."""
    try:
        if COMPLETE in os.environ:
            package_log.addHandler(logging.NullHandler())  # no warning on the terminal on which someone types
            top.main(arguments, prog_name="forebay", complete_var=COMPLETE)  # prints what completes the line, and exits
        code = OK
        try:  # not by `top.main`, which ends the process where the reader of the output has closed the pipe
            top.invoke(stack.enter_context(top.make_context("forebay", sys.argv[1:] if arguments is None else list(arguments))))
        except click.exceptions.Exit as ending:
            code = ending.exit_code
        sys.stdout.flush()
    except click.UsageError as error:
        _print_usage(error)
        return USAGE
    except KeyboardInterrupt:
        code = INTERRUPTED
        sys.stderr.write("interrupted\n")
    except BrokenPipeError:
        raise
    except Exception as error:
        if not is_expected(error):
            log.debug("unexpected error", exc_info=error)
            error = RuntimeError(f"{type(error).__name__}: {error}")
        print_error(error)
        return hint_for(error).code
    return code


def _print_usage(error: click.UsageError) -> None:
    context = error.ctx  # None for an option without its value
    path = context.command_path if context else command()
    todo = getattr(error, "todo", "") or f"`{path} --help` lists its arguments and options"
    if isinstance(error, click.NoSuchOption) and error.option_name in ("-q", "--quiet", "-v", "-vv", "--verbose"):
        todo = f"it stands before the verb: `forebay {error.option_name} {path.rpartition(' ')[2]}`"
    print_two_lines(" ".join(error.format_message().split()), todo)


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
