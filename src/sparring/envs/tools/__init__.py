"""Tools that come with Sparring."""
