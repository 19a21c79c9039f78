"""One file per pipeline stage. A stage gets a `Context` and never builds a trainer or an engine itself."""
