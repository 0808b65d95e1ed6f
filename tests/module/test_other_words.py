"""Names from other libraries: arguments, members of Modules, names of layers."""

import abc
import dataclasses
import functools as ft
import inspect
import pickle
import pydoc
from collections.abc import Callable
from typing import Any, ClassVar, Generic, TypeVar

import jax
import jax.numpy as jnp
import optax
import pytest

import pytreemod as pm
from pytreemod import nn
from pytreemod.errors import ArgumentError, FieldError, MissingNameError
from pytreemod.module.other_words import OTHER_MEMBERS, OTHER_NAMES, OURS
from tests.goldens import refusals

KEY = jax.random.key(0)
T = TypeVar("T")
ATTENTION = nn.MultiheadAttention(2, 4, key=KEY)


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: nn.Linear(2, 2, bias=False, key=KEY), r"Linear\(bias\): .* use_bias=, got bias="),
        (lambda: nn.Conv2d(2, 2, 3, bias=False, key=KEY), r"Conv2d\(bias\): .* use_bias=, got"),
        (lambda: nn.Linear(2, 2, rngs=KEY), r"Linear\(rngs\): expected key=, got rngs="),
        (lambda: nn.BatchNorm(num_features=3), r"BatchNorm\(num_features\): .* input_size=, got"),
        (lambda: nn.Dropout(rate=0.1), r"Dropout\(rate\): expected p=, got rate="),
        (
            lambda: nn.Dropout(0.5, training=True),
            r"Dropout\(training\): .* inference=, got training=.*\n.*\n *inference=not tr",
        ),
        (lambda: nn.BatchNorm(3, use_running_average=True), r"BatchNorm\(use_.* inference=, got"),
        (
            lambda: nn.MultiheadAttention(2, embed_dim=4, key=KEY),
            r"MultiheadAttention\(embed_dim\): .* query_size=, got",
        ),
        (lambda: nn.Embedding(num_embeddings=3, embedding_dim=2, key=KEY), r"embedding_size"),
        (
            lambda: nn.MultiheadAttention(2, 4, bias=False, key=KEY),
            r"use_query_bias=, use_key_bias=, use_value_bias=, use_output_bias=, got bias=",
        ),
        (lambda: nn.MultiheadAttention(2, 4, batch_first=True, key=KEY), r"leave it out"),
        (lambda: nn.MultiheadAttention(2, in_features=4, key=KEY), r"query_size=, got in_f"),
        (lambda: nn.GRUCell(in_features=2, out_features=3, key=KEY), r"GRUCell.*input_size=, got"),
        (lambda: nn.MLP(2, 2, hidden_size=4, depth=1, key=KEY), r"MLP.* width_size=, got hidden_"),
        (
            lambda: nn.Stack(lambda key: nn.Identity(), num_layers=2, key=KEY),
            r"Stack\(num_layers\): expected depth=, got num_layers=",
        ),
        (lambda: nn.Conv2d(3, filters=4, kernel_size=3, key=KEY), r"out_channels=, got filters="),
        (lambda: nn.Embedding(vocab_size=3, key=KEY), r"num_embeddings=, got vocab_size="),
        (lambda: nn.Dropout(0.5, inplace=True), r"Arrays never change in place"),
        (lambda: nn.Linear(2, 2, device="cpu", key=KEY), r"jax\.device_put\(layer, device\)"),
        (lambda: ATTENTION(jnp.ones((3, 4)), decode=True), r"state=, got decode="),
        (lambda: ATTENTION(jnp.ones((3, 4)), need_weights=True), r"leave it out"),
    ],
)
def test_a_word_of_another_library_is_answered(make, text):
    """With the name here; as a TypeError, which it was."""
    with pytest.raises(ArgumentError, match=text) as caught:
        make()
    assert isinstance(caught.value, TypeError)


def test_what_is_said_here_is_said_by_some_layer():
    """So that no hint names a missing argument."""
    words = set()
    for layer in vars(nn).values():
        if isinstance(layer, type):
            for call in (layer.__init__, layer.__call__):
                words |= {*inspect.signature(call).parameters}

    assert {name for names in OURS.values() for name in names} <= words


class Mixin:
    """A base after `Module`, where Python would look at `Module` first."""

    to = 3

    def eval(self):
        """Give the mixin's answer."""
        return "mixin"

    @property
    def train(self):
        """Fail if there is no `size`, as properties do."""
        return self.size


class Mixed(pm.Module, Mixin):
    """A Module with the mixin behind."""

    size: int = 1

    def upwards(self):
        """Give the method that `super` finds."""
        return super().eval


class Fields(pm.Module, Generic[T]):
    """Fields of these names, with and without defaults."""

    train: bool
    to: T
    init: Callable
    apply: Callable = jnp.sin
    cpu: int = 4


class Own(pm.Module):
    """The same, with an `__init__`."""

    train: Any
    apply: Any

    def __init__(self, train):
        assert not hasattr(self, "train")
        self.train = train
        self.apply = jnp.sin


class Net(pm.Module):
    """A model to test the hints on."""

    head: nn.Linear

    def __call__(self, x):
        """Call the only layer."""
        return self.head(x)


@pytest.mark.parametrize("name", OTHER_MEMBERS)
def test_a_member_of_other_libraries_is_answered(name):
    """In instances and classes, of any style, finished or not; and Python sees that it lacks."""
    for owner in (nn.Linear(None, 2, key=KEY), Net, Net(nn.Linear(2, 2, key=KEY))):
        with pytest.raises(MissingNameError, match=rf"\.{name}: expected an attribute, got a name"):
            getattr(owner, name)
        assert not hasattr(owner, name)
        assert name not in dir(owner)
    assert "OtherMember" not in pydoc.render_doc(Net)


