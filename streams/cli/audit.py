"""``streams relay audit``."""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from datetime import UTC, datetime, timedelta
from typing import Annotated, Any

import typer
from rich.progress import BarColumn, TextColumn
from rich.progress import Progress as RichProgress

from streams.cli.common import Json, console, print_json, print_table, stderr
from streams.errors import ServerUnavailable
from streams.migrations import newest
from streams.observe import repair as repairs
from streams.observe.repair import Gaps
from streams.observe.topic_audit import Progress, TopicAudit, TopicAuditor, resource_types
from streams.settings import Settings
from streams.stores.postgres import connect, require_migrated

_LINE_SECONDS = 5.0
_UNITS = {"s": "seconds", "m": "minutes", "h": "hours", "d": "days", "w": "weeks"}
_COLUMNS = ("topic", "stored", "relayed", "missing")
_FINDINGS = ("expired", "repeated", "out_of_order", "republished", "blocked", "unknown")


def audit(
    resource_type: Annotated[
        list[str] | None, typer.Argument(help="only these; by default all of the store")
    ] = None,
    since: Annotated[
        str | None,
        typer.Option(metavar="TIME", help="only events recorded since then: 2h, 7d, or 2025-01-31T12:00:00"),
    ] = None,
    wait: Annotated[float, typer.Option(min=0, help="how many seconds the relay may take to confirm")] = 30.0,
    repair: Annotated[
        bool, typer.Option("--repair", help="send what is missing again, through the outbox")
    ] = False,
    yes: Annotated[bool, typer.Option("--yes", help="repair without asking")] = False,
    json: Json = False,
) -> None:
    """Compare the event store with its topics, and name events that did not arrive. Stops nothing.

    What is committed when it begins, the relay gets 30 seconds to confirm (--wait); events that it has not confirmed
    by then may still be on their way, which is said. Exits with 1 where something is missing, out of order, or in a
    topic and not in the store.

    Records that retention has deleted cannot be told from lost ones by the topic alone. Events from before the oldest
    record that remains in their partition count as expired, not as missing, if no earlier event of their resource
    remains, and are not sent again. With --since nothing counts as expired: what was recorded since then must be there.

    What the broker refused, and what waits behind it, counts as blocked and is not sent again: streams relay blocked.

    --repair writes what is missing to the outbox, per resource in order, waits for the relay, and compares again. It
    needs a relay that runs. Where later versions are in the topic already, an event that is sent again stands behind
    them, and counts as republished from then on; consumers tell by fp_version what they have had.

    \b
    Examples:
      streams relay audit
      streams relay audit order payment --since 2h --json
      streams relay audit order --repair
    """
    settings = Settings.load()
    begin = None if since is None else since_of(since)
    if repair and not yes and not sys.stdin.isatty():
        raise typer.BadParameter(
            "it asks before it sends, and this is no terminal; add --yes", param_hint="--repair"
        )
    with (
        connect(settings.database_url, autocommit=True, seconds=settings.connect_seconds) as connection,
        Gaps() as gaps,
    ):
        require_migrated(connection, newest())
        kinds = resource_type or resource_types(connection)

        def compare(gaps: Gaps | None = None) -> list[TopicAudit]:
            with _display(json=json) as progress:
                auditor = TopicAuditor(
                    connection, settings, since=begin, wait_seconds=wait, progress=progress
                )
                return [auditor.audit(kind, gaps) for kind in kinds]

        if repair:
            repairs.claim(connection)
        found = compare(gaps)
        if repair and gaps.events:
            _require_settled(found, json=json)
            if not json:
                _print(found, wait)
            if not yes:
                typer.confirm(f"send {gaps.events:,} events again?", abort=True, err=True)
            with _display(json=json) as progress:
                what = "sending again"
                repairs.republish(connection, settings, gaps, lambda done: progress(what, done, gaps.events))
            found = compare()
    if json:
        print_json(_rows(found))
    else:
        _print(found, wait)
    if not all(each.is_clean for each in found):
        raise typer.Exit(1)


def since_of(text: str) -> datetime:
    """The time that ``--since`` means: one ago, or one in ISO 8601, local where it names no zone."""
    ago = re.fullmatch(r"(\d+)([smhdw])", text)
    try:
        if ago is not None:
            return datetime.now(UTC) - timedelta(**{_UNITS[ago[2]]: int(ago[1])})
        return datetime.fromisoformat(text).astimezone()
    except (ValueError, OverflowError) as error:
        raise typer.BadParameter(
            f"{text} is no time; give one ago (30m, 2h, 7d), or such as 2025-01-31T12:00:00+01:00",
            param_hint="--since",
        ) from error


def _require_settled(found: Sequence[TopicAudit], *, json: bool) -> None:
    """Raises ServerUnavailable where what is missing may be on its way: it would be sent twice."""
    if all(each.settled for each in found):
        return
    if json:
        print_json(_rows(found))
    raise ServerUnavailable(
        f"nothing is sent again: the relay did not confirm what is committed, so {sum(each.missing for each in found):,} "
        "events may only be on their way. Start it first (streams relay run), or let it catch up (--wait)"
    )


def _rows(found: Sequence[TopicAudit]) -> list[dict[str, Any]]:
    return [{**asdict(each), "missing": each.missing} for each in found]


def _print(found: Sequence[TopicAudit], wait: float) -> None:
    rows = _rows(found)
    columns = [*_COLUMNS, *(name for name in _FINDINGS if any(row[name] for row in rows))]
    print_table(columns, ([row[name] for name in columns] for row in rows), empty="the store holds no events")
    for each in found:
        for resource_id, version in each.examples:
            console.print(f"missing in {each.topic}: {resource_id} version {version}")
    if not all(each.settled for each in found):
        console.print(f"the relay did not confirm within {wait:g} s: events may still be on their way")


@contextmanager
def _display(*, json: bool) -> Iterator[Progress]:
    """Shows on stderr how far it is: a bar on a terminal, otherwise a line every few seconds.

    Whoever asks for JSON and is no terminal is a program, and is told nothing.
    """
    if stderr.is_terminal:
        with RichProgress(
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.fields[count]}"),
            console=stderr,
            transient=True,
        ) as bar:
            bar.add_task("", count="")
            (task,) = bar.tasks

            def show(what: str, done: int, total: int | None, words: str) -> None:
                task.total = total  # update() would keep the last one where there is none
                bar.update(task.id, description=what, completed=done, count=words)

            yield _Paced(show, seconds=0)
    elif json:
        yield lambda *_: None
    else:
        yield _Paced(
            lambda what, _done, _total, words: stderr.print(f"{what}: {words}" if words else what),
            seconds=_LINE_SECONDS,
        )


class _Paced:
    """Passes progress on every so many seconds, with how far it is and how fast in words."""

    def __init__(self, show: Callable[[str, int, int | None, str], object], seconds: float) -> None:
        self._show, self._seconds = show, seconds
        self._what, self._began, self._from = "", 0.0, 0
        self._next = time.monotonic() + seconds

    def __call__(self, what: str, done: int, total: int | None) -> None:
        now = time.monotonic()
        if what != self._what:
            self._what, self._began, self._from = what, now, done
        if now < self._next:
            return
        self._next = now + self._seconds
        rate = (done - self._from) / max(now - self._began, 0.001)
        words = f"{done:,}" if total is None else f"{done:,} of {total:,}"
        self._show(what, done, total, f"{words}, {rate:,.0f}/s" if done else "")
