"""Random programs of two jobs: one trains and saves a checkpoint, and another one loads it, as docs/checkpoint.md says.

``program`` is what a program is, ``generate`` draws them, ``jobs`` makes modules and optimizers of one and says what is
seen of them, and ``law`` what has to be seen, bit for bit. The law knows no bucket, no shard and no file. ``execute``
gives all that to the engine, which is ``programs``.

    cd tests && ../.venv/bin/python -m checkpoint_programs --seconds 600 --seed 0 --out failures.txt
"""
