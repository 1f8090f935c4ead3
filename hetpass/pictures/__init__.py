"""Pictures of plain values. matplotlib is needed (`pip install 'hetpass[plot]'`), JAX is not."""
