"""Files of older versions of a class."""

from __future__ import annotations

import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pytreemod as pm
from pytreemod import nn
from pytreemod.errors import ArgumentError, FieldError, FileError
from tests.helpers.comparing import assert_same
from tests.helpers.trees import ramp
from tests.io.files import write_described


def old_net(**options):
    """Version 1: one matrix, a width."""

    class Net(pm.Module, **options):
        both: jax.Array
        width: int = pm.field(static=True)

        def __call__(self, x):
            return x

    return Net


def new_net(version=2):
    """Version 2 and above: two matrices, and the width is called size."""

    class Net(pm.Module, file_version=version):
        key: jax.Array
        value: jax.Array
        size: int = pm.field(static=True)

        def __call__(self, x):
            return x

    return Net


def split(arrays, config):
    arrays["key"], arrays["value"] = np.split(arrays.pop("both"), 2, axis=-1)
    config["size"] = config.pop("width")
    return arrays, config


def zeros(cls, *lead):
    return cls(jnp.zeros((*lead, 2)), jnp.zeros((*lead, 2)), 4)


def test_an_older_file_is_migrated_wherever_the_module_is(tmp_path):
    old, new = old_net(), new_net()
    assert pm.migration(new, 1)(split) is split
    tree = {"a": old(ramp(4), 4), "b": [old(ramp(4) + 1, 4), 7]}
    pm.save(tmp_path / "old", tree)
    like = {"a": zeros(new), "b": [zeros(new), 0]}
    loaded = pm.load(tmp_path / "old", like)

    assert_same(loaded["a"], new(ramp(4)[:2], ramp(4)[2:], 4))
    assert_same(loaded["b"][0], new(ramp(4)[:2] + 1, ramp(4)[2:] + 1, 4))
    assert loaded["b"][1] == 7
    _, report = pm.load(tmp_path / "old", like, strict=False)
    assert sorted(report.migrated) == [
        "a: Net, from version 1 to 2",
        "b.0: Net, from version 1 to 2",
    ]
    # A file of today's needs none of that, and says its version.
    pm.save(tmp_path / "new", loaded)
    assert_same(pm.load(tmp_path / "new", like), loaded)
    _, report = pm.load(tmp_path / "new", like, strict=False)
    assert report.migrated == ()


def test_migrations_are_applied_in_order(tmp_path):
    old, new = old_net(), new_net(4)
    pm.save(tmp_path / "old", old(ramp(4), 4))
    calls = []

    @pm.migration(new, 2)
    def second(arrays, config):
        calls.append(2)
        return arrays, config

    @pm.migration(new, 1)
    def first(arrays, config):
        calls.append(1)
        return split(arrays, config)

    @pm.migration(new, 3)
    def third(arrays, config):
        calls.append(3)
        # Read-only, because unchanged arrays belong to the file.
        with pytest.raises(ValueError, match="read-only"):
            arrays["key"][0] = 1
        return {**arrays, "key": arrays["key"] * 2}, config

    loaded = pm.load(tmp_path / "old", zeros(new))
    assert calls == [1, 2, 3]
    assert_same(loaded, new(ramp(4)[:2] * 2, ramp(4)[2:], 4))


def test_in_a_stack_and_an_ensemble_it_is_called_once_with_stacked_arrays(tmp_path):
    old, new = old_net(), new_net()
    shapes = []

    @pm.migration(new, 1)
    def migrate(arrays, config):
        shapes.append(arrays["both"].shape)
        return split(arrays, config)

    def make(cls, start):
        return lambda key: cls(*(jnp.full(n, start) for n in ((4,) if cls is old else (2, 2))), 4)

    for several, n in ((nn.Stack, 3), (nn.Ensemble, 3)):
        shapes.clear()
        pm.save(tmp_path / "old", several(make(old, 2.0), n, key=jax.random.key(0)))
        loaded = pm.load(tmp_path / "old", several(make(new, 0.0), n, key=jax.random.key(0)))
        assert shapes == [(3, 4)]
        assert_same(loaded, several(make(new, 2.0), n, key=jax.random.key(0)))
    # Migrated in the form of the file, and then stacked.
    shapes.clear()
    pm.save(tmp_path / "list", [old(ramp(4), 4)] * 3)
    loaded = pm.load(tmp_path / "list", nn.Stack(make(new, 0.0), 3, key=jax.random.key(0)))
    assert shapes == [(4,)] * 3
    assert_same(loaded.layer.key, jnp.stack([ramp(4)[:2]] * 3))


