"""Random steps and plans: each equals jax.jit or is refused by name. `python -m tests.fuzz --help`."""
