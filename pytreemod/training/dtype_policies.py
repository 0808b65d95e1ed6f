"""`Precision`: the dtypes of a Module's parameters, computation and outputs.

A value with three names. Because they are names and not dtypes, it can be compared, printed, hashed
and written to a file directly.
"""

from __future__ import annotations

from typing import Any, NoReturn

import jax.numpy as jnp

from pytreemod.errors import ArgumentError, describe
from pytreemod.module.classes import Module
from pytreemod.module.fields import field
from pytreemod.tree.dtypes import available_dtype

_SHORT = {"bf16": "bfloat16", "f16": "float16", "f32": "float32", "f64": "float64"}
_ROLES = ("params", "compute", "output")


def _name_of(where: str, dtype: Any) -> str:
    text = _SHORT.get(dtype, dtype) if isinstance(dtype, str) else dtype
    try:
        # NumPy reads None as float64.
        found = None if text is None else jnp.dtype(text)
    except (TypeError, ValueError):
        found = None
    if found is None or not jnp.issubdtype(found, jnp.floating):
        _refuse(where, dtype)
    return available_dtype(where, dtype if dtype is float else found).name


def _refuse(where: str, got: Any) -> NoReturn:
    raise ArgumentError(
        f"{where}: {describe(got)} is no floating dtype",
        hint='"params=float32,compute=bfloat16,output=float32"',
    )


class Precision(Module):
    """Three dtypes: of the parameters, of the computation, and of the outputs.

    **Form.** Configuration: names of floating dtypes.

    **Make.** `Precision("float32", "bfloat16", "float32")`, or in
    [`with_precision`][pytreemod.with_precision] as a string: `"params=float32,compute=bfloat16"`,
    or one dtype for all three, `"bfloat16"`. Short names are `bf16`, `f16`, `f32` and `f64`.

    Fields:
        params: of the arrays in the model, and so of their gradients
        compute: of these arrays, and of arguments, while a method runs
        output: of the method's results

    Args:
        params: a floating dtype, or its name.
        compute: the same; `params` if None.
        output: the same; `compute` if None.

    Raises:
        ArgumentError: if one is not a floating dtype.

    Examples:
        >>> import pytreemod as pm
        >>> pm.Precision("f32", "bf16")
        Precision(compute='bfloat16', output='bfloat16')

    Source:
        The policies of jmp, https://github.com/google-deepmind/jmp.
    """

    params: str = field(static=True)
    compute: str = field(static=True)
    output: str = field(static=True)

    def __init__(self, params: Any = "float32", compute: Any = None, output: Any = None):
        self.params = _name_of("Precision(params)", params)
        self.compute = self.params if compute is None else _name_of("Precision(compute)", compute)
        self.output = self.compute if output is None else _name_of("Precision(output)", output)


def as_precision(where: str, spec: Any) -> Precision | None:
    """Return a precision from any of its spellings.

    Args:
        where: the name of the argument in errors.
        spec: a `Precision`, a string for one, a dtype, or None for no precision.

    Raises:
        ArgumentError: if it is none of these.

    Examples:
        >>> as_precision("f(spec)", "params=f32,compute=bf16,output=f32")
        Precision(compute='bfloat16', output='float32')
    """
    if spec is None or isinstance(spec, Precision):
        return spec
    if not isinstance(spec, str) or "=" not in spec:
        return Precision(_name_of(where, spec))
    given: dict[str, str] = {}
    for part in spec.split(","):
        role, equals, name = (text.strip() for text in part.partition("="))
        if role not in _ROLES or not equals or role in given:
            _refuse(where, spec)
        given[role] = _name_of(where, name)
    return Precision(**given)
