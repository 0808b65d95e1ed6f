"""Maps over members that are split over a mesh of explicit axes."""

import pytest

import pytreemod as pm
from pytreemod.errors import ShapeError
from tests.helpers.comparing import assert_close
from tests.helpers.meshes import EXPLICIT, lies, on
from tests.helpers.trees import Affine, ramp


def split(tree, *entries):
    """The tree, split over the mesh."""
    return pm.filter_shard(tree, on(*entries, mesh=EXPLICIT))


def apply(model, x):
    return model.weight @ x + model.bias


MODEL, BATCH = Affine(ramp(4, 8), ramp(4)), ramp(8, 8)


@pytest.mark.parametrize("at", [(), ("model",)])
def test_what_members_share_may_be_split_over_another_axis(at):
    """The members over one axis of the mesh, a weight over another: as on one device."""
    mapped = pm.filter_vmap(apply, in_axes=(None, 0))
    result = pm.filter_jit(mapped)(split(MODEL, *at), split(BATCH, "data"))

    assert lies(result) == ("data", *at)
    assert_close(result, mapped(MODEL, BATCH))


def test_an_error_of_the_function_is_passed_on():
    """Whatever the shardings: an unrelated error is not taken for one of the mesh."""
    with pytest.raises(ZeroDivisionError, match="division"):
        pm.filter_vmap(lambda m, x: 1 / 0, in_axes=(None, 0))(split(MODEL, "data"), BATCH)


@pytest.mark.parametrize(
    "call",
    [
        lambda m, x: pm.filter_vmap(apply, in_axes=(None, 0))(m, x),
        lambda m, x: pm.filter_jit(pm.filter_vmap(apply, in_axes=(None, 0)))(m, x),
        lambda m, x: pm.filter_vmap(lambda x: m.weight @ x)(x),
        lambda m, x: pm.filter_vmap(lambda x, y: x + y)(x, BATCH),
    ],
    ids=["argument", "in jit", "captured", "another split"],
)
def test_what_is_split_over_the_axis_of_the_members_is_refused(call):
    """Each device has all that its members need."""
    with pytest.raises(ShapeError, match="'data'"):
        call(split(MODEL, "data"), split(BATCH, "data"))
