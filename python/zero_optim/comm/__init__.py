"""Communication between ranks: collectives, groups, buffers, what is on its way."""
