"""Tasks: their interface, and the ones that come with tandem."""
