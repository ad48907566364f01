"""``streams run``."""

from __future__ import annotations

import os
from typing import Annotated

import typer

from streams.cli.common import (
    AppArgument,
    MetricsPort,
    load_app,
    serve_metrics,
    spare_the_collector,
    stderr,
    stop_on_signals,
)
from streams.consume.supervise import Supervisor
from streams.errors import ConfigurationError
from streams.migrations import newest
from streams.settings import Settings
from streams.stores.postgres import connect, require_migrated
from streams.topics import plan

_REPORT_SECONDS = 10.0


def run(
    app: AppArgument,
    processor: Annotated[
        list[str] | None, typer.Option(help="run only this one; may be given several times")
    ] = None,
    with_relay: Annotated[
        bool,
        typer.Option(
            "--with-relay", help="also relay the outbox of the processors' database, or stand by for it"
        ),
    ] = False,
    metrics_port: MetricsPort = None,
) -> None:
    """Run an application's processors until stopped.

    Start as many processes as you like: they share the partitions. Stopping with Ctrl-C or SIGTERM finishes the
    batch in hand; a second signal ends at once, which loses nothing either.

    \b
    Examples:
      streams run processors.app:app
      streams run processors.app:app --processor stock-level --with-relay
    """
    settings = Settings.load()
    application = load_app(app)
    chosen = (
        [application.processor(name) for name in processor]
        if processor
        else list(application.processors.values())
    )
    if not chosen:
        raise ConfigurationError(f"{app} has no processors")
    with connect(settings.database_url, seconds=settings.connect_seconds) as connection:
        require_migrated(connection, newest())
    missing = [step.topic.name for step in plan(application, settings) if step.action == "create"]
    if missing:
        raise ConfigurationError(f"topics are missing: {', '.join(missing)}; run: streams topics apply {app}")
    serve_metrics(metrics_port)
    spare_the_collector()
    stop = stop_on_signals()
    supervisor = Supervisor(settings, chosen, stop, with_relay=with_relay)
    stderr.print(
        f"running {', '.join(p.name for p in chosen)}{' and a relay' if with_relay else ''}; Ctrl-C stops"
    )
    supervisor.start()
    while not stop.wait(_REPORT_SECONDS):
        for name, worker in supervisor.workers.items():
            if worker.settled:
                counts = ", ".join(f"{count:,} {what}" for what, count in worker.settled.items())
                stderr.print(f"{name}: {counts}")
    still = supervisor.join(settings.drain_seconds)
    if still:
        stderr.print(
            f"stopped without {', '.join(still)}, which did not end within {settings.drain_seconds:.0f} s"
        )
        # Daemon threads in the middle of a C call would hold the interpreter's end up; nothing uncommitted is lost.
        os._exit(1)
    stderr.print("stopped")
