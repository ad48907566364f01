"""A setting that nobody reads, or that makes no sense, does not pass silently."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from streams import ConfigurationError, Settings


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """No settings from outside, and no local servers."""
    for name in list(os.environ):
        if name.startswith("STREAMS_"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("STREAMS_DEV_DIR", str(tmp_path))
    return tmp_path


def test_a_setting_is_read_from_its_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STREAMS_KAFKA", "broker:9092")
    monkeypatch.setenv("STREAMS_BATCH_SIZE", "17")
    monkeypatch.setenv("STREAMS_KAFKA_OPTIONS", '{"security.protocol": "SSL"}')
    settings = Settings.load()
    assert (settings.kafka, settings.batch_size) == ("broker:9092", 17)
    assert settings.kafka_options == {"security.protocol": "SSL"}


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("STREAMS_DATABSE_URL", "STREAMS_DATABASE_URL"),
        ("STREAMS_BATCHSIZE", "STREAMS_BATCH_SIZE"),
        ("STREAMS_KILLAT", "STREAMS_KILL_AT"),
    ],
)
def test_a_misspelt_variable_is_refused_with_what_was_meant(
    monkeypatch: pytest.MonkeyPatch, name: str, meant: str
) -> None:
    monkeypatch.setenv(name, "1")
    with pytest.raises(ConfigurationError, match=f"{name} is not a setting; did you mean {meant}"):
        Settings.load()


def test_a_variable_like_nothing_is_refused_with_what_there_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STREAMS_QQQQQQQQ", "1")
    with pytest.raises(ConfigurationError, match=r"known are .*STREAMS_DATABASE_URL"):
        Settings.load()


def test_variables_of_other_programs_are_none_of_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STREAM_KAFKA", "elsewhere")
    monkeypatch.setenv("KAFKA", "elsewhere")
    assert Settings.load().kafka == "localhost:9092"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("batch_size", "many"),
        ("batch_size", "0"),
        ("batch_size", "1000000"),
        ("group_protocol", "eager"),
        ("drain_seconds", "-1"),
        ("sweep_seconds", "0"),
        ("replication_factor", "0"),
        ("replication_factor", "1.5"),
    ],
)
def test_a_value_that_makes_no_sense_is_refused_by_name(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str
) -> None:
    monkeypatch.setenv(f"STREAMS_{name.upper()}", value)
    with pytest.raises(ConfigurationError, match=f"setting {name}: "):
        Settings.load()


def test_options_that_are_no_json_are_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STREAMS_KAFKA_OPTIONS", "security.protocol=SSL")
    with pytest.raises(ConfigurationError, match="kafka_options"):
        Settings.load()


def test_a_misspelt_keyword_is_refused_with_what_was_meant() -> None:
    with pytest.raises(ConfigurationError, match=r"batchsize.*did you mean batch_size"):
        Settings.load(batchsize=1)


def test_local_servers_are_used_where_nothing_else_is_set(
    alone: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = {"kafka": "localhost:19092", "database_url": "postgresql://localhost:15432/dev"}
    (alone / "endpoints.json").write_text(json.dumps(found))
    monkeypatch.setenv("STREAMS_DATABASE_URL", "postgresql://configured/db")
    settings = Settings.load()
    assert (settings.kafka, settings.database_url) == ("localhost:19092", "postgresql://configured/db")


def test_a_keyword_stands_above_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STREAMS_SLOT", "theirs")
    overrides: dict[str, Any] = {"slot": "mine"}
    assert Settings.load(**overrides).slot == "mine"


def test_settings_do_not_change() -> None:
    with pytest.raises(Exception, match="frozen"):
        Settings.load().slot = "other"
