"""`forebay completion`."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

from typer.completion import get_completion_script  # type: ignore[attr-defined]  # the only door to it

from forebay.cli.hints import COMPLETE
from forebay.cli.options import JsonOption, argument
from forebay.cli.render import Output


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
