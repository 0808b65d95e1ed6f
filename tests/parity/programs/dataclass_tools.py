"""Modules as dataclasses: fields, replace, asdict, match, metadata, repr, hash, copy, pickle."""

import copy
import dataclasses
import enum
import pickle

import equinox as eqx
import jax
import jax.numpy as jnp


class Mode(enum.Enum):
    train = "train"
    test = "test"


class Options(eqx.Module):
    rate: float = 0.1
    mode: Mode = eqx.field(static=True, default=Mode.train, metadata={"help": "which mode"})
    tags: tuple[str, ...] = eqx.field(static=True, default=())
    seed: int = eqx.field(static=True, default=0, repr=False)


class Run(eqx.Module):
    options: Options
    weights: dict[str, jax.Array]

    __match_args__ = ("options", "weights")


def kind(value):
    match value:
        case Run(Options(mode=Mode.test), weights={"w": w}):
            return "test", w.shape
        case Run(Options(rate=rate)) if rate > 0.05:
            return "fast", rate
        case Options(rate, Mode.train):
            return "options", rate
        case _:
            return "other"


def main():
    run = Run(Options(tags=("a",)), {"w": jnp.ones(2)})
    test = dataclasses.replace(run, options=dataclasses.replace(run.options, mode=Mode.test))
    help_texts = {f.name: f.metadata.get("help") for f in dataclasses.fields(Options)}
    copies = [pickle.loads(pickle.dumps(run)), copy.copy(run), copy.deepcopy(run)]
    kept = [bool(eqx.tree_equal(c, run)) for c in copies]
    texts = (
        repr(run.options).replace("pytreemod", "equinox"),
        str(Options()),
        f"{Options(0.5)!r:>60}",
    )
    hashed = {Options(): 1, Options(0.2): 2}[Options(0.2)]
    return (
        str(dataclasses.asdict(run)),
        str(dataclasses.astuple(run.options)),
        help_texts,
        kept,
        texts,
        hashed,
        kind(run),
        kind(test),
        kind(run.options),
        kind(3),
        dataclasses.is_dataclass(Run),
    )
