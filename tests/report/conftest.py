"""A browser, where there is one: Debian's chromium, driven without a window."""

import shutil

import pytest
from playwright.sync_api import sync_playwright

CHROMIUM = next((p for p in map(shutil.which, ("chromium", "chromium-browser", "google-chrome")) if p), None)


@pytest.fixture(scope="session")
def browser():
    if CHROMIUM is None:
        pytest.skip("no chromium on this machine: apt-get install chromium")
    with sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield started
        started.close()


class Opened:
    """A page in the browser, with everything that it complained of or asked for."""

    def __init__(self, page, path, *, width=1440, scheme="light"):
        self.complaints, self.requests = [], []
        self.page = page
        self.listeners = {
            "console": lambda message: self.complaints.append(message.text),
            "pageerror": lambda error: self.complaints.append(str(error)),
            "request": lambda request: self.requests.append(request.url),
        }
        page.set_viewport_size({"width": width, "height": 900})
        page.emulate_media(color_scheme=scheme)
        for event, listener in self.listeners.items():
            page.on(event, listener)
        page.goto(path.as_uri())
        page.wait_for_selector("html[data-ready]", timeout=60_000)

    def taken(self, selector):
        """What a click gives the reader: the name of a file, and its text."""
        with self.page.expect_download() as waiting:
            self.page.click(selector)
        return waiting.value.suggested_filename, waiting.value.path().read_text(encoding="utf-8")

    def left(self):
        """The tab, empty and with nothing kept."""
        for event, listener in self.listeners.items():
            self.page.remove_listener(event, listener)
        self.page.evaluate("() => { localStorage.clear(); sessionStorage.clear(); }")
        self.page.mouse.move(0, 0)
        self.page.goto("about:blank")
        return self.page


@pytest.fixture(scope="session")
def tabs(browser):
    """Tabs that no test uses now. A new one costs a process that reads plotly anew: three times what a page costs."""
    return []


@pytest.fixture
def opened(browser, tabs):
    """Open pages, each loaded anew; their tabs are empty after the test."""
    pages = []

    def open_(path, **options):
        pages.append(Opened(tabs.pop() if tabs else browser.new_page(), path, **options))
        return pages[-1]

    yield open_
    tabs.extend(one.left() for one in pages)
