"""Stands before TensorBoard where a training's log is not about it: to import that takes half a second a rank."""

raise ImportError("there is nothing to log")
