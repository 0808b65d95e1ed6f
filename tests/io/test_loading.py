"""`load`: strictly, by choice, by part; from plain files, into abstract trees; its errors."""

import jax
import jax.numpy as jnp
import numpy as np
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
from tests.io.files import write_described, write_plain


def mlp(seed, **options):
    """A small model."""
    return nn.MLP(3, 2, 4, 1, key=jax.random.key(seed), **options)


@pytest.fixture
def saved(tmp_path):
    """A file with `mlp(0)` in it."""
    pm.save(tmp_path / "model", mlp(0), {"step": 1})
    return tmp_path / "model"


def test_all_differences_are_told_at_once(saved):
    """Leaves and configuration, by path."""
    like = nn.MLP(3, 2, 5, 1, activation=jax.nn.gelu, key=jax.random.key(0))
    with pytest.raises(FileError, match="7 differences") as caught:
        pm.load(saved, like)

    assert [line for line in str(caught.value).splitlines() if line.startswith("  at ")] == [
        "  at layers.0.weight: like has f32[5,3], the file f32[4,3]",
        "  at layers.0.bias: like has f32[5], the file f32[4]",
        "  at layers.1.weight: like has f32[2,5], the file f32[2,4]",
        "  at activation: like has jax.nn.gelu, the file jax.nn.relu",
        "  at width_size: like has 5, the file 4",
        "  at layers.0.out_features: like has 5, the file 4",
        "  at layers.1.in_features: like has 5, the file 4",
    ]


def test_to_load_nothing_is_a_mistake(tmp_path):
    """The model would be unchanged, with all its initial numbers."""
    like = mlp(1)
    pm.save(tmp_path / "file", {"run": {"model": mlp(0)}})
    with pytest.raises(FileError, match=r"run\.model"):
        pm.load(tmp_path / "file", like, strict=False)

    # With `missing`, the choice was explicit.
    kept, report = pm.load(tmp_path / "file", like, strict=False, missing="keep")
    assert_same(kept, like)
    assert not report.loaded


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
    """The names and shapes of two layers may agree."""
    pm.save(tmp_path / "norm", [nn.LayerNorm(3)])
    with pytest.raises(FileError, match=r"like has pytreemod.nn.BatchNorm, the file .*LayerNorm"):
        pm.load(tmp_path / "norm", [pm.make_with_state(nn.BatchNorm)(3)[0]])


def test_missing_leaves_are_kept_or_an_error(saved):
    """An error if strict, and else a line of the report."""
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
    """A leaf of the file that `like` lacks is an error if strict."""
    pm.save(saved, {"layers": list(mlp(0).layers)})
    like = {"layers": [mlp(1).layers[0]]}
    with pytest.raises(FileError, match=r"(?s)layers.1.weight: unexpected.*layers.1.bias"):
        pm.load(saved, like)
    _, report = pm.load(saved, like, strict=False)
    assert report.unexpected == ("layers.1.weight", "layers.1.bias")


def test_a_leaf_of_another_shape_is_kept_if_that_was_said(saved):
    """Else it is an error, strict or not."""
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


def test_only_loads_what_was_chosen_and_asks_nothing_of_the_rest(saved):
    """All other leaves are those of `like`."""
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
    """For floating arrays alone, and from the file's precision into the model's."""
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
        ([-9, 1], "int8", "int4", "-9"),
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
        with pytest.raises(FileError, match=lost):
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
    with pytest.raises(ArgumentError, match=r"layers\.0"):
        pm.filter_jit(lambda model: pm.load(saved, model))(mlp(1))
    like = mlp(1)
    assert_same(pm.filter_jit(lambda: pm.load(saved, like))(), mlp(0))


def test_like_may_be_abstract(saved):
    """Then only the arrays of the file are in memory."""
    like = pm.filter_eval_shape(mlp, 1)
    assert_same(pm.load(saved, like), mlp(0))
    # Unloaded leaves remain abstract; missing ones have no value.
    part = pm.load(saved, like, only="layers.0")
    assert isinstance(part.layers[1].weight, jax.ShapeDtypeStruct)
    with pytest.raises(FileError, match="new: missing, and like has no value to keep"):
        pm.load(saved, {"old": like, "new": like.layers[0].bias}, strict=False, rename={"": "old"})


