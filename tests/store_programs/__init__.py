"""Random programs against one law: every store of the state gives the bits of ``state_offload=None``.

``python -m store_programs --help`` runs them; ``generate`` makes a program of a seed, ``execute`` runs it on the ranks with
no store and with random ones and compares what it saw, ``shrink`` makes a failing one small.
"""
