"""The engine of random programs: what it takes to run, judge, shorten and print them, whatever they are about.

A *family* of programs is a set of words, and what each word means to an oracle that was written from the documentation.
``family`` is what the engine asks of one, ``world`` what a rank is, ``run`` runs programs on ranks, ``shrink`` makes a
failing program short, and ``search`` draws and runs programs until a time is over.

The families:

=======================  ============================================================================================
``fuzz``                 the whole public face, against ``torch.optim.AdamW``; every store, against no store
``part_programs``        models, parts of them and methods at stage 3, against stage 2 and ``torch.optim.AdamW``
``checkpoint_programs``  jobs that save a checkpoint and others that load it, against docs/checkpoint.md
=======================  ============================================================================================

Tests that play every one of a list of programs write them in the words of the face.

``compare`` finds where two results first differ. A failing program is an expression: give it to ``run.check``, with its
family, to see it again.
"""
