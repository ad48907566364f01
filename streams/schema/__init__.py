"""Event classes and their Avro schemas."""

from streams.schema.catalog import Catalog

__all__ = ["Catalog"]