def test_what_is_inside_is_migrated_first(tmp_path):
    old, new = old_net(), new_net()
    pm.migration(new, 1)(split)

    def holder(**options):
        class Holder(pm.Module, **options):
            net: pm.Module

        return Holder

    pm.save(tmp_path / "old", holder()(old(ramp(4), 4)))
    outer = holder(file_version=2)
    seen = []

    @pm.migration(outer, 1)
    def migrate(arrays, config):
        seen.append((sorted(arrays), dict(config)))
        return arrays, config

    loaded = pm.load(tmp_path / "old", outer(zeros(new)))
    assert seen == [(["net.key", "net.value"], {"net.size": 4})]
    assert_same(loaded.net, new(ramp(4)[:2], ramp(4)[2:], 4))


def test_what_is_only_moved_may_be_cast_as_ever(tmp_path):
    """It belongs to the file, under any name, though it was read."""

    class Net(pm.Module, file_version=2):
        weight: jax.Array
        width: int = pm.field(static=True)

    @pm.migration(Net, 1)
    def migrate(arrays, config):
        assert arrays["both"].shape == (4,)
        assert len(arrays) == 1
        return {"weight": arrays["both"]}, config

    pm.save(tmp_path / "old", old_net()(ramp(4), 4))
    like = Net(jnp.zeros(4, jnp.bfloat16), 4)
    with pytest.raises(
        FileError, match=r"weight: like has bf16\[4\], the file f32\[4\] \(see cast="
    ):
        pm.load(tmp_path / "old", like)
    loaded = pm.load(tmp_path / "old", like, cast="bfloat16")
    assert_same(loaded.weight, ramp(4).astype(jnp.bfloat16))


def test_keys_numbers_and_functions_go_along(tmp_path):
    class Net(pm.Module):
        noise: jax.Array
        rate: float
        activation: object

    pm.save(tmp_path / "old", Net(jax.random.key(3), 0.5, lambda x: x))

    class Net(pm.Module, file_version=2):
        key: jax.Array
        speed: float
        half: jax.Array
        activation: object

    @pm.migration(Net, 1)
    def migrate(arrays, config):
        arrays["key"] = arrays.pop("noise")
        arrays["speed"] = arrays.pop("rate") * 2
        arrays["half"] = jnp.ones(2, jnp.bfloat16)
        assert set(config) == {"activation"}
        return arrays, config

    like = Net(jax.random.key(0), 0.0, jnp.zeros(2, jnp.bfloat16), lambda x: x)
    loaded = pm.load(tmp_path / "old", like)
    assert_same(jax.random.key_data(loaded.key), jax.random.key_data(jax.random.key(3)))
    assert (loaded.speed, loaded.half.dtype) == (1.0, jnp.bfloat16)


def test_an_inherited_class_has_a_version_of_its_own(tmp_path):
    new = new_net()

    class Deep(new):
        pass

    pm.save(tmp_path / "deep", Deep(ramp(2), ramp(2), 4))
    assert_same(pm.load(tmp_path / "deep", zeros(Deep)), Deep(ramp(2), ramp(2), 4))
    with pytest.raises(ArgumentError, match="a version before that of Deep, which is 1"):
        pm.migration(Deep, 1)


@pytest.mark.parametrize("strict", [True, False])
def test_without_a_migration_both_numbers_are_named(tmp_path, strict):
    pm.save(tmp_path / "old", {"net": old_net()(ramp(4), 4)})
    text = r"version 2 of Net, got version 1, and no migration from version 1\.\n  at net"
    with pytest.raises(FileError, match=text):
        pm.load(tmp_path / "old", {"net": zeros(new_net())}, strict=strict)


