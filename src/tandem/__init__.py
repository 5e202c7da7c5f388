"""tandem: multi-node PyTorch training that survives, and tells you what it is doing."""

__version__ = "0.1.0"
