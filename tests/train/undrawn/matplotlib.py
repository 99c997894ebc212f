"""Stands before matplotlib where a training has nothing to draw: to import that and to draw takes three seconds."""

raise ImportError("there is nothing to draw")
