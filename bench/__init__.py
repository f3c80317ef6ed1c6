"""Reproducible measurements of dedup and of its peers; `dedup` never imports this."""
