"""How a frozen dataclass and an Avro record become each other; checked once, when the class is declared."""

from __future__ import annotations

import dataclasses
import datetime as dt
import decimal
import types
import typing
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from streams.errors import SchemaError

Convert = Callable[[Any], Any]


class Converters(NamedTuple):
    """What a value needs on its way to Avro, and on its way back; None where it goes as it is."""

    plain: Convert | None = None
    build: Convert | None = None


_AS_IT_IS = Converters()

_PYTHON_TYPES: dict[str, tuple[type, ...]] = {
    "string": (str,),
    "int": (int,),
    "long": (int,),
    "float": (float,),
    "double": (float,),
    "boolean": (bool,),
    "bytes": (bytes,),
    "null": (types.NoneType,),
    "enum": (str,),
    "fixed": (bytes,),
}
_LOGICAL_TYPES: dict[str, type] = {
    "decimal": decimal.Decimal,
    "uuid": uuid.UUID,
    "date": dt.date,
    "time-millis": dt.time,
    "time-micros": dt.time,
    "timestamp-millis": dt.datetime,
    "timestamp-micros": dt.datetime,
    "local-timestamp-millis": dt.datetime,
    "local-timestamp-micros": dt.datetime,
}


@dataclass(frozen=True)
class Binding:
    """``plain`` makes the dictionary that Avro writes, ``build`` the instance from what it read."""

    name: str
    schema: Any
    prefix: bytes
    plain: Convert
    build: Convert


def bind(cls: type, name: str, schema: Any, prefix: bytes) -> Binding:
    """Checks a class against a parsed record schema, field by field.

    Raises:
        SchemaError: naming the class, the field and both types.
    """
    plain, build = _Binder(schema.get("__named_schemas", {})).record(cls, schema)
    return Binding(name, schema, prefix, plain, build)


class _Binder:
    """Walks a class and a schema together. ``named`` holds the types that the schema refers to by name."""

    def __init__(self, named: dict[str, Any]) -> None:
        self._named = named
        self._inside: list[str] = []

    def record(self, cls: type, schema: Any) -> tuple[Convert, Convert]:
        if schema["name"] in self._inside:
            raise SchemaError(
                f"{cls.__name__}: the record {schema['name']} holds itself, which is not supported"
            )
        self._inside.append(schema["name"])
        wanted = {field["name"]: field["type"] for field in schema["fields"]}
        declared = _declared(cls)
        for missing in wanted.keys() - declared.keys():
            raise SchemaError(f"{cls.__name__} lacks the field {missing!r} of its schema")
        for extra in declared.keys() - wanted.keys():
            raise SchemaError(f"{cls.__name__} has a field {extra!r} that its schema does not have")
        converters = {
            name: self._field(f"{cls.__name__}.{name}", declared[name], avro) for name, avro in wanted.items()
        }
        self._inside.pop()
        return _plain(cls, converters), _build(cls, converters)

    def _field(self, where: str, python: Any, avro: Any) -> Converters:
        """Checks one field's types; answers what its values need."""
        if isinstance(avro, list):
            return self._union(where, python, avro)
        if isinstance(avro, str) and avro in self._named:
            avro = self._named[avro]
        kind = avro if isinstance(avro, str) else avro["type"]
        if isinstance(avro, dict) and (logical := _LOGICAL_TYPES.get(avro.get("logicalType", ""))):
            _require(where, python, (logical,), avro)
            return Converters(plain=_logical_check(where, avro["logicalType"], logical))
        if kind == "record":
            _require_dataclass(where, python)
            return Converters(*self.record(python, avro))
        if kind == "array":
            return self._array(where, python, avro)
        if kind == "map":
            return self._map(where, python, avro)
        _require(where, python, _PYTHON_TYPES.get(kind, ()), avro)
        return Converters(plain=_check(where, kind))

    def _union(self, where: str, python: Any, avro: list[Any]) -> Converters:
        others = [branch for branch in avro if branch != "null"]
        arms = [arm for arm in typing.get_args(python) if arm is not types.NoneType] or [python]
        if (
            "null" not in avro
            or len(others) != 1
            or len(arms) != 1
            or types.NoneType not in typing.get_args(python)
        ):
            raise SchemaError(f"{where}: a union must be of null and one type, declared as 'X | None'")
        return Converters(*map(_unless_none, self._field(where, arms[0], others[0])))

    def _array(self, where: str, python: Any, avro: Any) -> Converters:
        if typing.get_origin(python) is not tuple or typing.get_args(python)[1:] != (Ellipsis,):
            raise SchemaError(
                f"{where}: an Avro array is declared as tuple[X, ...], so that the event stays unchangeable"
            )
        plain, build = self._field(where, typing.get_args(python)[0], avro["items"])
        return Converters(
            list if plain is None else lambda items: [plain(item) for item in items],
            tuple if build is None else lambda items: tuple([build(item) for item in items]),
        )

    def _map(self, where: str, python: Any, avro: Any) -> Converters:
        if typing.get_origin(python) is not dict or typing.get_args(python)[0] is not str:
            raise SchemaError(f"{where}: an Avro map is declared as dict[str, X], not {python!r}")
        plain, build = self._field(where, typing.get_args(python)[1], avro["values"])
        return Converters(*(None if each is None else _each_value(each) for each in (plain, build)))


