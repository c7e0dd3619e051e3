"""Makes the page's news, once for all who look, and no faster than a run can bear."""

import json
import threading
import time
from typing import Any

from idiolect.analysis.live.onlooker import Onlooker
from idiolect.analysis.report import Material, page

_SECONDS = 1.0  # between two pictures
_SHARE = 20  # a picture that takes this long makes the next wait this many times as long


class Painter(threading.Thread):
    """A thread that works only while someone looks."""

    def __init__(self, onlooker: Onlooker, command: str) -> None:
        super().__init__(name="idiolect-live", daemon=True)
        self._onlooker = onlooker
        self._command = command
        self.fresh = threading.Condition()
        self._painted = -1  # the onlooker's number when it was last asked
        self.number = -1  # of the picture in `text`
        self.text = ""
        self.looking = 0
        self.over = ""  # the last words, once all is over
        self.stopped = False

    def run(self) -> None:
        """Paint whenever there is news and someone to see it."""
        while not self.stopped:
            with self._onlooker.news:
                self._onlooker.news.wait_for(self._due, timeout=1.0)
            if self._due():
                began = time.perf_counter()
                self.paint()
                spent = time.perf_counter() - began
                time.sleep(max(_SECONDS, _SHARE * spent) if not self.over else 0.0)

    def paint(self, last: Material | None = None) -> None:
        """Make the news anew; whatever goes wrong is told to those who look, never to the run."""
        try:
            self._painted, material = self._onlooker.material()
            text = json.dumps(page.news(page.content([last or material], self._command)))
        except Exception as error:
            self._painted, text = self._onlooker.number, json.dumps({"trouble": f"{error}"})
        with self.fresh:
            self.number, self.text = self.number + 1, text
            self.fresh.notify_all()

    def page(self) -> str:
        """Give the whole page as it is now."""
        _, material = self._onlooker.material()
        return page.html(page.content([material], self._command), live=True)

    def end(self, words: str, last: Material | None = None) -> None:
        """Paint the last picture, of the finished run if there is one; say the last words."""
        if self.looking:
            self.paint(last)
        with self.fresh:
            self.over = words
            self.fresh.notify_all()

    def next(self, seen: int, timeout: float) -> tuple[int, str, str]:
        """Wait for news after the one `seen`; give its number, its text, and the last words."""

        def ready() -> Any:
            return self.number > seen or self.over or self.stopped

        with self.fresh:
            self.fresh.wait_for(ready, timeout)
            return self.number, self.text if self.number > seen else "", self.over

    def look(self, change: int) -> None:
        """Count those who look, up or down."""
        with self.fresh:
            self.looking += change

    def _due(self) -> bool:
        return self.stopped or (self.looking > 0 and self._onlooker.number > self._painted)
