"""The catalogue of metrics: the only place where a metric gets its name. Labels never hold a key."""

from __future__ import annotations

from prometheus_client import Counter, Gauge, Histogram

RELAYED = Counter("streams_relay_records", "Records handed to the broker by the relay")
RELAY_REPEATS_AVOIDED = Counter(
    "streams_relay_repeats_avoided", "Records that a relay before this one had sent and not confirmed"
)
RELAY_TAILS_CUT = Counter(
    "streams_relay_tails_cut", "Partitions whose end was too long to be searched for such records"
)
RELAY_LATE = Counter(
    "streams_relay_late_records",
    "Records that may have reached their topics after another relay took over from this one, which stood still",
)
RELAY_REFUSED = Gauge(
    "streams_relay_refused_records", "Records that the broker refused, and nobody has decided on"
)
RELAY_BEHIND_REFUSED = Gauge("streams_relay_behind_refused_records", "Records that wait behind a refused one")
RELAY_ACTIVE = Gauge("streams_relay_active", "1 while this relay is the one at work, 0 while it stands by")
RELAY_POLLS = Gauge("streams_relay_polls", "1 while the tables are polled, 0 while the log is read")
LOG_RETAINED_BYTES = Gauge("streams_log_retained_bytes", "Log that the server keeps for the relay's slot")
LOG_UNCONFIRMED_BYTES = Gauge("streams_log_unconfirmed_bytes", "Log that the relay has not confirmed")
LOG_BUDGET_BYTES = Gauge("streams_log_budget_bytes", "How much log the slot may retain; 0 without a limit")
OLDEST_TRANSACTION_SECONDS = Gauge(
    "streams_oldest_transaction_seconds",
    "Age of the open transaction that holds the relay's log or rounds back",
)
RELAY_WAITING_FOR_TOPIC = Gauge(
    "streams_relay_waiting_for_topic", "1 while the relay waits for a topic that does not exist"
)

RECORDS = Counter("streams_records", "Records settled, by what became of them", ["group", "disposition"])
BATCH_SECONDS = Histogram(
    "streams_batch_seconds",
    "Time from taking a batch to its commit in the database",
    ["group"],
    buckets=(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10),
)
FENCED = Counter("streams_fenced", "Transactions refused because the partition had another owner", ["group"])
RETRIES = Counter("streams_retries", "Retries run, by their outcome", ["group", "outcome"])
RETRY_LATENESS_SECONDS = Histogram(
    "streams_retry_lateness_seconds",
    "How long after its planned time a retry ran",
    ["group"],
    buckets=(0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30),
)
