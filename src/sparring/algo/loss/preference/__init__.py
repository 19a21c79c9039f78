"""Preference term: losses over pairs of replies, or over single replies labelled wanted or unwanted."""
