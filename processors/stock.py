"""How the stock of one article decides. Its history is long, so the state is kept as a snapshot now and then."""

from __future__ import annotations

from dataclasses import dataclass, replace

import orjson

from schemas import StockReceived, StockReleased, StockReserved, catalog
from streams import Decider, Snapshots


@dataclass(frozen=True)
class Receive:
    """A delivery, of one lot or several: one decision, and an event for each."""

    lots: tuple[int, ...]


@dataclass(frozen=True)
class Reserve:
    order_id: str
    quantity: int


@dataclass(frozen=True)
class Release:
    order_id: str
    quantity: int


Command = Receive | Reserve | Release
StockEvent = StockReceived | StockReserved | StockReleased


@dataclass(frozen=True)
class Stock:
    on_hand: int = 0
    reserved: int = 0


class OutOfStock(Exception):
    """Less is free than the order wants."""


def decide(stock: Stock, command: Command) -> list[StockEvent]:
    match command:
        case Receive(lots):
            return [StockReceived(quantity) for quantity in lots]
        case Reserve(order_id, quantity):
            # The rule that conflicting writers must not get past: each decides on a state, and only the first
            # of them appends to it. The others load what came in between, and decide again.
            if stock.on_hand - stock.reserved < quantity:
                raise OutOfStock(f"{quantity} wanted, {stock.on_hand - stock.reserved} free")
            return [StockReserved(order_id, quantity)]
        case Release(order_id, quantity):
            return [StockReleased(order_id, quantity)]


def evolve(stock: Stock, event: StockEvent) -> Stock:
    match event:
        case StockReceived(quantity=quantity):
            return replace(stock, on_hand=stock.on_hand + quantity)
        case StockReserved(quantity=quantity):
            return replace(stock, reserved=stock.reserved + quantity)
        case StockReleased(quantity=quantity):
            return replace(stock, reserved=stock.reserved - quantity)


snapshots: Snapshots[Stock] = Snapshots(
    tag="stock/1", dump=orjson.dumps, load=lambda state: Stock(**orjson.loads(state)), every=20
)

stock: Decider[Stock, Command] = Decider("stock", catalog, Stock(), decide, evolve, snapshots)
