"""What a user registers is checked when it is registered."""

from __future__ import annotations

from typing import Any

import pytest

from schemas import StockReceived, catalog
from streams import App, ConfigurationError, Retry, Settings, Topic
from streams.effects import Add, Delete, Effects, Execute, Publish, Update, Upsert
from tests.unit.records import nothing


@pytest.fixture
def app() -> App:
    return App("shop", catalog=catalog, topics=[Topic("order"), Topic("stock", exact=True)])


def test_a_processor_is_known_by_its_name_and_reads_as_its_group(app: App) -> None:
    assert app.projection("level", topics=["stock"], retry=Retry(tier_seconds=(1, 60)))(nothing) is nothing
    processor = app.processor("level")
    assert (processor.group, processor.dead_letter_topic) == ("shop.level", "shop.level.dlq")
    assert processor.retry_topics == ("shop.level.retry.1s", "shop.level.retry.1m")
    assert processor.retry_topic(2) == "shop.level.retry.1m"


def test_a_topic_has_the_prefix_of_its_installation_unless_its_name_is_exact() -> None:
    settings = Settings.load(topic_prefix="prod.")
    assert Topic("order").name(settings) == "prod.order"
    assert Topic("order", exact=True).name(settings) == "order"


def test_a_name_is_taken_once(app: App) -> None:
    app.projection("level", topics=["stock"])(nothing)
    with pytest.raises(ConfigurationError, match="level is registered twice"):
        app.projection("level", topics=["order"])


def test_a_misspelt_topic_is_told_the_closest(app: App) -> None:
    with pytest.raises(ConfigurationError, match=r"topic stok is not declared.*did you mean stock"):
        app.projection("level", topics=["stok"])


def test_a_topic_like_nothing_is_told_what_there_is(app: App) -> None:
    with pytest.raises(ConfigurationError, match="known are order, stock"):
        app.projection("level", topics=["zzzz"])


def test_a_misspelt_processor_is_told_the_closest(app: App) -> None:
    app.projection("order-summary", topics=["order"])(nothing)
    with pytest.raises(ConfigurationError, match="no processor order_summary; did you mean order-summary"):
        app.processor("order_summary")


def test_without_processors_none_is_known(app: App) -> None:
    with pytest.raises(ConfigurationError, match="known are none"):
        app.processor("any")


def test_strict_versions_need_an_order(app: App) -> None:
    with pytest.raises(ConfigurationError, match=r"strict.*ordering='none' cannot be"):
        app.projection("level", topics=["stock"], versions="strict", ordering="none")


@pytest.mark.parametrize("name", ["", "Level", "le vel", "-level", "l" * 101, "lével", "level/x"])
def test_a_name_that_kafka_would_not_take_is_refused(app: App, name: str) -> None:
    with pytest.raises(ConfigurationError, match="processor name"):
        app.projection(name, topics=["stock"])
    with pytest.raises(ConfigurationError, match="application name"):
        App(name, catalog=catalog, topics=[Topic("order")])


def test_an_application_without_topics_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="declares no topics"):
        App("shop", catalog=catalog, topics=[])


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"topics": []}, "no topics"),
        ({"topics": ["stock"], "versions": "newest"}, "newest"),
        ({"topics": ["stock"], "ordering": "keys"}, "keys"),
        ({"topics": ["stock"], "events": [int]}, "int"),
    ],
)
def test_an_option_that_cannot_work_is_refused(app: App, options: dict[str, Any], expected: str) -> None:
    with pytest.raises(ConfigurationError, match=expected):
        app.projection("level", **options)


def test_one_topic_as_a_bare_string_is_told_to_be_a_list(app: App) -> None:
    with pytest.raises(ConfigurationError, match=r"\['stock'\]"):
        app.projection("level", topics="stock")


def test_a_topic_is_declared_once() -> None:
    with pytest.raises(ConfigurationError, match="stock"):
        App("shop", catalog=catalog, topics=[Topic("stock"), Topic("stock", partitions=3)])


def test_the_events_wanted_are_kept(app: App) -> None:
    app.projection("level", topics=["stock"], events=[StockReceived])(nothing)
    assert app.processor("level").events == frozenset({StockReceived})


def test_effects_are_values_in_the_order_they_were_asked_for() -> None:
    effects = Effects()
    effects.upsert("t", {"b": 1, "a": 2}, n=1)
    effects.update("t", {"a": 1}, n=2)
    effects.add("t", {"a": 1}, n=3)
    effects.delete("t", {"a": 1})
    effects.execute("SELECT 1", (1,))
    effects.publish("topic", b"v", key="k", headers={"a": "text", "b": None})
    assert effects.collected == [
        Upsert("t", (("a", 2), ("b", 1)), {"n": 1}),
        Update("t", (("a", 1),), {"n": 2}),
        Add("t", (("a", 1),), {"n": 3}),
        Delete("t", (("a", 1),)),
        Execute("SELECT 1", (1,)),
        Publish("topic", b"k", b"v", (("a", b"text"), ("b", None))),
    ]


def test_an_effect_names_the_key_of_its_row() -> None:
    effects = Effects()
    for call in (effects.upsert, effects.update, effects.add, effects.delete):
        with pytest.raises(ConfigurationError, match="needs the key"):
            call("t", {})


@pytest.mark.parametrize("delta", [None, "1", True])
def test_a_delta_is_a_number(delta: object) -> None:
    with pytest.raises(ConfigurationError, match="n"):
        Effects().add("t", {"a": 1}, n=delta)
