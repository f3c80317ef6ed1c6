"""The flow of routed.yaml."""

from collections.abc import Iterator

from dedup import Flow, FlowRecord

flow = Flow()


@flow.on_unique
def route(record: FlowRecord) -> Iterator[FlowRecord]:
    """Send orders from the EU to a topic of their own, also; leave out test orders."""
    order = record.json
    if order.get("test"):
        return
    if order["country"] in {"DE", "FR", "PL"}:
        yield record.to("shop-orders.eu", key=order["country"], headers={"region": "eu"})
    yield record
