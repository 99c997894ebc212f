"""Where every parameter lives: layout, flat parameters, shards."""
