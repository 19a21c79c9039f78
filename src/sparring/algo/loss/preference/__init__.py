"""The preference term: losses of pairs of replies, or of single ones that somebody wanted or did not want."""
