"""Workloads: what the ranks of a job run."""
