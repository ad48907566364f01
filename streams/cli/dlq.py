"""``streams dlq``."""

from __future__ import annotations

import getpass
from collections import Counter
from collections.abc import Callable
from typing import Annotated, Any

import typer

from streams.broker.registry import decoder
from streams.cli.common import AppArgument, Json, console, load_app, print_json, print_table
from streams.errors import ConfigurationError, SchemaError, StreamsError
from streams.event import CE_TYPE
from streams.jobs import redrive as redriving
from streams.jobs.redrive import Selection
from streams.schema.catalog import fields_of
from streams.settings import Settings
from streams.stores import overview
from streams.stores.jobs import Job, find_jobs
from streams.stores.postgres import Connection, connect

app = typer.Typer(help="Look at dead letters and send them back.", no_args_is_help=True)

_SHOWN = 1_000
Group = Annotated[str | None, typer.Option(help="only this consumer group, such as shop.stock-level")]


@app.command("list")
def list_letters(
    group: Group = None,
    each: Annotated[
        bool, typer.Option("--each", help="every dead letter instead of groups of like ones")
    ] = False,
    json: Json = False,
) -> None:
    """Show dead letters, those with like errors together.

    \b
    Examples:
      streams dlq list
      streams dlq list --group shop.stock-level --each
    """
    with _connect() as connection:
        if each:
            _list_each(connection, group, json)
        else:
            _list_groups(connection, group, json)


@app.command()
def show(
    job: Annotated[int, typer.Argument(help="the dead letter's job id, from 'streams dlq list --each'")],
    app: Annotated[
        str | None, typer.Option(help="the application, module:name, to decode the value with")
    ] = None,
    json: Json = False,
) -> None:
    """Show one dead letter: where it was, why it failed, what it holds, and what happened to it.

    \b
    Example:
      streams dlq show 42 --app processors.app:app
    """
    decode = decoder(Settings.load(), load_app(app).catalog) if app else None
    with _connect() as connection:
        found = find_jobs(connection, "id = %(id)s", {"id": job}, 1)
        if not found:
            raise ConfigurationError(f"there is no job {job}; streams dlq list --each shows those there are")
        details = {**_describe(found[0], decode), "history": overview.job_history(connection, job)}
    if json:
        print_json(details)
        return
    history = details.pop("history")
    print_table(["", ""], [[name, value] for name, value in details.items()], empty="")
    console.print()
    print_table(
        ["at", "from", "to", "attempt", "error"], (list(row.values()) for row in history), empty="no history"
    )


@app.command()
def redrive(
    app: AppArgument,
    group: Annotated[
        str, typer.Option(help="the consumer group or processor whose dead letters to send back")
    ],
    id: Annotated[int | None, typer.Option(help="only this one")] = None,
    key: Annotated[str | None, typer.Option(help="only those of this key")] = None,
    fingerprint: Annotated[
        str | None, typer.Option(help="only those with this error, from 'streams dlq list'")
    ] = None,
    execute: Annotated[
        bool, typer.Option("--execute", help="do it; without this only the plan is shown")
    ] = False,
    json: Json = False,
) -> None:
    """Send dead letters back to their processor; shows the plan first.

    Each goes to the group's own retry topic, so no other group sees it again. Done twice it is done once.

    \b
    Examples:
      streams dlq redrive processors.app:app --group stock-level
      streams dlq redrive processors.app:app --group stock-level --fingerprint 1f0c9a3b2d4e --execute
    """
    processor = redriving.processor_of(load_app(app), group)
    selection = Selection(processor.group, id, None if key is None else redriving.parse_key(key), fingerprint)
    expected: Counter[str] = Counter()
    sent = 0
    with _connect() as connection:
        for planned in redriving.plan(connection, processor, selection):
            expected[planned.expectation.value] += 1
            if execute:
                sent += redriving.execute(connection, processor, planned, getpass.getuser())
    if json:
        print_json({"group": processor.group, "executed": execute, "sent": sent, "plan": dict(expected)})
        return
    print_table(
        ["expected", "dead letters"],
        sorted(expected.items()),
        empty=f"{processor.group} has no such dead letters",
    )
    if execute:
        console.print(f"sent back {sent}")
    elif expected:
        console.print("this is the plan; add --execute to do it")


def _list_groups(connection: Connection, group: str | None, json: bool) -> None:
    groups = overview.dead_letter_groups(connection, group)
    if json:
        print_json(groups)
        return
    columns = ["group", "fingerprint", "count", "keys", "first", "last", "error"]
    print_table(columns, ([row[name] for name in columns] for row in groups), empty="no dead letters")


def _list_each(connection: Connection, group: str | None, json: bool) -> None:
    where = "status = 'dead_letter' AND (%(group)s::text IS NULL OR consumer_group = %(group)s)"
    jobs = find_jobs(connection, where, {"group": group}, _SHOWN)
    rows = [
        {
            "id": job.id,
            "group": job.consumer_group,
            "key": _text(job.key),
            "version": job.version,
            "position": f"{job.topic}/{job.partition}/{job.record_offset}",
            "attempts": job.attempt_count,
            "fingerprint": job.error_fingerprint,
            "error": _error(job),
        }
        for job in jobs
    ]
    if json:
        print_json(rows)
        return
    print_table(list(rows[0]) if rows else [], (list(row.values()) for row in rows), empty="no dead letters")
    if len(jobs) == _SHOWN:
        console.print(f"the oldest {_SHOWN:,} are shown; narrow with --group")


def _describe(job: Job, decode: Callable[[bytes], Any] | None) -> dict[str, Any]:
    kind = job.record.header(CE_TYPE)
    return {
        "id": job.id,
        "group": job.consumer_group,
        "status": job.status,
        "position": f"{job.topic}/{job.partition}/{job.record_offset}",
        "key": _text(job.key),
        "version": job.version,
        "type": None if kind is None else kind.decode(errors="replace"),
        "attempts": f"{job.attempt_count} of {job.max_attempts}",
        "redrives": job.redrive_count,
        "error": _error(job),
        "fingerprint": job.error_fingerprint,
        "value": None if job.value is None else job.value[:400].hex(),
        "data": _decoded(job, decode),
        "headers": {name: _text(value) for name, value in job.headers},
    }


def _decoded(job: Job, decode: Callable[[bytes], Any] | None) -> Any:
    if decode is None or job.value is None:
        return None
    try:
        return fields_of(decode(job.value))
    except (SchemaError, StreamsError) as error:
        return f"not decoded: {error}"


def _error(job: Job) -> str:
    return (
        f"{job.error_class}: {(job.last_error or '').splitlines()[0][:200]}"
        if job.last_error
        else job.error_class or ""
    )


def _text(value: bytes | None) -> str | None:
    return None if value is None else value.decode(errors="backslashreplace")


def _connect() -> Connection:
    settings = Settings.load()
    return connect(settings.database_url, autocommit=True, seconds=settings.connect_seconds)
