-- Publish: the event store, and the outbox for everything else that must reach a topic.

CREATE TABLE fencepost.resource (
    resource_type text NOT NULL CHECK (resource_type <> ''),
    resource_id text NOT NULL CHECK (resource_id <> ''),
    version bigint NOT NULL CHECK (version > 0),
    PRIMARY KEY (resource_type, resource_id)
);
COMMENT ON TABLE fencepost.resource IS 'One row per resource: its version, and the row lock that serialises its writers.';

CREATE TABLE fencepost.event (
    resource_type text NOT NULL,
    resource_id text NOT NULL,
    version bigint NOT NULL CHECK (version > 0),
    id uuid NOT NULL,
    type text NOT NULL,
    payload bytea NOT NULL,
    traceparent text,
    recorded_at timestamptz NOT NULL DEFAULT clock_timestamp(),
    PRIMARY KEY (resource_type, resource_id, version)
);
COMMENT ON TABLE fencepost.event IS 'The event store. Only ever inserted into; the relay reads the inserts from the log.';

CREATE TABLE fencepost.append_key (
    idempotency_key text PRIMARY KEY,
    request_hash bytea NOT NULL,
    resource_type text NOT NULL,
    resource_id text NOT NULL,
    first_version bigint NOT NULL,
    last_version bigint NOT NULL,
    created_at timestamptz NOT NULL DEFAULT clock_timestamp()
);
COMMENT ON TABLE fencepost.append_key IS 'What an idempotency key appended, so that the same request again gets the same answer.';

CREATE TABLE fencepost.snapshot (
    resource_type text NOT NULL,
    resource_id text NOT NULL,
    tag text NOT NULL,
    version bigint NOT NULL,
    state bytea NOT NULL,
    PRIMARY KEY (resource_type, resource_id, tag)
);
COMMENT ON TABLE fencepost.snapshot IS 'The newest folded state of a resource; a cache, safe to empty. The tag names the code that can read it.';

CREATE TABLE fencepost.outbox (
    sequence bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    id uuid NOT NULL DEFAULT gen_random_uuid(),
    topic text NOT NULL CHECK (topic <> ''),
    key bytea,
    payload bytea,
    header_names text[] NOT NULL DEFAULT '{}',
    header_values bytea[] NOT NULL DEFAULT '{}',
    created_at timestamptz NOT NULL DEFAULT clock_timestamp(),
    CHECK (cardinality(header_names) = cardinality(header_values))
);
COMMENT ON TABLE fencepost.outbox IS 'Messages for a named topic: plain ones of services, retries, dead letters, derived events.';

-- The relay's slot reads these two tables, inserts only, and nothing else of the database.
CREATE PUBLICATION fencepost FOR TABLE fencepost.event, fencepost.outbox WITH (publish = 'insert');

-- Consume: how far each group is, what it has seen, and what did not pass.

CREATE TABLE fencepost.fence (
    consumer_group text NOT NULL,
    topic text NOT NULL,
    topic_id text NOT NULL,
    partition integer NOT NULL,
    epoch bigint NOT NULL,
    first_offset bigint NOT NULL,
    next_offset bigint NOT NULL CHECK (next_offset >= first_offset),
    applied bigint NOT NULL DEFAULT 0,
    stale bigint NOT NULL DEFAULT 0,
    duplicate bigint NOT NULL DEFAULT 0,
    filtered bigint NOT NULL DEFAULT 0,
    retried bigint NOT NULL DEFAULT 0,
    behind bigint NOT NULL DEFAULT 0,
    dead bigint NOT NULL DEFAULT 0,
    absent bigint NOT NULL DEFAULT 0,
    worker text NOT NULL DEFAULT '',
    updated_at timestamptz NOT NULL DEFAULT clock_timestamp(),
    PRIMARY KEY (consumer_group, topic, topic_id, partition),
    CONSTRAINT every_offset_has_one_disposition
        CHECK (next_offset - first_offset = applied + stale + duplicate + filtered + retried + behind + dead + absent)
);
COMMENT ON TABLE fencepost.fence IS
    'The position of a group in a partition, and who may move it. "absent" counts offsets the broker holds no record for.';

CREATE TABLE fencepost.progress (
    consumer_group text NOT NULL,
    topic text NOT NULL,
    key bytea NOT NULL,
    version bigint NOT NULL,
    PRIMARY KEY (consumer_group, topic, key)
);
COMMENT ON TABLE fencepost.progress IS
    'The version of each resource a group has applied. It outlives the rows of the read model, so a deleted row stays deleted.';

