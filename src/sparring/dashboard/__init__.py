"""Report of a run as a web page. It reads the store and the summary, and writes only its own page."""
