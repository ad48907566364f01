"""What the read models must hold: the event store folded in plain Python, with nothing of the processors' code.

The fold keeps the states a row went through, so that the audit can tell one that lags from one that is wrong.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from processors.demo.workload import ABANDONED
from schemas import (
    CustomerChanged,
    CustomerClosed,
    OrderCancelled,
    OrderPaid,
    OrderPlaced,
    OrderShipped,
    PaymentCaptured,
    PaymentRefunded,
    StockReceived,
    StockReleased,
    StockReserved,
    catalog,
)
from streams.stores.postgres import Connection

_EVENTS = "SELECT resource_type, resource_id, version, payload FROM fencepost.event ORDER BY 1, 2, 3"

Row = tuple[Any, ...]


@dataclass
class Folded:
    """Everything the store comes to.

    Attributes:
        events: how many there are.
        orders: per order its rows (customer, status, total, currency, version), the newest last.
        customers: per customer its rows (name, email, tier), the newest last; None where there is no row.
        stock: per article its rows (on_hand, reserved), the newest last.
        revenue: per currency (captured, refunded, payments).
        confirmations: per paid order (amount, currency).
        abandoned: events of transactions that were rolled back; there must be none.
    """

    events: int = 0
    orders: dict[str, list[Row]] = field(default_factory=dict)
    customers: dict[str, list[Row | None]] = field(default_factory=dict)
    stock: dict[str, list[Row]] = field(default_factory=dict)
    revenue: dict[str, Counter[str]] = field(default_factory=dict)
    confirmations: dict[str, Row] = field(default_factory=dict)
    abandoned: int = 0

    def take(self, resource_id: str, version: int, event: object) -> None:
        self.events += 1
        of_order = getattr(event, "order_id", resource_id)
        self.abandoned += of_order.startswith(ABANDONED)
        match event:
            case OrderPlaced(customer_id=customer, total_cents=total, currency=currency):
                self.orders[resource_id] = [(customer, "placed", total, currency, version)]
            case OrderPaid(amount_cents=amount, currency=currency):
                self._order(resource_id, "paid", version)
                self.confirmations[resource_id] = (amount, currency)
            case OrderShipped():
                self._order(resource_id, "shipped", version)
            case OrderCancelled():
                self._order(resource_id, "cancelled", version)
            case StockReceived() | StockReserved() | StockReleased():
                self._stock(resource_id, event)
            case PaymentCaptured() | PaymentRefunded():
                self._payment(event)
            case CustomerChanged(name=name, email=email, tier=tier):
                self.customers.setdefault(resource_id, []).append((name, email, tier))
            case CustomerClosed():
                self.customers.setdefault(resource_id, []).append(None)
            case _:
                raise ValueError(f"the audit does not know what {type(event).__name__} comes to")

    def _order(self, order_id: str, status: str, version: int) -> None:
        customer, _, total, currency, _ = self.orders[order_id][-1]
        self.orders[order_id].append((customer, status, total, currency, version))

    def _stock(self, sku: str, event: StockReceived | StockReserved | StockReleased) -> None:
        states = self.stock.setdefault(sku, [])
        on_hand, reserved = states[-1] if states else (0, 0)
        match event:
            case StockReceived(quantity=quantity):
                states.append((on_hand + quantity, reserved))
            case StockReserved(quantity=quantity):
                states.append((on_hand, reserved + quantity))
            case StockReleased(quantity=quantity):
                states.append((on_hand, reserved - quantity))

    def _payment(self, event: PaymentCaptured | PaymentRefunded) -> None:
        sums = self.revenue.setdefault(
            event.currency, Counter(captured_cents=0, refunded_cents=0, payments=0)
        )
        if isinstance(event, PaymentCaptured):
            sums["captured_cents"] += event.amount_cents
            sums["payments"] += 1
        else:
            sums["refunded_cents"] += event.amount_cents


def fold(connection: Connection) -> Folded:
    """Reads the whole store, in pages."""
    folded = Folded()
    for resource_id, version, event in _events(connection):
        folded.take(resource_id, version, event)
    return folded


def _events(connection: Connection) -> Iterator[tuple[str, int, object]]:
    with connection.transaction(), connection.cursor("demo_fold") as cursor:
        cursor.itersize = 5_000
        cursor.execute(_EVENTS)
        for _, resource_id, version, payload in cursor:
            yield resource_id, version, catalog.decode(payload)
