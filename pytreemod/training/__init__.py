"""Room `training`: which parameters of a model are trained, and the state of a training loop.

Owns: the optimizer, which applies optax by selector, and other forms of chosen parameters (low-rank
updates, parameters through a function). The constraints of fields, the dtypes of a model's
parameters and computation, and the loss scale for float16 belong here, too.

A story of one file each: `optimizers.py`, and `per_layer.py` for layers that are stacked;
`constraints.py`; `precision_rules.py` and `loss_scaling.py`; `mapped_parameters.py`, on which
`low_rank.py` and `quantization.py` build; `automatic_axes.py` for a mesh with explicit axes.

May import `transform`, `state` and the rooms below them, but not optax: any object with `init` and
`update` is a transformation.

Promises: frozen leaves cost no state and never change. A trained leaf without a rule, or without a
gradient, is an error that names its path. Optimizers are values, of one structure from step to
step. A constrained value stays within its bound, whatever is added to the trained array.
"""
