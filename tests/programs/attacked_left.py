import pathlib

print([str(path) for place in ("*/", "run/tandem/") for path in pathlib.Path("/").glob(place + "was-here")])
