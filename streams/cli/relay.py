"""``streams relay``."""

from __future__ import annotations

import threading
import time
from dataclasses import asdict
from typing import Annotated, Any

import typer

from streams.broker import registry
from streams.broker.registry import Framing
from streams.cli import blocked
from streams.cli.audit import audit
from streams.cli.common import (
    Json,
    MetricsPort,
    console,
    load_app,
    migrated_database,
    print_json,
    serve_metrics,
    spare_the_collector,
    stderr,
    stop_on_signals,
)
from streams.errors import ConfigurationError, RelayBlocked
from streams.relay import slot, switch
from streams.relay.relay import Relay
from streams.relay.watch import HAND_OVER, budget_bytes
from streams.settings import Settings
from streams.stores import blocked as blocked_store
from streams.stores import relay as store
from streams.stores.postgres import Connection

app = typer.Typer(help="Publish committed events to their topics.", no_args_is_help=True)
app.command("audit")(audit)
app.add_typer(blocked.app, name="blocked")

_REPORT_SECONDS = 10.0
_HAND_OVER_SECONDS = 15.0


@app.command()
def run(
    app_: Annotated[
        str | None,
        typer.Option("--app", metavar="APP", help="where the schemas are, as module:name; for a registry"),
    ] = None,
    metrics_port: MetricsPort = None,
) -> None:
    """Publish what was committed, until stopped.

    Any number may be started: one is at work, the others stand by and take over within two seconds when it dies
    (within twelve when its whole machine does, or it freezes). Stopping with Ctrl-C or SIGTERM sends and confirms what
    is in hand. Where the rows come from is set by STREAMS_RELAY_SOURCE: the log as a stream (log), the log by SQL
    (peek), or the tables where there is no logical replication (poll); it may be changed at any time.

    With STREAMS_REGISTRY_URL values go out in the frame of that schema registry, and schemas are registered as they
    are met; the relay then has to know them.

    \b
    Examples:
      STREAMS_DATABASE_URL=postgresql://app@db/shop STREAMS_KAFKA=kafka:9092 streams relay run
      STREAMS_REGISTRY_URL=http://registry:8081 streams relay run --app processors.app:app
    """
    settings = Settings.load()
    framing = _framing(settings, app_)
    migrated_database(settings).close()
    spare_the_collector()
    stop = stop_on_signals()
    relay = Relay(settings, stop, framing)
    serve_metrics(metrics_port)
    reporter = threading.Thread(target=_report, args=(relay, stop), daemon=True)
    reporter.start()
    stderr.print(f"relay of slot {settings.slot}: {settings.kafka}; Ctrl-C stops it")
    relay.run(on_active=lambda: stderr.print("at work"))
    stderr.print(
        f"stopped: {relay.progress.sent:,} records sent, log confirmed to {relay.progress.confirmed}"
    )


@app.command()
def handover(json: Json = False) -> None:
    """Let a relay that stands by take over, in less than a second; the one at work stands by from then on.

    For a planned stop without a pause: hand over, then stop the other. Exits with 1 where nobody stands by.

    \b
    Example:
      streams relay handover
    """
    settings = Settings.load()
    with migrated_database(settings) as connection:
        before, running = store.holder(connection, settings.slot), store.running(connection, settings.slot)
        if before is None:
            raise RelayBlocked("no relay is at work; start one: streams relay run")
        if running < 2:  # noqa: PLR2004 - one at work, one standing by
            raise RelayBlocked("no relay stands by; start a second one: streams relay run")
        began = time.monotonic()
        store.notify(connection, f"{HAND_OVER}: {settings.slot}")
        while (now := store.holder(connection, settings.slot)) in (before, None):
            if time.monotonic() - began > _HAND_OVER_SECONDS:
                raise RelayBlocked(
                    f"nobody has taken over within {_HAND_OVER_SECONDS:.0f} s; see: streams relay status"
                )
            time.sleep(0.01)
        seconds = round(time.monotonic() - began, 3)
    if json:
        print_json({"seconds": seconds, "from_pid": before, "to_pid": now})
    else:
        console.print(f"taken over after {seconds * 1000:,.0f} ms")


@app.command()
def status(json: Json = False) -> None:
    """Show who is at work, how much log is kept for the relay, what holds it back, and what is blocked.

    \b
    Examples:
      streams relay status
      streams relay status --json
    """
    settings = Settings.load()
    with migrated_database(settings) as connection:
        found = _status(connection, settings)
    if json:
        print_json(found)
        return
    at_work = f"pid {found['holder_pid']} of the database" if found["holder_pid"] else "nobody"
    console.print(f"slot {settings.slot}: {at_work} is at work, {found['standing_by']} standing by")
    if found["polling"]:
        console.print(f"the tables are polled: {found['polling']}")
    log = found["log"]
    if log:
        budget = found["budget_bytes"]
        of_budget = f", {100 * log['retained_bytes'] / budget:.0f} % of its budget" if budget else ""
        console.print(
            f"log: {log['unconfirmed_bytes']:,} bytes not confirmed, {log['retained_bytes']:,} retained{of_budget} "
            f"(wal_status {log['wal_status']})"
        )
    if found["held_back_by"]:
        console.print(f"the oldest open transaction: {store.OpenTransaction(**found['held_back_by'])}")
    console.print(f"blocked: {found['refused']} refused, {found['behind']} behind them")


@app.command()
def begin(
    yes: Annotated[bool, typer.Option("--yes", help="do not ask")] = False,
) -> None:
    """Begin from now, where the place to go on from is lost: a dropped slot, a restored or promoted server.

    Events from before that did not reach their topics are sent by the audit, once a relay runs.

    \b
    Example:
      streams relay begin && streams relay run &
      streams relay audit --repair
    """
    settings = Settings.load()
    with migrated_database(settings) as connection:
        if settings.relay_source != "poll":
            slot.require_able(connection, settings.slot, settings.publication)
        slot.exists(connection, settings.slot)
    if not yes:
        typer.confirm("What was committed until now will only be sent by the audit. Go on?", abort=True)
    switch.begin_now(settings)
    console.print("begun; now start a relay, then: streams relay audit --repair")


def _status(connection: Connection, settings: Settings) -> dict[str, Any]:
    log = store.log(connection, settings.slot)
    oldest = store.oldest_transaction(connection)
    refused, behind = blocked_store.counts(connection, settings.slot)
    holder = store.holder(connection, settings.slot)
    return {
        "slot": settings.slot,
        "holder_pid": holder,
        "standing_by": store.running(connection, settings.slot) - (holder is not None),
        "polling": store.why_polling(connection, settings.slot),
        "log": None if log is None else asdict(log),
        "budget_bytes": None if log is None else budget_bytes(settings, log),
        "held_back_by": None if oldest is None else asdict(oldest),
        "refused": refused,
        "behind": behind,
    }


def _framing(settings: Settings, where: str | None) -> Framing | None:
    if settings.registry_url is None:
        return None
    if where is None:
        raise ConfigurationError(
            "STREAMS_REGISTRY_URL is set, so the relay has to know the schemas; say where they are: streams relay run "
            "--app processors.app:app"
        )
    return registry.framing(settings, load_app(where).catalog)


def _report(relay: Relay, stop: threading.Event) -> None:
    sent = 0
    while not stop.wait(_REPORT_SECONDS):
        now = relay.progress
        if now.sent != sent:
            stderr.print(
                f"{now.sent:,} records sent, {(now.sent - sent) / _REPORT_SECONDS:,.0f}/s, confirmed to {now.confirmed}"
            )
        sent = now.sent
