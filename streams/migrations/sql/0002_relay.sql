-- One number for every row that is relayed, whichever table it stands in and whichever way the relay reads it. With
-- the id of its transaction the rows can be polled where there is no logical replication. Rows from before have
-- neither: they are in the log.

CREATE SEQUENCE fencepost.row_number;

ALTER TABLE fencepost.event ADD COLUMN sequence bigint, ADD COLUMN xid xid8;
ALTER TABLE fencepost.event
    ALTER COLUMN sequence SET DEFAULT nextval('fencepost.row_number'),
    ALTER COLUMN xid SET DEFAULT pg_current_xact_id();
CREATE INDEX event_xid ON fencepost.event (xid);
COMMENT ON COLUMN fencepost.event.xid IS 'The transaction that wrote the row; what a snapshot tells apart when the store is polled.';

CREATE TABLE fencepost.relay_begin (
    numbered_from pg_lsn NOT NULL
);
COMMENT ON TABLE fencepost.relay_begin IS 'Rows that were logged before this position have no number and no transaction id: only the log has them.';
INSERT INTO fencepost.relay_begin VALUES (pg_current_wal_insert_lsn());

-- The outbox by days (UTC), so that old ones are dropped as a whole. Should nobody make the next days in time, rows go
-- to outbox_rest, and no service is refused.

ALTER TABLE fencepost.outbox RENAME TO outbox_before;
ALTER TABLE fencepost.outbox_before ALTER COLUMN sequence DROP IDENTITY, ADD COLUMN xid xid8;
ALTER TABLE fencepost.outbox_before RENAME CONSTRAINT outbox_pkey TO outbox_before_pkey;

SELECT setval('fencepost.row_number', (SELECT coalesce(max(sequence), 0) + 1 FROM fencepost.outbox_before), false);

CREATE TABLE fencepost.outbox (
    sequence bigint NOT NULL DEFAULT nextval('fencepost.row_number'),
    id uuid NOT NULL DEFAULT gen_random_uuid(),
    topic text NOT NULL,
    key bytea,
    payload bytea,
    header_names text[] NOT NULL DEFAULT '{}',
    header_values bytea[] NOT NULL DEFAULT '{}',
    created_at timestamptz NOT NULL DEFAULT clock_timestamp(),
    xid xid8 DEFAULT pg_current_xact_id(),
    CONSTRAINT outbox_topic_check CHECK (topic <> ''),
    CONSTRAINT outbox_check CHECK (cardinality(header_names) = cardinality(header_values))
) PARTITION BY RANGE (created_at);
COMMENT ON TABLE fencepost.outbox IS 'Messages for a named topic: plain ones of services, retries, dead letters, derived events.';
CREATE INDEX outbox_xid ON fencepost.outbox (xid);
CREATE TABLE fencepost.outbox_rest PARTITION OF fencepost.outbox DEFAULT;

-- A day that is over is sealed: from the positions in the log that were reached then, nobody writes into it any more.
CREATE TABLE fencepost.outbox_day (
    day date PRIMARY KEY,
    sealed_at pg_lsn,
    sealed_xid xid8
);
COMMENT ON TABLE fencepost.outbox_day IS 'The days of the outbox. One is dropped only if the relay has confirmed what its seal says.';

CREATE FUNCTION fencepost.make_outbox_day(day date) RETURNS boolean LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog AS $$
BEGIN
    IF EXISTS (SELECT FROM fencepost.outbox_day d WHERE d.day = make_outbox_day.day) THEN
        RETURN false;
    END IF;
    EXECUTE 'CREATE TABLE fencepost.outbox_' || to_char(day, 'YYYYMMDD') || ' PARTITION OF fencepost.outbox FOR VALUES FROM ('
        || quote_literal(day::text || ' 00:00:00+00') || ') TO (' || quote_literal((day + 1)::text || ' 00:00:00+00') || ')';
    INSERT INTO fencepost.outbox_day (day) VALUES (make_outbox_day.day);
    RETURN true;
END
$$;

-- The share lock waits for whoever still writes into that day, and for nobody else.
CREATE FUNCTION fencepost.seal_outbox_day(day date) RETURNS void LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog AS $$
BEGIN
    EXECUTE 'LOCK TABLE fencepost.outbox_' || to_char(day, 'YYYYMMDD') || ' IN SHARE MODE';
    UPDATE fencepost.outbox_day d SET sealed_at = pg_current_wal_insert_lsn(), sealed_xid = pg_snapshot_xmax(pg_current_snapshot())
    WHERE d.day = seal_outbox_day.day AND d.sealed_at IS NULL;
END
$$;

