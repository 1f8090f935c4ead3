"""Models that the benchmarks train, and their published sizes."""