CREATE TABLE fencepost.inbox (
    consumer_group text NOT NULL,
    event_id text NOT NULL,
    received_at timestamptz NOT NULL DEFAULT clock_timestamp(),
    PRIMARY KEY (consumer_group, event_id)
);
COMMENT ON TABLE fencepost.inbox IS 'Ids seen by groups whose events carry no versions.';

CREATE TABLE fencepost.job (
    id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    consumer_group text NOT NULL,
    topic text NOT NULL,
    topic_id text NOT NULL,
    partition integer NOT NULL,
    record_offset bigint NOT NULL,
    record_timestamp bigint NOT NULL,
    key bytea,
    value bytea,
    header_names text[] NOT NULL,
    header_values bytea[] NOT NULL,
    version bigint,
    status text NOT NULL CHECK (status IN ('queued', 'processing', 'retry', 'completed', 'failed', 'dead_letter', 'unknown')),
    attempt_count integer NOT NULL DEFAULT 0,
    max_attempts integer NOT NULL,
    redrive_count integer NOT NULL DEFAULT 0,
    available_at timestamptz NOT NULL DEFAULT clock_timestamp(),
    visibility_until timestamptz,
    worker_id text,
    error_class text,
    error_fingerprint text,
    last_error text,
    result text,
    created_at timestamptz NOT NULL DEFAULT clock_timestamp(),
    updated_at timestamptz NOT NULL DEFAULT clock_timestamp(),
    UNIQUE (consumer_group, topic, topic_id, partition, record_offset)
);
COMMENT ON TABLE fencepost.job IS 'A record that did not pass at once, with all that is needed to try it again.';
CREATE INDEX job_lane ON fencepost.job (consumer_group, topic, key, version) WHERE status IN ('queued', 'processing', 'retry');
CREATE INDEX job_due ON fencepost.job (consumer_group, available_at) WHERE status = 'retry';
CREATE INDEX job_dead ON fencepost.job (consumer_group, id) WHERE status = 'dead_letter';

CREATE TABLE fencepost.job_history (
    job_id bigint NOT NULL REFERENCES fencepost.job (id) ON DELETE CASCADE,
    at timestamptz NOT NULL DEFAULT clock_timestamp(),
    from_status text,
    to_status text NOT NULL,
    attempt integer NOT NULL,
    worker_id text,
    error text
);
CREATE INDEX job_history_job ON fencepost.job_history (job_id, at);

CREATE TABLE fencepost.job_transition (
    from_status text NOT NULL,
    to_status text NOT NULL,
    PRIMARY KEY (from_status, to_status)
);
COMMENT ON TABLE fencepost.job_transition IS 'The legal moves of a job; a trigger refuses all others.';
INSERT INTO fencepost.job_transition VALUES
    ('queued', 'processing'),
    ('retry', 'processing'),
    ('processing', 'completed'),
    ('processing', 'retry'),
    ('processing', 'queued'),
    ('processing', 'failed'),
    ('processing', 'dead_letter'),
    ('processing', 'unknown'),
    ('dead_letter', 'retry'),
    ('dead_letter', 'failed');

CREATE FUNCTION fencepost.keep_job_history() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    IF TG_OP = 'INSERT' THEN
        INSERT INTO fencepost.job_history (job_id, from_status, to_status, attempt, worker_id, error)
        VALUES (NEW.id, NULL, NEW.status, NEW.attempt_count, NEW.worker_id, NEW.last_error);
        RETURN NEW;
    END IF;
    IF NEW.status = OLD.status THEN
        RETURN NEW;
    END IF;
    PERFORM FROM fencepost.job_transition WHERE from_status = OLD.status AND to_status = NEW.status;
    IF NOT FOUND THEN
        RAISE EXCEPTION 'job % cannot go from % to %', OLD.id, OLD.status, NEW.status USING ERRCODE = 'check_violation';
    END IF;
    INSERT INTO fencepost.job_history (job_id, from_status, to_status, attempt, worker_id, error)
    VALUES (NEW.id, OLD.status, NEW.status, NEW.attempt_count, NEW.worker_id, NEW.last_error);
    RETURN NEW;
END
$$;
CREATE TRIGGER keep_job_history AFTER INSERT OR UPDATE OF status ON fencepost.job
    FOR EACH ROW EXECUTE FUNCTION fencepost.keep_job_history();

CREATE TABLE fencepost.redrive (
    id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    job_id bigint NOT NULL REFERENCES fencepost.job (id) ON DELETE CASCADE,
    redrive_number integer NOT NULL,
    plan text NOT NULL,
    requested_by text NOT NULL,
    requested_at timestamptz NOT NULL DEFAULT clock_timestamp(),
    UNIQUE (job_id, redrive_number)
);
COMMENT ON TABLE fencepost.redrive IS 'Who sent which dead letter back, and what was expected to happen.';
