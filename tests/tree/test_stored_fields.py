"""The stored value of a field, and the value of reading it."""

import pytest

import pytreemod as pm
from pytreemod.tree.stored_fields import is_reading_stored, reading_stored, stored
from tests.helpers.computing import Generated, Scaled, scaled
from tests.helpers.racing import race
from tests.helpers.trees import affine, ramp


def test_stored_is_what_the_tree_has():
    """Of a field that is read as stored, and of a computed one."""
    leaf = scaled()
    made = Generated(leaf, ramp(2))

    assert stored(made, "weight") is leaf
    assert stored(made, "bias") is made.bias


def test_stored_fills_a_pending_record_in():
    """The model that a jitted function returns has no fields yet."""
    made = pm.filter_jit(lambda m: m)(Generated(scaled(), ramp(2)))

    assert isinstance(stored(made, "weight"), Scaled)


def test_inside_attributes_give_what_is_stored():
    """Outside again the computed value, also if the block raises."""
    leaf = scaled()
    made = Generated(leaf, ramp(2))

    with reading_stored():
        assert is_reading_stored()
        assert made.weight is leaf
        with reading_stored():
            assert made.weight is leaf
        assert made.weight is leaf
    assert made.weight is not leaf
    with pytest.raises(ZeroDivisionError, match="division"), reading_stored():
        raise ZeroDivisionError("division")
    assert not is_reading_stored()


def test_another_thread_computes_meanwhile():
    """The stored value is read in one thread alone."""
    made = Generated(scaled(), ramp(2))

    def read(i):
        if i % 2:
            return isinstance(made.weight, Scaled)
        with reading_stored():
            return isinstance(made.weight, Scaled)

    assert race(read) == [True, False] * 4


def test_a_field_that_is_not_set_is_a_lookup_error():
    """Callers ask for names that the record says are set."""
    with pytest.raises(KeyError, match="nothing"):
        stored(affine(), "nothing")
