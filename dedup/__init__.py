"""Exactly-once deduplication for Kafka topics."""
