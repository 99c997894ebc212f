"""The life of a gradient: hooks, readiness, rounds, buckets, slots."""
