"""Hand-derived tests of each method; a package, so that test_local.py may exist twice."""
