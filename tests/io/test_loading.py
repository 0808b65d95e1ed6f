"""`load`: strictly, by choice, by part; from plain files, into abstract trees; its errors."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import safetensors.numpy

import pytreemod as pm
from pytreemod import nn
from pytreemod.errors import (
    ArgumentError,
    FileError,
    SpecError,
)
from tests.helpers.comparing import assert_same
from tests.helpers.trees import ramp
from tests.io.files import write_described, write_older, write_plain


def mlp(seed, **options):
    """A small model."""
    return nn.MLP(3, 2, 4, 1, key=jax.random.key(seed), **options)


@pytest.fixture
def saved(tmp_path):
    """A file with `mlp(0)` in it."""
    pm.save(tmp_path / "model", mlp(0), {"step": 1})
    return tmp_path / "model"


def test_all_differences_are_told_at_once(saved):
    like = nn.MLP(3, 2, 5, 1, activation=jax.nn.gelu, key=jax.random.key(0))
    with pytest.raises(FileError, match=r"got 7 differences") as caught:
        pm.load(saved, like)

    lines = str(caught.value).splitlines()
    assert lines[0].endswith(
        "expected the leaves and the configuration of like, got 7 differences."
    )
    assert lines[1:] == [
        "  at layers.0.weight: like has f32[5,3], the file f32[4,3]",
        "  at layers.0.bias: like has f32[5], the file f32[4]",
        "  at layers.1.weight: like has f32[2,5], the file f32[2,4]",
        "  at activation: like has jax.nn.gelu, the file jax.nn.relu",
        "  at width_size: like has 5, the file 4",
        "  at layers.0.out_features: like has 5, the file 4",
        "  at layers.1.in_features: like has 5, the file 4",
        "  to keep these leaves of `like`, load the others, and get a report:",
        '      tree, report = pm.load(path, like, strict=False, missing="keep")',
    ]


def test_of_what_only_the_file_has_the_outermost_is_told(tmp_path):
    """A run has thirty more nodes than its model, and each has flags."""
    block = nn.Sequential([mlp(0), nn.Dropout(0.5)])
    pm.save(tmp_path / "run", {"model": mlp(0), "old": [block, nn.Dropout(0.5)]})
    like, report = pm.load(tmp_path / "run", {"model": mlp(1)}, strict=False)

    assert like["model"] == mlp(0)
    assert report.configuration == (
        "old.0: only the file has it, pytreemod.nn.Sequential",
        "old.1: only the file has it, pytreemod.nn.Dropout",
    )
    # A node of another class has the same name: its content is compared.
    pm.save(tmp_path / "net", nn.Sequential([nn.Dropout(0.5), nn.LayerNorm(2)]))
    other = {"layers": (nn.Dropout(0.1), nn.LayerNorm(2))}
    _, report = pm.load(tmp_path / "net", other, strict=False)
    assert report.configuration == (
        "<root>: only the file has it, pytreemod.nn.Sequential",
        "layers.0.p: like has 0.1, the file 0.5",
    )


def test_what_is_around_the_chosen_leaves_may_be_a_dict(tmp_path):
    """For a part of a Module's file, a dict replaces the Module."""
    pm.save(tmp_path / "net", nn.Sequential([mlp(0)]))
    loaded = pm.load(tmp_path / "net", {"layers": [mlp(1)]}, only="layers")
    assert loaded["layers"] == [mlp(0)]

    with pytest.raises(FileError, match=r"like has jax\.nn\.gelu, the file jax\.nn\.relu"):
        pm.load(tmp_path / "net", {"layers": [mlp(1, activation=jax.nn.gelu)]}, only="layers")


def test_names_that_have_changed_are_renamed_by_the_hint(tmp_path):
    """Without `rename`, moved leaves would be unchanged, and only the report would show it."""
    layer = nn.Linear(2, 2, key=jax.random.key(0))
    pm.save(tmp_path / "old", {"inner": layer, "outer": layer})
    with pytest.raises(FileError, match="got 5 differences") as caught:
        pm.load(tmp_path / "old", {"stem": layer, "outer": layer})

    assert str(caught.value).splitlines()[-2:] == [
        "      tree, report = pm.load(path, like, strict=False)",
        '      pm.load(..., rename={"name in the file": "name in like"})',
    ]


