"""Plans records and applies what passes, in order; finds those whose effects the database refuses."""

from __future__ import annotations

from collections.abc import Sequence

from streams.consume.dispatch import Apply, Fail, Item
from streams.consume.failures import refusal
from streams.consume.plan import Planned, Planner
from streams.dispositions import Disposition
from streams.effects import DatabaseEffect
from streams.stores.effects import EffectWriter
from streams.stores.outbox import insert_messages
from streams.stores.postgres import DATABASE_ERRORS, Connection, Fault, fault_of


class Applier:
    """Works within the transaction that is open on the connection."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._writer = EffectWriter(connection)

    def apply(self, planner: Planner, items: Sequence[Item]) -> tuple[Planner, list[Planned]]:
        """Applies the effects of all that pass, in bulk.

        Where the database refuses, the records are halved: the first half is applied, then the second, in their
        order, down to a single one. A record that is refused alone fails, and those behind it are planned knowing
        that.

        Returns:
            The planner as it stands after these records, and what became of each.

        Raises:
            ConfigurationError: an effect names what the database does not have.
            psycopg.Error: what is no single record's fault.
        """
        trial = planner.fork()
        planned = trial.plan(items)
        applied = {id(item) for item, disposition in planned if disposition is Disposition.APPLIED}
        passed = [index for index, item in enumerate(items) if id(item) in applied]
        try:
            with self._connection.transaction():
                self._write([items[index] for index in passed])
        except DATABASE_ERRORS as error:
            if fault_of(error) is not Fault.RECORD:
                raise
            if len(passed) == 1:
                items[passed[0]].decision = Fail(refusal(error))
                return self.apply(planner, items)
            middle = passed[len(passed) // 2]
            planner, before = self.apply(planner, items[:middle])
            planner, behind = self.apply(planner, items[middle:])
            return planner, before + behind
        return trial, planned

    def _write_one(self, effects: Sequence[DatabaseEffect]) -> None:
        """Row by row; and if that is refused, effect by effect.

        An insert may need the columns that a later effect on its row brings, and a row may need to change twice, with
        another row's change between: which of the two a handler meant shows in what the database accepts.
        """
        try:
            with self._connection.transaction():
                self._writer.apply_by_row(effects)
        except DATABASE_ERRORS as error:
            if fault_of(error) is not Fault.RECORD or len(effects) == 1:
                raise
            with self._connection.transaction():
                self._writer.apply_singly(effects)

    def _write(self, items: Sequence[Item]) -> None:
        decisions = [item.decision for item in items if isinstance(item.decision, Apply)]
        effects = [effect for decision in decisions for effect in decision.effects]
        if len(decisions) == 1:
            self._write_one(effects)
        else:
            self._writer.apply(effects)
        insert_messages(
            self._connection, [message for decision in decisions for message in decision.messages]
        )
