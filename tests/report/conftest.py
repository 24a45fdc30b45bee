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

    def __init__(self, browser, path, *, width=1440, scheme="light"):
        self.complaints, self.requests = [], []
        self.page = browser.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme)
        self.page.on("console", lambda message: self.complaints.append(message.text))
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.on("request", lambda request: self.requests.append(request.url))
        self.page.goto(path.as_uri())
        self.page.wait_for_selector("html[data-ready]", timeout=60_000)

    def taken(self, selector):
        """What a click gives the reader: the name of a file, and its text."""
        with self.page.expect_download() as waiting:
            self.page.click(selector)
        return waiting.value.suggested_filename, waiting.value.path().read_text(encoding="utf-8")


@pytest.fixture
def opened(browser):
    """Open pages; they are closed after the test."""
    pages = []

    def open_(path, **options):
        pages.append(Opened(browser, path, **options))
        return pages[-1]

    yield open_
    for one in pages:
        one.page.close()
