"""Simulated nodes as containers on this host: `tandem cluster`, and the make targets compose-up, chaos...

Standard library only: it needs a container engine with Compose and Python, no PyTorch. `make` calls it with
the system's python3.
"""
