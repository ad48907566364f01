"""One run of the demo, from starting the servers to the audit's judgement."""

from __future__ import annotations

import json
import shlex
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import psycopg
from rich.console import Console

from processors.demo import app as faulty
from processors.demo import audit, mock, view
from processors.demo.audit import Audit
from processors.demo.place import Place, place
from processors.demo.processes import ROOT, Children
from processors.demo.watch import Numbers, Watch
from processors.demo.workload import workload
from streams import StreamsError, topics
from streams.jobs import redrive
from streams.migrations import runner
from streams.relay import slot
from streams.stores.postgres import connect

_PROCESSORS = ("processor-1", "processor-2")
_TABLES = (ROOT / "processors" / "tables.sql", Path(__file__).parent / "tables.sql")
_OUTAGE_AT, _KILLS_AT = 0.2, 0.5
_OUTAGE_SECONDS = 2.0  # less than all attempts together take
_LOOK_SECONDS = 0.4
_PATIENCE_SECONDS = 180.0


@dataclass(frozen=True)
class Outcome:
    """What a run came to, and how to look at what it left. ``redriven_job`` is one that was buried and sent back."""

    numbers: Numbers
    audit: Audit
    restarts: int
    redriven_job: int
    place: Place
    seconds: float = 0.0

    @property
    def next_commands(self) -> list[str]:
        """What to try now."""
        if not self.place.kept:
            return ["streams demo --keep", "streams dev up", "streams run processors.app:app --with-relay"]
        where = f"STREAMS_DEV_DIR={shlex.quote(str(self.place.directory))}"
        story = f"dlq show {self.redriven_job} --app processors.app:app"
        return [f"{where} streams {command}" for command in ("status", story, "dev down")]

    def as_json(self) -> dict[str, object]:
        return {
            "appended": self.audit.events,
            "relayed": sum(topic.relayed for topic in self.audit.topics),
            "lost": self.audit.found.lost,
            "doubled": self.audit.found.doubled,
            "out_of_order": self.audit.found.out_of_order,
            "dead_lettered": self.numbers.dead_lettered,
            "redriven": self.numbers.redriven,
            "seconds": round(self.seconds, 1),
            "kafka": self.place.kafka,
        }


def run(events: int, seed: int, *, keep: bool, console: Console) -> Outcome:
    """Runs the demo.

    Raises:
        StreamsError: it could not be run to its end; the message says at what it stood.
    """
    shown = view.View(console)
    with place(keep=keep, report=shown.say) as here:
        outcome = _Run(here, events, seed, shown).result()
    return replace(outcome, seconds=shown.seconds)


