"""Charts and tables as files: figures redone by hand."""

from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from idiolect.analysis.report.figures import (
    Axis,
    Chart,
    Column,
    Mark,
    Panel,
    Table,
    as_csv,
    of_rounds,
    styles,
)
from idiolect.analysis.report.page import template
from idiolect.analysis.report.svg import Scale, extent, svg, tick_label, ticks

SVG = "{http://www.w3.org/2000/svg}"
TABLE = Table(
    "two",
    "Two",
    "caption",
    [Column("method"), Column("accuracy, %", "percent", best="high"), Column("MB", "mega")],
    [("A & B", (0.5, 0.01), 2_500_000), ("C|D", (0.25, None), None)],
    ["A & B", "C|D"],
)


def table_html(table):
    return str(template("parts.html").module.table(table))


def test_csv_quotes_what_needs_it_and_disarms_formulas():
    rows = [('a "b", c', 0.1 + 0.2, None), ("=1+1", -2, "plain")]
    assert as_csv(("x", "y", "z"), rows) == 'x,y,z\n"a ""b"", c",0.3,\n\'=1+1,-2,plain\n'


def test_a_table_in_markdown_latex_and_csv():
    assert TABLE.markdown().splitlines() == [
        "| method | accuracy, % | MB |",
        "| --- | ---: | ---: |",
        "| A & B | 50.0 ± 1.0 | 2.5 |",
        "| C\\|D | 25.0 | – |",
    ]
    assert TABLE.latex().splitlines()[2:8] == [
        r"\toprule",
        r"method & accuracy, \% & MB \\",
        r"\midrule",
        r"A \& B & 50.0 $\pm$ 1.0 & 2.5 \\",
        r"C|D & 25.0 & -- \\",
        r"\bottomrule",
    ]
    # In the units of the headings: 0.5 is 50 %, 2,500,000 bytes are 2.5 MB.
    assert TABLE.csv() == 'method,"accuracy, %","± accuracy, %",MB\nA & B,50,1,2.5\nC|D,25,,\n'


def test_a_table_on_the_page_is_escaped_and_its_best_value_bold():
    html = table_html(TABLE)
    table = ElementTree.fromstring(html.replace("&amp;", "&#38;"))
    cells = [[cell for cell in row] for row in table.iter("tr")]
    assert [len(row) for row in cells] == [3, 3, 3]
    assert [bold.text for bold in table.iter("strong")] == ["50.0 ± 1.0"]
    assert cells[1][1].get("data-sort") == "0.5" and cells[2][2].get("data-sort") is None
    assert "A &amp; B" in html


def test_ticks_are_round_and_lie_within():
    assert ticks(0.83, 0.97, 6) == pytest.approx([0.85, 0.875, 0.9, 0.925, 0.95])
    assert ticks(-0.5, 41, 6) == pytest.approx([0, 10, 20, 30, 40])
    assert tick_label(0.875, "%") == "87.5%" and tick_label(1234.0, "") == "1,234"


@given(st.floats(-1e3, 1e3), st.floats(1e-3, 1e6))
def test_ticks_of_any_axis(low, span):
    found = ticks(low, low + span)
    assert len(found) <= 8
    assert all(low - 1e-6 * span <= tick <= low + span * (1 + 1e-6) for tick in found)


def test_an_axis_reaches_as_far_as_its_marks():
    """Band up to 9, line from 2 to 4: y runs from 1 to 9 and 4 % more of the 8 between."""
    line = Mark("line", x=[0, 1], y=[2, 4])
    band = Mark("band", x=[0, 1], low=[1, 3], high=[5, 9])
    assert extent(Axis(), [line, band], "y") == pytest.approx((1 - 0.32, 9 + 0.32))
    assert extent(Axis(low=0.0), [line], "y") == pytest.approx((0, 4.16))
    assert extent(Axis(categories=("a", "b")), [line], "y") == (-0.5, 1.5)
    assert extent(Axis(), [Mark("bars", x=[3], y=[0])], "x") == pytest.approx((-0.12, 3.12))
    assert Scale(0, 10, 100, 200).at(2.5) == 125
    assert Scale(0, 10, 200, 100).at(2.5) == 175


