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
from typing import Any

from streams.errors import SchemaError

Convert = Callable[[Any], Any]

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
    plain, build = _record(cls, schema)
    return Binding(name, schema, prefix, plain, build)


def _record(cls: type, schema: Any) -> tuple[Convert, Convert]:
    if not dataclasses.is_dataclass(cls) or not cls.__dataclass_params__.frozen:  # type: ignore[attr-defined]
        raise SchemaError(f"{cls.__name__} must be a frozen dataclass, since what happened does not change")
    wanted = {field["name"]: field["type"] for field in schema["fields"]}
    hints = typing.get_type_hints(cls)
    declared = {field.name: hints[field.name] for field in dataclasses.fields(cls)}
    for missing in wanted.keys() - declared.keys():
        raise SchemaError(f"{cls.__name__} lacks the field {missing!r} of its schema")
    for extra in declared.keys() - wanted.keys():
        raise SchemaError(f"{cls.__name__} has a field {extra!r} that its schema does not have")
    converters = {
        name: pair
        for name, avro in wanted.items()
        if (pair := _field(f"{cls.__name__}.{name}", declared[name], avro))
    }
    return _plain(cls, converters), _build(cls, converters)


def _plain(cls: type, converters: dict[str, tuple[Convert, Convert]]) -> Convert:
    names = [field.name for field in dataclasses.fields(cls)]

    def plain(event: Any) -> dict[str, Any]:
        values = {name: getattr(event, name) for name in names}
        for name, (to_plain, _) in converters.items():
            values[name] = to_plain(values[name])
        return values

    return plain


def _build(cls: type, converters: dict[str, tuple[Convert, Convert]]) -> Convert:
    slotted = hasattr(cls, "__slots__") or hasattr(cls, "__post_init__")
    new: Callable[[type], Any] = object.__new__

    def build(values: dict[str, Any]) -> Any:
        for name, (_, from_plain) in converters.items():
            values[name] = from_plain(values[name])
        if slotted:
            return cls(**values)
        # Frozen dataclasses set each field through object.__setattr__, which costs more than the decoding did.
        instance = new(cls)
        instance.__dict__.update(values)
        return instance

    return build


def _field(where: str, python: Any, avro: Any) -> tuple[Convert, Convert] | None:
    """Checks one field's types; answers converters where nested records need them."""
    if isinstance(avro, list):
        return _union(where, python, avro)
    kind = avro if isinstance(avro, str) else avro["type"]
    if isinstance(avro, dict) and (logical := _LOGICAL_TYPES.get(avro.get("logicalType", ""))):
        _require(where, python, (logical,), avro)
        return None
    if kind == "record":
        return _record(python, avro)
    if kind == "array":
        return _array(where, python, avro)
    if kind == "map":
        _require(where, typing.get_origin(python), (dict,), avro)
        return None
    _require(where, python, _PYTHON_TYPES.get(kind, ()), avro)
    return None


def _union(where: str, python: Any, avro: list[Any]) -> tuple[Convert, Convert] | None:
    others = [branch for branch in avro if branch != "null"]
    arms = [arm for arm in typing.get_args(python) if arm is not types.NoneType] or [python]
    if (
        "null" not in avro
        or len(others) != 1
        or len(arms) != 1
        or types.NoneType not in typing.get_args(python)
    ):
        raise SchemaError(f"{where}: a union must be of null and one type, declared as 'X | None'")
    pair = _field(where, arms[0], others[0])
    if pair is None:
        return None
    to_plain, from_plain = pair
    return (lambda v: None if v is None else to_plain(v)), (lambda v: None if v is None else from_plain(v))


def _array(where: str, python: Any, avro: Any) -> tuple[Convert, Convert]:
    if typing.get_origin(python) is not tuple or typing.get_args(python)[1:] != (Ellipsis,):
        raise SchemaError(
            f"{where}: an Avro array is declared as tuple[X, ...], so that the event stays unchangeable"
        )
    pair = _field(where, typing.get_args(python)[0], avro["items"])
    if pair is None:
        return list, tuple
    to_plain, from_plain = pair
    return (lambda v: [to_plain(item) for item in v]), (lambda v: tuple(from_plain(item) for item in v))


def _require(where: str, python: Any, allowed: tuple[type, ...], avro: Any) -> None:
    if python not in allowed:
        expected = " or ".join(kind.__name__ for kind in allowed) or "a type that fencepost supports"
        raise SchemaError(f"{where} is declared {python}, its schema says {avro!r}: expected {expected}")
