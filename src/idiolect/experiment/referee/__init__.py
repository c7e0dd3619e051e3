"""The referee: a method beside the field's baselines on a fixed suite, and its check by others."""
