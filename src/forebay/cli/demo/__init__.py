"""`forebay demo`."""

from __future__ import annotations

import sys
from contextlib import closing
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import click

from forebay._config import format_size, parse_size
from forebay.cli.hints import FAILED
from forebay.cli.options import json_option, verb
from forebay.cli.render import Output
from forebay.errors import ConfigError

if TYPE_CHECKING:
    from forebay.cli.demo.play import Result, Scene

SERVED = 10
"""Shards that ``--serve`` serves."""


@verb("forebay demo", "forebay demo --serve")
@click.option("--size", metavar="SIZE", default="64MB", show_default=True, help="How much data.")
@click.option("--rate", metavar="SIZE", default="4MB", show_default=True, help="What the server sends a second.")
@click.option("--workers", type=click.IntRange(1, 64), default=4, show_default=True, help="Processes that read.")
@click.option("--serve", is_flag=True, help="Only serve the data, on this machine, until Ctrl-C: a remote to try the cache on.")
@click.option("--port", type=click.IntRange(1, 65535), default=8930, show_default=True, help="Where --serve listens.")
@json_option
def demo(size: str, rate: str, workers: int, serve: bool, port: int, as_json: bool) -> None:
    """Show the cache at work: offline, in about half a minute. Worker processes read real data over HTTP twice, loading ahead; one is
    killed. Then three epochs over objects of which half fit.

    The data are the library files of this Python, packed into shards. The cache and the data are in a temporary folder that is removed
    at the end.
    """
    import tempfile

    from forebay.cli.demo.play import Scene, Screen, play  # here, since it loads the engine

    scene = Scene(size=parse_size(size, name="--size"), rate=parse_size(rate, name="--rate"), workers=workers)
    if scene.size < 1_000_000 or scene.rate < 100_000:
        raise ConfigError("the demo needs at least 1 MB of data and 100 kB/s", name="--size", value=size)
    if serve:
        if as_json:
            raise click.UsageError("--json and --serve exclude each other")
        _serve(scene, port)
        return
    with tempfile.TemporaryDirectory(prefix="forebay-demo-") as folder, closing(Screen(quiet=as_json)) as screen:
        result = play(Path(folder), scene, screen)
    output = Output(as_json)
    output.document(asdict(result) | {"speed_up": result.speed_up, "budget_held": result.budget_held})
    _show(result, output)
    if result.damaged or not result.budget_held:
        raise click.exceptions.Exit(FAILED)


def _serve(scene: Scene, port: int) -> None:
    """Serve `SERVED` shards until Ctrl-C, and print each request. Raises `ConfigError` for a port that is in use."""
    import tempfile
    import threading

    from forebay.cli.demo.play import pack
    from forebay.testing import Request, ScriptedServer

    def show(request: Request) -> None:
        output.line(f"{request.method} {request.path}")
        sys.stdout.flush()

    output = Output(as_json=False)
    with tempfile.TemporaryDirectory(prefix="forebay-demo-") as folder:
        try:
            server = ScriptedServer(port)
        except OSError as error:
            todo = "end the other `forebay demo --serve`, or pass --port"
            raise ConfigError(f"port {port}: {error.strerror}", name="--port", value=str(port), todo=todo) from error
        with server:
            server.rate, server.on_request = scene.rate, show
            for shard in pack(Path(folder), total=scene.size, count=SERVED):
                url = server.put(f"/{shard.name}", (Path(folder) / shard.name).read_bytes(), latency=scene.latency)
                output.line(f"{url}  {format_size(shard.size)}")
            output.line(f"{format_size(scene.rate)}/s for all together; press Ctrl-C to quit")
            sys.stdout.flush()
            threading.Event().wait()


def _show(result: Result, output: Output) -> None:
    first, second = result.epochs
    output.table(
        ("", "EPOCH 1>", "EPOCH 2>"),
        [
            ("seconds", f"{first.seconds:.1f}", f"{second.seconds:.1f}"),
            ("bytes that the workers read", format_size(first.read), format_size(second.read)),
            ("  of these from the remote", format_size(first.remote), format_size(second.remote)),
            ("  of these from the cache", format_size(first.read - first.remote), format_size(second.read - second.remote)),
            ("requests to the remote", first.requests, second.requests),
            ("hit rate", f"{first.hit_rate:.0%}", f"{second.hit_rate:.0%}"),
            ("speed-up", "", f"{result.speed_up:.1f}x"),
        ],
    )
    output.table(
        ("HALF A BUDGET", *(f"EPOCH {number}>" for number in range(1, len(result.half) + 1))),
        [
            ("seconds", *(f"{epoch.seconds:.1f}" for epoch in result.half)),
            ("requests to the remote", *(epoch.requests for epoch in result.half)),
            ("from the cache", *(f"{epoch.hit_rate:.0%}" for epoch in result.half)),
        ],
    )
    held = "held" if result.budget_held else "EXCEEDED"
    output.facts({
        "shards behind the remote": format_size(result.data),
        "workers killed with -9": 1 if result.killed else 0,
        "reads with a wrong byte": result.damaged,
        f"most on disk in {result.samples} samples": f"{format_size(result.peak)} of {format_size(result.budget)}: budget {held}",
        "on disk after the budget was halved": f"{format_size(result.left)} of {format_size(result.halved)}",
    })  # fmt: skip
