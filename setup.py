"""What pyproject.toml cannot say: absolute links in the long description, and files from outside src."""

import re
import tomllib
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

ROOT = Path(__file__).parent
SHIPPED = {
    "k8s": (
        "tandem/kubernetes/manifests",
        ("*.yaml", "base/*", "kinds/*/*", "components/*/*", "overlays/*/*"),
    ),
}
"""{folder of the checkout: (where the wheel has it, its files)}. An editable install reads the checkout."""


def long_description() -> str:
    """README.md as an index shows it, where a link relative to this repository leads nowhere."""
    repository = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]["urls"]["Repository"]
    text = (ROOT / "README.md").read_text("utf-8")
    kind = {"!": "raw", "": "blob"}  # a picture, a page
    return re.sub(
        r"(!?)(\[[^]]*\]\()(?!https?:|#)", lambda link: f"{link[0]}{repository}/{kind[link[1]]}/main/", text
    )


class WithShipped(build_py):
    """Copies the files of SHIPPED into the wheel; of a link, the file that it names."""

    def run(self) -> None:
        super().run()
        if not self.editable_mode:
            for source, target in self._shipped().items():
                self.mkpath(str(Path(target).parent))
                self.copy_file(source, target)

    def get_outputs(self, include_bytecode: bool = True) -> list[str]:
        return [*super().get_outputs(include_bytecode), *self._shipped().values()]

    def _shipped(self) -> dict[str, str]:
        return {
            str(path): str(Path(self.build_lib, inside, path.relative_to(ROOT / folder)))
            for folder, (inside, patterns) in SHIPPED.items()
            for pattern in patterns
            for path in sorted((ROOT / folder).glob(pattern))
            if path.is_file()
        }


setup(
    cmdclass={"build_py": WithShipped},
    long_description=long_description(),
    long_description_content_type="text/markdown",
)
