"""Facts and a device group in, seconds and bytes out. No JAX."""
