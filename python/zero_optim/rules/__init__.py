"""Update rules: the arithmetic of an optimizer, as data."""
