"""What pyproject.toml cannot say: the long description is README.md, its links made absolute."""

import re
import tomllib
from pathlib import Path

from setuptools import setup

ROOT = Path(__file__).parent


def long_description() -> str:
    """README.md as an index shows it, where a link relative to this repository leads nowhere."""
    repository = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]["urls"]["Repository"]
    text = (ROOT / "README.md").read_text("utf-8")
    kind = {"!": "raw", "": "blob"}  # a picture, a page
    return re.sub(
        r"(!?)(\[[^]]*\]\()(?!https?:|#)", lambda link: f"{link[0]}{repository}/{kind[link[1]]}/main/", text
    )


setup(long_description=long_description(), long_description_content_type="text/markdown")
