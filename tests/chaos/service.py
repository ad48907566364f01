"""A service that makes one business change with its event, and may be killed on either side of the commit."""

from __future__ import annotations

import sys

import psycopg

import schemas
from streams import Settings, append
from streams.points import reach


def main(order_id: str) -> None:
    with psycopg.connect(Settings.load().database_url) as connection:
        connection.execute(
            "INSERT INTO business_order (order_id) VALUES (%s) ON CONFLICT (order_id) DO NOTHING", (order_id,)
        )
        event = schemas.OrderCancelled("the customer changed their mind")
        append(connection, "order", order_id, [event], 0, idempotency_key=f"cancel:{order_id}")
        reach("append.before_commit")
        connection.commit()
        reach("append.after_commit")


main(sys.argv[1])