def test_an_svg_stands_where_the_values_say():
    """Three dots in a row: the middle value of an even axis stands in the middle."""
    chart = Chart(
        "one",
        "A <title>",
        "words",
        [Panel("", Axis("x"), Axis(categories=("only",)))],
        [
            Mark(
                "dots",
                method="M",
                x=[1.0, None, 3.0, 2.0],
                y=[0, 0, 0, 0],
                text=["a", "b", "c", "d"],
            )
        ],
        ("x",),
        [(1.0,)],
    )
    root = ElementTree.fromstring(svg(chart, styles([("M", "m")])))
    dots = [c for g in root.iter(f"{SVG}g") for c in g.iter(f"{SVG}circle")]
    at = [float(dot.get("cx")) for dot in dots]
    assert len(at) == 3  # what is missing is not drawn
    assert at[0] < at[2] < at[1] and at[2] == pytest.approx((at[0] + at[1]) / 2, abs=0.11)
    assert root.find(f"{SVG}title").text == "A <title>"


def test_every_kind_of_mark_can_be_drawn_and_an_unknown_one_is_refused():
    panel = Panel("p", Axis(categories=("a", "b")), Axis(categories=("c", "d")))
    marks = [
        Mark("line", x=[0, 1], y=[0, None], tone=0, name="T"),
        Mark("band", x=[0, 1], low=[0, 0], high=[1, 1]),
        Mark("span", y=[0, 1], low=[0, 0], high=[1, None]),
        Mark("bars", x=[1], y=[0]),
        Mark("heat", x=[0, 1], y=[0, 1], z=[[1, None], [2, 4]], top=4.0),
    ]
    chart = Chart("k", "k", "k", [panel], marks, (), ())
    root = ElementTree.fromstring(svg(chart, {}))
    fills = [rect.get("fill") for rect in root.iter(f"{SVG}rect")][1:]
    assert len(fills) == 4 and "#083a66" in fills  # a bar and three cells; the top one is darkest
    with pytest.raises(ValueError, match="pie"):
        svg(Chart("k", "k", "k", [panel], [Mark("pie")], (), ()), {})


def luminance(colour):
    parts = [int(colour[n : n + 2], 16) / 255 for n in (1, 3, 5)]
    r, g, b = (p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts)
    return 0.2126 * r + 0.7152 * g + 0.0722 * b


def contrast(one, other):
    """WCAG's ratio; 3 is asked of what is needed to understand a graphic."""
    high, low = sorted((luminance(one), luminance(other)), reverse=True)
    return (high + 0.05) / (low + 0.05)


def test_every_method_has_a_style_of_its_own_that_can_be_seen():
    given = styles([("L", "local"), *((f"m{n}", "fedavg") for n in range(30)), ("m3", "again")])
    assert len(given) == 31 and len(set(given.values())) == 31
    assert given["L"].symbol == "circle-open"
    for style in given.values():
        assert contrast(style.light, "#fdfdfc") >= 3, style
        assert contrast(style.dark, "#15171b") >= 3, style


def test_no_cell_heading_or_method_of_a_table_is_markup():
    nasty = "<i onclick=alert(1)>\"'&"
    table = Table("t", "t", "", [Column(nasty, help=nasty), Column("x")], [[nasty, nasty]], [nasty])
    assert "<i " not in table_html(table) and "onclick=alert(1)&gt;" in table_html(table)


@pytest.mark.parametrize(("last", "step"), [(1, 1), (4, 1), (8, 1), (9, 2), (30, 5), (1000, 200)])
def test_rounds_are_counted_in_whole_numbers(last, step):
    assert of_rounds(last).step == step
    panel = Panel("", of_rounds(last), Axis("score"))
    mark = Mark("line", method="A", x=[1, last], y=[0.0, 1.0])
    drawn = svg(Chart("c", "C", "", [panel], [mark], (), ()), styles([("A", "a")]))
    said = [one.text for one in ElementTree.fromstring(drawn).iter(f"{SVG}text")]
    assert {f"{n:,}" for n in range(0, last + 1, step)} <= set(said)


def test_the_title_of_an_axis_stands_beside_its_longest_tick():
    """Letters are at most 7 wide, and a title is as high as 11."""
    panel = Panel("", Axis("x"), Axis("validation concordance", "%"))
    mark = Mark("line", method="A", x=[1, 2], y=[0.5505, 0.555])
    chart = Chart("c", "C", "", [panel], [mark], (), ())
    found = list(ElementTree.fromstring(svg(chart, styles([("A", "a")]))).iter(f"{SVG}text"))
    (title,) = (one for one in found if one.text == "validation concordance")
    ends = [one for one in found if one.get("text-anchor") == "end"]
    assert any(len(one.text) > 4 for one in ends)
    left = min(float(one.get("x")) - 6 * len(one.text) for one in ends)
    assert 8 <= float(title.get("x")) < left - 2
