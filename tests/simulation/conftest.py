"""Schedules fence and abort by the thousand: what the worker logs about it is not what is tested."""

import logging

import pytest


@pytest.fixture(autouse=True)
def quiet():
    logger = logging.getLogger("dedup")
    before = logger.level
    logger.setLevel(logging.CRITICAL)
    yield
    logger.setLevel(before)
