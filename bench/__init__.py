"""Benchmarks and training programs. They use the faces of specmamba as its users do."""
