"""`load`: the values of a file in a tree; strictly, by choice, by part; its errors and reports."""

from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy

import pytreemod as pm
from pytreemod import nn
from pytreemod.errors import FileError, SpecError
from tests.helpers.comparing import assert_same
from tests.helpers.meshes import EXPLICIT, MESH, on
from tests.helpers.trees import ramp


def mlp(seed, out=2):
    return nn.MLP(3, out, 4, 1, key=jax.random.key(seed))


@pytest.fixture
def saved(tmp_path):
    pm.save(tmp_path / "model", mlp(0))
    return tmp_path / "model"


def names_in(error):
    lines = [line for line in str(error.value).splitlines() if line.startswith("  at ")]
    return [line.removeprefix("  at ").split(":")[0] for line in lines]


# ---- every kind of leaf

KEY, KEYS = jax.random.key(7), jax.random.split(jax.random.key(1, impl="rbg"), 3)
OTHER_KEYS = jax.random.split(jax.random.key(2, impl="rbg"), 3)
TWO = jnp.broadcast_to(jnp.asarray(2), (2, 3))
LEAVES = {
    "array": (ramp(2, 3), jnp.zeros((2, 3))),
    "bfloat16": (jnp.ones((2, 1), jnp.bfloat16), jnp.zeros((2, 1), jnp.bfloat16)),
    "int4": (jnp.arange(-2, 2).astype("int4"), jnp.zeros(4, "int4")),
    "weak number": (jnp.asarray(2.0), jnp.asarray(1.0)),
    "weak matrix": (TWO, TWO - TWO),
    "key": (KEY, jax.random.key(0)),
    "keys of another generator": (KEYS, OTHER_KEYS),
    "NumPy": (np.arange(6.0).reshape(2, 3).T, np.zeros((3, 2))),
    "NumPy scalar": (np.float64(0.1), np.float64(0)),
    "NumPy without axes": (np.asarray(0.1), np.asarray(0.0)),
    "another byte order": (np.arange(3).astype(">f4"), np.zeros(3, ">f4")),
    "float": (0.1, 1.0),
    "NaN": (float("nan"), 1.0),
    "minus zero": (-0.0, 1.0),
    "int": (-(2**63), 1),
    "unsigned": (2**64 - 1, 1),
    "bool of Python": (True, False),
    "complex of Python": (1j, 0j),
    "text": ("name", "name"),
    "function": (jax.nn.relu, jax.nn.relu),
    "None": (None, None),
}
OF_JAX = [name for name, (leaf, _) in LEAVES.items() if isinstance(leaf, jax.Array)]


def assert_alike(one, other):
    """Bit for bit, of one type, committed or not, and weak or not."""
    assert_same(one, other)
    for name in ("weak_type", "committed"):
        assert getattr(one, name, None) == getattr(other, name, None)


@pytest.mark.parametrize("name", LEAVES)
def test_each_kind_of_leaf_comes_back_as_it_was(name, tmp_path):
    """Also into an abstract tree; a weak one stays weak, an uncommitted one uncommitted."""
    leaf, other = LEAVES[name]
    pm.save(tmp_path / "file", (ramp(2), [leaf]))
    concrete = (ramp(2), [other])
    for like in (concrete, jax.eval_shape(lambda: concrete) if name in OF_JAX else concrete):
        _, found = pm.load(tmp_path / "file", like)
        assert jax.tree.structure(found) == jax.tree.structure([leaf])
        assert_alike(found[0], leaf)


# ---- where arrays are


@pytest.mark.parametrize("mesh", [MESH, EXPLICIT], ids=["auto", "explicit"])
def test_arrays_get_the_shardings_of_like(mesh, tmp_path):
    """Concrete or abstract, weak, or keys; one without stays uncommitted. They are saved whole."""
    tree = {"a": ramp(8, 4), "large": jnp.ones((512, 1024)), "key": jax.random.split(KEY, 8)}
    tree |= {"weak": jnp.broadcast_to(jnp.asarray(2.0), (8,))}
    specs = {"a": on("data", "model", mesh=mesh), "large": on(None, "model", mesh=mesh)}
    specs |= {"key": on("data", mesh=mesh), "weak": on("model", mesh=mesh)}
    pm.save(tmp_path / "file", {"t": tree, "plain": ramp(3)})
    there = jax.device_put(tree, specs)
    pm.save(tmp_path / "many", {"t": there, "plain": ramp(3)})
    assert (tmp_path / "file").read_bytes() == (tmp_path / "many").read_bytes()
    structs = {
        name: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=specs[name], weak_type=name == "weak")
        for name, x in tree.items()
    }

    for like in (there, structs):
        found = pm.load(tmp_path / "file", {"t": like, "plain": jax.eval_shape(lambda: ramp(3))})
        assert {name: x.sharding for name, x in found["t"].items()} == specs
        assert not found["plain"].committed
        for name, x in there.items():
            assert_alike(found["t"][name], x)


