-- The shop's read models. They belong to the application; fencepost only writes into them.

CREATE SCHEMA IF NOT EXISTS shop;

CREATE TABLE IF NOT EXISTS shop.order_summary (
    order_id text PRIMARY KEY,
    customer_id text NOT NULL,
    status text NOT NULL CHECK (status IN ('placed', 'paid', 'shipped', 'cancelled')),
    total_cents bigint NOT NULL,
    currency text NOT NULL,
    version bigint NOT NULL
);

CREATE TABLE IF NOT EXISTS shop.stock_level (
    sku text PRIMARY KEY,
    on_hand bigint NOT NULL DEFAULT 0,
    reserved bigint NOT NULL DEFAULT 0
);

CREATE TABLE IF NOT EXISTS shop.customer (
    customer_id text PRIMARY KEY,
    name text NOT NULL,
    email text NOT NULL,
    tier text NOT NULL
);

CREATE TABLE IF NOT EXISTS shop.revenue (
    currency text PRIMARY KEY,
    captured_cents bigint NOT NULL DEFAULT 0,
    refunded_cents bigint NOT NULL DEFAULT 0,
    payments bigint NOT NULL DEFAULT 0
);
