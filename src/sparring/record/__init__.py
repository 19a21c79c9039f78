"""Sessions: the only writer of segments; matching, bridging, the tree, limits."""
