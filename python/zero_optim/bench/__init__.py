"""``zero-optim bench``: the ops on one device, timed in turns with their baselines."""
