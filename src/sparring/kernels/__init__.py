"""Operations whose output rows depend on nothing but their own inputs. Callers use `ops`; `path` is the protocol of
implementations."""
