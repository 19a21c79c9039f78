"""The parts of a run, made and put together: `sparring.run` and the command line start here."""
