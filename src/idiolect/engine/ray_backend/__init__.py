"""Clients spread over the workers of a Ray cluster.

Clients are dealt into as many shards as there are workers, once for a run. A worker holds a shard's
examples and personal state, and does its clients' work with the very crews of a single process. So
whichever worker does a shard, and however often it was lost and done again, the numbers are the
same: only the sums' order depends on how many shards there are.

`shards` (who is where, and what is sent there), `worker` (what a Ray actor runs; it knows no Ray),
`cluster` (the actors, found lost and replaced), `remote` (a team whose clients work there).
"""
