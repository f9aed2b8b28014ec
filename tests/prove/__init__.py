"""The long proofs, whole: soaks, sweeps and benchmarks. Each prints JSON with its seed and commit.

`python -m tests.prove NAME [options]`; `make prove NAME`. Their fixed-seed slices are tests.
"""
