"""Steps of generation: new tokens in, sampled tokens out; a file for each way, `choose` takes one."""
