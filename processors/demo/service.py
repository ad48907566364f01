"""The demo's service: appends events for its customers' requests, several writers at once.

Run as ``python -m processors.demo.service --seed 1 --events 20000``. It may be killed at any moment: started
again, it goes on a little before where it was, and the idempotency keys turn what it repeats into replays.
"""

from __future__ import annotations

import argparse
import sys
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import psycopg

from processors.demo.workload import (
    ChangeProfile,
    Checkout,
    CloseAccount,
    Deliver,
    PayOrder,
    Request,
    ReturnOrder,
    Sending,
    ShipOrder,
    workload,
)
from processors.orders import Cancel, Pay, Place, Ship, orders
from processors.stock import Receive, Release, Reserve, stock
from schemas import CustomerChanged, CustomerClosed, OrderLine, PaymentCaptured, PaymentRefunded, catalog
from streams import Appended, Decider, Settings, VersionConflict, append, execute, load

_SAVE_EVERY = 20

_RESUME = "SELECT done FROM demo.writer WHERE writer = %s"
_SAVE = """
INSERT INTO demo.writer AS w (writer, done, conflicts, replayed, rolled_back)
VALUES (%(writer)s, %(done)s, %(conflicts)s, %(replayed)s, %(rolled_back)s)
ON CONFLICT (writer) DO UPDATE SET done = excluded.done, conflicts = w.conflicts + excluded.conflicts,
    replayed = w.replayed + excluded.replayed, rolled_back = w.rolled_back + excluded.rolled_back"""


class Abandoned(Exception):
    """The customer left in the middle of the checkout."""


@dataclass
class Counts:
    """What a writer met since it last saved."""

    conflicts: int = 0
    replayed: int = 0
    rolled_back: int = 0


class Shop:
    """Does one request in one transaction."""

    def __init__(self, connection: psycopg.Connection[Any], counts: Counts) -> None:
        self._connection = connection
        self._counts = counts
        self._orders = self._counted(orders)
        self._stock = self._counted(stock)

    def handle(self, request: Request) -> None:
        """Answers when the request is done, now or before."""
        while True:
            try:
                with self._connection.transaction():
                    done = self._do(request)
            except Abandoned:
                self._counts.rolled_back += 1
                return
            except VersionConflict:
                self._counts.conflicts += 1
                continue
            self._counts.replayed += done.replayed
            return

    def _do(self, request: Request) -> Appended:
        key = request.key
        match request.action:
            case Deliver(sku, lots):
                return self._stock_changes(sku, Receive(lots), key)
            case ChangeProfile() | CloseAccount() as change:
                return self._customer(change, key)
            case Checkout() as checkout:
                return self._checkout(checkout, key)
            case PayOrder() as paid:
                return self._pay(paid, key)
            case ShipOrder(checkout, tracking_code):
                return self._order_changes(checkout, Ship("parcel", tracking_code), key)
            case ReturnOrder(paid):
                return self._return(paid, key)

    def _customer(self, change: ChangeProfile | CloseAccount, key: str) -> Appended:
        """Without a decider: load, then append to the version that was loaded."""
        event: CustomerChanged | CustomerClosed = CustomerClosed("asked for it")
        if isinstance(change, ChangeProfile):
            event = CustomerChanged(change.name, change.email, change.tier)
        known = load(self._connection, catalog, "customer", change.customer_id)
        return append(
            self._connection, "customer", change.customer_id, [event], len(known), idempotency_key=key
        )

    def _checkout(self, checkout: Checkout, key: str) -> Appended:
        """Several resources in one transaction: the first takes the key, and with it all of them are done or none."""
        place = Place(checkout.customer_id, checkout.currency, checkout.lines)
        placed = self._order_changes(checkout, place, key)
        if not placed.replayed:
            for line in _by_sku(checkout):
                self._stock_changes(line.sku, Reserve(checkout.order_id, line.quantity))
        if checkout.abandoned:
            raise Abandoned
        return placed

    def _pay(self, paid: PayOrder, key: str) -> Appended:
        checkout = paid.checkout
        captured = PaymentCaptured(checkout.order_id, checkout.total_cents, checkout.currency)
        done = append(self._connection, "payment", paid.payment_id, [captured], 0, idempotency_key=key)
        if not done.replayed:
            self._order_changes(checkout, Pay(paid.payment_id))
        return done

    def _return(self, paid: PayOrder, key: str) -> Appended:
        checkout = paid.checkout
        refunded = PaymentRefunded(checkout.total_cents, checkout.currency, "returned")
        done = append(self._connection, "payment", paid.payment_id, [refunded], 1, idempotency_key=key)
        if not done.replayed:
            self._order_changes(checkout, Cancel("returned"))
            for line in _by_sku(checkout):
                self._stock_changes(line.sku, Release(checkout.order_id, line.quantity))
        return done

    def _order_changes(
        self, checkout: Checkout, command: Place | Pay | Ship | Cancel, key: str | None = None
    ) -> Appended:
        return _done(execute(self._connection, self._orders, checkout.order_id, command, idempotency_key=key))

    def _stock_changes(
        self, sku: str, command: Receive | Reserve | Release, key: str | None = None
    ) -> Appended:
        return _done(execute(self._connection, self._stock, sku, command, idempotency_key=key))

    def _counted(self, decider: Decider[Any, Any]) -> Decider[Any, Any]:
        """Counts the conflicts that ``execute`` settles by itself: each makes it decide once more."""
        decided: Callable[[Any, Any], Sequence[object]] = decider.decide
        last: object = None

        def decide(state: Any, command: Any) -> Sequence[object]:
            nonlocal last
            self._counts.conflicts += command is last
            last = command
            return decided(state, command)

        return replace(decider, decide=decide)


