"""Random steps and plans, each equal to jax.jit or refused by name: `python -m tests.fuzz -h`."""