CREATE FUNCTION fencepost.drop_outbox_day(day date) RETURNS boolean LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog AS $$
DECLARE
    name text = 'fencepost.outbox_' || to_char(day, 'YYYYMMDD');
    sealed xid8;
    younger boolean;
BEGIN
    SELECT d.sealed_xid INTO sealed FROM fencepost.outbox_day d WHERE d.day = drop_outbox_day.day;
    EXECUTE 'LOCK TABLE ' || name || ' IN ACCESS EXCLUSIVE MODE';
    EXECUTE 'SELECT EXISTS (SELECT FROM ' || name || ' WHERE xid >= $1)' INTO younger USING sealed;
    IF sealed IS NULL OR younger THEN
        UPDATE fencepost.outbox_day d SET sealed_at = NULL, sealed_xid = NULL WHERE d.day = drop_outbox_day.day;
        RETURN false;
    END IF;
    EXECUTE 'DROP TABLE ' || name;
    DELETE FROM fencepost.outbox_day d WHERE d.day = drop_outbox_day.day;
    RETURN true;
END
$$;

-- What was written until now stays in one partition, which ends with today.
DO $$
DECLARE
    today date = (now() AT TIME ZONE 'UTC')::date;
BEGIN
    ALTER TABLE fencepost.outbox_before ALTER COLUMN sequence SET DEFAULT nextval('fencepost.row_number');
    ALTER TABLE fencepost.outbox_before ALTER COLUMN xid SET DEFAULT pg_current_xact_id();
    EXECUTE 'ALTER TABLE fencepost.outbox ATTACH PARTITION fencepost.outbox_before FOR VALUES FROM (MINVALUE) TO ('
        || quote_literal((today + 1)::text || ' 00:00:00+00') || ')';
    EXECUTE 'ALTER TABLE fencepost.outbox_before RENAME TO outbox_' || to_char(today, 'YYYYMMDD');
    INSERT INTO fencepost.outbox_day (day) VALUES (today);
    FOR ahead IN 1..3 LOOP
        PERFORM fencepost.make_outbox_day(today + ahead);
    END LOOP;
END
$$;

-- Rows are announced as rows of the outbox, not of the day that they stand in.
DROP PUBLICATION fencepost;
CREATE PUBLICATION fencepost FOR TABLE fencepost.event, fencepost.outbox
    WITH (publish = 'insert', publish_via_partition_root = true);

-- Where a relay polls: what a snapshot shows has been sent. While a round is on its way, how far it has come.
CREATE TABLE fencepost.relay_cursor (
    slot text PRIMARY KEY,
    system text NOT NULL,
    sent pg_snapshot NOT NULL,
    unsent xid8[] NOT NULL DEFAULT '{}',
    since pg_lsn NOT NULL,
    target pg_snapshot,
    target_at pg_lsn NOT NULL,
    upto bigint NOT NULL DEFAULT 0,
    token bigint NOT NULL DEFAULT 0,
    closing boolean NOT NULL DEFAULT false,
    reason text NOT NULL,
    began_at timestamptz NOT NULL DEFAULT clock_timestamp()
);
COMMENT ON TABLE fencepost.relay_cursor IS
    'One row per relay that polls. All that "sent" shows was sent, but for the transactions in "unsent"; of what "target" shows beyond it, the rows up to "upto". "closing": a slot stands at "target", and takes over.';

-- Records that the broker refused for good, and what came after them of the same key.
CREATE TABLE fencepost.relay_blocked (
    id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    slot text NOT NULL,
    identity bytea NOT NULL,
    topic text NOT NULL,
    key bytea,
    payload bytea,
    header_names text[] NOT NULL,
    header_values bytea[] NOT NULL,
    lane text NOT NULL CHECK (lane IN ('record', 'key', 'topic')),
    reason text,
    decision text CHECK (decision IN ('resend', 'let_go')),
    blocked_at timestamptz NOT NULL DEFAULT clock_timestamp(),
    decided_at timestamptz,
    tried_at timestamptz,
    UNIQUE (slot, identity)
);
COMMENT ON TABLE fencepost.relay_blocked IS
    'Records that wait: those with a reason were refused, the others stand behind one. Those that were let go stay as a record of it. "tried_at": when one was first sent again, in case the sender died before it could take it out.';
CREATE INDEX relay_blocked_key ON fencepost.relay_blocked (slot, topic, key, id) WHERE decision IS DISTINCT FROM 'let_go';
CREATE INDEX relay_blocked_topic ON fencepost.relay_blocked (slot, topic, id)
    WHERE lane = 'topic' AND decision IS DISTINCT FROM 'let_go';
CREATE INDEX relay_blocked_refused ON fencepost.relay_blocked (slot, id) WHERE reason IS NOT NULL;
