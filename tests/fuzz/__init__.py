"""Random programs over the whole public face, against a model that was written from the documentation alone.

``program`` is what a program is, ``law`` which ones are legal, ``oracle`` what they should do, ``script`` their text,
``prelude`` the words of that text, ``generate`` draws programs, ``shrink`` says what is simpler, and ``known`` has some
that once went wrong. ``execute`` gives all that to the engine, which is ``programs``. A program with a store of the
state runs once more without one, and has to give the same bits.

    cd tests && ../.venv/bin/python -m fuzz --seconds 600 --seed 0 --out failures.txt

prints ``fuzz: P programs, F failures``, and writes each failure as an expression to give to ``fuzz.execute.check`` and
as a script that stands alone. Nothing in here has seen the optimizer's code: keep it so. When model and optimizer
differ, read docs/ and decide which is wrong.
"""
