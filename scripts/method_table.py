"""Write docs/methods.md from the methods themselves: `make docs`."""

import dataclasses
import inspect
from pathlib import Path

from idiolect.method import Method
from idiolect.methods import METHODS

PAGE = Path(__file__).resolve().parent.parent / "docs" / "methods.md"


def page() -> str:
    """Return the page: a table of methods, then each one's own settings."""
    common = {spec.name: spec for spec in dataclasses.fields(Method)}
    lines = [
        "# Methods",
        "",
        "Made by `make docs` from the code. Each passes the laws of `tests/test_laws.py` and has a",
        "step derived by hand in `tests/methods/`.",
        "",
        "| name | method | paper | what it is |",
        "|---|---|---|---|",
    ]
    lines += [
        f"| `{name}` | {kind.title} | {kind.paper or '–'} | {_summary(kind)} |"
        for name, kind in METHODS.items()
    ]
    lines += ["", "## Settings of every method", "", *_settings(list(common.values()))]
    for name, kind in METHODS.items():
        specs = [spec for spec in dataclasses.fields(kind) if _own(spec, common)]
        lines += ["", f"## `{name}`", "", _about(kind)]
        if kind.unused:
            lines += ["", f"Has no use for: {', '.join(f'`{one}`' for one in kind.unused)}."]
        if kind.presets:
            lines += ["", f"Presets: {', '.join(f'`{one}`' for one in kind.presets)}."]
        if specs:
            lines += ["", *_settings(specs)]
    return "\n".join(lines) + "\n"


def _own(spec: "dataclasses.Field[object]", common: dict[str, "dataclasses.Field[object]"]) -> bool:
    """Say whether a setting is the method's own or differs from what every method has."""
    return spec.name not in common or spec.metadata != common[spec.name].metadata


def _settings(specs: "list[dataclasses.Field[object]]") -> list[str]:
    rows = [f"| `{s.name}` | `{s.default}` | {s.metadata['doc']} |" for s in specs]
    return ["| setting | default | meaning |", "|---|---|---|", *rows]


def _summary(kind: type[Method]) -> str:
    return (kind.__doc__ or "").strip().splitlines()[0]


def _about(kind: type[Method]) -> str:
    return inspect.cleandoc(inspect.getmodule(kind).__doc__ or "")


if __name__ == "__main__":
    PAGE.write_text(page())
