"""Groups -> samples -> batches -> packed tensors. Torch only in `tensors`."""