@pytest.mark.parametrize(
    ("saved_as", "like", "hint"),
    [
        ({"run": {"model": mlp(0)}}, mlp(1), 'rename={"run.model": ""}'),
        (mlp(0), {"net": mlp(1)}, 'rename={"": "net"}'),
        ({"a": ramp(2)}, {"b": ramp(2)}, 'rename={"name in the file": "name in like"}'),
    ],
)
def test_to_load_nothing_is_a_mistake(tmp_path, saved_as, like, hint):
    """The model would be unchanged, with all its initial numbers."""
    pm.save(tmp_path / "file", saved_as)
    with pytest.raises(
        FileError, match="the name of at least one leaf of like, got only other names"
    ) as caught:
        pm.load(tmp_path / "file", like, strict=False)

    assert str(caught.value).endswith(f"pm.load(..., {hint})")
    # With `missing`, the choice was explicit.
    kept, report = pm.load(tmp_path / "file", like, strict=False, missing="keep")
    assert_same(kept, like)
    assert not report.loaded


def test_the_hint_for_another_shape_is_to_keep_the_leaf(tmp_path):
    """`strict=False` alone would not load it."""
    pm.save(tmp_path / "file", {"a": ramp(2), "b": ramp(3)})
    like = {"a": ramp(2), "b": ramp(4)}
    hint = re.escape('pm.load(path, like, strict=False, missing="keep")')
    with pytest.raises(FileError, match=rf"{hint}\Z"):
        pm.load(tmp_path / "file", like)
    loaded, report = pm.load(tmp_path / "file", like, strict=False, missing="keep")

    assert_same(loaded["b"], like["b"])
    assert report.missing == ("b",)


@pytest.mark.parametrize(
    ("dtypes", "hint"),
    [
        (("bfloat16", "bfloat16"), 'cast="bfloat16"'),
        (("bfloat16", "float16"), 'cast=pm.by({"head.**": "bfloat16", ...: None})'),
    ],
)
def test_the_hint_for_a_dtype_is_the_one_of_like(tmp_path, dtypes, hint):
    pm.save(tmp_path / "file", [ramp(2), ramp(3), jnp.arange(2)])
    like = [ramp(2).astype(dtypes[0]), ramp(3).astype(dtypes[1]), jnp.arange(2)]
    with pytest.raises(FileError, match=r"got 2 differences") as caught:
        pm.load(tmp_path / "file", like)
    assert str(caught.value).endswith(f"pm.load(..., {hint})")

    # No cast makes a float of an integer.
    with pytest.raises(FileError, match="got 1 difference") as caught:
        pm.load(tmp_path / "file", [ramp(2), ramp(3), ramp(2)])
    assert "cast" not in str(caught.value)


def test_nothing_is_in_another_field_of_the_same_shape(tmp_path):
    """Equinox's files load such fields swapped."""

    class One(pm.Module):
        a: jax.Array
        b: jax.Array

    class Two(pm.Module):
        b: jax.Array
        a: jax.Array

    pm.save(tmp_path / "one", [One(ramp(2), ramp(2, start=ramp(1)[0]))])
    two, _ = pm.load(tmp_path / "one", [Two(ramp(2), ramp(2))], strict=False)

    assert_same([two[0].a, two[0].b], [ramp(2), ramp(2, start=ramp(1)[0])])


def test_a_class_of_other_meaning_and_the_same_leaves_is_refused(tmp_path):
    pm.save(tmp_path / "norm", [nn.LayerNorm(3)])
    with pytest.raises(FileError, match=r"like has pytreemod.nn.BatchNorm, the file .*LayerNorm"):
        pm.load(tmp_path / "norm", [pm.make_with_state(nn.BatchNorm)(3)[0]])


def test_missing_leaves_are_kept_or_an_error(saved):
    like = {"old": mlp(1), "new": ramp(2)}
    rename = {"": "old"}
    with pytest.raises(FileError, match="new: missing"):
        pm.load(saved, like, rename=rename)
    loaded, report = pm.load(saved, like, strict=False, rename=rename)
    assert_same(loaded, {"old": mlp(0), "new": ramp(2)})
    assert report.missing == ("new",)
    assert report.renamed[0] == ("old.layers.0.weight", "layers.0.weight")
    with pytest.raises(FileError, match="new: missing"):
        pm.load(saved, like, strict=False, rename=rename, missing="error")
    assert_same(
        pm.load(saved, like, rename=rename, missing=pm.by({"new": "keep", ...: "error"})), loaded
    )


