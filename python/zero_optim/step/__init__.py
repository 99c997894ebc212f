"""The work of step(): exchange, clip, hyper table, update, the shards' state."""
