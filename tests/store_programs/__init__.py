"""Random programs against one law: every store of the state gives the bits of ``state_offload=None``.

``python -m store_programs`` runs them. ``generate`` makes a program of a seed, ``execute`` runs it on a rank with one
list of stores, and ``law`` does so with no store and with random ones and compares what was seen.
"""
