"""Matplotlib figures as inline SVG for a page: colors from the page's style sheet, and a tooltip for each shape."""

import io
import re
import xml.etree.ElementTree as ET
from collections.abc import Mapping, Sequence
from typing import Any

# Colors in figures, and the CSS variables of page.html that replace them. Pages have a light and a dark set.
INK, FAINT, PAPER = "#010101", "#010102", "#010103"
SERIES = tuple(f"#0101{number:02x}" for number in range(16, 24))
_VARIABLES = {INK: "var(--ink)", FAINT: "var(--faint)", PAPER: "var(--paper)"}
_VARIABLES |= {color: f"var(--series-{i})" for i, color in enumerate(SERIES, 1)}

_REFERENCE = re.compile(r"#([\w-]+)")
_NOT_IN_HTML = re.compile(r'<metadata>.*?</metadata>|<\?xml.*?\?>|<!DOCTYPE.*?>|\sxmlns(?::\w+)?="[^"]*"', re.DOTALL)

STYLE = {
    **dict.fromkeys(("font.size", "axes.titlesize"), 10),
    **dict.fromkeys(("axes.labelsize", "xtick.labelsize", "ytick.labelsize", "legend.fontsize"), 9),
    **dict.fromkeys(("text.color", "axes.labelcolor", "axes.titlecolor", "xtick.labelcolor", "ytick.labelcolor"), INK),
    **dict.fromkeys(("axes.edgecolor", "grid.color", "xtick.color", "ytick.color"), FAINT),
    **dict.fromkeys(("svg.fonttype", "axes.facecolor", "figure.facecolor"), "none"),
    **dict.fromkeys(("text.parse_math", "legend.frameon", "axes.spines.top", "axes.spines.right"), False),
    **dict.fromkeys(("axes.axisbelow", "axes.grid"), True),
    **{"grid.linewidth": 0.4, "grid.alpha": 0.6, "hatch.linewidth": 0.6},
}


def to_svg(figure: Any, name: str, title: str, description: str, tips: Mapping[str, str | Sequence[str]]) -> str:
    """Return a figure as an `<svg>` element for an HTML page, drawn with STYLE.

    Args:
        figure: matplotlib figure. Its colors are INK, FAINT, PAPER and SERIES.
        name: prefix of the element's ids, unique in the page.
        title: name of the picture for screen readers.
        description: its contents in words, for screen readers.
        tips: by gid of an artist, the tooltip of the artist, or one tooltip for each of its shapes.
    """
    import matplotlib
    from matplotlib.backends.backend_svg import FigureCanvasSVG

    FigureCanvasSVG(figure)
    file = io.StringIO()
    with matplotlib.rc_context({**STYLE, "svg.hashsalt": name}):  # ids that are referred to depend on the salt
        figure.savefig(file, format="svg", metadata={"Date": None})
    text = _NOT_IN_HTML.sub("", file.getvalue()).replace("xlink:href", "href")
    root, used = ET.fromstring(text), set(_REFERENCE.findall(text))
    for element in list(root.iter()):
        _add_tips(element, tips)
        if element.get("id") not in used:
            element.attrib.pop("id", None)
    _label(root, name, title, description)
    text = ET.tostring(root, encoding="unicode")
    for color, variable in _VARIABLES.items():
        text = text.replace(color, variable)
    return text


def _add_tips(element: ET.Element, tips: Mapping[str, str | Sequence[str]]) -> None:
    """Add a `<title>` to the shapes of an artist that has tooltips."""
    tip = tips.get(element.get("id", ""))
    if tip is None:
        return
    shapes = element.findall(".//path")
    texts = [tip] * len(shapes) if isinstance(tip, str) else tip
    for shape, said in zip(shapes, texts, strict=True):
        title = ET.Element("title")
        title.text = said
        shape.insert(0, title)


def _label(root: ET.Element, name: str, title: str, description: str) -> None:
    for key in ("width", "height", "version"):
        root.attrib.pop(key, None)
    root.set("role", "img")
    root.set("aria-labelledby", f"{name}-title {name}-description")
    for i, (tag, said) in enumerate((("title", title), ("desc", description))):
        element = ET.Element(tag, {"id": f"{name}-{'description' if tag == 'desc' else 'title'}"})
        element.text = said
        root.insert(i, element)
