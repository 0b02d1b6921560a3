"""``bssearch plan``: what can be known before anything runs."""

from __future__ import annotations

import typer

from bssearch.cli.plan import accumulation, learning_rate, memory, scale, start

app = typer.Typer(help="Plan before anything runs: arithmetic and traces, no training.", no_args_is_help=True)
app.command("memory")(memory.memory)
app.command("lr")(learning_rate.lr)
app.command("accumulation")(accumulation.accumulation)
app.command("scale")(scale.scale)
app.command("start")(start.start)
