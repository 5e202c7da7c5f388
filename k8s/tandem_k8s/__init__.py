"""Development tools around the manifests: checks, generated files, a trial cluster. In no image or wheel."""
