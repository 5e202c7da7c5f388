"""Simulated nodes as containers on this host: `tandem cluster`, and the make targets compose-up, chaos, ...

It uses only the standard library: it needs Python and a container engine with Compose, but no PyTorch. `make`
runs it with the system's python3.
"""
