"""The shop's events: the ``.avsc`` files beside this module are the source of truth, these classes are bound to them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from streams import Catalog

catalog = Catalog(Path(__file__).parent)


@dataclass(frozen=True)
class OrderLine:
    sku: str
    quantity: int
    unit_price_cents: int


@catalog.event
@dataclass(frozen=True)
class OrderPlaced:
    customer_id: str
    currency: str
    lines: tuple[OrderLine, ...]
    total_cents: int


@catalog.event
@dataclass(frozen=True)
class OrderPaid:
    payment_id: str
    amount_cents: int
    currency: str


@catalog.event
@dataclass(frozen=True)
class OrderShipped:
    carrier: str
    tracking_code: str | None


@catalog.event
@dataclass(frozen=True)
class OrderCancelled:
    reason: str


@catalog.event
@dataclass(frozen=True)
class PaymentCaptured:
    order_id: str
    amount_cents: int
    currency: str


@catalog.event
@dataclass(frozen=True)
class PaymentRefunded:
    amount_cents: int
    currency: str
    reason: str


@catalog.event
@dataclass(frozen=True)
class StockReceived:
    quantity: int


@catalog.event
@dataclass(frozen=True)
class StockReserved:
    order_id: str
    quantity: int


@catalog.event
@dataclass(frozen=True)
class StockReleased:
    order_id: str
    quantity: int


@catalog.event
@dataclass(frozen=True)
class CustomerChanged:
    name: str
    email: str
    tier: str


@catalog.event
@dataclass(frozen=True)
class CustomerClosed:
    reason: str


@catalog.event
@dataclass(frozen=True)
class OrderConfirmed:
    order_id: str
    amount_cents: int
    currency: str
