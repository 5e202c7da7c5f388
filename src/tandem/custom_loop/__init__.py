"""Custom training loops: `tandem.start()` and the `run.Run` that it returns."""
