"""Benchmarks that need nothing but the package: ``moe-graphs bench``."""
