"""The dashboard of real workers on a real broker: under load, during a restore, asked for another worker's ID.

With DEDUP_TEST_SCREENSHOTS=docs/images the pictures of the docs are made anew from these runs, in light and dark.
"""

from __future__ import annotations

import json
import os
import re
import signal
import time
import urllib.request
from pathlib import Path

import pytest
from playwright.sync_api import Page, expect

from tests.integration.conftest import MakeJob
from tests.integration.fleet import Job, Worker, until
from tests.integration.workload import Event
from tests.web.conftest import Open

PICTURES = os.environ.get("DEDUP_TEST_SCREENSHOTS") or None
pytestmark = [pytest.mark.broker, *([pytest.mark.timeout(600)] if PICTURES else [])]
PAGES = {"web": {"enabled": True, "port": 0}}


def picture(page: Page, name: str) -> None:
    """The page as it is now is in docs/images, in both colour schemes, where pictures are asked for."""
    if PICTURES is None:
        return
    if name in {"dashboard-load", "dashboard-handover"}:
        page.evaluate("scrollTo(0, 0)")
    for scheme in ("light", "dark"):
        page.emulate_media(color_scheme=scheme)
        page.wait_for_timeout(1_500)  # the plots are drawn anew, and have had a sample
        page.screenshot(path=Path(PICTURES) / f"{name}-{scheme}.png")
    page.emulate_media(color_scheme="light")


def url_of(worker: Worker) -> str:
    worker.until_logged("web: http://")
    found = re.search(r"web: (http://\S+)", worker.log)
    assert found is not None
    return found[1]


