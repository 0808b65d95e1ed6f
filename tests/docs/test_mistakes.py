"""`docs/reference/mistakes.md`: each mistake prints the text that is shown, and each hint works."""

import os
import re
import sys
import types
from collections import Counter

import jax
import pytest

from tests.docs.mistakes import PAGE, SOURCE, mistakes_of, page_of, seen_and_value, with_texts
from tests.goldens import same

MISTAKES = list(mistakes_of(SOURCE.read_text(encoding="utf-8")))
UPDATE = bool(os.environ.get("UPDATE_GOLDEN"))

NOT_OURS = {
    "I initialized optax with the whole model",
    "I called a donated model",
    "I asked an array in an `if`",
    "I scan over a list of layers",
    "I differentiated through a while loop",
    "`forward`",
    "`loss.backward()`",
    "`setup`",
    "I multiplied two split arrays on an explicit mesh",
    "A check inside jit found something",
}
"""Where the text is JAX's, Python's, optax's or the user's own."""


@pytest.mark.parametrize("mistake", MISTAKES, ids=[mistake.title for mistake in MISTAKES])
def test_what_is_seen_and_what_helps(mistake, monkeypatch, tmp_path):
    """The program prints exactly this text; the correct lines run, and have the value."""
    module = types.ModuleType("program")
    monkeypatch.setitem(sys.modules, "program", module)
    monkeypatch.chdir(tmp_path)
    # As a reader has it: optax itself does not pass under the strict rules of the other tests.
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        seen, value = seen_and_value(mistake, module)
    seen = seen.replace(str(tmp_path), "/home/you")
    if UPDATE:
        seen = mistake.seen if same(seen, mistake.seen) else seen
        value = mistake.value if same(value, mistake.value) else value
        text = SOURCE.read_text(encoding="utf-8")
        SOURCE.write_text(with_texts(text, mistake, seen, value), encoding="utf-8")
        return
    if not same(seen, mistake.seen):
        assert seen == mistake.seen, "as mistakes.md, or run with UPDATE_GOLDEN=1"
    if not same(value, mistake.value):
        assert value == mistake.value, "as mistakes.md, or run with UPDATE_GOLDEN=1"


@pytest.mark.parametrize("mistake", MISTAKES, ids=[mistake.title for mistake in MISTAKES])
def test_what_a_text_has(mistake):
    """A path, the expected and actual values, a line to write or all choices; ten lines at most."""
    lines = mistake.seen.splitlines()

    assert len(lines) <= 10
    if mistake.title not in NOT_OURS:
        assert re.match(r"\w+(Error|Warning): .+: expected .+, got .+", lines[0])
        assert any(
            re.match(" {6}|  (the tree has|the arguments have): ", line) for line in lines[1:]
        )


def test_the_page_is_up_to_date():
    """It is made from the file, as `UPDATE_GOLDEN=1` does."""
    page = page_of(list(mistakes_of(SOURCE.read_text(encoding="utf-8"))))
    if UPDATE:
        PAGE.write_text(page, encoding="utf-8")

    assert PAGE.read_text(encoding="utf-8") == page, "run this file with UPDATE_GOLDEN=1"


def test_titles_differ():
    """Each has a separate anchor."""
    counts = Counter(mistake.title.lower() for mistake in MISTAKES)

    assert [title for title, count in counts.items() if count > 1] == []


def test_a_mistake_without_its_parts_is_refused():
    """The form of the file is checked, so that no part of it is left out."""
    text = "## Group\n### Title\n```python\n1 / 0\n```\n\nWhy.\n"

    with pytest.raises(ValueError, match="Title: expected program, text, why"):
        list(mistakes_of(text))
