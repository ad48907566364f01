"""Confluent's wire format, for topics whose readers take the schemas from a registry.

The store holds Avro single-object encoding, which names a schema by its fingerprint. Confluent's clients expect a zero
byte and the id that a registry gave the schema, four bytes, big-endian. The body is the same, so only what stands before
it is exchanged: when the relay sends, and before a processor decodes.

Subjects are those of Confluent's TopicRecordNameStrategy, ``<topic>-<record>``, since a topic holds several event types.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from functools import lru_cache
from typing import Any, NoReturn, Protocol
from urllib.parse import urlsplit

from streams.errors import (
    ConfigurationError,
    SchemaError,
    ServerUnavailable,
    Transient,
    UndecodableRecord,
    UnknownSchema,
)
from streams.schema.catalog import HEADER_LENGTH, MARKER, Catalog, Schema, prefix_of
from streams.settings import Settings

_MAGIC = b"\x00"
_HEAD = struct.Struct(">bi")

# The codes of Confluent's API (https://docs.confluent.io/platform/current/schema-registry/develop/api.html).
_NO_SUBJECT, _NO_SCHEMA = 40401, 40403
_REFUSALS = (409, 422)


class RegistryUnavailable(ServerUnavailable):
    """The registry does not answer: the fault of no record, so whoever met it waits and asks again."""


class Registry(Protocol):
    """What is asked of a registry.

    Every method raises RegistryUnavailable where it does not answer.
    """

    def find(self, subject: str, schema: Schema) -> int | None:
        """The id of a schema that is registered under the subject; None where it is not."""

    def register(self, subject: str, schema: Schema) -> int:
        """Registers a schema; answers its id.

        Raises:
            SchemaError: the registry refuses it.
        """

    def definition(self, id: int) -> str:
        """The text of a schema.

        Raises:
            Transient: it has none of that id, yet.
            UndecodableRecord: it is no Avro schema.
        """


class Framing:
    """Exchanges the frames of values. Ids are for ever, so each is asked for once."""

    def __init__(self, catalog: Catalog, registry: Registry) -> None:
        self._catalog, self._registry = catalog, registry
        self._schemas = {schema.prefix: schema for schema in catalog.schemas()}
        self._heads: dict[tuple[str, bytes], bytes] = {}
        self._prefixes: dict[bytes, bytes] = {}

    def to_confluent(self, topic: str, value: bytes | None) -> bytes | None:
        """A value in Confluent's frame; one that is not single-object encoding as it is.

        Its schema is registered if it is not.

        Raises:
            UnknownSchema: the catalog has no schema with the value's fingerprint.
            RegistryUnavailable: the registry does not answer.
            SchemaError: the registry refuses the schema.
        """
        if value is None or not value.startswith(MARKER) or len(value) < HEADER_LENGTH:
            return value
        prefix = value[:HEADER_LENGTH]
        head = self._heads.get((topic, prefix))
        if head is None:
            head = self._heads[topic, prefix] = self._head(topic, prefix)
        return head + value[HEADER_LENGTH:]

    def from_confluent(self, value: bytes) -> bytes:
        """A value in the single-object frame; one that is not in Confluent's as it is.

        Raises:
            RegistryUnavailable: the registry does not answer.
            Transient: the registry has no schema with the value's id.
            UndecodableRecord: the schema with the value's id is none that describes an event.
        """
        if not value.startswith(_MAGIC) or len(value) < _HEAD.size:
            return value
        head = value[: _HEAD.size]
        prefix = self._prefixes.get(head)
        if prefix is None:
            prefix = self._prefixes[head] = self._prefix(head)
        return prefix + value[_HEAD.size :]

    def _head(self, topic: str, prefix: bytes) -> bytes:
        schema = self._schemas.get(prefix)
        if schema is None:
            raise UnknownSchema(prefix[len(MARKER) :].hex())
        return _HEAD.pack(0, self._id(f"{topic}-{schema.full_name}", schema))

    def _id(self, subject: str, schema: Schema) -> int:
        found = self._registry.find(subject, schema)
        if found is not None:
            return found
        # The earlier ones first: a registry judges a schema by those before it, and the latest is what others see.
        for earlier in self._catalog.history(schema):
            if self._registry.find(subject, earlier) is None:
                self._registry.register(subject, earlier)
        return self._registry.register(subject, schema)

    def _prefix(self, head: bytes) -> bytes:
        _, id = _HEAD.unpack(head)
        definition = self._registry.definition(id)
        try:
            return prefix_of(definition)
        except SchemaError as error:
            raise UndecodableRecord(f"schema {id} of the registry cannot be read: {error}") from error


def framing(settings: Settings, catalog: Catalog) -> Framing | None:
    """The framing of this catalog's values; None where no registry is configured.

    Raises:
        ConfigurationError: STREAMS_REGISTRY_URL cannot be read, or the client for it is not installed.
    """
    if settings.registry_url is None:
        return None
    return Framing(catalog, _registry(settings.registry_url, settings.connect_seconds))


def decoder(settings: Settings, catalog: Catalog) -> Callable[[bytes], Any]:
    """What makes an event of a value: in the single-object frame, and in Confluent's where a registry is configured.

    Raises:
        ConfigurationError: as ``framing`` does. What the function raises is what ``Catalog.decode`` does, and
            ``Framing.from_confluent``.
    """
    frames = framing(settings, catalog)
    if frames is None:
        return catalog.decode
    decode, unframed = catalog.decode, frames.from_confluent
    return lambda value: decode(unframed(value))


@lru_cache(maxsize=8)
def _registry(url: str, seconds: float) -> ConfluentRegistry:
    """One client for all threads of a process."""
    return ConfluentRegistry(url, seconds)


class ConfluentRegistry:
    """A registry that speaks Confluent's API."""

    def __init__(self, url: str, seconds: float) -> None:
        try:
            # Takes a third of a second and a dozen packages, which only those pay who have a registry.
            import confluent_kafka.schema_registry as client  # noqa: PLC0415
        except ImportError as error:
            raise ConfigurationError(
                f"STREAMS_REGISTRY_URL is set, and the client is not installed ({error}); "
                "run: pip install 'fencepost[registry]'"
            ) from error
        self._error, self._schema = client.SchemaRegistryError, client.Schema
        self._shown = urlsplit(url)._replace(netloc=urlsplit(url).netloc.rpartition("@")[2]).geturl()
        try:
            # Whoever calls tries again by itself, and says meanwhile what it waits for.
            self._client = client.SchemaRegistryClient({"url": url, "timeout": seconds, "max.retries": 0})
        except ValueError as error:
            raise ConfigurationError(f"STREAMS_REGISTRY_URL cannot be read: {error}") from error

    def find(self, subject: str, schema: Schema) -> int | None:
        try:
            found = self._client.lookup_schema(subject, self._schema(schema.definition, "AVRO"))
        except self._error as error:
            if error.error_code in (_NO_SUBJECT, _NO_SCHEMA):
                return None
            self._unavailable(error)
        except Exception as error:  # noqa: BLE001 - whatever its HTTP client raises
            self._unavailable(error)
        return found.schema_id

    def register(self, subject: str, schema: Schema) -> int:
        try:
            return self._client.register_schema(subject, self._schema(schema.definition, "AVRO"))
        except self._error as error:
            if error.http_status_code in _REFUSALS:
                raise SchemaError(
                    f"the schema registry refuses {schema.path} for subject {subject}: {error.error_message}. "
                    "Change the schema so that its readers can read it, or the subject's compatibility"
                ) from error
            self._unavailable(error)
        except Exception as error:  # noqa: BLE001 - whatever its HTTP client raises
            self._unavailable(error)

    def definition(self, id: int) -> str:
        try:
            found = self._client.get_schema(id)
        except self._error as error:
            if error.error_code == _NO_SCHEMA:
                raise Transient(f"the schema registry at {self._shown} has no schema {id}") from error
            self._unavailable(error)
        except Exception as error:  # noqa: BLE001 - whatever its HTTP client raises
            self._unavailable(error)
        if found.schema_type != "AVRO" or found.schema_str is None:
            raise UndecodableRecord(f"schema {id} of the registry is {found.schema_type}, and no Avro schema")
        return found.schema_str

    def _unavailable(self, error: Exception) -> NoReturn:
        raise RegistryUnavailable(
            f"the schema registry does not answer at {self._shown} ({str(error) or type(error).__name__}); "
            "check STREAMS_REGISTRY_URL, or start a local one with: streams dev up --registry"
        ) from error
