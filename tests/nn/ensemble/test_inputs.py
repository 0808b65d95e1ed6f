"""What of a call of an `Ensemble` is for each member, and what is for all of them."""

import jax
import jax.numpy as jnp
import pytest

import pytreemod as pm
from pytreemod.errors import ArgumentError, ShapeError, SpecError
from pytreemod.nn.calling import ABSENT
from pytreemod.nn.ensemble.inputs import Inputs

N = 3
XS = jnp.ones((N, 2))
STATE = pm.State(())


class Member(pm.Module):
    """Says what it takes."""

    def __call__(self, x, y=None, state=None, *, mask=None):
        return x


def inputs(*args, in_axes=None, **kwargs):
    """Those of a call of three members."""
    return Inputs("Ensemble", N, Member(), args, kwargs, in_axes)


@pytest.mark.parametrize(
    ("given", "axes", "rest"),
    [
        (inputs(XS), [], [XS.shape]),
        (inputs(XS, in_axes=0), [0], []),
        (inputs(XS.T, XS, in_axes=(1, None)), [1], [XS.shape]),
        (inputs(XS, XS.T, in_axes={"y": -1}), [-1], [XS.shape]),
        (inputs(XS, mask=XS, in_axes=0), [0], [XS.shape]),
        (inputs(XS, mask=XS, in_axes={"mask": 0}), [0], [XS.shape]),
        (inputs({"a": XS, "b": XS}, in_axes={"a": 0, "b": None}), [0], [XS.shape]),
        (inputs({"a": XS}, {"b": XS}, in_axes=pm.by({"a": 0, ...: None})), [0], [XS.shape]),
        (inputs({"a": XS, "b": 1.0}, in_axes=pm.if_array(0)), [0], []),
        (inputs(XS, STATE, in_axes=0), [0], []),
        (inputs(XS, STATE, in_axes=(0,)), [0], []),
        (inputs(XS, state=STATE, in_axes={"x": 0}), [0], []),
        (inputs(XS, None, inference=True, in_axes=0), [0], []),
    ],
)
def test_what_has_an_axis(given, axes, rest):
    """One spec, one for each by position, or any by name; the State has no say in it."""
    assert given.axes == axes
    assert all(x.shape[axis] == N for x, axis in zip(given.for_each(), axes, strict=True))
    others = [x for i, x in enumerate(given.leaves) if i not in given.mapped]
    # The State's place has a leaf, too, which stands for it.
    assert [x.shape for x in others if isinstance(x, jax.Array)] == rest


def test_the_arguments_of_one_member():
    """Its entries, its State in the place of that which was given, and the rest as it was."""
    flag = object()
    given = inputs(XS, STATE, mask=flag, in_axes=0)
    assert given.state is STATE
    assert given.for_one([XS[1]], "own")[1] == {"mask": flag}
    (x, state), _ = given.for_one([XS[1]], "own")
    assert (x.shape, state) == ((2,), "own")
    assert inputs(XS, state=STATE).for_one([], "own")[1] == {"state": "own"}
    assert inputs(XS).state is ABSENT


@pytest.mark.parametrize(
    ("make", "error", "text"),
    [
        (lambda: inputs(XS, STATE, state=STATE), ArgumentError, r"expected one State, got 2"),
        (
            lambda: inputs(XS.T, in_axes=0),
            ShapeError,
            r"of 3 members, (.|\n)*at x: f32\[2,3",
        ),
        (lambda: inputs(jnp.ones(()), in_axes=0), ShapeError, r"at x: f32\[\], axis 0"),
        (lambda: inputs(XS, in_axes=2), ShapeError, r"at x: f32\[3,2\], axis 2"),
        (lambda: inputs({"a": XS.T}, in_axes=0), ShapeError, r"at x\['a'\]: f32\[2,3\], axis 0"),
        (lambda: inputs(1.0, in_axes=0), ShapeError, r"in_axes for x: expected arrays with an ax"),
        (lambda: inputs(XS, in_axes=(0, 0)), SpecError, r"in_axes"),
        (lambda: inputs(XS, XS, in_axes=(0,)), SpecError, r"one spec for each of the 2 positional"),
        (
            lambda: inputs(XS, in_axes={"z": 0}),
            ArgumentError,
            r"names of arguments of this call",
        ),
        (lambda: inputs(XS, in_axes="x"), SpecError, r"expected an int or None for each leaf"),
        (lambda: inputs(XS, in_axes=pm.by({"z": 0, ...: None})), SpecError, r"select\.path\('z'\)"),
    ],
)
def test_axes_that_do_not_fit_are_refused(make, error, text):
    """With the place, in the name of the Ensemble."""
    with pytest.raises(error, match=text):
        make()
