"""Where the state of shards lives: on the device, in pages that come and go, in host memory, or on a disk."""
