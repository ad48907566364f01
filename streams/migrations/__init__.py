"""The database schema as SQL files, applied in order by Alembic."""

from __future__ import annotations

from importlib.resources import files


def newest() -> str:
    """The revision that this version of fencepost needs: the number of its last SQL file."""
    # From the names of the files, since every command asks, and importing Alembic takes half a second.
    return max(path.name for path in files("streams.migrations").joinpath("sql").iterdir())[:4]
