"""Random programs that call a model, parts of it and its methods, in any way that docs/zero3.md allows.

``generate.program(seed)`` draws one, and ``str(program)`` is its text, in the words of ``words``. ``execute`` says what
it has to give: what it gives at stage 2, with the same bits where nothing is clipped; and what ``torch.optim.AdamW``
gives with gradients averaged by hand. A program is legal if plain torch runs it in one process.

    cd tests && ../.venv/bin/python -m part_programs --seconds 600 --seed 0 --out failures.txt
"""
