"""`forebay claims`."""

from __future__ import annotations

from dataclasses import replace

from forebay.cli.options import JsonOption
from forebay.cli.render import Output, shown


def claims(as_json: JsonOption = False) -> None:
    """List the claims of this node: which job has which directories, and how much shared memory. Those of dead jobs too."""
    from forebay.claims import list_claims  # here, so that `forebay --help` need not load them

    found = [
        replace(claim, remotes=tuple(url and shown(url) for url in claim.remotes), command=shown(claim.command)) for claim in list_claims()
    ]
    output = Output(as_json)
    output.document(found)
    output.claims(found)
