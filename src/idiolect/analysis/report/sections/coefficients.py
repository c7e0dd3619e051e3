"""Who learns from whom: the server's matrix over clients, round by round (KT-pFL and its kin)."""

from idiolect.analysis.report.chart import Axis, Chart, Mark, Panel
from idiolect.analysis.report.material import Material
from idiolect.analysis.report.section import Section
from idiolect.results.trace import Trace, similar_order

_MOST_CELLS = 60_000  # of all rounds together, so that the page stays small
_MOST_ROUNDS = 40


def section(material: Material) -> Section | None:
    """Draw every method that recorded a matrix over clients."""
    charts = [_chart(number, trace) for number, trace in enumerate(material.traces)]
    drawn = [chart for chart in charts if chart is not None]
    if not drawn:
        return None
    return Section(
        "coefficients",
        "Who learns from whom",
        "How much the server lets each client take from every other; nobody told it who is alike.",
        drawn,
    )


def _chart(number: int, trace: Trace) -> Chart | None:
    count = len(trace.clients)
    if not any(own.shape[2:] == (count, count) for own in trace.values.values()):
        return None
    name, course = trace.matrix(trace.seeds[0])
    order = similar_order(course[-1])
    shown = _chosen(len(trace.rounds), count)
    names = tuple(trace.clients[place] for place in order)
    top = max(float(course[record].max()) for record in shown)
    bottom = min(float(course[record].min()) for record in shown)
    marks = [
        Mark(
            "heat",
            panel=frame,
            x=list(range(count)),
            y=list(range(count)),
            z=[[float(course[record][a, b]) for b in order] for a in order],
            says="{y} takes from {x}: {z}",
            bottom=bottom,
            top=top,
        )
        for frame, record in enumerate(shown)
    ]
    return Chart(
        f"coefficients-{number}",
        f"{trace.label}: {name} over the rounds",
        "A row is the client that learns, a column the one it learns from; the stronger the "
        "colour, the more. Clients are ordered by likeness in the last round, so that groups show "
        f"as blocks on the diagonal. Seed {trace.seeds[0]}; move the slider through the rounds.",
        [Panel("", Axis("learns from", categories=names), Axis(categories=names))],
        marks,
        ("round", "receiver", "sender", "value"),
        [
            (trace.rounds[record], trace.clients[a], trace.clients[b], float(course[record][a, b]))
            for record in shown
            for a in order
            for b in order
        ],
        height=max(260, min(24, max(5, 1200 // count)) * count + 90),
        square=True,
        frames=tuple(f"round {trace.rounds[record]}" for record in shown),
    )


def _chosen(records: int, count: int) -> list[int]:
    """Choose rounds evenly, the first and the last among them, as many as the page can hold."""
    most = max(2, min(_MOST_ROUNDS, _MOST_CELLS // max(count * count, 1)))
    if records <= most:
        return list(range(records))
    return sorted({round(step * (records - 1) / (most - 1)) for step in range(most)})
