"""The application that is measured: one typed event, one row per resource."""

from __future__ import annotations

import schemas
from streams import App, Effects, Event, Topic

TABLE = "CREATE TABLE IF NOT EXISTS bench_order (order_id text PRIMARY KEY, customer_id text, total_cents bigint, currency text)"

app = App("bench", catalog=schemas.catalog, topics=[Topic("order", partitions=6)])


@app.projection("order", topics=["order"], versions="strict")
def order(event: Event, effects: Effects) -> None:
    placed: schemas.OrderPlaced = event.data
    effects.upsert(
        "bench_order",
        {"order_id": event.resource_id},
        customer_id=placed.customer_id,
        total_cents=placed.total_cents,
        currency=placed.currency,
    )


def payload() -> bytes:
    """An event of about 200 bytes."""
    from streams.schema.catalog import encode  # noqa: PLC0415

    line = schemas.OrderLine("sku-" + "x" * 100, 3, 1999)
    return encode(schemas.OrderPlaced("customer-" + "0" * 50, "EUR", (line,), 5997))
