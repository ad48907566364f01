-- What the demo's service keeps for itself: where each of its writers is, so that it can be killed and go on.

CREATE SCHEMA IF NOT EXISTS demo;

CREATE TABLE IF NOT EXISTS demo.writer (
    writer integer PRIMARY KEY,
    done integer NOT NULL DEFAULT 0,
    conflicts bigint NOT NULL DEFAULT 0,
    replayed bigint NOT NULL DEFAULT 0,
    rolled_back bigint NOT NULL DEFAULT 0
);
