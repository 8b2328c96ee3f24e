"""The page of --serve in a real browser."""

from __future__ import annotations

import re
import shutil
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from pipeline_fakes import TEXT

sync_api = pytest.importorskip("playwright.sync_api", reason="no playwright")
BROWSER = next(filter(None, map(shutil.which, ("chromium", "google-chrome"))), None)
pytestmark = pytest.mark.skipif(BROWSER is None, reason="no browser")

WRITE = "Write prompts"


@pytest.fixture(scope="module")
def browser() -> Iterator[sync_api.Browser]:
    with sync_api.sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=BROWSER, args=["--no-sandbox"])
        yield chromium
        chromium.close()


@pytest.fixture
def open_page(browser: sync_api.Browser) -> Iterator[Callable[..., sync_api.Page]]:
    """`open_page(url, **settings)`; fails the test if the page logs an error or leaves the host."""
    contexts, errors = [], []

    def open_(url: str, **settings: object) -> sync_api.Page:
        context = browser.new_context(**settings)
        contexts.append(context)
        page = context.new_page()
        page.set_default_timeout(15_000)
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.on(
            "request", lambda request: request.url.startswith(url) or errors.append(request.url)
        )
        page.goto(url)
        return page

    yield open_
    for context in contexts:
        context.close()
    assert errors == []


def test_a_sentence_becomes_four_prompts(serve: Callable, open_page: Callable) -> None:
    running = serve(delay=0.02)
    page = open_page(running.url, permissions=["clipboard-read", "clipboard-write"])
    expect = sync_api.expect
    # Typing starts right away; the settings are folded away; everything has a name.
    expect(page.get_by_label("Your words")).to_be_focused()
    expect(page.get_by_label("Temperature")).to_be_hidden()
    expect(page.get_by_text("Model: fake")).to_be_visible()
    page.keyboard.type("a cute pig")
    page.keyboard.press("Enter")
    items = page.get_by_role("listitem")
    expect(items).to_have_count(4)
    expect(items.first).to_have_attribute("aria-busy", "true")
    # The text grows as it comes.
    seen = len(items.first.inner_text())
    expect(items.first).not_to_have_text(re.compile(f"^.{{0,{seen}}}$", re.DOTALL))
    expect(items.first).to_have_attribute("aria-busy", "true")
    status = page.get_by_role("status")
    expect(status).to_have_text(re.compile(r"^4 prompts in \d+\.\d s\.$"))
    texts = [item.locator("p").inner_text() for item in items.all()]
    assert all(text.startswith("a cute pig") for text in texts)
    assert len(set(texts)) == 4
    items.nth(2).get_by_role("button", name="Copy prompt 3").click()
    expect(status).to_have_text("Copied to the clipboard.")
    assert page.evaluate("navigator.clipboard.readText()") == texts[2]
    # Over http on another host there is no such API.
    page.evaluate("Object.defineProperty(navigator, 'clipboard', { value: undefined })")
    items.nth(1).get_by_role("button", name="Copy prompt 2").click()
    expect(items.nth(1).get_by_role("button")).to_have_text("Copied")
    page.get_by_label("Your words").fill("")
    page.get_by_label("Your words").press("Control+v")
    expect(page.get_by_label("Your words")).to_have_value(texts[1])


def test_settings_stop_and_markup(serve: Callable, open_page: Callable) -> None:
    running = serve(delay=0.03)
    page = open_page(running.url)
    expect = sync_api.expect
    page.get_by_text("Settings").click()
    page.get_by_label("Prompts", exact=True).fill("1")
    page.get_by_label("New tokens").fill("12")
    page.get_by_label("Top-k").fill("1")
    page.get_by_label("Seed").fill("5")
    # What people type is text, never markup.
    page.get_by_label("Your words").fill("<img src=x> & <b>")
    page.get_by_role("button", name=WRITE).click()
    expect(page.get_by_role("status")).to_have_text(re.compile("^1 prompt in"))
    whole = page.get_by_role("listitem").locator("p").inner_text()
    assert whole.startswith("<img src=x> & <b>")
    assert whole[len("<img src=x> & <b>") :] in TEXT + TEXT
    # A number out of bounds is refused by the browser's own check.
    page.get_by_label("New tokens").fill("100000")
    page.get_by_role("button", name=WRITE).click()
    assert page.evaluate("document.querySelector('form').checkValidity()") is False
    # Stop, or Escape, ends the request on the server, and keeps what there is.
    page.get_by_label("New tokens").fill("250")
    for key in ("Enter", "Escape"):
        page.get_by_role("button", name=WRITE).click()
        expect(page.get_by_role("listitem")).to_have_attribute("aria-busy", "true")
        stop = page.get_by_role("button", name="Stop")
        stop.press(key)
        expect(page.get_by_role("status")).to_have_text("Stopped.")
        expect(page.get_by_role("button", name=WRITE)).to_be_enabled()
        # The keyboard is not left at a button that is gone.
        expect(page.get_by_role("button", name=WRITE)).to_be_focused()
        expect(stop).to_be_hidden()
        end = time.monotonic() + 5
        while running.worker.busy and time.monotonic() < end:
            page.wait_for_timeout(20)
        assert not running.worker.busy


def test_errors_are_said(serve: Callable, open_page: Callable) -> None:
    running = serve(prompt_tokens=20)
    page = open_page(running.url)
    expect = sync_api.expect
    words = page.get_by_label("Your words")
    words.fill("x" * 30)
    words.press("Enter")
    expect(page.get_by_role("alert")).to_have_text(
        "prompt: 30 tokens, 20 are allowed; make it shorter"
    )
    running.worker.close()
    words.fill("short")
    words.press("Enter")
    expect(page.get_by_role("alert")).to_have_text(re.compile("shutting down|cannot be reached"))