def test_unexpected_leaves_are_told(saved):
    pm.save(saved, {"layers": list(mlp(0).layers)})
    like = {"layers": [mlp(1).layers[0]]}
    with pytest.raises(
        FileError, match=r"(?s)layers.1.weight: unexpected.*layers.1.bias"
    ) as caught:
        pm.load(saved, like)
    # Nothing is missing that they could be meant to be.
    assert "rename" not in str(caught.value)
    _, report = pm.load(saved, like, strict=False)
    assert report.unexpected == ("layers.1.weight", "layers.1.bias")


def test_what_has_no_leaves_fits_as_far_as_there_are_any(saved):
    """Where nothing could be loaded, nothing was meant to be."""
    like, report = pm.load(saved, {}, strict=False)
    assert (like, len(report.unexpected)) == ({}, 4)
    pm.save(saved, {})
    _, report = pm.load(saved, mlp(1), strict=False)
    assert (report.loaded, len(report.missing)) == ((), 4)


def test_a_leaf_of_another_shape_is_kept_if_that_was_said(saved):
    like = nn.MLP(3, 5, 4, 1, key=jax.random.key(1))
    with pytest.raises(
        FileError, match=r"layers.1.weight: like has f32\[5,4\], the file f32\[2,4\]"
    ):
        pm.load(saved, like, strict=False)
    rules = pm.by({"layers.1": "keep", ...: "error"})
    loaded, report = pm.load(saved, like, strict=False, missing=rules)

    assert report.missing == ("layers.1.weight", "layers.1.bias")
    assert_same(loaded.layers[0], mlp(0).layers[0])
    assert_same(loaded.layers[1].weight, like.layers[1].weight)
    assert "out_size: like has 5, the file 2" in report.configuration


def test_the_hint_for_another_shape_names_the_place(tmp_path):
    """At any depth of the layer: the line can be used unchanged."""
    pm.save(tmp_path / "file", {"model": mlp(0)})
    like = {"model": pm.tree_at("layers.1", mlp(1), nn.Linear(4, 5, key=jax.random.key(2)))}
    rule = 'missing=pm.by({"model.layers.1.**": "keep", ...: "error"})'
    with pytest.raises(FileError, match=re.escape(rule)):
        pm.load(tmp_path / "file", like, strict=False)

    rules = pm.by({"model.layers.1.**": "keep", ...: "error"})
    loaded, _ = pm.load(tmp_path / "file", like, strict=False, missing=rules)
    assert_same(loaded["model"].layers[1], like["model"].layers[1])
    assert_same(loaded["model"].layers[0], mlp(0).layers[0])


def test_axes_of_size_one_may_differ_if_not_strict(tmp_path):
    pm.save(tmp_path / "file", {"b": ramp(3)})
    like = {"b": ramp(3, 1)}
    with pytest.raises(FileError, match=r"f32\[3,1\], the file f32\[3\]"):
        pm.load(tmp_path / "file", like)
    loaded, report = pm.load(tmp_path / "file", like, strict=False)
    assert_same(loaded, {"b": ramp(3).reshape(3, 1)})
    assert report.reshaped == ("b",)


def test_only_loads_what_was_chosen_and_asks_nothing_of_the_rest(saved):
    like = nn.MLP(3, 5, 4, 1, key=jax.random.key(1))
    loaded, report = pm.load(saved, like, strict=False, only="layers.0")

    assert report.loaded == ("layers.0.weight", "layers.0.bias")
    assert not report.unexpected
    assert_same(loaded.layers[0], mlp(0).layers[0])
    assert loaded.layers[1] == like.layers[1]
    # Strictly as well: the configuration of other parts does not matter.
    other = nn.Sequential([nn.Linear(3, 4, key=jax.random.key(1)), nn.Dropout(0.3)])
    pm.save(saved, nn.Sequential([nn.Linear(3, 4, key=jax.random.key(2)), nn.Dropout(0.1)]))
    assert pm.load(saved, other, only="layers.0")[1].p == 0.3
    with pytest.raises(FileError, match=r"like has 0.3, the file 0.1"):
        pm.load(saved, other)


