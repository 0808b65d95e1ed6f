"""Which axes are of layers that a node holds as one."""

import functools as ft

import jax
import pytest

from pytreemod import nn
from pytreemod.tree.members import count_member_axes
from pytreemod.tree.nodes import locations
from pytreemod.tree.paths import path_text

KEY = jax.random.key(0)
make_mlp = ft.partial(nn.MLP, 2, 2, 2, 3, scan=True)


@pytest.mark.parametrize(
    ("make", "counts"),
    [
        (make_mlp, {"layers[0].weight": 0, "layers[1].weight": 1}),
        (
            ft.partial(nn.Ensemble, make_mlp, 2),
            {"member.layers[0].weight": 1, "member.layers[1].weight": 2},
        ),
        (
            ft.partial(nn.Ensemble, make_mlp, 2, shared="layers[1]"),
            {"member.layers[0].weight": 1, "member.layers[1].weight": 1},
        ),
        (
            ft.partial(nn.Ensemble, make_mlp, 2, shared="layers[0].weight"),
            {"member.layers[0].weight": 0, "member.layers[0].bias": 1},
        ),
        (
            ft.partial(nn.Stack, ft.partial(nn.Ensemble, ft.partial(nn.Linear, 2, 2), 2), 3),
            {"layer.member.weight": 2},
        ),
    ],
)
def test_each_node_that_holds_layers_as_one_counts(make, counts):
    """Without the shared leaves of members, and without nested nodes."""
    found = {
        path_text(loc.path): count_member_axes(loc.nodes, loc.path)
        for loc in locations(make(key=KEY))
    }

    assert counts.items() <= found.items()