@pytest.mark.parametrize("strict", [True, False])
def test_a_newer_file_is_refused(tmp_path, strict):
    pm.save(tmp_path / "new", zeros(new_net(3)))
    with pytest.raises(FileError, match=r"version 2 of Net, or an older one, got version 3\."):
        pm.load(tmp_path / "new", zeros(new_net(2)), strict=strict)
    pm.save(tmp_path / "new", old_net(file_version=2)(ramp(4), 4))
    with pytest.raises(FileError, match=r"version 1 of Net, or an older one, got version 2\."):
        pm.load(tmp_path / "new", old_net()(ramp(4), 4))


def test_without_like_only_todays_version_is_rebuilt(tmp_path):
    """Nothing describes today's form."""
    name = "test_versions.Net"
    pm.save(tmp_path / "old", {"net": pm.register_for_files(old_net(), name=name)(ramp(4), 4)})
    new = pm.register_for_files(new_net(), name=name + "2")
    pm.save(tmp_path / "new", {"net": zeros(new)})
    assert_same(pm.load(tmp_path / "new"), {"net": zeros(new)})
    # A class with the same name in files, and another version.
    for version, text in ((3, "version 3 of Net, got version 2"), (1, "or an older one, got vers")):
        type.__setattr__(new, "__file_version__", version)
        with pytest.raises(FileError, match=text):
            pm.load(tmp_path / "new")


@pytest.mark.parametrize(
    ("returned", "match"),
    [
        (lambda a, c: None, "two dicts by name: of arrays, and of configuration, got None"),
        (lambda a, c: (a, c, 1), "two dicts by name"),
        (lambda a, c: ({1: ramp(2)}, c), "two dicts by name"),
        (lambda a, c: ({"key": object()}, c), "arrays and Python numbers, got .* at key"),
        (lambda a, c: ({"key": np.array(["a"])}, c), "arrays that a file can hold"),
        (lambda a, c: ({"key": ramp(2)}, {"size": 4}), "value: missing"),
        (lambda a, c: ({"key": ramp(2), "value": ramp(2), "x": ramp(1)}, {"size": 4}), "x: unexp"),
        (lambda a, c: ({"key": ramp(3), "value": ramp(2)}, {"size": 4}), r"key: like has f32\[2\]"),
        (lambda a, c: ({"key": ramp(2), "value": ramp(2)}, {"size": 5}), "size: like has 4, the f"),
    ],
)
def test_what_a_migration_loses_or_invents_is_named(tmp_path, returned, match):
    new = new_net()
    pm.migration(new, 1)(returned)
    pm.save(tmp_path / "old", old_net()(ramp(4), 4))
    before = (tmp_path / "old").read_bytes()
    with pytest.raises((FileError, ArgumentError), match=match):
        pm.load(tmp_path / "old", zeros(new))
    assert (tmp_path / "old").read_bytes() == before


def test_an_exception_of_a_migration_says_where(tmp_path):
    new = new_net()

    @pm.migration(new, 1)
    def migrate(arrays, config):
        return arrays["nothing"], config

    pm.save(tmp_path / "old", {"net": old_net()(ramp(4), 4)})
    with pytest.raises(KeyError, match="nothing") as caught:
        pm.load(tmp_path / "old", {"net": zeros(new)})
    assert "net" in "".join(caught.value.__notes__)


def test_a_class_is_asked_for_a_version_that_it_has():
    new = new_net()
    with pytest.raises(ArgumentError, match="a version before that of Net, which is 2, got 2"):
        pm.migration(new, 2)
    with pytest.raises(ArgumentError, match="a version before that of Net, which is 2, got 0"):
        pm.migration(new, 0)
    with pytest.raises(ArgumentError, match="a Module class, got"):
        pm.migration(dict, 1)
    pm.migration(new, 1)(split)
    # The same function, defined again as in a notebook, replaces it; another one does not.
    pm.migration(new, 1)(split)
    for another in (zeros, lambda arrays, config: (arrays, config)):
        with pytest.raises(ArgumentError, match="one migration from version 1"):
            pm.migration(new, 1)(another)
    for version in (0, 1.5, "2", True):
        with pytest.raises(FieldError, match=r"file_version=\): expected an integer, 1 or"):
            old_net(file_version=version)


