"""State dicts: of one rank's shards, and of the whole in torch.optim.AdamW's format."""
