"""From an experiment file to a run folder: load, build, train, evaluate, write."""
