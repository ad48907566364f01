"""Where a record goes, and that it goes there every time."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from streams.broker.partitioner import partition_of
from streams.relay import routes
from streams.relay.routes import Routes


@given(st.lists(st.binary(max_size=8), max_size=50), st.integers(1, 70))
def test_a_key_goes_where_every_kafka_client_sends_it(keys: list[bytes], partitions: int) -> None:
    made = Routes(lambda _topic: partitions)
    assert [made.partition("t", key) for key in keys + keys] == [
        partition_of(key, partitions) for key in keys + keys
    ]


def test_a_record_without_a_key_goes_elsewhere_after_each_burst() -> None:
    made = Routes(lambda _topic: 3)
    found = []
    for _ in range(4):
        found += [made.partition("t", None), made.partition("t", None)]
        made.turn()
    assert found == [0, 0, 1, 1, 2, 2, 0, 0]


def test_topics_have_their_own_partitions_and_new_ones_are_used_once_the_old_are_forgotten() -> None:
    partitions = {"a": 1, "b": 64}
    made = Routes(partitions.__getitem__)
    assert made.partition("a", b"k") == 0
    assert made.partition("b", b"k") == partition_of(b"k", 64)
    partitions["a"] = 64
    assert made.partition("a", b"k") == 0
    made.forget()
    assert made.partition("a", b"k") == partition_of(b"k", 64)


def test_more_keys_than_are_kept_are_found_all_the_same() -> None:
    made = Routes(lambda _topic: 7)
    for n in range(routes._KEYS_KEPT + 10):
        key = b"%d" % n
        assert made.partition("t", key) == partition_of(key, 7)
    assert len(made._known["t"]) <= routes._KEYS_KEPT
