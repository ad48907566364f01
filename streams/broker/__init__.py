"""Kafka: the only modules that import confluent_kafka."""
