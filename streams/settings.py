"""Every setting of fencepost, typed, read from the environment.

Each field is the variable ``STREAMS_<NAME>``. Where an endpoint is not set, the local servers that
``streams dev up`` started are used, if there are any.
"""

from __future__ import annotations

import difflib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import platformdirs
from pydantic import Field, ValidationError
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource, SettingsConfigDict, SettingsError

from streams.errors import ConfigurationError

PREFIX = "STREAMS_"

# Variables that steer a tool or a test run rather than the product's settings.
TOOL_VARIABLES = frozenset(
    {"STREAMS_REQUIRE_REAL", "STREAMS_DEV_DIR", "STREAMS_CACHE_DIR", "STREAMS_KILL_AT"}
)


def dev_directory() -> Path:
    """Where the local servers keep their data, ports and logs."""
    configured = os.environ.get("STREAMS_DEV_DIR")
    return Path(configured) if configured else Path(platformdirs.user_state_dir("fencepost")) / "dev"


def cache_directory() -> Path:
    """Where downloads are kept between runs; safe to delete at any time."""
    configured = os.environ.get("STREAMS_CACHE_DIR")
    return Path(configured) if configured else Path(platformdirs.user_cache_dir("fencepost"))


def dev_endpoints() -> dict[str, str]:
    """The endpoints of the local servers, by settings name; empty where none are running."""
    path = dev_directory() / "endpoints.json"
    try:
        found = json.loads(path.read_text())
    except FileNotFoundError:
        return {}
    return {str(name): str(value) for name, value in found.items()}


class DevEndpoints(PydanticBaseSettingsSource):
    """Reads what ``streams dev up`` left behind; the environment stands above it."""

    def get_field_value(self, field: Any, field_name: str) -> tuple[Any, str, bool]:  # noqa: ARG002 - interface
        return dev_endpoints().get(field_name), field_name, False

    def __call__(self) -> dict[str, Any]:
        return {name: value for name, value in dev_endpoints().items() if name in Settings.model_fields}


class Settings(BaseSettings):
    """All settings. ``Settings.load()`` reads them; keyword arguments override in code and in tests."""

    model_config = SettingsConfigDict(env_prefix=PREFIX, extra="forbid", frozen=True)

    database_url: str = Field(
        "postgresql://localhost:5432/postgres", description="PostgreSQL, as a libpq URL or DSN"
    )
    kafka: str = Field("localhost:9092", description="Kafka bootstrap servers, host:port separated by commas")
    redis_url: str = Field("redis://localhost:6379/0", description="Redis; makes it faster, never correct")
    registry_url: str | None = Field(
        None, description="schema registry with Confluent's API, if there is one"
    )
    kafka_options: dict[str, str] = Field(
        default_factory=dict,
        description="further librdkafka options for every client, as a JSON object (security.protocol, sasl.*)",
    )

    topic_prefix: str = Field("events.", description="what stands before the resource type in a topic's name")
    source: str = Field("fencepost", description="ce_source of relayed events: who publishes")
    slot: str = Field("fencepost", description="the relay's logical replication slot")
    publication: str = Field("fencepost", description="the publication of the tables that the relay sends")
    relay_source: Literal["log", "peek", "poll"] = Field(
        "log",
        description="how the relay reads: the log as a stream, the log by SQL, or the tables where there is no log",
    )
    topic_grace_seconds: float = Field(
        30.0,
        ge=0,
        description="how long the relay waits for a topic that is not there before it sets its records aside",
    )
    log_budget_mb: int | None = Field(
        None,
        ge=1,
        description="how much log the relay's slot may retain; max_slot_wal_keep_size counts anyway",
    )
    log_over_budget: Literal["alert", "poll"] = Field(
        "alert",
        description="what then: only say so, or let the slot go and poll the tables until the relay has caught up",
    )
    outbox_retention_days: int = Field(7, ge=1, description="how long the days of the outbox are kept")

    group_protocol: str = Field(
        "consumer", pattern="^(consumer|classic)$", description="KIP-848 'consumer', or 'classic'"
    )
    batch_size: int = Field(2_000, ge=1, le=100_000, description="records per database transaction, at most")
    linger_ms: int = Field(
        10,
        ge=0,
        le=10_000,
        description="how long a processor waits for more records to fill a batch, at most",
    )
    drain_seconds: float = Field(
        20.0, gt=0, description="how long a stopping processor may finish what it holds"
    )
    sweep_seconds: float = Field(
        5.0, gt=0, description="how often overdue retries are looked for in the table"
    )
    connect_seconds: float = Field(10.0, gt=0, description="how long to wait for a server before giving up")
    replication_factor: int = Field(1, ge=1, description="of the topics that 'streams topics apply' makes")

    @classmethod
    def load(cls, **overrides: Any) -> Settings:
        """Reads the environment.

        Raises:
            ConfigurationError: a variable that begins with STREAMS_ is not a setting, or a value does not fit.
        """
        refuse_misspelt(os.environ)
        try:
            return cls(**overrides)
        except ValidationError as error:
            raise ConfigurationError(_explain(error)) from error
        except SettingsError as error:
            raise ConfigurationError(
                f'{error}: it is written as JSON, such as {{"name": "value"}}'
            ) from error

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,  # noqa: ARG003 - the interface names them all
        file_secret_settings: PydanticBaseSettingsSource,  # noqa: ARG003
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        return init_settings, env_settings, DevEndpoints(settings_cls)


def refuse_misspelt(environment: Mapping[str, str]) -> None:
    """Raises ConfigurationError for a STREAMS_ variable nobody reads: a misspelt setting must not pass silently."""
    known = {PREFIX + name.upper() for name in Settings.model_fields} | TOOL_VARIABLES
    for name in environment:
        if name.startswith(PREFIX) and name not in known:
            close = difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean {close[0]}?" if close else f"known are {', '.join(sorted(known))}"
            raise ConfigurationError(f"{name} is not a setting; {hint}")


def _explain(error: ValidationError) -> str:
    lines = []
    for problem in error.errors():
        field = ".".join(str(part) for part in problem["loc"])
        close = difflib.get_close_matches(field, Settings.model_fields, n=1)
        unknown = problem["type"] == "extra_forbidden"
        hint = f" (did you mean {close[0]}?)" if unknown and close else ""
        lines.append(f"setting {field}: {problem['msg']}{hint}")
    return "; ".join(lines)
