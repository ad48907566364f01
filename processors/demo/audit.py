"""Compares every row of every read model, and every derived event, with a fold over the event store."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from psycopg import sql

from processors.demo.fold import Folded, Row, fold
from schemas import catalog
from streams.event import CE_ID, Record
from streams.observe import audit as books
from streams.observe import topic_audit
from streams.observe.audit import GroupAudit
from streams.observe.topic_audit import TopicAudit
from streams.settings import Settings
from streams.stores.postgres import Connection

RESOURCE_TYPES = ("order", "payment", "stock", "customer")
_EXAMPLES = 5


@dataclass
class Found:
    """What differs. ``examples`` names the first few places, for whoever has to look."""

    lost: int = 0
    doubled: int = 0
    out_of_order: int = 0
    examples: list[str] = field(default_factory=list)

    def add(self, where: str, *, lost: int = 0, doubled: int = 0, out_of_order: int = 0) -> None:
        if not (lost or doubled or out_of_order):
            return
        self.lost += lost
        self.doubled += doubled
        self.out_of_order += out_of_order
        if len(self.examples) < _EXAMPLES:
            self.examples.append(where)

    def add_all(self, other: Found) -> None:
        for each in fields(other):
            setattr(self, each.name, getattr(self, each.name) + getattr(other, each.name))

    @property
    def is_clean(self) -> bool:
        return not (self.lost or self.doubled or self.out_of_order)


@dataclass(frozen=True)
class Audit:
    """The whole judgement. ``rows`` were compared; ``found`` is what differs in all of it together."""

    events: int
    rows: int
    topics: Sequence[TopicAudit]
    groups: Sequence[GroupAudit]
    found: Found

    @property
    def problems(self) -> list[str]:
        return self.found.examples + [problem for group in self.groups for problem in group.problems]

    @property
    def is_clean(self) -> bool:
        return self.found.is_clean and not self.problems


def audit(connection: Connection, settings: Settings, notifications: str, planned: int | None) -> Audit:
    """Folds the store and compares everything with it.

    Args:
        notifications: the topic of the derived events.
        planned: how many events the service was to append, where that is known.
    """
    folded = fold(connection)
    topics = [topic_audit.topic(connection, settings, each) for each in RESOURCE_TYPES]
    found = Found()
    for each in topics:
        where = f"topic {each.topic}: {each.missing} missing, {each.unknown} unknown, {each.out_of_order} out of order"
        found.add(where, lost=each.missing, doubled=each.unknown, out_of_order=each.out_of_order)
    found.add(f"{folded.abandoned} events of transactions that were rolled back", doubled=folded.abandoned)
    if planned is not None:
        found.add(f"{folded.events} events in the store, {planned} asked for", **_sum(folded.events, planned))
    rows = 0
    for compared, differing in (
        _orders(connection, folded),
        _customers(connection, folded),
        _stock(connection, folded),
        _revenue(connection, folded),
        confirmations(topic_audit.records(settings, notifications), folded.confirmations),
    ):
        rows += compared
        found.add_all(differing)
    return Audit(folded.events, rows, topics, books.groups(connection), found)


def _orders(connection: Connection, folded: Folded) -> tuple[int, Found]:
    columns = ("customer_id", "status", "total_cents", "currency", "version")
    rows = _read(connection, "shop.order_summary", "order_id", columns)
    found = Found()
    for order_id in rows.keys() | folded.orders.keys():
        states, row = folded.orders.get(order_id, []), rows.get(order_id)
        found.add(f"shop.order_summary {order_id}: {row}, not {states[-1:]}", **_order(states, row))
    return len(rows), found


def _order(states: Sequence[Row], row: Row | None) -> dict[str, int]:
    if row is None:
        return {"lost": len(states)}
    if not states:
        return {"doubled": 1}
    version = row[-1]
    if version > len(states):
        return {"doubled": version - len(states)}
    # A row that says it is at a version, and shows another one's state, has moved in the wrong order.
    return {"lost": len(states) - version} if row in states else {"out_of_order": 1}


def _customers(connection: Connection, folded: Folded) -> tuple[int, Found]:
    rows = _read(connection, "shop.customer", "customer_id", ("name", "email", "tier"))
    found = Found()
    for customer_id in rows.keys() | folded.customers.keys():
        states, row = folded.customers.get(customer_id, []), rows.get(customer_id)
        differing = _customer(states, row)
        found.add(f"shop.customer {customer_id}: {row}, not {states[-1:]}", **differing)
    return len(rows), found


def _customer(states: Sequence[Row | None], row: Row | None) -> dict[str, int]:
    if not states:
        return {"doubled": 1}
    if row == states[-1]:
        return {}
    # A row that stands although the customer has left came back, or a newer one was written over.
    return {"out_of_order": 1} if states[-1] is None or row not in (None, *states) else {"lost": 1}


def _stock(connection: Connection, folded: Folded) -> tuple[int, Found]:
    rows = _read(connection, "shop.stock_level", "sku", ("on_hand", "reserved"))
    found = Found()
    for sku in rows.keys() | folded.stock.keys():
        states, row = folded.stock.get(sku, []), rows.get(sku)
        where = f"shop.stock_level {sku}: {row}, not {states[-1:]}"
        if row is None or not states:
            found.add(where, lost=len(states), doubled=row is not None)
        elif row != states[-1] and row in states:
            found.add(where, lost=1)  # it was right once: the rest is missing
        else:
            for has, wanted in zip(row, states[-1], strict=True):
                found.add(where, **_sum(has, wanted, at_most=1))
    return len(rows), found


def _revenue(connection: Connection, folded: Folded) -> tuple[int, Found]:
    columns = ("captured_cents", "refunded_cents", "payments")
    rows = _read(connection, "shop.revenue", "currency", columns)
    found = Found()
    for currency in rows.keys() | folded.revenue.keys():
        row, sums = rows.get(currency, (0,) * len(columns)), folded.revenue.get(currency, Counter())
        for column, has in zip(columns, row, strict=True):
            wanted = sums.get(column, 0)
            where = f"shop.revenue {currency}: {column} is {has}, not {wanted}"
            found.add(where, **_sum(has, wanted, at_most=1))
    return len(rows), found


def _sum(has: int, wanted: int, *, at_most: int | None = None) -> dict[str, int]:
    """Below is lost, above is doubled. How many events make a difference in money nobody can say: count one."""
    lost, doubled = max(0, wanted - has), max(0, has - wanted)
    return {"lost": min(lost, at_most or lost), "doubled": min(doubled, at_most or doubled)}


def confirmations(records: Iterable[Record], expected: Mapping[str, Row]) -> tuple[int, Found]:
    """Every paid order has one confirmation. A record that is sent twice has one id, and counts once."""
    ids: dict[str, set[bytes]] = {}
    contents: dict[str, Row] = {}
    for record in records:
        confirmed = catalog.decode(record.value or b"")
        ids.setdefault(confirmed.order_id, set()).add(record.header(CE_ID) or b"")
        contents[confirmed.order_id] = (confirmed.amount_cents, confirmed.currency)
    found = Found()
    for order_id in ids.keys() | expected.keys():
        has, wanted = len(ids.get(order_id, ())), int(order_id in expected)
        found.add(f"confirmation of {order_id}: {has}, not {wanted}", **_sum(has, wanted))
        if has and wanted and contents[order_id] != expected[order_id]:
            found.add(f"confirmation of {order_id}: {contents[order_id]}", out_of_order=1)
    return len(ids), found


def _read(connection: Connection, table: str, key: str, columns: Sequence[str]) -> dict[str, Row]:
    query = sql.SQL("SELECT {} FROM {}").format(
        sql.SQL(", ").join(map(sql.Identifier, (key, *columns))), sql.Identifier(*table.split("."))
    )
    rows: Iterable[tuple[Any, ...]] = connection.execute(query)
    return {row[0]: tuple(row[1:]) for row in rows}