@pytest.mark.parametrize(
    "code", [c for hint in (*OTHER_MEMBERS.values(), *OTHER_NAMES.values()) for c in hint[1:]]
)
def test_the_code_of_each_hint_runs(code, tmp_path, monkeypatch):
    """On a model with the layer that some of them name."""
    monkeypatch.chdir(tmp_path)
    model = Net(nn.Linear(3, 3, key=KEY))
    pm.save("model.safetensors", model)
    opt = pm.Optimizer(optax.sgd(0.1)).init(model)
    space = {
        "pm": pm,
        "nn": nn,
        "jax": jax,
        "jnp": jnp,
        "optax": optax,
        "model": model,
        "x": jnp.ones(3),
        "device": jax.devices()[0],
        "state_dict": pm.to_torch(model),
        "function": lambda layer: layer,
        "loss": lambda model, x, y=0.0: (model(x) - y).sum(),
        "y": jnp.ones(3),
        "opt": opt,
        "grads": model,
        "step": lambda model: model,
        "f": lambda *args: args,
        "g": lambda *args: args,
        "init": 0.0,
        "xs": jnp.ones(3),
        "pred": True,
        "leaves": jax.tree.leaves(model),
        "structure": jax.tree.structure(model),
        "predictions": jnp.ones(3),
        "targets": jnp.ones(3),
        "logits": jnp.ones((2, 3)),
        "labels": jnp.array([0, 2]),
    }
    # There may be no GPU.
    exec(code.replace('"cuda"', '"cpu"'), space)


def test_what_a_class_has_itself_is_found_first():
    """A field, in each style of class, with its default; after trees, copies and pickles."""
    made = Fields(True, 2.0, jnp.tanh)
    assert (made.train, made.to, made.init, made.apply, made.cpu) == (
        True, 2.0, jnp.tanh, jnp.sin, 4,
    )  # fmt: skip
    for same in (jax.tree.map(lambda x: x, made), pickle.loads(pickle.dumps(made)), made.replace()):
        assert same == made
        assert same.init is jnp.tanh
    assert Own(3).replace(train=4).train == 4
    assert "train" in dir(made)


def test_a_base_after_module_is_found():
    """Its methods are bound as trees, its properties fail for themselves, and `super` goes on."""
    made = Mixed(5)
    assert (made.eval(), made.upwards()(), made.train, made.to, Mixed.to) == (
        "mixin", "mixin", 5, 3, 3,
    )  # fmt: skip
    assert type(made.eval) is pm.BoundMethod
    assert {"eval", "train", "to"} <= {*dir(made)} & {*dir(Mixed)}

    class Sizeless(pm.Module, Mixin): ...

    with pytest.raises(AttributeError, match=r"^'Sizeless' object has no attribute 'size'$"):
        Sizeless().train

    @dataclasses.dataclass
    class Plain:
        train: bool = True
        init: Any = dataclasses.field(default_factory=dict)

    class Both(pm.Module, Plain): ...

    assert (Both().train, Both().init, Both(False).train, Both.train) == (True, {}, False, True)


def test_what_is_abstract_stays_so():
    """No name here provides an abstract attribute of a subclass."""

    class Method(abc.ABC):
        @abc.abstractmethod
        def train(self): ...

    class Abstract(pm.Module, Method):
        init: pm.AbstractVar[int]
        to: pm.AbstractClassVar[int]

    class Lacking(Abstract): ...

    class Concrete(Abstract):
        init: int
        to: ClassVar[int] = 1

        def train(self): ...

    with pytest.raises(FieldError, match=r"abstract attributes init, to, train\(\)"):
        Lacking()
    assert Concrete(2).init == 2


def test_what_answers_for_all_names_is_asked():
    """A class's own `__getattr__`, and a cached property."""

    class Answering(pm.Module):
        size: int = 1

        def __getattr__(self, name):
            return f"the {name}"

        @ft.cached_property
        def parameters(self):
            return self.size

    assert (Answering().eval, Answering().parameters) == ("the eval", 1)


@pytest.mark.parametrize("name", OTHER_NAMES)
def test_a_name_that_other_packages_have_is_answered(name):
    """Unless it is here, too; and an import of it fails as any other."""
    for package in (pm, nn):
        if package is pm and name == "Module":
            continue
        text = rf"{package.__name__}\.{name}: expected an attribute, got a name .*\n.*\n"
        with pytest.raises(MissingNameError, match=text):
            getattr(package, name)
        with pytest.raises(ImportError, match=rf"cannot import name '{name}'"):
            exec(f"from {package.__name__} import {name}")


def test_any_other_name_is_told_as_python_tells_it():
    """With the data that Python needs to suggest a similar name."""
    with pytest.raises(
        AttributeError, match=r"^module 'pytreemod.nn' has no attribute 'Liner'$"
    ) as e:
        nn.Liner
    assert (e.value.name, e.value.obj) == ("Liner", nn)


test_refusals = refusals(globals())


def test_a_base_that_comes_after_module_has_the_member():
    """The next class of the order, and no later one, is asked first."""

    class Trained:
        def train(self):
            return "trained"

    class Untrained:
        def train(self):
            return "untrained"

    class Net(pm.Module, Trained, Untrained):
        x: int = 0

    assert Net().train() == "trained"