def _declared(cls: type) -> dict[str, Any]:
    if not dataclasses.is_dataclass(cls) or not cls.__dataclass_params__.frozen:  # type: ignore[attr-defined]
        raise SchemaError(f"{cls.__name__} must be a frozen dataclass, since what happened does not change")
    try:
        hints = typing.get_type_hints(cls)
    except NameError as error:
        raise SchemaError(
            f"{cls.__name__}: {error}; the types of its fields must stand in its module"
        ) from error
    return {field.name: hints[field.name] for field in dataclasses.fields(cls)}


def _plain(cls: type, converters: dict[str, Converters]) -> Convert:
    names = [field.name for field in dataclasses.fields(cls)]
    needed = [(name, each.plain) for name, each in converters.items() if each.plain]

    def plain(event: Any) -> dict[str, Any]:
        if type(event) is not cls:
            raise TypeError(f"{type(event).__name__} stands where {cls.__name__} should")
        values = {name: getattr(event, name) for name in names}
        for name, to_plain in needed:
            values[name] = to_plain(values[name])
        return values

    return plain


def _build(cls: type, converters: dict[str, Converters]) -> Convert:
    slotted = hasattr(cls, "__slots__") or hasattr(cls, "__post_init__")
    new: Callable[[type], Any] = object.__new__
    needed = [(name, each.build) for name, each in converters.items() if each.build]

    def build(values: dict[str, Any]) -> Any:
        for name, from_plain in needed:
            values[name] = from_plain(values[name])
        if slotted:
            return cls(**values)
        # Frozen dataclasses set each field through object.__setattr__, which costs more than the decoding did.
        instance = new(cls)
        instance.__dict__.update(values)
        return instance

    return build


def _check(where: str, kind: str) -> Convert | None:
    """What fastavro does not check: it would cut 1.5 down to 1, and write a long where an int belongs."""
    if kind in ("int", "long"):
        limit = 2**31 if kind == "int" else 2**63

        def integer(value: Any) -> Any:
            if not isinstance(value, int) or isinstance(value, bool) or not -limit <= value < limit:
                raise ValueError(f"{where} holds {value!r}, which is no {kind}")
            return value

        return integer
    if kind in ("float", "double"):
        return _number(where)
    return _exactly(where, bool) if kind == "boolean" else None


def _number(where: str) -> Convert:
    def number(value: Any) -> Any:
        if not isinstance(value, int | float) or isinstance(value, bool):
            raise TypeError(f"{where} holds {value!r}, which is no number")
        return value

    return number


def _logical_check(where: str, name: str, python: type) -> Convert:
    exactly = _exactly(where, python)
    if python is not dt.datetime:
        return exactly
    local = name.startswith("local-")

    def moment(value: Any) -> Any:
        # fastavro would take a time without a zone for the time of this machine's zone, whatever that is.
        if (exactly(value).tzinfo is None) is not local:
            raise ValueError(f"{where} holds {value!r}, which {'has a' if local else 'lacks its'} time zone")
        return value

    return moment


def _exactly(where: str, python: type) -> Convert:
    def checked(value: Any) -> Any:
        if type(value) is not python:
            raise ValueError(f"{where} holds {value!r}, which is no {python.__name__}")
        return value

    return checked


def _unless_none(convert: Convert | None) -> Convert | None:
    return None if convert is None else lambda value: None if value is None else convert(value)


def _each_value(convert: Convert) -> Convert:
    return lambda values: {key: convert(value) for key, value in values.items()}


def _require_dataclass(where: str, python: Any) -> None:
    if not isinstance(python, type) or not dataclasses.is_dataclass(python):
        raise SchemaError(
            f"{where} is declared {python!r}, its schema says a record: expected a frozen dataclass"
        )


def _require(where: str, python: Any, allowed: tuple[type, ...], avro: Any) -> None:
    if python not in allowed:
        expected = " or ".join(kind.__name__ for kind in allowed) or "a type that fencepost supports"
        raise SchemaError(f"{where} is declared {python}, its schema says {avro!r}: expected {expected}")
