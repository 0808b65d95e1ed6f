"""`docs/how-to/come-from-equinox.md` is true, and names all differences in Equinox's names.

The page marks a difference in an existing name of Equinox by its form: `name(parameter=)` for a
parameter with another name, `name(parameter)` for one more required parameter,
`name(parameter=default)` for another default, `name.member` for a member, `name()` for another
order; each in backticks in the section "Names and arguments that differ".
"""

import inspect
import re
import types
from typing import Any

import equinox
import pytest

import pytreemod
from tests.docs.pages import ROOT

PAGE = (ROOT / "docs" / "how-to" / "come-from-equinox.md").read_text(encoding="utf-8")
TESTED = (ROOT / "tests" / "parity" / "test_deviations.py").read_text(encoding="utf-8")

# Accepted by this name, though no signature shows it: the function may have an argument with the
# same name (tests/transform/compilation/test_abstract_calls.py).
UNSHOWN = {"filter_closure_convert(fn=)", "filter_eval_shape(fun=)"}


def public_names(module):
    """The public names of a module, without modules."""
    return {
        name
        for name in dir(module)  # and not of `vars`: some are loaded when they are asked for
        if not name.startswith("_") and not isinstance(getattr(module, name), types.ModuleType)
    }


def test_every_tested_deviation_is_on_the_page():
    """A comment names each test of tests/parity/test_deviations.py, beside its difference."""
    named = {word for text in re.findall(r"<!--(.*?)-->", PAGE, re.S) for word in text.split()}
    tested = set(re.findall(r"^def test_(\w+)", TESTED, re.M))

    assert named - tested == set(), "on the page, but not tested"
    assert tested - named == set(), "tested, but not on the page"


@pytest.mark.parametrize(
    ("start", "theirs", "ours"),
    [
        ("In the package:", equinox, pytreemod),
        ("In `nn`:", equinox.nn, pytreemod.nn),
        ("In `debug`:", equinox.debug, pytreemod.debug),
    ],
)
def test_missing_names_are_listed(start, theirs, ours):
    """The names that Equinox has and pytreemod lacks are those on the page, no more, no fewer."""
    # Of a namespace that has them all the page says nothing.
    _, _, rest = PAGE.partition(start)
    paragraph = rest.split("\n\n")[0]

    assert set(re.findall(r"`(\w+)`", paragraph)) == public_names(theirs) - public_names(ours)


def parameters(function):
    """The parameters of a function by name; without a signature, none."""
    try:
        return dict(inspect.signature(function).parameters)
    except (TypeError, ValueError):
        return {}


def shown(default):
    """A default as the page has it; None if it has no meaning, or is a function."""
    nothing = default is inspect.Parameter.empty or type(default) is object
    if nothing or callable(default) or "<" in repr(default):
        return None
    # A size for all axes, and one for each of them.
    sizes = default if isinstance(default, tuple) and default else (default,)
    return repr(sizes[0] if len({*sizes}) == 1 else default)


def signature_differences(theirs, ours, name):
    """Differences to a call in Equinox: parameters, defaults, and their order."""
    mine, found = parameters(ours), parameters(theirs)
    by_position = inspect.Parameter.POSITIONAL_OR_KEYWORD
    passed_on = any(p.kind is p.VAR_KEYWORD for p in mine.values())
    if not mine or not found:
        return
    for parameter in found.values():
        own = mine.get(parameter.name)
        if own is None:
            if not (passed_on and parameter.kind is parameter.KEYWORD_ONLY):
                yield f"{name}({parameter.name}=)"
        elif own.kind is own.POSITIONAL_ONLY and parameter.kind is by_position:
            if parameter.name != "self":
                yield f"{name}({parameter.name}=)"
        elif shown(parameter.default) is not None and shown(own.default) != shown(
            parameter.default
        ):
            yield f"{name}({parameter.name}={shown(parameter.default)})"
        elif parameter.default is not parameter.empty and own.default is own.empty:
            yield f"{name}({parameter.name}=)"
    needed = (p for p in mine.values() if p.default is p.empty and p.name not in found)
    for parameter in needed:
        if parameter.kind not in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL):
            yield f"{name}({parameter.name})"
    order = [p.name for p in found.values() if p.kind is by_position and p.name in mine]
    if [n for n in mine if n in order] != order:
        yield f"{name}()"


def differences(theirs, ours):
    """All differences in the names that two modules share, in the page's form."""
    for name in sorted(public_names(theirs) & public_names(ours)):
        one, other = getattr(theirs, name), getattr(ours, name)
        yield from signature_differences(one, other, name)
        if not isinstance(one, type) or not isinstance(other, type):
            continue
        fields = getattr(one, "__dataclass_fields__", {})
        members = [m for m in (*dir(one), *fields) if not m.startswith("_")]
        here = {*dir(other), *getattr(other, "__dataclass_fields__", {})}
        yield from (f"{name}.{member}" for member in dict.fromkeys(members) if member not in here)
        called = [
            m for m in (*members, "__call__") if callable(getattr(one, m, None)) and m in here
        ]
        for member in dict.fromkeys(called):
            full = name if member == "__call__" else f"{name}.{member}"
            both = getattr(one, member), getattr(other, member)
            yield from signature_differences(*both, full)


@pytest.mark.parametrize(
    ("start", "theirs", "ours"),
    [
        ("Of the package:", equinox, pytreemod),
        ("Of `nn`:", equinox.nn, pytreemod.nn),
        ("Of `debug`:", equinox.debug, pytreemod.debug),
    ],
)
def test_what_differs_in_a_name_is_listed(start, theirs, ours):
    """Every parameter, default and member of Equinox's is the same, or on the page; no more."""
    # Of a namespace that has them all the page says nothing.
    _, _, rest = PAGE.partition(start)
    paragraph = rest.split("\n\n")[0]
    listed = set(re.findall(r"`([^`]+)`", paragraph))
    found = {difference.replace("'", '"') for difference in differences(theirs, ours)}

    assert found - listed - UNSHOWN == set(), "they differ, and the page does not say so"
    assert listed - found == set(), "on the page, and they do not differ"


def test_a_difference_is_found():
    """Parameters that are missing, moved, needed, or by position alone; another default."""

    def theirs(a, b=1, *, c=2, d=(1, 1)):
        del a, b, c, d

    def found(ours: Any):
        return list(signature_differences(theirs, ours, "f"))

    assert found(lambda a, b=1, *, c=2, d=1, e=3: None) == []
    assert found(lambda a, b=1, *, d=1: None) == ["f(c=)"]
    assert found(lambda a, b=2, *, c=2, d=1: None) == ["f(b=1)"]
    assert found(lambda a, b, *, c=2, d=1: None) == ["f(b=1)"]
    assert found(lambda b=1, a=0, *, c=2, d=1: None) == ["f()"]
    assert found(lambda a, b=1, *, c=2, d=1, e: None) == ["f(e)"]
    assert found(lambda a, /, b=1, *, c=2, d=1: None) == ["f(a=)"]
