"""The shop's processors, one for each kind of read model. Run them with ``streams run processors.app:app``."""

from __future__ import annotations

from schemas import (
    CustomerChanged,
    CustomerClosed,
    OrderCancelled,
    OrderConfirmed,
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
from streams import App, Effects, Event, Topic

NOTIFICATIONS = "notifications"

app = App(
    "shop",
    catalog=catalog,
    topics=[
        Topic("order", partitions=6),
        Topic("payment", partitions=6),
        Topic("stock", partitions=6),
        Topic("customer", partitions=3),
        Topic(NOTIFICATIONS, partitions=3, retention_hours=24 * 7, exact=True),
    ],
)


@app.projection("order-summary", topics=["order"], versions="strict")
def order_summary(event: Event, effects: Effects) -> None:
    """One row per order, with its status.

    Guards against a state that moves backwards: a late "paid" that overwrites "shipped". With strict versions
    the events of an order apply in the order they happened, each once, also when one of them had to be retried.
    """
    row = {"order_id": event.resource_id}
    match event.data:
        case OrderPlaced() as placed:
            effects.upsert(
                "shop.order_summary",
                row,
                customer_id=placed.customer_id,
                status="placed",
                total_cents=placed.total_cents,
                currency=placed.currency,
                version=event.version,
            )
        case OrderPaid():
            effects.update("shop.order_summary", row, status="paid", version=event.version)
        case OrderShipped():
            effects.update("shop.order_summary", row, status="shipped", version=event.version)
        case OrderCancelled():
            effects.update("shop.order_summary", row, status="cancelled", version=event.version)


@app.projection("stock-level", topics=["stock"], versions="strict")
def stock_level(event: Event, effects: Effects) -> None:
    """What is in the warehouse, summed from deltas.

    Guards against the delta that is lost without a trace: under "skip what is not newer", a receipt that is
    retried after a later reservation looks old, is skipped, and the level is wrong for ever. Strict versions let
    the reservation wait for the receipt instead.
    """
    row = {"sku": event.resource_id}
    match event.data:
        case StockReceived(quantity=quantity):
            effects.add("shop.stock_level", row, on_hand=quantity)
        case StockReserved(quantity=quantity):
            effects.add("shop.stock_level", row, reserved=quantity)
        case StockReleased(quantity=quantity):
            effects.add("shop.stock_level", row, reserved=-quantity)


@app.projection("customer", topics=["customer"], versions="latest")
def customer(event: Event, effects: Effects) -> None:
    """The customer's profile as it is now; every event carries all of it.

    Guards against the row that comes back: an older profile delivered after the customer has left. The group
    keeps the version of what it deleted, so the older event is stale. A newer profile may replace one that
    cannot be applied, so nothing waits behind a dead letter.
    """
    row = {"customer_id": event.resource_id}
    match event.data:
        case CustomerChanged(name=name, email=email, tier=tier):
            effects.upsert("shop.customer", row, name=name, email=email, tier=tier)
        case CustomerClosed():
            effects.delete("shop.customer", row)


@app.projection("revenue", topics=["payment"], versions="none", ordering="none")
def revenue(event: Event, effects: Effects) -> None:
    """Money per currency: sums to which payments of all kinds add, in any order.

    Guards against counting twice: adding is not idempotent, and here no version could tell. The inbox knows the
    ids of the events that were counted. And against a queue for nothing: sums do not care for order, so a
    payment that is retried holds up no other.
    """
    match event.data:
        case PaymentCaptured(currency=currency, amount_cents=amount):
            effects.add("shop.revenue", {"currency": currency}, captured_cents=amount, payments=1)
        case PaymentRefunded(currency=currency, amount_cents=amount):
            effects.add("shop.revenue", {"currency": currency}, refunded_cents=amount)


@app.projection("confirmation", topics=["order"], versions="strict", events=[OrderPaid])
def confirmation(event: Event, effects: Effects) -> None:
    """Publishes a derived event when an order is paid.

    Guards against the second write that goes missing: published to Kafka directly, a confirmation is lost or sent
    twice when the process dies beside it. Here it is a row of the outbox in the transaction that moves the
    group's position, and its id follows from the cause, so whoever reads it can tell a repetition.
    """
    paid: OrderPaid = event.data
    confirmed = OrderConfirmed(event.resource_id, paid.amount_cents, paid.currency)
    effects.publish(NOTIFICATIONS, confirmed)
