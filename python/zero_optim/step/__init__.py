"""What step() does: exchange, clip, hyper table, update, the shards' state."""