class _Run:
    """A run in a place that is up."""

    def __init__(self, here: Place, events: int, seed: int, shown: view.View) -> None:
        self._place, self._events, self._seed, self._view = here, events, seed, shown
        self._settings = here.settings
        self._planned = workload(seed, events).events
        self._outage = here.directory / "outage"
        self._app = faulty.faulty_shop(here.name)
        self._children = Children(here.logs, {**here.environment, "DEMO_OUTAGE": str(self._outage)})

    def result(self) -> Outcome:
        self._outage.unlink(missing_ok=True)
        self._prepare()
        try:
            with connect(self._settings.database_url, name="fencepost demo", autocommit=True) as connection:
                self._watch = Watch(connection, self._settings, self._app)
                self._load()
                self._fix_and_redrive()
                return self._judge()
        finally:
            self._children.close()

    def _prepare(self) -> None:
        self._view.say("migrating, and making topics")
        runner.migrate(self._settings.database_url)
        with psycopg.connect(self._settings.database_url) as connection:
            for file in _TABLES:
                connection.execute(file.read_bytes())
        slot.ensure(self._settings.database_url, self._settings.slot)
        if self._place.kafka == "mock":
            mock.make_topics(self._app, self._settings)
        else:
            topics.apply(topics.plan(self._app, self._settings), self._settings)

    def _load(self) -> None:
        self._children.start("relay", [*self._command, "relay", "run"])
        self._start_processors(fixed=False)
        arguments = ["--seed", str(self._seed), "--events", str(self._events)]
        self._children.start("service", ["-m", "processors.demo.service", *arguments], ends=True)
        self._view.say("started: a service, a relay, two processors")
        with self._view.counting(self._planned):
            self._until(self._appended(_OUTAGE_AT))
            self._outage.touch()
            self._view.say("a dependency of the processors goes down")
            back = time.monotonic() + _OUTAGE_SECONDS
            self._until(lambda: time.monotonic() >= back)
            self._outage.unlink()
            self._view.say("it is back")
            self._until(self._appended(_KILLS_AT))
            for name in ("relay", _PROCESSORS[0]):
                self._children.kill(name)
            self._view.say(f"kill -9: the relay and {_PROCESSORS[0]}; they start again")
            self._until(lambda: not self._children.is_running("service"))
            self._view.say("the service is done")
            self._until(self._watch.is_settled)

    def _fix_and_redrive(self) -> None:
        dead = self._watch.numbers().dead_lettered
        self._view.say(
            f"everything is applied but {dead} dead letters and what waits behind them; deploying the fix"
        )
        self._children.stop(_PROCESSORS)
        self._start_processors(fixed=True)
        sent = 0
        for processor in self._app.processors.values():
            selection = redrive.Selection(processor.group)
            for planned in redrive.plan(self._watch.connection, processor, selection):
                sent += redrive.execute(self._watch.connection, processor, planned, "demo")
        self._view.say(f"{sent} dead letters sent back")
        self._until(self._watch.is_settled)

    def _judge(self) -> Outcome:
        self._view.say("settled; comparing every row with a fold over the event store")
        self._children.close()
        notifications = next(topic for topic in self._app.topics if topic.exact)
        judged = audit.audit(
            self._watch.connection, self._settings, notifications.name(self._settings), self._planned
        )
        return Outcome(
            self._watch.numbers(), judged, self._children.restarts, self._watch.redriven_job(), self._place
        )

    def _start_processors(self, *, fixed: bool) -> None:
        environment = {
            "STREAMS_KAFKA_OPTIONS": self._consuming,
            # Records gather for a moment: they are applied a tenth of a second later, for half the work.
            "STREAMS_LINGER_MS": "100",
            **({"DEMO_FIXED": "1"} if fixed else {}),
        }
        for name in _PROCESSORS:
            self._children.start(name, [*self._command, "run", "processors.demo.app:app"], environment)

    @property
    def _command(self) -> list[str]:
        """The arguments of Python that run the command line."""
        return ["-m", "processors.demo.mock" if self._place.kafka == "mock" else "streams.cli.main"]

    @property
    def _consuming(self) -> str:
        """Client options of the processors, as JSON."""
        mocked = mock.OPTIONS if self._place.kafka == "mock" else {}
        return json.dumps({**self._settings.kafka_options, **mocked})

    def _appended(self, share: float) -> Callable[[], bool]:
        return lambda: self._numbers.appended >= share * self._planned

    def _until(self, condition: Callable[[], bool]) -> None:
        """Waits for a condition, and meanwhile looks after the processes and the view.

        Raises:
            StreamsError: it does not come true, with what is missing.
        """
        numbers, deadline = Numbers(), time.monotonic() + _PATIENCE_SECONDS
        while True:
            self._children.watch()
            self._numbers = self._watch.numbers()
            self._view.update(self._numbers)
            if condition():
                return
            if self._numbers != numbers:  # slow is not stuck
                numbers, deadline = self._numbers, time.monotonic() + _PATIENCE_SECONDS
            if time.monotonic() > deadline:
                self._watch.is_settled()
                raise StreamsError(
                    f"nothing has moved for {_PATIENCE_SECONDS:.0f} s, and there are still {self._watch.missing}; "
                    f"the processes' logs are in {self._place.logs}"
                )
            time.sleep(_LOOK_SECONDS)
