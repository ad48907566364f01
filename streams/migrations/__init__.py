"""The database schema as SQL files, applied in order by Alembic."""