def test_a_leaf_is_on_the_device_of_the_one_that_it_replaces(tmp_path):
    """And is committed to it, as that one is; which may be donated."""
    tree = {name: LEAVES[name][0] for name in OF_JAX}
    pm.save(tmp_path / "file", tree)
    there = jax.device_put({name: LEAVES[name][1] for name in OF_JAX}, jax.devices()[3])
    jax.tree.map(lambda leaf: leaf.delete(), there)
    found = pm.load(tmp_path / "file", there)

    assert_same(found, tree)
    assert all(x.committed and x.devices() == {jax.devices()[3]} for x in found.values())


def test_arrays_are_of_the_library_that_like_has(tmp_path):
    """Whatever the file was written from; NumPy's are the reader's own."""
    pm.save(tmp_path / "file", {"a": ramp(2), "b": np.ones(2, np.float32)})
    like = {"a": np.zeros(2, np.float32), "b": jnp.zeros(2)}
    pm.load(tmp_path / "file", like)["a"][0] = 5.0

    assert_same(pm.load(tmp_path / "file", like), {"a": np.asarray(ramp(2)), "b": jnp.ones(2)})


# ---- one error lists all differences


def test_all_differences_are_told_at_once(tmp_path):
    """Shapes, dtypes, keys, missing and unexpected leaves, configuration: by name."""
    tree = {"net": mlp(0), "rate": jnp.ones(2), "old": ramp(1), "key": KEY, "act": jax.nn.relu}
    like = {"net": mlp(1, 5), "rate": jnp.ones(2, "bfloat16"), "new": ramp(1), "key": KEYS}
    pm.save(tmp_path / "file", tree)
    with pytest.raises(FileError, match="9 differences") as error:
        pm.load(tmp_path / "file", {**like, "act": jax.nn.gelu})

    layer = [f"net.layers.1.{name}" for name in ("bias", "out_features", "weight")]
    assert sorted(names_in(error)) == sorted(
        [*layer, "net.out_size", "rate", "old", "new", "key", "act"]
    )
    assert "rate: expected bf16[2], got f32[2] (see cast=)" in str(error.value)
    assert "net.layers.1.weight: expected f32[5,4], got f32[2,4]\n" in str(error.value)
    assert "act: expected gelu, got relu" in str(error.value)


def test_wrong_shapes_do_not_fit_strict_or_not(saved):
    """For what is missing or unexpected, the error tells the call that loads the rest."""
    with pytest.raises(FileError, match=r"layers\.1\.weight") as error:
        pm.load(saved, mlp(1, 5), strict=False)
    assert names_in(error) == ["layers.1.weight", "layers.1.bias"]
    assert "strict=False" not in str(error.value)
    with pytest.raises(FileError, match=r"at layers\.1\.bias: unexpected(?s:.*)strict=False"):
        pm.load(saved, {"layers": [mlp(1).layers[0]]})


def test_nothing_is_half_loaded(tmp_path):
    """An error in the last array leaves all of NumPy's arrays in `like` as they were."""

    def fail(x):
        return x / 0 if x.any() else x

    pm.save(tmp_path / "file", {"a": np.ones(3), "b": np.ones(3)})
    like = {"a": np.zeros(3), "b": np.zeros(3)}
    with pytest.raises(FloatingPointError, match="divide"), np.errstate(all="raise"):
        pm.load(tmp_path / "file", like, rename={"b": ("b", fail)})
    assert_same(like, {"a": np.zeros(3), "b": np.zeros(3)})


def test_to_load_nothing_is_a_mistake_strict_or_not(tmp_path):
    """The model would be unchanged, with all its initial numbers."""
    pm.save(tmp_path / "file", {"run": {"model": mlp(0)}})
    with pytest.raises(FileError, match=r"at run\.model\.layers\.0\.weight: unexpected"):
        pm.load(tmp_path / "file", mlp(1), strict=False)


NUMBERS = [(0.7, 1), (1.0, True), (3, 1.0), (True, 1), (1, True), (0.5, ramp(1)[0]), (1j, 1.0)]
OF_KEYS = [
    (KEY, jax.random.key(0, impl="rbg")),
    (KEY, jax.random.key_data(KEY)),
    (jax.random.key_data(KEY), KEY),
    (KEY, jax.random.split(KEY)),
]