def _by_sku(checkout: Checkout) -> list[OrderLine]:
    """In an order that all use, or two transactions with the same articles could deadlock."""
    return sorted(checkout.lines, key=lambda line: line.sku)


def _done(appended: Appended | None) -> Appended:
    assert appended is not None, "each of these commands comes to an event"  # noqa: S101
    return appended


class Writer:
    """Works through its requests in their order, on a connection of its own, and one more for the impatient."""

    def __init__(self, number: int, requests: Sequence[Request], database_url: str) -> None:
        self._number, self._requests, self._url = number, requests, database_url
        self._counts = Counts()

    def run(self, stop: threading.Event) -> None:
        with (
            psycopg.connect(self._url, autocommit=True) as mine,
            psycopg.connect(self._url, autocommit=True) as other,
            ThreadPoolExecutor(1) as beside,
        ):
            shop, twin = Shop(mine, self._counts), Shop(other, self._counts)
            found = mine.execute(_RESUME, (self._number,)).fetchone()
            for done in range(found[0] if found else 0, len(self._requests)):
                if stop.is_set():
                    return
                self._send(self._requests[done], shop, twin, beside)
                if (done + 1) % _SAVE_EVERY == 0:
                    self._save(mine, done + 1)
            self._save(mine, len(self._requests))

    def _send(self, request: Request, shop: Shop, twin: Shop, beside: ThreadPoolExecutor) -> None:
        also = beside.submit(twin.handle, request) if request.sending is Sending.AT_ONCE else None
        shop.handle(request)
        if also is not None:
            also.result()
        if request.sending is Sending.AGAIN:
            shop.handle(request)

    def _save(self, connection: psycopg.Connection[Any], done: int) -> None:
        connection.execute(_SAVE, {"writer": self._number, "done": done, **vars(self._counts)})
        vars(self._counts).update(vars(Counts()))


def run(seed: int, events: int, database_url: str) -> None:
    """Appends everything that is not appended yet."""
    work = workload(seed, events)
    stop = threading.Event()
    Writer(0, work.opening, database_url).run(stop)
    writers = [Writer(number, requests, database_url) for number, requests in enumerate(work.writers, 1)]
    with ThreadPoolExecutor(len(writers)) as pool:
        running = [pool.submit(writer.run, stop) for writer in writers]
        try:
            for each in running:
                each.result()
        except BaseException:
            stop.set()  # one writer's failure, or Ctrl-C, ends the others too
            raise


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--events", type=int, required=True)
    given = parser.parse_args(arguments)
    run(given.seed, given.events, Settings.load().database_url)


if __name__ == "__main__":
    main(sys.argv[1:])
