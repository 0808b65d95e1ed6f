"""Room `training`: what a training loop holds beside the model.

Owns: the optimizer, which is optax's, told by selectors what it is for.

May import `transform` and what is below it, and no optax: whatever has `init` and `update` will do.

Promises: what is left alone costs no state and never changes; what is to be trained and has no
rule, or no gradient, is told by its path; all is a value, of one structure from step to step.
"""
