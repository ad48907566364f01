"""The catalog: ``.avsc`` files, and the event classes bound to them.

``OrderPlaced.avsc`` is the schema that is written today. An earlier one stays beside it as
``OrderPlaced.v1.avsc``, so that events written under it are read as today's class (Avro schema resolution).

Values use Avro single-object encoding: the two bytes C3 01, the little-endian CRC-64-AVRO fingerprint of the
schema's parsing canonical form, then the body (https://avro.apache.org/docs/1.12.0/specification/#single-object-encoding).
"""

from __future__ import annotations

import dataclasses
import difflib
import io
import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import fastavro
from fastavro.read import SchemaResolutionError
from fastavro.schema import fingerprint, to_parsing_canonical_form

from streams.errors import SchemaError, UndecodableRecord, UnknownSchema
from streams.schema.binding import Binding, bind

MARKER = b"\xc3\x01"
HEADER_LENGTH = 10

# fastavro answers malformed definitions with whatever its code met first
_MALFORMED = (ValueError, TypeError, KeyError, AttributeError, fastavro.schema.SchemaParseException)

T = TypeVar("T")
_ATTRIBUTE = "__fencepost_binding__"


@dataclass(frozen=True)
class Schema:
    """One version of one event type's schema.

    Attributes:
        definition: the file's text, with the documentation, defaults and logical types that a fingerprint leaves out.
    """

    name: str
    path: Path
    definition: str
    parsed: Any
    prefix: bytes

    @classmethod
    def read(cls, path: Path) -> Schema:
        try:
            definition = path.read_text()
            source = json.loads(definition)
            parsed = fastavro.parse_schema(source)
            prefix = _prefix(source)
        except _MALFORMED as error:
            raise SchemaError(f"{path} is not an Avro schema: {error}") from error
        if not isinstance(source, dict) or source.get("type") != "record" or "fields" not in source:
            raise SchemaError(f"{path} must define a record, since an event has named fields")
        return cls(source["name"], path, definition, parsed, prefix)

    @property
    def fingerprint(self) -> str:
        return self.prefix[2:].hex()

    @property
    def full_name(self) -> str:
        """Its name with the namespace."""
        return str(self.parsed["name"])


class Catalog:
    """The schemas in a folder, and the event classes declared for them.

    Args:
        folder: searched recursively for ``.avsc`` files.

    Raises:
        SchemaError: a file is not a record schema, or two define the same one.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._current: dict[str, Schema] = {}
        self._by_prefix: dict[bytes, Schema] = {}
        self._classes: dict[str, Binding] = {}
        self._readers: dict[bytes, Callable[[io.BytesIO], Any]] = {}
        for path in sorted(folder.rglob("*.avsc")):
            self._add(Schema.read(path))

    def event(self, cls: type[T]) -> type[T]:
        """Declares a frozen dataclass as the class of the schema that bears its name.

        Raises:
            SchemaError: there is no such schema, or fields and types do not fit it.
        """
        schema = self._current.get(cls.__name__)
        if schema is None:
            close = difflib.get_close_matches(cls.__name__, self._current, n=1)
            hint = f"; did you mean {close[0]}?" if close else ""
            raise SchemaError(f"there is no {cls.__name__}.avsc under {self._folder}{hint}")
        binding = bind(cls, schema.name, schema.parsed, schema.prefix)
        self._classes[schema.name] = binding
        setattr(cls, _ATTRIBUTE, binding)
        return cls

    def decode(self, value: bytes) -> Any:
        """The event that single-object bytes hold, as an instance of its class.

        Raises:
            UnknownSchema: its fingerprint is in no file of this catalog.
            UndecodableRecord: the bytes are not single-object encoding, or do not match their schema.
        """
        read = self._readers.get(value[:HEADER_LENGTH])
        if read is None:
            read = self._reader(value)
        try:
            return read(io.BytesIO(value))
        # fastavro answers damaged bytes with whatever its C code met first
        except (EOFError, LookupError, ValueError, TypeError, ArithmeticError, StopIteration) as error:
            raise UndecodableRecord(
                f"the value does not match its schema: {type(error).__name__}: {error}"
            ) from error
        except SchemaResolutionError as error:
            raise UndecodableRecord(f"the value's schema cannot be read as today's: {error}") from error

    def schemas(self) -> Iterator[Schema]:
        """Every schema of the folder, current and earlier."""
        yield from self._by_prefix.values()

    def current(self, name: str) -> Schema | None:
        """The schema that events of this name are written with today."""
        return self._current.get(name)

    def history(self, schema: Schema) -> list[Schema]:
        """The schemas that events of the same record were written with before this one, the oldest first."""
        versions = [each for each in self._by_prefix.values() if each.full_name == schema.full_name]
        versions.sort(key=self._age)
        return versions[: versions.index(schema)]

    def _add(self, schema: Schema) -> None:
        file_name, *version = schema.path.stem.split(".")
        if file_name != schema.name:
            raise SchemaError(f"{schema.path} defines {schema.name}; the file must bear the record's name")
        if schema.prefix in self._by_prefix:
            raise SchemaError(f"{schema.path} repeats {self._by_prefix[schema.prefix].path}")
        self._by_prefix[schema.prefix] = schema
        if not version:
            if schema.name in self._current:
                raise SchemaError(
                    f"{schema.path} and {self._current[schema.name].path} both define {schema.name} as it is today"
                )
            self._current[schema.name] = schema

    def _age(self, schema: Schema) -> tuple[bool, list[int]]:
        """What the versions of a record are ordered by: v2 before v10, and today's behind them all."""
        numbers = re.findall(r"\d+", schema.path.stem.partition(".")[2])
        return schema is self._current.get(schema.name), [int(number) for number in numbers]

    def _reader(self, value: bytes) -> Callable[[io.BytesIO], Any]:
        prefix = value[:HEADER_LENGTH]
        if not prefix.startswith(MARKER) or len(prefix) < HEADER_LENGTH:
            hint = "; Confluent's wire format needs STREAMS_REGISTRY_URL" if prefix[:1] == b"\x00" else ""
            raise UndecodableRecord(
                f"the value is not Avro single-object encoding (it begins with {prefix[:2].hex()}{hint})"
            )
        writer = self._by_prefix.get(prefix)
        if writer is None:
            raise UnknownSchema(prefix[2:].hex())
        binding = self._classes.get(writer.name)
        if binding is None:
            raise UnknownSchema(f"{prefix[2:].hex()} ({writer.name}, which has no event class)")
        self._readers[prefix] = read = _reader(writer, binding)
        return read


