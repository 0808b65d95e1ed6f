"""A step of the scan of a `Stack`: one layer, which must give back what it takes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pytreemod.errors import StructureError
from pytreemod.module.classes import Module
from pytreemod.module.fields import field
from pytreemod.nn.members.state import Form
from pytreemod.transform.boundary.agreement import Difference, aval_of, differences, may_be_promoted
from pytreemod.transform.boundary.surrounded_calls import with_numbers
from pytreemod.tree.paths import path_text


class Step(Module):
    """A step of the scan: one layer, applied to what the one before it gave."""

    same: dict[str, Any]
    outer: tuple[Any, ...] | None
    title: str
    form: Any = field(static=True)

    def __call__(self, carry: Any, each: Any) -> Any:
        """Apply the layer; `form` is None for one that needs no State."""
        (x, shared), (layer, own, key, extra, number) = carry, each
        if self.outer is not None:
            layer = with_numbers(layer, (*self.outer, number))
        arguments = {**self.same, **extra, **({} if key is None else {"key": key})}
        form: Form | None = self.form
        if form is None:
            return (_as_before(self.title, x, layer(x, **arguments)), shared), own
        state = form.state(own, shared)
        result = layer(x, state, **arguments)
        out, own, shared = form.changed(self.title, result)
        # None says that the layer gave back the State as it was, as in inference mode.
        return (_as_before(self.title, x, out), shared), None if result[1] is state else own


def _as_before(title: str, x: Any, out: Any) -> Any:
    """What a layer returned, refused if the next layer could not take it as this one took x."""
    found = differences(x, out, _agree)
    if not found:
        return out
    raise StructureError(
        title,
        "each layer to give back what it takes",
        f"a change in {len(found)} place{'s' * (len(found) > 1)}",
        places=[f"{path_text(f.path, 'x')}: {' -> '.join(f.texts())}" for f in found],
        hint=_hint(found),
    )


def _agree(before: Any, after: Any) -> bool:
    a, b = aval_of(before), aval_of(after)
    if a.shape != b.shape:
        return False
    # The scan widens a first carry that the layers would widen; it narrows none.
    return a.dtype == b.dtype or may_be_promoted(a, b) not in (None, a.dtype)


def _hint(found: Sequence[Difference]) -> Sequence[str]:
    if all(entry.of_dtypes for entry in found):
        dtype = aval_of(found[0].second).dtype.name
        return ("Start from that dtype, or cast in the layer:", f"stack(x.astype(jnp.{dtype}))")
    return (
        "A layer that changes it stands before or after the others:",
        "nn.Sequential([first, nn.Stack(make_layer, depth), last])",
    )
