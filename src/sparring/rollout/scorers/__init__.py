"""Second passes over whole groups: each is one `Scorer`."""
