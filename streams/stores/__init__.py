"""PostgreSQL: the only modules that import psycopg, and the SQL they run."""
