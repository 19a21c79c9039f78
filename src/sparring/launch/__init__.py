"""Where the parts of a run are made and put together: what `sparring.run` and the command line start from."""
