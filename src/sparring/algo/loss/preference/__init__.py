"""The preference term: losses of pairs of replies, or of single replies labelled wanted or unwanted."""