def test_cast_takes_a_dtype_or_a_rule(tmp_path):
    tree = {"a": ramp(2), "b": ramp(2), "n": jnp.arange(3)}
    pm.save(tmp_path / "file", tree)
    loaded, report = pm.load(tmp_path / "file", tree, strict=False, cast="bfloat16")
    assert [leaf.dtype.name for leaf in loaded.values()] == ["bfloat16", "bfloat16", "int32"]
    assert report.cast == ("a", "b")
    by = pm.by({"a": jnp.float16, ...: None})
    loaded, report = pm.load(tmp_path / "file", tree, strict=False, cast=by)
    assert report.cast == ("a",)
    assert not pm.load(tmp_path / "file", tree, strict=False, cast="float32")[1].cast
    assert [leaf.dtype.name for leaf in loaded.values()] == ["float16", "float32", "int32"]
    # From a file in another precision into the model's own.
    half = jax.tree.map(lambda x: x.astype("bfloat16"), {"a": ramp(2)})
    pm.save(tmp_path / "half", half)
    with pytest.raises(
        FileError, match=r"(?s)like has f32\[2\], the file bf16\[2\] .*cast=\"float32\""
    ):
        pm.load(tmp_path / "half", {"a": ramp(2)})
    assert_same(pm.load(tmp_path / "half", {"a": ramp(2)}, cast="float32"), {"a": ramp(2)})


def test_no_cast_makes_counts_of_weights(tmp_path):
    """A cast to the file's kind stored floating numbers in integer leaves."""
    pm.save(tmp_path / "file", {"a": ramp(2)})
    with pytest.raises(FileError, match=r"a: like has i32\[2\], the file f32\[2\]"):
        pm.load(tmp_path / "file", {"a": jnp.arange(2)}, cast="bfloat16")
    pm.save(tmp_path / "file", {"a": jnp.asarray([True, False])})
    with pytest.raises(FileError, match=r"a: like has i32\[2\], the file bool\[2\]"):
        pm.load(tmp_path / "file", {"a": jnp.arange(2)}, cast="int8")


def test_keys_are_not_cast(tmp_path):
    """Their numbers are whole ones, and no more than that."""
    pm.save(tmp_path / "file", {"key": jax.random.key(7), "n": jnp.arange(2)})
    loaded = pm.load(tmp_path / "file", {"key": jax.random.key(0), "n": jnp.arange(2)}, cast="int8")
    assert_same(loaded, {"key": jax.random.key(7), "n": jnp.arange(2, dtype="int8")})


@pytest.mark.parametrize(
    ("numbers", "dtype", "other", "lost"),
    [
        ([300, 1], "int32", "int8", "300"),
        ([-1, 1], "int32", "uint32", "-1"),
        ([2**32 - 1, 1], "uint32", "int32", "4294967295"),
        ([-3, 1], "int8", "int4", None),
        ([-9, 1], "int8", "int4", "-9"),
        ([-1, 1], "int4", "uint4", "-1"),
        ([5, 1], "int4", "uint4", None),
        ([7e4, 1], "float32", "float16", "70000.0"),
        ([7e4, 1], "float32", "bfloat16", None),
        ([7e4, 1], "float32", "float8_e4m3fn", "70000.0"),
        ([np.inf, np.nan], "float32", "float16", None),
        ([1e300, 1], "complex128", "complex64", r"\(1e\+300\+0j\)"),
    ],
)
def test_a_cast_has_all_numbers_or_is_refused(tmp_path, numbers, dtype, other, lost):
    """A rounded number is valid; infinity, or an overflow, is not."""
    pm.save(tmp_path / "f", {"a": np.asarray(numbers).astype(dtype)})
    like = {"a": np.zeros(2, jnp.dtype(other))}
    if lost is None:
        made = pm.load(tmp_path / "f", like, cast=other)["a"]
        assert made.dtype == other
        np.testing.assert_allclose(made.astype(float), numbers, rtol=0.01)
    else:
        with pytest.raises(
            FileError, match=rf"numbers that {other} can represent, got {lost}\.\n  at a"
        ):
            pm.load(tmp_path / "f", like, cast=other)


