"""What scans refuse."""

import jax
import jax.numpy as jnp
import pytest

import pytreemod as pm
from pytreemod.errors import ArgumentError, ShapeError, SpecError, StructureError
from tests.helpers.trees import affine, double, ramp


def scan_xs(xs, **options):
    return pm.filter_scan(lambda c, x: (c, x), None, xs, **options)


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (
            lambda: pm.filter_scan(3, None, ramp(2)),
            ArgumentError,
            r"filter_scan\(f\): expected something callable, got 3",
        ),
        (lambda: pm.filter_map("f", ramp(2)), ArgumentError, r"filter_map\(f\): expected some"),
        (
            lambda: pm.filter_associative_scan(None, ramp(2)),
            ArgumentError,
            r"filter_associative_scan\(fn\): expected something callable",
        ),
        (
            lambda: scan_xs({"a": 1.0, "b": "text"}),
            ArgumentError,
            r"filter_scan\(xs\): expected an array to take apart, or a length, got neither\.\n"
            r"  say how many steps there are:\n      length=n$",
        ),
        (
            lambda: pm.filter_map(double, "text"),
            ArgumentError,
            r"filter_map\(xs\): expected an array to take apart, got none\.$",
        ),
        (
            lambda: pm.filter_associative_scan(double, "text"),
            ArgumentError,
            r"filter_associative_scan\(elems\): expected an array to take apart, got none\.$",
        ),
        (
            lambda: scan_xs({"a": ramp(3), "b": [ramp(2, 3), ramp(3)]}, length=2),
            ShapeError,
            r"filter_scan\(xs\): expected one number of steps, got 2 numbers\.\n"
            r"  at 2 steps of length=2 \(and 1 more\)\n"
            r"  at 3 steps of xs\['a'\]: f32\[3\], axis 0 \(and 1 more\)$",
        ),
        (
            lambda: scan_xs({"a": ramp(3), "b": jnp.float32(1)}),
            ShapeError,
            r"filter_scan\(xs\): expected arrays with the axis 0 that they are taken apart along, "
            r"got one without\.\n  at xs\['b'\]: f32\[\]\n"
            r"  what is the same for all steps has the axis None:\n"
            r"""      in_axes=pm\.by\(\{"\['b'\]": None, \.\.\.: 0\}\)$""",
        ),
        (
            lambda: scan_xs(ramp(3), in_axes=1),
            ShapeError,
            r"axis 1 that they are taken apart along, got one without\.\n  at xs: f32\[3\]",
        ),
        (
            lambda: pm.filter_associative_scan(double, {"x": ramp(3)}, axis=1),
            ShapeError,
            r"filter_associative_scan\(elems\): expected arrays with the axis 1 .*\n"
            r"  at elems\['x'\]: f32\[3\]$",
        ),
        (
            lambda: pm.filter_associative_scan(double, ramp(3), axis=None),
            ArgumentError,
            r"filter_associative_scan\(axis\): expected an int, got None",
        ),
        (
            lambda: scan_xs({"a": ramp(3)}, in_axes={"b": 0}),
            SpecError,
            r"filter_scan\(in_axes\): expected a prefix of the tree that it is for",
        ),
        (
            lambda: scan_xs({"a": ramp(3)}, in_axes="0"),
            SpecError,
            r"filter_scan\(in_axes\): expected an int or None for each leaf, got '0'\.\n"
            r"  at xs\['a'\]|filter_scan\(in_axes\): ",
        ),
        (
            lambda: scan_xs({"a": ramp(3)}, in_axes=pm.by({"b": 0, ...: None})),
            SpecError,
            r"select\.path\('b'\): expected a pattern that matches at least one leaf",
        ),
        (
            lambda: scan_xs({"a": ramp(3)}, out_axes={"a": None}),
            SpecError,
            r"filter_scan\(out_axes\): expected an axis for each array that a step returns, got "
            r"None\.\n  at result\['a'\]: f32\[\]\n  each step has one of its own",
        ),
        (
            lambda: scan_xs([ramp(3, 2)], out_axes=2),
            SpecError,
            r"filter_scan\(out_axes\): expected an axis from -2 to 1, got 2\.\n"
            r"  at result\[0\]: f32\[2\] in each step",
        ),
        (
            lambda: scan_xs(None, length=2.0),
            ArgumentError,
            r"filter_scan\(length\): expected an int that is known while tracing, got 2\.0",
        ),
        (
            lambda: jax.jit(lambda n: scan_xs(None, length=n))(2),
            ArgumentError,
            r"filter_scan\(length\): expected an int that is known while tracing, got i32\[\]",
        ),
    ],
)
def test_mistakes_are_explained(call, error, text):
    """What is no function, no axis, no length: by argument name and path."""
    with pytest.raises(error, match=text):
        call()


@pytest.mark.parametrize(
    ("result", "got"),
    [
        (lambda c: c, r"f32\[2\]"),
        (lambda c: (c, c, c), "3 values"),
        (lambda c: None, "None"),
        (lambda c: affine(), r"Affine\(weight=f32\[2,3\], bias=f32\[2\]\)"),
    ],
)
def test_a_step_that_returns_no_pair(result, got):
    """The step returns the carry and something beside it."""
    with pytest.raises(
        StructureError, match=rf"filter_scan of <lambda>: expected a step that returns a pair "
        rf"\(carry, y\), got {got}\.\n[\s\S]*return carry, None"
    ):  # fmt: skip
        pm.filter_scan(lambda c, x: result(c), ramp(2), length=2)


def test_the_errors_of_a_step_arrive_undisturbed():
    """What the step itself raises is raised."""

    def step(carry, x):
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        pm.filter_scan(step, None, ramp(2))