def test_numpy_in_like_gives_numpy_and_jax_gives_jax(tmp_path):
    """Whatever the file was written from."""
    pm.save(tmp_path / "file", {"a": ramp(2), "b": np.ones(2, np.float32)})
    like = {"a": np.zeros(2, np.float32), "b": jnp.zeros(2)}
    loaded = pm.load(tmp_path / "file", like)

    assert isinstance(loaded["a"], np.ndarray)
    assert isinstance(loaded["b"], jax.Array)


def test_numbers_of_python_are_loaded_and_keep_their_kind(tmp_path):
    """A float is no int, and no array."""
    pm.save(tmp_path / "file", {"rate": 0.1, "n": 3, "on": True})
    like = {"rate": 1.0, "n": 0, "on": False}
    assert pm.load(tmp_path / "file", like) == {"rate": 0.1, "n": 3, "on": True}
    with pytest.raises(FileError, match=r"rate: like has 1, the file 0.1"):
        pm.load(tmp_path / "file", {**like, "rate": 1})
    with pytest.raises(FileError, match=r"rate: like has f32\[\], the file 0.1"):
        pm.load(tmp_path / "file", {**like, "rate": jnp.asarray(1.0)})


def test_keys_of_another_generator_are_refused(tmp_path):
    """Their numbers would draw others."""
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
    """Into a model, or as a dict of arrays."""
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


def test_wide_numbers_need_wide_jax(tmp_path):
    """JAX would make float32 of them without a word."""
    pm.save(tmp_path / "file", {"a": np.ones(2)})
    with pytest.raises(FileError, match=r"like has f32\[2\], the file f64\[2\]"):
        pm.load(tmp_path / "file", {"a": ramp(2)})
    assert pm.load(tmp_path / "file", {"a": np.ones(2)})["a"].dtype == np.float64
    safetensors.numpy.save_file({"a": np.ones(2)}, tmp_path / "plain")
    with pytest.raises(FileError, match="f64"):
        pm.load(tmp_path / "plain")


@pytest.mark.parametrize("about", ["[1]", "3", "{}", '{"version": 1}', "nothing"])
def test_what_a_file_says_of_itself_is_not_believed(about, tmp_path):
    """Its checksum is right, for anybody can compute one."""
    entry = {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}
    write_plain(tmp_path / "odd", {"__metadata__": {"pytreemod.tree": about}, "a": entry}, b"abcd")
    for arguments in ((), ({"a": ramp(1)},)):
        with pytest.raises(FileError, match="odd"):
            pm.load(tmp_path / "odd", *arguments)


@pytest.mark.parametrize("version", [2, "1"])
def test_a_newer_file_is_refused(tmp_path, version):
    """It may mean something else by the same words."""
    write_described(tmp_path / "new", {"list": []}, version=version, pytreemod="9.0")
    with pytest.raises(FileError, match=r"9\.0"):
        pm.load(tmp_path / "new")


@pytest.mark.parametrize(
    ("options", "error", "word"),
    [
        ({"missing": "skip"}, ArgumentError, "missing"),
        ({"cast": "float31"}, ArgumentError, "cast"),
        ({"cast": "U4"}, ArgumentError, "cast"),
        ({"cast": "float64"}, ArgumentError, "float64"),
        ({"only": "layer.0"}, SpecError, "layer"),
    ],
)
def test_options_that_choose_nothing_are_refused(saved, options, error, word):
    """A misspelled one would load something else; and options without `like` are for nothing."""
    with pytest.raises(error, match=word):
        pm.load(saved, mlp(0), **options)
    with pytest.raises(ArgumentError, match="like"):
        pm.load(saved, **options)


def test_a_file_without_metadata_has_none(tmp_path):
    """A file of other tools may have no texts."""
    safetensors.numpy.save_file({"a": np.ones(2)}, tmp_path / "plain")
    assert pm.read_metadata(tmp_path / "plain") is None


def test_nothing_is_half_loaded(tmp_path):
    """Arrays that were read before the damage are not used, including those of NumPy."""
    pm.save(tmp_path / "file", {"a": np.ones(3), "b": ramp(3), "c": 1})
    content = bytearray((tmp_path / "file").read_bytes())
    content[-1] ^= 1
    (tmp_path / "file").write_bytes(content)
    like = {"a": np.zeros(3), "b": jnp.zeros(3), "c": 0}
    with pytest.raises(FileError, match="file"):
        pm.load(tmp_path / "file", like)

    assert_same(like, {"a": np.zeros(3), "b": jnp.zeros(3), "c": 0})


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
