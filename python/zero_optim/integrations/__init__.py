"""``ShardedAdamW`` in other people's training loops: one module a client, each of which imports its client.

``clients`` ← ``accelerate`` ← ``transformers``; ``clients`` ← ``lightning``. ``ddp``, for a loop that is written for
``DistributedDataParallel``, needs nothing but torch. Nothing else of zero_optim imports them.
"""
