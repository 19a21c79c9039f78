"""Steps of generation: new tokens in, sampled tokens out. There is one module per implementation; `choose` selects
one."""
