"""Operations whose output rows depend on nothing but their own inputs: `ops` is the door, `path` the protocol."""
