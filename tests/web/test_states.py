"""The dashboard under load, in a restore, with errors, and empty: on a phone, a tablet, a laptop, and a wide screen.

With DEDUP_TEST_SCREENSHOTS=docs/images, the pictures of these states in the docs are made anew.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from urllib.parse import quote

import pytest
from playwright.sync_api import Locator, Page, expect

from dedup.metrics import DeadLetterAlert, TaskNumbers
from dedup.web.last_hour import HOUR_MS
from dedup.worker_view import Noted, Peer
from tests.web.conftest import Open, Serve
from tests.web.staged import NOW_MS, Staged, restoring, running
from tests.web.states import STATES, hour, state

PICTURES = os.environ.get("DEDUP_TEST_SCREENSHOTS") or None
HEIGHTS = {390: 844, 768: 1024, 1280: 900, 2560: 1440}
NARROW = (390, 768)
"""The widths at which rows of tables are cards."""
MOST_HEIGHT = 3_000
SHOWN = {("error", 1280): "dashboard-error", ("empty", 1280): "dashboard-empty", ("load", 390): "dashboard-phone"}
"""The pictures that the docs show."""


@pytest.fixture
def state_url(servers: ExitStack) -> Callable[[str], str]:
    return lambda name: servers.enter_context(state(name))


@pytest.mark.parametrize("width", HEIGHTS)
@pytest.mark.parametrize("name", STATES)
def test_a_state_fits_every_screen(open_page: Open, state_url, name: str, width: int) -> None:
    page = open_page(state_url(name), viewport={"width": width, "height": HEIGHTS[width]})
    expect(page.locator("#rates canvas")).to_be_visible()
    expect(page.locator("#tasks tbody tr")).not_to_have_count(0)
    fits(page)
    for scheme in ("light", "dark") if PICTURES and (name, width) in SHOWN else ():
        page.emulate_media(color_scheme=scheme)
        page.wait_for_timeout(1_500)  # the plots are drawn anew, and have had a sample
        # The picture of many issues ends with the list of workers.
        fleet = page.locator("section", has=page.locator("#fleet-title")).bounding_box()
        assert fleet is not None
        clip = {"x": 0, "y": 0, "width": width, "height": HEIGHTS[width]}
        if name == "error":
            clip["height"] = fleet["y"] + fleet["height"]
        page.screenshot(path=Path(PICTURES) / f"{SHOWN[name, width]}-{scheme}.png", clip=clip)


@pytest.mark.parametrize("width", HEIGHTS)
def test_ten_thousand_cases_fit_every_screen(open_page: Open, serve: Serve, width: int) -> None:
    kinds = ("duplicate", "late", "conflict", "dead_letter")
    why = "bad_json: no JSON value: expected value at line 1 column 1"
    cases = tuple(Noted(kinds[n % 4], f"orders/0/{n}", f"id-{n}", NOW_MS, NOW_MS + n, why) for n in range(10_000))
    tasks = tuple(replace(running(n), numbers=TaskNumbers(last_commit_s=-1e9)) for n in range(256))
    page = open_page(serve(Staged(noted=cases, tasks=tasks)), viewport={"width": width, "height": HEIGHTS[width]})
    expect(page.locator("#latest tbody tr")).to_have_count(3 if width in NARROW else 10)
    expect(page.locator("#notices li")).to_have_count(5 if width in NARROW else 9)
    fits(page)


@pytest.mark.parametrize("width", HEIGHTS)
def test_a_fleet_of_nine_workers_fits_every_screen(open_page: Open, serve: Serve, width: int) -> None:
    """Each of them has every ninth of 256 partitions, so no line of the time line has a short name."""
    held = {f"w{first}": tuple(("orders", number) for number in range(first, 256, 9)) for first in range(9)}
    tasks = {name: tuple(running(number) for _, number in places) for name, places in held.items()}
    urls = {name: serve(Staged(name=name, tasks=tasks[name])) for name in held if name not in {"w0", "w8"}}
    others = tuple(Peer(name, urls.get(name), held[name], here=False) for name in held if name != "w0")
    page = open_page(
        serve(Staged(tasks["w0"], name="w0", others=others)), viewport={"width": width, "height": HEIGHTS[width]}
    )
    expect(page.locator("#workers tbody tr")).to_have_count(9)
    expect(page.locator("#owners .lane")).to_have_count(9 + 1)
    fits(page)
    expect(led(page, "These workers serve no pages")).to_contain_text("no answer: it serves no pages")
    for partition in (9, 255):
        row = page.locator("#tasks tbody tr", has_text=f"orders/{partition}").last
        row.scroll_into_view_if_needed()
        expect(row).to_be_in_viewport()


@pytest.mark.parametrize("width", NARROW)
def test_on_a_narrow_screen_all_targets_are_large_enough_to_touch(open_page: Open, state_url, width: int) -> None:
    page = open_page(state_url("error"), viewport={"width": width, "height": HEIGHTS[width]})
    expect(page.locator("#rates canvas")).to_be_visible()
    expect(page.locator("#latest tbody tr")).not_to_have_count(0)
    assert page.evaluate(SMALL_TARGETS) == []


@pytest.mark.parametrize(("width", "shown"), [(390, 4), (1280, 8)])
def test_on_a_narrow_screen_earlier_hand_overs_are_folded(
    open_page: Open, serve: Serve, width: int, shown: int
) -> None:
    def swapped(number: int, ago_ms: int) -> tuple[str, str]:
        return f"orders-{(number + ago_ms // 180_000) % 2 + 1}", "running"

    memory = hour("orders-1", swapped, range(2), per_s=100, lag=1, state=1 << 20, since_ms=HOUR_MS)
    page = open_page(serve(Staged(name="orders-1", memory=memory)), viewport={"width": width, "height": 844})
    page.get_by_text("1 h", exact=True).click()
    expect(page.locator("#moves li")).to_have_count(shown)
    expect(page.locator("#earlier")).to_be_visible(visible=shown < 8)
    if shown < 8:
        page.get_by_text(f"{8 - shown} earlier").click()
        last = page.locator("#earlier li").last
        expect(last).to_be_visible()
        expect(last).to_contain_text("1 partition")


@pytest.mark.parametrize("width", HEIGHTS)
def test_long_names_and_large_numbers_fit_every_screen(open_page: Open, serve: Serve, width: int) -> None:
    topic, name = (
        "com.example.warehouse.shipments.orders-with-a-long-name-v2",
        "dedup-orders-5f7c9d8b6c-x2x9q-of-a-namespace",
    )
    large = {"lag_records": 10**11, "state_ids": 10**10, "state_bytes": 10**15, "state_max_bytes": 10**16}
    tasks = tuple(replace(running(n, unique=10**12), topic=topic, **large) for n in range(12))
    own = Staged(tasks, (Noted("late", f"{topic}/0/{10**12}", "id" * 40, NOW_MS, NOW_MS, "too late"),), name=name,
                 others=(Peer(f"{name}-2", None, ((topic, 13),), here=False),), standby_lag={})  # fmt: skip
    page = open_page(serve(own), viewport={"width": width, "height": HEIGHTS[width]})
    expect(page.locator("#owners .bar")).not_to_have_count(0)
    expect(page.locator("#tiles > div", has_text="Lag").locator("dd")).to_have_text("1.2T")
    fits(page)


def fits(page: Page) -> None:
    """The page is not too long, nothing scrolls sideways or is cut off, no line of text is longer than can be read."""
    assert page.evaluate("document.documentElement.scrollHeight") <= MOST_HEIGHT
    assert page.evaluate("document.documentElement.scrollWidth") <= page.evaluate("window.innerWidth")
    assert page.evaluate(CUT) == []
    assert page.evaluate(LONG_LINES) == []


# Boxes that hide what does not fit, apart from bars of the time line, which the key names, too.
CUT = """() => [...document.querySelectorAll("#content *, header, header *")]
  .filter((node) => node.checkVisibility() && node.clientWidth && getComputedStyle(node).display !== "inline")
  .filter((node) => !node.closest(".u-wrap") && !node.matches(".bar, .track, #range, #range *, svg, svg *, progress, meter"))
  .filter((node) => node.scrollWidth > node.clientWidth + 1)
  .map((node) => [node.tagName, node.id, node.className, node.textContent.slice(0, 40)])"""
# A sentence is read in lines of at most 130 characters or so; what stands in a column of a table is not a sentence.
LONG_LINES = """() => [...document.querySelectorAll("#content p, #content li")]
  .filter((node) => node.checkVisibility() && !node.matches(".none, #owners-key"))
  .filter((node) => node.clientWidth > 65 * parseFloat(getComputedStyle(node).fontSize) && node.textContent.length > 130)
  .map((node) => [node.clientWidth, node.textContent.slice(0, 40)])"""

# WCAG 2.2 asks for 24 pixels. A link in a sentence is as large as all of its lines.
SMALL_TARGETS = """() => [...document.querySelectorAll("a, button, select, summary, label:has(input), input[type=text], .u-legend th")]
  .filter((node) => node.checkVisibility() && !node.matches(".skip"))
  .map((node) => [node.tagName, node.textContent.slice(0, 40), node.getBoundingClientRect()])
  .filter(([, , box]) => box.width && Math.min(box.width, box.height) < 24)
  .map(([tag, text, box]) => [tag, text, box.width, box.height])"""


def led(page: Page, text: str) -> Locator:
    """Follow the issue with this text; returns what the page then marks, which can be seen."""
    page.locator("#attention").get_by_role("link", name=text).press("Enter")
    marked = page.locator(".led")
    expect(marked).to_have_count(1)
    expect(marked).to_be_in_viewport()
    expect(marked).to_be_focused()
    return marked


def numbers(**changes) -> TaskNumbers:
    return replace(TaskNumbers(), **changes)


@pytest.mark.parametrize("width", [390, 1280])
def test_every_issue_is_a_link_to_its_cause(open_page: Open, serve: Serve, width: int) -> None:
    other = Staged(name="b", tasks=(running(9),), user_code={"ids": "2b"}, why="there is no assignment yet")
    theirs = serve(other)
    stuck = replace(running(1), numbers=numbers(last_commit_s=-1e9, formats=Counter(avro=3)))
    own = Staged(
        tasks=(running(0), stuck, replace(running(2), state_bytes=19_000_000), running(3)),
        noted=(
            Noted("dead_letter", "orders/0/7", None, None, NOW_MS, "not_json: no JSON"),
            Noted("duplicate", "orders/0/8", "a", NOW_MS, NOW_MS, "repeats orders/0/0"),
        ),
        others=(
            Peer("b", theirs, (("orders", 9),), here=False),
            Peer("c", "http://127.0.0.1:9", (), here=False),
            Peer("d", None, (), here=False),
        ),
        user_code={"ids": "1a"},
        why="records wait for schema 17: the registry does not answer",
        alert=DeadLetterAlert(200, 199, "not_json", 199),
    )
    page = open_page(serve(own), viewport={"width": width, "height": 800})
    expect(page.locator("#verdict")).to_have_text("9 issues")
    page.locator("#attention").get_by_role("link", name="5 more" if width in NARROW else "1 more").press("Enter")
    items = page.locator("#attention li")
    expect(items).to_have_count(10)
    assert all(items.nth(at).get_by_role("link").count() == 1 for at in range(10))

    expect(led(page, "199 of 200 records")).to_contain_text("Latest dead letters")
    expect(page.locator("#latest tbody tr")).to_have_count(1)
    expect(page.locator("#latest tbody tr")).to_contain_text("not_json: no JSON")
    expect(led(page, "Dead letters in another format")).to_contain_text("Latest dead letters")
    expect(led(page, "orders/1 is stuck")).to_contain_text("orders/1")
    expect(led(page, "The state of orders/2")).to_contain_text("95% of")
    expect(led(page, "Not ready: records wait for schema 17").first).to_contain_text("schema 17")
    expect(led(page, "These workers serve no pages")).to_contain_text("no answer: it serves no pages")
    expect(led(page, "No figures from worker c")).to_contain_text("no answer: unreachable")
    expect(led(page, "different copies of ids")).to_contain_text("copy of ids: 2b")
    link = page.locator("#attention").get_by_role("link", name="b: Not ready: there is no assignment")
    expect(link).to_have_attribute("href", f"{theirs}/#not-ready")


def test_a_restore_is_linked_to_the_task_that_has_most_left(open_page: Open, serve: Serve) -> None:
    tasks = (restoring(0, remaining=10), *(restoring(at, remaining=900) for at in (1,)), running(2))
    page = open_page(serve(Staged(tasks=tasks, why="2 of 3 tasks are not running yet")))
    expect(led(page, "Not ready: 2 of 3 tasks")).to_contain_text("900 records left")


def test_a_worker_without_tasks_says_why(open_page: Open, serve: Serve) -> None:
    page = open_page(serve(Staged(tasks=(), standby_lag={}, why="there is no assignment yet")))
    expect(page.locator("#tasks-none")).to_have_text("No tasks yet.")
    expect(led(page, "Not ready")).to_have_text("This worker is not ready: there is no assignment yet.")


def test_more_issues_are_listed_on_request_and_those_left_out_lead_to_the_tasks(open_page: Open, serve: Serve) -> None:
    tasks = tuple(replace(running(at), numbers=numbers(last_commit_s=-1e9)) for at in range(150))
    page = open_page(serve(Staged(tasks=tasks)))
    rest = page.locator("#rest")
    expect(rest).to_be_hidden()
    page.locator("#notices").get_by_role("link", name="142 more").press("Enter")
    expect(rest.locator("li")).to_have_count(93)
    expect(led(page, "orders/99 is stuck")).to_contain_text("orders/99")
    expect(led(page, "50 more; the list of tasks")).to_have_text("Tasks")


def test_a_link_from_another_workers_page_leads_to_the_task(open_page: Open, serve: Serve) -> None:
    url = serve(Staged(tasks=tuple(running(at) for at in range(60))))
    page = open_page(url)
    page.goto(f"{url}/#{quote('task:orders/47', safe='')}")
    page.reload()
    expect(page.locator(".led")).to_contain_text("orders/47")
    expect(page.locator(".led")).to_be_in_viewport()


def test_a_focused_link_stays_while_its_text_changes(open_page: Open, serve: Serve) -> None:
    stuck = replace(running(0), numbers=numbers(last_commit_s=-1e9))
    page = open_page(serve(Staged(tasks=(stuck,))))
    link = page.locator("#notices").get_by_role("link", name="orders/0 is stuck")
    link.focus()
    before = link.inner_text()
    expect(link).not_to_have_text(before)
    expect(link).to_be_focused()


def test_each_figure_names_its_time(open_page: Open, state_url) -> None:
    page = open_page(state_url("load"))
    expect(page.locator("#tiles small")).to_have_text(["now", *["last 15 min"] * 2, *["now"] * 2, *["since start"] * 3])
    expect(page.locator("#workers thead small")).to_have_text(["now", "since start", "now", "last commits", "now"])
    page.get_by_text("1 h", exact=True).click()
    expect(page.locator("#tiles small").nth(1)).to_have_text("last 1 h")
    expect(page.locator("#plots-title")).to_contain_text("last 1 h")
    expect(page.locator("#owners-title")).to_have_text("Hand-overs, last 1 h")
    # In the last 15 minutes, no task was restored, so the key does not name this state; in the last hour, one was.
    expect(page.locator("#owners-key .restoring")).to_have_count(1)
    page.get_by_text("15 min", exact=True).click()
    expect(page.locator("#owners-key .restoring")).to_have_count(0)
