"""Locate files that a checkout has and the wheel ships: Compose files, manifests, a Slurm batch script.

A wheel has copies of them in this directory, at the same relative paths (`SHIPPED` in setup.py).
"""

from pathlib import Path


def checkout() -> Path | None:
    """Return the root of the checkout that this tandem runs from; None for an installed wheel."""
    root = Path(__file__).resolve().parents[3]
    return root if (root / "setup.py").is_file() and (root / "compose").is_dir() else None


def root() -> Path:
    """Return the directory that the relative paths of shipped files start from."""
    return checkout() or Path(__file__).resolve().parent