def test_a_leaf_is_put_where_the_one_is_that_it_replaces(tmp_path):
    """Of every kind; uncommitted arrays remain uncommitted."""
    tree = {"x": ramp(2), "key": jax.random.key(7), "weak": jnp.asarray(1.0) * 1}
    tree |= {"n": np.float32(2), "int4": jnp.ones(2, jnp.int4)}
    pm.save(tmp_path / "f", tree)
    there = {name: jax.device_put(x, jax.devices()[3]) for name, x in tree.items() if name != "n"}
    found = pm.load(tmp_path / "f", {**there, "n": np.float32(0)})

    assert_same(found, tree)
    assert {name: found[name].devices() for name in there} == {n: {jax.devices()[3]} for n in there}
    assert (found["weak"].weak_type, type(found["n"])) == (True, np.float32)
    for load in (lambda: pm.load(tmp_path / "f", tree), lambda: pm.load(tmp_path / "f")):
        again = load()
        assert not again["x"].committed
        assert again["weak"].weak_type


def test_a_weak_dtype_that_is_no_python_number_is_read_as_strong(tmp_path):
    """A weak float32, saved without x64, is read with x64, where Python's numbers are float64."""
    pm.save(tmp_path / "f", {"weak": jnp.asarray(1.5)})
    with jax.enable_x64(True):
        found = pm.load(tmp_path / "f")["weak"]

    assert_same(found, np.float32(1.5) + jnp.zeros((), jnp.float32))
    assert not found.weak_type


def test_a_traced_like_is_refused(saved):
    """Values that are read in a trace would be constants."""
    with pytest.raises(ArgumentError, match=r"(?s)traced arrays.*at layers.0.*outside of"):
        pm.filter_jit(lambda model: pm.load(saved, model))(mlp(1))
    like = mlp(1)
    assert_same(pm.filter_jit(lambda: pm.load(saved, like))(), mlp(0))


def test_like_may_be_abstract(saved):
    like = pm.filter_eval_shape(mlp, 1)
    assert_same(pm.load(saved, like), mlp(0))
    # Unloaded leaves remain abstract; missing ones have no value.
    part = pm.load(saved, like, only="layers.0")
    assert isinstance(part.layers[1].weight, jax.ShapeDtypeStruct)
    with pytest.raises(FileError, match="new: missing, and like has no value to keep"):
        pm.load(saved, {"old": like, "new": like.layers[0].bias}, strict=False, rename={"": "old"})


def test_numpy_in_like_gives_numpy_and_jax_gives_jax(tmp_path):
    pm.save(tmp_path / "file", {"a": ramp(2), "b": np.ones(2, np.float32)})
    like = {"a": np.zeros(2, np.float32), "b": jnp.zeros(2)}
    loaded = pm.load(tmp_path / "file", like)

    assert isinstance(loaded["a"], np.ndarray)
    assert isinstance(loaded["b"], jax.Array)


def test_numbers_of_python_are_loaded_and_keep_their_kind(tmp_path):
    pm.save(tmp_path / "file", {"rate": 0.1, "n": 3, "on": True})
    like = {"rate": 1.0, "n": 0, "on": False}
    assert pm.load(tmp_path / "file", like) == {"rate": 0.1, "n": 3, "on": True}
    with pytest.raises(FileError, match=r"rate: like has 1, the file 0.1"):
        pm.load(tmp_path / "file", {**like, "rate": 1})
    with pytest.raises(FileError, match=r"rate: like has f32\[\], the file 0.1"):
        pm.load(tmp_path / "file", {**like, "rate": jnp.asarray(1.0)})


def test_keys_of_another_generator_are_refused(tmp_path):
    pm.save(tmp_path / "file", {"key": jax.random.key(0)})
    for other in (jax.random.key(0, impl="rbg"), jax.random.key_data(jax.random.key(0))):
        with pytest.raises(FileError, match=r"key: like has .*, the file keys of threefry2x32"):
            pm.load(tmp_path / "file", {"key": other})
    with pytest.raises(FileError, match=r"key: like has key<fry>\[3\], the file keys of threefry"):
        pm.load(tmp_path / "file", {"key": jax.random.split(jax.random.key(0), 3)})
    pm.save(tmp_path / "numbers", {"key": ramp(2)})
    with pytest.raises(FileError, match=r"key: like has key<fry>\[\], the file f32\[2\]"):
        pm.load(tmp_path / "numbers", {"key": jax.random.key(0)})