@pytest.mark.parametrize(("leaf", "other"), [*NUMBERS, *OF_KEYS, (np.ones(2), ramp(2))])
def test_a_leaf_of_another_kind_is_refused(leaf, other, tmp_path):
    """A float once became an int, and keys are of one generator; JAX would narrow wide numbers."""
    pm.save(tmp_path / "file", {"x": leaf})
    with pytest.raises(FileError, match=r"at x: expected .*, got "):
        pm.load(tmp_path / "file", {"x": other})


# ---- not strict


def test_missing_leaves_are_kept_and_unexpected_ones_left(tmp_path):
    """The report names what was loaded, renamed, cast, missing, unexpected, and differs."""
    pm.save(tmp_path / "file", {"a": ramp(2), "b": ramp(2) + 2, "c": ramp(1), "n": nn.Dropout(0.5)})
    kept = {"new": ramp(3), "n": nn.Dropout(0.1)}
    like = {"a": ramp(2, start=-5), "z": jnp.zeros(2, "float16"), **kept}
    options = {"strict": False, "rename": {"b": "z"}, "cast": "float16"}
    loaded, report = pm.load(tmp_path / "file", like, **options)

    half = {"a": jnp.asarray([1, 2], "float16"), "z": jnp.asarray([3, 4], "float16")}
    assert_same(loaded, half | kept)
    assert vars(report) == {
        "loaded": ["a", "z"],
        "renamed": ["z <- b"],
        "cast": ["a", "z"],
        "missing": ["new"],
        "unexpected": ["c"],
        "configuration": ["n.p: expected 0.1, got 0.5"],
    }
    assert all(text in repr(report) for text in ("2 loaded", "z <- b", "1 missing", "n.p"))
    ten = pm.LoadReport(list("abcdefghij"))
    assert (" more" in repr(ten), repr(pm.LoadReport([*ten.loaded, "k"]))[-6:]) == (False, "1 more")


def test_what_is_abstract_and_missing_is_an_error(saved):
    """There is no value to keep; what is not selected stays abstract."""
    like = pm.filter_eval_shape(lambda: {"layers": [*mlp(1).layers], "new": ramp(2)})
    for strict in (True, False):
        with pytest.raises(FileError, match="at new: ") as error:
            pm.load(saved, like, strict=strict)
        assert names_in(error) == ["new"]
    part = pm.load(saved, like, only="layers.0")
    assert_same(part["layers"][0], mlp(0).layers[0])
    assert isinstance(part["layers"][1].weight, jax.ShapeDtypeStruct)


# ---- a part


def test_only_loads_what_was_chosen(saved):
    """All other leaves are those of `like`; what differs there does not matter."""
    like = mlp(1, 5)
    loaded, report = pm.load(saved, like, strict=False, only="layers.0")

    assert report.loaded == ["layers.0.weight", "layers.0.bias"]
    assert not [*report.missing, *report.unexpected, *report.configuration]
    assert_same(loaded, like.replace(layers=(mlp(0).layers[0], like.layers[1])))
    assert_same(pm.load(saved, like, only="layers.0"), loaded)
    with pytest.raises(FileError, match=r"at layers\.1\.weight"):
        pm.load(saved, like, only="layers.1")
    with pytest.raises(SpecError, match="layer"):
        pm.load(saved, like, only="layer.0")


@pytest.mark.parametrize("hold", [list, lambda x: dict(zip("ab", x))], ids=["list", "dict"])
def test_configuration_counts_in_the_selection_alone(hold, tmp_path):
    """Of the Modules whose leaves are loaded; in a list, too."""

    def noisy(seed, p):
        return {"linear": nn.Linear(2, 2, key=jax.random.key(seed)), "drop": nn.Dropout(p)}

    pm.save(tmp_path / "file", hold([noisy(0, 0.1), noisy(1, 0.1)]))
    first = "[0]" if hold is list else "a"
    like = hold([noisy(2, 0.1), noisy(3, 0.3)])
    assert_same(pm.load(tmp_path / "file", like, only=first), hold([noisy(0, 0.1), noisy(3, 0.3)]))
    with pytest.raises(FileError, match=r"drop\.p: expected 0\.3, got 0\.1"):
        pm.load(tmp_path / "file", hold([noisy(2, 0.3), noisy(3, 0.1)]), only=first)


# ---- casts


