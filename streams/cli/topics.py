"""``streams topics``."""

from __future__ import annotations

import typer

from streams import topics
from streams.cli.common import AppArgument, Json, console, load_app, print_json, print_table
from streams.settings import Settings

app = typer.Typer(help="Plan and make the topics an application needs.", no_args_is_help=True)


@app.command()
def plan(app: AppArgument, json: Json = False) -> None:
    """Show which topics are there and which would be made.

    \b
    Example:
      streams topics plan processors.app:app
    """
    steps = topics.plan(load_app(app), Settings.load())
    if json:
        print_json([_as_dict(step) for step in steps])
        return
    print_table(
        ["action", "topic", "partitions", "now", "retention"],
        (
            [s.action, s.topic.name, s.topic.partitions, s.partitions_now, _retention(s.topic.retention_ms)]
            for s in steps
        ),
        empty="the application declares no topics",
    )


@app.command()
def apply(app: AppArgument, json: Json = False) -> None:
    """Make the topics that are missing; change none that exist.

    \b
    Example:
      streams topics apply processors.app:app
    """
    settings = Settings.load()
    made = topics.apply(topics.plan(load_app(app), settings), settings)
    if json:
        print_json([_as_dict(step) for step in made])
        return
    console.print(f"made {len(made)} topics" if made else "all topics are there")


def _as_dict(step: topics.Step) -> dict[str, object]:
    return {
        "action": step.action,
        "topic": step.topic.name,
        "partitions": step.topic.partitions,
        "partitions_now": step.partitions_now,
        "retention_ms": step.topic.retention_ms,
    }


def _retention(milliseconds: int) -> str:
    return "for ever" if milliseconds < 0 else f"{milliseconds / 3_600_000:g} h"
