"""Data loading: from a global step to a batch on the device."""
