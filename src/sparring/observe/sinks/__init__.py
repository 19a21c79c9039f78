"""Where metrics go. Each sink imports its library when it is used."""