def prefix_of(definition: str) -> bytes:
    """What stands before a body that was written with this schema.

    Raises:
        SchemaError: the text is not an Avro schema.
    """
    try:
        return _prefix(json.loads(definition))
    except _MALFORMED as error:
        raise SchemaError(f"not an Avro schema: {error}") from error


def encode(event: object) -> bytes:
    """The single-object bytes of an event.

    Raises:
        SchemaError: its class is not declared in a catalog, or a value does not fit the schema.
    """
    binding: Binding | None = getattr(type(event), _ATTRIBUTE, None)
    if binding is None:
        raise SchemaError(f"{type(event).__name__} is not an event class; declare it with @catalog.event")
    buffer = io.BytesIO()
    buffer.write(binding.prefix)
    try:
        fastavro.schemaless_writer(buffer, binding.schema, binding.plain(event), strict=True)
    except (ValueError, TypeError, OverflowError, AttributeError, KeyError) as error:
        raise SchemaError(f"{type(event).__name__} does not fit its schema: {error}") from error
    return buffer.getvalue()


def type_name(event: object) -> str:
    """The name under which an event's class travels."""
    binding: Binding | None = getattr(type(event), _ATTRIBUTE, None)
    if binding is None:
        raise SchemaError(f"{type(event).__name__} is not an event class; declare it with @catalog.event")
    return binding.name


def is_event_class(cls: object) -> bool:
    """Whether a class was declared with ``@catalog.event``."""
    return isinstance(cls, type) and hasattr(cls, _ATTRIBUTE)


def fields_of(event: object) -> dict[str, Any]:
    """An event as a plain dictionary, for display."""
    return (
        dataclasses.asdict(event) if dataclasses.is_dataclass(event) and not isinstance(event, type) else {}
    )


def _prefix(source: Any) -> bytes:
    # The hexadecimal digits stand in the order of the wire already, least significant byte first.
    return MARKER + bytes.fromhex(fingerprint(to_parsing_canonical_form(source), "CRC-64-AVRO"))


def _reader(writer: Schema, binding: Binding) -> Callable[[io.BytesIO], Any]:
    read, build, written = fastavro.schemaless_reader, binding.build, writer.parsed
    wanted = None if writer.prefix == binding.prefix else binding.schema

    def decode(buffer: io.BytesIO) -> Any:
        buffer.seek(HEADER_LENGTH)
        data = build(read(buffer, written, wanted))
        if buffer.read(1):
            raise ValueError("bytes are left over after the body")
        return data

    return decode
