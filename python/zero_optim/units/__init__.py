"""Stage 3: which module's parameters are gathered when."""
