"""The place of every parameter: layout, flat parameters, shards."""
