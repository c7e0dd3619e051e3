"""A report of a real run, opened in a real browser."""

import re
from pathlib import Path

import numpy as np
import pytest

from idiolect.analysis.report import report
from idiolect.results import trace
from pages import Opened, until

DESK = {"width": 1280, "height": 900}
PHONE = {"width": 375, "height": 800}


@pytest.fixture(scope="module")
def page_file(finished: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return report(finished, tmp_path_factory.mktemp("page") / "report.html")[0]


@pytest.fixture(scope="module")
def page(browser, page_file: Path):
    """The page, opened once; every test leaves it as it found it but for the order of rows."""
    with Opened(browser, page_file.as_uri(), viewport=DESK) as opened:
        yield opened.page


def shown(page, chart):
    """Count the marks of a figure that are drawn."""
    return page.evaluate(
        "id => document.getElementById('plot-' + id)"
        ".querySelectorAll('.scatterlayer .trace, .barlayer .trace, .hm').length",
        chart,
    )


def test_every_figure_is_drawn_and_nothing_is_asked_of_the_network(page):
    charts = page.eval_on_selector_all("[data-chart]", "all => all.map(f => f.dataset.chart)")
    assert {"by-client", "by-method", "curves", "fairness", "traffic", "holdings"} <= set(charts)
    assert {"teachers", "chosen", "grid-0", "ranks", "coefficients-0"} <= set(charts)
    for chart in charts:
        assert shown(page, chart) > 0, chart
    assert page.locator("[data-chart='grid-0'] .legend").inner_text().split("\n") == [
        "T = 1",
        "T = 5",
    ]


def test_names_that_look_like_tags_and_small_numbers_are_written_out(page):
    ticks = page.locator("[data-chart='fairness'] .ytick text").all_text_contents()
    assert "PersFL <b>" in ticks
    # Not "200µ" megabytes.
    kind = "document.getElementById('plot-traffic')._fullLayout.xaxis.exponentformat"
    assert page.evaluate(kind) == "none"


def test_a_method_is_switched_off_and_on_in_all_figures_and_tables(page):
    before = {chart: shown(page, chart) for chart in ("by-client", "curves", "fairness")}
    switch = page.locator("[data-switch='FedAvg']")
    switch.click()
    assert switch.get_attribute("aria-pressed") == "false"
    assert page.locator("#headline tbody tr:visible").count() == 4
    # Gone are its dots; its two lines and their bands; its bar.
    assert shown(page, "by-client") == before["by-client"] - 1
    assert shown(page, "curves") < before["curves"]
    assert shown(page, "fairness") == before["fairness"] - 1
    switch.click()
    assert {chart: shown(page, chart) for chart in before} == before
    assert page.locator("#headline tbody tr:visible").count() == 5


def test_a_table_is_sorted_by_its_headings(page):
    head = page.locator("#headline thead button").nth(1)
    cells = page.locator("#headline tbody tr td:nth-child(2)")

    def column():
        return [float(text.split("±")[0]) for text in cells.all_inner_texts()]

    head.click()
    assert column() == sorted(column(), reverse=True)
    head.click()
    assert column() == sorted(column())
    assert page.locator("#headline th[aria-sort='ascending']").count() == 1
    page.locator("#headline thead button").nth(0).click()
    names = page.locator("#headline tbody th").all_inner_texts()
    assert names == sorted(names, key=str.casefold)


def test_dark_follows_the_system_and_the_switch(browser, page_file):
    def ground(page):
        return page.evaluate("getComputedStyle(document.body).backgroundColor")

    def paper(page):  # the ground of a figure, drawn by Plotly
        return page.evaluate("document.querySelector('.plot .main-svg').style.background")

    with Opened(browser, page_file.as_uri(), viewport=DESK, color_scheme="dark") as opened:
        page = opened.page
        dark = ground(page)
        assert dark == "rgb(21, 23, 27)" and paper(page) == dark
        theme = page.locator("#theme")
        theme.click()  # light, whatever the system says
        assert ground(page) != dark and paper(page) == ground(page)
        theme.click()
        assert theme.inner_text() == "Theme: dark" and ground(page) == dark
        theme.click()
        page.emulate_media(color_scheme="light")
        assert ground(page) != dark
        # The page hears of the system's change a moment later, and draws then.
        page.wait_for_function(
            "document.querySelector('.plot .main-svg').style.background"
            " === getComputedStyle(document.body).backgroundColor"
        )


def test_a_phone_shows_it_without_sideways_scrolling(browser, page_file):
    with Opened(browser, page_file.as_uri(), viewport=PHONE, device_scale_factor=2) as opened:
        page = opened.page
        assert page.evaluate("document.documentElement.scrollWidth") == PHONE["width"]
        page.evaluate("window.scrollTo(500, 0)")
        assert page.evaluate("window.scrollX") == 0
        widths = page.eval_on_selector_all(".plot .main-svg", "all => all.map(s => s.clientWidth)")
        assert widths and max(widths) <= PHONE["width"]


def test_it_prints_in_light_on_the_width_of_a_sheet(browser, page_file, tmp_path):
    with Opened(browser, page_file.as_uri(), viewport=DESK, color_scheme="dark") as opened:
        page = opened.page
        page.emulate_media(media="print")
        until(page, "document.querySelector('.plot .main-svg').clientWidth === 680")
        assert (
            page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
        )
        assert not page.locator(".tools").first.is_visible()
        page.set_viewport_size({"width": 760, "height": 900})  # a sheet of A4 within its margins
        assert page.evaluate("document.documentElement.scrollWidth") <= 760
        page.set_viewport_size(DESK)
        page.pdf(path=tmp_path / "report.pdf", format="A4")
        assert (tmp_path / "report.pdf").read_bytes().count(b"/Type /Page\n") > 2
        page.emulate_media(media="screen")
        until(page, "document.querySelector('.plot .main-svg').clientWidth > 680")


def test_figures_and_tables_can_be_taken_away(page):
    page.locator("[data-switch='Local']").click()

    def taken(figure, kind):
        with page.expect_download() as waiting:
            page.locator(f"{figure} [data-get='{kind}']").click()
        return waiting.value.suggested_filename, waiting.value.path().read_text()

    name, text = taken("[data-chart='by-client']", "svg")
    assert name == "by-client.svg" and text.startswith("<svg") and "FedPer" in text
    assert "Local" not in re.sub(r"<title>.*?</title>", "", text)
    name, text = taken("[data-chart='curves']", "csv")
    assert name == "curves.csv" and text.startswith("method,model,round,")
    name, text = taken("[data-sheet='headline']", "md")
    assert name == "headline.md" and text.count("\n") == 7
    name, text = taken("[data-sheet='headline']", "tex")
    assert name == "headline.tex" and r"PersFL $<$b$>$" in text
    page.locator("[data-switch='Local']").click()


def test_hovering_tells_the_values(page):
    dot = page.locator("#plot-by-method .scatterlayer .trace .point").first
    dot.scroll_into_view_if_needed()
    box = dot.bounding_box()
    page.mouse.move(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
    page.wait_for_selector("#plot-by-method .hoverlayer .hovertext")
    assert "Local:" in page.locator("#plot-by-method .hoverlayer").text_content()


def test_the_slider_walks_through_the_rounds(page, finished):
    """Cells are those of the round that the slider names; hovering says who takes from whom."""
    box = page.locator("[data-chart='coefficients-0'] .slider")
    assert box.locator("output").inner_text() == "round 4"

    def cells():
        return page.evaluate("document.getElementById('plot-coefficients-0').data[0].z")

    _, course = trace.read_trace(finished, "KT-pFL").matrix(0)
    order = trace.similar_order(course[-1])
    assert np.allclose(cells(), course[-1][np.ix_(order, order)], atol=1e-5)
    box.locator("input").fill("0")
    assert (
        box.locator("output").inner_text()
        == f"round {trace.read_trace(finished, 'KT-pFL').rounds[0]}"
    )
    assert np.allclose(cells(), course[0][np.ix_(order, order)], atol=1e-5)
    told = page.evaluate("document.getElementById('plot-coefficients-0').data[0].text[0][1]")
    assert told.startswith(f"client {order[0]} takes from client {order[1]}: ")
