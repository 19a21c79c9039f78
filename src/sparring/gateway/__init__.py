"""Sessions behind the APIs that agent programs speak: exchanges, which are sampled once, and the ways to them."""
