"""`filter_vmap`: axes of every spelling, over functions, classes, methods and Modules."""

import pytest

from tests.parity.helpers import ramp, same_under_both_imports


@pytest.mark.parametrize("out_axes", [0, -1, lambda leaf: 0])
@same_under_both_imports
def test_numbers_as_results_are_repeated(eqx, out_axes):
    """A number with an axis is stacked, as in `jax.vmap`; by default, it remains one."""

    def fn(x):
        return (x * 2, 1.0, {"count": 3, "done": True})

    return eqx.filter_vmap(fn, out_axes=out_axes)(ramp(3)), eqx.filter_vmap(fn)(ramp(3))


SPECS = {
    "ints": (0, 1),
    "none": (None, 0),
    "negative": (-1, -2),
    "callable": (lambda leaf: 0, None),
    "callable by shape": (lambda leaf: 0 if leaf.shape[0] == 3 else None, 1),
}


@pytest.mark.parametrize("spec", SPECS)
@same_under_both_imports
@pytest.mark.sampled
def test_in_axes_as_a_tuple(eqx, spec):
    """One entry for each argument: an axis, None, or a function from leaf to axis."""
    x, y = ramp(3, 3), ramp(3, 3) + 2
    return eqx.filter_vmap(lambda a, b: a * 2 + b.sum(), in_axes=SPECS[spec])(x, y)


@same_under_both_imports
def test_in_axes_by_argument_name(eqx):
    """A dict names arguments; other arguments are mapped as by default."""

    @eqx.filter_vmap(in_axes={"b": None, "c": 1})
    def apply(a, b, c):
        return a * b.sum() + c

    @eqx.filter_vmap(in_axes={"model": eqx.if_array(1)})
    def scaled(model, x):
        return model["w"] * x * model["n"]

    return apply(ramp(3), ramp(2), ramp(1, 3)), scaled({"w": ramp(2, 3), "n": 2}, ramp(3))


@same_under_both_imports
def test_if_array(eqx):
    """`if_array(i)` maps arrays over axis i and shares everything else."""
    axes = eqx.if_array(1)
    mapped = eqx.filter_vmap(lambda t: t[0] * t[1], in_axes=(axes,))([ramp(2, 3), 4.0])
    return axes(ramp(2)), axes(3.0), axes("a"), mapped, eqx.if_array(0) == eqx.if_array(0)
