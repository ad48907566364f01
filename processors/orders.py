"""How an order decides: what a customer or a clerk asks for becomes events, or is refused."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from schemas import OrderCancelled, OrderLine, OrderPaid, OrderPlaced, OrderShipped, catalog
from streams import Decider


@dataclass(frozen=True)
class Place:
    customer_id: str
    currency: str
    lines: tuple[OrderLine, ...]


@dataclass(frozen=True)
class Pay:
    payment_id: str


@dataclass(frozen=True)
class Ship:
    carrier: str
    tracking_code: str | None


@dataclass(frozen=True)
class Cancel:
    reason: str


Command = Place | Pay | Ship | Cancel
OrderEvent = OrderPlaced | OrderPaid | OrderShipped | OrderCancelled


@dataclass(frozen=True)
class Order:
    """What deciding needs to know of an order, and no more."""

    status: Literal["unknown", "placed", "paid", "shipped", "cancelled"] = "unknown"
    total_cents: int = 0
    currency: str = ""


class OrderRefused(Exception):
    """The order is in no state for what was asked."""


def decide(order: Order, command: Command) -> list[OrderEvent]:
    match command, order.status:
        case Place(customer_id, currency, lines), "unknown" if lines:
            total = sum(line.quantity * line.unit_price_cents for line in lines)
            return [OrderPlaced(customer_id, currency, lines, total)]
        case Pay(payment_id), "placed":
            return [OrderPaid(payment_id, order.total_cents, order.currency)]
        case Ship(carrier, tracking_code), "paid":
            return [OrderShipped(carrier, tracking_code)]
        case Cancel(reason), "placed" | "paid":
            return [OrderCancelled(reason)]
        case _:
            raise OrderRefused(f"an order that is {order.status} takes no {type(command).__name__}")


def evolve(order: Order, event: OrderEvent) -> Order:
    match event:
        case OrderPlaced(currency=currency, total_cents=total):
            return Order("placed", total, currency)
        case OrderPaid():
            return replace(order, status="paid")
        case OrderShipped():
            return replace(order, status="shipped")
        case OrderCancelled():
            return replace(order, status="cancelled")


orders: Decider[Order, Command] = Decider("order", catalog, Order(), decide, evolve)
