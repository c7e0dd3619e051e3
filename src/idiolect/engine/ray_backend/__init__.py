"""Clients spread over the workers of a Ray cluster.

Clients are dealt into as many shards as there are workers, once for a run. A worker holds a shard's
examples and personal state, and runs its clients with the `LocalGroup` of a single process. So the
numbers do not depend on which worker runs a shard, or how often it was lost and run again: only the
order of sums depends on the number of shards.

`worker` (what a Ray actor runs; it does not import Ray), `cluster` (the actors, and their
replacement), `ray_group` (a client group that is run there).
"""
