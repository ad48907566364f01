"""``streams status``."""

from __future__ import annotations

from streams.broker import kafka
from streams.cli.common import Json, console, print_json, print_table
from streams.migrations import newest
from streams.observe import status as observed
from streams.settings import Settings
from streams.stores import overview
from streams.stores.postgres import connect, require_migrated


def status(json: Json = False) -> None:
    """Show how far everything is: the relay's slot, each group's lag, and the jobs by state.

    \b
    Examples:
      streams status
      streams status --json
    """
    settings = Settings.load()
    with connect(settings.database_url, autocommit=True, seconds=settings.connect_seconds) as connection:
        require_migrated(connection, newest())
        relay = overview.relay(connection, settings.slot)
        groups = observed.groups(connection, kafka.end_offsets(settings, overview.topics(connection)))
        jobs = overview.jobs(connection)
    if json:
        print_json({"relay": relay, "groups": groups, "jobs": jobs})
        return
    console.print(
        f"relay: slot {settings.slot} {relay['state']}, {relay['behind_bytes']:,} bytes of log not yet confirmed"
    )
    console.print()
    print_table(
        list(groups[0]) if groups else [],
        (list(row.values()) for row in groups),
        empty="no group has run yet",
    )
    console.print()
    print_table(
        list(jobs[0]) if jobs else [],
        (list(row.values()) for row in jobs),
        empty="no unfinished jobs",
    )
