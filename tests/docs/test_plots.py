"""The pictures of the pages are drawn by the pages' own code, when the site is built."""

import runpy

import pytest

from tests.docs.pages import PAGES, ROOT, name_of

with_pictures = runpy.run_path(str(ROOT / "docs" / "hooks" / "plots.py"))["with_pictures"]
LESSONS = [page for page in PAGES if page.parent == ROOT / "docs" / "tutorial"]

PAGE = """
```python
import matplotlib.pyplot as plt

figure, axes = plt.subplots()
axes.plot([1, 2])
```

```pycon
>>> axes.set_xlabel("a < b")
Text(...)
>>> 1 / 0
Traceback (most recent call last):
    ...
ZeroDivisionError: division by zero
```

<!-- figure: A line, "rising"
and going on. -->

The end.
"""


@pytest.mark.parametrize("page", LESSONS, ids=name_of)
def test_every_lesson_has_a_picture(page):
    """Each asks for one, in the form that the hook finds."""
    text = page.read_text(encoding="utf-8")

    assert "\n<!-- figure: " in text
    assert text.count("<!-- figure: ") == text.count("<!--")


def test_a_picture_stands_where_the_page_asks_for_it():
    """It has the color of the text around it, no name in common with others, no empty line."""
    drawn = with_pictures(PAGE + PAGE, "page.md")
    before, first, between = drawn.partition("</figure>")[0].partition("<figure")

    assert drawn.count("<figure ") == drawn.count("</svg>") == 2
    assert "ZeroDivisionError" in before
    assert first
    assert "\n\n" not in between
    assert 'aria-label="A line, &quot;rising&quot; and going on."' in between
    assert "a &lt; b" in between
    assert "currentColor" in between
    assert "<style" not in between
    assert drawn.rstrip().endswith("The end.")


def test_a_picture_is_the_same_each_time():
    """Nothing of a date, of chance, or of the pictures before is in it."""
    assert with_pictures(PAGE, "page.md") == with_pictures(PAGE, "page.md")


def test_a_page_without_pictures_is_left_alone():
    """Its code does not run."""
    page = "```python\nraise RuntimeError\n```\n"

    assert with_pictures(page, "page.md") == page


def test_a_picture_that_is_not_there_is_told():
    """And so is an error in the page's code."""
    with pytest.raises(ValueError, match=r"page\.md: there is no `figure`"):
        with_pictures("<!-- figure: Nothing. -->\n", "page.md")
    with pytest.raises(RuntimeError, match="broken"):
        with_pictures(f'```python\nraise RuntimeError("broken")\n```\n{PAGE}', "page.md")
