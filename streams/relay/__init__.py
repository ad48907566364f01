"""From PostgreSQL's write-ahead log to topics."""
