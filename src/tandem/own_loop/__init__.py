"""A loop of one's own: `tandem.start()` and what it gives, see `run.Run`."""