@pytest.mark.parametrize(
    ("cast", "dtypes", "changed"),
    [
        ("bfloat16", ["bfloat16", "bfloat16", "int32", "bfloat16"], ["a", "weak", "np"]),
        (jnp.float32, ["float32", "float32", "int32", "float32"], ["np"]),
        ("int8", ["float32", "float32", "int8", "float64"], ["n"]),
        (pm.by({"a": jnp.float16, ...: None}), ["float16", "float32", "int32", "float64"], ["a"]),
    ],
    ids=["bfloat16", "float32", "int8", "by"],
)
def test_cast_takes_a_dtype_or_a_rule(tmp_path, cast, dtypes, changed):
    """For arrays of its kind, of JAX and of NumPy; keys and Python's numbers stay as they are."""
    tree = {"a": ramp(2), "weak": jnp.asarray(2.0), "n": jnp.arange(3), "np": np.asarray([1.0, 2])}
    tree |= {"key": KEY, "step": 3, "rate": 0.1, "on": True}
    pm.save(tmp_path / "file", tree)
    loaded, report = pm.load(tmp_path / "file", tree, strict=False, cast=cast)

    for (name, leaf), dtype in zip(tree.items(), dtypes, strict=False):
        assert_same(loaded[name], leaf.astype(dtype))
    assert sorted(report.cast) == sorted(changed)
    others = [name for name in tree if name not in changed]
    assert_same([loaded[name] for name in others], [tree[name] for name in others])


OTHERS = [(ramp(2), jnp.arange(2), "bfloat16"), (ramp(2), jnp.arange(2), "int32")]
OTHERS += [(jnp.asarray([True, False]), jnp.arange(2), "int8"), (jnp.arange(2), ramp(2), "float32")]


@pytest.mark.parametrize(("found", "like", "cast"), OTHERS)
def test_no_cast_makes_another_kind(tmp_path, found, like, cast):
    """Counts of weights, or weights of counts."""
    pm.save(tmp_path / "file", {"a": found})
    with pytest.raises(FileError, match="at a: "):
        pm.load(tmp_path / "file", {"a": like}, cast=cast)


@pytest.mark.parametrize(
    ("numbers", "dtype", "cast", "is_lost"),
    [
        ([300, 1], "int32", "int8", True),
        ([-1, 1], "int32", "uint32", True),
        ([-9, 1], "int8", "int4", True),
        ([5, 1], "int4", "int8", False),
        ([7e4, 1], "float32", "float16", True),
        ([7e4, 1], "float32", "bfloat16", False),
        ([np.inf, np.nan], "float32", "float16", False),
        ([1e300, 1], "complex128", "complex64", True),
    ],
)
def test_a_cast_has_all_numbers_or_is_refused(tmp_path, numbers, dtype, cast, is_lost):
    """A rounded number is valid; another one, or infinity in its place, is not."""
    pm.save(tmp_path / "file", {"a": np.asarray(numbers).astype(dtype)})
    like = {"a": np.zeros(2, jnp.dtype(cast))}
    if is_lost:
        with pytest.raises(FileError, match=f"a has numbers that {cast}"):
            pm.load(tmp_path / "file", like, cast=cast)
    else:
        made = pm.load(tmp_path / "file", like, cast=cast)["a"]
        assert made.dtype == cast
        np.testing.assert_allclose(made.astype(float), numbers, rtol=0.01)


# ---- other tools, and threads


def test_a_plain_file_of_other_tools_loads_by_its_names(tmp_path):
    """Into a model, or as a dict; it says nothing of configuration, and none is compared."""
    arrays = {f"net.layers.{i}.bias": np.full(n, i, "f") for i, n in ((0, 4), (1, 2))}
    arrays |= {f"net.layers.{i}.weight": np.ones(n, "f") for i, n in ((0, (4, 3)), (1, (2, 4)))}
    safetensors.numpy.save_file(arrays, tmp_path / "plain", metadata={"format": "np"})
    like = {"net": mlp(0), "noise": nn.Dropout(0.5), "act": nn.Lambda(jax.nn.relu)}
    found = pm.named_leaves(pm.load(tmp_path / "plain", like))

    assert_same({name: np.asarray(found[name]) for name in arrays}, arrays)
    assert_same(pm.load(tmp_path / "plain"), arrays)


def test_several_loads_and_saves_at_once_are_right(tmp_path):
    """Each thread gets the numbers of its file; one file that all replace is always whole."""
    trees = [{"a": jnp.full((64, 64), i, "float32"), "b": [ramp(3) + i]} for i in range(6)]

    def work(number):
        for path in [tmp_path / f"{number}", tmp_path / "shared"] * 5:
            pm.save(path, trees[number])
            found = pm.load(path, trees[0])
            fits = trees if path.name == "shared" else [trees[number]]
            assert any(pm.tree_equal(found, tree) for tree in fits)

    with ThreadPoolExecutor(6) as pool:
        list(pool.map(work, range(6)))
    assert len([*tmp_path.iterdir()]) == 7