def test_a_plain_file_of_other_tools_loads_by_its_names(tmp_path):
    arrays = {
        "layers.0.weight": np.ones((4, 3), np.float32),
        "layers.0.bias": np.zeros(4, np.float32),
    }
    arrays |= {
        "layers.1.weight": np.ones((2, 4), np.float32),
        "layers.1.bias": np.ones(2, np.float32),
    }
    safetensors.numpy.save_file(arrays, tmp_path / "plain", metadata={"format": "np"})
    model = pm.load(tmp_path / "plain", mlp(0))

    assert float(model.layers[1].bias.sum()) == 2.0
    assert_same(
        pm.load(tmp_path / "plain"), {name: jnp.asarray(x) for name, x in sorted(arrays.items())}
    )
    assert pm.read_metadata(tmp_path / "plain") == {"format": "np"}
    # There, keys and Python's numbers are NumPy arrays.
    numbers = {"key": np.asarray([0, 5], np.uint32), "rate": np.asarray(0.5, np.float32)}
    safetensors.numpy.save_file(numbers, tmp_path / "numbers")
    loaded = pm.load(tmp_path / "numbers", {"key": jax.random.key(0), "rate": 1.0})
    assert_same(loaded, {"key": jax.random.key(5), "rate": 0.5})
    for array in (np.ones(1, np.float32), np.asarray(1, np.int32), np.asarray(True)):
        safetensors.numpy.save_file({"rate": array}, tmp_path / "numbers")
        with pytest.raises(FileError, match=r"rate: like has 1\.0, the file"):
            pm.load(tmp_path / "numbers", {"rate": 1.0})


def test_a_run_goes_on_where_it_was(tmp_path):
    """Model, State, streams and the optimizer's state in one file, by name."""
    optimizer = optax.adamw(1e-3)

    def run(seed):
        net = lambda key: nn.Sequential([nn.Linear(3, 3, key=key), nn.BatchNorm(3)])  # noqa: E731
        model, state = pm.make_with_state(net)(jax.random.key(seed))
        return {
            "model": model,
            "state": state,
            "optimizer": optimizer.init(pm.trainable(model)),
            "key": jax.random.key(seed),
        }

    pm.save(tmp_path / "run", run(0))

    assert_same(pm.load(tmp_path / "run", run(1)), run(0))


def test_wide_numbers_need_wide_jax(tmp_path):
    """JAX would make float32 of them without a word."""
    pm.save(tmp_path / "file", {"a": np.ones(2)})
    with pytest.raises(FileError, match=r"like has f32\[2\], the file f64\[2\]"):
        pm.load(tmp_path / "file", {"a": ramp(2)})
    assert pm.load(tmp_path / "file", {"a": np.ones(2)})["a"].dtype == np.float64
    safetensors.numpy.save_file({"a": np.ones(2)}, tmp_path / "plain")
    with pytest.raises(
        FileError, match=r"(?s)dtypes that JAX supports, got f64 at a.*jax_enable_x64"
    ):
        pm.load(tmp_path / "plain")


def test_wide_numbers_of_a_tree_need_wide_jax(tmp_path):
    """As a program wrote it whose JAX has 64 bits."""
    write_described(tmp_path / "file", {"leaf": "a", "is": "jax"}, {"a": np.ones(2)})
    with pytest.raises(FileError, match="dtypes that JAX supports, got f64 at a"):
        pm.load(tmp_path / "file")


def test_a_function_that_nobody_registered_is_likes(tmp_path):
    """Its name is compared, and it is not looked up."""

    def own(x):
        return x

    tree = {"fn": own, "x": ramp(2)}
    pm.save(tmp_path / "file", tree)
    assert pm.load(tmp_path / "file", tree)["fn"] is own


def test_options_without_like_and_unusable_options_are_refused(saved):
    with pytest.raises(ArgumentError, match=r"expected `like`.*, got none"):
        pm.load(saved, strict=False)  # pyright: ignore
    with pytest.raises(ArgumentError, match=r"expected `like`.*, got none"):
        pm.load(saved, cast="float16")  # pyright: ignore
    with pytest.raises(ArgumentError, match='missing: expected "keep", "error"'):
        pm.load(saved, mlp(0), missing="skip")
    for dtype in ("float31", "", 0, False, {"a": "float16"}, "U4", "datetime64[s]", object):
        with pytest.raises(ArgumentError, match="cast: expected a dtype of numbers"):
            pm.load(saved, mlp(0), cast=dtype)
    with pytest.raises(
        ArgumentError, match="cast: expected a dtype that JAX supports, got float64"
    ):
        pm.load(saved, mlp(0), cast="float64")
    for rename in (["a"], {"layers": 3}, {0: "layers"}):
        with pytest.raises(ArgumentError, match="rename: expected a dict of names"):
            pm.load(saved, mlp(0), rename=rename)  # pyright: ignore
    with pytest.raises(SpecError, match=r"layer.0"):
        pm.load(saved, mlp(0), only="layer.0")


