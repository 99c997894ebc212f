"""Places for the state of shards: on the device, in pages that come and go, in host memory, or on a disk."""
