"""The names of confluent_kafka that the loops speak of, so that they import no client themselves."""

from confluent_kafka import OFFSET_INVALID, KafkaError, KafkaException, Producer, TopicPartition
from confluent_kafka.admin import NewTopic  # type: ignore[attr-defined]

__all__ = ["OFFSET_INVALID", "KafkaError", "KafkaException", "NewTopic", "Producer", "TopicPartition"]
