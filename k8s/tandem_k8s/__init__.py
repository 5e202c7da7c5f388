"""Tools around the manifests: check, render, apply. Development only; nothing of it is in the image."""
