"""StackedNote: of which loops and maps a noted value has axes."""

import jax.numpy as jnp

import pytreemod as pm
from pytreemod.transform.boundary.sowing import Label, capturing, note
from pytreemod.transform.boundary.stacked_notes import StackedNote
from pytreemod.transform.boundary.supplying import planned


def seen(x):
    """Note it."""
    note(Label(1, "x"), {"all": StackedNote(x)})
    return x


def kinds(fn, *args):
    """The kinds of the axes, and the transform's numbers on the route to each."""
    with capturing():
        plan = planned(fn, args, {})
    (label,), (value,) = plan.labels, plan.shapes
    return [(axis.kind, axis.prefix(label.route)) for axis in value["all"].axes]


def test_each_axis_is_of_a_loop_or_a_map():
    """Outermost first, whatever is between."""

    def scan(x):
        return pm.filter_scan(lambda c, x: (c, pm.filter_jit(seen)(x)), 0.0, x)[1]

    def back(x):
        return pm.filter_scan(lambda c, x: (c, seen(x)), 0.0, x, reverse=True)[1]

    x = jnp.ones((2, 3))
    assert kinds(pm.filter_vmap(scan), x) == [("map", (0,)), ("loop", (0, 0))]
    assert kinds(pm.filter_jit(pm.filter_vmap(back)), x) == [
        ("map", (0, 0)),
        ("reversed loop", (0, 0, 0)),
    ]
    assert kinds(lambda x: pm.filter_map(pm.filter_vmap(seen), x), x) == [
        ("loop", (0,)),
        ("map", (0, 0)),
    ]
    assert kinds(seen, x) == []
