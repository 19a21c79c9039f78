"""The vendors' APIs, a file each: a dialect translates between its API and a session, and nothing else."""
