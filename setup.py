"""What pyproject.toml cannot say: README.md with absolute links, and the files that the wheel ships."""

import re
import shutil
import tomllib
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

ROOT = Path(__file__).parent
SHIPPED = ("compose", "k8s", "monitoring/rules.yaml", "slurm/train.sbatch")
"""Files and directories of the checkout that the wheel has too, in tandem/shipped; see also MANIFEST.in."""
NOT_SHIPPED = ("__pycache__", "*.mk", "cluster.py", "schemas", "tandem_k8s", "chart")


class BuildWithShipped(build_py):
    """Copy the shipped files into the package; an editable install uses those of the checkout."""

    def run(self) -> None:
        super().run()
        for name in SHIPPED if not self.editable_mode else ():
            path, copy = ROOT / name, Path(self.build_lib) / "tandem" / "shipped" / name
            if path.is_dir():
                shutil.copytree(path, copy, ignore=shutil.ignore_patterns(*NOT_SHIPPED), dirs_exist_ok=True)
            elif path.is_file():  # the build of the image has only src/
                copy.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(path, copy)


def long_description() -> str:
    """README.md as an index shows it, where a link relative to this repository leads nowhere."""
    repository = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]["urls"]["Repository"]
    text = (ROOT / "README.md").read_text("utf-8")
    kind = {"!": "raw", "": "blob"}  # a picture, a page
    return re.sub(
        r"(!?)(\[[^]]*\]\()(?!https?:|#)", lambda link: f"{link[0]}{repository}/{kind[link[1]]}/main/", text
    )


setup(
    long_description=long_description(),
    long_description_content_type="text/markdown",
    cmdclass={"build_py": BuildWithShipped},
)