def test_a_refusal_says_what_to_do(serve: Callable, open_page: Callable) -> None:
    page = open_page(serve().url)
    expect = sync_api.expect
    words, alert = page.get_by_label("Your words"), page.get_by_role("alert")
    again = page.get_by_role("button", name="Try again")

    def refuse(**answer: Any) -> None:
        page.route("**/api/generate", lambda route: route.fulfill(**answer), times=1)

    refuse(status=413, json={"error": "the request is larger than 9 bytes"})
    words.fill("a cute pig")
    words.press("Enter")
    expect(alert).to_have_text("the request is larger than 9 bytes. Use fewer words.")
    expect(again).to_be_hidden()
    page.route("**/api/generate", lambda route: route.abort(), times=1)
    words.press("Enter")
    expect(alert).to_have_text(re.compile("cannot be reached.*See that it still runs"))
    refuse(status=503, body="not JSON, of a proxy")
    again.click()
    expect(alert).to_have_text(re.compile("status 503. Try again in a moment"))
    again.click()
    expect(page.get_by_role("status")).to_have_text(re.compile("^4 prompts in"))
    expect(alert).to_be_empty()
    expect(again).to_be_hidden()


def test_the_key_is_asked_for(serve: Callable, open_page: Callable) -> None:
    page = open_page(serve().url)
    expect = sync_api.expect
    key, alert = page.get_by_label("Key of the server"), page.get_by_role("alert")
    expect(page.get_by_text("Model: fake")).to_be_visible()
    expect(key).to_be_hidden()

    def guard(route: sync_api.Route) -> None:
        if route.request.headers.get("authorization") == "Bearer secret":
            route.continue_()
        else:
            route.fulfill(status=401, json={"error": "a key is needed"})

    page.route("**/api/*", guard)
    page.reload()
    expect(alert).to_have_text(re.compile("asks for a key"))
    expect(key).to_be_focused()
    page.get_by_label("Your words").fill("a cute pig")
    key.fill("secret")
    key.press("Enter")
    expect(page.get_by_role("status")).to_have_text(re.compile("^4 prompts in"))
    expect(key).to_be_hidden()
    expect(alert).to_be_empty()


def test_the_history_brings_all_back(serve: Callable, open_page: Callable) -> None:
    page = open_page(serve().url)
    expect = sync_api.expect
    words, items = page.get_by_label("Your words"), page.locator("#results p")
    summary = page.get_by_text("History", exact=True)
    entries = page.get_by_role("list", name="History").get_by_role("listitem")
    expect(summary).to_be_hidden()
    page.get_by_text("Settings").click()
    page.get_by_label("Prompts", exact=True).fill("2")
    page.get_by_label("Seed").fill("5")
    words.fill("a <b>cute</b> pig")
    words.press("Enter")
    expect(page.get_by_role("status")).to_have_text(re.compile("^2 prompts in"))
    texts = items.all_inner_texts()
    page.reload()
    summary.click()
    expect(entries).to_have_count(1)
    entries.first.get_by_role("button").click()
    expect(words).to_have_value("a <b>cute</b> pig")
    expect(words).to_be_focused()
    expect(page.locator("[name=num_return_sequences]")).to_have_value("2")
    expect(page.locator("[name=seed]")).to_have_value("5")
    assert items.all_inner_texts() == texts
    page.get_by_role("button", name="Clear the history").click()
    expect(summary).to_be_hidden()
    page.reload()
    expect(summary).to_be_hidden()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_readable_everywhere(serve: Callable, open_page: Callable, scheme: str) -> None:
    """Nothing is cut off at 320 pixels, and text has a contrast of at least 4.5 (WCAG 2.2 AA)."""
    page = open_page(serve().url, color_scheme=scheme, viewport={"width": 320, "height": 700})
    page.get_by_text("Settings").click()
    page.get_by_label("Your words").fill("w" * 60)
    page.get_by_role("button", name=WRITE).click()
    sync_api.expect(page.get_by_role("status")).to_have_text(re.compile("prompts in"))
    page.get_by_text("History", exact=True).click()
    page.evaluate("document.getElementById('key').hidden = false")
    assert page.evaluate("document.documentElement.scrollWidth") <= 320
    page_text = ("h1", "header p", "#hint", "summary", "#key", "#write", "#error", "#clear")
    for selector in (*page_text, ".given", ".added", ".copy", ".entry", ".entry small"):
        assert _contrast(page, selector) >= 4.5, selector


def _contrast(page: sync_api.Page, selector: str) -> float:
    colors = page.locator(selector).first.evaluate(
        """(element) => {
          const text = getComputedStyle(element).color;
          let at = element, behind = getComputedStyle(at).backgroundColor;
          while (behind === "rgba(0, 0, 0, 0)") {
            at = at.parentElement;
            behind = getComputedStyle(at).backgroundColor;
          }
          return [text, behind];
        }"""
    )
    text, behind = (_luminance(color) for color in colors)
    return (max(text, behind) + 0.05) / (min(text, behind) + 0.05)


def _luminance(color: str) -> float:
    channels = [int(number) / 255 for number in re.findall(r"\d+", color)[:3]]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return sum(weight * c for weight, c in zip((0.2126, 0.7152, 0.0722), linear, strict=True))
