"""What the ranks of a job run."""
