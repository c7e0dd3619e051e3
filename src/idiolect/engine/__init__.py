"""The engine: rounds over clients in this process, in blocks, or on a Ray cluster."""
