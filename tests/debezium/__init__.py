"""An unmodified Debezium on Kafka Connect: a peer to measure, and another relay of the same tables."""

from tests.debezium.connect import EVENT_STORE, OUTBOX, VERSION, Debezium, debezium

__all__ = ["EVENT_STORE", "OUTBOX", "VERSION", "Debezium", "debezium"]
