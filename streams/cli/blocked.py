"""``streams relay blocked``."""

from __future__ import annotations

from typing import Annotated

import typer

from streams.cli.common import Json, console, migrated_database, print_json, print_table
from streams.errors import ConfigurationError
from streams.relay.watch import DECIDED
from streams.settings import Settings
from streams.stores import blocked as store
from streams.stores import relay

app = typer.Typer(help="Records that the broker refused for good.", invoke_without_command=True)

Ids = Annotated[list[int] | None, typer.Argument(help="as 'streams relay blocked' lists them")]
OfTopic = Annotated[str | None, typer.Option("--topic", help="all of this topic")]


@app.callback()
def blocked(
    context: typer.Context,
    all_: Annotated[bool, typer.Option("--all", help="also those that were decided on")] = False,
    limit: Annotated[int, typer.Option(min=1, help="how many at most")] = 100,
    json: Json = False,
) -> None:
    """List records that the broker refused for good, and how many wait behind each.

    Such a record stops its own key (or its topic, where the topic is at fault); every other key goes on. Mend the cause
    and send it again, or let it go; what waits behind it follows in order.

    \b
    Examples:
      streams relay blocked
      streams relay blocked resend 12 13
      streams relay blocked resend --topic events.order
      streams relay blocked let-go 12
    """
    if context.invoked_subcommand is not None:
        return
    settings = Settings.load()
    with migrated_database(settings) as connection:
        found = store.refused(connection, settings.slot, decided=all_, limit=limit)
    rows = [
        {
            "id": row.id,
            "topic": row.topic,
            "key": None if row.key is None else row.key.decode(errors="backslashreplace"),
            "bytes": row.bytes,
            "waits": row.lane,
            "behind": row.behind,
            "blocked_at": row.blocked_at.isoformat(timespec="seconds"),
            "reason": row.reason,
            "decision": row.decision,
        }
        for row in found
    ]
    if json:
        print_json(rows)
    else:
        columns = ["id", "topic", "key", "bytes", "waits", "behind", "blocked_at", "reason"]
        columns += ["decision"] if all_ else []
        print_table(columns, ([row[name] for name in columns] for row in rows), empty="nothing is blocked")


@app.command()
def resend(ids: Ids = None, topic: OfTopic = None) -> None:
    """Send refused records again, and what waits behind them. One that is refused again waits again.

    \b
    Examples:
      streams relay blocked resend 12
      streams relay blocked resend --topic events.order
    """
    _decide("resend", ids, topic, "to be sent again")


@app.command("let-go")
def let_go(
    ids: Ids = None,
    topic: OfTopic = None,
    yes: Annotated[bool, typer.Option("--yes", help="do not ask")] = False,
) -> None:
    """Give refused records up: they will never reach their topic, and what waits behind them goes on without them.

    The record stays in fencepost.relay_blocked, with the time of the decision.

    \b
    Example:
      streams relay blocked let-go 12
    """
    if not yes:
        typer.confirm("These records will never reach their topic. Go on?", abort=True)
    _decide("let_go", ids, topic, "given up")


def _decide(decision: store.Decision, ids: list[int] | None, topic: str | None, what: str) -> None:
    if bool(ids) == (topic is not None):
        raise ConfigurationError("say which records: their ids, or --topic")
    settings = Settings.load()
    with migrated_database(settings) as connection:
        decided = store.decide(connection, settings.slot, decision, ids, topic)
        relay.notify(connection, f"{DECIDED}: {settings.slot}")
        at_work = relay.holder(connection, settings.slot) is not None
    absent = sorted(set(ids or []) - set(decided))
    if absent:
        raise ConfigurationError(f"not refused, or decided on already: {', '.join(map(str, absent))}")
    console.print(
        f"{len(decided)} {what}" + ("" if at_work else "; no relay is at work now, the next one will do it")
    )
