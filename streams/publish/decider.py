"""Deciders: state is a fold over events, a command becomes events (the pattern is Jérémie Chassaing's "Decider")."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar, overload

from streams.errors import ConfigurationError, VersionConflict
from streams.publish.events import Appended, append_steps, load_steps
from streams.schema.catalog import Catalog
from streams.stores import event_store
from streams.stores.event_store import Resource
from streams.stores.steps import AsyncConnection, Steps, SyncConnection, run

State = TypeVar("State")
Command = TypeVar("Command")


@dataclass(frozen=True)
class Snapshots(Generic[State]):
    """Keeps the folded state every so many events, so that a long history need not be read whole.

    Attributes:
        tag: names the code that can read the state; change it whenever ``evolve`` or the state changes, and old
            snapshots are no longer looked at.
        every: how many events apart.
        dump, load: the state to bytes and back.
    """

    tag: str
    dump: Callable[[State], bytes]
    load: Callable[[bytes], State]
    every: int = 100


@dataclass(frozen=True)
class Decider(Generic[State, Command]):
    """How one type of resource decides.

    Attributes:
        resource_type: what it decides about.
        catalog: the event classes.
        initial: the state before the first event.
        decide: ``(state, command) -> events``; pure. Raises to refuse; answers nothing where there is nothing to do.
        evolve: ``(state, event) -> state``; pure, and total: what happened cannot be refused.
    """

    resource_type: str
    catalog: Catalog
    initial: State
    decide: Callable[[State, Command], Sequence[object]]
    evolve: Callable[[State, Any], State]
    snapshots: Snapshots[State] | None = None


@overload
def execute(
    connection: SyncConnection,
    decider: Decider[State, Command],
    resource_id: str,
    command: Command,
    *,
    idempotency_key: str | None = None,
    request: bytes | None = None,
    attempts: int = 5,
    traceparent: str | None = None,
) -> Appended | None: ...
@overload
def execute(
    connection: AsyncConnection,
    decider: Decider[State, Command],
    resource_id: str,
    command: Command,
    *,
    idempotency_key: str | None = None,
    request: bytes | None = None,
    attempts: int = 5,
    traceparent: str | None = None,
) -> Awaitable[Appended | None]: ...
def execute(
    connection: SyncConnection | AsyncConnection,
    decider: Decider[State, Command],
    resource_id: str,
    command: Command,
    *,
    idempotency_key: str | None = None,
    request: bytes | None = None,
    attempts: int = 5,
    traceparent: str | None = None,
) -> Appended | Awaitable[Appended | None] | None:
    """Loads the resource, decides, appends; where another writer was first, loads and decides again.

    With an idempotency key the whole command is done once: a repetition answers what the first did, without
    deciding. ``request`` are the bytes that make two requests the same; by default ``repr(command)``.

    Returns:
        What was appended, or None where the decision was that nothing happens.

    Raises:
        VersionConflict: others were first each of ``attempts`` times.
        IdempotencyMismatch: the key was used with another request.
        Whatever ``decide`` raises to refuse the command; nothing is written then.
    """
    if attempts < 1:
        raise ConfigurationError("attempts must be at least 1")
    if idempotency_key is not None and request is None:
        request = repr(command).encode()
    return run(
        connection, _execute(decider, resource_id, command, idempotency_key, request, attempts, traceparent)
    )


def _execute(
    decider: Decider[State, Command],
    resource_id: str,
    command: Command,
    key: str | None,
    request: bytes | None,
    attempts: int,
    trace: str | None,
) -> Steps[Appended | None]:
    resource = Resource(decider.resource_type, resource_id)
    before = yield from _before(resource, key, request)
    if before is not None:
        return before
    for attempt in range(1, attempts + 1):
        state, version = yield from _fold(decider, resource)
        events, refusal = _decide(decider, state, command)
        if not events:
            # The same request may have been carried out since we looked, and the state speak against it for that.
            before = yield from _before(resource, key, request)
            if before is None and refusal is not None:
                raise refusal
            return before
        try:
            done = yield from append_steps(resource.type, resource.id, events, version, key, request, trace)
        except VersionConflict:
            if attempt == attempts:
                raise
            continue
        if not done.replayed:
            yield from _keep_snapshot(decider, resource, state, version, events)
        return done
    raise AssertionError("the loop returns or raises")


def _before(resource: Resource, key: str | None, request: bytes | None) -> Steps[Appended | None]:
    """What the same request did before, if it did."""
    if key is None or request is None:
        return None
    found = yield from event_store.find_key(resource, key, request)
    return None if found is None else Appended(found.first_version, found.last_version, found.replayed)


def _decide(
    decider: Decider[State, Command], state: State, command: Command
) -> tuple[Sequence[object], Exception | None]:
    try:
        return decider.decide(state, command), None
    except Exception as refusal:  # noqa: BLE001 - whatever a decider refuses with; it is raised in the end
        return (), refusal


def _fold(decider: Decider[State, Command], resource: Resource) -> Steps[tuple[State, int]]:
    state, version = decider.initial, 0
    if decider.snapshots is not None:
        found = yield from event_store.find_snapshot(resource, decider.snapshots.tag)
        if found is not None:
            version, state = found[0], decider.snapshots.load(found[1])
    for event in (yield from load_steps(decider.catalog, resource, version)):
        state, version = decider.evolve(state, event.data), event.version
    return state, version


def _keep_snapshot(
    decider: Decider[State, Command], resource: Resource, state: State, version: int, events: Sequence[object]
) -> Steps[None]:
    snapshots = decider.snapshots
    after = version + len(events)
    if snapshots is None or after // snapshots.every == version // snapshots.every:
        return
    for event in events:
        state = decider.evolve(state, event)
    yield from event_store.keep_snapshot(resource, snapshots.tag, after, snapshots.dump(state))
