"""SVG as strings: the elements that the drawings need.

Colors are classes, which `stylesheets/extra.css` sets for the light and the dark scheme: a drawing
is part of its page and follows the reader's choice.
"""

from __future__ import annotations

from html import escape


def element(tag: str, *children: str, **attributes: object) -> str:
    """One element; `class_` and `text_anchor` are written as `class` and `text-anchor`."""
    pairs = (
        f' {name.rstrip("_").replace("_", "-")}="{escape(_written(value))}"'
        for name, value in attributes.items()
    )
    inside = "".join(children)
    return f"<{tag}{''.join(pairs)}>{inside}</{tag}>"


def _written(value: object) -> str:
    """Numbers with at most one decimal, which is a tenth of a pixel."""
    return f"{value:.1f}".removesuffix(".0") if isinstance(value, float) else str(value)


def words(x: float, y: float, content: str, kind: str = "", anchor: str = "middle") -> str:
    """A line of text, its baseline at y."""
    style = f"pm-text {kind}".strip()
    return element("text", escape(content), x=x, y=y, class_=style, text_anchor=anchor)


def line(points: str, kind: str) -> str:
    """A path that is not filled."""
    return element("path", d=points, class_=f"pm-line {kind}")


def tip(x: float, y: float, angle: float, kind: str) -> str:
    """The head of an arrow that points right at angle 0, down at 90; its tip is at (x, y)."""
    place = f"translate({_written(x)} {_written(y)}) rotate({_written(angle)})"
    return element("path", d="M0 0L-10 -6V6Z", class_=f"pm-head {kind}", transform=place)


def picture(width: float, height: float, about: str, *children: str) -> str:
    """A drawing, with a description for readers who do not see it."""
    return element(
        "svg",
        element("title", escape(about)),
        *children,
        class_="pm-picture",
        role="img",
        viewBox=f"0 0 {_written(width)} {_written(height)}",
    )


def figure(caption: str, *pictures: str) -> str:
    """Drawings side by side, or below each other on narrow screens, and a caption."""
    row = element("div", *pictures, class_="pm-row")
    return element("figure", row, element("figcaption", caption), class_="pm-figure")