def test_what_is_a_part_of_a_file_is_told_with_the_line_to_write(saved):
    """Of the longest table of names, only that: the whole run is there for only the model."""
    pm.save(saved, {"model": mlp(0), "opt_state": {"mu": mlp(0)}, "step": 3})
    hint = 'pm.load(..., rename={"model": ""}, only="**")'
    with pytest.raises(FileError, match=r"the names differ by a prefix") as caught:
        pm.load(saved, mlp(1))
    assert str(caught.value).endswith(hint)
    call = hint.replace("...", "saved, mlp(1)")
    assert_same(eval(call, {"pm": pm, "saved": saved, "mlp": mlp}), mlp(0))
    pm.save(saved, mlp(0))
    with pytest.raises(FileError, match=r'rename=\{"": "model"\}\)$'):
        pm.load(saved, {"model": mlp(1)})


def test_one_leaf_is_told_with_the_line_to_write(tmp_path):
    """It has no name."""
    pm.save(tmp_path / "file", {"w": ramp(2)})
    with pytest.raises(FileError, match=r"(?s)at <root>: missing.*rename=\{\"w\": \"\"\}\)$"):
        pm.load(tmp_path / "file", ramp(2))
    with pytest.raises(FileError, match=r"(?s)at like: <root>.*rename=\{\"w\": \"\"\}\)$"):
        pm.load(tmp_path / "file", ramp(2), strict=False)
    assert_same(pm.load(tmp_path / "file", jnp.zeros(2), rename={"w": ""}), ramp(2))


def test_a_sharding_that_does_not_fit_is_told_with_the_leafs_name(tmp_path):
    """JAX has the reason, and no idea which leaf it was."""
    pm.save(tmp_path / "file", {"a": [ramp(3)]})
    mesh = jax.make_mesh(
        (2,), ("d",), devices=jax.devices()[:2], axis_types=(jax.sharding.AxisType.Explicit,)
    )
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("d"))
    like = {"a": [jax.ShapeDtypeStruct((3,), jnp.float32, sharding=sharding)]}
    with pytest.raises(ArgumentError, match=r"(?s)shardings in like .*got f32\[3\] with .*at a\.0"):
        pm.load(tmp_path / "file", like)


def test_a_class_is_no_like(saved):
    """It would be a leaf, and each leaf of the file an unexpected one."""
    with pytest.raises(ArgumentError, match=r"(?s)got the class MLP.*load\(path, MLP\(\.\.\."):
        pm.load(saved, nn.MLP)


def test_rules_in_a_dict_are_told_to_be_none(saved):
    for option in ("missing", "cast"):
        with pytest.raises(ArgumentError, match=rf"(?s){option}: .*`by`:\n *pm\.by\("):
            pm.load(saved, mlp(1), **{option: {"layers.0": None}})


def test_a_newer_file_is_told(tmp_path):
    write_described(tmp_path / "new", {"list": []}, version=2, pytreemod="9.0")
    with pytest.raises(FileError, match=r"(?s)version 2, written by pytreemod '9.0'.*upgrade"):
        pm.load(tmp_path / "new")


@pytest.mark.parametrize("about", ["[1]", "3", "{}", '{"version": 1}', "nothing"])
def test_what_a_file_says_of_itself_is_not_believed(about, tmp_path):
    """Its checksum is right, for anybody can compute one."""
    entry = {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}
    write_plain(tmp_path / "odd", {"__metadata__": {"pytreemod.tree": about}, "a": entry}, b"abcd")
    for arguments in ((), ({"a": ramp(1)},)):
        with pytest.raises(FileError, match=r"a description that `pm\.save` wrote"):
            pm.load(tmp_path / "odd", *arguments)


def test_a_version_is_a_number(tmp_path):
    write_described(tmp_path / "odd", {"list": []}, version="1")
    with pytest.raises(FileError, match=r"a file of version 1 or lower, got version '1'"):
        pm.load(tmp_path / "odd")


