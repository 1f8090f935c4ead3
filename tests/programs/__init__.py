"""A zoo of train steps, one module per line of behaviours, that must equal `jax.jit`."""
