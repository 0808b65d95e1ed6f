"""How fast pytreemod is, measured beside JAX, Equinox and Flax NNX: see `benchmarks/README.md`."""
