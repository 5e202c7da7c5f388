"""Kubernetes: render the manifests, and apply, follow, inspect and delete a job with kubectl.

Standard library only. In a checkout the manifests are those of `k8s/`; a wheel has a copy of them.
"""