def test_a_file_without_metadata_has_none(tmp_path):
    safetensors.numpy.save_file({"a": np.ones(2)}, tmp_path / "plain")
    assert pm.read_metadata(tmp_path / "plain") is None


def test_nothing_is_half_loaded(tmp_path):
    """Arrays that were read before the damage are not used, including those of NumPy."""
    pm.save(tmp_path / "file", {"a": np.ones(3), "b": ramp(3), "c": 1})
    content = bytearray((tmp_path / "file").read_bytes())
    content[-1] ^= 1
    (tmp_path / "file").write_bytes(content)
    like = {"a": np.zeros(3), "b": jnp.zeros(3), "c": 0}
    with pytest.raises(FileError, match="changed or damaged"):
        pm.load(tmp_path / "file", like)

    assert_same(like, {"a": np.zeros(3), "b": jnp.zeros(3), "c": 0})


def test_what_was_loaded_outlives_the_file(saved):
    model = pm.load(saved, mlp(1))
    saved.write_bytes(b"\0" * saved.stat().st_size)

    assert_same(model, mlp(0))


def test_a_flipped_byte_is_told_with_the_leafs_name(saved):
    data = bytearray(saved.read_bytes())
    data[-1] ^= 1
    saved.write_bytes(data)
    with pytest.raises(FileError, match=r"(?s)changed or damaged.*at layers"):
        pm.load(saved, mlp(1))
    pm.load(saved, mlp(1), verify=False)


@pytest.mark.parametrize("dtype", [">f4", ">i2"])
def test_the_order_of_bytes_is_no_difference(tmp_path, dtype):
    """The error was "like has f32[3], the file f32[3]"; the result has the order of `like`."""
    path, x = tmp_path / "x.safetensors", np.arange(3).astype(dtype)
    pm.save(path, {"x": x})

    found = [
        pm.load(path, {"x": np.zeros_like(x)})["x"],
        pm.from_named({"x": np.zeros_like(x)}, {"x": pm.load(path)["x"]})["x"],
    ]
    for again in found:
        assert again.dtype == x.dtype
        assert again.tolist() == [0, 1, 2]
    native = pm.from_named({"x": jnp.zeros(3, x.dtype.newbyteorder("="))}, {"x": x})["x"]
    assert isinstance(native, jax.Array)
    assert native.tolist() == [0, 1, 2]


def test_a_file_of_other_tools_that_does_not_fit_may_be_of_pytorch(tmp_path):
    """Strictly or not; a file of `save` is never taken for one."""
    like, path = nn.Sequential([mlp(0)]), tmp_path / "file"
    safetensors.numpy.save_file({"module.weight": np.ones((2, 2), "f")}, path)
    for options in ({}, {"strict": False}):
        with pytest.raises(FileError, match="expected") as caught:
            pm.load(path, like, **options)
        assert "pm.from_torch(model, path)" in "".join(caught.value.__notes__)
    pm.save(path, {"module.weight": np.ones((2, 2), "f")})
    with pytest.raises(FileError, match="differences") as caught:
        pm.load(path, like)
    assert not hasattr(caught.value, "__notes__")


def test_an_older_batch_norm_has_the_statistics_that_are_now_called_torchs(tmp_path):
    """They were called mode="batch", and nothing counted the batches; "batch" is Equinox's now."""
    new = pm.make_with_state(nn.BatchNorm)(2, "batch")
    new = (new[0], new[1].set(new[0].state_index, (ramp(2), ramp(2, start=3.0))))
    pm.save(tmp_path / "new", new)
    older = ('"mode":"torch"', '"mode":"batch"'), ('"batch_counter":null,', "")
    write_older(tmp_path / "new", *older)

    like = pm.make_with_state(nn.BatchNorm)(2, "batch")
    loaded = pm.load(tmp_path / "new", like), pm.load(tmp_path / "new")
    relaxed, report = pm.load(tmp_path / "new", like, strict=False)
    assert not report.configuration
    for made in (*loaded, relaxed):
        assert made[0].mode == "torch"
        assert_same(made, new)
    equinoxs = pm.make_with_state(nn.BatchNorm)(2, "batch", mode="batch")
    with pytest.raises(FileError, match=r"0\.mode: like has 'batch', the file 'torch'"):
        pm.load(tmp_path / "new", equinoxs)
