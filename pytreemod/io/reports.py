"""What a load did, for each leaf."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class LoadReport:
    """What [`load`][pytreemod.load] did; the second value of `load(..., strict=False)`.

    Names are those of `like`, such as `layers.2.weight`. Printed, it is a table.

    Fields:
        loaded: leaves that have the file's values now.
        missing: leaves that keep the values of `like`, for the file has none for them.
        unexpected: leaves of the file that are in no place of `like`.
        renamed: pairs of a leaf's name and its name in the file, where these differ.
        reshaped: leaves whose shape in the file is another one: by axes of size 1, or because
            layers are one `Stack` here, and a list there.
        cast: leaves that `cast` has given another dtype.
        configuration: what the file says differently of the model's configuration; `like` is right.

    Examples:
        >>> import jax
        >>> import pytreemod as pm
        >>> model = pm.nn.Linear(3, 4, key=jax.random.key(0))
        >>> pm.save("model.safetensors", model)
        >>> like = {"old": model, "new": model}
        >>> like, report = pm.load("model.safetensors", like, strict=False, rename={"": "old"})
        >>> print(report)
        loaded        2  old.weight, old.bias
        missing       2  new.weight, new.bias
        renamed       2  old.weight (weight), old.bias (bias)
    """

    loaded: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()
    renamed: tuple[tuple[str, str], ...] = ()
    reshaped: tuple[str, ...] = ()
    cast: tuple[str, ...] = ()
    configuration: tuple[str, ...] = ()

    def __str__(self) -> str:
        rows = {
            "loaded": self.loaded,
            "missing": self.missing,
            "unexpected": self.unexpected,
            "renamed": [f"{new} ({old})" for new, old in self.renamed],
            "reshaped": self.reshaped,
            "cast": self.cast,
            "configuration": self.configuration,
        }
        lines = [
            f"{title:<13} {len(names):>{len(str(len(self.loaded)))}}  {', '.join(names)}"
            for title, names in rows.items()
            if names
        ]
        return "\n".join(lines) or "nothing"
