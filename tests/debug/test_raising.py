"""`raise_errors`: failures that no call has raised."""

import jax.numpy as jnp
import pytest

import pytreemod as pm
from pytreemod.errors import CheckError


def test_all_functions_are_waited_for_and_forgotten():
    """The function that was made first is the first."""
    fns = [
        pm.filter_jit(lambda x, text=text: pm.error_if(x, x < 0, text), checks="later")
        for text in ("first", "second")
    ]
    for fn in reversed(fns):
        fn(jnp.asarray(-1.0))

    with pytest.raises(CheckError, match="first") as caught:
        pm.debug.raise_errors()
    assert caught.value.__notes__[-1] == "in call 1 of <lambda>, and 1 more failure"
    pm.debug.raise_errors()
