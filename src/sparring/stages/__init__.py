"""One file per pipeline stage. A stage is handed a `Context` and never builds a trainer or an engine itself."""
