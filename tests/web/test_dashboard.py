"""The dashboard in a real browser: what it shows, to whom, and that nothing in it is markup but ours."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import replace

import pytest
from playwright.sync_api import Page, expect

from dedup.metrics import TaskNumbers
from dedup.settings import Secret
from dedup.worker_view import Noted, Peer, SeenId
from tests.web.conftest import Open, Serve
from tests.web.staged import NOW_MS, Staged, restoring, running, serving

MARKUP = "<img src=x onerror=alert(1)><script>alert(2)</script>"
TOKEN = "canary-token-77ab"


def noted(
    kind: str = "duplicate", offset: int = 1, *, known: str | None = "a", why: str = "repeats orders/0/0"
) -> Noted:
    return Noted(kind, f"orders/0/{offset}", known, NOW_MS, NOW_MS + offset, why)


def seen(**changes) -> SeenId:
    return replace(SeenId(0, NOW_MS, NOW_MS, NOW_MS + 86_400_000, "orders/0/5", live=True, went="unique/0"), **changes)


def row(page: Page, name: str):
    return page.locator("#tasks tbody tr", has=page.locator("th", has_text=re.compile(f"^{name}$")))


def test_tasks_are_told_with_owner_state_progress_and_bound(open_page: Open, serve: Serve) -> None:
    peers = (
        Peer("a", "http://127.0.0.1:1", (("orders", 0), ("orders", 1)), here=True),
        Peer("b", "http://127.0.0.1:2", (("orders", 2),), here=False),
    )
    url = serve(Staged(others=peers))
    page = open_page(url)
    expect(row(page, "orders/0")).to_contain_text("running")
    expect(row(page, "orders/0")).to_contain_text("25% of 19.1 MiB")
    expect(row(page, "orders/0").locator("meter")).to_have_attribute("max", "20000000")
    expect(row(page, "orders/1")).to_contain_text("restoring")
    expect(row(page, "orders/1")).to_contain_text("75%, 250 records left")
    expect(row(page, "orders/1").get_by_role("progressbar")).to_have_attribute("value", "750")
    expect(row(page, "orders/2")).to_contain_text("on another worker")
    owners = page.locator("#tasks tbody tr.owner")
    expect(owners).to_have_text(["a 2 tasks", "b 1 task"])
    expect(owners.get_by_role("link", name="b")).to_have_attribute("href", "http://127.0.0.1:2")
    expect(row(page, "changelog/2")).to_contain_text("warm copy")


def test_what_changes_is_shown_without_a_reload(open_page: Open, serve: Serve) -> None:
    worker = Staged()
    url = serve(worker)
    page = open_page(url)
    expect(row(page, "orders/1").get_by_role("progressbar")).to_have_attribute("value", "750")
    worker.tasks = (worker.tasks[0], restoring(remaining=100))
    expect(row(page, "orders/1").get_by_role("progressbar")).to_have_attribute("value", "900")
    worker.tasks = (worker.tasks[0], running(1))
    expect(row(page, "orders/1")).to_contain_text("running")
    expect(row(page, "orders/1").get_by_role("progressbar")).to_have_count(0)
    worker.tasks = (worker.tasks[0],)
    expect(row(page, "orders/1")).to_have_count(0)


def test_the_plots_are_drawn_and_say_what_they_show(open_page: Open, serve: Serve) -> None:
    worker = Staged()
    url = serve(worker)
    page = open_page(url)
    for name in ("rates", "lag", "latency"):
        expect(page.locator(f"#{name} canvas")).to_be_visible()
    expect(page.locator("#lag .u-series", has_text="records").locator(".u-value")).to_have_text("7")
    expect(page.locator("#lag")).to_have_attribute("aria-label", re.compile(r"Now: records 7\."))
    first = page.locator("#tiles dd").first
    worker.grows = 10_000
    expect(first).not_to_have_text("0")


def test_an_id_that_is_markup_is_text_everywhere(open_page: Open, serve: Serve) -> None:
    worker = Staged(
        noted=(noted(known=MARKUP, why=MARKUP),),
        sightings={MARKUP: seen(source=MARKUP, went=MARKUP)},
        others=(Peer(MARKUP, "javascript:alert(3)", ((MARKUP, 1),), here=False),),
        why=MARKUP,
        payload=MARKUP.encode(),
    )
    url = serve(worker)
    page = open_page(url)
    page.get_by_role("button", name=MARKUP, exact=True).press("Enter")
    expect(page.locator("#lookup-answer")).to_contain_text(f"{MARKUP}: one sighting")
    page.get_by_role("button", name="Show the payload of orders/0/1").press("Enter")
    expect(page.locator("#record-value")).to_have_text(MARKUP)
    expect(page.locator("#notices")).to_contain_text(MARKUP)
    expect(page.locator("#tasks")).to_contain_text(MARKUP)
    assert page.locator("img, #content script, a[href^='javascript']").count() == 0


def test_an_id_is_looked_up_by_keyboard(open_page: Open, serve: Serve) -> None:
    worker = Staged(sightings={"order/7 é": seen()}, tasks=(running(0), running(1), running(2)))
    url = serve(worker)
    page = open_page(url, expected=("400",))
    page.get_by_label("Tracking ID").fill("order/7 é")
    page.keyboard.press("Enter")
    answer = page.locator("#lookup-answer")
    expect(answer).to_contain_text("order/7 é: one sighting")
    for text in ("2023-11-14T22:13:20Z", "2023-11-15T22:13:20Z of event time", "orders/0/5", "unique/0", "worker a"):
        expect(answer).to_contain_text(text)
    expect(answer).to_contain_text("3 of 3 partitions were asked")
    page.get_by_label("Tracking ID").fill("nobody")
    page.keyboard.press("Enter")
    expect(answer).to_contain_text("not known: never seen, or its sighting has expired")
    page.get_by_label("Tracking ID").fill("odd")
    page.keyboard.press("Enter")
    expect(answer).to_contain_text("'odd' cannot be an ID of 'orders'")


def test_any_worker_answers_by_asking_the_owner(open_page: Open, serve: Serve) -> None:
    token = Secret(TOKEN)
    owner = Staged(name="b", tasks=(running(1), running(2)), sightings={"x": seen(partition=1, source="orders/1/9")})
    theirs = serve(owner, token=token)
    there = Peer("b", theirs, (("orders", 1), ("orders", 2)), here=False)
    asked = Staged(tasks=(running(0),), others=(there,))
    url = serve(asked, token=token)
    page = open_page(url, expected=("401",))
    page.get_by_label("This worker requires its token").fill(TOKEN)
    page.keyboard.press("Enter")
    page.get_by_label("Tracking ID").fill("x")
    page.keyboard.press("Enter")
    expect(page.locator("#lookup-answer")).to_contain_text("worker b, partition 1")
    expect(page.locator("#lookup-answer")).to_contain_text("3 of 3 partitions were asked")


def test_the_totals_are_those_of_all_workers_that_answer(open_page: Open, serve: Serve) -> None:
    token = Secret(TOKEN)
    theirs = serve(
        Staged(name="b", tasks=(running(1, unique=100, duplicate=100, dead_letter=5),), grows=1_000), token=token
    )
    other = serve(Staged(topology="payments"), token=token)
    peers = (
        Peer("a", "http://127.0.0.1:1", (("orders", 0),), here=True),
        Peer("b", theirs, (("orders", 1),), here=False),
        Peer("c", other, (("orders", 2),), here=False),
        Peer("d", None, (("orders", 3),), here=False),
        Peer("e", theirs, (("orders", 4),), here=False),
    )
    own = Staged(tasks=(running(0, unique=90, duplicate=10, late=2),), others=peers)
    url = serve(own, token=token)
    page = open_page(url, expected=("401",))
    page.get_by_label("This worker requires its token").fill(TOKEN)
    page.keyboard.press("Enter")
    expect(page.locator("#fleet-title")).to_have_text("Fleet: 2 of 5 workers")
    workers = page.locator("#workers tbody tr")
    expect(workers).to_have_count(5)
    expect(workers.nth(0)).to_contain_text("ready (this page)")
    expect(workers.nth(1).get_by_role("link", name="b")).to_have_attribute("href", theirs)
    expect(workers.nth(2)).to_contain_text("no answer: it is a worker of another topology or release")
    expect(workers.nth(3)).to_contain_text("no answer: it serves no pages")
    expect(workers.nth(4)).to_contain_text("no answer: worker b answers at this address; set web.advertise")

    def tile(name: str):
        return page.locator("#tiles > div", has=page.get_by_text(name, exact=True)).locator("dd")

    expect(tile("Dead letters")).to_have_text("5")
    expect(tile("Late")).to_have_text("2")
    expect(tile("Lag")).to_have_text("14")
    expect(tile("State")).to_have_text("9.54 MiB")
    expect(tile("Records/s")).not_to_have_text("0")


def test_the_issues_are_those_of_all_workers_and_link_to_their_pages(open_page: Open, serve: Serve) -> None:
    theirs = serve(
        Staged(
            name="b",
            tasks=(replace(running(1), numbers=TaskNumbers(last_commit_s=-1e9), lag_records=5),),
            why="1 of 1 tasks is not running",
        )
    )
    gone = Peer("c", "http://127.0.0.1:9", (("orders", 2),), here=False)
    worker = Staged(tasks=(running(0),), others=(Peer("b", theirs, (("orders", 1),), here=False), gone))
    page = open_page(serve(worker))
    expect(page.locator("#verdict")).to_have_text("3 issues")
    issues = page.locator("#notices li")
    expect(issues).to_contain_text(
        [
            "b: orders/1 is stuck: 5 records wait",
            "b: Not ready: 1 of 1 tasks is not running.",
            "No figures from worker c: ",
        ]
    )
    expect(issues.nth(1).get_by_role("link")).to_have_attribute("href", f"{theirs}/#not-ready")
    expect(issues.nth(2).get_by_role("link")).to_have_attribute("href", "#worker%3Ac")


def test_the_plots_are_those_of_all_workers_or_of_the_chosen_one(open_page: Open, serve: Serve) -> None:
    theirs = serve(Staged(name="b", tasks=(replace(running(1), lag_records=100),)))
    own = Staged(tasks=(replace(running(0), lag_records=1),), others=(Peer("b", theirs, (("orders", 1),), here=False),))
    page = open_page(serve(own))
    records = page.locator("#lag .u-series", has_text="records").locator(".u-value")
    expect(records).to_have_text("101")
    page.get_by_role("combobox", name="of").select_option("b")
    expect(records).to_have_text("100")
    expect(page.locator("#owners .bar")).to_have_count(2)


def test_a_worker_that_is_gone_leaves_its_partitions_on_the_time_line(open_page: Open, serve: Serve) -> None:
    other = Staged(name="b", tasks=(running(1),))
    own = Staged(tasks=(running(0),))
    url = serve(own)
    with serving(other) as theirs:
        there = Peer("b", theirs, (("orders", 1),), here=False)
        own.others = (there,)
        page = open_page(url)
        expect(page.locator("#owners .bar.running")).to_have_count(2)
        expect(page.locator("#owners-hint")).to_contain_text("No partition has changed its owner")
        # The bars come from b. What a shows once b is gone, it has to have seen itself; it looks once a second.
        page.evaluate("async () => { while ((await (await fetch('/api/hour?here=1')).json()).spans.length < 2); }")
    own.others, own.tasks = (), (running(0), running(1))
    expect(page.locator("#moves li")).to_contain_text("b → a: 1 partition (orders/1), ran at once")
    expect(page.locator("#owners .bar.assigned")).to_have_attribute("title", re.compile("^b: assigned"))


def test_a_worker_alone_has_no_table_of_workers(open_page: Open, serve: Serve) -> None:
    page = open_page(serve(Staged()))
    expect(page.locator("#fleet-title")).to_have_text("This worker")
    expect(page.locator("#workers-box")).to_be_hidden()


def test_an_owner_that_does_not_answer_is_told(open_page: Open, serve: Serve) -> None:
    gone = Peer("b", "http://127.0.0.1:9", (("orders", 1),), here=False)
    mute = Peer("c", None, (("orders", 2),), here=False)
    url = serve(Staged(tasks=(running(0),), others=(gone, mute)))
    page = open_page(url)
    page.get_by_label("Tracking ID").fill("x")
    page.keyboard.press("Enter")
    answer = page.locator("#lookup-answer")
    expect(answer).to_contain_text("not known to the workers that answered")
    expect(answer).to_contain_text("Partition 1 not asked: worker b: unreachable")
    expect(answer).to_contain_text("Partition 2 not asked: worker c: it serves no pages")
    expect(page.locator("#notices")).to_contain_text(
        "These workers serve no pages, so they cannot be asked about an ID: c"
    )


def test_a_token_is_asked_for_and_no_data_is_shown_before(open_page: Open, serve: Serve) -> None:
    url = serve(Staged(), token=Secret(TOKEN))
    page = open_page(url, expected=("401",))
    box = page.get_by_label("This worker requires its token")
    box.fill("wrong")
    page.keyboard.press("Enter")
    expect(page.get_by_role("alert")).to_have_text("This is not the worker's token.")
    expect(page.locator("#tasks")).to_be_hidden()
    assert "orders" not in page.content()
    box.fill(TOKEN)
    page.keyboard.press("Enter")
    expect(row(page, "orders/0")).to_contain_text("running")
    assert TOKEN not in page.content()
    assert TOKEN not in page.url


def test_a_token_that_no_browser_can_send_is_refused_and_asked_for_again(open_page: Open, serve: Serve) -> None:
    """Was: "No answer from this worker; retrying", without the form, until the tab was closed."""
    page = open_page(serve(Staged(), token=Secret(TOKEN)), expected=("401",))
    box = page.get_by_label("This worker requires its token")
    box.fill(f"{TOKEN}\u200b")
    page.keyboard.press("Enter")
    expect(page.get_by_role("alert")).to_contain_text("not ASCII and may be invisible")
    box.fill(TOKEN)
    page.keyboard.press("Enter")
    expect(row(page, "orders/0")).to_contain_text("running")
    expect(box).to_be_hidden()


def test_a_page_whose_token_is_no_longer_accepted_says_since_when(open_page: Open, serve: Serve) -> None:
    """Was: the old figures under a clock that stood still and a green "No issues"."""
    page = open_page(serve(Staged(tasks=(running(0),)), token=Secret(TOKEN)), expected=("401",))
    box = page.get_by_label("This worker requires its token")
    box.fill(TOKEN)
    page.keyboard.press("Enter")
    verdict = page.locator("#verdict")
    expect(verdict).to_have_text("No issues")
    page.route("**/api/**", lambda route: route.fulfill(status=401))
    expect(verdict).to_contain_text("The token is no longer accepted; no figures since")
    expect(page.locator("#attention")).to_have_class("error")
    expect(page.locator("#connection")).to_have_class("lost")
    page.unroute("**/api/**")
    box.fill(TOKEN)
    page.keyboard.press("Enter")
    expect(verdict).to_have_text("No issues")


def test_an_id_that_browsers_remove_from_a_path_and_one_that_is_too_long_are_answered(
    open_page: Open, serve: Serve
) -> None:
    """Was: "The worker does not answer." """
    page = open_page(serve(Staged()))
    answer = page.locator("#lookup-answer")
    for text in (".", ".."):
        page.get_by_label("Tracking ID").fill(text)
        page.keyboard.press("Enter")
        expect(answer).to_contain_text(f"{text}: not known")
    page.get_by_label("Tracking ID").fill("\u20ac" * 65_536)
    page.keyboard.press("Enter")
    expect(answer).to_contain_text("This ID has 196,608 bytes, and one of at most 65,536 can be looked up.")


def test_payloads_are_shown_only_when_asked_for(open_page: Open, serve: Serve) -> None:
    url = serve(Staged(noted=(noted("conflict"),), payload=b"secret-payload"))
    page = open_page(url)
    ask = page.get_by_role("button", name="Show the payload of orders/0/1")
    expect(ask).to_be_visible()
    assert "secret-payload" not in page.content()
    ask.focus()
    page.keyboard.press("Enter")
    expect(page.get_by_role("dialog")).to_contain_text("secret-payload")
    page.keyboard.press("Escape")
    expect(page.get_by_role("dialog")).to_be_hidden()
    expect(ask).to_be_focused()


def test_kinds_are_chosen_and_a_focused_row_stays(open_page: Open, serve: Serve) -> None:
    worker = Staged(noted=(noted("late", 1), noted("duplicate", 2)))
    url = serve(worker)
    page = open_page(url)
    rows = page.locator("#latest tbody tr")
    expect(rows).to_have_count(2)
    page.get_by_role("checkbox", name="duplicates").uncheck()
    expect(rows).to_have_count(1)
    ask = page.get_by_role("button", name="Show the payload of orders/0/1")
    ask.focus()
    worker.noted = (*worker.noted, noted("late", 3))
    expect(rows).to_have_count(2)
    expect(rows.first).to_contain_text("orders/0/3")
    expect(ask).to_be_focused()


def test_what_wants_attention_stands_first(open_page: Open, serve: Serve) -> None:
    full = replace(running(0), state_bytes=19_000_000)
    worker = Staged(tasks=(full,), why="1 of 2 tasks are not running yet")
    url = serve(worker)
    page = open_page(url)
    expect(page.locator("#verdict")).to_have_text("2 issues")
    expect(page.locator("#notices")).to_contain_text("95% of state.max_bytes_per_partition")
    worker.why, worker.tasks = None, (running(0),)
    expect(page.locator("#verdict")).to_have_text("No issues")


def test_a_worker_that_is_gone_is_said(open_page: Open) -> None:
    with serving(Staged()) as url:
        page = open_page(url, expected=("ERR_CONNECTION_REFUSED", "Failed to load resource", "ERR_EMPTY_RESPONSE"))
        expect(row(page, "orders/0")).to_contain_text("running")
    expect(page.locator("#verdict")).to_contain_text("No answer from this worker since")


def test_it_can_be_paused(open_page: Open, serve: Serve) -> None:
    url = serve(Staged())
    page = open_page(url)
    button = page.get_by_role("button", name="Pause")
    expect(row(page, "orders/0")).to_be_visible()
    button.press("Enter")
    expect(button).to_have_attribute("aria-pressed", "true")
    expect(page.locator("#connection")).to_have_text("paused")


def test_ten_thousand_cases_and_256_tasks_fit_on_a_short_page(open_page: Open, serve: Serve) -> None:
    kinds = ("duplicate", "late", "conflict", "dead_letter")
    cases = tuple(noted(kinds[number % 4], number) for number in range(10_000))
    stuck = tuple(replace(running(partition), numbers=TaskNumbers(last_commit_s=-1e9)) for partition in range(256))
    url = serve(Staged(noted=cases, tasks=stuck))
    page = open_page(url)
    rows = page.locator("#latest tbody tr")
    expect(rows).to_have_count(10)
    expect(page.locator("#tasks tbody tr")).to_have_count(257)
    expect(page.locator("#notices li")).to_have_count(9)
    expect(page.locator("#notices li").last).to_contain_text("248 more")
    expect(page.locator("#verdict")).to_have_text("256 issues")
    # All partitions had the same owner, so one line is enough.
    expect(page.locator("#owners .bar")).to_have_count(1)
    expect(page.locator("#owners .lane-name").first).to_have_text("orders/0-255 (256)")
    assert page.evaluate("document.documentElement.scrollHeight") <= 3_000
    # The newest dead letters stand first, and the list is paged.
    expect(rows.first).to_contain_text("orders/0/9999")
    expect(page.locator("#latest-range")).to_have_text("1 to 10 of 400")
    page.get_by_role("button", name="Next").press("Enter")
    expect(page.locator("#latest-range")).to_have_text("11 to 20 of 400")
    expect(rows.first).to_contain_text("orders/0/9959")
    page.get_by_role("checkbox", name="dead letters").uncheck()
    expect(page.locator("#latest-range")).to_have_text("1 to 10 of 300")
    expect(rows.first).to_contain_text("conflict")


def test_an_issue_leads_to_its_cause(open_page: Open, serve: Serve) -> None:
    others = tuple(running(partition) for partition in range(1, 40))
    full = replace(running(40), state_bytes=19_000_000)
    odd = replace(running(0), numbers=TaskNumbers(formats=Counter(avro=3)))
    url = serve(Staged(tasks=(odd, *others, full), noted=(noted("dead_letter", 7), noted("duplicate", 8))))
    page = open_page(url)
    last = row(page, "orders/40")
    expect(last).not_to_be_in_viewport()
    page.locator("#notices").get_by_role("link", name="The state of orders/40").press("Enter")
    expect(last).to_be_in_viewport()
    page.locator("#notices").get_by_role("link", name="Dead letters in another format").press("Enter")
    rows = page.locator("#latest tbody tr")
    expect(rows).to_have_count(1)
    expect(rows).to_contain_text("orders/0/7")
    expect(rows).to_be_in_viewport()
    expect(page.get_by_role("checkbox", name="duplicates")).not_to_be_checked()


def test_on_a_phone_rows_are_cards_and_no_table_scrolls_sideways(open_page: Open, serve: Serve) -> None:
    url = serve(Staged(noted=(noted(known="a-very-long-tracking-id-" * 8),)))
    page = open_page(url, viewport={"width": 390, "height": 800})
    expect(page.locator("#latest tbody tr")).to_have_count(1)
    wide = page.evaluate(
        "[...document.querySelectorAll('.scroll')].filter((box) => box.scrollWidth > box.clientWidth).length"
    )
    assert wide == 0
    labels = page.evaluate(
        "[...document.querySelectorAll('#tasks tbody tr:first-child td')].map((cell) => cell.dataset.label)"
    )
    assert labels == ["Task", "State", "Lag", "IDs", "State size"]


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [2560, 1280, 390])
def test_text_can_be_read_and_nothing_sticks_out(open_page: Open, serve: Serve, scheme: str, width: int) -> None:
    url = serve(Staged(noted=(noted(), noted("dead_letter", 2, known=None, why="bad_json: no JSON"))))
    page = open_page(url, color_scheme=scheme, viewport={"width": width, "height": 800})
    expect(page.locator("#latest tbody tr")).to_have_count(2)
    expect(page.locator("#owners .bar")).not_to_have_count(0)
    poor = page.evaluate(CONTRAST)
    assert poor == []
    assert page.evaluate("document.documentElement.scrollWidth <= window.innerWidth")


def test_every_control_has_a_name_and_can_be_reached_by_tab(open_page: Open, serve: Serve) -> None:
    url = serve(Staged(noted=(noted(),)))
    page = open_page(url)
    expect(page.locator("#latest tbody tr")).to_have_count(1)
    expect(page.locator("#token-form")).to_be_hidden()
    page.locator("body").press("Tab")
    reached = [page.evaluate(FOCUSED)]
    for _ in range(40):
        page.keyboard.press("Tab")
        name = page.evaluate(FOCUSED)
        if name in {"BODY", reached[0]}:
            break
        reached.append(name)
    assert all(reached), reached
    for wanted in ("Skip to the numbers", "Pause", "Tracking ID", "Look up", "duplicates", "Show the payload of"):
        assert any(wanted in name for name in reached), (wanted, reached)
    assert page.locator("#tasks th:not([scope]), #latest th:not([scope])").count() == 0


# WCAG 2: 4.5 to 1 for text; every element with text of its own against what is painted behind it.
CONTRAST = """() => {
  const parse = (text) => text.match(/[\\d.]+/g).map(Number);
  const light = ([r, g, b]) => [r, g, b].map((c) => c / 255).map((c) => (c <= 0.03928 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4))
    .reduce((sum, c, at) => sum + c * [0.2126, 0.7152, 0.0722][at], 0);
  const behind = (node) => {
    for (; node; node = node.parentElement) {
      const colour = parse(getComputedStyle(node).backgroundColor);
      if (colour.length < 4 || colour[3] === 1) return colour;
    }
    return [255, 255, 255];
  };
  return [...document.querySelectorAll("body *")].filter((node) => node.checkVisibility() &&
    [...node.childNodes].some((child) => child.nodeType === 3 && child.data.trim())).map((node) => {
      const [one, other] = [light(parse(getComputedStyle(node).color)), light(behind(node))];
      return [node.textContent.slice(0, 30), (Math.max(one, other) + 0.05) / (Math.min(one, other) + 0.05)];
    }).filter(([, ratio]) => ratio < 4.5);
}"""
# The accessible name, as far as this page needs it.
FOCUSED = """() => {
  const node = document.activeElement;
  if (node === document.body) return "BODY";
  const by = node.getAttribute("aria-labelledby");
  return node.getAttribute("aria-label") || (by && document.getElementById(by).textContent)
    || (node.labels && node.labels[0] && node.labels[0].textContent) || node.textContent.trim();
}"""