def orders(begin: int, end: int, *, partitions: int, per_s: int) -> list[Event]:
    """Orders of the coming seconds: a fifth repeats a near one, a few of these with another payload, some are late or no orders."""
    made = []
    for number in range(begin, end):
        kind = number % 100
        order = number - 7 * partitions if kind % 5 == 4 and number > 7 * partitions else number
        payload = {"id": f"order-{order:06}", "amount": order % 97 + (kind in {44, 49, 54, 59})}
        value = b"no order" if number % 301 == 57 else json.dumps(payload).encode()
        late_ms = 7_200_000 if number % 333 == 332 else 0
        made.append((order % partitions, value, number * 1_000 // per_s - late_ms))
    now_ms = time.time_ns() // 1_000_000  # only now: making many orders takes seconds, which would count as latency
    return [Event(partition, value, now_ms + after_ms) for partition, value, after_ms in made]


def test_two_workers_under_load_and_an_id_of_the_other_one(make_job: MakeJob, open_page: Open) -> None:
    name = "orders" if PICTURES else None
    document = {"conflicts": "conflicts", "duplicates": "duplicates", "guard_period": "1h", "grace": "1h",
                "state": {"standby_replicas": 1, "max_bytes_per_partition": "64MiB"}}  # fmt: skip
    job = make_job(partitions=4, document=document, config=PAGES, **({"name": name} if name else {}))
    workers = [job.start("orders-1"), job.start("orders-2")]
    first, second = (url_of(worker) for worker in workers)
    page = open_page(first, viewport={"width": 1280, "height": 1330})
    other = page.locator("#tasks tbody tr", has_text="on another worker")
    expect(other).to_have_count(2)
    expect(page.locator("#tasks tbody tr", has_text="running")).to_have_count(2)
    expect(page.locator("#tasks tr.owner").get_by_role("link", name="orders-2")).to_have_attribute("href", second)

    load = orders(0, 150_000 if PICTURES else 4_000, partitions=4, per_s=1_000)
    with job.stream(load, per_s=1_000) as feeder:
        for kind, said in (("duplicates", "repeats"), ("conflicts", "conflict"), ("late records", "not known")):
            page.get_by_role("checkbox", name="dead letters").uncheck()
            for other_kind in {"duplicates", "conflicts", "late records"} - {kind}:
                page.get_by_role("checkbox", name=other_kind).uncheck()
            page.get_by_role("checkbox", name=kind).check()
            expect(page.locator("#latest tbody tr", has_text=said)).not_to_have_count(0)
        for every in ("dead letters", "duplicates", "conflicts"):
            page.get_by_role("checkbox", name=every).check()
        expect(page.locator("#latest tbody tr", has_text="dead letter")).not_to_have_count(0)
        expect(page.locator("#tasks tbody tr", has_text="warm copy")).to_have_count(2)
        if PICTURES:
            job.until_sent(130_000, within_s=240)
            page.get_by_text("5 min", exact=True).click()
            picture(page, "dashboard-load")
        feeder.join()
    job.until_done()
    # From any worker's page, the totals are those of all workers, whatever each of them has judged.
    expect(page.locator("#fleet-title")).to_have_text("Fleet: all 2 workers")
    expect(page.locator("#workers tbody tr", has_text="orders-2").get_by_role("link")).to_have_attribute("href", second)
    counted = [
        json.loads(urllib.request.urlopen(f"{url}/api/summary", timeout=10).read())["totals"] for url in (first, second)
    ]
    for name, kind in (("Conflicts", "conflict"), ("Late", "late"), ("Dead letters", "dead_letter")):
        assert all(each[kind] for each in counted), counted
        tile = page.locator("#tiles > div", has=page.get_by_text(name, exact=True)).locator("dd")
        expect(tile).to_have_text(f"{sum(each[kind] for each in counted):,}")

    theirs = int(other.first.locator("th").inner_text().rpartition("/")[2])
    known = next(json.loads(event.value)["id"] for event in load if event.partition == theirs)
    page.get_by_label("Tracking ID").fill(known)
    page.keyboard.press("Enter")
    answer = page.locator("#lookup-answer")
    expect(answer).to_contain_text(f"{known}: one sighting")
    expect(answer).to_contain_text(f"worker orders-2, partition {theirs}")
    expect(answer).to_contain_text("4 of 4 partitions were asked")
    expect(answer).to_contain_text(f"{job.output}/{theirs}")
    picture(page, "dashboard-lookup")
    told_the_same(job, first, known)

    shown = page.locator("#latest tbody tr", has_text="dead letter").first
    shown.get_by_role("button", name="Show the payload").press("Enter")
    expect(page.locator("#record-value")).to_have_text("no order")
    page.close()
    for worker in workers:
        assert worker.stop() == 0, worker.log


def test_a_hand_over_is_on_the_time_line_of_the_worker_that_is_left(make_job: MakeJob, open_page: Open) -> None:
    """One of two workers is stopped while records arrive; the other one's page shows what became of its partitions."""
    job = make_job(partitions=4, config=PAGES, **({"name": "orders-moved"} if PICTURES else {}))
    workers = [job.start("orders-1"), job.start("orders-2")]
    page = open_page(url_of(workers[0]), viewport={"width": 1280, "height": 1330})
    expect(page.locator("#tasks tbody tr", has_text="on another worker")).to_have_count(2)
    with job.stream(orders(0, 90_000 if PICTURES else 15_000, partitions=4, per_s=500), per_s=500) as feeder:
        expect(page.locator("#rates")).to_have_attribute("data-points", re.compile(r"^[1-9]"))
        expect(page.locator("#tiles .line[d^=M]")).to_have_count(8)
        for label, covered_s in (("5 min", "300"), ("1 h", "3600"), ("15 min", "900")):
            page.get_by_text(label, exact=True).click()
            expect(page.locator("#latency")).to_have_attribute("data-seconds", covered_s)
            expect(page.locator("#owners-title")).to_have_text(f"Hand-overs, last {label}")
            expect(page.locator("#tiles > div", has_text="Duplicates").locator("small")).to_have_text(f"last {label}")
        own = json.loads(urllib.request.urlopen(f"{url_of(workers[0])}/api/hour?here=1", timeout=10).read())
        assert own["worker"] == "orders-1"
        assert sum(sum(counts) for _, _, counts, *_ in own["slots"]) > 0
        running = [partition for _, partition, worker, state, _, to_ms in own["spans"] if to_ms is None
                   and (worker, state) == ("orders-1", "running")]  # fmt: skip
        assert len(running) == 2

        if PICTURES:
            job.until_sent(30_000, within_s=120)
        assert workers[1].stop() == 0, workers[1].log
        move = page.locator("#moves li", has_text="orders-2 → orders-1: 2 partitions").first
        expect(move).to_contain_text("ran")
        expect(page.locator("#owners .bar.assigned[title^=orders-2]")).not_to_have_count(0)
        expect(page.locator("#lost")).to_contain_text("Worker orders-2 is gone or does not answer")
        expect(page.locator("#tasks tbody tr", has_text="running")).to_have_count(4)
        if PICTURES:
            page.get_by_text("5 min", exact=True).click()
            job.until_sent(60_000, within_s=120)
            picture(page, "dashboard-handover")
        feeder.join()
    job.until_done()
    page.close()
    assert workers[0].stop() == 0, workers[0].log


def told_the_same(job: Job, url: str, known: str) -> None:
    """`dedup lookup` says what the page says."""
    from typer.testing import CliRunner  # noqa: PLC0415

    from dedup.cli.main import create_app  # noqa: PLC0415

    told = CliRunner().invoke(
        create_app(), ["lookup", str(job.topology_file), known, "--url", url, "--config", str(job.config_file)]
    )
    assert told.exit_code == 0, told.output
    assert f"in {job.topology.source.topics[0]}/" in told.output


def test_a_restore_is_shown_while_it_goes_on(make_job: MakeJob, open_page: Open) -> None:
    """The restore is held in its middle until it was looked at: what is seen does not depend on speed."""
    job = make_job(name="orders-restore" if PICTURES else None, partitions=2, config=PAGES)
    job.send([Event(n % 2, b'{"id":"r-%d"}' % n, 1_700_000_000_000 + n) for n in range(40_000)])
    job.finish("a")
    worker = job.start("b", "restore_held=6")
    page = open_page(url_of(worker), viewport={"width": 1280, "height": 1480})
    bar = page.get_by_role("progressbar").first
    expect(bar).to_be_visible(timeout=60_000)
    expect(bar).to_have_attribute("max", re.compile(r"^[1-9]\d{3,}$"))
    expect(page.locator("#tasks tbody tr", has_text="records left")).not_to_have_count(0)
    expect(page.locator("#notices")).to_contain_text("Not ready: 2 of 2 tasks are not running yet")
    expect(page.locator("#verdict")).to_have_text("1 issue")
    expect(page.locator("#owners .bar.restoring")).to_have_count(2)
    picture(page, "dashboard-restore")
    worker.signal(signal.SIGUSR1)
    until(lambda: worker.log.count("running from offset") == 2, job.logs, within_s=90)
    expect(page.locator("#tasks tbody tr", has_text="running")).to_have_count(2)
    expect(page.get_by_role("progressbar")).to_have_count(0)
    page.close()
    assert worker.stop() == 0, worker.log
