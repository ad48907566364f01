"""``streams relay``."""

from __future__ import annotations

import threading
from dataclasses import asdict
from typing import Annotated

import typer

from streams.cli.common import (
    Json,
    console,
    print_json,
    print_table,
    spare_the_collector,
    stderr,
    stop_on_signals,
)
from streams.migrations import newest
from streams.observe import audit as audits
from streams.relay.relay import Relay
from streams.settings import Settings
from streams.stores.postgres import connect, require_migrated

app = typer.Typer(help="Publish committed events to their topics.", no_args_is_help=True)

_REPORT_SECONDS = 10.0


@app.command()
def run() -> None:
    """Read the database's log and publish what was committed, until stopped.

    Any number may be started: one reads the slot, the others stand by and take over when it dies. Stopping with
    Ctrl-C or SIGTERM sends and confirms what is in hand.

    \b
    Example:
      STREAMS_DATABASE_URL=postgresql://app@db/shop STREAMS_KAFKA=kafka:9092 streams relay run
    """
    settings = Settings.load()
    with connect(settings.database_url, seconds=settings.connect_seconds) as connection:
        require_migrated(connection, newest())
    spare_the_collector()
    stop = stop_on_signals()
    relay = Relay(settings, stop)
    reporter = threading.Thread(target=_report, args=(relay, stop), daemon=True)
    reporter.start()
    stderr.print(f"relay of slot {settings.slot}: {settings.kafka}; Ctrl-C stops it")
    relay.run(on_active=lambda: stderr.print("reading the log"))
    stderr.print(
        f"stopped: {relay.progress.sent:,} records sent, log confirmed to {relay.progress.confirmed}"
    )


@app.command()
def audit(
    resource_type: Annotated[
        list[str] | None, typer.Argument(help="only these; by default all of the store")
    ] = None,
    json: Json = False,
) -> None:
    """Compare the event store with its topics, and name events that did not arrive. Stops nothing.

    Events that are still on their way count as missing, and so do records that retention has deleted. Exits with 1
    where something is missing, out of order, or in a topic and not in the store.

    \b
    Examples:
      streams relay audit
      streams relay audit order payment --json
    """
    settings = Settings.load()
    with connect(settings.database_url, autocommit=True, seconds=settings.connect_seconds) as connection:
        require_migrated(connection, newest())
        found = [
            audits.topic(connection, settings, kind)
            for kind in resource_type or audits.resource_types(connection)
        ]
    rows = [{**asdict(each), "missing": each.missing} for each in found]
    if json:
        print_json(rows)
    else:
        columns = ["topic", "stored", "relayed", "missing", "repeated", "out_of_order", "unknown"]
        print_table(
            columns, ([row[name] for name in columns] for row in rows), empty="the store holds no events"
        )
        for each in found:
            for resource_id, version in each.examples:
                console.print(f"missing in {each.topic}: {resource_id} version {version}")
    if any(each.missing or each.out_of_order or each.unknown for each in found):
        raise typer.Exit(1)


def _report(relay: Relay, stop: threading.Event) -> None:
    sent = 0
    while not stop.wait(_REPORT_SECONDS):
        now = relay.progress
        if now.sent != sent:
            stderr.print(
                f"{now.sent:,} records sent, {(now.sent - sent) / _REPORT_SECONDS:,.0f}/s, confirmed to {now.confirmed}"
            )
        sent = now.sent
