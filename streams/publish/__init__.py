"""What a service uses: the event store, deciders, and plain outbox messages."""

from streams.publish.decider import Decider, Snapshots, execute
from streams.publish.events import Appended, StoredEvent, append, load
from streams.publish.outbox import publish

__all__ = ["Appended", "Decider", "Snapshots", "StoredEvent", "append", "execute", "load", "publish"]
