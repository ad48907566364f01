"""What a user registers: an application, its topics, and its processors."""

from __future__ import annotations

import difflib
import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal, get_args

from streams.backoff import Retry
from streams.effects import Effects
from streams.errors import ConfigurationError
from streams.event import Event
from streams.schema.catalog import Catalog, is_event_class
from streams.settings import Settings

Ordering = Literal["key", "partition", "none"]
Versions = Literal["strict", "latest", "none"]
Project = Callable[[Event, Effects], None]

_NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,99}")


@dataclass(frozen=True)
class Topic:
    """A topic of domain events.

    Attributes:
        resource_type: what its events happened to; the topic is ``<prefix><resource_type>``. With ``exact=True``
            it is the topic's whole name.
        partitions: how far it can be spread; more cannot be made later without moving keys.
        retention_hours: how long the broker keeps records; None keeps them for ever.
    """

    resource_type: str
    partitions: int = 6
    retention_hours: float | None = None
    exact: bool = False

    def name(self, settings: Settings) -> str:
        return self.resource_type if self.exact else settings.topic_prefix + self.resource_type


@dataclass(frozen=True)
class Processor:
    """A projection as registered. See ``App.projection`` for what the options mean."""

    name: str
    group: str
    topics: tuple[Topic, ...]
    project: Project
    catalog: Catalog
    ordering: Ordering
    versions: Versions
    events: frozenset[type] | None
    tombstones: bool
    retry: Retry

    @property
    def has_lanes(self) -> bool:
        """Whether records may have to wait behind an earlier one of their key."""
        return self.ordering == "key" or self.versions == "strict"

    @property
    def dead_letter_topic(self) -> str:
        return f"{self.group}.dlq"

    @property
    def retry_topics(self) -> tuple[str, ...]:
        return tuple(f"{self.group}.retry.{tier}" for tier in self.retry.tiers)

    def retry_topic(self, delay_seconds: float) -> str:
        return f"{self.group}.retry.{self.retry.tier(delay_seconds)}"


@dataclass
class App:
    """An application: the topics it knows and the processors that read them.

    Args:
        name: begins the name of each consumer group, ``<app>.<processor>``.
        catalog: the event classes.
        topics: the topics that ``streams topics apply`` makes, with the retry and dead-letter topics of each processor.
    """

    name: str
    catalog: Catalog
    topics: Sequence[Topic]
    processors: dict[str, Processor] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        _require_name("application", self.name)
        if not self.topics:
            raise ConfigurationError(f"application {self.name} declares no topics")
        for topic, count in Counter(topic.resource_type for topic in self.topics).items():
            if count > 1:
                raise ConfigurationError(f"application {self.name} declares topic {topic} {count} times")

    def projection(
        self,
        name: str,
        *,
        topics: Iterable[str],
        versions: Versions = "strict",
        ordering: Ordering = "key",
        events: Iterable[type] | None = None,
        tombstones: bool = False,
        retry: Retry | None = None,
    ) -> Callable[[Project], Project]:
        """Registers ``project(event, effects)``, which says what an event changes in the read model.

        The function only decides: it collects effects and does nothing itself, so that it can be repeated.

        Args:
            name: of the processor; with the application's name it is the consumer group.
            topics: resource types, each declared in ``App(topics=…)``.
            versions: ``"strict"``: of each resource exactly the next version is applied, for changes that build on
                the one before; ``"latest"``: a newer one replaces, for events that carry the full state; ``"none"``:
                records carry no versions, and repetitions are known by their event id.
            ordering: ``"key"``: later records of a failing key wait behind it, other keys go on; ``"partition"``:
                the partition waits, and the record is tried in place; ``"none"``: nothing waits.
            events: the event classes to be handed over; others are counted as filtered. None means all.
            tombstones: hand over records without a value (``event.data is None``); otherwise they are filtered.
            retry: how often and when a passing failure is tried again.

        Raises:
            ConfigurationError: a name is taken, a topic is not declared, or the options contradict each other.
        """
        _require_name("processor", name)
        if name in self.processors:
            raise ConfigurationError(f"processor {name} is registered twice")
        _require_option(name, "versions", versions, get_args(Versions))
        _require_option(name, "ordering", ordering, get_args(Ordering))
        if versions == "strict" and ordering == "none":
            raise ConfigurationError(
                f"processor {name}: versions='strict' applies in order, so ordering='none' cannot be"
            )
        if isinstance(topics, str):
            raise ConfigurationError(f"processor {name}: topics is a list, such as topics=['{topics}']")
        chosen = tuple(self._topic(topic) for topic in topics)
        if not chosen:
            raise ConfigurationError(f"processor {name} reads no topics")
        for event in events or ():
            if not is_event_class(event):
                raise ConfigurationError(
                    f"processor {name}: {event!r} is not an event class; declare it with @catalog.event"
                )

        def register(project: Project) -> Project:
            self.processors[name] = Processor(
                name=name,
                group=f"{self.name}.{name}",
                topics=chosen,
                project=project,
                catalog=self.catalog,
                ordering=ordering,
                versions=versions,
                events=None if events is None else frozenset(events),
                tombstones=tombstones,
                retry=retry or Retry(),
            )
            return project

        return register

    def processor(self, name: str) -> Processor:
        """The processor of that name.

        Raises:
            ConfigurationError: there is none; the message names the closest.
        """
        if name not in self.processors:
            raise ConfigurationError(f"there is no processor {name}; {_suggest(name, self.processors)}")
        return self.processors[name]

    def _topic(self, resource_type: str) -> Topic:
        known = {topic.resource_type: topic for topic in self.topics}
        if resource_type not in known:
            raise ConfigurationError(
                f"topic {resource_type} is not declared in App(topics=…); {_suggest(resource_type, known)}"
            )
        return known[resource_type]


def _require_name(what: str, name: str) -> None:
    if not _NAME.fullmatch(name):
        raise ConfigurationError(
            f"{what} name {name!r} must be lower-case letters, digits, '.', '_' or '-', at most 100 of them"
        )


def _require_option(processor: str, option: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ConfigurationError(
            f"processor {processor}: {option}={value!r} cannot be; {_suggest(value, allowed)}"
        )


def _suggest(name: str, known: Iterable[str]) -> str:
    names = sorted(known)
    close = difflib.get_close_matches(name, names, n=1)
    return f"did you mean {close[0]}?" if close else f"known are {', '.join(names) or 'none'}"
