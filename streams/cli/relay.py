"""``streams relay``."""

from __future__ import annotations

import threading

import typer

from streams.cli.common import spare_the_collector, stderr, stop_on_signals
from streams.migrations import newest
from streams.relay.relay import Relay
from streams.settings import Settings
from streams.stores.postgres import connect, require_migrated

app = typer.Typer(help="Publish committed events to their topics.", no_args_is_help=True)

_REPORT_SECONDS = 10.0


@app.callback()
def _group() -> None:
    pass


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


def _report(relay: Relay, stop: threading.Event) -> None:
    sent = 0
    while not stop.wait(_REPORT_SECONDS):
        now = relay.progress
        if now.sent != sent:
            stderr.print(
                f"{now.sent:,} records sent, {(now.sent - sent) / _REPORT_SECONDS:,.0f}/s, confirmed to {now.confirmed}"
            )
        sent = now.sent
