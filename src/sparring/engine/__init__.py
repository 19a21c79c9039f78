"""Native engine: continuous batching over paged KV, on its own thread, with the trainer's own module. Needs torch."""
