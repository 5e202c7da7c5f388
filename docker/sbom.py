"""List an image's packages as CycloneDX 1.5 JSON. `make sbom` runs this in the image; no dependencies."""

import json
import subprocess
import sys
from importlib.metadata import distributions
from urllib.parse import quote

LAYOUT = "${Package} ${Version} ${Architecture}\n"


def component(name: str, version: str, purl: str) -> dict[str, str]:
    """One package of the list."""
    return {"type": "library", "name": name, "version": version, "purl": purl}


def components() -> list[dict[str, str]]:
    """Return Python's packages, then Debian's, each sorted by name."""
    python = {(each.metadata["Name"].lower().replace("_", "-"), each.version) for each in distributions()}
    found = [component(name, version, f"pkg:pypi/{name}@{version}") for name, version in sorted(python)]
    listed = subprocess.run(["dpkg-query", "-W", "-f", LAYOUT], capture_output=True, text=True, check=True)
    for name, version, architecture in map(str.split, listed.stdout.splitlines()):
        purl = f"pkg:deb/debian/{name}@{quote(version)}?arch={architecture}"
        found.append(component(name, version, purl))
    return found


if __name__ == "__main__":
    bom = {"bomFormat": "CycloneDX", "specVersion": "1.5", "version": 1, "components": components()}
    json.dump(bom, sys.stdout, indent=1)
    sys.stdout.write("\n")
