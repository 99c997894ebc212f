"""Sharded optimizers in other libraries' training loops: a module for each such client, which imports it.

``clients`` ← ``accelerate`` ← ``transformers``; ``clients`` ← ``lightning``. ``ddp``, for a loop that is written for
``DistributedDataParallel``, needs nothing but torch. Nothing else of zero_optim imports them.
"""