def test_names_of_today_may_be_asked_for_after_a_rename(tmp_path):
    """A renamed part is migrated under its new name."""
    new = new_net()
    pm.migration(new, 1)(split)
    pm.save(tmp_path / "old", {"net": old_net()(ramp(4), 4)})
    loaded = pm.load(tmp_path / "old", {"body": zeros(new)}, rename={"net": "body"})
    assert_same(loaded["body"].key, ramp(4)[:2])


def test_threads_migrate_side_by_side(tmp_path):
    new = new_net()
    pm.migration(new, 1)(split)
    pm.save(tmp_path / "old", old_net()(ramp(4), 4))
    found = []
    threads = [
        threading.Thread(target=lambda: found.append(pm.load(tmp_path / "old", zeros(new))))
        for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 8
    assert all(net == found[0] for net in found)


@pytest.mark.parametrize("version", [0, -1, 1.5, "2", None, [2], {"int": "0x2"}, 10**30])
def test_a_version_that_no_writer_wrote_is_refused(version, tmp_path):
    """With `like` as without."""
    name = "test_versions.Odd"
    cls = pm.register_for_files(new_net(), name=name)
    pm.migration(cls, 1)(split)
    tree = {"module": [name, {}, {"key": 1, "value": 2, "size": 4, "<version>": version}]}
    write_described(tmp_path / "file", tree)
    for arguments in ((), (zeros(cls),)):
        with pytest.raises(FileError, match=r"description that|version"):
            pm.load(tmp_path / "file", *arguments)


def test_a_tree_that_is_too_deep_is_refused_as_that(tmp_path):
    """Deeper than JAX's own walk can go, too."""
    tree = ramp(1)
    for _ in range(3000):
        tree = [tree]
    with pytest.raises(FileError, match="less deep than Python's limit"):
        pm.save(tmp_path / "deep", tree)
    pm.save(tmp_path / "flat", ramp(1))
    with pytest.raises(FileError, match="less deep than Python's limit"):
        pm.load(tmp_path / "flat", tree)
    # And nothing is broken by it.
    assert_same(pm.load(tmp_path / "flat", ramp(1)), ramp(1))


def test_a_layer_that_moves_takes_its_configuration_along(tmp_path):
    """If you moved only its arrays, the error explains it."""

    def net(field, **options):
        return type("Net", (pm.Module,), {"__annotations__": {field: object}}, **options)

    pm.save(tmp_path / "old", net("up")(nn.Linear(2, 2, key=jax.random.key(1))))
    new = net("linear", file_version=2)
    like = new(nn.Linear(2, 2, key=jax.random.key(0)))

    def renamed(values):
        return {name.replace("up", "linear"): values[name] for name in values}

    @pm.migration(new, 1)
    def migrate(arrays, config):
        return renamed(arrays), config

    with pytest.raises(FileError, match=r"up\.use_bias: only the file has it") as caught:
        pm.load(tmp_path / "old", like)
    assert 'config["new.in_features"] = config.pop("old.in_features")' in str(caught.value)

    @pm.migration(new, 1)
    def migrate(arrays, config):  # noqa: F811  (as by a cell that is run again)
        return renamed(arrays), renamed(config)

    assert_same(pm.load(tmp_path / "old", like).linear, nn.Linear(2, 2, key=jax.random.key(1)))


def test_loads_do_not_depend_on_each_other(tmp_path):
    """A load caches neither arrays nor migrated trees."""
    new = new_net()
    failing = []

    @pm.migration(new, 1)
    def migrate(arrays, config):
        if failing:
            raise KeyError("nothing")
        return split(arrays, config)

    pm.save(tmp_path / "old", old_net()(ramp(4), 4))
    like = zeros(new)
    first = pm.load(tmp_path / "old", like)
    for i in range(500):
        if i % 100 == 99:
            failing.append(1)
            with pytest.raises(KeyError, match="nothing"):
                pm.load(tmp_path / "old", like)
            failing.clear()
        assert pm.load(tmp_path / "old", like) == first
