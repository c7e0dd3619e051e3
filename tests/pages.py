"""A page in a real browser, for the tests that open one."""

import time


class Opened:
    """A page, with all it complained of and asked for."""

    def __init__(self, browser, address, **options):
        self.context = browser.new_context(**options)
        self.page = self.context.new_page()
        self.said, self.asked, self.home = [], [], address
        self.page.on("console", lambda message: self.said.append(message.text))
        self.page.on("pageerror", lambda error: self.said.append(str(error)))
        self.page.on("request", lambda request: self.asked.append(request.url))
        self.page.goto(address)
        self.page.wait_for_selector("html[data-ready]")

    def __enter__(self):
        return self

    def __exit__(self, kind, error, at):
        self.context.close()
        if error is None:
            assert self.said == []
            # blob: is the page's own memory, where a download is made.
            own = ("blob:", "data:", self.home)
            assert [url for url in self.asked if not url.startswith(own)] == []


def until(page, expression):
    """Wait for something to be true; the page's policy forbids Playwright's own way, by eval."""
    until = time.monotonic() + 60
    while time.monotonic() < until:
        if page.evaluate(expression):
            return
        page.wait_for_timeout(25)
    raise AssertionError(f"never came true: {expression}")
