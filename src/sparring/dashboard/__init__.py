"""The page for people: the report of a run. Reads the store and the summary, writes nothing but its own page."""
