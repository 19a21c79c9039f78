"""Tool calls as text: the types that a schema allows, parsing of values between tags, and sample arguments."""
