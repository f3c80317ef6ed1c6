"""The order number is the last part of a URL, such as https://shop.example/orders/17."""

import json
from collections.abc import Sequence


def order_number(_key: bytes | None, value: bytes | None, _headers: Sequence[tuple[str, bytes | None]]) -> str | None:
    """Return the order number, or None if the value has no URL."""
    url = json.loads(value or b"{}").get("url")
    return None if url is None else url.rstrip("/").rpartition("/")[2]
