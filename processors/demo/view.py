"""What a user sees of a run: phases and counters while it goes on, a table at its end."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.table import Table

from processors.demo.audit import Audit
from processors.demo.watch import Numbers

_LINE_SECONDS = 2.0
_BARS = ("appended", "relayed", "applied")


class View:
    """Phases are lines; the counters are bars on a terminal, and a line now and then elsewhere."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._began = time.monotonic()
        self._line_at = 0.0
        self._progress: Progress | None = None

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._began

    def say(self, text: str) -> None:
        self._console.print(f"{self.seconds:5.1f} s  {text}", highlight=False, markup=False, soft_wrap=True)
        self._line_at = time.monotonic() + _LINE_SECONDS

    @contextmanager
    def counting(self, total: int) -> Iterator[None]:
        """Shows the counters for the block, on their way to a total."""
        if not self._console.is_terminal:
            yield
            return
        columns = (TextColumn("         {task.description:9}"), BarColumn(), MofNCompleteColumn())
        with Progress(
            *columns, console=self._console, refresh_per_second=4, transient=True
        ) as self._progress:
            for bar in _BARS:
                self._progress.add_task(bar, total=total)
            yield
        self._progress = None

    def update(self, numbers: Numbers) -> None:
        if self._progress is not None:
            for task, bar in enumerate(_BARS):
                self._progress.update(self._progress.task_ids[task], completed=getattr(numbers, bar))
        elif not self._console.is_terminal and time.monotonic() >= self._line_at:
            self.say(", ".join(f"{bar} {getattr(numbers, bar):,}" for bar in _BARS))


def result(numbers: Numbers, audit: Audit, *, restarts: int) -> Table:
    """What a run came to."""
    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column()
    table.add_column(justify="right")
    table.add_column(style="dim")
    relayed = sum(topic.relayed for topic in audit.topics)
    repeated = sum(topic.repeated for topic in audit.topics)
    rows: list[tuple[str, int, str]] = [
        ("events appended", audit.events, f"{numbers.conflicts:,} version conflicts decided again"),
        ("events relayed", relayed, f"{repeated:,} records sent twice"),
        ("events applied", numbers.applied, "by every processor that reads them"),
        (
            "duplicates suppressed",
            numbers.replayed + numbers.suppressed,
            f"{numbers.replayed:,} requests repeated, {numbers.suppressed:,} records seen before",
        ),
        ("rolled back", numbers.rolled_back, "checkouts that must never show"),
        ("retries", numbers.retries, "passing failures, and poison until it was buried"),
        ("dead letters", numbers.dead_lettered, f"{numbers.redriven:,} redriven after the fix"),
        ("processes restarted", restarts, "after SIGKILL"),
        ("audit: lost", audit.found.lost, f"{audit.rows:,} rows compared with a fold of the store"),
        ("audit: doubled", audit.found.doubled, ""),
        ("audit: out of order", audit.found.out_of_order, ""),
    ]
    for name, value, remark in rows:
        bad = name.startswith("audit") and value
        table.add_row(name, f"{value:,}", remark, style="red" if bad else None)
    return table
