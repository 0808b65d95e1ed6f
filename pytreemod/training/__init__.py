"""Room `training`: what is trained of a model, and what a training loop holds beside it.

Owns: the optimizer, which is optax's, told by selectors what it is for; other forms of chosen
parameters (low-rank updates, parameters through a function); the constraints that fields are
declared with; in which dtypes a model is kept and computes; the factor on the loss that float16
needs.

May import `transform`, `state` and what is below them, and no optax: whatever has `init` and
`update` will do.

Promises: what is left alone costs no state and never changes; what is to be trained and has no
rule, or no gradient, is told by its path; all is a value, of one structure from step to step. What
is constrained stays inside, whatever is added to what is trained.
"""
