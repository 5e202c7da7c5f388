"""Tasks: their interface, and the built-in ones."""
